"""`LCSBTrainer`: transformers' Trainer with selective backpropagation and checkpoints that are whole or not there."""

from __future__ import annotations

import contextlib
import inspect
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints, sort_checkpoints
from transformers.utils import SAFE_WEIGHTS_NAME

from lcsb.callback import LCSBCallback as LCSBCallback
from lcsb.callback import NothingTrainedError as NothingTrainedError
from lcsb.callback import refuse_options
from lcsb.config import LCSBConfig
from lcsb.distributed import Replicas
from lcsb.engine.inside_trainer import engine_model, resolved_config
from lcsb.engine.module import EngineModel
from lcsb.launch import refuse_unsupported_launch

STATE_FILE = "trainer_state.json"


class LCSBTrainer(Trainer):
    """A `transformers.Trainer` whose steps select layers as `lcsb` says.

    Beyond `LCSBCallback`, which it uses:
    - the model is clean again however training ends (exception, Ctrl-C);
    - a gradient that is not finite is found before clipping spreads it, so its layer is named;
    - batches without a label are not run at all, also single ones among the batches that are accumulated;
    - a checkpoint is written to a temporary folder and renamed, so a folder `checkpoint-N` is complete;
      `train(resume_from_checkpoint=True)` takes the newest one;
    - under several processes (torchrun, accelerate launch) the adapters start as rank 0's, and only the selected
      layers' gradients are communicated, once a step, before clipping; the model is not wrapped;
    - with `ram_budget` the memory engine trains: `model` is the name of a folder of packed weights, a built-in name or
      an `EngineModel`. Losses only: no logits, so no metrics of them. The budget is for the longest row of the training
      set, `per_device_train_batch_size` times; adapters are saved in PEFT's format.

    Args:
        lcsb: how layers are selected; defaults to `LCSBConfig()`, or to what an `EngineModel` was built with.
        **arguments: those of `transformers.Trainer`.

    Raises:
        ValueError: an `LCSBCallback` among the callbacks (this class brings its own); options that would have no
            effect (reentrant recompute, recompute of every n-th layer, offload), or that the memory engine does not
            compute; a budget for a model that is in memory already.
        BudgetError: a budget that cannot be met; says the least that could.

    Example:
        >>> LCSBTrainer(model=model, args=TrainingArguments("out"), train_dataset=data,
        ...             lcsb=LCSBConfig(layers_per_step=8)).train()  # doctest: +SKIP
    """

    def __init__(
        self,
        *positional: Any,
        lcsb: LCSBConfig | Mapping[str, Any] | None = None,
        callbacks: list[Any] | None = None,
        **arguments: Any,
    ) -> None:
        if any(
            callback is LCSBCallback or isinstance(callback, LCSBCallback) for callback in callbacks or []
        ):
            raise ValueError(
                "callbacks: LCSBTrainer brings its own LCSBCallback; give it lcsb=LCSBConfig(...)"
            )
        refuse_unsupported_launch()
        self._partial: Path | None = None
        self._to_push: Path | None = None
        model = positional[0] if positional else arguments.get("model")
        config = resolved_config(lcsb, model)
        if config.ram_budget is not None or isinstance(model, EngineModel):
            arguments = inspect.signature(Trainer).bind_partial(*positional, **arguments).arguments
            positional, arguments["model"] = (), engine_model(config, arguments)
        elif isinstance(model, str | Path):
            raise ValueError(
                f"model: found {str(model)!r} without ram_budget; expected a model in memory (lcsb.load_quantized and "
                "lcsb.attach_lora give one), or lcsb=LCSBConfig(ram_budget=...) for the memory engine"
            )
        super().__init__(*positional, callbacks=[LCSBCallback(config), *(callbacks or [])], **arguments)
        refuse_options(self.args)

    @property
    def lcsb(self) -> LCSBCallback:
        """The callback that runs the selection (Trainer may have put a new one in place on resuming)."""
        (callback,) = [c for c in self.callback_handler.callbacks if isinstance(c, LCSBCallback)]
        return callback

    # -- training ------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **arguments: Any
    ) -> Any:
        """Train, as `Trainer.train`; afterwards the model is as it was found, also after an exception.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete one in `output_dir`.

        Raises:
            ValueError: no (complete) checkpoint there, or one of another run.
            NonFiniteError: a gradient is not finite and `on_nonfinite` is `stop`.
            NothingTrainedError: every label of every batch is masked.
            OSError: a checkpoint could not be written; earlier ones are whole.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_checkpoint(Path(self.args.output_dir)))
        elif resume_from_checkpoint and not (Path(resume_from_checkpoint) / STATE_FILE).is_file():
            raise ValueError(
                f"{resume_from_checkpoint}: no {STATE_FILE} in it, so it is not a checkpoint; to go on from an "
                "adapter, load it with PeftModel.from_pretrained(..., is_trainable=True) and start a new run"
            )
        if self.args.should_save:  # of a run that was killed while it saved
            for partial in Path(self.args.output_dir).glob(".checkpoint-*.partial"):
                shutil.rmtree(partial, ignore_errors=True)
        try:
            return super().train(resume_from_checkpoint, *positional, **arguments)
        finally:
            self.lcsb.close()
            if getattr(self, "is_in_train", False):  # ended by an exception: Trainer has not tidied up
                self.is_in_train = False
                if getattr(self, "neftune_hook_handle", None) is not None:
                    self.neftune_hook_handle.remove()

    def _prepare_for_training(self, *positional: Any, **arguments: Any) -> Any:
        # The selected layers' gradients are the only ones to communicate; DistributedDataParallel reduces all.
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = lambda model, *a, **k: prepare(
            model, *a, **{**k, "evaluation_mode": True}
        )
        try:
            prepared = super()._prepare_for_training(*positional, **arguments)
        finally:
            del self.accelerator.prepare_model
        self.lcsb.replicas = Replicas()
        return prepared

    def _run_epoch(self, *positional: Any, **arguments: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            warnings.warn(
                f"the checkpoint is at step {self.state.global_step} of {self.state.max_steps}: 0 steps to train",
                stacklevel=2,
            )
            self.control.should_training_stop = True
            return
        super()._run_epoch(*positional, **arguments)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; one without a label to learn from is left out."""
        callback = self.lcsb
        callback.counts_in_forward = False
        if callback.count(inputs) == 0:
            empty = num_items_in_batch is None or int(num_items_in_batch) == 0
            loss = torch.tensor(math.nan if empty else 0.0, device=self.args.device)
        else:
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            callback.average_gradients()
            if getattr(self.accelerator, "scaler", None) is None:
                callback.judge(self.state, self.optimizer)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the `lcsb/` values beside the training loss."""
        self.lcsb.add_to(logs)
        super().log(logs, start_time)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if isinstance(self.model, EngineModel) and self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            self.model.save_pretrained(
                folder
            )  # PEFT's format, in place of Trainer's for models it does not know
            (folder / SAFE_WEIGHTS_NAME).unlink()

    def create_model_card(self, *positional: Any, **arguments: Any) -> None:
        """As `Trainer.create_model_card`; for an `EngineModel` it names the folder as what was fine-tuned."""
        if isinstance(self.model, EngineModel):
            arguments.setdefault("finetuned_from", self.model.name_or_path)
        super().create_model_card(*positional, **arguments)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if isinstance(self.model, EngineModel):
            self.model.load_adapter(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if isinstance(self.model, EngineModel):
            self.model.load_adapter(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._partial or super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._partial is None:
            super()._push_from_checkpoint(checkpoint_folder)
        else:
            self._to_push = Path(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run, name = Path(super()._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        with self._saving(run, name) as partial:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                # A best checkpoint that is this one was noted under its temporary name.
                if self.state.best_model_checkpoint == str(partial / name):
                    self.state.best_model_checkpoint = str(run / name)
                    self.state.save_to_json(str(partial / name / STATE_FILE))
                shutil.rmtree(run / name, ignore_errors=True)
                (partial / name).rename(run / name)
                partial.rmdir()
            self.accelerator.wait_for_everyone()
        if self._to_push is not None:
            self._to_push = None
            super()._push_from_checkpoint(str(run / name))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    @contextlib.contextmanager
    def _saving(self, run: Path, name: str) -> Iterator[Path]:
        """`_get_output_dir` is a temporary folder inside; a failure to write is one line."""
        partial = run / f".{name}.partial"
        try:
            if self.args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self._partial = partial
            yield partial
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                f"{run / name}: the checkpoint cannot be written ({_first_line(error)}); earlier checkpoints are whole"
            ) from error
        finally:
            self._partial = None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def newest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint in a Trainer's output folder; incomplete ones are passed over with a warning.

    Raises:
        ValueError: there is none.
    """
    found = [Path(path) for path in sort_checkpoints(str(folder))] if folder.is_dir() else []
    for path in reversed(found):
        if (path / STATE_FILE).is_file():
            return path
        warnings.warn(
            f"{path}: no {STATE_FILE} in it, so the checkpoint is not complete; passed over", stacklevel=2
        )
    raise ValueError(f"{folder}: no complete checkpoint in it to resume from")
