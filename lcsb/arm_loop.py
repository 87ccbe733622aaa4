"""The loop over the steps of one arm, whoever computes them: records, evaluations, checkpoints, divergence, the end.

`lcsb.train` computes a step by the model in memory, `lcsb.engine.training` by the memory engine.
"""

from __future__ import annotations

import math
import shutil
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lcsb.selective import NonFiniteError
from reports.records import (
    ArmConfig,
    ArmFolder,
    MetricsWriter,
    RunConfig,
    RunFolder,
    diverged_at,
    no_progress,
    read_json,
    read_metrics,
    sha256_of,
    should_stop,
)


def arm_named(config: RunConfig, name: str) -> ArmConfig:
    """The arm of that name. Raises ValueError that lists the arms there are."""
    for arm in config.arms:
        if arm.name == name:
            return arm
    raise ValueError(
        f"arm {name!r}: not in this run; its arms are {', '.join(arm.name for arm in config.arms)}"
    )


@dataclass(frozen=True)
class OpenArm:
    """What an arm's training starts from, read and checked.

    Attributes:
        registration: sha256 of the predictions.
        status: how the arm ended; None if it has not.
    """

    config: RunConfig
    arm: ArmConfig
    seed: int
    place: ArmFolder
    registration: str
    status: str | None
    loss_at_start: float
    learning_rate: float

    def header(self, blocks: list[list[int]], layers: int, idle_law: str, **more: Any) -> dict[str, Any]:
        """First line of the metrics file."""
        return {
            "kind": "header",
            "schema": 1,
            "predictions_sha256": self.registration,
            "arm": self.arm.model_dump(mode="json"),
            "seed": self.seed,
            "learning_rate": self.learning_rate,
            "cycle_length": self.config.cycle_length,
            "blocks": blocks,
            "n_layers": layers,
            "idle_law": idle_law,
            "steps": self.config.steps,
            "loss_at_start": self.loss_at_start,
            **more,
        }


def open_arm(folder: RunFolder, arm_name: str, seed: int) -> OpenArm:
    """Read the run's files for one arm.

    Raises:
        ValueError: an unknown arm or seed; a metrics file that belongs to other predictions.
    """
    config = RunConfig.read(folder.config)
    arm = arm_named(config, arm_name)
    if seed not in config.seeds:
        raise ValueError(f"seed {seed}: not in this run; its seeds are {config.seeds}")
    registration = sha256_of(folder.predictions)
    place = folder.arm(arm_name, seed)
    status = None
    if place.metrics.exists():
        metrics = read_metrics(place.metrics)
        if metrics.header is not None and metrics.header.predictions_sha256 != registration:
            raise ValueError(
                f"{place.metrics}: registered against predictions {metrics.header.predictions_sha256[:12]}, "
                f"found {registration[:12]} in {folder.predictions}; move the old arm away or restore the predictions"
            )
        status = metrics.end.status if metrics.end is not None else None
    loss_at_start = float(read_json(folder.measurements)["held_out_loss"])
    learning_rate = arm.learning_rate(config.optimizer.learning_rate, config.cycle_length)
    return OpenArm(config, arm, seed, place, registration, status, loss_at_start, learning_rate)


@dataclass
class Progress:
    """Running sums that a resumed arm must carry on."""

    t: int = 0
    losses: list[float | None] = field(default_factory=list)
    path: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, loss: float, moved: list[float], seconds: float) -> None:
        """One step more."""
        self.t += 1
        self.losses.append(loss)
        self.path = [total + m for total, m in zip(self.path, moved, strict=True)]
        self.seconds += seconds


class Silent:
    """What the processes other than rank 0 write their records to."""

    lines = 0

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def write(self, record: dict[str, Any]) -> None:
        pass

    def sync(self) -> None:
        pass


Writer = MetricsWriter | Silent


