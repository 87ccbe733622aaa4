"""Train one arm of a run: a plain loop over `selective_backward`, logged step by step, resumable at any instant."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lcsb.checkpoint import load_checkpoint, save_checkpoint
from lcsb.data import IGNORED, Corpus
from lcsb.distributed import Replicas, join
from lcsb.idle_law import IdleLaw
from lcsb.methods import idle_law_of, loss_and_gradient, open_method, optimizer_for
from lcsb.prepare import held_out_loss, language_batch, layers_per_step, make_optimizer, prepare
from lcsb.selective import NonFiniteError, SelectiveBackward
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


@dataclass
class _Progress:
    """Running sums that a resumed arm must carry on."""

    t: int = 0
    losses: list[float | None] = field(default_factory=list)
    path: list[float] = field(default_factory=list)
    seconds: float = 0.0


def _layer_vectors(lcsb: SelectiveBackward) -> list[torch.Tensor]:
    """Each layer's adapters as one float64 vector (a copy)."""
    return [
        torch.cat([p.detach().double().flatten() for p in group.values()]) if group else torch.zeros(0)
        for group in lcsb.adapters
    ]


def train_arm(folder: RunFolder, arm_name: str, seed: int) -> str:
    """Train one arm with one seed, from its newest checkpoint if there is one; returns `done` or `diverged`.

    Reads config.yaml, measurements.json and predictions.json of the run and writes below arms/<arm>/seed-<n>/. An arm
    that is finished is left alone. Started by torchrun in several processes, each takes its share of every batch.

    Raises:
        ValueError: an unknown arm or seed; a metrics file that belongs to other predictions.
    """
    config = RunConfig.read(folder.config)
    arm = arm_named(config, arm_name)
    if seed not in config.seeds:
        raise ValueError(f"seed {seed}: not in this run; its seeds are {config.seeds}")
    registration = sha256_of(folder.predictions)
    place = folder.arm(arm_name, seed)
    if place.metrics.exists():
        metrics = read_metrics(place.metrics)
        if metrics.header is not None and metrics.header.predictions_sha256 != registration:
            raise ValueError(
                f"{place.metrics}: registered against predictions {metrics.header.predictions_sha256[:12]}, "
                f"found {registration[:12]} in {folder.predictions}; move the old arm away or restore the predictions"
            )
        if metrics.end is not None:
            return metrics.end.status
    replicas = join()
    _refuse_uneven(config, arm, replicas)
    replicas.wait()  # every process has read the metrics before the first one writes to them
    loss_at_start = float(read_json(folder.measurements)["held_out_loss"])
    whole = arm.trains_whole_layers
    model, corpus = prepare(config, seed, recompute=config.recompute_arms, whole_layers=whole)
    learning_rate = arm.learning_rate(config.optimizer.learning_rate, config.cycle_length)
    lcsb = open_method(model, arm, layers_per_step=layers_per_step(model, config), seed=seed)
    optimizer = optimizer_for(lcsb, make_optimizer(model, config, learning_rate))
    law = idle_law_of(lcsb)
    header = {
        "kind": "header",
        "schema": 1,
        "predictions_sha256": registration,
        "arm": arm.model_dump(mode="json"),
        "seed": seed,
        "learning_rate": learning_rate,
        "cycle_length": config.cycle_length,
        "blocks": [[lcsb.trainable_layers[i] for i in block] for block in lcsb.schedule.blocks],
        "n_layers": len(lcsb.layers),
        "idle_law": law or f"none: {arm.method} does not give idle layers the step of T6 or T6b",
        "steps": config.steps,
        "loss_at_start": loss_at_start,
    }
    return _Arm(config, place, model, corpus, optimizer, lcsb, seed, loss_at_start, replicas).run(header)


