"""Judge a run: each claim's rule applied to the records, two verdicts a claim."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reports.arms import NAMED_ARMS
from reports.claims import CLAIMS
from reports.config import PRESETS, RunConfig
from reports.records import RunFolder
from reports.rules import judgements
from reports.run import Run, load_run
from reports.strict import write_json
from reports.verdicts import ClaimVerdict, Verdicts


def judge(run: Run | RunFolder | Path | str, claims: Sequence[str] | None = None) -> Verdicts:
    """Verdicts on the claims (all, or those named) from a run folder.

    Raises ValueError when the folder has no settings or predictions, when a file is malformed, when a record
    was registered against other predictions (or none), or for an unknown claim.
    """
    if not isinstance(run, Run):
        run = load_run(run)
    wanted = [claim.id for claim in CLAIMS] if claims is None else list(claims)
    verdicts = []
    known = {claim.id: claim for claim in CLAIMS}
    for claim_id in wanted:
        paper, ours = judgements(run, claim_id)
        claim = known[claim_id]
        verdicts.append(
            ClaimVerdict(
                claim=claim.id,
                title=claim.title,
                statement=claim.statement,
                theorems=claim.theorems,
                paper=paper,
                ours=ours,
                change=claim.change,
                command=reproduce_command(run.config),
            )
        )
    return Verdicts(
        predictions_sha256=run.predictions_sha256,
        run=run.config.name,
        verdicts=tuple(verdicts),
        missing=tuple(run.missing),
    )


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
