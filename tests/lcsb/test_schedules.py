"""Every schedule in the trainer: the layers that really train, measurements and their place in a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import json

import numpy as np
import pytest
import reference
import tiny
import torch

from bcd_theory.schedule import SCHEDULES, Schedule
from lcsb.config import TRAINER_SCHEDULES, LCSBConfig
from lcsb.selective import selective_backward
from lcsb.switches import without_recompute

N = 6
OPTIONS = {
    "fixed": {"fixed_layers": (1, 4)},
    "depth-weighted": {"depth_exponent": 2.0},
    "importance": {"refresh_every": 4},
    "adaptive": {"backward": "identity", "refresh_every": 3, "min_cosine": 0.9},
}


def build(dtype=torch.float64, **settings):
    return tiny.with_lora(tiny.llama(dtype=dtype, num_hidden_layers=N), **settings)


def config_for(name, **changes):
    k = None if name == "fixed" else 2
    return LCSBConfig(**{"schedule": name, "layers_per_step": k, **OPTIONS.get(name, {}), **changes})


def optimizer_for(model, lr=1e-2):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)


def graded_layers(lcsb):
    return tuple(
        i for i, group in enumerate(lcsb.adapters) if all(p.grad is not None for p in group.values())
    )


def run(config, steps, model=None, optimizer=None, state=None, accumulate=1, seed=5, watch=None):
    model = model or build()
    optimizer = optimizer or optimizer_for(model)
    chosen = []
    with selective_backward(model, config, seed=seed) as lcsb:
        if state is not None:
            lcsb.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            lcsb.begin()
            for i in range(accumulate):
                (model(**tiny.batch(model, seed=10 * lcsb.t + i)).loss / accumulate).backward()
            assert graded_layers(lcsb) == lcsb.selected, "idle layers' gradients are gone before the step"
            if watch is not None:
                watch(lcsb)
            record = lcsb.step(optimizer)
            chosen.append(record.selected)
    return chosen, model, optimizer, lcsb


def test_all_schedules_but_greedy_are_the_trainers():
    assert set(TRAINER_SCHEDULES) == set(SCHEDULES) - {"greedy"}
    with pytest.raises(ValueError, match="'greedy' is for simulations only"):
        LCSBConfig(schedule="greedy")
    with pytest.raises(ValueError, match=r"schedule: found 'cyclicc', expected one of .*nearest: 'cyclic'"):
        LCSBConfig(schedule="cyclicc")


@pytest.mark.parametrize("name", TRAINER_SCHEDULES)
def test_the_layers_that_train_are_the_schedules(name):
    """Against the pure function, asked with what the run recorded; only those layers' parameters change."""
    config = config_for(name, idle="frozen")
    model = build()
    before = [[p.detach().clone() for p in group.values()] for group in _groups(model)]
    moved = []

    def watch(lcsb):
        nonlocal before
        now = [[p.detach().clone() for p in group.values()] for group in lcsb.adapters]
        pairs = zip(now, before, strict=True)
        moved.append(
            tuple(
                i
                for i, (a, b) in enumerate(pairs)
                if any(not torch.equal(x, y) for x, y in zip(a, b, strict=True))
            )
        )
        before = now

    chosen, _, _, lcsb = run(config, 9, model=model, watch=watch)
    options = {key: value for key, value in OPTIONS.get(name, {}).items() if key != "backward"}
    schedule = Schedule(name, n_layers=N, layers_per_step=config.layers_per_step, seed=5, **options)
    if name == "importance":
        assert list(lcsb.measured.schedule) == [8]
        assert chosen[8] == schedule.selected(8, lcsb.measured.schedule)
    else:
        assert chosen == [schedule.selected(t, lcsb.measured.schedule) for t in range(9)]
    assert moved == [(), *chosen[:-1]]
    assert all(len(layers) == 2 for layers in chosen) or name == "adaptive"


def _groups(model):
    return selective_backward(model, LCSBConfig()).adapters


@pytest.mark.parametrize("name", TRAINER_SCHEDULES)
def test_resume_is_the_same_bit_for_bit(name):
    """U37: 11 straight steps = 5, state through JSON, 6 more; the state holds what was measured."""
    config = config_for(name)
    straight, model, _, _ = run(config, 11)
    first, resumed, optimizer, lcsb = run(config, 5)
    second, resumed, _, _ = run(config, 6, resumed, optimizer, state=lcsb.state_dict())
    assert first + second == straight
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_importance_draws_by_the_true_gradient_norms():
    """At a refresh: norms of the true adapter gradients, whatever the mode; the step then trains its draw by them."""
    model = build()
    batch = tiny.batch(model, seed=0)
    truth, _ = reference.gradients(model, batch)
    names = [[n for n in truth if f".layers.{i}." in n] for i in range(N)]
    norms = [float(torch.cat([truth[n].flatten() for n in group]).norm()) for group in names]
    for backward in ("exact", "identity"):
        config = config_for("importance", backward=backward)
        with selective_backward(model, config, seed=5) as lcsb:
            assert lcsb.begin() == tuple(range(N))
            model(**batch).loss.backward()
            assert lcsb.measured.schedule[0] == pytest.approx(norms, rel=1e-10)
            expected = Schedule("importance", n_layers=N, layers_per_step=2, seed=5).selected(0, {0: norms})
            assert lcsb.selected == expected == graded_layers(lcsb)
            for index in expected:
                for name in names[index]:
                    found = model.get_parameter(name).grad
                    assert (found - truth[name]).abs().max() <= 1e-10 * truth[name].abs().max()
            model.zero_grad()


