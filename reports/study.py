"""A study: many run folders judged together, as one verdict table in JSON and one self-contained page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from reports.claims import BY_ID
from reports.decisions import count
from reports.judge import claim_verdicts, read_bench
from reports.numbers import fixed, interval
from reports.records import RunFolder
from reports.render import ICONS, palette, templates
from reports.rules import Material
from reports.rules.stability import contrast_table, ladders_of
from reports.run import Run, load_run
from reports.strict import read_json, read_record, write_json, write_text
from reports.verdicts import ClaimVerdict

#: which parts of a study hold the evidence of a claim
PARTS_OF: dict[str, tuple[str, ...]] = {
    "C1": ("a", "e"), "C2": ("a",), "C3": ("a",), "C4": ("a", "e"), "C5": ("a", "b", "c", "e"), "C6": ("f",),
    "C7": (), "C8": ("a", "d"),
}  # fmt: skip
PLANTED = Path(__file__).parent / "published" / "gallery" / "planted" / "verdicts.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True,
                              serialize_by_alias=True)  # fmt: skip


class StudyRun(_Strict):
    """One run folder of a study: runs/<name>."""

    part: str
    name: str


class Manifest(_Strict):
    """study.json: what the study consists of, written before its first run."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    size: Literal["quick", "standard", "full"]
    runs: tuple[StudyRun, ...]


class JudgedRun(_Strict):
    """A run that was judged, with the sha256 of its predictions. state: what it lacks, or ''."""

    part: str
    name: str
    predictions_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Row(_Strict):
    """One line of the verdict table."""

    claim: str
    title: str
    paper: str
    ours: str
    effect: float | None
    unit: str
    interval: tuple[float, float] | None
    n: int
    prediction: str
    change: str
    command: str


class ContrastLine(_Strict):
    """One contrast between rival explanations of C6, in octaves of the divergence rate."""

    explanation: str
    name: str
    compared: str
    survives: str
    effect: float | None
    interval: tuple[float, float] | None
    margin: float | None
    n: int


class StudyVerdicts(_Strict):
    """verdicts.json of a study."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    size: str
    runs: tuple[JudgedRun, ...]
    table: tuple[Row, ...]
    verdicts: tuple[ClaimVerdict, ...]
    contrasts: tuple[ContrastLine, ...]
    planted: str
    missing: tuple[str, ...] = ()


def manifest_path(root: Path) -> Path:
    """DIR/study.json."""
    return root / "study.json"


def planted_error() -> str:
    """What the calibration on planted truths found of the decision behind every verdict, or that it is not there."""
    if not PLANTED.exists():
        return (
            "The judge's planted-truth error is not in this installation (lcsb simulate planted measures it)."
        )
    part = read_json(PLANTED)["parts"][0]
    return f"The decision behind these verdicts, on experiments whose truth was planted: {part['reason']}"


def judge_study(root: Path, bench: Path | None = None) -> StudyVerdicts:
    """Judge all runs of a study that have begun. `bench`: JSON of `lcsb bench memory`; default DIR/memory.json.

    Raises ValueError where there is no study, or a file of a run is wrong.
    """
    path = manifest_path(root)
    if not path.exists():
        raise ValueError(f"{root}: not a study (no study.json in it); lcsb study {root} begins one")
    manifest = read_record(path, Manifest)
    runs: list[tuple[StudyRun, Run]] = []
    missing: list[str] = []
    for entry in manifest.runs:
        folder = RunFolder(root / "runs" / entry.name)
        if not folder.predictions.exists():
            missing.append(f"part {entry.part}: {entry.name} has not begun")
            continue
        run = load_run(folder)
        runs.append((entry, run))
        missing += [
            f"part {entry.part}: {entry.name}: {line}" for line in run.missing if line.startswith("arm ")
        ]
    if not runs:
        raise ValueError(f"{root}: no run of this study has begun; lcsb study {root} runs them")
    found = bench if bench is not None else root / "memory.json"
    memory = read_bench(found) if bench is not None or found.exists() else None

    def of(claim: str) -> Material:
        """The runs of a claim's own parts: a sweep is no evidence of quality."""
        return Material(tuple(run for entry, run in runs if entry.part in PARTS_OF[claim]), memory)

    verdicts = tuple(
        verdict
        for claim in BY_ID
        for verdict in claim_verdicts(of(claim), [claim], lambda name: command_of(root, manifest.size, name))
    )
    return StudyVerdicts(
        size=manifest.size,
        runs=tuple(
            JudgedRun(part=entry.part, name=entry.name, predictions_sha256=run.predictions_sha256)
            for entry, run in runs
        ),
        table=tuple(_row(entry) for entry in verdicts),
        verdicts=verdicts,
        contrasts=tuple(_contrasts(of("C6"))),
        planted=planted_error(),
        missing=tuple(missing),
    )


def command_of(root: Path, size: str, claim: str) -> str:
    """The one command that reproduces a claim's verdict."""
    parts = PARTS_OF[claim]
    if not parts:
        return shlex.join(["lcsb", "bench", "memory", "--out", str(Path(root.name) / "memory.json")])
    return shlex.join(["lcsb", "study", root.name, "--size", size, "--part", ",".join(parts)])


def _row(entry: ClaimVerdict) -> Row:
    paper = entry.paper
    return Row(
        claim=entry.claim, title=entry.title, paper=paper.verdict, ours=entry.ours.verdict, effect=paper.effect,
        unit=paper.unit, interval=paper.interval, n=paper.n, prediction=BY_ID[entry.claim].prediction,
        change=entry.change, command=entry.command,
    )  # fmt: skip


def _contrasts(material: Material) -> list[ContrastLine]:
    return [
        ContrastLine(
            explanation=row.explanation, name=row.name, compared=row.compared, survives=row.survives,
            effect=row.found.decision.effect, interval=row.found.decision.interval,
            margin=row.found.margin, n=row.found.decision.n,
        )
        for row in contrast_table(ladders_of(material.cells))
    ]  # fmt: skip


def write_study(root: Path, verdicts: StudyVerdicts) -> Path:
    """Write verdicts.json and report.html; the page's path. The same records give the same bytes."""
    write_json(root / "verdicts.json", verdicts)
    page = root / "report.html"
    write_text(page, study_page(verdicts))
    return page


def study_page(verdicts: StudyVerdicts) -> str:
    """The page's text."""
    tested = [entry for entry in verdicts.verdicts if entry.paper.verdict != "not testable here"]
    return (
        templates()
        .get_template("study.html")
        .render(
            verdicts=verdicts,
            icons=ICONS,
            palette=palette(),
            claims=BY_ID,
            summary=f"{count(len(verdicts.runs), 'run')} of size {verdicts.size}: {len(tested)} of "
            f"{count(len(verdicts.verdicts), 'claim')} of the paper tested.",
            contrasts=[_shown(line) for line in verdicts.contrasts],
        )
    )


def _shown(line: ContrastLine) -> Sequence[Any]:
    return (
        f"({line.explanation}) {line.name}", line.compared,
        f"{fixed(line.effect, 2)} {interval(line.interval, 2)}, n = {line.n}", line.survives,
    )  # fmt: skip
