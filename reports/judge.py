"""Judge a run: each claim's rule applied to the records, two verdicts a claim."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reports.arms import NAMED_ARMS
from reports.claims import BY_ID, CLAIMS
from reports.config import PRESETS, RunConfig
from reports.evidence import BenchMemory
from reports.records import RunFolder
from reports.rules import Material, judgements
from reports.run import Run, load_run
from reports.strict import read_record, write_json
from reports.verdicts import ClaimVerdict, Judgement, Verdicts


def judge(
    run: Run | RunFolder | Path | str, claims: Sequence[str] | None = None, bench: Path | str | None = None
) -> Verdicts:
    """Verdicts on the claims (all, or those named) from a run folder; `bench`: the JSON of `lcsb bench memory`, for C7.

    Raises ValueError when the folder has no settings or predictions, when a file is malformed, when a record
    was registered against other predictions (or none), or for an unknown claim.
    """
    if not isinstance(run, Run):
        run = load_run(run)
    material = Material((run,), None if bench is None else read_bench(bench))
    return Verdicts(
        predictions_sha256=run.predictions_sha256,
        run=run.config.name,
        verdicts=claim_verdicts(material, claims, lambda claim: reproduce_command(run.config)),
        missing=tuple(run.missing),
    )


def claim_verdicts(
    material: Material, claims: Sequence[str] | None, command: Callable[[str], str]
) -> tuple[ClaimVerdict, ...]:
    """Both verdicts on each claim; `command` gives the line that reproduces the one it is asked for."""
    return tuple(
        claim_verdict(name, *judgements(material, name), command(name))
        for name in ([claim.id for claim in CLAIMS] if claims is None else claims)
    )


def claim_verdict(claim_id: str, paper: Judgement, ours: Judgement, command: str) -> ClaimVerdict:
    """The two judgements with what the registry says of the claim."""
    claim = BY_ID[claim_id]
    return ClaimVerdict(
        claim=claim.id,
        title=claim.title,
        statement=claim.statement,
        theorems=claim.theorems,
        paper=paper,
        ours=ours,
        change=claim.change,
        command=command,
    )


def read_bench(path: Path | str) -> BenchMemory:
    """The JSON of `lcsb bench memory`. Raises ValueError that names file and field."""
    return read_record(Path(path), BenchMemory)


def write_verdicts(folder: RunFolder, verdicts: Verdicts) -> None:
    """Write verdicts.json atomically."""
    write_json(folder.verdicts, verdicts)


def reproduce_command(config: RunConfig) -> str:
    """The shortest `lcsb validate` command that gives these settings: a size and the settings that differ."""
    settings = config.to_mapping()
    options = {size: list(_differences(RunConfig.preset(size).to_mapping(), settings)) for size in PRESETS}
    # At equal length the standard size, so that a renamed standard run is not called a variant of quick.
    size = min(options, key=lambda name: (len(options[name]), name != "standard"))
    words = ["lcsb", "validate"] + ([] if size == "standard" else ["--size", size])
    for option in options[size]:
        words += ["--set", option]
    return shlex.join(words)


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in new.items():
        if value == old[key]:
            continue
        if isinstance(value, dict):
            found += _differences(old[key], value, f"{prefix}{key}.")
        elif key == "arms":
            found.append(f"arms={_arms(value)}")
        else:
            found.append(f"{prefix}{key}={json.dumps(value)}")
    return found


def _arms(arms: list[dict[str, Any]]) -> str:
    known = {arm.name: arm.model_dump(mode="json") for arm in NAMED_ARMS.values()}
    return json.dumps([arm["name"] if known.get(arm["name"]) == arm else arm for arm in arms])
