"""Speed of convergence: bounds never crossed, exact slopes met, orders compared by step and by second (T2-T6b, T12)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

from bcd_theory import BOUNDS
from bcd_theory.cost import StepCosts, speedup
from bcd_theory.linear import stability_limit
from bcd_theory.partition import equal_blocks
from bcd_theory.predictions import Prediction
from reports.decisions import Verdict
from reports.numbers import fixed, percent
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations import rate_bounds
from simulations.arms import limit_of
from simulations.experiment import Experiment, Write, legend_below, main, plain_log
from simulations.problems import Quadratic, coupled
from simulations.rate_bounds import CASES, RANDOM_RUNS, Case
from simulations.records import Record, Registered, Size, prediction
from simulations.runner import Arm, run

Array = NDArray[np.float64]
P = 4
# problems for the bounds, for the slopes, for the orders at each coupling; most steps of an order
COUNTS = {"quick": (4, 2, 2, 1500), "standard": (40, 20, 15, 6000), "full": (200, 100, 60, 12000)}

SLOPES = (
    Arm("full", order="full"),
    Arm("cyclic"),
    Arm("full, momentum", "sgd-ema", order="full", momentum=0.5),
    Arm("cyclic, idle momentum", "sgd-ema", "momentum", momentum=0.5),
    Arm("cyclic, idle frozen", "sgd-ema", "frozen", momentum=0.5),
    Arm("cyclic, heavy ball", "heavy-ball", "momentum", momentum=0.5),
    Arm("random", order="random"),
)
SLOPE_TOLERANCE, RANDOM_TOLERANCE = 0.01, 0.05
RANDOM_CYCLES = 30

ORDERS = ("full", "cyclic", "reversed", "shuffled", "random", "importance", "greedy")
COUPLINGS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
RATES = 16
TARGET = 1e-4
# The slope is that of late cycles, and says less about the first four decades, where the slowest mode is one of many:
# the verdict is at TARGET all the same, and full and cyclic run on to LATE, for LATE_STEPS at least, to show the rest.
LATE, LATE_STEPS = 1e-12, 6000
LAYERS = 32
# Head, loss and optimiser in units of the layers' forward: none, some, and as heavy as a small model's vocabulary.
HEADS = (0.0, 0.5, 1.7)


def cost(head: float) -> StepCosts:
    """Recompute and input gradient cost a forward each, the adapter gradient another."""
    return StepCosts(LAYERS, 1.0, head, 0.0, recompute=1.0, input_gradient=1.0, adapter_gradient=1.0)


def slope_problem(seed: int, i: int) -> tuple[Quadratic, Array]:
    rng = np.random.default_rng([seed, 4, i])
    return coupled(8, P, 0.7, 5.0, rng), rng.normal(size=8)


def order_problem(seed: int, coupling: float, i: int) -> tuple[Quadratic, Array]:
    """One direction shared by all coordinates, so that L/L_max goes from 1 to nearly p."""
    rng = np.random.default_rng([seed, 12, int(100 * coupling), i])
    d = np.sqrt(rng.permutation(np.geomspace(0.1, 1.0, 16)))
    a = ((1 - coupling) * np.eye(16) + coupling) * np.outer(d, d)
    return Quadratic(a, equal_blocks(16, P)), rng.normal(size=16)


def _hessian(problem: Quadratic) -> Array:
    n = problem.partition.n
    return problem.gradient(torch.eye(n, dtype=torch.float64), slice(0, n)).numpy().copy()


def measure(size: Size, seed: int) -> dict[str, Any]:
    """Hessians, column by column from the gradients, and the starts."""
    bounds, slopes, each, _ = COUNTS[size]
    of_bounds = []
    for i in range(bounds):
        row = []
        for equal in (False, True):
            case = next(case for case in CASES if case.equal_constants == equal)
            problem, start, beta, place = rate_bounds.draw(case, seed, i)
            row.append({"hessian": _hessian(problem), "start": start, "beta": beta, "place": place})
        of_bounds.append(row)
    return {
        "bounds": of_bounds,
        "slopes": [_hessian(slope_problem(seed, i)[0]) for i in range(slopes)],
        "slope_starts": [slope_problem(seed, i)[1] for i in range(slopes)],
        "orders": [_hessian(order_problem(seed, c, i)[0]) for c in COUPLINGS for i in range(each)],
    }


def predict(measured: Mapping[str, Any]) -> Sequence[Prediction]:
    found = []
    for case in CASES:
        theorem, assumes = case.bound.split("-")[0], BOUNDS[case.bound].assumptions
        for i, pair in enumerate(measured["bounds"]):
            it = pair[case.equal_constants]
            values = rate_bounds.constants(
                case, np.array(it["hessian"]), np.array(it["start"]), it["beta"], it["place"]
            )
            found.append(prediction(f"rate/{case.name}/{i}", values["eta"], theorem, assumes=assumes))
            found.append(
                prediction(
                    f"bound/{case.name}/{i}", rate_bounds.allowed(case, values), theorem, assumes=assumes
                )
            )
    for arm in SLOPES:
        both = zip(measured["slopes"], measured["slope_starts"], strict=True)
        rates, slopes = zip(*(_slope(np.array(h), np.array(x), arm) for h, x in both), strict=True)
        found.append(prediction(f"slope-rate/{arm.name}", rates, "T4", assumes="a fifth of the limit"))
        found.append(
            prediction(f"slope/{arm.name}", slopes, "T4", unit="log loss a cycle", assumes="late cycles")
        )
    for order in ("full", "cyclic", "random"):
        steps = [_steps(np.array(h), order) for h in measured["orders"]]
        alone = "the slope of late cycles holds from the start; best learning rate of the grid"
        found.append(prediction(f"steps/{order}", steps, "T4", unit=f"steps to {LATE:g}", assumes=alone))
    for head in HEADS:
        gain = speedup(cost(head), "exact", layers_per_step=LAYERS // P)
        found.append(prediction(f"speedup/{head:g}", gain, "T12", assumes="equal layers, cost of `cost`"))
    return found


def _slope(hessian: Array, start: Array, arm: Arm) -> tuple[float, float]:
    """(learning rate, change of log loss a cycle): a fifth of the limit, and twice the log radius of the cycle there.

    Random order: of the expected loss over cycles RANDOM_CYCLES/2 to RANDOM_CYCLES, by its exact mean-square map.
    """
    blocks = equal_blocks(len(hessian), P)
    limit = limit_of(arm, hessian, blocks)
    rate = 0.2 * limit.learning_rate
    if arm.order != "random":
        return rate, float(np.log(limit.spectral_radius(rate))) * (2 * P if arm.order == "full" else 2)
    n = len(hessian)
    steps = []
    for block in blocks.arrays():
        step = np.eye(n)
        step[block] -= rate * hessian[block]
        steps.append(step)
    second, losses = np.outer(start, start), []
    for _ in range(RANDOM_CYCLES * P):
        second = np.mean([step @ second @ step.T for step in steps], axis=0)
        losses.append(float(np.sum(hessian * second)) / 2)
    return rate, _fit(np.array([0.0, *losses[P - 1 :: P]]), RANDOM_CYCLES)


def _fit(losses: Array, cycles: int) -> float:
    """Slope of log loss over the late half; losses by cycle, from 0."""
    late = np.arange(cycles // 2, cycles + 1)
    return float(np.polyfit(late, np.log(losses[late]), 1)[0])


def _grid(hessian: Array, order: str) -> Array:
    blocks = [slice(4 * j, 4 * j + 4) for j in range(P)]
    curvature = max(float(np.linalg.eigvalsh(hessian[b, b])[-1]) for b in blocks)
    if order == "full":
        curvature = float(np.linalg.eigvalsh(hessian)[-1])
    return np.geomspace(0.1, 4.0, RATES) / curvature


def _steps(hessian: Array, order: Literal["full", "cyclic", "random"]) -> float:
    """Steps to LATE of the first loss at the best rate of the grid, if the slowest mode were alone."""
    limit = stability_limit(hessian, equal_blocks(16, P), order=order)
    radii = np.array([limit.spectral_radius(float(rate)) for rate in _grid(hessian, order)])
    each = np.log(radii) * {"full": 2.0, "cyclic": 2.0 / P, "random": 1.0}[order]
    return float(np.log(LATE) / each.min())


def perform(registered: Registered, write: Write) -> None:
    bounds, slopes, each, most = COUNTS[registered.size]
    for case in CASES:
        for i in range(bounds):
            eta = registered.predicted(f"rate/{case.name}/{i}")
            found = rate_bounds.measured(case, registered.seed, i, eta)
            write({"kind": "bound", "case": case.name, "problem": i, "measured": found})
    for arm in SLOPES:
        for i in range(slopes):
            rate = float(registered.predicted_values(f"slope-rate/{arm.name}")[i] or 0)
            said = float(registered.predicted_values(f"slope/{arm.name}")[i] or 0)
            problem, start = slope_problem(registered.seed, i)
            write(
                {
                    "kind": "slope",
                    "arm": arm.name,
                    "problem": i,
                    "measured": slope(problem, arm, start, rate, said),
                }
            )
    for k, coupling in enumerate(COUPLINGS):
        for i in range(each):
            problem, start = order_problem(registered.seed, coupling, i)
            for order in ORDERS:
                row = {"kind": "order", "problem": k * each + i, "coupling": coupling, "order": order}
                timed = order in ("full", "cyclic")
                length = max(most, LATE_STEPS) if timed else most
                steps, late = steps_to(problem, order, start, length, (TARGET, LATE))
                write({**row, "steps": steps, **({"late_steps": late} if timed else {})})


def slope(problem: Quadratic, arm: Arm, start: Array, rate: float, said: float) -> float:
    """Change of log loss a cycle over the late half of a run; `said` only decides how long it is (e^-400 is left).

    Random order: of the mean loss of 4 RANDOM_RUNS runs, short enough that the mean is not made by a few of them.
    """
    if arm.order == "random":
        cycles = RANDOM_CYCLES
        losses = run(
            problem, arm, start, np.full(4 * RANDOM_RUNS, rate), cycles * P, record_every=P
        ).losses.mean(1)
    else:
        cycles = int(min(4000, 400 / -said))
        losses = run(problem, arm, start, rate, cycles * P, record_every=P).losses[:, 0]
    return _fit(losses, cycles)


def steps_to(
    problem: Quadratic, order: str, start: Array, most: int, targets: Sequence[float] = (TARGET,)
) -> list[int | None]:
    """Fewest steps to each target, a share of the first loss, over the grid of rates; None where none comes so far."""
    rates = _grid(problem.A, order)
    with np.errstate(all="ignore"):  # too large a rate overflows, and never arrives
        losses = run(
            problem, Arm(order, order=order), start, rates, most, seeds=np.zeros(RATES, dtype=int)
        ).losses
        shares = losses / losses[0]
    found: list[int | None] = []
    for target in targets:
        reached = shares <= target
        found.append(min((int(np.argmax(column)) for column in reached.T if column.any()), default=None))
    return found


def judge(record: Record) -> list[Part]:
    parts = [_bound_part(record, case) for case in CASES]
    parts += [_slope_part(record, arm) for arm in SLOPES]
    parts += [_winner_part(record, TARGET), _winner_part(record, LATE)]
    parts += [_order_part(record, order) for order in ORDERS[2:]]
    return parts + [_map_part(record, coupling) for coupling in COUPLINGS]


def _bound_part(record: Record, case: Case) -> Part:
    lower = BOUNDS[case.bound].sense == "lower"
    worst, n = 0.0, 0
    for row in record.of("bound"):
        if row["case"] != case.name:
            continue
        n += 1
        for found, said in zip(
            row["measured"], record.predicted_values(f"bound/{case.name}/{row['problem']}"), strict=True
        ):
            assert said is not None
            ratio = float("inf") if found is None else said / found if lower else found / said
            worst = max(worst, ratio)
    what = "the bound is at most" if lower else "at most"
    tail = "of the measured quantity" if lower else "of the bound"
    return Part(
        name=f"{case.bound} is never crossed, {case.order} order",
        verdict="refuted" if worst > 1 + 1e-9 or not n else "supported",
        reason=f"{BOUNDS[case.bound].quantity}: {what} {percent(worst)} {tail} on {n} problems of "
        f"{rate_bounds.CYCLES} cycles.",
        effect=worst if np.isfinite(worst) else None,
        unit="share of the bound",
        margin=1.0,
        n=n,
    )


def _slope_part(record: Record, arm: Arm) -> Part:
    found = [row["measured"] for row in record.of("slope") if row["arm"] == arm.name]
    said = record.predicted_values(f"slope/{arm.name}")
    tolerance = RANDOM_TOLERANCE if arm.order == "random" else SLOPE_TOLERANCE
    worst = max(abs(a / float(b or 0) - 1) for a, b in zip(found, said, strict=True))
    return Part(
        name=f"slope of {arm.name} (T4)",
        verdict="supported" if worst < tolerance else "refuted",
        reason=f"Largest relative error {percent(worst, 2)} on {len(found)} problems"
        f"{f', mean loss of {4 * RANDOM_RUNS:,} runs' if arm.order == 'random' else ''}.",
        effect=worst,
        margin=tolerance,
        n=len(found),
        unit="relative error",
    )


def _steps_table(record: Record, key: str = "steps") -> dict[str, dict[int, int | None]]:
    table: dict[str, dict[int, int | None]] = {order: {} for order in ORDERS}
    for row in record.of("order"):
        if key in row:
            table[row["order"]][row["problem"]] = row[key]
    return table


def _seconds(record: Record, order: str, head: float) -> float:
    """Of a step, in units of full's. Importance and greedy read every block's gradient, as full does."""
    return 1.0 if order in ("full", "importance", "greedy") else 1 / record.predicted(f"speedup/{head:g}")


def _winner_part(record: Record, target: float) -> Part:
    """Full or cyclic by T4 and T12, against the measured times, where either is said to be 1.25 times faster.

    Both times are foretold from the slowest mode alone, so their ratio is the same for every target. It counts at
    TARGET; LATE, where the slope speaks for itself, is for information.
    """
    late = target == LATE
    table, right, n, unknown, worst = _steps_table(record, "late_steps" if late else "steps"), 0, 0, 0, 1.0
    for i, (full, cyclic) in enumerate(
        zip(record.predicted_values("steps/full"), record.predicted_values("steps/cyclic"), strict=True)
    ):
        a, b = table["full"][i], table["cyclic"][i]
        if a and b:
            off = (a / b) / (float(full or 0) / float(cyclic or 0))
            worst = max(worst, off, 1 / off)
        for head in HEADS:
            seconds = _seconds(record, "cyclic", head)
            said = float(full or 0) / (float(cyclic or 0) * seconds)
            if 0.8 < said < 1.25:
                continue
            if a is None and b is None:
                unknown += 1
                continue
            n += 1
            # One that did not come so far is the slower one.
            faster = b is not None and (a is None or a > b * seconds)
            right += faster == (said > 1)
    share = right / n if n else None
    held: Verdict = "inconclusive" if share is None else "supported" if share >= 0.9 else "refuted"
    return Part(
        name="the faster of full and cyclic is foretold (T4, T12)"
        if not late
        else f"the same at a loss of {target:g}, in late cycles",
        counts=not late,
        verdict="inconclusive" if late else held,
        reason=f"{right} of {n} comparisons right in seconds to {target:g} of the first loss, where the foretold "
        f"factor is 1.25 or more; {unknown} undecided, as neither came so far. The ratio of steps is within a factor "
        f"{fixed(worst, 2)} of the foretold one.",
        effect=share,
        unit="share of comparisons",
        margin=0.9,
        n=n,
    )


def _order_part(record: Record, order: str) -> Part:
    table = _steps_table(record)
    both = [(table[order][i], cyclic) for i, cyclic in table["cyclic"].items()]
    ratios = [a / b for a, b in both if a and b]
    middle = float(np.median(ratios)) if ratios else None
    never = sum(a is None for a, _ in both)
    return Part(
        name=f"steps of {order} order over cyclic's",
        counts=False,
        verdict="inconclusive",
        effect=middle,
        unit="ratio of steps",
        n=len(ratios),
        reason=f"Median {fixed(middle, 2)}, from {fixed(min(ratios, default=None), 2)} to "
        f"{fixed(max(ratios, default=None), 2)}, each at its best learning rate; {never} of {len(both)} never arrive.",
    )


def _map_part(record: Record, coupling: float) -> Part:
    table = _steps_table(record)
    mine = sorted({row["problem"] for row in record.of("order") if row["coupling"] == coupling})
    pairs = [(table["full"][i], table["cyclic"][i]) for i in mine]
    ratios = [b / a for a, b in pairs if a and b]
    needed = float(np.median(ratios)) if ratios else None
    gains = []
    for head in HEADS:
        gain = record.predicted(f"speedup/{head:g}")
        gains.append(
            f"{'no head' if not head else f'head {head:g} F'} {fixed(gain and needed and gain / needed, 2)}"
        )
    return Part(
        name=f"full's time over cyclic's to a loss of {TARGET:g}, coupling {coupling:g}",
        counts=False,
        verdict="inconclusive",
        effect=needed,
        unit="steps of cyclic over full's",
        n=len(ratios),
        reason=f"Cyclic needs {fixed(needed, 2)} times full's steps (median of {len(ratios)}), so it wins only where "
        f"its step is that much cheaper. Full's time over cyclic's in exact mode: {', '.join(gains)}.",
    )


def _coupling_of(hessian: Array) -> float:
    """L/L_max."""
    return float(np.linalg.eigvalsh(hessian)[-1] * _grid(hessian, "cyclic")[0] / 0.1)


def draw(record: Record, axes: Sequence[Axes]) -> None:
    colours = ("full", "exact", "other", "identity", "frozen", "mlp", "certified")
    for arm, colour in zip(SLOPES, colours, strict=True):
        found = [-row["measured"] for row in record.of("slope") if row["arm"] == arm.name]
        said = [-float(v or 0) for v in record.predicted_values(f"slope/{arm.name}")]
        axes[0].plot(said, found, "o", color=LIGHT[colour], label=arm.name, markersize=3.5)
    plain_log(axes[0], "x", "y")
    ends = [
        min(axes[0].get_xlim()[0], axes[0].get_ylim()[0]),
        max(axes[0].get_xlim()[1], axes[0].get_ylim()[1]),
    ]
    axes[0].plot(ends, ends, "--", color=LIGHT["muted"], linewidth=1)
    axes[0].set_xlabel("predicted fall of log loss a cycle")
    axes[0].set_ylabel("measured")
    axes[0].set_title("Slopes")
    legend_below(axes[0])
    table = _steps_table(record)
    ratio = [_coupling_of(np.array(hessian)) for hessian in record.measured["orders"]]
    shown = (
        ("cyclic", "exact", "o"),
        ("shuffled", "frozen", "s"),
        ("random", "identity", "^"),
        ("greedy", "mlp", "v"),
    )
    for order, colour, mark in shown:
        pairs = [
            (x, b / a)
            for i, x in enumerate(ratio)
            if (a := table["full"].get(i)) and (b := table[order].get(i))
        ]
        if pairs:
            axes[1].plot(
                *zip(*pairs, strict=True), mark, color=LIGHT[colour], label=order, markersize=3.5, alpha=0.8
            )
    for head, line in zip(HEADS, ("-", "--", ":"), strict=True):
        gain = record.predicted(f"speedup/{head:g}")
        name = f"step {gain:.2f} times cheaper ({'no head' if not head else f'head {head:g} F'})"
        axes[1].axhline(gain, color=LIGHT["ink"], linestyle=line, linewidth=1, label=name)
    plain_log(axes[1], "y")
    axes[1].set_xlabel("L / L_max")
    axes[1].set_ylabel("steps over full's")
    axes[1].set_title("Below a line, cyclic wins in seconds")
    legend_below(axes[1], 1)


EXPERIMENT = Experiment(
    "rates",
    "Rates of convergence, by cycle and by second",
    "Every bound on a rate is run on its own terms and never crossed; the slope of late cycles is that of the cycle's "
    "exact map; and the orders are compared by the steps they need at their best learning rates. A step of cyclic "
    "descent in exact mode is cheaper than full backpropagation's by the factors of the horizontal lines (T12, p = 4, "
    "with a head that costs nothing, half, or 1.7 times the layers' forward): it wins in seconds only below them, "
    "that is on strongly coupled problems, and on uncoupled ones it cannot.",
    ("T2", "T3", "T4", "T6", "T6b", "T12"),
    measure,
    predict,
    perform,
    judge,
    draw,
    panels=2,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
