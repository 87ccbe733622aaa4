"""MeZO against its pseudo-code in float64; wrong variants of it must fail the same comparison."""

from __future__ import annotations

import methods_reference as paper
import numpy as np
import pytest
import tiny
import torch
from method_runs import (
    ADAMW,
    SEED,
    adamw_of,
    batches,
    compare,
    lora_model,
    method_of,
)

from lcsb.methods import (
    MeZO,
    loss_and_gradient,
)
from lcsb.selective import NonFiniteError

EPSILON = 1e-3


def mezo_seed(t):
    return int(np.random.SeedSequence([SEED, t]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def mezo_reference(model, data):
    return paper.mezo(model, data, mezo_seed, EPSILON, ADAMW["learning_rate"], ADAMW["weight_decay"])


def other_seed_for_the_update(method):
    real = MeZO.step

    def step(optimizer, max_norm=None, batch=None):
        method.seed += 1
        try:
            return real(method, optimizer, max_norm, batch)
        finally:
            method.seed -= 1

    method.step = step


def one_sided(method):
    """Forgets the 2 of 2 epsilon."""
    real = MeZO.evaluate

    def evaluate(loss):
        value = real(method, loss)
        method._projected *= 2
        return value

    method.evaluate = evaluate


@pytest.mark.parametrize(
    "variant",
    [
        None,
        other_seed_for_the_update,
        one_sided,
        lambda m: setattr(m, "epsilon", 1.0),
        lambda m: setattr(m, "t", 1),
    ],
)
def test_mezo(variant):
    compare("mezo", mezo_reference, variant)


def test_mezo_is_exact_on_a_quadratic():
    """On f = sum c x^2 the projected gradient is grad f . z to rounding, and the mean of both losses f + c |e z|^2."""
    model = lora_model()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss():
        return sum((i + 1) * p.square().sum() for i, p in enumerate(parameters))

    start = float(loss().detach())
    with method_of("mezo", model, epsilon=1e-2) as method:
        method.begin()
        z = [direction for _, direction in method._directions()]
        slope = sum(
            2 * (i + 1) * float((p.detach() * d).sum())
            for i, (p, d) in enumerate(zip(parameters, z, strict=True))
        )
        curved = sum((i + 1) * float(d.square().sum()) for i, d in enumerate(z))
        mean = loss_and_gradient(method, loss)
        assert method._projected == pytest.approx(slope, rel=1e-9)
        assert float(mean) == pytest.approx(start + 1e-4 * curved, rel=1e-12)
        record = method.step(adamw_of(method, model))
        size = float(torch.cat([d.flatten() for d in z]).norm())
        assert record.grad_norm == pytest.approx(abs(slope) * size, rel=1e-9)
        assert record.selected == (0, 1, 2, 3) and record.taken and method.t == 1


def test_mezo_of_several_processes_averages_the_slope():
    moves, norms = [], []
    for agree in (None, lambda values, how: values / 4 if how == "mean" else None):
        model = lora_model()
        batch = batches(model, 1)[0]
        start = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
        with method_of("mezo", model) as method:
            method.refresh.agree = agree
            method.begin()
            loss_and_gradient(method, lambda: model(**batch).loss)  # noqa: B023 - called at once
            optimizer = torch.optim.SGD(method.parameters().values(), lr=1e-2)
            norms.append(method.step(optimizer).grad_norm)
            moves.append(torch.cat([p.detach().flatten() for p in method.parameters().values()]) - start)
    assert norms[1] == pytest.approx(norms[0] / 4, rel=1e-12)
    assert torch.allclose(moves[1], moves[0] / 4, rtol=1e-6, atol=1e-12)


def test_mezo_builds_no_graph_and_accumulates():
    model = lora_model()
    one, two = batches(model, 2)
    with method_of("mezo", model) as method:
        method.begin()
        graphs = []

        def loss(batch):
            value = model(**batch).loss
            graphs.append(value.grad_fn)
            return value

        loss_and_gradient(method, lambda: loss(one) / 2)
        loss_and_gradient(method, lambda: loss(two) / 2)
        both = method._projected
        method.begin()
        loss_and_gradient(method, lambda: (loss(one) + loss(two)) / 2)
        assert both == pytest.approx(method._projected, rel=1e-6)
    assert graphs == [None] * 8
    assert all(p.grad is None for p in model.parameters())


def test_mezo_dropout_is_the_same_in_both_evaluations():
    """U44: dropout is neither off for one arm nor a difference between the two losses."""
    model = tiny.with_lora(tiny.llama(), r=2, dropout=0.5).train()
    batch = batches(model, 1)[0]
    with method_of(
        "mezo", model, epsilon=1e-12
    ) as method:  # so small that only dropout could make a difference
        losses = []

        def loss():
            losses.append(model(**batch).loss)
            return losses[-1]

        for _ in range(2):
            method.begin()
            loss_and_gradient(method, loss)
    assert losses[0] == losses[1] != losses[2] == losses[3]


def test_mezo_that_cannot_step_leaves_the_model():
    model = lora_model()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    batch = batches(model, 1)[0]
    with method_of("mezo", model) as method:
        optimizer = adamw_of(method, model)
        with pytest.raises(RuntimeError, match="begin"):
            method.step(optimizer)
        method.begin()
        with pytest.raises(KeyError):
            loss_and_gradient(method, lambda: {}["no"])
        method.begin()
        loss_and_gradient(method, lambda: model(**batch).loss * float("nan"))
        with pytest.raises(NonFiniteError, match="step 0, batch b: the two losses"):
            method.step(optimizer, batch="b")
        with pytest.raises(TypeError, match=r"found AdamW, expected torch\.optim\.SGD"):
            loss_and_gradient(method, lambda: model(**batch).loss)
            method.step(torch.optim.AdamW(method.parameters().values()))
        with pytest.raises(ValueError, match="momentum"):
            loss_and_gradient(method, lambda: model(**batch).loss)
            method.step(torch.optim.SGD(method.parameters().values(), momentum=0.9))
        with pytest.raises(TypeError, match="makes its update itself"):
            method.apply_idle_policy(optimizer)
    assert method.t == 0
    for name, p in model.named_parameters():
        assert float((p.detach() - start[name]).abs().max()) < 1e-12  # rounding of going there and back
