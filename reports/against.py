"""A user's own logs as material for the judge: metrics.jsonl in our schema, or the trainer_state.json of a Trainer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from bcd_theory.predictions import Predictions
from reports.arms import NAMED_ARMS, ArmConfig, expected
from reports.cells import OWN_LOGS
from reports.claims import BY_ID
from reports.config import RunConfig
from reports.evidence import BenchMemory
from reports.judge import claim_verdict
from reports.metrics import End, Eval, Header, Metrics, Step, diverged_at, read_metrics
from reports.records import RunFolder
from reports.rules import Material, judgements
from reports.run import Run
from reports.strict import first_problem
from reports.verdicts import ClaimVerdict, Judgement

_UNREGISTERED = "0" * 64
_CYCLE_LENGTH = 4
#: why a log alone cannot test a claim
_SILENT = {
    "C1": "a log holds no cosines; lcsb validate --claims C1 measures them",
    "C3": "a log holds no probe steps; lcsb validate --claims C3 takes them",
    "C4": "steps that ran beside other work are no timing; lcsb validate --claims C4 takes it",
    "C7": "a log holds no peak of the process; lcsb bench memory measures it, and --bench FILE hands it to the judge",
}


@dataclass(frozen=True)
class UserLog:
    """One log, read and checked. `notes`: what it lacks, one line each."""

    path: Path
    metrics: Metrics
    notes: tuple[str, ...] = ()


class _Entry(BaseModel):
    """A row of Trainer's log_history, as far as it is read; Trainer writes NaN for a loss that is not finite."""

    model_config = ConfigDict(extra="allow")
    step: int
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    train_runtime: float | None = None


class _State(BaseModel):
    model_config = ConfigDict(extra="allow")
    global_step: int
    max_steps: int
    log_history: list[_Entry]


def read_log(argument: str) -> UserLog:
    """Read `FILE` or `ARM=FILE` or `ARM/SEED=FILE`; the last two say what a Trainer's file cannot.

    Raises ValueError in one line that names the file: not there, not JSON, neither of the two forms, an unknown arm,
    or a metrics file without its header.
    """
    arm, seed, path = _labelled(argument)
    if path.suffix == ".jsonl":
        if arm is not None:
            raise ValueError(
                f"{argument}: a metrics file names its own arm and seed, expected the file alone"
            )
        metrics = read_metrics(path)
        if metrics.header is None:
            raise ValueError(f"{path}: found no header in line 1, expected what lcsb train writes")
        return UserLog(path, metrics, (metrics.torn,) if metrics.torn else ())
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(
            f"{path}: not JSON ({error}); expected metrics.jsonl or trainer_state.json"
        ) from None
    if not isinstance(found, dict) or "log_history" not in found:
        raise ValueError(
            f"{path}: found no log_history, expected the trainer_state.json of a Trainer or a .jsonl file"
        )
    try:
        state = _State.model_validate(found)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_problem(error)}") from None
    if arm is None:
        raise ValueError(
            f"{path}: a Trainer's state does not say which arm it is; give it as ARM/SEED={path}, for example "
            f"exact-momentum/0={path}"
        )
    return _of_trainer(path, state, arm, seed)


def _labelled(argument: str) -> tuple[ArmConfig | None, int, Path]:
    label, equals, rest = argument.partition("=")
    if not equals or Path(argument).exists():
        return None, 0, Path(argument)
    match = re.fullmatch(r"([\w.-]+)(?:/(\d+))?", label)
    if match is None:
        raise ValueError(f"{argument}: expected FILE, ARM=FILE or ARM/SEED=FILE")
    if match[1] not in NAMED_ARMS:
        raise ValueError(f"{argument}: found the arm {match[1]!r}, expected {expected(match[1], NAMED_ARMS)}")
    return NAMED_ARMS[match[1]], int(match[2] or 0), Path(rest)


