"""Mode certified: mixed plans against plain autograd in float64, and the rule by which a plan is accepted."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import reference
import tiny
import torch

from lcsb.config import LCSBConfig
from lcsb.measured import PlanRecord
from lcsb.roles import plan_roles
from lcsb.selective import selective_backward
from lcsb.switches import without_recompute

FAMILIES = ("llama", "qwen2", "gemma3", "gpt2", "gpt_neox")


def build(family="llama", dtype=torch.float64, dropout=0.0, **settings):
    return tiny.with_lora(tiny.BUILDERS[family](dtype=dtype, **settings), dropout=dropout)


def optimizer_for(model, lr=1e-2):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)


def take_gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def assert_equal(found, truth, tolerance=1e-10):
    assert found.keys() == truth.keys() and truth
    for name, value in truth.items():
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max(), name


def plan_grades(plan):
    return {index: grade for index, grade in enumerate(plan) if grade is not None}


def reference_cosines(model, batch, block, plan):
    """Adapter cosine of each of a block's layers under a plan, by plain autograd."""
    with without_recompute(model):
        truth, _ = reference.gradients(model, batch, "full", block)
        found, _ = reference.gradients(model, batch, plan_grades(plan), block)
    cosines = []
    for index in block:
        names = [name for name in truth if f".{index}." in name]
        a, b = (torch.cat([g[name].flatten() for name in names]) for g in (found, truth))
        cosines.append(float(a @ b / (a.norm() * b.norm())))
    return cosines


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_plans_equal_the_plain_reference(family, recompute):
    """A role for each layer, drawn: gradients of the selected layers equal REF-BACK's."""
    model = build(family)
    batch = tiny.batch(model, rows=2, tokens=12, lengths=[12, 7])
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()
    draw = random.Random(3)
    for selected in ((0,), (0, 2), (1,)):
        with selective_backward(model, LCSBConfig("exact", layers_per_step=1)) as lcsb:
            n = len(lcsb.layers)
            plan = [None if i <= min(selected) or i in selected else draw.choice(("identity", "mlp", "exact"))
                    for i in range(n)]  # fmt: skip
            lcsb.begin()
            lcsb.selected, lcsb.roles = selected, plan_roles("certified", selected, n, grades=plan)
            model(**batch).loss.backward()
            found = take_gradients(model)
        with without_recompute(model):
            truth, _ = reference.gradients(model, batch, plan_grades(plan), selected)
        assert_equal(found, truth)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_measured_again_keeps_min_cosine(family):
    """Accepted plans hold on the refresh batch, by plain autograd; the recorded cosine is the true one."""
    model = build(family)
    batch = tiny.batch(model, lengths=[12, 7])
    config = LCSBConfig("certified", layers_per_step=1, min_cosine=0.8)
    with selective_backward(model, config) as lcsb:
        lcsb.begin()
        model(**batch).loss.backward()
        plans = lcsb.finish_refresh()
    blocks = [plan.block for plan in plans]
    assert blocks == [(i,) for i in range(len(lcsb.layers))]
    for plan in plans:
        lowest = min(reference_cosines(model, batch, plan.block, plan.grades))
        assert plan.cosine == pytest.approx(lowest, abs=1e-9)
        assert lowest >= 0.8
        assert plan.cost <= plan.exact_cost + 1e-12
        assert [g is None for g in plan.grades] == [i <= plan.block[0] for i in range(len(lcsb.layers))]
    assert any(plan.cost < plan.exact_cost - 0.1 for plan in plans), "the target must leave something to save"


