"""Residual nets with LoRA adapters on frozen weights, in every backward mode (theory "What one LCSB step is", T7, T11).

h_{l+1} = h_l + F_l(h_l) with one branch a layer (tanh), or a = h + Attn(h), h' = a + MLP(a) with two. Every linear map
is W + s B A: W frozen, x holds A (rank x inputs) then B (outputs x rank) of every map, row-major, layer by layer. Many
nets of one shape ("instances") run side by side: the columns of x are instance-major, `runs / instances` each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bcd_theory.cost import GRADES, choose
from bcd_theory.partition import Partition, contiguous_blocks
from bcd_theory.quantization import round_trip
from simulations.problems.branches import Attention, Branch, SwiGLU, Tanh

Array = NDArray[np.float64]
Roles = Sequence[str | None]
MODES = ("full", *GRADES, "certified")


@dataclass
class ResidualNet:
    """The loss of `layers` residual layers as a function of all adapters; a `Problem`.

    branches    of one layer, the MLP last
    weights     [layer][map] frozen W, (instances, outputs, inputs)
    inputs      h_0, (instances, positions, width)
    targets     (instances, positions, width) for squared loss, integer (instances, positions) for cross-entropy
    readout     frozen head (instances, classes, width) of cross-entropy, else None
    rank, scale of the adapters; layers_per_step: k, blocks are contiguous
    mode        what an idle layer above the lowest selected one does: exact, identity, mlp; `certified` reads `plans`;
                `full` is exact with every layer selected at each step
    plans       selected layers -> a grade for each layer (None where it is not read)
    bfloat16    (instances,) of bool: round every gradient that leaves a branch, and the adapters', to bfloat16

    The loss is the mean over positions of |h_N - target|^2/2, or of the cross-entropy. A step that selects every layer
    reads the true gradient in any mode.
    """

    branches: tuple[Branch, ...]
    weights: list[list[Tensor]]
    inputs: Tensor
    targets: Tensor
    readout: Tensor | None
    rank: int
    scale: float
    layers_per_step: int
    mode: str = "exact"
    plans: Mapping[tuple[int, ...], Roles] = field(default_factory=dict)
    bfloat16: Tensor | None = None
    minimum: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        choose(self.mode, MODES, "backward mode")
        if self.mode == "mlp" and len(self.branches) < 2:
            raise ValueError(
                "mode 'mlp' needs layers of two branches (attention, MLP), found one branch a layer"
            )
        self.shapes = [shape for branch in self.branches for shape in branch.shapes]
        if any(len(layer) != len(self.shapes) for layer in self.weights):
            raise ValueError(f"weights: expected {len(self.shapes)} maps a layer")
        self.layer_size = sum(self.rank * (outputs + inputs) for outputs, inputs in self.shapes)
        self.layers, self.instances = len(self.weights), len(self.inputs)
        self.partition = Partition(
            [
                range(block[0] * self.layer_size, (block[-1] + 1) * self.layer_size)
                for block in contiguous_blocks(self.layers, self.layers_per_step)
            ]
        )
        self._expanded: dict[
            int, tuple[list[list[Tensor]], Tensor, Tensor, Tensor | None, Tensor | None]
        ] = {}

    # -- the Problem ---------------------------------------------------------------------------------------------

    def value(self, x: Tensor) -> Tensor:
        _, _, targets, readout, _ = self._frozen(x.shape[1])
        return _loss(self.outputs(x), targets, readout)

    def outputs(self, x: Tensor) -> Tensor:
        """h_N, (runs, positions, width)."""
        h = self._frozen(x.shape[1])[1]
        for layer in range(self.layers):
            for branch, weights, _ in self._parts(x, layer):
                h = h + branch.forward(h, weights)[0]
        return h

    def gradient(self, x: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        """What a step reads that selects the layers which `rows` lie in."""
        indices = torch.arange(self.partition.n)[rows]
        owner = torch.div(indices, self.layer_size, rounding_mode="floor")
        selected, position = torch.unique(owner, return_inverse=True)
        found = self.backward(x, self.roles(selected.tolist())).adapters
        if len(indices) == len(found):
            return found
        return found[position * self.layer_size + indices % self.layer_size]

    def block_gradients(self, x: Tensor) -> Tensor:
        """(n, runs): each block's rows as a step reads them that selects this block alone."""
        return torch.cat([self.gradient(x, slice(b[0], b[-1] + 1)) for b in self.partition])

    # -- roles and backward --------------------------------------------------------------------------------------

    def roles(self, selected: Sequence[int]) -> tuple[str, ...]:
        """The role of each layer when these are selected: `selected`, a grade above the lowest of them, `below`."""
        chosen, lowest = set(selected), min(selected)
        plan: Roles = ["exact" if self.mode == "full" else self.mode] * self.layers
        if self.mode == "certified" and len(chosen) < self.layers:
            key = tuple(sorted(chosen))
            if key not in self.plans:
                raise ValueError(f"mode 'certified' has no plan for the layers {list(key)}; plan first")
            plan = self.plans[key]
        return tuple(
            "selected" if i in chosen else "below" if i < lowest else choose(str(plan[i]), GRADES, "grade")
            for i in range(self.layers)
        )

    def backward(self, x: Tensor, roles: Sequence[str]) -> Backward:
        """One backward pass in the roles given, one a layer: `selected`, a grade (idle), or `below`."""
        _, inputs, targets, readout, rounded = self._frozen(x.shape[1])
        h, tape = inputs, []
        for layer, role in enumerate(roles):
            passed_by = []
            for number, (branch, weights, pairs) in enumerate(self._parts(x, layer)):
                change, saved = branch.forward(h, weights)
                h = h + change
                if role in ("selected", "exact") or (role == "mlp" and number == len(self.branches) - 1):
                    passed_by.append((branch, weights, pairs, saved))
            if role != "below":
                tape.append((layer, role == "selected", passed_by))
        g = _rounded(_loss_gradient(h, targets, readout), rounded)
        hidden = {self.layers: g}
        adapters: dict[int, list[Tensor]] = {}
        for layer, selected, passed_by in reversed(tape):
            mine: list[Tensor] = []
            for branch, weights, pairs, saved in reversed(passed_by):
                passed = branch.backward(g, weights, saved, selected)
                if passed.weights is not None:
                    factors = [
                        _factors(w, a, b, self.scale) for w, (a, b) in zip(passed.weights, pairs, strict=True)
                    ]
                    mine = [part for pair in factors for part in pair] + mine
                g = _rounded(g + passed.hidden, rounded)
            hidden[layer] = g
            if selected:
                adapters[layer] = mine
        parts = [part for layer in sorted(adapters) for part in adapters[layer]]
        joined = (
            torch.cat([part.reshape(x.shape[1], -1) for part in parts], 1)
            if parts
            else x.new_zeros(x.shape[1], 0)
        )
        return Backward(hidden, _rounded(joined, rounded).T)

    # -- parts ---------------------------------------------------------------------------------------------------

    def factors(self, x: Tensor, layer: int) -> list[tuple[Tensor, Tensor]]:
        """(A, B) of each map of a layer, (runs, rank, inputs) and (runs, outputs, rank)."""
        flat = x[layer * self.layer_size : (layer + 1) * self.layer_size].T
        pairs, at = [], 0
        for outputs, inputs in self.shapes:
            a, b = self.rank * inputs, outputs * self.rank
            pairs.append(
                (
                    flat[:, at : at + a].reshape(-1, self.rank, inputs),
                    flat[:, at + a : at + a + b].reshape(-1, outputs, self.rank),
                )
            )
            at += a + b
        return pairs

    def merged(self, x: Tensor, layer: int) -> list[Tensor]:
        """W + s B A of each map of a layer, (runs, outputs, inputs)."""
        return self._merged(self.factors(x, layer), x.shape[1], layer)

    def _merged(self, pairs: list[tuple[Tensor, Tensor]], runs: int, layer: int) -> list[Tensor]:
        frozen = self._frozen(runs)[0][layer]
        return [torch.baddbmm(w, b, a, alpha=self.scale) for w, (a, b) in zip(frozen, pairs, strict=True)]

    def _parts(self, x: Tensor, layer: int) -> list[tuple[Branch, list[Tensor], list[tuple[Tensor, Tensor]]]]:
        pairs = self.factors(x, layer)
        weights, at, parts = self._merged(pairs, x.shape[1], layer), 0, []
        for branch in self.branches:
            end = at + len(branch.shapes)
            parts.append((branch, weights[at:end], pairs[at:end]))
            at = end
        return parts

    def _frozen(self, runs: int) -> tuple[list[list[Tensor]], Tensor, Tensor, Tensor | None, Tensor | None]:
        if runs not in self._expanded:
            if runs % self.instances:
                raise ValueError(f"{runs} runs, expected a multiple of the {self.instances} instances")
            times = runs // self.instances
            self._expanded = {  # one entry: a runner's width does not change
                runs: (
                    [[w.repeat_interleave(times, 0) for w in layer] for layer in self.weights],
                    self.inputs.repeat_interleave(times, 0),
                    self.targets.repeat_interleave(times, 0),
                    None if self.readout is None else self.readout.repeat_interleave(times, 0),
                    None if self.bfloat16 is None else self.bfloat16.repeat_interleave(times)[:, None, None],
                )
            }
        return self._expanded[runs]

    # -- variants ------------------------------------------------------------------------------------------------

    def with_mode(self, mode: str, plans: Mapping[tuple[int, ...], Roles] | None = None) -> ResidualNet:
        """The same net in another backward mode."""
        return replace(self, mode=mode, plans=plans or {})

    def quantised(self) -> ResidualNet:
        """The same net on NF4 weights: every frozen matrix (not the head) quantised and dequantised."""
        rounded = [
            [torch.stack([torch.from_numpy(round_trip(w.numpy())) for w in stack]) for stack in layer]
            for layer in self.weights
        ]
        return replace(self, weights=rounded)

    def instance(self, i: int) -> ResidualNet:
        """Instance i alone."""
        one = slice(i, i + 1)
        return replace(
            self,
            weights=[[w[one] for w in layer] for layer in self.weights],
            inputs=self.inputs[one],
            targets=self.targets[one],
            readout=None if self.readout is None else self.readout[one],
            bfloat16=None if self.bfloat16 is None else self.bfloat16[one],
        )

    def start(self, seeds: Sequence[int]) -> Array:
        """LoRA's start, (n, len(seeds)): A Gaussian of variance 1/inputs, B = 0."""
        columns = []
        for seed in seeds:
            rng = np.random.default_rng([seed, 101])
            parts: list[Array] = []
            for _ in range(self.layers):
                for outputs, inputs in self.shapes:
                    parts.append(rng.normal(size=self.rank * inputs) / np.sqrt(inputs))
                    parts.append(np.zeros(outputs * self.rank))
            columns.append(np.concatenate(parts))
        return np.stack(columns, axis=1)


