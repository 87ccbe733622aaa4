"""Figures of seconds and bytes."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from reports.claims import PAPER_SPEEDUP
from reports.decisions import t_interval
from reports.figures.base import Plot, Table
from reports.numbers import fixed, interval, mebibytes, percent
from reports.rules.speed import speeds
from reports.run import Run
from reports.svg import LIGHT, legend, panels


def speed_plot(run: Run) -> Plot | None:
    rows = speeds(run)
    if not rows:
        return None
    modes = list(dict.fromkeys(row.mode for row in rows))

    def bounds(values: list[float]) -> tuple[float, float] | None:
        return t_interval(values) if len(values) >= 2 else None

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(narrow, len(modes), 2.9, 2.2)
        tops = [max(row.measured, row.predicted or 0.0) for row in rows]
        top = max([*tops, *(span[1] for row in rows if (span := bounds(row.repeats)))])
        for axis, mode in zip(axes, modes, strict=True):
            mine = [row for row in rows if row.mode == mode]
            for x, row in enumerate(mine):
                label = x == 0
                if row.predicted is not None:
                    axis.bar(x - 0.2, row.predicted, 0.34, facecolor="none", edgecolor=LIGHT["ink"],
                             ls=(0, (3, 1.5)), lw=1.1, label="predicted" if label else None)  # fmt: skip
                axis.bar(x + 0.2, row.measured, 0.36, color=LIGHT.get(mode, LIGHT["other"]), alpha=0.6,
                         label="measured, 95 % interval of the repeats" if label else None)  # fmt: skip
                high = row.measured
                if span := bounds(row.repeats):
                    axis.plot([x + 0.2] * 2, span, color=LIGHT["ink"], lw=1.4)
                    high = max(high, span[1])
                axis.text(
                    x + 0.2, high + 0.02 * top, f"{row.measured:.2f}", ha="center", va="bottom", fontsize=7.5
                )
            axis.axhline(1, color=LIGHT["muted"], lw=0.8, zorder=0.5)
            if mode == "identity":
                axis.axhline(
                    PAPER_SPEEDUP, color=LIGHT["ink"], lw=0.9, ls=":", label=f"paper: {PAPER_SPEEDUP:.2f}"
                )
            axis.set_title(mode)
            axis.set_xticks(range(len(mine)), [f"p = {row.cycle_length}" for row in mine], color=LIGHT["ink"])
            axis.set_ylim(0, 1.16 * top)
            axis.grid(visible=False, axis="x")
            if narrow or mode == modes[0]:
                axis.set_ylabel("times as fast as full")
        legend(figure, axes[modes.index("identity") if "identity" in modes else 0], 3, narrow)
        return figure

    share = run.timing.dequantisation_share_of_backward if run.timing else None
    tail = f" Dequantisation takes {percent(share)} of full's backward time." if share is not None else ""
    return Plot(
        "speed", "Speed-up over full backpropagation",
        f"Mean seconds of a step over a cycle, full divided by the mode, timed alone on the machine, "
        f"{'with' if run.config.recompute else 'without'} recompute.{tail}",
        "Predicted and measured speed-up by backward mode and cycle length; numbers in the table below.",
        {"rows": [{"mode": r.mode, "cycle_length": r.cycle_length, "predicted": r.predicted, "measured": r.measured,
                   "repeats": r.repeats} for r in rows], "dequantisation_share_of_backward": share},
        Table(
            ["mode", "p", "predicted", "measured", "95 % interval", "predicted / measured − 1"],
            [[r.mode, str(r.cycle_length), fixed(r.predicted), fixed(r.measured), interval(bounds(r.repeats)),
              percent(r.predicted / r.measured - 1) if r.predicted is not None else "none"] for r in rows],
        ), draw,
    )  # fmt: skip


def memory_plot(run: Run) -> Plot | None:
    if run.memory is None or not run.memory.rows:
        return None
    rows, meter = run.memory.rows, run.memory.meter

    def draw(narrow: bool) -> Figure:
        figure, (axis,) = panels(narrow, 1, 0.95 + 0.36 * len(rows), 1.15 + 0.4 * len(rows))
        for y, row in enumerate(reversed(rows)):
            first = y == 0
            axis.barh(y, row.peak_bytes / 2**20, 0.56, color=LIGHT.get(row.mode, LIGHT["other"]), alpha=0.6)
            if row.rss_anon_bytes is not None:
                axis.plot([row.rss_anon_bytes / 2**20] * 2, [y - 0.36, y + 0.36], color=LIGHT["ink"], lw=1.6,
                          label="anonymous pages, largest" if first else None)  # fmt: skip
            if row.floor_bytes is not None:
                axis.plot([row.floor_bytes / 2**20] * 2, [y - 0.36, y + 0.36], color=LIGHT["ink"], lw=1.4, ls=":",
                          label="floor: imports only" if first else None)  # fmt: skip
            peak = row.peak_bytes / 2**20
            axis.annotate(
                f"{peak:,.0f}", (peak, y), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
        axis.set_yticks(range(len(rows)), [row.mode for row in reversed(rows)], color=LIGHT["ink"])
        axis.set_xlim(0, 1.12 * max(row.peak_bytes for row in rows) / 2**20)
        axis.grid(visible=False, axis="y")
        axis.set_xlabel("MiB of the whole process")
        axis.xaxis.set_major_locator(MaxNLocator(4 if narrow else 7))
        legend(figure, axis, 2, narrow)
        return figure

    return Plot(
        "memory", "Peak memory",
        f"Bars: {meter}, one cycle of training steps at p = {run.config.cycle_length}, "
        f"{'with' if run.config.recompute else 'without'} recompute.",
        "Peak memory by backward mode; numbers in the table below.",
        {"meter": meter, "rows": [row.model_dump() for row in rows]},
        Table(
            ["mode", "peak", "anonymous pages, largest", "floor"],
            [[r.mode, mebibytes(r.peak_bytes), mebibytes(r.rss_anon_bytes), mebibytes(r.floor_bytes)] for r in rows],
        ), draw,
    )  # fmt: skip
