"""`LCSBCallback`: selective backpropagation inside transformers' own Trainer and TRL's SFTTrainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from lcsb.config import LCSBConfig
from lcsb.distributed import Replicas
from lcsb.engine.inside_trainer import refuse_engine_options
from lcsb.engine.module import EngineModel
from lcsb.optim import check_optimizer, keeps_state
from lcsb.selective import SelectiveBackward, selective_backward


class NothingTrainedError(ValueError):
    """Training ended without a single optimiser step, because no batch had a label to learn from."""


def trained_tokens(inputs: Mapping[str, Any]) -> int | None:
    """Number of targets that a batch has a loss for; None if it carries no labels.

    A causal language model predicts the next token, so the first label of each row is no target.
    """
    labels, ids = inputs.get("labels"), inputs.get("input_ids")
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    elif isinstance(labels, torch.Tensor) and ids is not None and labels.shape == ids.shape:
        labels = labels[..., 1:]
    return int(labels.ne(-100).sum()) if isinstance(labels, torch.Tensor) else None


class LCSBCallback(TrainerCallback, ExportableState):
    """Runs a Trainer's steps under `selective_backward`.

    The Trainer builds its optimiser from all adapters, accumulates and clips as ever; this callback selects the layers
    before each optimiser step and applies the idle policy just before `optimizer.step()`. It undoes the input-gradient
    hook that `Trainer.train()` switches on when recompute is used.

    A step whose batches have no label at all, or whose gradient is not finite (with `on_nonfinite="skip"`), is
    not taken: moments, schedule and learning-rate schedule stay where they are. Trainer counts it in `global_step` all
    the same, as it does a step that fp16 loss scaling skips. `skipped` counts them.

    Logged with the loss, of the last step before it: `lcsb/block` (if the schedule has blocks), `lcsb/selected` (text:
    the layers), `lcsb/grad_norm` (selected layers, before clipping), `lcsb/displacement_idle` (2-norm of the idle
    layers' move), `lcsb/skipped` (steps not taken so far). They are in `trainer.state.log_history`; Trainer's tracking
    integrations come before a user's callbacks, so call `put_first(trainer)` (`LCSBTrainer` needs no such call) to have
    them in the tracker as well.

    Trainer tells callbacks nothing when training ends by an exception or Ctrl-C: call `close` then. Starting another
    training with the same callback does it first.

    Example:
        >>> Trainer(model=model, args=args, train_dataset=data,
        ...         callbacks=[LCSBCallback(LCSBConfig(layers_per_step=8))]).train()  # doctest: +SKIP

    Args:
        config: an `LCSBConfig`, or the mapping that its `to_dict` gives (what a checkpoint holds).
    """

    def __init__(self, config: LCSBConfig | Mapping[str, Any] | None = None) -> None:
        self.config = config if isinstance(config, LCSBConfig) else LCSBConfig.from_dict(dict(config or {}))
        self.lcsb: SelectiveBackward | None = None
        #: steps not taken in this training, by reason
        self.skipped = {"empty": 0, "nonfinite": 0}
        #: the processes that train together; LCSBTrainer sets it
        self.replicas = Replicas(alone=True)
        #: whether targets are counted when the model is called (False: the trainer calls `count`)
        self.counts_in_forward = True
        self._hook: Any = None
        self._new_step()
        self._values: dict[str, Any] = {}

    def _new_step(self) -> None:
        self._targets: int | None = 0
        self._verdict: str | None = None  # taken, empty, nonfinite or overflow (loss scaling decides)
        self._norm = math.nan
        self._before: list[torch.Tensor] = []

    def _running(self) -> SelectiveBackward:
        if self.lcsb is None:
            raise RuntimeError("LCSBCallback: training has not begun")
        return self.lcsb

    def put_first(self, trainer: Any) -> None:
        """Move this callback ahead of the trainer's tracking integrations, so that they log the `lcsb/` values."""
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)

    # -- training begins and ends --------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Enter the context, at the step of the checkpoint if there is one.

        Raises:
            ValueError: the checkpoint is of a run without this callback, or of other layers, schedule or settings;
                two of these callbacks in one trainer; an optimiser that `check_optimizer` refuses.
        """
        self.close()
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        refuse_options(args)
        if isinstance(model, EngineModel):
            refuse_engine_options(args)
            model.refuse_early_floor()
        if args.world_size != self.replicas.size:
            raise ValueError(
                f"{type(self).__name__} in {args.world_size} processes, expected 1: a plain Trainer wraps the model in "
                "DistributedDataParallel, which reduces every layer; use LCSBTrainer"
            )
        lcsb = selective_backward(model, self.config, seed=args.seed)
        self.skipped = {"empty": 0, "nonfinite": 0}
        saved = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(saved, list):
            raise ValueError(
                f"{len(saved)} {type(self).__name__} in one trainer (or its checkpoint), expected one"
            )
        if state.global_step:
            if not saved or not saved["attributes"].get("saved"):
                raise ValueError(
                    f"checkpoint at step {state.global_step}: it is of a run without {type(self).__name__}; "
                    "start a new run from its adapter instead"
                )
            lcsb.load_state_dict(saved["attributes"]["saved"]["lcsb"])
            self.skipped = dict(saved["attributes"]["saved"]["skipped"])
            if lcsb.t and not optimizer.state and keeps_state(optimizer):
                warnings.warn(
                    f"checkpoint at step {state.global_step}: it holds no optimizer state (save_only_model), so the "
                    "moments start from zero and the run will not be the one that was interrupted",
                    stacklevel=2,
                )
        check_optimizer(optimizer, lcsb.parameters(), self.config.idle)
        _say_if_low_precision(lcsb)
        self.replicas.attach(lcsb)
        self.lcsb = lcsb.__enter__()
        self._hook = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the model as it was found, and report the steps that were not taken.

        Raises:
            NothingTrainedError: every step was skipped for want of labels.
        """
        steps = self._running().t
        self.close()
        if not steps and self.skipped["empty"]:
            raise NothingTrainedError(
                f"all {self.skipped['empty']} steps were skipped: every label of every batch is masked (-100); nothing "
                "was trained"
            )
        if any(self.skipped.values()):
            warnings.warn(
                f"{sum(self.skipped.values())} steps were not taken: {self.skipped['empty']} without a label to learn "
                f"from, {self.skipped['nonfinite']} with a gradient that is not finite",
                stacklevel=2,
            )

    def close(self) -> None:
        """Leave the model as it was found, if training is under way (it was ended by an exception)."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self.lcsb is not None:
            for parameter in self.lcsb.parameters().values():
                parameter.grad = None
            self.lcsb.__exit__(None, None, None)
            self.lcsb = None
        self._before = []

    # -- one step ------------------------------------------------------------------------------------------------

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Select the layers of the coming optimiser step."""
        self._new_step()
        self._running().begin()

    def _look(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.counts_in_forward and torch.is_grad_enabled() and self._verdict is None:
            self.count(kwargs)

    def count(self, inputs: Mapping[str, Any]) -> int | None:
        """Add a micro-batch's targets (of all processes) to the step's; returns them (None: it carries no labels)."""
        targets = trained_tokens(inputs)
        if targets is not None:
            everywhere = self.replicas.agree(torch.tensor([targets], dtype=torch.float64), "sum")
            targets = int(everywhere.item())
        self._targets = None if targets is None or self._targets is None else self._targets + targets
        return targets

    def average_gradients(self) -> None:
        """Average the gradients of what this step trains over the processes, after its last backward pass."""
        if self._targets != 0:
            self.replicas.average_gradients(self._running().trained_parameters())

    def judge(self, state: TrainerState, optimizer: Any) -> None:
        """Decide whether the step is taken, from its labels and gradients; clears the gradients if it is not.

        Raises:
            NonFiniteError: a gradient is not finite and `on_nonfinite` is `stop`.
        """
        lcsb = self._running()
        if self._targets == 0:
            self._verdict = "empty"
        else:
            self._norm = float(lcsb.gradient_norm())
            if math.isfinite(self._norm):
                self._verdict = "taken"
                return
            if getattr(optimizer, "scaler", None) is not None:
                self._verdict = "overflow"  # fp16: the loss scaler sees it too, skips and lowers its scale
                return
            if self.config.on_nonfinite == "stop":
                raise lcsb.nonfinite_error(f"of global step {state.global_step}")
            self._verdict = "nonfinite"
        for parameter in lcsb.parameters().values():
            parameter.grad = None

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the idle policy; clipping has already seen the selected layers' gradients alone."""
        lcsb, optimizer = self._running(), kwargs["optimizer"]
        if self._verdict is None:
            self.judge(state, optimizer)
        if self._verdict == "taken":
            lcsb.apply_idle_policy(optimizer)
            if self.config.idle == "momentum" and args.logging_strategy != "no":
                self._before = [p.detach().clone() for p in lcsb.idle_parameters()]

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the step, if it was taken."""
        lcsb, optimizer = self._running(), kwargs["optimizer"]
        scaled = getattr(optimizer, "scaler", None) is not None
        taken = not optimizer.step_was_skipped if scaled else self._verdict == "taken"
        if not scaled and hasattr(optimizer, "_is_overflow"):
            # What Trainer asks before it advances the learning-rate schedule; only loss scaling sets it elsewhere.
            optimizer._is_overflow = not taken
        if not taken:
            self.skipped["empty" if self._verdict == "empty" else "nonfinite"] += 1
            lcsb.roles = None
        values = self._measure(lcsb)
        if taken:
            lcsb.advance()
        self._values = values | lcsb.log()

    def _measure(self, lcsb: SelectiveBackward) -> dict[str, Any]:
        moved = zip(lcsb.idle_parameters(), self._before, strict=False)  # nothing before: nothing moves
        squares = [float((p.detach().double() - old.double()).square().sum()) for p, old in moved]
        self._before = []
        values: dict[str, Any] = {
            "lcsb/block": lcsb.schedule.block_index(lcsb.t, lcsb.measured.schedule),
            "lcsb/selected": ",".join(map(str, lcsb.selected)),
            "lcsb/grad_norm": self._norm if math.isfinite(self._norm) else None,
            "lcsb/displacement_idle": math.sqrt(sum(squares)),
            "lcsb/skipped": sum(self.skipped.values()),
        }
        return {key: value for key, value in values.items() if value is not None}

    # -- logs and checkpoints ------------------------------------------------------------------------------------

    def add_to(self, logs: dict[str, Any]) -> None:
        """Add this callback's values to a row of training logs (one that has a loss)."""
        if "loss" not in logs or not self._values:
            return
        for key, value in self._values.items():
            logs.setdefault(key, value)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the `lcsb/` values to the row, and to its copy in `state.log_history`."""
        if logs is None or "loss" not in logs:
            return
        if "grad_norm" in logs and "lcsb/grad_norm" in self._values:
            self._values["lcsb/grad_norm"] = logs["grad_norm"]  # Trainer's own, before clipping
        self.add_to(logs)
        self.add_to(state.log_history[-1])

    def state(self) -> dict[str, Any]:
        """What Trainer writes into a checkpoint (ExportableState): the settings, and where the schedule is."""
        portable = self.config.layers is None or isinstance(self.config.layers, str)
        saved = {"lcsb": self.lcsb.state_dict(), "skipped": dict(self.skipped)} if self.lcsb else None
        return {
            "args": {"config": self.config.to_dict() if portable else None},
            "attributes": {"saved": saved},
        }


def refuse_options(args: TrainingArguments) -> None:
    """Refuse what would silently have no effect: layers are recomputed here, with use_reentrant=False."""
    if args.fp16 and args.device.type == "cpu":
        raise ValueError("fp16 on the CPU: Trainer would quietly compute in float32; use bf16, or neither")
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process (DataParallel), expected one; start one process a GPU"
        )
    options = dict(args.activation_checkpointing_kwargs or {}) if args.activation_checkpointing else {}
    if options.pop("use_reentrant", False):
        raise ValueError("activation_checkpointing_kwargs: use_reentrant is True, expected False (or none)")
    unsupported = [
        key
        for key, value in options.items()
        if value not in (None, False) and (key, value) != ("every_n_layers", 1)
    ]
    if unsupported:
        raise ValueError(
            f"activation_checkpointing_kwargs: {unsupported[0]!r} is not supported by selective backpropagation, which "
            "decides itself what is recomputed"
        )


def _say_if_low_precision(lcsb: SelectiveBackward) -> None:
    kinds = {p.dtype for p in lcsb.parameters().values()}
    low = sorted(str(kind).removeprefix("torch.") for kind in kinds & {torch.bfloat16, torch.float16})
    if low:
        warnings.warn(
            f"the adapters are {' and '.join(low)} (TRL makes them so on a 4-bit base): the implicit update of idle "
            "layers (T6) then holds to the rounding of that type only; cast the adapters to float32 for more",
            stacklevel=3,
        )
