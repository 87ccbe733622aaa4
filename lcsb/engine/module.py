"""`EngineModel`: the memory engine as a `torch.nn.Module`, so that transformers' Trainer can train it.

Its parameters are the adapters alone. A forward pass with gradients runs the engine's forward and streamed backward at
once, since the weights of a layer are in memory only then; `loss.backward()` hands the gradients to the parameters:

    loss = sum of target losses / N,     p.grad += g (d loss' / d loss)          N: targets, or num_items_in_batch

Unlike the rest of this package it imports transformers, which a Trainer has in memory anyway.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from bcd_theory.geometry import PROJECTIONS
from lcsb.config import LCSBConfig
from lcsb.engine.architecture import Architecture
from lcsb.engine.engine import Engine, LoRASettings, Residency
from lcsb.engine.mapped import MappedFolder
from lcsb.engine.selection import EngineSelection
from lcsb.engine.states import LayerStates
from lcsb.gguf_files import BUILTIN_MODELS

#: what a Trainer loads between the making of its model and its first step (13 MiB measured)
_TRAINER_BYTES = 16 << 20
_ABSENT = (
    "config",
    "generate",
    "get_input_embeddings",
    "get_output_embeddings",
    "gradient_checkpointing_enable",
)


@dataclass
class EngineOutput(ModelOutput):
    """What a forward pass gives: the loss and, since all logits are never in memory together, nothing else."""

    loss: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"EngineOutput has no {name!r}: the memory engine computes the loss by vocabulary chunks, never all logits"
        )


class EngineModel(nn.Module):
    """LoRA adapters on packed 4-bit weights that stay on disk, trained in a memory budget.

    Args:
        folder: a folder of packed weights (`lcsb convert` writes one), or a built-in name.
        config: backward mode, idle policy, schedule and `ram_budget` (None: everything stays in memory).
        r, alpha: rank and alpha (scale alpha / r) of the adapters.
        target_modules: "all-linear", or names among the seven projections.
        seed: of the adapters' start.
        rows, tokens: the largest batch [rows, tokens] that will be trained, which the budget is planned for; a larger
            one is planned for when it comes. Evaluation takes as many rows at once as fit.
        scratch: folder for temporary files (layer inputs), should the plan need one; None: the system's.
        compute_dtype: of products with the weights: float32, bfloat16, or auto (the faster one on this machine, so that
            numbers may differ from machine to machine).

    Attributes:
        engine: computes losses and gradients.
        plan: what stays in memory and what peak is predicted; None without a budget.
        selection: the `selective_backward` context that is open.

    Raises:
        ValueError: no packed weights there; a projection that does not exist.
        BudgetError: a budget that cannot be met; says the least that could.
    """

    loss_type = "ForCausalLM"  # Trainer: targets are counted as transformers' causal models shift them
    accepts_loss_kwargs = True
    main_input_name = "input_ids"

    def __init__(
        self,
        folder: str | Path,
        config: LCSBConfig | None = None,
        *,
        r: int = 16,
        alpha: float = 32.0,
        target_modules: str | Sequence[str] = "all-linear",
        seed: int = 0,
        rows: int = 1,
        tokens: int = 1,
        scratch: Path | None = None,
        compute_dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.name_or_path, self.lcsb_config = str(folder), config or LCSBConfig()
        self._path, self._scratch = packed_folder(folder), scratch or Path(tempfile.gettempdir())
        self._lora = LoRASettings(r, float(alpha), _projections(target_modules))
        self._floor: int | None = None
        self._knows_trainer = False
        self._planned = (rows, tokens)
        self.plan: Any = None
        self.selection: EngineSelection | None = None
        residency = self._residency()
        self.engine = Engine(
            self._path,
            self.lcsb_config,
            lora=self._lora,
            residency=residency,
            seed=seed,
            compute_dtype=compute_dtype,
        )
        self.engine.states = _AdaptersOnly(self.engine.states)
        self._layers: list[nn.Module] = []
        self.adapters = self._make_parameters()

    # -- parameters ----------------------------------------------------------------------------------------------

    def _make_parameters(self) -> list[dict[str, nn.Parameter]]:
        """One dict a layer, in the order of the engine's flat vectors, whose memory the parameters share."""
        by_layer: list[dict[str, nn.Parameter]] = [{} for _ in self.engine.layers]
        for name, index, view in self.engine._adapter_places():
            name = name.replace(".weight", ".default.weight")
            by_layer[index][name] = nn.Parameter(view)
            _place(self, name, by_layer[index][name])
        stack = self.get_submodule(f"base_model.model.{self.engine.prefix}layers")
        self._layers = list(stack.children())
        return by_layer

    def layers(self) -> list[nn.Module]:
        """The modules that hold each layer's adapters, index 0 nearest to the embedding."""
        return self._layers

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EngineModel:
        made = fn(torch.empty(1))
        if made.device.type != "cpu" or made.dtype != torch.float32:
            raise ValueError(
                f"EngineModel: asked to become {made.dtype} on {made.device}; its adapters stay float32 on the CPU, "
                "where the engine reads them (TrainingArguments(use_cpu=True))"
            )
        return self

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise AttributeError(
                f"EngineModel has no {name!r}: its weights stay on disk and it computes losses only. Train it with "
                "LCSBTrainer, or Trainer and LCSBCallback (TRL's trainers need logits); to generate, load the saved "
                "adapter with PeftModel.from_pretrained"
            )
        return super().__getattr__(name)

    def selective_backward(self, config: LCSBConfig, seed: int = 0, t: int = 0) -> EngineSelection:
        """What `lcsb.selective_backward(model, config)` gives."""
        return EngineSelection(self, config, seed, t)

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Nothing to do: one layer at a time is computed again in every backward pass."""

    # -- the budget ----------------------------------------------------------------------------------------------

    def _residency(self) -> Residency:
        """What may stay in memory, for batches as large as the largest so far.

        Raises:
            BudgetError: they do not fit; says the least budget that would do.
        """
        budget = self.lcsb_config.ram_budget
        if budget is None:
            return Residency()
        from lcsb.engine.planner import plan
        from lcsb.engine.ram import parse_ram, peak_bytes, tame_allocator

        folder = MappedFolder(self._path)
        architecture = Architecture.from_config(folder.config, str(self._path / "config.json"))
        if self._floor is None:
            self._floor, self._knows_trainer = peak_bytes(), "transformers.trainer" in sys.modules
        rows, tokens = self._planned
        self.plan = plan(
            architecture,
            tokens=tokens,
            rows=rows,
            config=self.lcsb_config,
            lora=self._lora,
            ram=parse_ram(budget),
            floor=self._floor + self._beside(architecture),
            folder_bytes=sum(folder.nbytes(name) for name in folder.names()),
            scratch=self._scratch,
            states_in_file=False,
        )
        if self.plan.tame:
            tame_allocator()
        residency: Residency = self.plan.residency
        if residency.folder is not None:
            residency.folder.mkdir(parents=True, exist_ok=True)
        return residency

    def _beside(self, architecture: Architecture) -> int:
        """Bytes that a Trainer holds and the engine by itself does not.

        What its first steps load; under idle momentum the zero gradients of idle layers, and the copies of their
        adapters from which `lcsb/displacement_idle` is logged.
        """
        adapters = 4 * architecture.geometry.lora_parameters(self._lora.r, self._lora.targets)
        return _TRAINER_BYTES + (2 * adapters if self.lcsb_config.idle == "momentum" else 0)

    def refuse_early_floor(self) -> None:
        """Refuse to train in a Trainer that was imported after the budget was planned, and is not part of it.

        Raises:
            ValueError: it was.
        """
        if self._floor is not None and not self._knows_trainer:
            raise ValueError(
                "EngineModel: made before transformers' Trainer was imported, so the budget was planned without it; "
                "import LCSBTrainer first, then make the model"
            )

    def fit(self, rows: int, tokens: int) -> None:
        """Plan again if a batch [rows, tokens] is larger than any so far.

        Raises:
            BudgetError: it does not fit.
        """
        larger = (max(rows, self._planned[0]), max(tokens, self._planned[1]))
        if larger != self._planned:
            self._planned = larger
            self.engine.residency = self._residency()
            for layer in self.engine.layers:
                layer.release()

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> EngineOutput:
        """Loss of a batch; with gradients enabled also the gradients, which `loss.backward()` then gives.

        Args:
            input_ids: int64 [rows, tokens].
            attention_mask: [rows, tokens], 1 for tokens, 0 for padding, which may be on the right only.
            labels: int64 [rows, tokens], -100 where nothing is to be predicted, as it is in the padding. Shifted here.
            position_ids: 0, 1, ... in each row; anything else (packed rows) is refused.
            num_items_in_batch: what the sum of losses is divided by; the batch's own targets if None.
            use_cache, return_dict: taken for convenience; a cache is never used, the output is always an object.

        Returns:
            EngineOutput with `loss` (float32 scalar) alone: no logits.

        Raises:
            ValueError: no labels; padding elsewhere; labels in the padding; an argument that is not computed.
            RuntimeError: gradients are wanted outside `selective_backward` and its `begin()`.
        """
        extra = sorted(name for name, value in others.items() if value is not None)
        if extra:
            raise ValueError(
                f"EngineModel.forward: {extra[0]!r} is not computed by the memory engine, which takes input_ids, "
                "attention_mask and labels and gives the loss alone (TRL's trainers need more; use LCSBTrainer)"
            )
        if labels is None:
            raise ValueError("EngineModel.forward: no labels; the memory engine gives a loss and no logits")
        self._check_batch(input_ids, attention_mask, labels, position_ids)
        if torch.is_grad_enabled():
            return EngineOutput(loss=self._train(input_ids, labels, num_items_in_batch))
        total, targets = self._evaluate(input_ids, labels)
        return EngineOutput(loss=_mean(total, targets, num_items_in_batch))

    def _check_batch(
        self, ids: Tensor, mask: Tensor | None, labels: Tensor, positions: Tensor | None
    ) -> None:
        if ids.dim() != 2 or labels.shape != ids.shape:
            raise ValueError(
                f"EngineModel.forward: input_ids {tuple(ids.shape)} and labels {tuple(labels.shape)}, expected two "
                "equal shapes [rows, tokens]"
            )
        if torch.is_autocast_enabled("cpu"):
            raise ValueError(
                "EngineModel.forward: inside autocast; leave bf16 out (EngineModel(compute_dtype='bfloat16') is there)"
            )
        vocabulary = self.engine.architecture.vocabulary
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(
                f"EngineModel.forward: token ids {int(ids.min())} to {int(ids.max())}, expected 0 to {vocabulary - 1}"
            )
        if positions is not None and not torch.equal(
            positions.expand(ids.shape), torch.arange(ids.shape[1]).expand(ids.shape)
        ):
            raise ValueError(
                "EngineModel.forward: position_ids are not 0, 1, ... in every row; packed rows are not computed "
                "by the memory engine"
            )
        if mask is None:
            return
        if mask.shape != ids.shape:
            raise ValueError(
                f"EngineModel.forward: attention_mask {tuple(mask.shape)}, expected {tuple(ids.shape)}"
            )
        real = mask != 0
        if bool((real[:, 1:] & ~real[:, :-1]).any()):
            raise ValueError(
                "EngineModel.forward: padding on the left or inside a row; the memory engine takes it on the right "
                "only (tokenizer.padding_side = 'right')"
            )
        if bool((labels[~real] != -100).any()):
            raise ValueError("EngineModel.forward: labels in the padding are not -100")

    def _selected(self) -> tuple[int, ...]:
        if self.selection is None:
            if self.lcsb_config.backward == "full":
                return tuple(range(len(self._layers)))
            raise RuntimeError(
                f"EngineModel: a forward pass with gradients in mode {self.lcsb_config.backward!r} outside "
                "selective_backward; use LCSBTrainer, LCSBCallback or `with selective_backward(model, config)`"
            )
        if self.selection.roles is None:
            raise RuntimeError("forward pass with gradients inside selective_backward: call begin() first")
        return self.selection.selected

    def _train(self, ids: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
        selected = self._selected()
        self.fit(*ids.shape)
        found = self.engine.loss_and_gradient(ids, labels, selected=selected)
        loss = _mean(found.loss * found.targets, found.targets, items)
        scale = found.targets / float(found.targets if items is None else items) if found.targets else 0.0
        flats = dict(found.by_layer)
        found.by_layer.clear()

        def gradients(pull: float) -> Iterator[Tensor]:
            for index in selected:
                if index not in flats:  # no target at all
                    yield from (torch.zeros_like(p) for p in self.adapters[index].values())
                    continue
                yield from self.engine.layout.views(flats.pop(index).mul_(pull * scale)).values()

        parameters = [p for index in selected for p in self.adapters[index].values()]
        result: Tensor = _Streamed.apply(loss, gradients, *parameters)
        return result

    def _evaluate(self, ids: Tensor, labels: Tensor) -> tuple[float, int]:
        rows = len(ids)
        if self.lcsb_config.ram_budget is not None:
            self.fit(1, ids.shape[1])
            rows = max(1, self._planned[0] * self._planned[1] // max(1, ids.shape[1]))
        total, targets = 0.0, 0
        for first in range(0, len(ids), rows):
            more, count = self.engine.evaluate(ids[first : first + rows], labels[first : first + rows])
            total, targets = total + more, targets + count
        return total, targets

    # -- adapters in files ---------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the adapter in PEFT's format into `folder`; each file is whole or not there.

        `peft.PeftModel.from_pretrained(base, folder)` reads it in a process that does not have this project.

        Raises:
            OSError: the place cannot be written to.
        """
        from lcsb.adapter_files import write_adapter

        write_adapter(
            Path(folder),
            self.engine.adapter_tensors(),
            r=self._lora.r,
            alpha=self._lora.alpha,
            targets=self._lora.targets,
            base=self.name_or_path,
        )

    def load_adapter(self, folder: str | Path) -> None:
        """Continue from an adapter of the same rank, alpha and projections.

        Raises:
            ValueError: no such adapter there, a damaged one, or one of another model or scale.
        """
        from lcsb.adapter_files import read_settings, read_weights

        weights, held = read_weights(Path(folder)), read_settings(Path(folder))
        if held.get("use_rslora") or held.get("use_dora"):
            raise ValueError(f"{folder}: an rsLoRA or DoRA adapter; the memory engine computes LoRA only")
        found = (held.get("r"), held.get("lora_alpha"))
        if found != (self._lora.r, self._lora.alpha):
            raise ValueError(
                f"{folder}: adapter of r, alpha = {found}, expected {(self._lora.r, self._lora.alpha)}"
            )
        try:
            self.engine.load_adapter_tensors(weights)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None