class ArmLoop(ABC):
    """`run` goes from the newest checkpoint to the end.

    Attributes:
        writes: whether this process keeps the records (rank 0 of several).
    """

    writes = True

    def __init__(self, opened: OpenArm, layers: int) -> None:
        self.config, self.place, self.seed = opened.config, opened.place, opened.seed
        self.loss_at_start = opened.loss_at_start
        self.progress = Progress(path=[0.0] * layers)

    # -- what computes the steps says how -------------------------------------------------------------------------

    @abstractmethod
    def _restore(self, checkpoint: Path) -> dict[str, Any]:
        """Put the state of a checkpoint in place; its facts."""

    @abstractmethod
    def _step(self, writer: Writer) -> None:
        """One step: its record, and `progress`. Raises NonFiniteError, with nothing changed."""

    @abstractmethod
    def _held_out_loss(self) -> tuple[float, int]:
        """Mean loss per target on the evaluation windows, and the number of targets."""

    @abstractmethod
    def _write_checkpoint(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write the state, whole or not at all."""

    @abstractmethod
    def _layer_rms(self) -> list[float]:
        """Root mean square of x_T - x_0 of each layer."""

    @abstractmethod
    def _save_trained(self) -> None:
        """Write what was trained."""

    def _begin(self) -> None:  # noqa: B027
        """Before a checkpoint is loaded."""

    def _opened(self) -> None:  # noqa: B027
        """After a checkpoint, if any, is loaded."""

    def _steps(self) -> AbstractContextManager[object]:
        """Open while steps are taken."""
        return nullcontext()

    def _wait(self) -> None:  # noqa: B027
        """For the other processes."""

    def _closing(self, writer: Writer) -> dict[str, Any]:
        """More fields of the last line."""
        return {}

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self, header: dict[str, Any]) -> str:
        """Train to the end; returns `done` or `diverged`."""
        self._begin()
        writer, resumed = self._open()
        self._opened()
        with writer, self._steps():
            if not resumed:
                writer.write(header)
            else:
                writer.write({"kind": "event", "t": self.progress.t, "event": "resumed"})
            status = "done"
            while self.progress.t < self.config.steps:
                try:
                    self._step(writer)
                except NonFiniteError as error:
                    writer.write(
                        {"kind": "event", "t": self.progress.t, "event": "diverged", "message": str(error)}
                    )
                    self.progress.losses.append(None)
                    status = "diverged"
                    break
                if should_stop(self.progress.losses, self.loss_at_start):
                    break
                t = self.progress.t
                if t % self.config.eval_every == 0 or t == self.config.steps:
                    self._evaluate(writer)
                if t % self.config.checkpoint_every == 0 and t < self.config.steps:
                    self._save(writer)
            self._finish(writer, status)
        return self._status

    def _open(self) -> tuple[Writer, bool]:
        for t, folder in reversed(self.place.checkpoints()):
            facts = self._restore(folder)
            self.progress = Progress(t, facts["losses"], facts["path"], facts["seconds"])
            return self._writer(facts["lines"]), True
        return self._writer(
            0 if self.place.metrics.exists() else None
        ), False  # 0: stopped before a checkpoint

    def _writer(self, resume_at: int | None) -> Writer:
        return MetricsWriter(self.place.metrics, resume_at=resume_at) if self.writes else Silent()

    def _evaluate(self, writer: Writer) -> None:
        loss, tokens = self._held_out_loss()
        writer.write({"kind": "eval", "t": self.progress.t, "held_out_loss": loss, "tokens": tokens})
        self._last_evaluation = (self.progress.t, loss)

    def _save(self, writer: Writer) -> None:
        if self.writes:
            writer.sync()
            progress = self.progress
            facts = {"t": progress.t, "lines": writer.lines, "losses": progress.losses, "path": progress.path}
            facts["seconds"] = progress.seconds
            self._write_checkpoint(self.place.checkpoint(progress.t), facts)
            for t, folder in self.place.checkpoints():
                if t < progress.t:
                    shutil.rmtree(folder)
        self._wait()

    def _finish(self, writer: Writer, status: str) -> None:
        progress = self.progress
        at = diverged_at(progress.losses, self.loss_at_start)
        if at is not None and status != "diverged":
            writer.write({"kind": "event", "t": at, "event": "diverged"})
        self._status = "done" if at is None else "diverged"
        if self._status == "done":
            t, loss = self._last_evaluation
            if t != progress.t:
                raise RuntimeError(
                    f"{self.place.metrics}: the last evaluation is at step {t}, expected {progress.t}"
                )
            if no_progress(loss if math.isfinite(loss) else None, self.loss_at_start):
                writer.write({"kind": "event", "t": progress.t, "event": "no-progress"})
        movement = {"layer_rms": self._layer_rms(), "layer_path": progress.path}
        writer.write({"kind": "movement", "t": progress.t, **movement})
        if self.writes:
            self._save_trained()
        writer.write(
            {
                "kind": "end",
                "t": progress.t,
                "status": self._status,
                "diverged_at": at,
                "seconds": progress.seconds,
                **self._closing(writer),
            }
        )
        writer.sync()
        self._wait()
        for _, folder in self.place.checkpoints() if self.writes else ():
            shutil.rmtree(folder)
