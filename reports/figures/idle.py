"""Figures of what idle layers do: T6's law and T9's movement."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bcd_theory.predictions import LAW_TOLERANCE
from reports.figures.base import Plot, Table, arm_style
from reports.numbers import fixed, significant
from reports.rules.idle import movement_ratios
from reports.run import Run
from reports.svg import LIGHT, legend, panels


def law_plot(run: Run) -> Plot | None:
    points: list[dict[str, Any]] = [
        {"arm": arm, "seed": seed, "t": law.t, "worst": law.worst, "checked": law.checked,
         "violations": law.violations, "tensor": law.worst_tensor}
        for (arm, seed), metrics in run.arms.items() if metrics.header and metrics.header.arm.idle == "momentum"
        for law in metrics.laws
    ]  # fmt: skip
    drawn = [point for point in points if point["worst"]]
    if not drawn:
        return None
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        by_arm.setdefault(point["arm"], []).append(point)
    looks = {arm.name: arm_style(arm) for arm in run.config.arms}

    def draw(narrow: bool) -> Figure:
        figure, (axis,) = panels(narrow, 1, 2.6, 2.7)
        for arm, mine in by_arm.items():
            kept = [point for point in mine if point["worst"]]
            axis.plot([point["t"] + 1 for point in kept], [point["worst"] for point in kept], ls="none",
                      marker=looks[arm].marker, ms=3, color=looks[arm].colour, alpha=0.7, label=arm)  # fmt: skip
        axis.axhline(
            LAW_TOLERANCE, color=LIGHT["ink"], ls=(0, (4, 2)), lw=1.2, label=f"bound {LAW_TOLERANCE:g}"
        )
        axis.set_yscale("log")
        low = min(point["worst"] for point in drawn)
        axis.set_ylim(
            min(low / 3, LAW_TOLERANCE / 100), max(3 * LAW_TOLERANCE, 3 * max(p["worst"] for p in drawn))
        )
        # Powers as text: matplotlib's mathtext would be drawn with glyphs of its own.
        axis.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"1e{round(math.log10(value))}".replace("-", "−"))
        )
        axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        axis.set_xlabel("optimiser step")
        axis.set_ylabel("worst relative error")
        axis.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        legend(figure, axis, 4, narrow)
        return figure

    rows = [
        [arm, f"{sum(p['checked'] for p in mine):,}", str(sum(p["violations"] for p in mine)),
         significant(max((p["worst"] or 0.0) for p in mine))]
        for arm, mine in by_arm.items()
    ]  # fmt: skip
    return Plot(
        "law", "Idle layers move as T6 says",
        "Largest relative error |recorded − predicted| / |predicted| of the displacement over all idle tensors "
        "of a step, one mark a step and seed. Tensors that move less than 100 float32 roundings are judged by that "
        "bound instead. Frozen layers are not drawn: they must not move at all.",
        "Worst relative error of the idle displacement by step, far below or above the bound; numbers in the table.",
        {"points": points, "bound": LAW_TOLERANCE},
        Table(["arm", "idle tensors checked", "violations", "worst relative error"], rows), draw,
    )  # fmt: skip


def movement_plot(run: Run) -> Plot | None:
    found: dict[str, dict[str, Any]] = {}
    for idle in ("momentum", "frozen"):
        arm = run.arm_like("exact", idle)
        identifier = f"movement/{idle}/ratio"
        ratios = movement_ratios(run, arm) if arm else []
        if any(ratios) and identifier in run.predictions:
            found[idle] = {"arm": arm, "ratios": ratios, "predicted": run.predictions[identifier].value}
    if not found:
        return None

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(narrow, len(found), 2.7, 2.4)
        top = max(
            1.05, *[value for entry in found.values() for values in entry["ratios"] for value in values]
        )
        for axis, (idle, entry) in zip(axes, found.items(), strict=True):
            colour = LIGHT["exact" if idle == "momentum" else "frozen"]
            low, high = entry["predicted"]
            axis.axhspan(low, high, facecolor=LIGHT["muted"], alpha=0.14, lw=0)
            for value in (low, high):
                axis.axhline(value, color=LIGHT["ink"], lw=1.1, ls=(0, (4, 2)),
                             label="predicted: pure drift, pure diffusion" if value == low else None)  # fmt: skip
            for block, values in enumerate(entry["ratios"]):
                axis.plot([block] * len(values), values, ls="none", marker="o", ms=4, color=colour, alpha=0.6,
                          label="measured, one mark a seed" if block == 0 else None)  # fmt: skip
                if values:
                    axis.plot([block - 0.2, block + 0.2], [float(np.mean(values))] * 2, color=colour, lw=2.2,
                              label="mean" if block == 0 else None)  # fmt: skip
            axis.set_title(f"{entry['arm']} against full")
            axis.set_xlabel("block, from the embedding up")
            axis.set_ylabel("movement / full's")
            axis.set_xticks(range(len(entry["ratios"])))
            axis.set_xlim(-0.5, len(entry["ratios"]) - 0.5)
            axis.set_ylim(0, 1.08 * top)
        legend(figure, axes[0], 3, narrow)
        return figure

    rows = []
    for idle, entry in found.items():
        low, high = entry["predicted"]
        for block, values in enumerate(entry["ratios"]):
            if values:
                rows.append([idle, str(block), f"{fixed(low)} to {fixed(high)}", fixed(float(np.mean(values))),
                             ", ".join(map(fixed, values))])  # fmt: skip
    return Plot(
        "movement", "How far each block moves",
        "Root mean square of x at the end − x at the start over a block's adapters, relative to full backpropagation "
        "at the same learning rate and seed. T9 says where it must lie: between pure drift and pure diffusion.",
        "Movement of each block relative to full, with the predicted range; numbers in the table below.",
        {"movement": found},
        Table(["idle policy", "block", "predicted range", "measured mean", "by seed"], rows), draw,
    )  # fmt: skip
