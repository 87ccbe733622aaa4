"""The records of an experiment: those of a real run, in one folder.

    OUT/NAME/{environment, measurements, predictions, verdicts, figure}.json  metrics.jsonl  figure.svg

measurements.json and predictions.json are written before the first step. The first line of metrics.jsonl holds the
sha256 of predictions.json; a record without it or with another is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bcd_theory.predictions import Prediction, Predictions
from reports.decisions import Verdict
from reports.records import RunFolder
from reports.run import check_registration
from reports.strict import first_problem, parse, read_record, sha256_of
from reports.verdicts import Part

Size = Literal["quick", "standard", "full"]
SIZES: tuple[Size, ...] = get_args(Size)
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Record(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True, serialize_by_alias=True
    )
    schema_: Literal[1] = Field(default=1, alias="schema")


class Measured(_Record):
    """measurements.json: what was asked for, and what was found about the problems, by name."""

    experiment: str
    size: Size
    seed: int
    measured: dict[str, Any]


class Header(_Record):
    """First line of metrics.jsonl."""

    kind: Literal["header"] = "header"
    predictions_sha256: Sha256
    experiment: str
    size: Size
    seed: int


class SimulationVerdict(_Record):
    """verdicts.json. verdict: the conjunction of the parts that count. seconds: of the run stage."""

    experiment: str
    title: str
    theorems: tuple[str, ...]
    size: Size
    seed: int
    predictions_sha256: Sha256
    verdict: Verdict
    parts: tuple[Part, ...]
    summary: dict[str, Any] = {}
    seconds: float
    command: str


@dataclass(frozen=True)
class Registered:
    """What is fixed before the first step. measured: the numbers of measurements.json."""

    size: Size
    seed: int
    measured: Mapping[str, Any]
    predictions: Predictions
    predictions_sha256: str

    def predicted(self, prediction_id: str) -> float:
        """One number. Raises KeyError for an unknown id, TypeError for a tuple."""
        return self.predictions.number(prediction_id)

    def predicted_values(self, prediction_id: str) -> tuple[float | None, ...]:
        """A tuple of numbers. Raises KeyError for an unknown id, TypeError for a single number."""
        value = self.predictions[prediction_id].value
        if not isinstance(value, tuple):
            raise TypeError(f"prediction {prediction_id!r} is not a tuple of numbers")
        return value


@dataclass(frozen=True)
class Record(Registered):
    """All that judging and drawing may read: what was registered, and the rows that the run wrote."""

    rows: tuple[dict[str, Any], ...]
    seconds: float

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The rows of one kind, in the order written."""
        return [row for row in self.rows if row["kind"] == kind]


def metrics_path(folder: RunFolder) -> Path:
    return folder.root / "metrics.jsonl"


def load_registered(folder: RunFolder) -> tuple[str, Registered]:
    """(experiment, what was registered). Raises ValueError that names file and field."""
    measured = read_record(folder.measurements, Measured)
    predictions = read_record(folder.predictions, Predictions)
    return measured.experiment, Registered(
        measured.size, measured.seed, measured.measured, predictions, sha256_of(folder.predictions)
    )


def load_record(folder: RunFolder, experiment: str) -> Record:
    """A finished record. Raises ValueError for one of another experiment, against other predictions, or unfinished."""
    name, registered = load_registered(folder)
    path = metrics_path(folder)
    if name != experiment:
        raise ValueError(f"{folder.measurements}: found experiment {name!r}, expected {experiment!r}")
    rows = _lines(path)
    first = rows[0] if rows else {}
    check_registration(path, first, registered.predictions_sha256)
    try:
        header = TypeAdapter(Header).validate_python(first)
    except ValidationError as error:
        raise ValueError(f"{path}, line 1: {first_problem(error)}") from None
    if (header.experiment, header.size, header.seed) != (experiment, registered.size, registered.seed):
        raise ValueError(
            f"{path}: found {header.experiment}, {header.size}, seed {header.seed}, expected {experiment}, "
            f"{registered.size}, seed {registered.seed}"
        )
    if rows[-1]["kind"] != "end":
        raise ValueError(f"{path}: no end row, the run did not finish; run the experiment again")
    for number, row in enumerate(rows[1:-1], start=2):
        if row["kind"] in ("header", "end"):
            raise ValueError(f"{path}, line {number}: found a {row['kind']} row, expected it at an end only")
    return Record(
        registered.size,
        registered.seed,
        registered.measured,
        registered.predictions,
        registered.predictions_sha256,
        tuple(rows[1:-1]),
        float(rows[-1]["seconds"]),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        row = parse(line, f"{path}, line {number}")
        if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
            raise ValueError(f"{path}, line {number}: found no object with a kind")
        rows.append(row)
    return rows


def prediction(
    name: str,
    value: float | tuple[float | None, ...] | list[float] | None,
    *theorems: str,
    assumes: str | tuple[str, ...] = (),
    unit: str = "1",
    uncertainty: float | None = None,
) -> Prediction:
    """A `Prediction` in short; numpy numbers become plain ones."""
    if value is not None:
        value = tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else float(value)
    return Prediction(
        name, value, unit, theorems, (assumes,) if isinstance(assumes, str) else assumes, uncertainty
    )


def _plain(value: float | None) -> float | None:
    return None if value is None else float(value)
