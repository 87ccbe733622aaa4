"""metrics.jsonl: one strict JSON object a line, written as the arm trains; and the rule for divergence."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from reports.config import ArmConfig
from reports.strict import first_problem, naming, parse, plain

SCHEMA = 1
DIVERGED_WINDOW = 20
DIVERGED_FACTOR = 1.2
STOP_FACTOR = 2.0
DIVERGED_NORM = 1e6
JUMP_FACTOR, JUMP_WINDOW = 2.0, 10


def diverged_at(
    losses: Sequence[float | None],
    loss_at_start: float,
    *,
    factor: float = DIVERGED_FACTOR,
    window: int = DIVERGED_WINDOW,
) -> int | None:
    """The step at which a run began to diverge, or None.

    `losses`: training loss of each optimiser step (nats a token), None where it was not finite.
    `loss_at_start`: held-out loss at step 0, finite and positive. Diverged: a non-finite loss (that step), or
    a mean over `window` consecutive steps above factor * loss_at_start (the first step of the first such
    window). A run shorter than the window can diverge by a non-finite loss only.

    >>> diverged_at([3.0] * 5 + [4.0] * 20, loss_at_start=3.0)
    3
    """
    if not (math.isfinite(loss_at_start) and loss_at_start > 0):
        raise ValueError(f"loss_at_start is {loss_at_start}, expected a finite positive loss")
    values = [math.nan if loss is None else float(loss) for loss in losses]
    for t in range(len(values)):
        if not math.isfinite(values[t]):
            return t
        # Exact summation: a moving sum would drift and decide a run at the threshold by rounding.
        stretch = values[t : t + window]
        whole = len(stretch) == window and all(map(math.isfinite, stretch))
        if whole and math.fsum(stretch) / window > factor * loss_at_start:
            return t
    return None


def should_stop(losses: Sequence[float | None], loss_at_start: float) -> bool:
    """True when an arm is past saving: a non-finite loss, or the window mean above twice the start."""
    return diverged_at(losses, loss_at_start, factor=STOP_FACTOR) is not None


def update_jumps(
    movements: Sequence[float | None], *, factor: float = JUMP_FACTOR, window: int = JUMP_WINDOW
) -> list[int]:
    """Steps whose movement is above `factor` times the median of the `window` steps before, or not finite.

    `movements`: 2-norm of each step's change of all adapters, None where it was not finite. A jump of the updates is
    the early sign of a loss that is about to rise. The first `window` steps are never one.

    >>> update_jumps([1.0] * 12 + [2.5, 1.0])
    [12]
    """
    values = [math.inf if value is None else value for value in movements]
    return [
        t
        for t in range(window, len(values))
        if values[t] > factor * statistics.median(values[t - window : t])
    ]


def no_progress(final_held_out_loss: float | None, loss_at_start: float) -> bool:
    """True unless the final held-out loss is below the one at step 0 (None: not finite)."""
    return not (final_held_out_loss is not None and final_held_out_loss < loss_at_start)


def norm_diverged_at(norms: Sequence[float], *, factor: float = DIVERGED_NORM) -> int | None:
    """For quadratics: the first t with |x_t| above factor * |x_0|, or not finite. norms[0] is |x_0| > 0."""
    if not (norms and math.isfinite(norms[0]) and norms[0] > 0):
        raise ValueError(f"norms[0] is {norms[0] if norms else 'missing'}, expected a finite positive norm")
    return next((t for t, x in enumerate(norms) if not math.isfinite(x) or x > factor * norms[0]), None)


class _Row(BaseModel):
    # A writer may add fields; those that are named here must be right.
    model_config = ConfigDict(
        extra="allow", allow_inf_nan=False, populate_by_name=True, serialize_by_alias=True
    )
    nonfinite: bool = False

    @model_validator(mode="after")
    def _null_only_if_nonfinite(self) -> Self:
        if not self.nonfinite:
            for name in self._may_be_null():
                value = getattr(self, name)
                if value is None or (isinstance(value, list) and None in value):
                    raise ValueError(f"{name} is null without nonfinite: true")
        return self

    def _may_be_null(self) -> tuple[str, ...]:
        return ()


Numbers = list[float | None]


class Header(_Row):
    """First line: what the arm is, and the sha256 of the predictions that it was registered against."""

    kind: Literal["header"] = "header"
    schema_: Literal[1] = Field(default=1, alias="schema")
    predictions_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    arm: ArmConfig
    seed: int
    learning_rate: float
    cycle_length: int
    blocks: list[list[int]]
    n_layers: int
    steps: int
    loss_at_start: float


class Step(_Row):
    """One optimiser step: training loss, selected layers, norms of this step's movement."""

    kind: Literal["step"] = "step"
    t: int
    loss: float | None
    block: int | None = Field(default=None, alias="lcsb/block")
    selected: list[int] = Field(alias="lcsb/selected")
    grad_norm: float | None = Field(alias="lcsb/grad_norm")
    displacement_idle: float | None = Field(alias="lcsb/displacement_idle")
    displacement: Numbers
    seconds: float

    def _may_be_null(self) -> tuple[str, ...]:
        return ("loss", "grad_norm", "displacement_idle", "displacement")


class Law(_Row):
    """T6 checked at one step. Idle momentum: worst relative error; frozen: tensors that moved at all."""

    kind: Literal["law"] = "law"
    t: int
    checked: int
    worst: float | None = None
    worst_tensor: str | None = None
    within_rounding: int = 0
    violations: int = 0
    moved: int | None = None


