"""Measured thresholds of divergence against the exact limits of T4 and T5."""

from __future__ import annotations

import sys
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from bcd_theory.linear import stability_limit
from reports.numbers import percent
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations.experiment import Experiment, Result, Size, main
from simulations.problems import Quadratic, coupled
from simulations.runner import Arm, run

ARMS = (
    Arm("full", order="full"),
    Arm("cyclic"),
    Arm("cyclic, momentum", "sgd-ema", "momentum", momentum=0.5),
    Arm("cyclic, frozen", "sgd-ema", "frozen", momentum=0.5),
)
TOLERANCE = 0.01
RATES = 48


def measured_limit(problem: Quadratic, arm: Arm, cycles: int, rng: np.random.Generator) -> float | None:
    """The first learning rate at which the loss grows over the second half, by three grids; knows no theory.

    None where no rate of the first grid, 0.2/L_max to 40/L_max, grows.
    """
    p = len(problem.partition)
    low, high = 0.2 / problem.block_smoothness.max(), 40.0 / problem.block_smoothness.max()
    start = rng.normal(size=problem.partition.n)
    for level in range(3):
        rates = np.geomspace(low, high, RATES)
        half = cycles * p * (1 if level == 0 else 2)
        losses = run(problem, arm, start, rates, 2 * half, record_every=half).losses
        with np.errstate(invalid="ignore"):
            grows = ~np.isfinite(losses[2]) | ((losses[2] > losses[1]) & (losses[2] > 1e-280))
        if not grows.any():
            return None if level == 0 else float(high)
        first = int(np.argmax(grows))
        low, high = (rates[max(first - 1, 0)], rates[first])
    return float(np.sqrt(low * high))


def body(size: Size, seed: int) -> Result:
    count, cycles = {"quick": (10, 150), "standard": (100, 200), "full": (400, 400)}[size]
    rows: list[dict[str, Any]] = []
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        p = int(rng.choice([2, 3, 4]))
        problem = coupled(3 * p, p, float(rng.uniform(0.1, 1.0)), float(rng.choice([1.0, 3.0, 10.0])), rng)
        ratio = problem.smoothness / float(problem.block_smoothness.max())
        for arm in ARMS:
            order: Literal["full", "cyclic"] = "full" if arm.order == "full" else "cyclic"
            limit = stability_limit(
                problem.A, problem.partition, order=order, momentum=arm.momentum, idle=arm.idle
            )
            measured = measured_limit(problem, arm, cycles, rng)
            error = None if measured is None else measured / limit.learning_rate - 1
            rows.append(
                {
                    "problem": i,
                    "p": p,
                    "arm": arm.name,
                    "L_over_L_max": ratio,
                    "predicted": limit.learning_rate,
                    "measured": measured,
                    "relative_error": error,
                }
            )
    parts = []
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm.name]
        errors = [abs(row["relative_error"]) for row in mine if row["relative_error"] is not None]
        missing = len(mine) - len(errors)
        worst = max(errors, default=None)
        within = sum(e <= TOLERANCE for e in errors)
        parts.append(
            Part(
                name=arm.name,
                verdict="supported"
                if within == len(mine)
                else "inconclusive"
                if within + missing == len(mine)
                else "refuted",
                reason=f"{within} of {len(mine)} measured limits within {percent(TOLERANCE, 0)} of the predicted ones, "
                f"worst {percent(worst, 2)}, {missing} without a measured limit.",
                effect=worst,
                unit="relative error",
                margin=TOLERANCE,
                n=len(mine),
            )
        )
    by_problem: dict[int, dict[str, float]] = {}
    for row in rows:
        by_problem.setdefault(row["problem"], {"x": row["L_over_L_max"]})[row["arm"]] = row["predicted"]

    def draw(axis: Axes) -> None:
        for arm, colour in zip(ARMS[1:], ("exact", "identity", "frozen"), strict=True):
            mine = [r for r in rows if r["arm"] == arm.name and r["measured"] is not None]
            full = {i: d["full"] for i, d in by_problem.items()}
            axis.plot(
                [r["L_over_L_max"] for r in mine],
                [r["measured"] / full[r["problem"]] for r in mine],
                "o",
                color=LIGHT[colour],
                label=arm.name,
            )
        axis.set_xlabel("L / L_max")
        axis.set_ylabel("limit / full's limit")
        axis.set_title("Measured limits of stability")
        axis.legend()

    return Result(parts, {"rows": rows}, draw, {"problems": count})


EXPERIMENT = Experiment(
    "limits",
    "Limits of stability on coupled quadratics",
    "The largest stable learning rate is measured by running at many rates and compared with the exact limit of the "
    "cycle's linear map, without momentum and with both idle policies.",
    ("T4", "T5"),
    body,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
