"""The experiment on the identity shortcut: its parts can be refuted, and its pieces are what they say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from bcd_theory.cost import GRADES
from simulations import identity, identity_nets
from simulations.problems import certify
from simulations.problems.chain import ChainStack
from simulations.problems.residual import cosines, swiglu_net, tanh_net
from simulations.runner import Arm, run


@pytest.fixture(scope="module")
def record():
    return identity.EXPERIMENT.run("quick")


@pytest.fixture(scope="module")
def net():
    net = swiglu_net(
        [np.random.default_rng(3)], layers=4, width=4, inner=5, windows=2, tokens=3, layers_per_step=1
    )
    return net, torch.from_numpy(0.5 * np.random.default_rng(4).normal(size=(net.partition.n, 1)))


def verdict_of(parts, name):
    return next(part.verdict for part in parts if name in part.name)


def test_the_laws_hold(record):
    """T7, T4 and T2, on cases that show them: ascents, limits of zero, chains that settle."""
    verdict, found = record
    laws = (
        "bound",
        "ascend",
        "turn the sign",
        "limit of the identity",
        "settles where its",
        "stationary",
        "their own",
    )
    for part in verdict.parts:
        if any(word in part.name for word in laws):
            assert part.verdict == "supported", part
    assert sum(row["ascents"] for row in found.of("scalar")) > 100
    assert any(change > 0 for row in found.of("step") for change in row["changes"])
    assert any(not limit for limit in found.predicted_values("field-limit"))
    assert len([row for row in found.of("field") if row["settled"]]) >= 3


def changed(record, kind, **values):
    rows = tuple({**row, **values} if row["kind"] == kind else row for row in record.rows)
    return dataclasses.replace(record, rows=rows)


@pytest.mark.parametrize(
    ("name", "kind", "values"),
    [
        ("bias of mode identity", "bias", {"largest": 1e6}),
        ("bias of mode mlp", "bias", {"largest": 1e6}),
        ("turn the sign", "scalar", {"wrong": 1}),
        ("limit of the identity field", "field", {"falls": [True, True, True]}),
        ("affine field vanishes", "field", {"settled": True, "gradient_left": 3.3, "loss_left": 1.0}),
        ("true gradient is not zero", "field", {"settled": True, "gradient_left": 1e-8, "loss_left": 0.0}),
        ("stationary point", "field", {"exact_left": 0.1}),
        ("hidden gradients", "hidden", {"bias": [1e9] * 8}),
        ("hidden gradients", "hidden", {"truth": [0.0] * 8}),
        ("small step ascends", "step", {"changes": [-1.0] * 8}),
        ("on their own", "plan", {"cosine": 0.49}),
        ("cost less than exact", "plan", {"cost": 1.01}),
    ],
)
def test_each_part_can_be_refuted(record, name, kind, values):
    _, found = record
    parts = identity.judge(changed(found, kind, **values))
    assert verdict_of(parts, name) == "refuted"


def test_a_wrong_limit_is_refuted(record):
    """T4: with limits 5 % too high or too low a run contradicts them."""
    _, found = record
    for factor in (0.95, 1.05):
        items = []
        for item in found.predictions.items:
            if item.id == "field-limit":
                item = dataclasses.replace(item, value=tuple((v or 0.0) * factor for v in item.value))
            items.append(item)
        wrong = dataclasses.replace(
            found, predictions=dataclasses.replace(found.predictions, items=tuple(items))
        )
        rows = identity._fields(wrong)
        kept = tuple(row for row in found.rows if row["kind"] != "field")
        parts = identity.judge(dataclasses.replace(wrong, rows=(*kept, *rows)))
        assert verdict_of(parts, "limit of the identity field") == "refuted"


def test_a_stack_of_chains_runs_as_its_chains():
    chains = [identity.chain(0, i, "identity") for i in range(3)]
    start, rates = np.random.default_rng(0).normal(size=(4, 3)), np.array([0.1, 0.2, 0.3])
    together = run(ChainStack(chains), Arm("i"), start, rates, 9)
    for i, one in enumerate(chains):
        single = run(one, Arm("i"), start[:, i], rates[i], 9)
        np.testing.assert_allclose(together.x[:, i], single.x[:, 0], rtol=1e-12)
        np.testing.assert_allclose(together.losses[:, i], single.losses[:, 0], rtol=1e-12)
    whole = ChainStack(chains).gradient(torch.from_numpy(start), slice(0, 4))
    np.testing.assert_allclose(
        whole[:, 1], chains[1].true_gradient(torch.from_numpy(start))[:, 1], rtol=1e-12
    )


# --- certified plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0.3, 0.6, 0.9, 0.99])
def test_an_accepted_plan_was_measured_in_that_very_plan(net, target):
    """T7: the cosine of an accepted plan, by the gradient that a step in it reads; never cheaper than the cheapest."""
    problem, x = net
    planned, plans = certify.certified(problem, x, target)
    for j, (block, plan) in enumerate(plans.items()):
        rows = slice(j * problem.layer_size, (j + 1) * problem.layer_size)
        cosine = float(cosines(planned.gradient(x, rows), problem.gradient(x, rows), 1)[0])
        assert plan.cosine == pytest.approx(cosine, rel=1e-12) and cosine >= target
        assert [grade is None for grade in plan.grades] == [i <= block[0] for i in range(4)]
        assert certify.cheapest(problem, x, block, target) <= plan.cost + 1e-12 <= 1 + 1e-12


def test_a_target_of_one_is_exact_and_a_low_one_is_free(net):
    problem, x = net
    strict = certify.certify(problem, x, (0,), 1 - 1e-13)
    assert strict.grades == (None, "exact", "exact", "exact") and strict.cost == 1.0
    top = certify.certify(problem, x, (3,), 0.9)
    assert top.grades == (None,) * 4 and (top.guess, top.cost, top.raises) == (1.0, 0.0, 0)
    assert top.cosine == pytest.approx(1.0, abs=1e-14)
    assert certify.certify(problem, x, (0,), 1e-6).raises == 0


def test_raises_go_up_one_grade_at_a_time_nearest_first(net, monkeypatch):
    """The idle layer nearest above the failing one: identity, mlp, exact, then the next."""
    problem, x = net
    tried = []

    def failing(net, x, block, grades):
        tried.append(tuple(grades))
        return {0: 1.0 if len(tried) == 6 else 0.0}

    monkeypatch.setattr(certify, "plan_cosines", failing)
    monkeypatch.setattr(certify, "own_cosines", lambda net, x: {"identity": [1.0] * 4, "mlp": [1.0] * 4})
    plan = certify.certify(problem, x, (0,), 0.5)
    expected = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 2, 0), (2, 2, 1)]
    assert tried == [(None, *(GRADES[g] for g in row)) for row in expected]
    assert plan.raises == 5


def test_layers_of_one_branch_have_no_mlp_grade():
    problem = tanh_net([np.random.default_rng(1)], layers=4, layers_per_step=1, branch_norm=2.0)
    x = torch.from_numpy(0.5 * np.random.default_rng(2).normal(size=(problem.partition.n, 1)))
    assert set(certify.own_cosines(problem, x)) == {"identity"}
    assert set(certify.certify(problem, x, (0,), 0.999).grades) <= {None, "identity", "exact"}


def test_own_cosines_are_those_of_single_layers(net):
    """T7: hidden gradients by autograd, one layer at a time."""
    problem, x = net
    found = certify.own_cosines(problem, x)
    h = [problem.inputs.clone().requires_grad_()]
    middles = []
    for layer in range(problem.layers):
        (attention, w, _), (mlp, v, _) = problem._parts(x, layer)
        middle = h[-1] + attention.forward(h[-1], w)[0]
        middles.append(middle)
        h.append(middle + mlp.forward(middle, v)[0])
    logits = h[-1] @ problem.readout.transpose(1, 2)
    loss = torch.nn.functional.cross_entropy(logits[0], problem.targets[0])
    grads = torch.autograd.grad(loss, [*h, *middles])
    hidden, middle_gradients = grads[: len(h)], grads[len(h) :]
    for layer in range(problem.layers):
        true = hidden[layer]
        for grade, made in (("identity", hidden[layer + 1]), ("mlp", middle_gradients[layer])):
            cosine = float((made * true).sum() / made.norm() / true.norm())
            assert found[grade][layer] == pytest.approx(cosine, rel=1e-9)


def test_costs_count_matrix_elements():
    """T12: of a layer's 7 maps the mlp grade leaves SwiGLU's three."""
    net_ = swiglu_net([np.random.default_rng(0)], **identity_nets.SHAPE)
    costs = certify.layer_costs(net_)
    assert costs.by_layer("input_gradient")[0] == 4 * 64 + 3 * 96
    share = certify.plan_seconds(costs, [0], ["exact", *["mlp"] * 5]) / certify.plan_seconds(
        costs, [0], ["exact"] * 6
    )
    assert share == pytest.approx(identity_nets.MLP_COST)


def test_fresh_batches_share_the_net_and_nothing_else():
    one, other = (identity_nets.transformer_nets(0, 2, batch) for batch in (0, 1))
    assert torch.equal(one.weights[3][2], other.weights[3][2]) and torch.equal(one.readout, other.readout)
    assert not torch.equal(one.inputs, other.inputs)