class Eval(_Row):
    """Held-out loss after t steps, over `tokens` tokens."""

    kind: Literal["eval"] = "eval"
    t: int
    held_out_loss: float | None
    tokens: int

    def _may_be_null(self) -> tuple[str, ...]:
        return ("held_out_loss",)


class Movement(_Row):
    """Per layer: rms of x_T - x_0 over its adapter elements, and the sum of per-step |dx|_2."""

    kind: Literal["movement"] = "movement"
    t: int
    layer_rms: Numbers
    layer_path: Numbers

    def _may_be_null(self) -> tuple[str, ...]:
        return ("layer_rms", "layer_path")


class Event(_Row):
    """Something that a reader must know of: a skipped step, divergence, no progress, a resume."""

    kind: Literal["event"] = "event"
    t: int
    event: str


class End(_Row):
    """Last line of a finished arm."""

    kind: Literal["end"] = "end"
    t: int
    status: Literal["done", "diverged"]
    diverged_at: int | None = None
    seconds: float


Row = Annotated[Header | Step | Law | Eval | Movement | Event | End, Field(discriminator="kind")]
_ROW: TypeAdapter[Header | Step | Law | Eval | Movement | Event | End] = TypeAdapter(Row)


@dataclass(frozen=True)
class Metrics:
    """What one metrics file says. `torn`: the sentence about a dropped last line, or None."""

    path: Path
    header: Header | None
    steps: list[Step] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)
    evals: list[Eval] = field(default_factory=list)
    movements: list[Movement] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    end: End | None = None
    torn: str | None = None

    @property
    def finished(self) -> bool:
        return self.end is not None

    @property
    def losses(self) -> list[float | None]:
        return [step.loss for step in self.steps]


def read_metrics(path: Path | str) -> Metrics:
    """Read and check a metrics file.

    A last line without its newline that is no JSON object was torn by an interruption: it is dropped and said
    in `torn`. Any other bad line, a repeated or misplaced header, or steps that are not consecutive raise
    ValueError with file and line.
    """
    path = Path(path)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    lines = text.split(b"\n")
    complete = lines.pop() == b""  # split leaves an empty piece after the last newline
    if not complete:
        lines = text.split(b"\n")
    metrics = Metrics(path=path, header=None)
    found: dict[str, Any] = {"header": None, "end": None, "torn": None}
    many: dict[str, list[Any]] = {
        "step": metrics.steps, "law": metrics.laws, "eval": metrics.evals, "movement": metrics.movements,
        "event": metrics.events,
    }  # fmt: skip
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            value = parse(line.decode("utf-8"), where)
        except (ValueError, UnicodeDecodeError) as error:
            if number == len(lines) and not complete:
                found["torn"] = f"{where}: torn by an interruption ({len(line)} bytes), dropped"
                break
            raise ValueError(str(error) if str(error).startswith(where) else f"{where}: not UTF-8") from None
        row = _row(value, where)
        if isinstance(row, Header):
            if number != 1:
                raise ValueError(f"{where}: found a header, expected it in line 1 only")
            found["header"] = row
        elif found["end"] is not None:
            raise ValueError(f"{where}: found a {row.kind} row, expected nothing after the end row")
        elif isinstance(row, End):
            found["end"] = row
        else:
            if isinstance(row, Step) and row.t != len(metrics.steps):
                raise ValueError(f"{where}: found step t = {row.t}, expected t = {len(metrics.steps)}")
            many[row.kind].append(row)
    return Metrics(
        path, found["header"], metrics.steps, metrics.laws, metrics.evals, metrics.movements, metrics.events,
        found["end"], found["torn"],
    )  # fmt: skip


def _row(value: Any, where: str) -> Header | Step | Law | Eval | Movement | Event | End:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: found {type(value).__name__}, expected an object")
    try:
        return _ROW.validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{where}: {first_problem(error)}") from None


class MetricsWriter:
    """Appends rows to metrics.jsonl; each line is flushed when `write` returns.

    A new file must not exist yet, unless `resume_at` is given: then the file is cut to that many lines (the
    count `lines` that the checkpoint stored) before anything is appended.
    """

    def __init__(self, path: Path | str, *, resume_at: int | None = None) -> None:
        self.path = Path(path)
        if resume_at is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._file: BinaryIO = self.path.open("xb")
            except FileExistsError:
                raise ValueError(f"{self.path}: exists, expected a new file (or resume_at)") from None
            self.lines = 0
        else:
            self._file = self.path.open("r+b")
            self._cut(resume_at)
            self.lines = resume_at

    def _cut(self, lines: int) -> None:
        for number in range(lines):
            if not self._file.readline().endswith(b"\n"):
                self._file.close()
                raise ValueError(f"{self.path}: found {number} complete lines, expected at least {lines}")
        self._file.truncate(self._file.tell())

    def write(self, row: Mapping[str, Any] | BaseModel) -> None:
        """Append one row. A number that is not finite becomes null and sets "nonfinite": true."""
        bad: list[str] = []
        value = plain(row, "row", on_nonfinite=bad.append)
        if bad:
            value["nonfinite"] = True
        elif value.get("nonfinite") is False:
            del value["nonfinite"]
        line = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        with naming(self.path):
            self._file.write(line.encode("utf-8") + b"\n")
            self._file.flush()
        self.lines += 1

    def sync(self) -> None:
        """Force the lines to the disk; call it before a checkpoint stores `lines`."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
