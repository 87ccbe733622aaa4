"""Runs of a method and of its float64 reference on one model and data, for the tests of methods."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch

from bcd_theory.schedule import SCHEDULES
from lcsb.methods import (
    loss_and_gradient,
    open_method,
    optimizer_for,
    unfreeze,
)
from reports.arms import NAMED_ARMS, ArmConfig

SEED, N, K = 3, 4, 2
STREAM = SCHEDULES.index("depth-weighted")  # the schedules' random stream that these draws are made from
ADAMW = {"learning_rate": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.03}


def lora_model():
    targets = ["q_proj", "down_proj"]  # one in each branch
    return tiny.with_lora(tiny.llama(dtype=torch.float64), r=2, target_modules=targets).double().train()


def whole_model():
    model = tiny.llama(dtype=torch.float64, num_hidden_layers=N)
    unfreeze(model)
    return model


def batches(model, steps=9):
    return [tiny.batch(model, rows=1, tokens=6, seed=t) for t in range(steps)]


def method_of(name, model, variant=None, **options):
    arm = NAMED_ARMS[name]
    if options:
        arm = ArmConfig.model_validate({**arm.model_dump(), "options": {**arm.options, **options}})
    method = open_method(model, arm, layers_per_step=K, seed=SEED)
    if variant is not None:
        variant(method)
    return method


def adamw_of(method, model):
    settings = {**ADAMW, "lr": ADAMW["learning_rate"]}
    del settings["learning_rate"]
    return optimizer_for(
        method, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **settings)
    )


def trajectory(method, model, data):
    optimizer, path = adamw_of(method, model), []
    with method:
        for batch in data:
            method.begin()
            loss_and_gradient(method, lambda: model(**batch).loss)  # noqa: B023 - called at once
            method.step(optimizer)
            path.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
    return path


def assert_same(path, expected, tolerance=1e-9):
    assert len(path) == len(expected)
    for t, (mine, theirs) in enumerate(zip(path, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            worst = float((mine[name] - theirs[name]).abs().max())
            assert worst <= tolerance, f"step {t}, {name}: off by {worst:.1e}"


def compare(name, reference, variant=None, make=lora_model, **options):
    """The trajectory of the arm `name` equals the reference's; with `variant` (a wrong method) it must not."""
    model = make()
    data = batches(model)
    expected = reference(copy.deepcopy(model), data)
    method = method_of(name, model, variant, **options)
    path = trajectory(method, model, data)
    if variant is None:
        assert_same(path, expected)
        moved = [any((path[-1][n] != p).any() for n, p in expected[0].items())]
        assert any(moved)
    else:
        with pytest.raises(AssertionError, match="off by"):
            assert_same(path, expected)


def changed(**fields):
    """A variant whose schedule has other fields."""

    def apply(method):
        for name, value in fields.items():
            object.__setattr__(method.schedule, name, value)

    return apply


def early(by=1):
    """A variant that is `by` steps ahead: its first block, or first period, is that much short."""

    def apply(method):
        real = method.schedule

        def selected(step, measurements=None):
            return type(real).selected(real, step + by, measurements)

        object.__setattr__(real, "selected", selected)

    return apply
