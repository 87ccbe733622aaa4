"""`LCSBCallback`: selective backpropagation inside transformers' own Trainer (and TRL's SFTTrainer)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lcsb.config import LCSBConfig
from lcsb.selective import SelectiveBackward, selective_backward


class LCSBCallback(TrainerCallback):
    """Runs a Trainer's steps under `selective_backward`.

    The Trainer builds its optimiser from all adapters, accumulates and clips as ever; this callback selects the layers
    before each optimiser step and applies the idle policy just before `optimizer.step()`. It undoes the input-gradient
    hook that `Trainer.train()` switches on when recompute is used. Trainer tells callbacks nothing when training ends
    by an exception: call `close` then, or start another training, which does it first.

    Example:
        >>> Trainer(model=model, args=args, train_dataset=data,
        ...         callbacks=[LCSBCallback(LCSBConfig(layers_per_step=8))]).train()  # doctest: +SKIP
    """

    def __init__(self, config: LCSBConfig | None = None) -> None:
        self.config = config or LCSBConfig()
        self.lcsb: SelectiveBackward | None = None

    def _running(self) -> SelectiveBackward:
        if self.lcsb is None:
            raise RuntimeError("LCSBCallback: training has not begun")
        return self.lcsb

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Enter the context at the trainer's step count."""
        self.close()
        self.lcsb = selective_backward(kwargs["model"], self.config, seed=args.seed, t=state.global_step)
        self.lcsb.__enter__()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Select the layers of the coming optimiser step."""
        self._running().begin()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the idle policy; clipping has already seen the selected layers' gradients alone."""
        optimizer: torch.optim.Optimizer = kwargs["optimizer"]
        self._running().apply_idle_policy(optimizer)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the step."""
        self._running().advance()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the model as it was found."""
        self.close()

    def close(self) -> None:
        """Leave the model as it was found, if training is under way (it was ended by an exception)."""
        if self.lcsb is not None:
            self.lcsb.__exit__(None, None, None)
            self.lcsb = None