def stack(nets: Sequence[ResidualNet], bfloat16: Sequence[bool] | None = None) -> ResidualNet:
    """Nets of one shape side by side, instances in the order given. bfloat16: one flag a net."""
    first = nets[0]
    if any(net.shapes != first.shapes or net.layers != first.layers for net in nets):
        raise ValueError("stack: expected nets of one shape")
    flags = None
    if bfloat16 is not None:
        flags = torch.tensor(
            [flag for net, flag in zip(nets, bfloat16, strict=True) for _ in range(net.instances)]
        )
    return replace(
        first,
        weights=[
            [torch.cat([net.weights[layer][k] for net in nets]) for k in range(len(first.shapes))]
            for layer in range(first.layers)
        ],
        inputs=torch.cat([net.inputs for net in nets]),
        targets=torch.cat([net.targets for net in nets]),
        readout=None
        if first.readout is None
        else torch.cat([n.readout for n in nets if n.readout is not None]),
        bfloat16=flags,
    )


@dataclass(frozen=True)
class Backward:
    """hidden: layer -> gradient that enters it from above at its input (N: at the top), (runs, positions, width), for
    the layers that backward reached. adapters: (rows of the selected layers, runs)."""

    hidden: dict[int, Tensor]
    adapters: Tensor


def cosines(found: Tensor, true: Tensor, layers: int) -> tuple[Tensor, Tensor]:
    """(cosine, rho) of the adapter gradients by selected layer, (layers, runs); NaN where the truth is zero."""
    f, t = (each.reshape(layers, -1, each.shape[1]) for each in (found, true))
    norms = f.norm(dim=1), t.norm(dim=1)
    return (f * t).sum(1) / (norms[0] * norms[1]), norms[0] / norms[1]


