"""Everything that a run folder says, read once and checked: settings, predictions, arms, evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from bcd_theory.predictions import Measurements, Predictions
from reports.config import RunConfig
from reports.evidence import FidelityEvidence, MemoryEvidence, ProbeEvidence, TimingEvidence
from reports.metrics import Header, Metrics, diverged_at, no_progress, read_metrics, update_jumps
from reports.records import RunFolder
from reports.strict import read_json, read_record, sha256_of

Status = Literal["done", "diverged", "no progress", "unfinished", "missing"]
_E = TypeVar("_E", FidelityEvidence, TimingEvidence, MemoryEvidence, ProbeEvidence)


@dataclass(frozen=True)
class Outcome:
    """How one arm ended with one seed.

    final_loss: held-out loss after the last step (nats a token), None if it was not reached or not finite.
    drop: loss at the start - final_loss. began: the step at which divergence began.
    """

    arm: str
    seed: int
    status: Status
    loss_at_start: float | None = None
    final_loss: float | None = None
    began: int | None = None

    @property
    def drop(self) -> float | None:
        if self.loss_at_start is None or self.final_loss is None:
            return None
        return self.loss_at_start - self.final_loss


@dataclass(frozen=True)
class Run:
    """A run folder's contents. `missing`: one sentence for each thing that the settings ask for and is not there."""

    folder: RunFolder
    config: RunConfig
    environment: dict[str, Any]
    measurements: Measurements | None
    predictions: Predictions
    predictions_sha256: str
    arms: dict[tuple[str, int], Metrics]
    fidelity: FidelityEvidence | None
    timing: TimingEvidence | None
    memory: MemoryEvidence | None
    missing: list[str] = field(default_factory=list)
    probes: ProbeEvidence | None = None

    def header(self, arm: str, seed: int) -> Header | None:
        metrics = self.arms.get((arm, seed))
        return metrics.header if metrics else None

    def outcome(self, arm: str, seed: int) -> Outcome:
        """Status by the divergence and no-progress rules, applied to the logged losses."""
        metrics = self.arms.get((arm, seed))
        if metrics is None or metrics.header is None:
            return Outcome(arm, seed, "missing")
        start, steps = metrics.header.loss_at_start, metrics.header.steps
        final = next((row.held_out_loss for row in reversed(metrics.evals) if row.t == steps), None)
        began = diverged_at(metrics.losses, start)
        if began is not None:
            return Outcome(arm, seed, "diverged", start, final, began)
        if metrics.end is None:
            return Outcome(arm, seed, "unfinished", start)
        if metrics.end.status == "diverged":
            return Outcome(arm, seed, "diverged", start, final, metrics.end.diverged_at)
        return Outcome(arm, seed, "no progress" if no_progress(final, start) else "done", start, final)

    def update_jumps(self, arm: str) -> list[int]:
        """The first step of each seed at which the updates jumped, where they did."""
        found = []
        for seed in self.config.seeds:
            metrics = self.arms.get((arm, seed))
            steps = metrics.steps if metrics else []
            moved = [
                None
                if any(x is None for x in row.displacement)
                else math.hypot(*(x or 0.0 for x in row.displacement))
                for row in steps
            ]
            found += update_jumps(moved)[:1]
        return found

    def outcomes(self, arm: str) -> list[Outcome]:
        """One outcome for each seed of the settings."""
        return [self.outcome(arm, seed) for seed in self.config.seeds]

    def arm_like(self, backward: str, idle: str | None = None, rule: str = "eta") -> str | None:
        """Name of the cyclic arm of LCSB itself with this backward mode, idle policy and learning rate rule."""
        for arm in self.config.arms:
            cyclic = arm.method == "lcsb" and arm.schedule == "cyclic"
            same = cyclic and arm.backward == backward and arm.learning_rate_rule == rule
            if same and (idle is None or arm.idle == idle):
                return arm.name
        return None


def load_run(folder: RunFolder | Path | str) -> Run:
    """Read a run folder.

    Settings and predictions must be there; anything else may be missing and is then said in `missing`. Raises
    ValueError in one line that names the file when a file is wrong, or when it was registered against other
    predictions than this folder's (or none).
    """
    place = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))
    config = RunConfig.read(place.config)
    predictions = read_record(place.predictions, Predictions)
    sha256 = sha256_of(place.predictions)
    missing: list[str] = []
    environment = read_json(place.environment) if place.environment.exists() else {}
    measurements = read_record(place.measurements, Measurements) if place.measurements.exists() else None
    arms = _read_arms(place, config, sha256, missing)

    def evidence(kind: type[_E], name: str, expected: bool = True) -> _E | None:
        path = place.evidence(name)
        if not path.exists():
            if not expected:  # taken for one claim only
                return None
            missing.append(f"evidence/{name}.json is not there")
            return None
        check_registration(path, read_json(path), sha256)
        return read_record(path, kind)

    run = Run(
        place, config, environment, measurements, predictions, sha256, arms,
        evidence(FidelityEvidence, "fidelity"), evidence(TimingEvidence, "timing"),
        evidence(MemoryEvidence, "memory"), missing, evidence(ProbeEvidence, "probes", expected=False),
    )  # fmt: skip
    for arm in config.arms:
        for status in ("missing", "unfinished"):
            seeds = [str(outcome.seed) for outcome in run.outcomes(arm.name) if outcome.status == status]
            if seeds:
                missing.append(
                    f"arm {arm.name}, seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}: {status}"
                )
    return run


def _read_arms(
    folder: RunFolder, config: RunConfig, sha256: str, missing: list[str]
) -> dict[tuple[str, int], Metrics]:
    arms: dict[tuple[str, int], Metrics] = {}
    known = {arm.name: arm for arm in config.arms}
    for entry in folder.arms():
        metrics = read_metrics(entry.metrics)
        if metrics.torn:
            missing.append(metrics.torn.replace(str(folder.root) + "/", ""))
        header = metrics.header
        if header is None and not (metrics.steps or metrics.evals or metrics.laws or metrics.end):
            continue  # begun, nothing written yet
        check_registration(entry.metrics, {} if header is None else header.model_dump(), sha256)
        assert header is not None  # without a header there is no registration, and that was refused
        if (header.arm.name, header.seed) != (entry.arm, entry.seed):
            raise ValueError(
                f"{entry.metrics}: found the header of arm {header.arm.name}, seed {header.seed}, "
                f"expected arm {entry.arm}, seed {entry.seed}"
            )
        if entry.arm not in known or entry.seed not in config.seeds:
            missing.append(
                f"arm {entry.arm}, seed {entry.seed} is in the folder but not in the settings; not used"
            )
            continue
        if header.arm != known[entry.arm]:
            raise ValueError(
                f"{entry.metrics}: found other settings of arm {entry.arm} than in {folder.config}"
            )
        arms[entry.arm, entry.seed] = metrics
    return arms


def check_registration(path: Path, record: Any, expected: str) -> None:
    """Raises ValueError unless `record` holds the sha256 `expected` of predictions.json."""
    found = record.get("predictions_sha256") if isinstance(record, dict) else None
    if found != expected:
        raise ValueError(
            f"{path}: found {'no predictions_sha256' if found is None else f'predictions_sha256 {found}'}, "
            f"expected {expected} (the sha256 of predictions.json)"
        )
