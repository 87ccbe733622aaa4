"""Figures of the training runs: loss by arm, and how far it falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from reports.decisions import count, t_interval
from reports.figures.base import Plot, Table, arm_style
from reports.metrics import Eval
from reports.numbers import fixed, interval
from reports.run import Run
from reports.svg import LIGHT, legend, panels


def _moving_mean(values: Sequence[float | None], window: int) -> list[float]:
    """Mean over the last `window` steps (fewer at the start); NaN where a loss was not finite."""
    array = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    return [float(array[max(0, t + 1 - window) : t + 1].mean()) for t in range(array.size)]


def _held_out(loss_at_start: float, evals: Sequence[Eval]) -> list[tuple[int, float | None]]:
    """(t, held-out loss), the start included; after a resume the later of two rows counts."""
    return sorted({0: loss_at_start, **{row.t: row.held_out_loss for row in evals}}.items())


def loss_plot(run: Run) -> Plot | None:
    curves: list[dict[str, Any]] = []
    window = 2 * run.config.cycle_length
    for arm in run.config.arms:
        for seed in run.config.seeds:
            metrics = run.arms.get((arm.name, seed))
            if metrics and metrics.header:
                curves.append(
                    {
                        "arm": arm.name,
                        "seed": seed,
                        "status": run.outcome(arm.name, seed).status,
                        "training_loss": metrics.losses,
                        "held_out": _held_out(metrics.header.loss_at_start, metrics.evals),
                    }
                )
    if not curves:
        return None
    start = max(metrics.header.loss_at_start for metrics in run.arms.values() if metrics.header)
    times = sorted({t for curve in curves for t, _ in curve["held_out"]})

    def at(arm: str, t: int) -> list[float]:
        found = [dict(curve["held_out"]).get(t) for curve in curves if curve["arm"] == arm]
        return [value for value in found if value is not None]

    rows = []
    for arm in run.config.arms:
        for t in times:
            if values := at(arm.name, t):
                spread = [float(np.mean(values)), min(values), max(values)]
                rows.append([arm.name, str(t), str(len(values)), *(fixed(value) for value in spread)])

    def draw(narrow: bool) -> Figure:
        figure, (left, right) = panels(narrow, 2, 3.4, 2.5)
        top = 0.0
        for arm in run.config.arms:
            look = arm_style(arm)
            mine = [curve for curve in curves if curve["arm"] == arm.name]
            if not mine:
                continue
            smooth = [_moving_mean(curve["training_loss"], window) for curve in mine]
            longest = max(map(len, smooth))
            if longest:
                # Seeds that stopped early leave the mean; the others go on.
                stack = np.ma.masked_invalid([v + [math.nan] * (longest - len(v)) for v in smooth])
                steps = np.arange(1, longest + 1)
                mean, low, high = (
                    np.ma.filled(f(stack, axis=0), np.nan) for f in (np.ma.mean, np.ma.min, np.ma.max)
                )
                left.plot(steps, mean, color=look.colour, ls=look.line, lw=1.4)
                left.fill_between(steps, low, high, color=look.colour, alpha=0.10, lw=0)
            here = [(t, at(arm.name, t)) for t in times]
            here = [(t, values) for t, values in here if values]
            xs = [t for t, _ in here]
            means = [float(np.mean(values)) for _, values in here]
            right.plot(xs, means, color=look.colour, ls=look.line, marker=look.marker, label=arm.name)
            lows, highs = [min(values) for _, values in here], [max(values) for _, values in here]
            right.fill_between(xs, lows, highs, color=look.colour, alpha=0.10, lw=0)
            top = max([top, *means])
        left.set_title(f"Training loss, mean of the last {window} steps")
        right.set_title("Held-out loss")
        for axis in (left, right):
            axis.set_xlabel("optimiser steps")
            axis.set_ylabel("nats a token")
            axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axis.set_xlim(left=0)
            if top > 1.3 * start:  # a diverged arm must not flatten the others
                axis.set_ylim(top=1.3 * start)
        legend(figure, right, 4, narrow)
        return figure

    ran = len({curve["seed"] for curve in curves})
    unlike = [curve for curve in curves if curve["status"] != "done"]
    note = ""
    if unlike:
        note = " Not done: " + ", ".join(f"{c['arm']} seed {c['seed']} ({c['status']})" for c in unlike) + "."
    clipped = (
        " Curves that leave the top have diverged." if any(c["status"] == "diverged" for c in curves) else ""
    )
    return Plot(
        "loss", "Loss by arm",
        f"Mean over the seeds that ran ({count(ran, 'seed')}); bands: their range. Dashed controls have the colour "
        f"of the arm they are compared with.{clipped}{note}",
        "Training and held-out loss against optimiser steps, one curve an arm; numbers in the table below.",
        {"window": window, "curves": curves},
        Table(["arm", "after steps", "seeds", "mean held-out loss", "lowest", "highest"], rows), draw,
    )  # fmt: skip


def drop_plot(run: Run) -> Plot | None:
    drops = {
        arm.name: [o.drop for o in run.outcomes(arm.name) if o.drop is not None and o.status != "diverged"]
        for arm in run.config.arms
    }
    if not any(drops.values()):
        return None
    shown = [arm for arm in run.config.arms if drops[arm.name]]
    # A diverged run would stretch the axis until nothing else can be read; it is named instead.
    diverged = [o for arm in run.config.arms for o in run.outcomes(arm.name) if o.status == "diverged"]
    left_out = ", ".join(f"{o.arm} seed {o.seed}" for o in diverged)

    def bounds(name: str) -> tuple[float, float] | None:
        return t_interval(drops[name]) if len(drops[name]) >= 2 else None

    def draw(narrow: bool) -> Figure:
        figure, (axis,) = panels(narrow, 1, 0.9 + 0.27 * len(shown), 0.9 + 0.30 * len(shown))
        for y, arm in enumerate(reversed(shown)):
            look, values = arm_style(arm), drops[arm.name]
            if interval_ := bounds(arm.name):
                axis.plot(interval_, [y, y], color=look.colour, lw=4, alpha=0.30, solid_capstyle="butt")
            axis.plot(
                values, [y] * len(values), ls="none", marker=look.marker, ms=5, color=look.colour, alpha=0.85
            )
            axis.plot([float(np.mean(values))] * 2, [y - 0.28, y + 0.28], color=LIGHT["ink"], lw=1.6)
        axis.set_yticks(range(len(shown)), [arm.name for arm in reversed(shown)], color=LIGHT["ink"])
        axis.set_ylim(-0.6, len(shown) - 0.4)
        axis.grid(visible=False, axis="y")
        axis.set_xlabel("fall of the held-out loss from step 0 to the end, nats a token")
        if narrow:
            axis.set_xlabel("fall of the held-out loss, nats a token")
        if min(min(values) for values in drops.values() if values) < 0:
            axis.axvline(0, color=LIGHT["muted"], lw=0.8)
        return figure

    return Plot(
        "drop", "How far the held-out loss falls",
        "One mark a seed, upright bar: mean, wide line: 95 % interval of the mean. Verdicts use paired differences by "
        "seed, which scatter less than the marks do."
        + (f" Not drawn, diverged: {left_out}." if left_out else ""),
        "Fall of the held-out loss by arm and seed; numbers in the table below.",
        {"drops": [{"arm": arm.name, "seed": o.seed, "drop": o.drop, "status": o.status}
                   for arm in run.config.arms for o in run.outcomes(arm.name)]},
        Table(
            ["arm", "seeds", "mean fall", "95 % interval", "by seed"],
            [[arm.name, str(len(drops[arm.name])), fixed(float(np.mean(drops[arm.name]))), interval(bounds(arm.name)),
              ", ".join(map(fixed, drops[arm.name]))] for arm in shown],
        ), draw,
    )  # fmt: skip