def _factors(by_weight: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return scale * torch.bmm(b.transpose(1, 2), by_weight), scale * torch.bmm(by_weight, a.transpose(1, 2))


def _rounded(g: Tensor, where: Tensor | None) -> Tensor:
    if where is None:
        return g
    return torch.where(where if g.ndim == 3 else where[:, :, 0], g.to(torch.bfloat16).to(g.dtype), g)


def _loss(h: Tensor, targets: Tensor, readout: Tensor | None) -> Tensor:
    if readout is None:
        return 0.5 * (h - targets).square().sum(-1).mean(-1)
    logits = torch.bmm(h, readout.transpose(1, 2))
    chosen = logits.gather(-1, targets[..., None])[..., 0]
    return (torch.logsumexp(logits, -1) - chosen).mean(-1)


def _loss_gradient(h: Tensor, targets: Tensor, readout: Tensor | None) -> Tensor:
    if readout is None:
        return (h - targets) / h.shape[1]
    chances = torch.softmax(torch.bmm(h, readout.transpose(1, 2)), -1)
    chances.scatter_add_(-1, targets[..., None], -torch.ones_like(chances[..., :1]))
    return torch.bmm(chances, readout) / h.shape[1]


# --- nets -------------------------------------------------------------------------------------------------------


def _stack(parts: list[Array]) -> Tensor:
    return torch.from_numpy(np.stack(parts))


def tanh_net(
    rngs: Sequence[np.random.Generator],
    *,
    layers: int = 8,
    width: int = 8,
    inner: int = 8,
    positions: int = 16,
    rank: int = 2,
    branch_norm: float = 0.5,
    layers_per_step: int = 2,
    shift: float = 0.3,
    mode: str = "exact",
    data: Sequence[np.random.Generator] | None = None,
) -> ResidualNet:
    """Squared loss against a teacher: the same net whose maps are moved by `shift` of their norm, full rank.

    W and V have spectral norm sqrt(branch_norm) each, so a frozen layer's branch has Lipschitz constant `branch_norm`
    at most. The student's low-rank adapters cannot reach the teacher in general. One instance a generator;
    `data` draws the batch where another one for the same nets is wanted.
    """
    branch = Tanh(width, inner)
    return _build(
        rngs,
        (branch,),
        layers,
        width,
        positions,
        rank,
        layers_per_step,
        shift,
        mode,
        branch_norm**0.5,
        None,
        data,
    )


def swiglu_net(
    rngs: Sequence[np.random.Generator],
    *,
    layers: int = 6,
    width: int = 8,
    inner: int = 12,
    windows: int = 4,
    tokens: int = 6,
    classes: int = 8,
    rank: int = 2,
    weight_norm: float = 1.5,
    layers_per_step: int = 2,
    shift: float = 0.5,
    mode: str = "exact",
    data: Sequence[np.random.Generator] | None = None,
) -> ResidualNet:
    """Transformer layers (RMS norm, causal attention, SwiGLU MLP), cross-entropy against labels drawn from a teacher.

    Every map has spectral norm `weight_norm`. The teacher is the same net moved by `shift` of each map's norm.
    """
    branches = (Attention(width, tokens), SwiGLU(width, inner))
    return _build(
        rngs,
        branches,
        layers,
        width,
        windows * tokens,
        rank,
        layers_per_step,
        shift,
        mode,
        weight_norm,
        classes,
        data,
    )


def _build(
    rngs: Sequence[np.random.Generator],
    branches: tuple[Branch, ...],
    layers: int,
    width: int,
    positions: int,
    rank: int,
    layers_per_step: int,
    shift: float,
    mode: str,
    norm: float,
    classes: int | None,
    data: Sequence[np.random.Generator] | None,
) -> ResidualNet:
    shapes = [shape for branch in branches for shape in branch.shapes]
    weights: list[list[list[Array]]] = [[[] for _ in shapes] for _ in range(layers)]
    moved: list[list[list[Array]]] = [[[] for _ in shapes] for _ in range(layers)]
    heads: list[Array] = []
    for rng in rngs:
        for layer in range(layers):
            for number, shape in enumerate(shapes):
                w, e = rng.normal(size=shape), rng.normal(size=shape)
                w *= norm / np.linalg.norm(w, 2)
                weights[layer][number].append(w)
                moved[layer][number].append(w + shift * norm * e / np.linalg.norm(e, 2))
        if classes is not None:
            heads.append(rng.normal(size=(classes, width)))
    draws = rngs if data is None else data
    inputs = [rng.normal(size=(positions, width)) for rng in draws]
    readout, h0 = _stack(heads) if heads else None, _stack(inputs)

    def make(maps: list[list[list[Array]]], targets: Tensor) -> ResidualNet:
        stacked = [[_stack(each) for each in layer] for layer in maps]
        scale = 2.0  # alpha = 2 rank
        return ResidualNet(branches, stacked, h0, targets, readout, rank, scale, layers_per_step, mode)

    teacher = make(moved, h0)
    top = teacher.outputs(torch.zeros((teacher.partition.n, len(rngs)), dtype=torch.float64))
    if readout is None:
        return make(weights, top)
    logits = torch.bmm(top, readout.transpose(1, 2)).numpy()
    noise = np.stack([rng.gumbel(size=logits.shape[1:]) for rng in draws])
    return make(weights, torch.from_numpy((logits + noise).argmax(-1)))
