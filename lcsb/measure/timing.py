"""Seconds of one training step by part (T12), and the measured speed-up of each backward mode.

Parts are read off a running step by time stamps at its boundaries (embedding | layers | head and loss | backward of
head | backward of layers | optimiser); what cannot be stamped is the difference of two steps that differ in nothing
else: recompute on and off, adapter gradients in all layers and in the lowest alone, attention branch with and without.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bcd_theory.cost import StepCosts
from lcsb.config import LCSBConfig
from lcsb.selective import SelectiveBackward, selective_backward
from lcsb.switches import without_recompute

_STEPS_BETWEEN = 6  # steps of other modes between two `full` steps that serve as their reference


def clock() -> float:
    """Seconds of this process: wall clock where the work is on a GPU or on several threads, else CPU seconds.

    On one thread the two agree on a quiet machine, and CPU seconds do not count the time that other processes took.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step: embedding + head + loss in both directions, layers forward, layers backward, optimiser."""

    head: float
    forward: float
    backward: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.head + self.forward + self.backward + self.optimizer


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def time_step(
    lcsb: SelectiveBackward,
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> StepTimes:
    """Take one training step and time its parts."""
    stamps: dict[str, float] = {}

    def stamp(name: str) -> None:
        stamps[name] = clock()

    def enter(module: nn.Module, args: Any) -> None:
        if "layers begin" not in stamps:
            stamp("layers begin")

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if "layers end" not in stamps:  # a recompute passes here again
            stamp("layers end")
            _first(output).register_hook(lambda gradient: stamp("layers backward"))

    with contextlib.ExitStack() as stack:
        stack.callback(lcsb.layers[0].register_forward_pre_hook(enter).remove)
        stack.callback(lcsb.layers[-1].register_forward_hook(leave).remove)
        lcsb.begin()
        stamp("begin")
        loss = model(**batch).loss
        loss.backward()
        stamp("end of backward")
        lcsb.step(optimizer)
        stamp("end")
    return StepTimes(
        head=stamps["layers begin"] - stamps["begin"] + stamps["layers backward"] - stamps["layers end"],
        forward=stamps["layers end"] - stamps["layers begin"],
        backward=stamps["end of backward"] - stamps["layers backward"],
        optimizer=stamps["end"] - stamps["end of backward"],
    )


def median_times(rows: list[StepTimes]) -> StepTimes:
    """Part by part median."""
    parts = ("head", "forward", "backward", "optimizer")
    return StepTimes(**{part: statistics.median(getattr(row, part) for row in rows) for part in parts})


def dequantisation_seconds(model: nn.Module, repeats: int) -> float:
    """Seconds to dequantise every 4-bit weight of the model once, the way its linear layers do (0 without any)."""
    import bitsandbytes as bnb

    weights = [m.weight for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    if not weights:
        return 0.0
    seconds = []
    for _ in range(repeats):
        begin = clock()
        for weight in weights:
            bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        seconds.append(clock() - begin)
    return statistics.median(seconds)


def measure_costs(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    recompute: bool,
    repeats: int = 3,
) -> tuple[StepCosts, float]:
    """Seconds by part of a full step, and the relative spread of the repeats.

    Kinds of step, with recompute (if asked for) and without: `full`; `exact` and `mlp` with only the lowest layer
    selected, whose backward passes through every layer but computes the adapter gradients of one; `identity`, whose
    forward leaves the graph of one layer alone. Repeats are interleaved, so that a drift of the machine's speed meets
    all alike.

    Args:
        model: with adapters in every layer. Its adapters are changed by the steps taken.
        recompute: whether the runs recompute; the parts are those of such a step. Then recompute must be switched on
            in the model.
        repeats: two less than the number of steps of each kind; medians are used.
    """
    kinds = (("full", None), ("exact", 1), ("mlp", 1), ("identity", 1))
    times: dict[tuple[str, bool], list[StepTimes]] = {}
    # One round warms up, and two are more than asked for: the parts are differences of steps, which scatter more.
    rounds = (
        2 * repeats
    )  # the parts are differences of steps, so they need more of them than a step's own time does
    for repeat in range(rounds + 1):
        for on in (True, False) if recompute else (False,):
            for backward, k in kinds[: 4 if on == recompute else 3]:
                config = LCSBConfig(backward, layers_per_step=k)  # type: ignore[arg-type]
                context = contextlib.nullcontext() if on else without_recompute(model)
                with context, selective_backward(model, config) as lcsb:
                    row = time_step(lcsb, model, batch, optimizer)
                if repeat > 0:  # the first round warms caches and the optimiser's state
                    times.setdefault((backward, on), []).append(row)
    full, n = median_times(times["full", recompute]), len(lcsb.layers)

    def paired(part: str, more: tuple[str, bool], less: tuple[str, bool]) -> float:
        """Median over the rounds of a part's difference between two kinds of step taken close to each other."""
        pairs = zip(times[more], times[less], strict=True)
        return max(statistics.median(getattr(a, part) - getattr(b, part) for a, b in pairs), 0.0)

    # Only the lowest layer is selected in the steps compared, so a difference is that of the other n - 1 layers.
    scale = n / (n - 1) if n > 1 else 1.0
    adapter = min(paired("backward", ("full", recompute), ("exact", recompute)) * scale, full.backward)
    passing = full.backward - adapter
    again = min(paired("backward", ("exact", True), ("exact", False)), passing) if recompute else 0.0
    attention = paired("backward", ("exact", False), ("mlp", False)) * scale
    attention_again = 0.0
    if recompute:
        both = paired("backward", ("exact", True), ("mlp", True)) * scale
        attention_again = min(max(both - attention, 0.0), again)
    graph = paired("forward", ("full", recompute), ("identity", recompute)) * scale
    totals = [row.total for row in times["full", recompute]]
    costs = StepCosts(
        layers=n,
        forward=full.forward,
        head=full.head,
        optimizer=full.optimizer,
        recompute=again,
        input_gradient=passing - again,
        adapter_gradient=adapter,
        dequantisation=min(dequantisation_seconds(model, repeats) * (2 if recompute else 1), passing),
        attention_recompute=attention_again,
        attention_input_gradient=min(attention, passing - again),
        graph_forward=min(graph, full.forward),
    )
    return costs, (max(totals) - min(totals)) / (2 * statistics.median(totals))


