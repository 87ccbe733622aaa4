"""Figure of the surrogate gradient's direction, by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from reports.claims import COSINE_MARGIN
from reports.decisions import count, t_interval
from reports.figures.base import Plot, Table
from reports.numbers import fixed, interval
from reports.rules.direction import cosines
from reports.run import Run
from reports.svg import LIGHT, legend, panels

MODES = ("identity", "mlp")


def _summary(values: list[float]) -> tuple[float | None, float | None, float | None]:
    if not values:
        return None, None, None
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None, None
    low, high = t_interval(values)
    return mean, low, high


def _nan(values: Sequence[float | None]) -> np.ndarray[Any, Any]:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def fidelity_plot(run: Run) -> Plot | None:
    series: dict[str, dict[str, Any]] = {}
    rows: list[list[str]] = []
    for mode in MODES:
        entry: dict[str, Any] = {"predicted": None, "composed": None}
        for kind, key in (("cyclic", "predicted"), ("composed", "composed")):
            identifier = f"fidelity/{mode}/{kind}"
            if identifier in run.predictions and isinstance(run.predictions[identifier].value, tuple):
                entry[key] = run.predictions[identifier].value
        for stage in ("start", "after"):
            found = [_summary(values) for values in cosines(run, mode, "cyclic", stage)]
            entry[stage] = {
                "mean": [mean for mean, _, _ in found], "low": [low for _, low, _ in found],
                "high": [high for _, _, high in found],
            }  # fmt: skip
        if entry["start"]["mean"] or entry["after"]["mean"]:
            series[mode] = entry
    if not series:
        return None
    layers = max(len(entry[stage]["mean"]) for entry in series.values() for stage in ("start", "after"))
    for mode, entry in series.items():
        for layer in range(layers):

            def pick(values: Sequence[float | None] | None, at: int = layer) -> float | None:
                return values[at] if values and at < len(values) else None

            start, after = entry["start"], entry["after"]
            low, high = pick(start["low"]), pick(start["high"])
            rows.append(
                [mode, str(layer), fixed(pick(entry["predicted"])), fixed(pick(start["mean"])),
                 interval((low, high) if low is not None and high is not None else None),
                 fixed(pick(after["mean"])), fixed(pick(entry["composed"]))]
            )  # fmt: skip
    edges = [] if run.measurements is None else [block[0] - 0.5 for block in run.measurements.blocks[1:]]
    batches = len({batch.batch for batch in run.fidelity.batches}) if run.fidelity else 0

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(narrow, len(series), 3.3, 2.6)
        for axis, (mode, entry) in zip(axes, series.items(), strict=True):
            _fidelity_panel(axis, mode, entry, edges)
        legend(figure, axes[0], 3, narrow)
        return figure

    return Plot(
        "fidelity", "Direction of the surrogate gradient, by layer",
        f"Cosine with the true adapter gradient while the layer's own block is selected; mean over "
        f"{count(batches, 'held-out batch')}, bands: 95 % interval. Layer 0 is the lowest; thin vertical lines are the "
        "borders of blocks. In the top block nothing above is skipped, so its cosine is 1.",
        "Cosine by layer, predicted and measured, for the identity and mlp surrogates; numbers in the table below.",
        {"layout": "cyclic", "series": series, "block_edges": edges},
        Table(["mode", "layer", "predicted", "held-out mean, before", "95 % interval", "after", "composed"], rows),
        draw,
    )  # fmt: skip


def _fidelity_panel(axis: Axes, mode: str, entry: dict[str, Any], edges: list[float]) -> None:
    colour = LIGHT[mode]
    for edge in edges:
        axis.axvline(edge, color=LIGHT["muted"], lw=0.7, alpha=0.6)
    axis.axhline(COSINE_MARGIN, color=LIGHT["ink"], lw=0.8, ls=":", label="one half (C1)")
    for stage, words, marker, shade in (("start", "before", "o", 0.22), ("after", "after", "^", 0.10)):
        mean = _nan(entry[stage]["mean"])
        if not mean.size:
            continue
        x = np.arange(mean.size)
        axis.fill_between(
            x, _nan(entry[stage]["low"]), _nan(entry[stage]["high"]), color=colour, alpha=shade, lw=0
        )
        hollow: dict[str, Any] = {"mfc": "none", "alpha": 0.8, "lw": 0.8} if stage == "after" else {}
        axis.plot(
            x, mean, color=colour, marker=marker, ms=3.2, label=f"measured, {words} fine-tuning", **hollow
        )
    if entry["predicted"] is not None:
        axis.plot(_nan(entry["predicted"]), color=LIGHT["ink"], ls=(0, (4, 2)), lw=1.2, label="predicted")
    if entry["composed"] is not None:
        axis.plot(_nan(entry["composed"]), color=LIGHT["muted"], ls="-.", lw=1.0, label="predicted, composed")
    axis.grid(visible=False, axis="x")
    axis.set_title(f"{mode} surrogate")
    axis.set_xlabel("layer, from the embedding up")
    axis.set_ylabel("cosine")
    axis.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    low = min(
        0.0, *[float(np.nanmin(_nan(entry[s]["mean"]))) for s in ("start", "after") if entry[s]["mean"]]
    )
    axis.set_ylim(low - 0.05, 1.06)
