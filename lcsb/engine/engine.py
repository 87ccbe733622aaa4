"""`Engine`: one training step of LCSB on packed weights, in a process that never holds more than a layer and a tile.

    forward   no graph; for each layer that backward will visit, what it starts from is kept (its input; in mode mlp
              of an idle layer, the state after attention)
    head      loss and its gradient by vocabulary chunks
    backward  from the top, down to the lowest selected layer: one layer is computed again with a graph, and let go

Roles are those of `lcsb.selective`: selected, exact, identity, mlp, below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from bcd_theory.geometry import PROJECTIONS
from lcsb.config import LCSBConfig
from lcsb.engine.architecture import Architecture
from lcsb.engine.compute import compute_dtype as choose_dtype
from lcsb.engine.head import chunked_cross_entropy, words_per_chunk
from lcsb.engine.inputs import LayerInputs, Placement
from lcsb.engine.layer import AdapterLayout, Layer, Positions, module_of
from lcsb.engine.mapped import MappedFolder
from lcsb.engine.packed import TileBuffer
from lcsb.engine.projections import Adapters, Products
from lcsb.engine.pull import gradient_below
from lcsb.engine.states import AdamWSettings, LayerStates
from lcsb.roles import plan_roles
from lcsb.selective import NonFiniteError, StepRecord


@dataclass(frozen=True)
class Residency:
    """What stays in memory between its uses; everything else is read from, or written to, a file each time.

    Attributes:
        weights: packed weights of all layers.
        head: the embedding matrix.
        states: adapters, m and v.
        inputs: where layer inputs lie between forward and backward.
        products: number of layers, from the top, whose projections' outputs are kept between forward and backward, so
            that backward need not compute them again.
        chunk_logits: numbers held at once by the head: logits (tokens x words), or weights (words x hidden).
        folder: where mapped files are made.
    """

    weights: bool = True
    head: bool = True
    states: bool = True
    inputs: Placement = "memory"
    products: int = 0
    chunk_logits: int = 1 << 22
    folder: Path | None = None


@dataclass(frozen=True)
class LoRASettings:
    """Rank, alpha (scale alpha / r) and adapted projections."""

    r: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = PROJECTIONS

    @property
    def scale(self) -> float:
        """Factor on B A."""
        return self.alpha / self.r


@dataclass
class Gradient:
    """Flat adapter gradients by layer, and the loss they belong to."""

    loss: float
    targets: int
    by_layer: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class _Kept:
    """What the forward pass keeps for backward: layer inputs, and outputs of projections."""

    inputs: LayerInputs
    products: dict[int, Products]


class Engine:
    """LCSB training of LoRA adapters on a folder of NF4 weights.

    Args:
        folder: a model that transformers saved in 4 bits (see `MappedFolder`).
        config: backward mode, idle policy and schedule.
        lora: adapters.
        optimizer: AdamW's settings.
        residency: what stays in memory.
        seed: of the adapters' start and of schedules that draw.
        compute_dtype: of the large products: float32, bfloat16, or auto (bfloat16 where it is measured to be faster;
            then the numbers depend on the machine).
        device: `cpu` or a CUDA device. Weights, adapters and moments stay in main memory in either case.

    Attributes:
        loss: mean loss of the newest step's batch.
        t: steps taken.

    Raises:
        ValueError: a folder, architecture or mode that the engine does not compute.
    """

    def __init__(
        self,
        folder: Path,
        config: LCSBConfig | None = None,
        *,
        lora: LoRASettings | None = None,
        optimizer: AdamWSettings | None = None,
        residency: Residency | None = None,
        seed: int = 0,
        compute_dtype: str = "float32",
        device: str | torch.device = "cpu",
    ) -> None:
        self.config = config or LCSBConfig()
        self.lora, self.optimizer = lora or LoRASettings(), optimizer or AdamWSettings()
        if self.config.backward == "certified" or self.config.schedule in ("importance", "adaptive"):
            raise ValueError(
                f"the engine measures nothing while it trains: found backward {self.config.backward!r} and schedule "
                f"{self.config.schedule!r}, expected other than certified, importance and adaptive"
            )
        if self.config.idle == "momentum" and self.optimizer.eps <= 0:
            raise ValueError(
                f"eps: found {self.optimizer.eps}, idle momentum needs it above 0 (T6: 0/0 otherwise)"
            )
        self.residency = residency or Residency()
        self.folder = MappedFolder(folder)
        self.architecture = Architecture.from_config(self.folder.config, str(Path(folder) / "config.json"))
        self.prefix = "model." if "model.embed_tokens.weight" in self.folder else ""
        arch, self.device = self.architecture, torch.device(device)
        dtype = choose_dtype(compute_dtype, self.device, arch.hidden, arch.intermediate)
        self.buffer = TileBuffer(dtype, self.device)
        self.layers = [Layer(self.folder, arch, i, self.buffer, self.prefix) for i in range(arch.layers)]
        self.embedding_name = f"{self.prefix}embed_tokens.weight"
        self.head_name = self.embedding_name if arch.tied else "lm_head.weight"
        for name in {self.embedding_name, self.head_name}:
            if self.folder.shape(name) != (arch.vocabulary, arch.hidden):
                raise ValueError(
                    f"{folder}: {name} has shape {self.folder.shape(name)}, expected {(arch.vocabulary, arch.hidden)}"
                )
        self.final_norm = self.folder.tensor(f"{self.prefix}norm.weight").float() + arch.norm_offset
        self.final_norm = self.final_norm.to(self.device)
        self.layout = AdapterLayout(arch, self.lora.r, self.lora.targets)
        states_file = None if self.residency.states else self._scratch("states.bin")
        self.states = LayerStates(arch.layers, self.layout.size, states_file)
        self.schedule = self.config.make_schedule(arch.layers, seed)
        self.t = 0
        self._owed = [0] * arch.layers
        self._positions: Positions | None = None
        self._head_buffer = torch.empty(0)
        self._inputs: LayerInputs | None = None
        self._products = torch.empty(0, 0)
        self.loss = float("nan")
        self.draw_adapters(seed)

    def _scratch(self, name: str) -> Path:
        if self.residency.folder is None:
            raise ValueError("residency: states on disk need a folder")
        self.residency.folder.mkdir(parents=True, exist_ok=True)
        return self.residency.folder / name

    @torch.no_grad()
    def draw_adapters(self, seed: int) -> None:
        """LoRA's start: A uniform as `torch.nn.Linear` draws it, B zero; m = v = 0."""
        generator = torch.Generator().manual_seed(seed)
        for index in range(self.architecture.layers):
            x = self.states.x(index)
            x.zero_()
            for name, view in self.layout.views(x).items():
                if name.endswith(".a"):
                    view.uniform_(-1, 1, generator=generator).mul_(view.shape[1] ** -0.5)
            for moment in self.states.moments(index):
                moment.zero_()
            self.states.steps[index] = 0
            self._let_go(index)

    # -- forward -------------------------------------------------------------------------------------------------

    def _embed(self, ids: Tensor) -> Tensor:
        words = ids.reshape(-1).cpu()
        if self.residency.head:
            rows = torch.nn.functional.embedding(words, self.folder.tensor(self.embedding_name))
        else:
            rows = self.folder.gather(self.embedding_name, words)
        return rows.float().to(self.device) * self.architecture.embedding_scale

    def _adapters(self, index: int, gradient: Tensor | None = None) -> Adapters:
        owed, self._owed[index] = self._owed[index], 0
        self.states.idle_steps(index, owed, self.optimizer)
        views = None if gradient is None else self.layout.views(gradient)
        x = self.states.x(index).to(self.device, non_blocking=True)
        return Adapters(self.layout.views(x), self.lora.scale, views)

    def _let_go(self, index: int) -> None:
        if not self.residency.weights:
            self.layers[index].release()
        if not self.residency.states:
            self.states.release(index)

    def _forward(self, ids: Tensor, roles: Sequence[str] | None = None, kept: _Kept | None = None) -> Tensor:
        rows, tokens = ids.shape
        if self._positions is None or (self._positions.rows, self._positions.tokens) != (rows, tokens):
            self._positions = Positions(rows, tokens, self.architecture.head_dim, self.device)
        hidden = self._embed(ids)
        for index, layer in enumerate(self.layers):
            role = roles[index] if roles else "below"
            adapters = self._adapters(index)
            products = kept.products.get(index) if kept else None
            if kept and role in ("selected", "exact"):
                kept.inputs.put(index, hidden)
            attention = layer.attention(
                hidden, adapters, self._positions, None if role == "mlp" else products
            )
            hidden = hidden + attention
            if kept and role == "mlp":
                kept.inputs.put(index, hidden)
            hidden = hidden + layer.mlp(hidden, adapters, products)
            self._let_go(index)
        return hidden

    def _head_rows(self, first: int, last: int) -> Tensor:
        weight = self.folder.tensor(self.head_name)[first:last]
        if weight.dtype == torch.float32 and self.device.type == "cpu":
            return weight
        if self._head_buffer.numel() < weight.numel():
            self._head_buffer = torch.empty(weight.numel(), device=self.device)
        return self._head_buffer[: weight.numel()].view(weight.shape).copy_(weight)

    def _loss(self, hidden: Tensor, labels: Tensor, gradient: bool) -> tuple[float, int, Tensor | None]:
        """Sum of target losses, number of targets, and d mean / d hidden (zero where there is no target)."""
        labels = labels.to(self.device)
        following = torch.full_like(labels, -100)
        following[:, :-1] = labels[:, 1:]
        following = following.reshape(-1)
        where = (following != -100).nonzero().squeeze(1)
        if not len(where):
            return 0.0, 0, None
        arch = self.architecture
        x = hidden[where].detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            normed = torch.nn.functional.rms_norm(x, (arch.hidden,), self.final_norm, arch.eps)
        words = words_per_chunk(max(len(where), arch.hidden), arch.vocabulary, self.residency.chunk_logits)
        done = 0

        def rows(first: int, last: int) -> Tensor:
            nonlocal done
            if not self.residency.head and first:
                self.folder.release(self.head_name, done / arch.vocabulary, first / arch.vocabulary)
                done = first
            return self._head_rows(first, last)

        total, pull = chunked_cross_entropy(
            normed.detach(), following[where], arch.vocabulary, rows, words, gradient
        )
        if not self.residency.head:
            self.folder.release(self.head_name)
        if pull is None:
            return float(total), len(where), None
        inner = gradient_below(normed, x, pull / len(where))
        if len(where) == len(following):
            return float(total), len(where), inner
        return float(total), len(where), torch.zeros_like(hidden).index_copy_(0, where, inner)

    @torch.no_grad()
    def evaluate(self, ids: Tensor, labels: Tensor | None = None) -> tuple[float, int]:
        """Sum of target losses in nats and number of targets of a batch [rows, tokens]; padding only on the right."""
        total, count, _ = self._loss(self._forward(ids), ids if labels is None else labels, False)
        return total, count

    # -- backward ------------------------------------------------------------------------------------------------

    def loss_and_gradient(
        self, ids: Tensor, labels: Tensor | None = None, *, selected: Sequence[int] | None = None
    ) -> Gradient:
        """Mean loss over the targets, and flat adapter gradients of the selected layers.

        Args:
            ids: int64 [rows, tokens], padding only on the right.
            labels: int64 [rows, tokens], -100 where nothing is to be predicted; defaults to `ids`.
            selected: selected layers; defaults to those of step t.
        """
        chosen = self.schedule.selected(self.t) if selected is None else tuple(selected)
        roles = plan_roles(self.config.backward, chosen, len(self.layers))
        kept = self._to_keep(roles, ids.numel())
        with torch.no_grad():
            hidden = self._forward(ids, roles, kept)
        total, count, grad = self._loss(hidden, ids if labels is None else labels, True)
        del hidden
        result = Gradient(total / max(count, 1), count)
        if grad is None:
            return result
        for index in range(len(self.layers) - 1, min(chosen) - 1, -1):
            if roles[index] != "identity":
                grad = self._backward(index, roles[index], kept, grad, result)
        return result

    def _to_keep(self, roles: Sequence[str], tokens: int) -> _Kept:
        """Room for what backward wants, in memory that every step uses again."""
        visited = [i for i, role in enumerate(roles) if role in ("selected", "exact", "mlp")]
        residency, layers = self.residency, len(self.layers)
        numbers = tokens * self.architecture.hidden
        if self._inputs is None or self._inputs.numbers < numbers:
            self._inputs = None  # let go before the new one is made
            self._inputs = LayerInputs(residency.inputs, layers, numbers, residency.folder, self.device)
        self._inputs.clear()
        each = tokens * self.layers[0].product_numbers
        if self._products.shape[1] < each:
            self._products = torch.empty(0, 0)
            self._products = torch.empty(min(residency.products, layers), each, device=self.device)
        places: dict[int, Tensor] = dict(zip(reversed(visited), self._products, strict=False))
        return _Kept(self._inputs, {i: self.layers[i].products(places.get(i)) for i in visited})

    def _backward(self, index: int, role: str, kept: _Kept, grad: Tensor, result: Gradient) -> Tensor:
        """The gradient below a layer, h' = h + attention(h), h'' = h' + mlp(h'), from that above it."""
        layer, products = self.layers[index], kept.products[index]
        if role == "selected":
            result.by_layer[index] = torch.zeros(self.layout.size, device=self.device)
        adapters = self._adapters(index, result.by_layer.get(index))
        middle = start = kept.inputs.take(index).to(self.device).detach().requires_grad_()
        with torch.enable_grad():
            if role != "mlp":
                assert self._positions is not None
                attention = layer.attention(start, adapters, self._positions, products)
                middle = (start.detach() + attention.detach()).requires_grad_()
            mlp = layer.mlp(middle, adapters, products)
        grad = gradient_below(mlp, middle, grad).add_(grad)
        del mlp
        if role != "mlp":
            grad = gradient_below(attention, start, grad).add_(grad)
        self._let_go(index)
        return grad

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self, ids: Tensor, labels: Tensor | None = None, max_norm: float | None = None) -> StepRecord:
        """Forward, selective backward, clip, AdamW with the idle policy, advance; `loss` is then this batch's.

        Raises:
            NonFiniteError: loss or gradient is not finite and `on_nonfinite` is `stop`; nothing was changed.
        """
        return self.take_step(self.loss_and_gradient(ids, labels), max_norm)

    def take_step(self, found: Gradient, max_norm: float | None = None) -> StepRecord:
        """The step by a gradient of the selected layers of step t, which is used up; raises as `step`."""
        selected = self.schedule.selected(self.t)
        block = self.schedule.block_index(self.t)
        self.loss = found.loss
        if not found.targets:
            return StepRecord(self.t, block, selected, 0.0, taken=False)
        norm = float(torch.stack([g.double().norm() for g in found.by_layer.values()]).norm())
        if not torch.isfinite(torch.tensor([norm, found.loss])).all():
            if self.config.on_nonfinite == "stop":
                bad = [i for i, g in found.by_layer.items() if not bool(torch.isfinite(g).all())]
                where = f"layer {bad[0]}" if bad else "the loss"
                raise NonFiniteError(f"step {self.t}: not finite in {where}; the step was not taken")
            return StepRecord(self.t, block, selected, norm, taken=False)
        for index in range(len(self.layers)):
            if index in found.by_layer:
                gradient = found.by_layer.pop(index)
                if max_norm is not None:
                    gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
                self._adapters(index)
                self.states.step(index, gradient.to("cpu"), self.optimizer)
                self._let_go(index)
            elif self.config.idle == "momentum":
                self._owed[index] += 1
        record = StepRecord(self.t, block, selected, norm, taken=True)
        self.t += 1
        return record

    def settle(self) -> None:
        """Take every idle step that is still owed, so that `states` is what AdamW would hold."""
        for index in range(len(self.layers)):
            self._adapters(index)
            self._let_go(index)

    # -- adapters ------------------------------------------------------------------------------------------------

    def _adapter_places(self) -> Iterator[tuple[str, int, Tensor]]:
        """(name as PEFT saves it, layer, view of the states) of every LoRA matrix."""
        for index in range(len(self.layers)):
            for name, view in self.layout.views(self.states.x(index)).items():
                projection, part = name.split(".")
                module = f"{self.prefix}layers.{index}.{module_of(projection)}.{projection}"
                yield f"base_model.model.{module}.lora_{part.upper()}.weight", index, view

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Adapters under the names that PEFT saves them by, as copies."""
        self.settle()
        return {name: view.clone() for name, _, view in self._adapter_places()}

    def load_adapter_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `adapter_tensors`; moments are left alone.

        Raises:
            ValueError: a tensor is missing, of another shape or left over; names it.
        """
        left = dict(tensors)
        for name, _, view in self._adapter_places():
            if name not in left:
                raise ValueError(f"adapter: no tensor {name!r} in it")
            given = left.pop(name)
            if given.shape != view.shape:
                raise ValueError(
                    f"adapter: {name} has shape {tuple(given.shape)}, expected {tuple(view.shape)}"
                )
            view.copy_(given)
        if left:
            raise ValueError(f"adapter: {next(iter(left))!r} belongs to no layer of this model")
