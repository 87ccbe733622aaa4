"""Measured thresholds of divergence against the exact limits of T4 and T5, by bisection on runs that know no theory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

from bcd_theory.momentum import uncoupled_limit
from bcd_theory.partition import equal_blocks
from bcd_theory.predictions import Prediction
from reports.numbers import fixed, percent, significant
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations.arms import limit_of
from simulations.experiment import Experiment, Write, legend_below, main, plain_log
from simulations.problems import Quadratic, coupled
from simulations.problems.base import Problem
from simulations.records import Record, Registered, Size, prediction
from simulations.runner import Arm, run

BETA = 0.9
# The last three are AdamW with v frozen: EMA momentum on the gradient over D = sqrt(v). Under idle momentum v falls to
# g^2/p, so D is 1/sqrt(p) of the full run's (T5).
ARMS = (
    Arm("full", order="full"),
    Arm("cyclic"),
    Arm("full, momentum", "sgd-ema", order="full", momentum=BETA),
    Arm("cyclic, idle momentum", "sgd-ema", "momentum", momentum=BETA),
    Arm("cyclic, idle frozen", "sgd-ema", "frozen", momentum=BETA),
    Arm("cyclic, heavy ball", "heavy-ball", "momentum", momentum=0.5),
    Arm("AdamW full, v frozen", "sgd-ema", order="full", momentum=BETA),
    Arm("AdamW idle momentum, v frozen", "sgd-ema", "momentum", momentum=BETA),
    Arm("AdamW idle frozen, v frozen", "sgd-ema", "frozen", momentum=BETA),
)
TOLERANCE = 0.01
GRID = 64
# Of the coarse and the fine grid; a frozen block's momentum crosses its limit slowly.
CYCLES, FROZEN_CYCLES = (200, 400), (300, 1600)
SIZES = {"quick": 8, "standard": 100, "full": 400}


@dataclass
class Scaled(Quadratic):
    """A quadratic read through D, as AdamW with v frozen reads it: the gradient over D, d of shape (n,)."""

    d: NDArray[np.float64] = field(kw_only=True)

    def gradient(
        self, x: torch.Tensor, rows: slice | torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().gradient(x, rows, out).div_(torch.from_numpy(self.d)[rows, None])


def draw_problem(seed: int, i: int) -> tuple[Quadratic, NDArray[np.float64]]:
    """Problem i of the experiment and its D: coupled at random (even i) or along one shared direction (odd i)."""
    rng = np.random.default_rng([seed, i])
    p = int(rng.choice([2, 3, 4]))
    if i % 2 == 0:
        problem = coupled(3 * p, p, float(rng.uniform(0.1, 1.0)), float(rng.choice([1.0, 3.0, 10.0])), rng)
    else:
        share, u = float(rng.uniform(0.1, 1.0)), np.abs(rng.normal(size=3 * p)) + 0.1
        problem = Quadratic((1 - share) * np.eye(3 * p) + share * np.outer(u, u), equal_blocks(3 * p, p))
    return problem, np.exp(rng.uniform(-1.0, 1.0, size=3 * p))


def scale_of(arm: Arm, p: int, d: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """D of an AdamW arm, None for the others."""
    if not arm.name.startswith("AdamW"):
        return None
    return d / np.sqrt(p) if arm.order == "cyclic" and arm.idle == "momentum" else d


def measure(size: Size, seed: int) -> dict[str, Any]:
    """The Hessian of each problem, column by column from its gradient, and the D that AdamW is frozen at."""
    found = []
    for i in range(SIZES[size]):
        problem, d = draw_problem(seed, i)
        n = problem.partition.n
        hessian = problem.gradient(torch.eye(n, dtype=torch.float64), slice(0, n))
        found.append({"p": len(problem.partition), "hessian": hessian.numpy(), "d": d})
    return {"problems": found}


def predict(measured: Mapping[str, Any]) -> Sequence[Prediction]:
    limits: dict[str, list[float]] = {arm.name: [] for arm in ARMS}
    ratios, least = [], []
    for entry in measured["problems"]:
        hessian, p, d = np.array(entry["hessian"]), int(entry["p"]), np.array(entry["d"])
        blocks = equal_blocks(len(hessian), p)
        for arm in ARMS:
            limit = limit_of(arm, hessian, blocks, scale_of(arm, p, d))
            limits[arm.name].append(limit.learning_rate)
            if arm.name == "cyclic":
                ratios.append(limit.smoothness / max(limit.block_smoothness))
                least.append(2 / max(limit.block_smoothness))
    exact = "quadratic, v frozen where AdamW is named"
    return [
        *(prediction(f"limit/{name}", v, "T4", "T5", assumes=exact) for name, v in limits.items()),
        prediction("smoothness-ratio", ratios, "T1", assumes="L/L_max of each problem"),
        prediction("least-limit", least, "T1", "T6b", assumes="2/L_max, never above cyclic or idle frozen"),
        *(
            prediction(
                f"edge/{name}",
                uncoupled_limit(1.0, momentum=BETA, cycle_length=p, idle=idle),
                "T5",
                assumes="uncoupled blocks, v slow; learning rate x preconditioned sharpness in the run's own v",
            )
            for name, (p, idle) in EDGES.items()
        ),
    ]


def measured_limit(
    problem: Problem, arm: Arm, cycles: tuple[int, int], rng: np.random.Generator
) -> float | None:
    """The learning rate at which the loss turns from falling to growing, by two grids of runs; knows no theory.

    Grows: the largest loss of the last quarter of the cycles is above that of the second quarter, whatever oscillates
    in between. cycles: of the coarse grid, 0.1 to 200 over the largest diagonal curvature, and of the fine one. None
    where no rate grows.
    """
    n, p = problem.partition.n, len(problem.partition)
    curvature = float(problem.gradient(torch.eye(n, dtype=torch.float64), slice(0, n)).diagonal().max())
    rates = np.geomspace(0.1 / curvature, 200.0 / curvature, GRID)
    start = rng.normal(size=n)
    for level, length in enumerate(cycles):
        losses = run(problem, arm, start, rates, length * p, record_every=p).losses
        quarter = length // 4
        with np.errstate(all="ignore"):
            early = losses[quarter : 2 * quarter].max(0)
            late = np.where(np.isfinite(losses[-1]), losses[3 * quarter :].max(0), np.inf)
            growth = np.where(late > 1e-280, np.log(late / early), -np.inf)
        growth[np.isnan(growth)] = np.inf  # both overflowed
        first = int(np.argmax(growth > 0))
        if not growth[first] > 0:
            return None
        if level == 0:
            # One cell more on either side: the first grid decides on short runs.
            rates = np.geomspace(rates[max(first - 2, 0)], rates[min(first + 1, GRID - 1)], GRID)
    low, high = np.log(rates[max(first - 1, 0)]), np.log(rates[first])
    before, after = growth[max(first - 1, 0)], growth[first]
    known = np.isfinite(before) and np.isfinite(after) and after > before
    return float(np.exp(low + (high - low) * (-before / (after - before) if known else 0.5)))


# (p, idle policy) of the runs of AdamW with its own, moving v.
EDGES: dict[str, tuple[int, Literal["full", "momentum", "frozen"]]] = {
    "full": (4, "full"),
    "idle momentum, p = 2": (2, "momentum"),
    "idle momentum, p = 4": (4, "momentum"),
    "idle frozen, p = 4": (4, "frozen"),
}


def edge(p: int, idle: Literal["full", "momentum", "frozen"], steps: int, seed: int) -> float:
    """Learning rate x preconditioned sharpness at which AdamW itself hovers on an uncoupled quadratic (late mean).

    As the gradient falls, v falls and the preconditioned sharpness rises until the run oscillates, which holds v up.
    """
    n, rate, beta2 = 8, 1e-3, 0.999
    curvature = torch.from_numpy(np.geomspace(0.1, 1.0, n))[:, None]
    problem = Quadratic(np.diag(curvature[:, 0].numpy()), equal_blocks(n, p))
    owner = torch.arange(n)[:, None] // (n // p)
    x0 = 1e-4 * np.random.default_rng([seed, 5]).normal(size=n)
    last, v, count = [torch.from_numpy(x0)[:, None]], torch.zeros_like(curvature), torch.zeros_like(curvature)
    everything = torch.ones_like(owner, dtype=torch.bool)
    found: list[float] = []

    def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
        chosen = everything if idle == "full" else owner == t % p
        g = torch.where(chosen, curvature * last[0], 0.0)
        moves = chosen if idle == "frozen" else everything
        v.copy_(torch.where(moves, beta2 * v + (1 - beta2) * g * g, v))
        count.add_(moves)
        last[0] = x.clone()
        if t >= steps // 2 and (t + 1) % p == 0:
            found.append(rate * float((curvature / (v / (1 - beta2**count)).sqrt()).max()))

    policy: Literal["momentum", "frozen"] = "momentum" if idle == "full" else idle
    arm = Arm("edge", "adamw", policy, "full" if idle == "full" else "cyclic", betas=(BETA, beta2), eps=1e-16)
    run(problem, arm, x0, rate, steps, record_every=steps, observe=observe)
    return float(np.mean(found))


def perform(registered: Registered, write: Write) -> None:
    for i in range(SIZES[registered.size]):
        problem, d = draw_problem(registered.seed, i)
        rng = np.random.default_rng([registered.seed, i, 1])
        for arm in ARMS:
            d_arm = scale_of(arm, len(problem.partition), d)
            seen = problem if d_arm is None else Scaled(problem.A, problem.partition, d=d_arm)
            cycles = FROZEN_CYCLES if arm.optimizer == "sgd-ema" and arm.idle == "frozen" else CYCLES
            found = measured_limit(seen, arm, cycles, rng)
            write({"kind": "limit", "problem": i, "arm": arm.name, "measured": found})
    steps = {"quick": 8000, "standard": 16000, "full": 60000}[registered.size]
    for name, (p, idle) in EDGES.items():
        write({"kind": "edge", "name": name, "measured": edge(p, idle, steps, registered.seed)})


def _measured(record: Record, arm: str) -> list[float | None]:
    return [row["measured"] for row in record.of("limit") if row["arm"] == arm]


def judge(record: Record) -> list[Part]:
    return [
        *(_tight(record, arm.name) for arm in ARMS),
        _above(record, "cyclic", "without momentum cyclic keeps 2/L_max (T1)", True),
        _above(record, "cyclic, idle frozen", "idle frozen keeps 2/L_max (T6b)", True),
        _above(record, "cyclic, idle momentum", "idle momentum against 2/L_max", False),
        *(_edge(record, row) for row in record.of("edge")),
    ]


def _tight(record: Record, arm: str) -> Part:
    pairs = list(zip(_measured(record, arm), record.predicted_values(f"limit/{arm}"), strict=True))
    errors = [abs(found / said - 1) for found, said in pairs if found is not None and said]
    missing = len(pairs) - len(errors)
    worst = max(errors, default=None)
    within = sum(e <= TOLERANCE for e in errors)
    return Part(
        name=f"{arm} (T4, T5)",
        verdict="supported"
        if within == len(pairs)
        else "inconclusive"
        if within + missing == len(pairs)
        else "refuted",
        reason=f"{within} of {len(pairs)} measured limits within {percent(TOLERANCE, 0)} of the predicted ones, "
        f"worst {percent(worst, 2)}, {missing} without a measured limit.",
        effect=worst,
        unit="relative error",
        margin=TOLERANCE,
        n=len(pairs),
    )


def _above(record: Record, arm: str, name: str, counts: bool) -> Part:
    pairs = zip(_measured(record, arm), record.predicted_values("least-limit"), strict=True)
    shares = [found / least for found, least in pairs if found is not None and least]
    below = sum(share < 1 - TOLERANCE for share in shares)
    lowest = min(shares, default=None)
    return Part(
        name=name,
        verdict="refuted" if below else "supported" if shares else "inconclusive",
        reason=f"{below} of {len(shares)} measured limits more than {percent(TOLERANCE, 0)} below 2/L_max; "
        f"the lowest is {fixed(lowest)} of it.",
        effect=lowest,
        unit="measured limit x L_max/2",
        margin=1 - TOLERANCE,
        n=len(shares),
        counts=counts,
    )


def _edge(record: Record, row: Mapping[str, Any]) -> Part:
    said = record.predicted(f"edge/{row['name']}")
    found = row["measured"]
    off = None if found is None else found / said - 1
    return Part(
        name=f"AdamW with its own v: {row['name']}",
        verdict="inconclusive" if off is None else "supported" if abs(off) < 0.15 else "refuted",
        reason=f"Learning rate times preconditioned sharpness hovers at {significant(found)}, limit "
        f"{significant(said)} ({percent(off)}): v moves, so the limit is an edge here and not a law.",
        effect=off,
        unit="relative error",
        margin=0.15,
        n=1,
        counts=False,
    )


def draw(record: Record, axes: Sequence[Axes]) -> None:
    ratio, full = record.predicted_values("smoothness-ratio"), _measured(record, "full")
    shown = (
        ("cyclic", "exact", "full", "o"),
        ("cyclic, idle frozen", "frozen", "full, momentum", "s"),
        ("cyclic, idle momentum", "identity", "full, momentum", "^"),
    )
    for arm, colour, against, mark in shown:
        full = _measured(record, against)
        pairs = [
            (x, a / b) for x, a, b in zip(ratio, _measured(record, arm), full, strict=True) if x and a and b
        ]
        axes[0].plot(
            *zip(*pairs, strict=True), mark, color=LIGHT[colour], label=arm, markersize=3.5, alpha=0.8
        )
    top = max(x for x in ratio if x)
    axes[0].plot(
        [1, top], [1, top], "--", color=LIGHT["muted"], linewidth=1, label="L / L_max, least of cyclic (T1)"
    )
    axes[0].set_xlabel("L / L_max")
    axes[0].set_ylabel("limit over full's limit")
    axes[0].set_title("Limit against coupling")
    plain_log(axes[0], "x", "y")
    legend_below(axes[0])
    for k, arm_ in enumerate(ARMS):
        pairs = [
            (100 * (found / said - 1), k)
            for found, said in zip(
                _measured(record, arm_.name), record.predicted_values(f"limit/{arm_.name}"), strict=True
            )
            if found and said
        ]
        axes[1].plot(*zip(*pairs, strict=True), "o", color=LIGHT["exact"], markersize=3, alpha=0.6)
    axes[1].axvspan(-100 * TOLERANCE, 100 * TOLERANCE, color=LIGHT["grid"])
    axes[1].set_yticks(range(len(ARMS)), [arm_.name.replace(", v frozen", "") for arm_ in ARMS])
    axes[1].set_xlim(-1.15, 1.15)
    axes[1].set_xticks([-1, -0.5, 0, 0.5, 1])
    axes[1].invert_yaxis()
    axes[1].tick_params(axis="y", labelsize=7)
    axes[1].set_xlabel("measured less predicted, %")
    axes[1].set_title("Error of the exact limits")


EXPERIMENT = Experiment(
    "limits",
    "Limits of stability on coupled quadratics",
    "The largest stable learning rate is measured by running at many rates, without knowledge of any theory, and "
    "compared with the exact limit of the cycle's linear map: without momentum, with both idle policies, heavy ball, "
    "and AdamW with its second moment frozen. The left panel maps cyclic descent's gain over full descent of the same "
    "optimiser against the coupling: without momentum the limit is at least L / L_max times full's; at momentum 0.9 "
    "both idle policies mostly have lower limits than full.",
    ("T1", "T4", "T5", "T6b"),
    measure,
    predict,
    perform,
    judge,
    draw,
    panels=2,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