def _of_trainer(path: Path, state: _State, arm: ArmConfig, seed: int) -> UserLog:
    """Trainer logs means over logging_steps; each step of such a stretch gets its mean."""
    notes: list[str] = []
    losses: list[float | None] = []
    evals, start, runtime, rate = [], None, None, None
    for entry in state.log_history:
        if entry.loss is not None and entry.step > len(losses):
            value = entry.loss if math.isfinite(entry.loss) else None
            losses += [value] * (entry.step - len(losses))
        rate = entry.learning_rate if rate is None and entry.learning_rate else rate
        runtime = entry.train_runtime if entry.train_runtime is not None else runtime
        if entry.eval_loss is not None:
            finite = math.isfinite(entry.eval_loss)
            loss = entry.eval_loss if finite else None
            start = loss if entry.step == 0 else start
            evals.append(Eval(t=entry.step, held_out_loss=loss, tokens=0, nonfinite=not finite))
    if not losses:
        raise ValueError(f"{path}: found no training loss in log_history, expected at least one")
    if start is None:
        raise ValueError(
            f"{path}: found no eval_loss at step 0, expected one (eval_on_start=True): without it neither divergence "
            "nor a drop can be told"
        )
    if rate is None:
        raise ValueError(f"{path}: found no learning_rate in log_history, expected one")
    if not any(row.t == state.global_step for row in evals):
        notes.append(f"{path}: no eval_loss at the last step {state.global_step}, so no final loss")
    if runtime is None:
        notes.append(f"{path}: no train_runtime, so no seconds")
    seconds = (runtime or 0.0) / len(losses)
    steps = [
        Step.model_validate(
            {"t": t, "loss": loss, "lcsb/selected": [], "lcsb/grad_norm": None, "lcsb/displacement_idle": None,
             "displacement": [], "seconds": seconds, "nonfinite": True}
        )
        for t, loss in enumerate(losses)
    ]  # fmt: skip
    if arm.learning_rate_rule != "eta":
        notes.append(
            f"{path}: p is not in a Trainer's state; taken as {_CYCLE_LENGTH} for {arm.learning_rate_rule}"
        )
    began = diverged_at(losses, start)
    header = Header(
        predictions_sha256=_UNREGISTERED, arm=arm, seed=seed, learning_rate=rate, cycle_length=_CYCLE_LENGTH, blocks=[],
        n_layers=0, steps=state.max_steps, loss_at_start=start,
    )  # fmt: skip
    end = None
    if state.global_step >= state.max_steps or began is not None:
        status = "done" if began is None else "diverged"
        end = End(t=state.global_step, status=status, diverged_at=began, seconds=runtime or 0.0)  # type: ignore[arg-type]
    return UserLog(path, Metrics(path, header, steps, [], evals, end=end), tuple(notes))


def material_of(logs: Sequence[UserLog], bench: BenchMemory | None = None) -> Material:
    """Logs of equal learning rate, steps and cycle length become one run.

    Model and data are taken to be the same for all of them, since no log names them. Raises ValueError for two logs of
    one arm and seed.
    """
    groups: dict[tuple[float, int, int], dict[tuple[str, int], UserLog]] = {}
    for log in logs:
        header = log.metrics.header
        assert header is not None
        # The run's learning rate: an arm at eta/p logs its own.
        own = header.arm.learning_rate(1.0, header.cycle_length)
        eta = header.learning_rate if header.arm.options.get("learning_rate") else header.learning_rate / own
        key = (float(f"{eta:.9g}"), header.steps, header.cycle_length)
        group = groups.setdefault(key, {})
        there = group.setdefault((header.arm.name, header.seed), log)
        if there is not log:
            raise ValueError(f"{log.path}: arm {header.arm.name}, seed {header.seed} is also in {there.path}")
    return Material(tuple(_run(key, group) for key, group in groups.items()), bench)


def _run(key: tuple[float, int, int], group: dict[tuple[str, int], UserLog]) -> Run:
    eta, steps, cycle_length = key
    arms: dict[str, ArmConfig] = {}
    for log in group.values():
        header = log.metrics.header
        assert header is not None
        if arms.setdefault(header.arm.name, header.arm) != header.arm:
            raise ValueError(f"{log.path}: arm {header.arm.name} has other settings than in another log")
    config = RunConfig.from_mapping(
        {
            "name": "against", "model": OWN_LOGS, "seeds": sorted({seed for _, seed in group}), "steps": steps,
            "cycle_length": cycle_length, "optimizer": {"learning_rate": eta}, "data": {"source": "your data"},
            "arms": [arm.model_dump(mode="json") for arm in arms.values()],
            "quantization": None if any(arm.trains_whole_layers for arm in arms.values()) else "nf4",
        }
    )  # fmt: skip
    empty = Predictions(items=())
    metrics = {key: log.metrics for key, log in group.items()}
    place = RunFolder(next(iter(group.values())).path.parent)
    return Run(place, config, {}, None, empty, _UNREGISTERED, metrics, None, None, None)


def judge_logs(
    logs: Sequence[UserLog],
    claims: Sequence[str],
    command: Callable[[str], str],
    bench: BenchMemory | None = None,
) -> tuple[ClaimVerdict, ...]:
    """Both verdicts on each claim, as far as the logs allow; a claim that they cannot test says why in one line."""
    material = material_of(logs, bench)
    found = []
    for claim in claims:
        silent = claim in _SILENT and not (claim == "C7" and bench is not None)
        if silent or (claim == "C2" and not any(log.metrics.laws for log in logs)):
            why = _SILENT.get(claim, "no log holds a check of T6 (rows of kind law), which lcsb train writes")
            paper, ours = (
                Judgement(verdict="not testable here", rule=rule.text, reason=f"Not tested: {why}.")
                for rule in (BY_ID[claim].paper, BY_ID[claim].ours)
            )
            found.append(claim_verdict(claim, paper, ours, command(claim)))
            continue
        found.append(claim_verdict(claim, *judgements(material, claim), command(claim)))
    return tuple(found)


def describe(log: UserLog) -> dict[str, Any]:
    """What one log says: arm, seed, status, losses."""
    header = log.metrics.header
    assert header is not None
    run = material_of([log]).runs[0]
    outcome = run.outcome(header.arm.name, header.seed)
    return {
        "file": str(log.path), "arm": header.arm.name, "seed": header.seed, "status": outcome.status,
        "diverged_at": outcome.began, "loss_at_start": outcome.loss_at_start, "final_loss": outcome.final_loss,
        "notes": list(log.notes),
    }  # fmt: skip
