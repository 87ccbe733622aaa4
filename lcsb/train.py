"""Train one arm of a run: a plain loop over `selective_backward`, logged step by step, resumable at any instant."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lcsb.arm_loop import ArmLoop, OpenArm, Writer, open_arm
from lcsb.arm_loop import arm_named as arm_named
from lcsb.checkpoint import load_checkpoint, save_checkpoint
from lcsb.data import IGNORED, Corpus
from lcsb.distributed import Replicas, join
from lcsb.idle_law import IdleLaw
from lcsb.methods import idle_law_of, loss_and_gradient, open_method, optimizer_for
from lcsb.prepare import held_out_loss, language_batch, layers_per_step, make_optimizer, prepare
from lcsb.selective import NonFiniteError, SelectiveBackward
from reports.records import ArmConfig, RunConfig, RunFolder


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
    opened = open_arm(folder, arm_name, seed)
    if opened.status is not None:
        return opened.status
    config, arm = opened.config, opened.arm
    replicas = join()
    _refuse_uneven(config, arm, replicas)
    replicas.wait()  # every process has read the metrics before the first one writes to them
    whole = arm.trains_whole_layers
    model, corpus = prepare(config, seed, recompute=config.recompute_arms, whole_layers=whole)
    lcsb = open_method(model, arm, layers_per_step=layers_per_step(model, config), seed=seed)
    optimizer = optimizer_for(lcsb, make_optimizer(model, config, opened.learning_rate))
    law = idle_law_of(lcsb) or f"none: {arm.method} does not give idle layers the step of T6 or T6b"
    blocks = [[lcsb.trainable_layers[i] for i in block] for block in lcsb.schedule.blocks]
    header = opened.header(blocks, len(lcsb.layers), law)
    return _Arm(opened, model, corpus, optimizer, lcsb, replicas).run(header)


def _refuse_uneven(config: RunConfig, arm: ArmConfig, replicas: Replicas) -> None:
    if config.batch_size % replicas.size:
        raise ValueError(
            f"batch_size: {config.batch_size} rows in {replicas.size} processes, expected a multiple of their number"
        )
    if replicas.size > 1 and arm.method != "lcsb":
        raise ValueError(f"arm {arm.name}: method {arm.method} runs in one process, found {replicas.size}")


class _Arm(ArmLoop):
    """Steps by `selective_backward` on the model in memory, in one process or several."""

    def __init__(
        self,
        opened: OpenArm,
        model: nn.Module,
        corpus: Corpus,
        optimizer: torch.optim.Optimizer,
        lcsb: SelectiveBackward,
        replicas: Replicas,
    ) -> None:
        super().__init__(opened, len(lcsb.layers))
        self.writes = replicas.rank == 0
        self.replicas, self.model, self.corpus = replicas, model, corpus
        self.optimizer, self.lcsb = optimizer, lcsb
        self.windows = corpus.held_out[: self.config.eval_windows]

    def _begin(self) -> None:
        self._start = _layer_vectors(self.lcsb)  # a function of the seed, so not in the checkpoint

    def _restore(self, checkpoint: Path) -> dict[str, Any]:
        facts = load_checkpoint(checkpoint, self.lcsb.parameters(), self.optimizer)
        self.lcsb.load_state_dict(facts["selection"])
        return facts

    def _opened(self) -> None:
        self.replicas.attach(self.lcsb)
        self._vectors = _layer_vectors(self.lcsb)
        checked = idle_law_of(self.lcsb) is not None
        self._law = IdleLaw(self.lcsb.adapters, self.optimizer, self.lcsb.config.idle) if checked else None

    def _steps(self) -> SelectiveBackward:
        return self.lcsb

    def _wait(self) -> None:
        self.replicas.wait()

    def _step(self, writer: Writer) -> None:
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
        self.progress.add(value, moved, seconds)

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

    def _held_out_loss(self) -> tuple[float, int]:
        return held_out_loss(self.model, self.windows)

    def _write_checkpoint(self, folder: Path, facts: dict[str, Any]) -> None:
        facts = {**facts, "selection": self.lcsb.state_dict()}
        save_checkpoint(folder, self.lcsb.parameters(), self.optimizer, facts)

    def _layer_rms(self) -> list[float]:
        return [
            math.sqrt(float((new - old).square().mean())) if len(new) else 0.0
            for new, old in zip(self._vectors, self._start, strict=True)
        ]

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
