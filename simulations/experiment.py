"""What an experiment is: measure, predict, run, judge, draw; each stage reads the files of those before it."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bcd_theory.predictions import Prediction, Predictions
from reports.decisions import combine
from reports.metrics import MetricsWriter
from reports.records import RunFolder, environment
from reports.strict import plain, write_json, write_text
from reports.svg import NARROW, panels, render_svg, standalone, style
from reports.verdicts import Part
from simulations.records import (
    SIZES,
    Header,
    Measured,
    Record,
    Registered,
    SimulationVerdict,
    Size,
    load_record,
    load_registered,
    metrics_path,
)

Write = Callable[[Mapping[str, Any]], None]


def _nothing(record: Record) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Experiment:
    """The stages of one experiment.

    measure  (size, seed) -> numbers about the problems, as strict JSON can hold them
    predict  those numbers -> predictions, from `bcd_theory` alone
    perform  runs; may read what was registered; writes rows {"kind": ..., ...}
    judge    one part a statement, from the record alone
    draw     fills `panels` panels from the record alone
    summary  what `--json` adds to its last line
    """

    name: str
    title: str
    paragraph: str
    theorems: tuple[str, ...]
    measure: Callable[[Size, int], Mapping[str, Any]]
    predict: Callable[[Mapping[str, Any]], Sequence[Prediction]]
    perform: Callable[[Registered, Write], None]
    judge: Callable[[Record], Sequence[Part]]
    draw: Callable[[Record, Sequence[Axes]], None]
    panels: int = 1
    summary: Callable[[Record], Mapping[str, Any]] = _nothing

    def run(
        self, size: Size = "quick", seed: int = 0, out: Path | None = None
    ) -> tuple[SimulationVerdict, Record]:
        """All stages, with their files in OUT/NAME (in a temporary folder without `out`)."""
        if out is None:
            with tempfile.TemporaryDirectory() as place:
                return self.run(size, seed, Path(place))
        folder = RunFolder(Path(out) / self.name)
        self.register(folder, size, seed)
        self.record(folder)
        return self.conclude(folder)

    def register(self, folder: RunFolder, size: Size, seed: int) -> None:
        """Measure and predict: measurements.json, then predictions.json. A former record of the folder is removed."""
        if size not in SIZES:
            raise ValueError(f"size is {size!r}, expected one of {', '.join(SIZES)}")
        for path in (metrics_path(folder), folder.verdicts):
            path.unlink(missing_ok=True)
        write_json(folder.environment, environment())
        measured = plain(self.measure(size, seed), "measurements")
        write_json(
            folder.measurements, Measured(experiment=self.name, size=size, seed=seed, measured=measured)
        )
        write_json(folder.predictions, Predictions(tuple(self.predict(measured))))

    def record(self, folder: RunFolder) -> None:
        """Run: metrics.jsonl, whose first line is the sha256 of the predictions."""
        _, registered = load_registered(folder)
        with MetricsWriter(metrics_path(folder)) as writer:
            writer.write(
                Header(
                    predictions_sha256=registered.predictions_sha256,
                    experiment=self.name,
                    size=registered.size,
                    seed=registered.seed,
                )
            )
            began = time.perf_counter()
            self.perform(registered, writer.write)
            writer.write({"kind": "end", "seconds": round(time.perf_counter() - began, 3)})

    def conclude(self, folder: RunFolder) -> tuple[SimulationVerdict, Record]:
        """Judge and draw from the files: verdicts.json, figure.json, figure.svg. The same folder gives the same bytes.

        Raises ValueError for a record without the sha256 of predictions.json or with another.
        """
        record = load_record(folder, self.name)
        parts = tuple(self.judge(record))
        verdict = SimulationVerdict(
            experiment=self.name,
            title=self.title,
            theorems=self.theorems,
            size=record.size,
            seed=record.seed,
            predictions_sha256=record.predictions_sha256,
            verdict=combine([part.verdict for part in parts if part.counts]),
            parts=parts,
            summary=plain(self.summary(record), "summary"),
            seconds=record.seconds,
            command=self.command(record),
        )
        write_json(folder.verdicts, verdict)
        drawing, data = self.figure(record, narrow=False)
        write_json(folder.root / "figure.json", {"experiment": self.name, "title": self.title, **data})
        write_text(folder.root / "figure.svg", standalone(drawing, self.title))
        return verdict, record

    def command(self, record: Record) -> str:
        """The command that gives this record again."""
        seed = f" --seed {record.seed}" if record.seed else ""
        return f"lcsb simulate {self.name} --size {record.size}{seed}"

    def figure(self, record: Record, narrow: bool) -> tuple[str, dict[str, Any]]:
        """(raw SVG, the numbers in it)."""
        with style():
            figure, axes = panels(narrow, self.panels, 3.6, 3.6)
            self.draw(record, axes)
            return render_svg(figure), figure_data(figure)


def figure_data(figure: Figure) -> dict[str, Any]:
    """Every mark of a figure: lines and points (x, y), bars (left, bottom, width, height). Null where not finite."""
    found = []
    for axis in figure.axes:
        series: list[dict[str, Any]] = []
        for line in axis.lines:
            label = str(line.get_label())
            series.append(
                {"label": label, "x": np.asarray(line.get_xdata()), "y": np.asarray(line.get_ydata())}
            )
        for collection in axis.collections:
            places: Any = np.ma.filled(np.ma.asarray(collection.get_offsets(), dtype=float), np.nan)
            entry = {"label": str(collection.get_label()), "x": places[:, 0], "y": places[:, 1]}
            if (values := collection.get_array()) is not None:
                entry["values"] = np.ma.filled(np.ma.asarray(values, dtype=float), np.nan)
            series.append(entry)
        for patch in axis.patches:
            if isinstance(patch, Rectangle):
                bar = [patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()]
                series.append({"label": str(patch.get_label()), "bar": bar})
        head = {
            "title": axis.get_title(loc="left") or axis.get_title(),
            "x": axis.get_xlabel(),
            "y": axis.get_ylabel(),
        }
        found.append({**head, "series": plain(series, "figure", lambda field: None)})
    return {"panels": found}


def legend_below(axis: Axes, columns: int = 2) -> None:
    """A legend under the panel, where it hides no mark; one column in a narrow figure."""
    if isinstance(axis.figure, Figure) and axis.figure.get_figwidth() <= NARROW:
        columns = 1
    axis.legend(
        loc="upper left", bbox_to_anchor=(-0.05, -0.2), ncols=columns, fontsize=7.5, columnspacing=1.0
    )


def plain_log(axis: Axes, *which: Literal["x", "y"]) -> None:
    """Logarithmic axes over a few octaves, with plain numbers: 0.5, 1, 2, 5."""
    for name in which:
        (axis.set_xscale if name == "x" else axis.set_yscale)("log")
        side = axis.xaxis if name == "x" else axis.yaxis
        side.set_major_locator(LogLocator(subs=(1, 2, 5)))
        side.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
        side.set_minor_formatter(NullFormatter())


def main(experiment: Experiment, arguments: list[str] | None = None) -> int:
    """`python -m simulations.NAME`: 0 when it ran through, whatever the verdict."""
    parser = argparse.ArgumentParser(
        prog=f"python -m simulations.{experiment.name}", description=experiment.title
    )
    parser.add_argument("--size", choices=SIZES, default="quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the records and the figure")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    chosen = parser.parse_args(arguments)
    verdict, _ = experiment.run(chosen.size, chosen.seed, chosen.out)
    sys.stdout.write(describe(verdict) + "\n")
    if chosen.json:
        sys.stdout.write(last_line(verdict) + "\n")
    return 0


def describe(verdict: SimulationVerdict) -> str:
    """The verdicts in plain text."""
    lines = [f"{verdict.experiment} ({verdict.size}, {verdict.seconds} s): {verdict.verdict}"]
    for part in verdict.parts:
        said = part.verdict if part.counts else "for information"
        lines.append(f"  {part.name}: {said}. {part.reason}")
    return "\n".join(lines)


def last_line(verdict: SimulationVerdict) -> str:
    """One JSON object: the summary, with name, size, verdict and seconds."""
    head = {"experiment": verdict.experiment, "size": verdict.size, "verdict": verdict.verdict}
    return json.dumps({**verdict.summary, **head, "seconds": verdict.seconds}, allow_nan=False)
