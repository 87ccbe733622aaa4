"""Speed of convergence: bounds never crossed (T2, T3), exact slopes met (T4), orders compared, per second (T12)."""

from __future__ import annotations

import sys

import numpy as np
from matplotlib.axes import Axes

from bcd_theory import BOUNDS
from bcd_theory.cost import exact_layers_speedup
from bcd_theory.linear import stability_limit
from reports.numbers import fixed, percent, significant
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations.experiment import Experiment, Result, Size, main
from simulations.problems import Quadratic, coupled
from simulations.runner import Arm, run

P = 4
ORDERS = ("full", "cyclic", "reversed", "shuffled", "random", "importance", "greedy")
R_IN, R_AD = (
    2.0,
    1.0,
)  # backward of the layers in units of their forward: input gradient with recompute, adapters


def bounds(count: int, seed: int) -> list[Part]:
    """f(x^k) - f* against T3 and the best of |grad f(x^k)|^2 against T2, exact gradients."""
    excess = {"T2": 0.0, "T3": 0.0}
    for i in range(count):
        rng = np.random.default_rng([seed, 2, i])
        problem = coupled(12, P, float(rng.uniform(0, 1)), 10.0, rng)
        constant = float(problem.block_smoothness.max())
        eta, cycles = float(rng.uniform(0.1, 1.9)) / constant, 60
        squares: list[float] = []
        start = rng.normal(size=12)
        squares.append(float(np.sum((problem.A @ start) ** 2)))

        def observe(t: int, x, m) -> None:  # type: ignore[no-untyped-def]
            if (t + 1) % P == 0:
                squares.append(float(((problem.matrix @ x) ** 2).sum()))  # noqa: B023

        found = run(problem, Arm("cyclic"), start, eta, cycles * P, record_every=P, observe=observe)
        losses = found.losses[:, 0]
        common = {
            "eta": eta,
            "L": problem.smoothness,
            "L_max": constant,
            "p": P,
            "delta": 0.0,
            "f0": losses[0],
            "fstar": 0.0,
        }
        k = np.arange(1, cycles + 1)
        means = np.cumsum(squares[:cycles]) / k
        excess["T2"] = max(excess["T2"], float(np.max(means / BOUNDS["T2"].evaluate(**common, K=k))))
        t3 = BOUNDS["T3"].evaluate(**common, mu=problem.pl_constant, K=k)
        excess["T3"] = max(excess["T3"], float(np.max(losses[1:] / t3)))
    return [
        Part(
            name=f"{name} is never crossed",
            verdict="supported" if worst <= 1 + 1e-9 else "refuted",
            reason=f"The measured quantity is at most {percent(worst)} of the bound on {count} problems of 60 cycles.",
            effect=worst,
            unit="measured over bound",
            margin=1.0,
            n=count,
        )
        for name, worst in excess.items()
    ]


def slopes(count: int, seed: int) -> Part:
    """Asymptotic decrease of log loss per cycle against 2 log(radius) of the cycle map, within 1 %."""
    worst = 0.0
    for i in range(count):
        rng = np.random.default_rng([seed, 4, i])
        problem = coupled(8, P, 0.7, 5.0, rng)
        limit = stability_limit(problem.A, problem.partition)
        # Small enough for a real leading eigenvalue, so that the slope does not oscillate.
        eta = 0.2 * limit.learning_rate
        radius = limit.spectral_radius(eta)
        # Long enough to forget the other modes, short of where the loss leaves double precision.
        late = int(min(4000, 500 / max(-2 * np.log(radius), 1e-9)))
        losses = run(problem, Arm("cyclic"), rng.normal(size=8), eta, late * P, record_every=P).losses[:, 0]
        half = late // 2
        slope = (np.log(losses[late]) - np.log(losses[half])) / (late - half)
        worst = max(worst, abs(float(slope) / (2 * np.log(radius)) - 1))
    return Part(
        name="slope is that of the cycle map (T4)",
        verdict="supported" if worst < 0.01 else "refuted",
        reason=f"Largest relative error {significant(worst)} on {count} problems.",
        effect=worst,
        margin=0.01,
        n=count,
        unit="relative error",
    )


