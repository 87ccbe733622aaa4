"""What an experiment is and how it is run alone: parts with verdicts, a record in strict JSON, a figure."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from matplotlib.axes import Axes

from reports.decisions import combine
from reports.strict import plain, write_json, write_text
from reports.svg import panels, render_svg, standalone, style
from reports.verdicts import Part

Size = Literal["quick", "standard", "full"]


@dataclass
class Result:
    """parts: one verdict each, from the numbers. data: all that was measured and predicted. draw: fills one panel."""

    parts: list[Part]
    data: dict[str, Any]
    draw: Callable[[Axes], None]
    summary: dict[str, Any] = field(default_factory=dict)  # the last line of --json


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    paragraph: str
    theorems: tuple[str, ...]
    body: Callable[[Size, int], Result]

    def run(
        self, size: Size = "quick", seed: int = 0, out: Path | None = None
    ) -> tuple[dict[str, Any], Result]:
        """Run and, with `out`, write OUT/NAME/record.json, figure.json and figure.svg. Returns (record, result)."""
        if size not in get_args(Size):
            raise ValueError(f"size is {size!r}, expected one of {', '.join(get_args(Size))}")
        began = time.perf_counter()
        result = self.body(size, seed)
        record = {
            "schema": 1,
            "experiment": self.name,
            "title": self.title,
            "theorems": list(self.theorems),
            "size": size,
            "seed": seed,
            "verdict": combine([part.verdict for part in result.parts if part.counts]),
            "parts": [part.model_dump(mode="json") for part in result.parts],
            "summary": result.summary,
            "seconds": round(time.perf_counter() - began, 3),
        }
        if out is not None:
            folder = Path(out) / self.name
            write_json(folder / "record.json", record)
            nonfinite: list[str] = []
            data = plain(result.data, "figure", nonfinite.append)
            write_json(folder / "figure.json", {**data, "nonfinite": nonfinite})
            write_text(folder / "figure.svg", self.figure(result))
        return record, result

    def figure(self, result: Result) -> str:
        with style():
            figure, axes = panels(False, 1, 3.4)
            result.draw(axes[0])
            return standalone(render_svg(figure), self.title)


def main(experiment: Experiment, arguments: list[str] | None = None) -> int:
    """`python -m simulations.NAME`: 0 when it ran through, whatever the verdict."""
    parser = argparse.ArgumentParser(
        prog=f"python -m simulations.{experiment.name}", description=experiment.title
    )
    parser.add_argument("--size", choices=get_args(Size), default="quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the record and the figure")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    chosen = parser.parse_args(arguments)
    record, _ = experiment.run(chosen.size, chosen.seed, chosen.out)
    sys.stdout.write(describe(record) + "\n")
    if chosen.json:
        sys.stdout.write(last_line(record) + "\n")
    return 0


def describe(record: dict[str, Any]) -> str:
    """The verdicts in plain text."""
    lines = [f"{record['experiment']} ({record['size']}, {record['seconds']} s): {record['verdict']}"]
    lines += [f"  {part['name']}: {part['verdict']}. {part['reason']}" for part in record["parts"]]
    return "\n".join(lines)


def last_line(record: dict[str, Any]) -> str:
    """One JSON object: the summary, with name, size, verdict and seconds."""
    head = {"experiment": record["experiment"], "size": record["size"], "verdict": record["verdict"]}
    return json.dumps({**record["summary"], **head, "seconds": record["seconds"]}, allow_nan=False)
