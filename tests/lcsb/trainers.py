"""Trainers on tiny models, and what must hold of a model after one; shared by the trainer tests of this folder."""

from __future__ import annotations

import copy

import tiny
import torch
from transformers import TrainingArguments

from lcsb.trainer import LCSBTrainer


def arguments(folder, **changes):
    return {
        "output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": 2, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "gradient_checkpointing": True, **changes,
    }  # fmt: skip


def rows(model, n=20):
    return [{k: v[0] for k, v in tiny.batch(model, rows=1, seed=s).items()} for s in range(n)]


def lcsb_trainer(model, folder, config, data=None, *, callbacks=None, trainer_class=LCSBTrainer, **changes):
    changes = {"gradient_checkpointing": False, "train_sampling_strategy": "sequential", **changes}
    return trainer_class(
        model=model,
        args=TrainingArguments(**arguments(folder, **changes)),
        train_dataset=data if data is not None else rows(model),
        callbacks=callbacks,
        **({} if config is None else {"lcsb": config}),
    )


def adapters_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    unequal = [name for name in first if not torch.equal(first[name], second[name])]
    assert not unequal, unequal[0]


def assert_clean(model):
    assert not any(hasattr(module.__dict__.get("forward"), "_lcsb") for module in model.modules())
    assert not model._forward_pre_hooks
    assert all(p.grad is None for p in model.parameters())
    ids = tiny.batch(model, rows=1)["input_ids"]
    generated = model.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert generated.shape[1] == ids.shape[1] + 3
    twin = copy.deepcopy(model)
    assert torch.equal(twin(input_ids=ids).logits, model(input_ids=ids).logits)
    model.train()(
        **tiny.batch(model)
    ).loss.backward()  # an ordinary backward pass reaches every adapter again
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.zero_grad()