class _Streamed(torch.autograd.Function):
    """The loss, whose gradients with respect to the parameters are known already and are given once."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: Callable[[float], Iterator[Tensor]], *parameters: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "double backward through the memory engine is not computed; measure curvature on the transformers model"
            )
        if ctx.gradients is None:
            raise RuntimeError(
                "backward: a second time through the same forward pass; the memory engine keeps no graph"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *gradients(float(pull))


class _AdaptersOnly(LayerStates):
    """Adapters of all layers in memory; the moments are with the optimiser of whoever trains."""

    def __init__(self, states: LayerStates) -> None:
        self.layers, self.size, self.file, self._map = states.layers, states.size, None, None
        self.steps = [0] * states.layers
        self._x = torch.stack([states.x(index) for index in range(states.layers)])

    def x(self, layer: int) -> Tensor:
        return self._x[layer]

    def moments(self, layer: int) -> tuple[Tensor, Tensor]:
        raise RuntimeError("the moments of an EngineModel's adapters are with its optimiser")


def _mean(total: float, targets: int, items: Tensor | int | None) -> Tensor:
    count = float(targets if items is None else items)
    return torch.tensor(total / count if count else float("nan"))


def _place(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name, with plain modules on the way to it."""
    *path, last = name.split(".")
    module = root
    for part in path:
        children = dict(module.named_children())
        if part not in children:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)


