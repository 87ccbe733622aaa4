"""`lcsb bench memory --growth`: peak and seconds against length, depth and vocabulary, measured and predicted.

Models of random weights; one thing is changed at a time, everything else stays. Each point is a fresh process and two
steps of mode full, of which the second is timed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bcd_theory.geometry import MIB, Geometry
from lcsb.bench.cases import Case
from lcsb.bench.memory import Report, Setup, measure_arm, prediction
from lcsb.bench.store import Store
from reports.strict import write_text

#: a narrow model, so that what grows is seen beside the process's floor and a sweep takes minutes
BASE = Geometry(8, 768, 2304, 12, 4, 64, 32768)
SWEEPS: Mapping[str, tuple[int, ...]] = {
    "tokens": (128, 256, 512, 1024, 2048),
    "layers": (4, 8, 16, 32, 64),
    "vocabulary": (16384, 32768, 65536, 131072, 262144),
}


def points(
    base: Geometry = BASE, sweeps: Mapping[str, Sequence[int]] = SWEEPS, tokens: int = 256
) -> dict[str, list[tuple[int, Geometry, int]]]:
    """sweep -> (value, shapes, tokens) of each of its points."""

    def point(name: str, value: int) -> tuple[int, Geometry, int]:
        if name == "tokens":
            return value, base, value
        changed: dict[str, Any] = {name: value}
        return value, replace(base, **changed), tokens

    return {name: [point(name, value) for value in values] for name, values in sweeps.items()}


def measure_growth(
    setup: Setup,
    out: Path,
    progress: Callable[[str], contextlib.AbstractContextManager[Report]],
    sweeps: Mapping[str, list[tuple[int, Geometry, int]]] | None = None,
    ram: int = 10**9,
) -> dict[str, Any]:
    """Measure every point that is not measured yet, write the report to `out` and the figure beside it (.svg).

    Args:
        sweeps: as `points` gives them.
        ram: budget in bytes that each point is planned for.
    """
    store = Store(out, setup.threads)
    sweeps = points(tokens=setup.tokens) if sweeps is None else sweeps
    plan = [(name, *point) for name, found in sweeps.items() for point in found]
    rates = store.part("rates", {"threads": setup.threads}, functools.partial(machine_rates, setup.threads))
    setup = replace(setup, rates={name: rate for name, rate in rates.items() if name != "load_average"})
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in sweeps}
    with progress("growth") as show:
        for done, (name, value, geometry, tokens) in enumerate(plan):
            show(done / len(plan), f"{name} {value}")
            case = Case(_label(geometry), real=False, memory_limit=ram, shapes=geometry)
            one = replace(setup, tokens=tokens, steps=2, cold=False)
            measure = functools.partial(measure_arm, case, "full", one)
            found = store.part(f"{case.name}.{tokens}", one.settings(case, arm="full"), measure)
            rows[name].append(_row(value, tokens, found))
    report = store.whole(
        "growth", setup.described(), base=asdict(BASE), rates=dict(setup.rates or {}), sweeps=rows
    )
    write_text(out.with_suffix(".svg"), draw(report["sweeps"]))
    return report


def machine_rates(threads: int) -> dict[str, float]:
    """What a second of this machine does, for predicted seconds; measured here and now."""
    import torch

    from lcsb.engine.rates import measured_rates

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return asdict(measured_rates())
    finally:
        torch.set_num_threads(before)


def _label(geometry: Geometry) -> str:
    numbers = (geometry.layers, geometry.hidden, geometry.intermediate, geometry.heads, geometry.kv_heads,
               geometry.vocabulary)  # fmt: skip
    return "x".join(map(str, numbers))


def _row(value: int, tokens: int, found: Mapping[str, Any]) -> dict[str, Any]:
    planned = found["planned"]
    seconds = planned["seconds"]
    return {
        "name": str(value),
        "value": value,
        "tokens": tokens,
        "peak_bytes": found["peak_bytes"],
        "predicted_bytes": planned["peak"]["total"],
        "seconds": found["seconds"],
        "predicted_seconds": None if seconds is None else sum(seconds.values()),
        "error": prediction(found),
        "planned": planned,
        "load_average": found["load_average"],
    }


def draw(sweeps: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """SVG: a column a sweep, peak above and seconds below, measured as points and predicted as a line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    from reports.svg import LIGHT, WIDE, render_svg, standalone, style

    names = {"tokens": "tokens in a row", "layers": "layers", "vocabulary": "words in the vocabulary"}
    with style():
        figure = Figure(figsize=(WIDE, 4.4), layout="constrained")
        grid = figure.subplots(2, len(sweeps), squeeze=False)
        for column, (name, rows) in enumerate(sweeps.items()):
            values = [row["value"] for row in rows]
            panels = (
                ("peak, MiB", [row["peak_bytes"] / MIB for row in rows],
                 [row["predicted_bytes"] and row["predicted_bytes"] / MIB for row in rows]),
                ("CPU s/step", [row["seconds"]["cpu"] for row in rows], [row["predicted_seconds"] for row in rows]),
            )  # fmt: skip
            for line, (label, measured, predicted) in enumerate(panels):
                axis = grid[line][column]
                axis.plot(values, measured, "o", color=LIGHT["full"], label="measured")
                if all(number is not None for number in predicted):
                    axis.plot(values, predicted, "-", color=LIGHT["muted"], label="predicted")
                axis.set_xscale("log", base=2)
                highest = max(number for number in (*measured, *predicted) if number is not None)
                axis.set_ylim(0, 1.1 * highest)
                axis.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0,), numticks=20))
                axis.xaxis.set_major_formatter(ScalarFormatter())
                axis.xaxis.set_minor_formatter(NullFormatter())
                axis.set_xticks(values)
                axis.tick_params(axis="x", labelrotation=45)
                axis.set_xlabel(names.get(name, name))
                axis.set_ylabel(label if column == 0 else "")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2)
        raw = render_svg(figure)
    return standalone(raw, "Peak memory and seconds per step against length, depth and vocabulary")
