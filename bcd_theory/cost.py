"""Seconds of one training step by backward mode (T12).

One step costs

    F + H + O + sum over the layers that backward visits of (recompute + input gradient + adapter gradient)

with F the forward pass of the layers, H head, loss and embedding in both directions and O the optimiser. F, H
and O are never skipped, except that the optimiser touches the selected layers only under idle policy frozen,
and that a layer which leaves no graph behind (identity idle, or below the lowest selected one) runs its forward
pass without the part of F that goes into the graph.
What backward does in one layer depends on the mode:

    layer                          exact          identity      mlp
    selected                       re + in + ad   the same      the same
    idle, above lowest selected    re + in        nothing       re + in, both without attention's part
    idle, below lowest selected    nothing        nothing       nothing

In mode full every layer is selected; certified chooses one of the three columns for each idle layer, given
as a plan. Every figure comes from the list of blocks that is really used; T12's closed forms for equal blocks
are its limiting cases. Bytes are in `bcd_theory.geometry`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bcd_theory.partition import contiguous_blocks, interleaved_blocks, n_blocks

Mode = Literal["full", "exact", "identity", "mlp", "certified"]
Grade = Literal["identity", "mlp", "exact"]
Idle = Literal["momentum", "frozen"]
Blocks = Sequence[Sequence[int]]
Seconds = float | Sequence[float]

MODES: Final[tuple[str, ...]] = get_args(Mode)
GRADES: Final[tuple[str, ...]] = get_args(Grade)
BLOCK_SCHEDULES: Final = ("cyclic", "reversed", "shuffled", "random")
SCHEDULES: Final = (*BLOCK_SCHEDULES, "interleaved", "random-layers")


def choose(name: str, allowed: Sequence[str], what: str) -> str:
    """Return `name` if it is allowed; raise ValueError naming the nearest allowed name otherwise."""
    if name in allowed:
        return name
    near = get_close_matches(str(name), allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {what} {name!r}; expected one of {', '.join(allowed)}{hint}")


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured or modelled seconds of one full-backpropagation step on one batch, by part (T12).

    Attributes:
        layers: N, the number of decoder layers.
        forward: F, forward pass of all layers.
        head: H, final norm, head and loss in both directions, and the embedding.
        optimizer: O, one optimiser step on all adapters.
        recompute: forward again in backward (activation checkpointing), dequantisation included.
        input_gradient: gradient through the layers to their inputs, dequantisation included.
        adapter_gradient: gradient of the adapter matrices.
        dequantisation: the part of recompute + input_gradient spent dequantising weights ("of which").
        attention_recompute: attention's part of recompute ("of which"); mode mlp does without it.
        attention_input_gradient: attention's part of input_gradient ("of which").
        graph_forward: the part of forward that goes into the graph ("of which"): a layer that leaves none is
            that much cheaper.

    The last seven are totals over the N layers, or sequences of N values, one a layer from the embedding up.

    Raises:
        ValueError: a negative or non-finite time, a sequence of wrong length, a part larger than its whole.
    """

    layers: int
    forward: float
    head: float
    optimizer: float
    recompute: Seconds
    input_gradient: Seconds
    adapter_gradient: Seconds
    dequantisation: Seconds = 0.0
    attention_recompute: Seconds = 0.0
    attention_input_gradient: Seconds = 0.0
    graph_forward: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers}")
        for name in ("forward", "head", "optimizer"):
            value = float(getattr(self, name))
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite time of at least 0 s, got {value}")
        if self.total("graph_forward") > self.forward * (1 + 1e-9):
            raise ValueError(
                f"graph_forward ({self.total('graph_forward'):.6g} s) is more than forward ({self.forward:.6g} s)"
            )
        wholes = {name: self.by_layer(name) for name in ("recompute", "input_gradient", "adapter_gradient")}
        parts = (
            ("attention_recompute", wholes["recompute"]),
            ("attention_input_gradient", wholes["input_gradient"]),
            ("dequantisation", wholes["recompute"] + wholes["input_gradient"]),
        )
        for name, whole in parts:
            part = self.by_layer(name)
            if np.any(part > whole * (1 + 1e-9)):
                raise ValueError(
                    f"{name} ({part.sum():.6g} s) is more than the time it is a part of ({whole.sum():.6g} s)"
                )

    def by_layer(self, name: str) -> NDArray[np.float64]:
        """Seconds of one part in each layer, shape (layers,); a total is shared equally."""
        value = np.asarray(getattr(self, name), dtype=np.float64)
        if value.ndim == 0:
            value = np.full(self.layers, float(value) / self.layers)
        if value.shape != (self.layers,):
            raise ValueError(f"{name} must be a total or {self.layers} values, got shape {value.shape}")
        if not np.all(np.isfinite(value)) or np.any(value < 0):
            raise ValueError(f"{name} must hold finite times of at least 0 s")
        return value

    def total(self, name: str) -> float:
        """Seconds of one part over all layers."""
        return float(self.by_layer(name).sum())

    def backward_ratio(self, recompute: bool = True) -> tuple[float, float]:
        """(r_in, r_ad): input-gradient part (with recompute) and adapter part of backward, in units of F."""
        if self.forward <= 0:
            raise ValueError("ratios to the forward time need forward > 0")
        passing = self.total("input_gradient") + (self.total("recompute") if recompute else 0.0)
        return passing / self.forward, self.total("adapter_gradient") / self.forward


