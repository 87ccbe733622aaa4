"""Batches that are no step: without a label, empty, or with a gradient that is not finite."""

from __future__ import annotations

import contextlib
import math

import pytest
import tiny
import torch
from trainers import adapters_of, assert_clean, assert_equal, lcsb_trainer, rows
from transformers import Trainer, get_scheduler

from lcsb.callback import LCSBCallback, NothingTrainedError
from lcsb.config import LCSBConfig
from lcsb.selective import NonFiniteError
from lcsb.trainer import LCSBTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


def masked(row):
    return {**row, "labels": torch.full_like(row["labels"], -100)}


@pytest.mark.parametrize("make", ["trainer", "callback"])
def test_batches_without_labels_change_nothing(tmp_path, make):
    """U30: all-masked windows 0, 2 and 5 are counted; moments, schedules and weights as without them."""
    config = LCSBConfig("exact", layers_per_step=1)
    options = {"per_device_train_batch_size": 1, "lr_scheduler_type": "linear", "logging_strategy": "steps",
               "logging_steps": 1}  # fmt: skip
    results = []
    for without in (False, True):
        model = tiny.with_lora(tiny.llama())
        good = rows(model, 5)
        data = (
            good
            if without
            else [masked(good[0]), good[0], masked(good[1]), good[1], good[2], masked(good[0]), *good[3:]]
        )
        own = {"callbacks": [LCSBCallback(config)], "trainer_class": Trainer} if make == "callback" else {}
        trainer = lcsb_trainer(
            model, tmp_path, None if make == "callback" else config, data, **own, max_steps=len(data), **options,
            # the same learning rates with and without: the schedule does not advance either
            lr_scheduler_kwargs={}, warmup_steps=0,
        )  # fmt: skip
        trainer.create_optimizer()
        trainer.lr_scheduler = get_scheduler(
            "linear", trainer.optimizer, num_warmup_steps=0, num_training_steps=5
        )
        with (
            contextlib.nullcontext()
            if without
            else pytest.warns(UserWarning, match="3 steps were not taken: 3 without")
        ):
            trainer.train()
        state = trainer.optimizer.state_dict()["state"]
        results.append((adapters_of(model), state, [r for r in trainer.state.log_history if "loss" in r]))
    assert_equal(results[0][0], results[1][0])
    for index, entry in results[1][1].items():
        assert_equal(entry, results[0][1][index])
    assert [row["lcsb/skipped"] for row in results[0][2]] == [1, 1, 2, 2, 2, 3, 3, 3]
    assert [row["lcsb/selected"] for row in results[0][2]] == ["0", "0", "1", "1", "2", "3", "3", "0"]


def test_one_masked_row_among_the_accumulated_is_left_out(tmp_path):
    """U30: alone in its micro-batch; a model that takes the mean of each micro-batch would give NaN there."""
    weights = []
    for with_masked in (True, False):
        model = tiny.with_lora(tiny.llama())
        good = rows(model, 4)
        data = [good[0], masked(good[1]), good[2], masked(good[3])] if with_masked else [good[0], good[2]]
        trainer = lcsb_trainer(
            model, tmp_path, LCSBConfig("exact", layers_per_step=1), data, per_device_train_batch_size=1,
            gradient_accumulation_steps=2 if with_masked else 1, max_steps=2,
        )  # fmt: skip
        trainer.train()
        weights.append(adapters_of(model))
        assert trainer.lcsb.skipped == {"empty": 0, "nonfinite": 0}
    assert_equal(*weights)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nothing_but_masked_batches_is_an_error(tmp_path, smoothing):
    """U30: also under label smoothing, where the model is called without labels."""
    model = tiny.with_lora(tiny.llama())
    before = adapters_of(model)
    data = [masked(row) for row in rows(model)]
    trainer = lcsb_trainer(model, tmp_path, LCSBConfig(), data, label_smoothing_factor=smoothing)
    with pytest.raises(
        NothingTrainedError, match="all 5 steps were skipped: every label of every batch is masked"
    ):
        trainer.train()
    assert_equal(before, adapters_of(model))
    assert_clean(model)
    callback = lcsb_trainer(
        model, tmp_path, None, data, trainer_class=Trainer, callbacks=[LCSBCallback(LCSBConfig())]
    )
    with pytest.raises(NothingTrainedError):
        callback.train()
    assert_clean(model)


def test_empty_and_one_token_rows(tmp_path):
    """U32: rows with no token to predict (0 or 1 tokens) are left out, not run."""
    model = tiny.with_lora(tiny.llama())
    short = [{k: v[:n] for k, v in row.items()} for row, n in zip(rows(model, 3), (1, 0, 12), strict=True)]
    trainer = lcsb_trainer(
        model, tmp_path, LCSBConfig(layers_per_step=1), short, per_device_train_batch_size=1, max_steps=3
    )
    with pytest.warns(UserWarning, match="2 steps were not taken"):
        trainer.train()
    assert trainer.lcsb.skipped == {"empty": 2, "nonfinite": 0}


class Overflow:
    """A trainer mixin whose third step's loss overflows float32."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * 1e38 * 1e38 if self.state.global_step == 2 else loss


@pytest.mark.parametrize("make, clip", [(LCSBTrainer, 1.0), (LCSBTrainer, 0.0), (Trainer, 1.0)],
                         ids=["trainer", "unclipped", "callback"])  # fmt: skip
def test_a_step_that_is_not_finite(tmp_path, make, clip):
    """U09: the step is skipped or stops the run, and poisons no moment."""
    trainer_class = type("Overflowing", (Overflow, make), {})
    for on_nonfinite in ("skip", "stop"):
        model = tiny.with_lora(tiny.llama())
        config = LCSBConfig("exact", layers_per_step=1, on_nonfinite=on_nonfinite)
        own = {"callbacks": [LCSBCallback(config)]} if make is Trainer else {}
        trainer = lcsb_trainer(
            model, tmp_path, None if make is Trainer else config, trainer_class=trainer_class, max_grad_norm=clip,
            logging_strategy="steps", logging_steps=1, **own,
        )  # fmt: skip
        if on_nonfinite == "skip":
            with pytest.warns(UserWarning, match="1 steps were not taken: 0 without .*, 1 with a gradient"):
                trainer.train()
            history = [row for row in trainer.state.log_history if "loss" in row]
            assert [row["lcsb/selected"] for row in history] == ["0", "1", "2", "2", "3"]
            assert all(math.isfinite(row["loss"]) for row in history)
        else:
            with pytest.raises(
                NonFiniteError, match=r"step 2, batch of global step 2: .* first in .*layers\.2\."
            ):
                trainer.train()
            for callback in own.get("callbacks", []):
                callback.close()
        assert all(p.isfinite().all() for p in model.parameters())
        for entry in trainer.optimizer.state_dict()["state"].values():
            assert all(torch.as_tensor(value).isfinite().all() for value in entry.values())
        assert_clean(model)