def _refuse_uneven(config: RunConfig, arm: ArmConfig, replicas: Replicas) -> None:
    if config.batch_size % replicas.size:
        raise ValueError(
            f"batch_size: {config.batch_size} rows in {replicas.size} processes, expected a multiple of their number"
        )
    if replicas.size > 1 and arm.method != "lcsb":
        raise ValueError(f"arm {arm.name}: method {arm.method} runs in one process, found {replicas.size}")


class _Silent:
    """What the processes other than rank 0 write their records to."""

    lines = 0

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def write(self, record: dict[str, Any]) -> None:
        pass

    def sync(self) -> None:
        pass


class _Arm:
    """The loop's state; `run` goes from the newest checkpoint to the end."""

    def __init__(
        self,
        config: RunConfig,
        place: ArmFolder,
        model: nn.Module,
        corpus: Corpus,
        optimizer: torch.optim.Optimizer,
        lcsb: SelectiveBackward,
        seed: int,
        loss_at_start: float,
        replicas: Replicas,
    ) -> None:
        self.replicas = replicas
        self.config, self.place, self.model, self.corpus = config, place, model, corpus
        self.optimizer, self.lcsb, self.seed, self.loss_at_start = optimizer, lcsb, seed, loss_at_start
        self.windows = corpus.held_out[: config.eval_windows]
        self.progress = _Progress(path=[0.0] * len(lcsb.layers))

    def run(self, header: dict[str, Any]) -> str:
        start = _layer_vectors(self.lcsb)  # a function of the seed, so not in the checkpoint
        writer, resumed = self._open()
        self.replicas.attach(self.lcsb)
        self._vectors = _layer_vectors(self.lcsb)
        with writer, self.lcsb as lcsb:
            if not resumed:
                writer.write(header)
            else:
                writer.write({"kind": "event", "t": self.progress.t, "event": "resumed"})
            checked = idle_law_of(lcsb) is not None
            self._law = IdleLaw(lcsb.adapters, self.optimizer, lcsb.config.idle) if checked else None
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
            self._finish(writer, start, status)
        return self._status

    def _open(self) -> tuple[MetricsWriter | _Silent, bool]:
        for t, folder in reversed(self.place.checkpoints()):
            facts = load_checkpoint(folder, self.lcsb.parameters(), self.optimizer)
            self.progress = _Progress(t, facts["losses"], facts["path"], facts["seconds"])
            self.lcsb.load_state_dict(facts["selection"])
            return self._writer(facts["lines"]), True
        return self._writer(
            0 if self.place.metrics.exists() else None
        ), False  # 0: stopped before a checkpoint

    def _writer(self, resume_at: int | None) -> MetricsWriter | _Silent:
        return _Silent() if self.replicas.rank else MetricsWriter(self.place.metrics, resume_at=resume_at)

    def _step(self, writer: MetricsWriter | _Silent) -> None:
        lcsb, t = self.lcsb, self.progress.t
        begin = time.perf_counter()
        lcsb.begin()
        value = self._loss_and_gradient(t)
        if not math.isfinite(value):
            raise NonFiniteError(f"step {t}: the training loss is {value}; the step was not taken")
        self.replicas.average_gradients(lcsb.trained_parameters())
        middle = time.perf_counter()
        selected = lcsb.selected  # the schedule `importance` chooses by the gradient just measured
        if self._law is not None:
            self._law.before_step(selected)
        again = time.perf_counter()
        record = lcsb.step(self.optimizer, batch=f"{t} of seed {self.seed}")
        seconds = time.perf_counter() - again + middle - begin
        before, self._vectors = self._vectors, _layer_vectors(lcsb)
        moved = [float((new - old).norm()) for new, old in zip(self._vectors, before, strict=True)]
        idle = math.sqrt(sum(m * m for i, m in enumerate(moved) if i not in set(selected)))
        writer.write(
            {
                "kind": "step",
                "t": t,
                "loss": value,
                "lcsb/block": record.block,
                "lcsb/selected": list(selected),
                "lcsb/grad_norm": record.grad_norm,
                "lcsb/displacement_idle": idle,
                "displacement": moved,
                "seconds": seconds,
                **lcsb.log(),
            }
        )
        for plan in record.refreshed:
            writer.write({"kind": "event", "t": t, "event": "plan", **dataclasses.asdict(plan)})
        law = self._law.after_step(t) if self._law is not None else None
        if law is not None:
            writer.write(law)
        progress = self.progress
        progress.t += 1
        progress.losses.append(value)
        progress.path = [total + m for total, m in zip(progress.path, moved, strict=True)]
        progress.seconds += seconds

    def _loss_and_gradient(self, t: int) -> float:
        """Mean loss over the targets of the step's batches, on all processes, and this process's share of its gradient.

        Each backward pass has the mean over its own targets, so it is weighted by their share of the step's.
        """
        config, replicas = self.config, self.replicas
        rows = self.corpus.batch(self.seed, t, config.batch_size * config.accumulation)
        share = config.batch_size * config.accumulation // replicas.size
        mine = rows[replicas.rank * share : (replicas.rank + 1) * share]
        batches = [
            language_batch(part, self.model) for part in mine.split(config.batch_size // replicas.size)
        ]
        targets = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches]
        everywhere = replicas.agree(torch.tensor([sum(targets)], dtype=torch.float64), "sum")
        losses = [
            partial(self._weighted_loss, batch, count * replicas.size / everywhere.item())
            for batch, count in zip(batches, targets, strict=True)
        ]
        value = loss_and_gradient(self.lcsb, *losses).double().reshape(1)
        return float(replicas.agree(value, "mean"))

    def _weighted_loss(self, batch: dict[str, torch.Tensor], weight: float) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss * weight

    def _evaluate(self, writer: MetricsWriter | _Silent) -> float:
        loss, tokens = held_out_loss(self.model, self.windows)
        writer.write({"kind": "eval", "t": self.progress.t, "held_out_loss": loss, "tokens": tokens})
        self._last_evaluation = (self.progress.t, loss)
        return loss

    def _save(self, writer: MetricsWriter | _Silent) -> None:
        if self.replicas.rank:
            self.replicas.wait()
            return
        writer.sync()
        progress = self.progress
        facts = {"t": progress.t, "lines": writer.lines, "losses": progress.losses, "path": progress.path}
        facts |= {"seconds": progress.seconds, "selection": self.lcsb.state_dict()}
        save_checkpoint(self.place.checkpoint(progress.t), self.lcsb.parameters(), self.optimizer, facts)
        for t, folder in self.place.checkpoints():
            if t < progress.t:
                shutil.rmtree(folder)
        self.replicas.wait()

    def _finish(self, writer: MetricsWriter | _Silent, start: list[torch.Tensor], status: str) -> None:
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
        rms = [
            math.sqrt(float((new - old).square().mean())) if len(new) else 0.0
            for new, old in zip(self._vectors, start, strict=True)
        ]
        writer.write({"kind": "movement", "t": progress.t, "layer_rms": rms, "layer_path": progress.path})
        if self.replicas.rank == 0:
            self._save_trained()
        writer.write(
            {
                "kind": "end",
                "t": progress.t,
                "status": self._status,
                "diverged_at": at,
                "seconds": progress.seconds,
            }
        )
        writer.sync()
        self.replicas.wait()
        for _, folder in self.place.checkpoints() if self.replicas.rank == 0 else ():
            shutil.rmtree(folder)

    def _save_trained(self) -> None:
        """The adapter in PEFT's format; a model whose own weights were trained is saved whole, as model/."""
        adapters = bool(getattr(self.model, "peft_config", None))
        folder: Path = self.place.adapter if adapters else self.place.root / "model"
        options = {"save_embedding_layers": False} if adapters else {}
        temporary = folder.with_name(folder.name + ".partial")
        shutil.rmtree(temporary, ignore_errors=True)
        self.model.save_pretrained(temporary, **options)  # type: ignore[operator]
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