def test_a_plan_that_fails_is_raised_at_the_nearest_layer(monkeypatch):
    """From all layers identity, one raise a trial, the nearest idle layer above the block first."""
    from lcsb.certified import Planner

    monkeypatch.setattr(Planner, "guess", lambda self, block: self.uniform(block, "identity"))
    seen = []
    measure = Planner.measure

    def spy(self, block, grades):
        found = measure(self, block, grades)
        seen.append((grades, min(found.values())))
        return found

    monkeypatch.setattr(Planner, "measure", spy)
    model = build()
    batch = tiny.batch(model)
    with selective_backward(
        model, LCSBConfig("certified", layers_per_step=1, min_cosine=0.97, cosine_margin=0.0)
    ) as lcsb:
        lcsb.begin()
        model(**batch).loss.backward()
        plan = lcsb.finish_refresh()[0]
    trials = seen[: plan.trials]
    assert plan.trials > 3 and (trials[-1][0], trials[-1][1]) == (plan.grades, plan.cosine)
    assert all(value < 0.97 for _, value in trials[:-1]) and plan.cosine >= 0.97
    order = ["identity", "mlp", "exact"]
    for (before, _), (after, _) in itertools.pairwise(trials):
        changed = [i for i in range(4) if before[i] != after[i]]
        nearest = next(i for i in (1, 2, 3) if before[i] != "exact")
        assert changed == [nearest]
        assert order.index(after[nearest]) == order.index(before[nearest]) + 1
    for (
        grades,
        value,
    ) in trials:  # a retry reuses what is further up: each must still be the pass in that very plan
        assert value == pytest.approx(min(reference_cosines(model, batch, (0,), grades)), abs=1e-9)


def test_the_margin_raises_what_a_plan_must_show():
    plans = []
    for margin in (0.0, 0.9):
        model = build()
        config = LCSBConfig("certified", layers_per_step=1, min_cosine=0.5, cosine_margin=margin)
        with selective_backward(model, config) as lcsb:
            lcsb.begin()
            model(**tiny.batch(model)).loss.backward()
            plans.append(lcsb.finish_refresh()[0])
    assert 0.5 <= plans[0].cosine < 0.95 <= plans[1].cosine
    assert plans[0].cost < plans[1].cost <= plans[1].exact_cost


def test_a_plan_is_kept_raised_or_after_long_made_cheaper(monkeypatch):
    """At a refresh: kept while it holds, raised from where it is if it fails, cheaper only when it has held long."""
    from lcsb.certified import HELD_BEFORE_CHEAPER, Planner

    model = build()
    costs, helds = [], []
    scale = 1.0
    measure = Planner.measure
    monkeypatch.setattr(
        Planner, "measure", lambda self, b, g: {i: scale * c for i, c in measure(self, b, g).items()}
    )
    config = LCSBConfig("certified", layers_per_step=1, min_cosine=0.5, cosine_margin=0.0, refresh_every=1)
    optimizer = optimizer_for(model, lr=0.0)
    batch = tiny.batch(model)
    with selective_backward(model, config) as lcsb:
        for t in range(HELD_BEFORE_CHEAPER + 3):
            lcsb.begin()
            model(**batch).loss.backward()
            scale = 0.6 if t == 1 else 1.0  # one bad batch
            plan = lcsb.finish_refresh()[0]
            costs.append(plan.cost)
            helds.append(plan.held)
            lcsb.step(optimizer)
    assert costs[0] < costs[1] and costs[1:-2] == [costs[1]] * (HELD_BEFORE_CHEAPER)
    assert helds == [0, *range(HELD_BEFORE_CHEAPER), 0, 1]
    assert costs[-2:] == [costs[0]] * 2


