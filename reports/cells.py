"""Cells: the arms of one or more run folders that share every setting and can therefore be compared seed by seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from reports.arms import ArmConfig
from reports.metrics import DIVERGED_WINDOW, Metrics
from reports.run import Outcome, Run, Status

ENDED = ("done", "no progress", "diverged")
OWN_LOGS = "your own logs"


@dataclass(frozen=True)
class Setting:
    """What two arms must have in common to be compared. `rest`: every other setting that changes a step, as JSON."""

    model: str
    task: str
    base: str  # quantisation of the weights, or 'none'
    arithmetic: str
    learning_rate: float
    steps: int
    cycle_length: int
    rest: str = ""

    @property
    def words(self) -> str:
        """'smollm2-135m on wikitext-2, nf4, 200 steps'."""
        if self.model == OWN_LOGS:  # a log names neither model nor data
            return f"{OWN_LOGS}, {self.steps} steps"
        arithmetic = "" if self.arithmetic == "auto" else f", {self.arithmetic} arithmetic"
        return f"{self.model} on {self.task}, {self.base}{arithmetic}, {self.steps} steps"


@dataclass(frozen=True)
class Result:
    """How one arm ended with one seed.

    start, final: held-out loss at step 0 and after the last step (nats a token); final is None where it was not
    reached or not finite. began: step at which it began to diverge; established: steps after which that was known (a
    mean needs its whole window). seconds: of all steps. curve: (seconds so far, held-out loss) of each evaluation.
    """

    status: Status
    start: float | None = None
    final: float | None = None
    began: int | None = None
    seconds: float | None = None
    curve: tuple[tuple[float, float], ...] = ()
    established: int | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def loss_after(self, seconds: float) -> float | None:
        """Held-out loss after so many seconds of steps, linear between evaluations; None outside the record."""
        points = ((0.0, self.start), *self.curve) if self.start is not None else self.curve
        for (early, before), (late, after) in pairwise(points):
            if early <= seconds <= late and before is not None and after is not None:
                share = 0.0 if late == early else (seconds - early) / (late - early)
                return before + share * (after - before)
        return None


@dataclass(frozen=True)
class Cell:
    """The arms at one setting: (arm, seed) -> result."""

    setting: Setting
    arms: Mapping[str, ArmConfig] = field(default_factory=dict)
    results: Mapping[tuple[str, int], Result] = field(default_factory=dict)

    def of(self, arm: str) -> dict[int, Result]:
        """Seed -> result, of those that ended."""
        return {
            seed: found for (name, seed), found in sorted(self.results.items()) if name == arm and found.ended
        }

    def like(self, backward: str, idle: str | None = None, rule: str = "eta") -> str | None:
        """Name of the cyclic arm of LCSB itself with this backward mode, idle policy and learning rate rule."""
        for name, arm in self.arms.items():
            cyclic = arm.method == "lcsb" and arm.schedule == "cyclic"
            if (
                cyclic
                and (arm.backward, arm.learning_rate_rule) == (backward, rule)
                and idle in (None, arm.idle)
            ):
                return name
        return None


def result_of(outcome: Outcome, metrics: Metrics | None) -> Result:
    """An outcome with the seconds and evaluations of its log."""
    so_far, sums = 0.0, [0.0]
    for step in metrics.steps if metrics else ():
        so_far += step.seconds
        sums.append(so_far)
    curve = tuple(
        (sums[row.t], row.held_out_loss)
        for row in (metrics.evals if metrics else ())
        if row.held_out_loss is not None and row.t < len(sums)
    )
    final = (
        outcome.final_loss if outcome.final_loss is not None and math.isfinite(outcome.final_loss) else None
    )
    seconds = so_far if metrics else None
    return Result(
        outcome.status,
        outcome.loss_at_start,
        final,
        outcome.began,
        seconds,
        curve,
        _established(outcome, metrics),
    )


def _established(outcome: Outcome, metrics: Metrics | None) -> int | None:
    if outcome.began is None or metrics is None:
        return None
    whole = metrics.losses[outcome.began : outcome.began + DIVERGED_WINDOW]
    # A loss that is not finite says so at once, and where the step was not taken it is not in the list at all.
    at_once = len(whole) < DIVERGED_WINDOW or whole[0] is None
    return outcome.began + (1 if at_once else DIVERGED_WINDOW)


def setting_of(run: Run) -> Setting:
    """The setting of a run folder. Seeds, arms, and what only measures or schedules work are no part of it."""
    config = run.config.to_mapping()
    names = ("double_quant", "batch_size", "accumulation", "eval_windows", "lora")
    rest = {name: config[name] for name in names}
    rest["data"] = {key: value for key, value in config["data"].items() if key not in ("source", "path")}
    rest["optimizer"] = {key: value for key, value in config["optimizer"].items() if key != "learning_rate"}
    rest["corpus"] = run.environment.get("corpus", {}).get("sha256")
    return Setting(
        run.config.model, run.config.data.source, run.config.quantization or "none",
        run.config.compute_dtype, run.config.optimizer.learning_rate, run.config.steps,
        run.config.cycle_length, json.dumps(rest, sort_keys=True),
    )  # fmt: skip


def cells_of(runs: Iterable[Run]) -> list[Cell]:
    """Runs of equal setting become one cell.

    Raises ValueError when one arm name stands for two methods at one setting, or an arm and seed ended differently in
    two folders (the same arm in two folders is taken once).
    """
    found: dict[Setting, Cell] = {}
    for run in runs:
        setting = setting_of(run)
        cell = found.get(setting, Cell(setting))
        arms, results = dict(cell.arms), dict(cell.results)
        for arm in run.config.arms:
            if arms.setdefault(arm.name, arm) != arm:
                raise ValueError(
                    f"{run.folder.root}: arm {arm.name} has other settings here than in another run of {setting.words}"
                )
            for seed in run.config.seeds:
                result = result_of(run.outcome(arm.name, seed), run.arms.get((arm.name, seed)))
                there = results.get((arm.name, seed))
                if there is None or not there.ended:
                    results[arm.name, seed] = result
                elif result.ended and (there.status, there.final) != (result.status, result.final):
                    raise ValueError(
                        f"{run.folder.root}: arm {arm.name}, seed {seed} ended at {result.final} here and at "
                        f"{there.final} in another run of {setting.words}, expected the same"
                    )
        found[setting] = replace(cell, arms=arms, results=results)
    return list(found.values())