def test_importance_prefers_large_gradients():
    """One layer's adapters scaled up a hundredfold in gradient: it is drawn at nearly every step."""
    model = build(random_b=False)
    for name, parameter in model.named_parameters():
        if ".layers.3." in name and "lora_A" in name:
            parameter.data.mul_(1000)
    chosen, *_ = run(
        config_for("importance", layers_per_step=1), 12, model=model, optimizer=optimizer_for(model, 1e-9)
    )
    assert chosen.count((3,)) >= 10


def test_accumulation_measures_the_first_micro_batch():
    """Importance over two micro-batches: measured on the first, the second follows the mode and the draw."""
    model = build()
    batches = [tiny.batch(model, seed=s) for s in (0, 1)]
    with selective_backward(model, config_for("importance", backward="identity"), seed=5) as lcsb:
        lcsb.begin()
        for batch in batches:
            model(**batch).loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        selected = lcsb.selected
    first, _ = reference.gradients(model, batches[0], "full", selected)
    second, _ = reference.gradients(model, batches[1], "identity", selected)
    assert found.keys() == first.keys()
    for name, value in found.items():
        assert (value - first[name] - second[name]).abs().max() <= 1e-10 * value.abs().max()


def test_several_processes_go_by_their_mean_gradient():
    """Importance: norms of the mean gradient, here of this process's and another's that is its double."""
    model = build()
    batch = tiny.batch(model, seed=0)
    norms = []
    for factor in (1.0, 1.5):
        with selective_backward(model, config_for("importance"), seed=5) as lcsb:
            asked = []

            def agree(values, how, factor=factor, asked=asked):
                asked.append(how)
                return factor * values

            lcsb.refresh.agree = agree
            lcsb.begin()
            model(**batch).loss.backward()
            assert asked == ["mean"] * N
            norms.append(lcsb.measured.schedule[0])
        model.zero_grad()
    assert norms[1] == pytest.approx([1.5 * value for value in norms[0]], rel=1e-12)


def test_adaptive_goes_by_the_measured_fidelity():
    """k doubles where a block's cosine is below min_cosine; the record is that of plain autograd."""
    model = build()
    config = config_for("adaptive", min_cosine=0.97, layers_per_step=1, refresh_every=2)
    batch = tiny.batch(model, seed=0)
    expected = []
    truth, _ = reference.gradients(model, batch)
    for index in range(N):
        surrogate, _ = reference.gradients(model, batch, "identity", [index])
        a, b = (torch.cat([g[n].flatten() for n in surrogate]) for g in (surrogate, truth))
        expected.append(float(a @ b / (a.norm() * b.norm())))
    assert min(expected) < 0.97
    chosen, _, _, lcsb = run(config, N + 3, model=model)
    assert lcsb.measured.schedule[1] == pytest.approx(expected, abs=1e-9)
    assert [len(layers) for layers in chosen] == [1] * N + [2] * 3
    assert lcsb.log()["lcsb/layers_per_step"] == 2


@pytest.mark.parametrize(("budget", "sizes"), [(1e9, [2] * 3 + [4, 4] + [6]), (1e-9, [2] * 3 + [1] * 6)])
def test_adaptive_goes_by_a_time_budget(budget, sizes):
    """Ample time: k doubles at each cycle end (3 blocks, 2, 1). None: it halves. The cycle under way is saved."""
    config = LCSBConfig("exact", schedule="adaptive", layers_per_step=2, seconds_per_step=budget)
    chosen, _, _, lcsb = run(config, len(sizes))
    assert [4 if len(layers) == 3 else len(layers) for layers in chosen] == sizes
    model = build()
    _, _, optimizer, lcsb = run(config, 2, model=model)
    assert len(lcsb.state_dict()["measured"]["cycle_seconds"]) == 2
    _, _, _, lcsb = run(config, 1, model=model, optimizer=optimizer, state=lcsb.state_dict())
    assert list(lcsb.measured.schedule) == [3] and len(lcsb.measured.schedule[3]) == 3


def test_certified_under_a_changing_k_has_a_plan_for_every_block():
    config = LCSBConfig(
        "certified", schedule="adaptive", layers_per_step=2, seconds_per_step=1e-9, min_cosine=0.7
    )
    seen = []
    run(config, 7, watch=lambda lcsb: seen.append((lcsb.finish_refresh(), lcsb.plan, lcsb.selected)))
    assert all(plan is not None and plan.block == selected for _, plan, selected in seen)
    assert [len(made) for made, _, _ in seen] == [3, 0, 0, 6, 0, 0, 0]