def measure_speedups(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    layers_per_step: Mapping[int, int],
    repeats: int = 3,
) -> tuple[list[dict[str, Any]], float]:
    """Seconds per step of every mode and cycle length, and the speed-up over `full`, all in one run.

    A case is a mode and a cycle length. In each repeat every block of its cycle is timed once, a few steps from a
    `full` step before and one after: the repeat's speed-up is their mean over the mean of the blocks, so that a drift
    of the machine's speed meets both. The speed-up is the median over the repeats.

    Args:
        layers_per_step: cycle length p -> k.

    Returns:
        One row a case: mode, cycle_length, seconds (median of each block over the repeats), mean_seconds (their mean),
        speedup, speedups (one a repeat), repeats (seconds of each block in each repeat); and
        the median seconds of a full step's backward pass through the layers.
    """
    cases = [(mode, p, k) for mode in ("exact", "identity", "mlp") for p, k in layers_per_step.items()]
    blocks: dict[tuple[str, int], list[list[float]]] = {case[:2]: [] for case in cases}
    speedups: dict[tuple[str, int], list[float]] = {case[:2]: [] for case in cases}
    full: list[StepTimes] = []

    def cycle(mode: str, k: int | None) -> list[StepTimes]:
        config = LCSBConfig(mode, layers_per_step=k)  # type: ignore[arg-type]
        with selective_backward(model, config) as lcsb:
            return [time_step(lcsb, model, batch, optimizer) for _ in range(lcsb.schedule.cycle_length)]

    cycle("full", None)  # warms caches and the optimiser's state
    for _ in range(repeats):
        full += cycle("full", None)
        waiting: list[tuple[str, int]] = []
        for mode, p, k in cases:
            blocks[mode, p].append([step.total for step in cycle(mode, k)])
            waiting.append((mode, p))
            if sum(length for _, length in waiting) >= _STEPS_BETWEEN or (mode, p, k) == cases[-1]:
                full += cycle("full", None)
                reference = (full[-2].total + full[-1].total) / 2
                for case in waiting:
                    speedups[case].append(reference / statistics.fmean(blocks[case][-1]))
                waiting.clear()
    totals = [step.total for step in full]
    median = statistics.median(totals)
    rows: list[dict[str, Any]] = [
        {
            "mode": "full",
            "cycle_length": 1,
            "seconds": [median],
            "mean_seconds": median,
            "speedup": 1.0,
            "speedups": [1.0],
            "repeats": [[total] for total in totals],
        }
    ]
    for (mode, p), repeated in blocks.items():
        medians = [statistics.median(block) for block in zip(*repeated, strict=True)]
        rows.append(
            {
                "mode": mode,
                "cycle_length": p,
                "seconds": medians,
                "mean_seconds": statistics.fmean(medians),
                "speedup": statistics.median(speedups[mode, p]),
                "speedups": speedups[mode, p],
                "repeats": repeated,
            }
        )
    return rows, statistics.median(step.backward for step in full)