def _schedule_blocks(layers: int, layers_per_step: int | None, schedule: str) -> Blocks:
    choose(schedule, (*BLOCK_SCHEDULES, "interleaved"), "block schedule")
    k = layers if layers_per_step is None else layers_per_step
    return interleaved_blocks(layers, k) if schedule == "interleaved" else contiguous_blocks(layers, k)


def _visits(
    layers: int, layers_per_step: int | None, schedule: str, blocks: Blocks | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean over the steps, by layer: P(selected), P(idle and above the lowest selected layer)."""
    if blocks is None:
        choose(schedule, SCHEDULES, "schedule")
        if schedule == "random-layers":
            k = layers if layers_per_step is None else layers_per_step
            n_blocks(layers, k)  # raises on a bad k
            # All k layers lie above l in C(N-1-l, k) of the C(N, k) equally likely draws.
            above = np.array([math.comb(layers - 1 - layer, k) for layer in range(layers)], dtype=np.float64)
            selected = np.full(layers, k / layers)
            return selected, np.maximum(1.0 - above / math.comb(layers, k) - selected, 0.0)
        blocks = _schedule_blocks(layers, layers_per_step, schedule)
    elif layers_per_step is not None:
        raise ValueError("give either blocks or layers_per_step, not both")
    if len(blocks) == 0:
        raise ValueError("blocks is empty; expected one sequence of layers for each step")
    selected, passed = np.zeros(layers), np.zeros(layers)
    for block in blocks:
        chosen = _chosen(layers, block)
        selected += chosen
        passed[int(np.argmax(chosen)) :] += ~chosen[int(np.argmax(chosen)) :]
    return selected / len(blocks), passed / len(blocks)


def _chosen(layers: int, block: Sequence[int]) -> NDArray[np.bool_]:
    if len(block) == 0:
        raise ValueError("a block is empty; every step needs at least one layer")
    outside = [layer for layer in block if not 0 <= layer < layers]
    if outside or len(set(block)) != len(block):
        raise ValueError(f"block {list(block)} is not a set of layers between 0 and {layers - 1}")
    chosen = np.zeros(layers, dtype=np.bool_)
    chosen[list(block)] = True
    return chosen


def mean_reach(
    layers: int,
    layers_per_step: int | None = None,
    schedule: str = "cyclic",
    blocks: Blocks | None = None,
) -> float:
    """Mean share of the layers that an exact backward pass enters, from the lowest selected one up (T12).

    Limiting cases: equal contiguous blocks (1 + 1/p)/2; interleaved 1 - (p-1)/(2N); k random layers
    k(N+1)/((k+1)N).

    >>> mean_reach(32, 8)
    0.625
    """
    selected, passed = _visits(layers, layers_per_step, schedule, blocks)
    return float((selected + passed).mean())


def grade_seconds(costs: StepCosts, recompute: bool = True) -> dict[str, NDArray[np.float64]]:
    """Seconds that each layer costs in backward when idle above the lowest selected one, by grade.

    Arrays of shape (layers,).
    """
    exact = costs.by_layer("input_gradient")
    attention = costs.by_layer("attention_input_gradient")
    if recompute:
        exact = exact + costs.by_layer("recompute")
        # The attention output is kept in forward, so mode mlp does not recompute attention either.
        attention = attention + costs.by_layer("attention_recompute")
    return {
        "identity": np.zeros(costs.layers),
        "mlp": np.maximum(exact - attention, 0.0),
        "exact": exact,
    }


def step_seconds(
    costs: StepCosts,
    mode: str,
    *,
    layers_per_step: int | None = None,
    schedule: str = "cyclic",
    blocks: Blocks | None = None,
    plans: Sequence[Sequence[str | None]] | None = None,
    recompute: bool = True,
    idle: str = "momentum",
) -> float:
    """Mean seconds of one step over a cycle (T12).

    Args:
        costs: seconds by part.
        mode: full, exact, identity, mlp or certified.
        layers_per_step: k; None selects all layers. Ignored by mode full.
        schedule: cyclic, reversed, shuffled and random visit contiguous blocks equally often and have one
            mean; interleaved; random-layers is the expectation over k layers drawn uniformly without
            replacement.
        blocks: the steps' selections instead of layers_per_step and schedule, each with equal weight (a
            recorded run's list, for schedules whose choice depends on measurements).
        plans: mode certified only: for each block a grade (identity, mlp, exact) for every layer. Entries of
            selected layers and of layers below the lowest selected one are not read and may be None.
        recompute: whether layers are recomputed in backward (activation checkpointing).
        idle: momentum steps the optimiser on all adapters, frozen on the selected layers' only.

    Raises:
        ValueError: unknown names, blocks that are no sets of layers, plans of the wrong shape.
    """
    choose(mode, MODES, "backward mode")
    choose(idle, get_args(Idle), "idle policy")
    grades = grade_seconds(costs, recompute)
    visited = grades["exact"] + costs.by_layer("adapter_gradient")
    if mode == "full":
        return costs.forward + costs.head + costs.optimizer + float(visited.sum())
    if (plans is not None) != (mode == "certified"):
        raise ValueError("plans belong to mode 'certified', which needs them")
    selected, passed = _visits(costs.layers, layers_per_step, schedule, blocks)
    backward = float(visited @ selected)
    if plans is None:
        backward += float(grades[mode] @ passed)
        graph = selected if mode == "identity" else selected + passed
    else:
        if blocks is None:
            blocks = _schedule_blocks(costs.layers, layers_per_step, schedule)
        steps = list(zip(blocks, plans, strict=True))
        backward += sum(plan_seconds(costs, block, plan, recompute) for block, plan in steps) / len(blocks)
        graph = np.mean([_leaves_graph(costs.layers, block, plan) for block, plan in steps], axis=0)
    forward = costs.forward - float(costs.by_layer("graph_forward") @ (1.0 - graph))
    optimizer = costs.optimizer * (float(selected.mean()) if idle == "frozen" else 1.0)
    return forward + costs.head + optimizer + backward


def _leaves_graph(layers: int, block: Sequence[int], plan: Sequence[str | None]) -> NDArray[np.float64]:
    """1 for a layer whose forward pass leaves a graph under a plan, else 0: selected, or passed and not identity."""
    chosen = _chosen(layers, block)
    lowest = int(np.argmax(chosen))
    return np.array(
        [float(chosen[layer] or (layer > lowest and plan[layer] != "identity")) for layer in range(layers)]
    )


def plan_seconds(
    costs: StepCosts, block: Sequence[int], plan: Sequence[str | None], recompute: bool = True
) -> float:
    """Seconds of backward in the idle layers above the lowest selected one under a plan (mode certified)."""
    chosen = _chosen(costs.layers, block)
    if len(plan) != costs.layers:
        raise ValueError(f"a plan needs one grade for each of the {costs.layers} layers, got {len(plan)}")
    grades = grade_seconds(costs, recompute)
    return float(
        sum(
            grades[choose(str(plan[layer]), GRADES, "grade")][layer]
            for layer in range(int(np.argmax(chosen)), costs.layers)
            if not chosen[layer]
        )
    )


def speedup(costs: StepCosts, mode: str, *, recompute: bool = True, **selection: object) -> float:
    """Full backpropagation's step time over this mode's mean step time; arguments as in `step_seconds` (T12).

    A ratio of mean times, not a mean of ratios.
    """
    return step_seconds(costs, "full", recompute=recompute) / step_seconds(
        costs,
        mode,
        recompute=recompute,
        **selection,  # type: ignore[arg-type]
    )


def dequantisation_speedup(phi: float, r: float) -> float:
    """(1 + r)/(1 + r (1 - phi)): speed-up of the layers when a share phi of backward time is removed (T12).

    r is the layers' backward time in units of their forward time; phi the share of it spent dequantising.

    >>> round(dequantisation_speedup(0.32, 2.0), 3), round(dequantisation_speedup(0.42, 2.0), 3)
    (1.271, 1.389)
    """
    return (1 + r) / (1 + r * (1 - phi))


def identity_speedup(forward: float, head: float, optimizer: float, backward: float, share: float) -> float:
    """(F + H + O + R)/(F + H + O + R share): mode identity with a share k/N of the layers selected (T12)."""
    fixed = forward + head + optimizer
    return (fixed + backward) / (fixed + backward * share)


def exact_layers_speedup(r_in: float, r_ad: float, reach: float, share: float) -> float:
    """(1 + r)/(1 + r_in reach + r_ad share), r = r_in + r_ad: mode exact, the layers alone (T12).

    Equal contiguous blocks: reach = (1 + 1/p)/2 and share = 1/p. As p grows it tends to (1 + r)/(1 + r_in/2).
    """
    return (1 + r_in + r_ad) / (1 + r_in * reach + r_ad * share)