@pytest.mark.parametrize("name", ["reversed", "interleaved", "shuffled", "random", "fixed"])
def test_certified_follows_schedules_with_blocks(name):
    model = build()
    batch = tiny.batch(model, seed=0)
    config = config_for(name, backward="certified", min_cosine=0.8)
    with selective_backward(model, config, seed=5) as lcsb:
        lcsb.begin()
        model(**batch).loss.backward()
        plans = lcsb.finish_refresh()
    assert {plan.block for plan in plans} == ({(1, 4)} if name == "fixed" else {
        tuple(block) for block in lcsb.schedule.blocks
    })  # fmt: skip
    for plan in plans:
        grades = {i: g for i, g in enumerate(plan.grades) if g is not None}
        truth, _ = reference.gradients(model, batch, "full", plan.block)
        found, _ = reference.gradients(model, batch, grades, plan.block)
        for index in plan.block:
            a, b = (
                torch.cat([g[n].flatten() for n in truth if f".layers.{index}." in n]) for g in (found, truth)
            )
            assert float(a @ b / (a.norm() * b.norm())) >= 0.8 - 1e-9


def test_fixed_layers_are_decoder_layers():
    """Positions among all decoder layers, also where some have no adapter."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny.llama(num_hidden_layers=N),
        LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[1, 3, 5]),
    )
    with selective_backward(model, LCSBConfig(schedule="fixed", fixed_layers=[5, 3])) as lcsb:
        assert lcsb.begin() == (3, 5)
    with pytest.raises(ValueError, match="fixed_layers: layer 2 has no adapter"):
        selective_backward(model, LCSBConfig(schedule="fixed", fixed_layers=(2, 3)))


def test_a_state_of_another_schedule_is_refused():
    _, _, _, lcsb = run(config_for("shuffled"), 1)
    state = json.loads(json.dumps(lcsb.state_dict()))
    for changes in ({"schedule": "random"}, {"layers_per_step": 3}, {"seed": 4}, {"refresh_every": 7}):
        other = selective_backward(build(), config_for("shuffled", **changes), seed=5)
        with pytest.raises(ValueError, match=r"checkpoint of another run: .* was .* and is"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="has no 'measured'"):
        lcsb.load_state_dict({key: value for key, value in state.items() if key != "measured"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "fixed"}, "needs fixed_layers with at least one layer"),
        ({"schedule": "fixed", "fixed_layers": ()}, "needs fixed_layers with at least one layer"),
        ({"schedule": "fixed", "fixed_layers": (-1,)}, "expected layers from 0 upward"),
        ({"fixed_layers": (1,)}, "fixed_layers is for the schedule 'fixed'"),
        ({"schedule": "adaptive"}, "goes by the measured fidelity of identity or mlp, found backward 'exact'"),
        ({"schedule": "adaptive", "seconds_per_step": 0.0}, "seconds_per_step is 0.0, expected a positive number"),
        ({"schedule": "depth-weighted", "depth_exponent": float("inf")}, "depth_exponent is inf"),
        ({"layers_per_step": 0}, "layers_per_step: found 0, expected at least 1"),
        ({"refresh_every": 0}, "refresh_every is 0, expected at least 1"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LCSBConfig(**settings)


def test_options_survive_to_dict():
    for name in TRAINER_SCHEDULES:
        config = config_for(name)
        assert LCSBConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="did you mean 'fixed_layers'"):
        LCSBConfig.from_dict({"fixed_layer": [1]})


def test_update_norms_do_not_spike_when_layers_switch():
    """U05: well below its limit a run has no jump where a block comes back to its stale moments (every step here).

    After each block's first visit: no update twice the median, and the loss falls at every step.
    """
    for idle in ("momentum", "frozen"):
        model = build()
        optimizer = optimizer_for(model, lr=2e-3)
        batch = tiny.batch(model, rows=4, tokens=24)
        norms, losses = [], []
        with selective_backward(model, LCSBConfig("exact", idle, layers_per_step=2)) as lcsb:
            for _ in range(15):
                before = [p.detach().clone() for p in lcsb.parameters().values()]
                lcsb.begin()
                loss = model(**batch).loss
                losses.append(float(loss.detach()))
                loss.backward()
                lcsb.step(optimizer)
                after = lcsb.parameters().values()
                norms.append(
                    float(sum((a.detach() - b).square().sum() for a, b in zip(after, before, strict=True)))
                    ** 0.5
                )
        later = np.array(norms[3:])  # after each block's own first step
        assert later.max() < 2 * np.median(later), idle
        assert all(b < a for a, b in itertools.pairwise(losses)), idle


def test_measuring_needs_no_recompute_setting():
    """Recompute on and off give the same draw and the same gradients at a refresh."""
    found = []
    for recompute in (False, True):
        model = build()
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False})
        context = contextlib.nullcontext() if recompute else without_recompute(model)
        with context:
            _, model, _, lcsb = run(config_for("importance", backward="mlp"), 5, model=model)
        found.append((list(lcsb.measured.schedule.values())[-1], [p.detach() for p in model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-10)
    assert all(
        torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found[0][1], found[1][1], strict=True)
    )