def _projections(targets: str | Sequence[str]) -> tuple[str, ...]:
    if targets == "all-linear":
        return PROJECTIONS
    names = [targets] if isinstance(targets, str) else list(targets)
    for name in names:
        if name not in PROJECTIONS:
            near = difflib.get_close_matches(name, PROJECTIONS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"target_modules: found {name!r}, expected 'all-linear' or names among {', '.join(PROJECTIONS)}; "
                f"nearest: {near!r}"
            )
    if not names:
        raise ValueError("target_modules: none, expected at least one projection")
    return tuple(name for name in PROJECTIONS if name in names)


_CONVERT = "import sys; from lcsb.models import packed_builtin; print(packed_builtin(sys.argv[1]))"


def packed_folder(model: str | Path) -> Path:
    """The folder of a model's packed weights: itself, or the cache's of a built-in name.

    A built-in model is converted in a process of its own, since that takes more memory than training.

    Raises:
        ValueError: no such folder or name; the conversion failed (its last line).
    """
    if Path(model).is_dir():
        return Path(model)
    if str(model) not in BUILTIN_MODELS:
        raise ValueError(
            f"{model}: no such folder, and no built-in name ({', '.join(BUILTIN_MODELS)}); `lcsb convert` writes a "
            "folder of packed weights from a hub model or a GGUF file"
        )
    done = subprocess.run([sys.executable, "-c", _CONVERT, str(model)], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"{model}: cannot be converted ({reason})")
    return Path(done.stdout.strip().splitlines()[-1])