@pytest.mark.parametrize("lengths", [None, [12, 7]])
def test_steps_follow_the_plan_and_refreshes_are_exact(lengths):
    """The first micro-batch of a refresh step has the true gradient; every other pass that of the plan in force."""
    model = build()
    optimizer = optimizer_for(model)
    config = LCSBConfig("certified", layers_per_step=2, min_cosine=0.9, refresh_every=3)
    with selective_backward(model, config) as lcsb:
        for t in range(5):
            batches = [tiny.batch(model, seed=10 * t + i, lengths=lengths) for i in range(2)]
            lcsb.begin()
            for batch in batches:
                (model(**batch).loss / 2).backward()
            found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            selected, plan = lcsb.selected, lcsb.plan
            refreshed = lcsb.finish_refresh()
            forwards = [layer.__dict__.pop("forward") for layer in lcsb.layers]
            total = {}
            for i, batch in enumerate(batches):
                exact = t % 3 == 0 and i == 0
                truth, _ = reference.gradients(
                    model, batch, "full" if exact else plan_grades(plan.grades), selected
                )
                for name, value in truth.items():
                    total[name] = total.get(name, 0) + value / 2
            for layer, forward in zip(lcsb.layers, forwards, strict=True):
                layer.forward = forward
            assert_equal(found, total)
            record = lcsb.step(optimizer)
            assert record.plan == plan and record.refreshed == refreshed
            assert [p.block for p in record.refreshed] == ([(0, 1), (2, 3)] if t % 3 == 0 else [])
            log = lcsb.log()
            assert log["lcsb/plan_age"] == t % 3 and log["lcsb/plan"] == plan.summary
            assert log["lcsb/plan_cosine"] == plan.cosine >= 0.9
            assert ("lcsb/refresh_work" in log) == (t % 3 == 0)
            if t == 3:
                assert log["lcsb/plan_cosine_before"] == min(
                    p.replaced_cosine for p in record.refreshed if p.replaced_cosine is not None
                )
        lower = lcsb.measured.plans[0, 1]
    assert lower.replaced_age == 3 and lower.replaced_cosine is not None


def test_the_replaced_plan_is_measured_on_the_new_batch():
    model = build()
    optimizer = optimizer_for(model)
    config = LCSBConfig("certified", layers_per_step=2, min_cosine=0.9, refresh_every=1)
    with selective_backward(model, config) as lcsb:
        for t in range(3):
            old = dict(lcsb.measured.plans)
            batch = tiny.batch(model, seed=t)
            lcsb.begin()
            model(**batch).loss.backward()
            new = lcsb.finish_refresh()
            forwards = [layer.__dict__.pop("forward") for layer in lcsb.layers]
            for plan in new[: 1 if t else 0]:  # above the upper block no layer is idle
                expected = min(reference_cosines(model, batch, plan.block, old[plan.block].grades))
                assert plan.replaced_cosine == pytest.approx(expected, abs=1e-9)
                assert plan.replaced_cost == old[plan.block].cost and plan.replaced_age == 1
            for layer, forward in zip(lcsb.layers, forwards, strict=True):
                layer.forward = forward
            lcsb.step(optimizer)


def trajectory(config, steps=5, seed=0, accumulate=1, dtype=torch.float64, **settings):
    model = build(dtype=dtype, **settings)
    optimizer = optimizer_for(model)
    with torch.random.fork_rng(devices=[]), selective_backward(model, config, seed=seed) as lcsb:
        torch.manual_seed(7)
        for t in range(steps):
            lcsb.begin()
            for i in range(accumulate):
                (model(**tiny.batch(model, seed=10 * t + i)).loss / accumulate).backward()
            lcsb.step(optimizer)
    return [p.detach().clone() for p in model.parameters() if p.requires_grad], lcsb


def test_all_layers_exact_is_mode_exact_bit_for_bit():
    """A target that only exact reaches gives the trajectory of mode exact, refreshes included."""
    settings = {"layers_per_step": 1, "refresh_every": 2}
    exact, _ = trajectory(LCSBConfig("exact", layers_per_step=1), dtype=torch.float32)
    certified, lcsb = trajectory(
        LCSBConfig("certified", min_cosine=1 - 1e-12, **settings), dtype=torch.float32
    )
    assert {g for plan in lcsb.measured.plans.values() for g in plan.grades} == {None, "exact"}
    assert all(torch.equal(a, b) for a, b in zip(exact, certified, strict=True))
    loose, _ = trajectory(LCSBConfig("certified", min_cosine=0.3, **settings), dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(exact, loose, strict=True))


@pytest.mark.parametrize("idle", ["momentum", "frozen"])
def test_one_block_is_full_bit_for_bit(idle):
    full, _ = trajectory(LCSBConfig("full", idle), dtype=torch.float32)
    certified, lcsb = trajectory(LCSBConfig("certified", idle, refresh_every=2), dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(full, certified, strict=True))
    assert [plan.summary for plan in lcsb.measured.plans.values()] == ["----"]