def steps_to(problem: Quadratic, order: str, start: np.ndarray, steps: int, target: float) -> int | None:
    """Fewest steps to `target` of the first loss over a grid of learning rates."""
    arm = Arm(order, order=order)
    rates = np.geomspace(0.1, 4.0, 16) / (
        problem.smoothness if order == "full" else problem.block_smoothness.max()
    )
    losses = run(problem, arm, start, rates, steps, seeds=np.zeros(16, dtype=int)).losses
    reached = losses <= target * losses[0]
    found = [int(np.argmax(column)) for column in reached.T if column.any()]
    return min(found) if found else None


def seconds(count: int, seed: int, steps: int) -> tuple[list[Part], list[dict[str, object]]]:
    """Steps to 1e-4 of the first loss, each order at its best rate, and layer seconds in units of full's step."""
    share = 1 / P
    cost = {order: 1 / exact_layers_speedup(R_IN, R_AD, (1 + share) / 2, share) for order in ORDERS}
    # importance and greedy read every block's gradient, so they cost a full step.
    cost |= {"full": 1.0, "importance": 1.0, "greedy": 1.0}
    rows: list[dict[str, object]] = []
    for coupling in (0.0, 0.5, 1.0):
        for i in range(count):
            rng = np.random.default_rng([seed, 12, int(10 * coupling), i])
            problem = coupled(16, P, coupling, 10.0, rng)
            start = rng.normal(size=16)
            row: dict[str, object] = {
                "coupling": coupling,
                "L_over_L_max": problem.smoothness / problem.block_smoothness.max(),
            }
            for order in ORDERS:
                taken = steps_to(problem, order, start, steps, 1e-4)
                row[order] = None if taken is None else taken * cost[order]
            rows.append(row)
    parts = []
    for coupling in (0.0, 0.5, 1.0):
        both = [
            (row["full"], row["cyclic"])
            for row in rows
            if row["coupling"] == coupling and row["full"] and row["cyclic"]
        ]
        ratios = [float(full) / float(cyclic) for full, cyclic in both]  # type: ignore[arg-type]
        middle = float(np.median(ratios)) if ratios else None
        wins = sum(ratio > 1 for ratio in ratios)
        parts.append(
            Part(
                name=f"full's time over cyclic's, coupling {coupling:g}",
                counts=False,
                verdict="inconclusive",
                effect=middle,
                unit="ratio of times",
                n=len(ratios),
                reason=f"Median {fixed(middle, 2)}: cyclic is faster on {wins} of {len(ratios)} problems.",
            )
        )
    return parts, rows


def body(size: Size, seed: int) -> Result:
    count, steps = {"quick": (4, 1500), "standard": (20, 4000), "full": (100, 8000)}[size]
    timed, rows = seconds(count, seed, steps)
    parts = [*bounds(5 * count, seed), slopes(count, seed), *timed]

    def draw(axis: Axes) -> None:
        colours = ("exact", "frozen", "identity", "mlp", "certified", "other")
        for order, colour in zip(ORDERS[1:], colours, strict=True):
            mine = [row for row in rows if row["full"] and row[order]]
            axis.semilogy(
                [float(row["L_over_L_max"]) for row in mine],  # type: ignore[arg-type]
                [float(row["full"]) / float(row[order]) for row in mine],  # type: ignore[arg-type]
                "o",
                color=LIGHT[colour],
                label=order,
            )
        axis.axhline(1.0, color=LIGHT["muted"], linestyle="--")
        axis.set_xlabel("L / L_max")
        axis.set_ylabel("full's time over this order's")
        axis.set_title("Time to 1e-4 of the first loss by the cost model")
        axis.legend(ncols=2)

    return Result(parts, {"rows": rows, "r_in": R_IN, "r_ad": R_AD}, draw)


EXPERIMENT = Experiment(
    "rates",
    "Rates of convergence, by cycle and by second",
    "The bounds of T2 and T3 are never crossed, the asymptotic slope is that of the cycle's map, and the orders are "
    "compared by the time to a target at each one's best learning rate under the cost model.",
    ("T2", "T3", "T4", "T12"),
    body,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