@pytest.mark.parametrize("idle", ["momentum", "frozen"])
def test_recompute_makes_no_difference(idle, monkeypatch):
    config = LCSBConfig("certified", idle, layers_per_step=1, min_cosine=0.8, refresh_every=3)
    plain, first = trajectory(config, accumulate=2, dropout=0.2)
    original = build

    def with_recompute(*args, **settings):
        model = original(*args, **settings)
        model.activation_checkpointing_enable({"use_reentrant": False})
        return model

    monkeypatch.setitem(globals(), "build", with_recompute)
    again, second = trajectory(config, accumulate=2, dropout=0.2)
    assert [p.grades for p in first.measured.plans.values()] == [
        p.grades for p in second.measured.plans.values()
    ]
    for a, b in zip(plain, again, strict=True):
        assert (a - b).abs().max() <= 1e-10 * b.abs().max()


def test_dropout_is_the_same_in_trial_passes():
    """With dropout a layer run again by itself must draw what the recorded pass drew: exact plans have cosine 1."""
    model = build(dropout=0.4)
    with (
        selective_backward(model, LCSBConfig("certified", layers_per_step=1, min_cosine=1 - 1e-12)) as lcsb,
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(3)
        lcsb.begin()
        model(**tiny.batch(model)).loss.backward()
        state = torch.get_rng_state()
        plans = lcsb.finish_refresh()
        assert torch.equal(torch.get_rng_state(), state), "measuring must not move the user's random state"
    assert all(plan.cosine == pytest.approx(1.0, abs=1e-12) for plan in plans)
    assert {g for plan in plans for g in plan.grades} == {None, "exact"}


def test_refresh_leaves_no_gradient_in_idle_layers_before_clipping():
    """U07: what is clipped and logged is the selected layers' gradient alone, at a refresh too."""
    model = build()
    batch = tiny.batch(model)
    with selective_backward(model, LCSBConfig("certified", layers_per_step=1), t=0) as lcsb:
        selected = lcsb.begin()
        model(**batch).loss.backward()
        found = take_gradients(model)
        assert selected == (0,) and lcsb.finish_refresh()
    truth, _ = reference.gradients(model, batch, "full", selected)
    assert_equal(found, truth)


def test_a_refresh_that_is_not_finite_is_made_again():
    model = build(dtype=torch.float32)
    optimizer = optimizer_for(model)
    config = LCSBConfig("certified", layers_per_step=1, on_nonfinite="skip")
    with selective_backward(model, config) as lcsb:
        lcsb.begin()
        (model(**tiny.batch(model)).loss * 1e38 * 1e38).backward()
        assert not lcsb.step(optimizer).taken
        assert not lcsb.measured.plans and lcsb.t == 0
        lcsb.begin()
        model(**tiny.batch(model)).loss.backward()
        assert len(lcsb.step(optimizer).refreshed) == 4


def test_a_step_without_backward_or_with_old_gradients_is_refused():
    model = build()
    optimizer = optimizer_for(model)
    with selective_backward(model, LCSBConfig("certified", layers_per_step=1)) as lcsb:
        lcsb.begin()
        with pytest.raises(RuntimeError, match="a refresh is due"):
            lcsb.step(optimizer)
        model(**tiny.batch(model)).loss.backward()
        with pytest.raises(RuntimeError, match=r"still has a gradient.*zero_grad"):
            lcsb.begin()


def test_two_forward_passes_before_a_refresh_is_measured_are_refused():
    model = build()
    with selective_backward(model, LCSBConfig("certified", layers_per_step=1)) as lcsb:
        lcsb.begin()
        model(**tiny.batch(model))
        with pytest.raises(RuntimeError, match="a second forward pass before the backward pass of a refresh"):
            model(**tiny.batch(model, seed=1))


def test_plans_survive_json_and_resume_is_the_same_bit_for_bit():
    config = LCSBConfig("certified", layers_per_step=1, min_cosine=0.8, refresh_every=3)
    straight, _ = trajectory(config, steps=8)
    model = build()
    optimizer = optimizer_for(model)
    state = None
    for steps in (range(4), range(4, 8)):
        with selective_backward(model, config) as lcsb:
            if state is not None:
                lcsb.load_state_dict(json.loads(json.dumps(state)))
                assert lcsb.t == 4 and len(lcsb.measured.plans) == 4
            for t in steps:
                lcsb.begin()
                model(**tiny.batch(model, seed=10 * t)).loss.backward()
                lcsb.step(optimizer)
            state = lcsb.state_dict()
    resumed = [p.detach() for p in model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    plan = next(iter(lcsb.measured.plans.values()))
    assert PlanRecord.from_dict(json.loads(json.dumps(state["measured"]["plans"][0]))) == plan
    with pytest.raises(ValueError, match="missing or unknown"):
        PlanRecord.from_dict({"block": [0]})


def test_several_processes_take_the_lowest_cosine():
    """`agree` decides: a process that measures less pulls the plan of all others up."""
    plans = []
    for other in (1.0, 0.1):
        model = build()
        with selective_backward(model, LCSBConfig("certified", layers_per_step=2, min_cosine=0.5)) as lcsb:
            kinds = []

            def agree(values, how, other=other, kinds=kinds):
                kinds.append(how)
                return torch.minimum(values, torch.full_like(values, other))

            lcsb.refresh.agree = agree
            lcsb.begin()
            model(**tiny.batch(model)).loss.backward()
            plans.append(lcsb.finish_refresh()[0])
        assert set(kinds) == {"min"}
    assert plans[0].cost < plans[0].exact_cost
    assert plans[1].grades == (None, None, "exact", "exact")


def test_layers_without_adapters_are_graded_and_never_selected():
    from peft import LoraConfig, get_peft_model

    base = tiny.llama(dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = get_peft_model(
            base,
            LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0, 2], init_lora_weights=False),
        )
    batch = tiny.batch(model)
    with selective_backward(model, LCSBConfig("certified", layers_per_step=1, min_cosine=0.7)) as lcsb:
        lcsb.begin()
        model(**batch).loss.backward()
        plans = lcsb.finish_refresh()
    assert [plan.block for plan in plans] == [(0,), (2,)]
    for plan in plans:
        assert plan.grades[3] is not None
        assert plan.cosine == pytest.approx(
            min(reference_cosines(model, batch, plan.block, plan.grades)), abs=1e-9
        )


def test_trained_embedding_still_gets_its_gradient():
    """A trained parameter below layer 0: the layers under the block pass the gradient on, truly."""
    model = build()
    embedding = model.get_input_embeddings().weight.requires_grad_(True)
    config = LCSBConfig("certified", layers_per_step=1, min_cosine=1 - 1e-12)
    optimizer = optimizer_for(model)
    with selective_backward(model, config, t=3) as lcsb:
        for t in range(2):
            batch = tiny.batch(model, seed=t)
            lcsb.begin()
            model(**batch).loss.backward()
            found = embedding.grad.clone()
            forwards = [layer.__dict__.pop("forward") for layer in lcsb.layers]
            truth = torch.autograd.grad(model(**batch).loss, embedding)[0]
            for layer, forward in zip(lcsb.layers, forwards, strict=True):
                layer.forward = forward
            assert (found - truth).abs().max() <= 1e-10 * truth.abs().max()
            lcsb.step(optimizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_cosine": 0.0}, "min_cosine is 0.0, expected a number between 0 and 1"),
        ({"min_cosine": 1.0}, "min_cosine is 1.0"),
        ({"min_cosine": float("nan")}, "min_cosine is nan"),
        ({"refresh_every": 0}, "refresh_every is 0, expected at least 1"),
        ({"cosine_margin": 1.0}, "cosine_margin is 1.0, expected a number from 0 to below 1"),
        ({"cosine_margin": -0.1}, "cosine_margin is -0.1"),
        ({"schedule": "importance"}, "'certified' keeps one plan a block, and schedule 'importance' draws"),
        ({"schedule": "depth-weighted"}, "draws single layers"),
        ({"schedule": "adaptive"}, "give seconds_per_step"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LCSBConfig("certified", **settings)
