"""Every baseline against its paper's pseudo-code in float64; wrong variants of each must fail the same comparison."""

from __future__ import annotations

import types

import methods_reference as paper
import numpy as np
import pytest
import tiny
import torch
from method_runs import (
    ADAMW,
    SEED,
    STREAM,
    K,
    N,
    adamw_of,
    assert_same,
    batches,
    changed,
    compare,
    early,
    lora_model,
    method_of,
    whole_model,
)

from bcd_theory.schedule import SCHEDULES
from lcsb.methods import (
    Cached,
    Lisa,
    MeZO,
    RandomLayers,
    StochasticDepth,
    Survival,
    idle_law_of,
    loss_and_gradient,
    third_of,
    trained_when_frozen,
    unfreeze,
)
from lcsb.selective import SelectiveBackward
from reports.arms import NAMED_ARMS, ArmConfig

# -- LISA ----------------------------------------------------------------------------------------------------------


def draw_lisa(i):
    return paper.race(SEED, STREAM, i, np.ones(N), K)


LISA_VARIANTS = {
    "right": None,
    "period off by one": changed(period=4),
    "first period one step short": early(),
    "drawn at every step": changed(period=1),
}


@pytest.mark.parametrize("variant", LISA_VARIANTS)
def test_lisa_over_adapters(variant):
    assert len({tuple(draw_lisa(i)) for i in range(3)}) > 1  # else no wrong period could be seen
    compare("lisa", lambda m, b: paper.lisa(m, b, draw_lisa, 3, **ADAMW), LISA_VARIANTS[variant], period=3)


@pytest.mark.parametrize("variant", ["right", "first period one step short"])
def test_lisa_over_whole_layers_trains_embedding_and_head_always(variant):
    compare(
        "lisa-layers",
        lambda m, b: paper.lisa(m, b, draw_lisa, 3, **ADAMW),
        LISA_VARIANTS[variant],
        make=whole_model,
        period=3,
    )


def test_lisa_that_drops_moments_starts_a_drawn_layer_anew():
    """U04, U03: moments of a layer that leaves are freed, and its bias correction starts again."""
    reference = lambda m, b: paper.lisa(m, b, draw_lisa, 2, moments="drop", **ADAMW)  # noqa: E731
    compare("lisa", reference, None, period=2, moments="drop")
    compare("lisa", reference, lambda method: setattr(method, "moments", "keep"), period=2, moments="drop")
    model = lora_model()
    method = method_of("lisa", model, period=2, moments="drop")
    optimizer = adamw_of(method, model)
    with method:
        for batch in batches(model, 7):
            method.begin()
            loss_and_gradient(method, lambda: model(**batch).loss)  # noqa: B023
            method.step(optimizer)
            held = {id(p) for p in optimizer.state}
            assert held == {id(p) for i in method.selected for p in method.adapters[i].values()}


def test_lisa_draws_each_layer_equally_often_and_by_seed_and_step_alone():
    schedule = RandomLayers("depth-weighted", n_layers=5, layers_per_step=2, seed=1, period=7)
    draws = [schedule.selected(7 * i + i % 7) for i in range(4000)]
    counts = np.bincount(np.concatenate(draws), minlength=5)
    assert all(len(set(draw)) == 2 for draw in draws)
    assert np.abs(counts / 4000 - 2 / 5).max() < 4 * np.sqrt(0.4 * 0.6 / 4000)
    assert schedule.selected(700) == schedule.selected(706) == draws[100]
    other = RandomLayers("depth-weighted", n_layers=5, layers_per_step=2, seed=2, period=7)
    assert [other.selected(7 * i) for i in range(20)] != draws[:20]


def test_whole_layers_need_an_unquantised_base_without_adapters():
    with pytest.raises(ValueError, match="found adapters, expected a plain model"):
        unfreeze(lora_model())
    model = tiny.llama()
    model.is_quantized = True
    with pytest.raises(ValueError, match="needs an unquantised base"):
        unfreeze(model)
    packed = tiny.llama()
    packed.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
        torch.zeros(4, 1, dtype=torch.uint8), False
    )
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight is torch\.uint8"):
        unfreeze(packed)


# -- freezing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("freeze-lowest", {2, 3}),
        ("freeze-highest", {0, 1}),
        ("surgical-first", {0, 1}),
        ("surgical-middle", {2}),
        ("surgical-last", {3}),
    ],
)
def test_frozen_layers_never_move(name, layers):
    compare(name, lambda m, b: paper.only_layers(m, b, layers, **ADAMW))
    one_more = tuple(sorted(layers | {min(set(range(N)) - layers)}))
    compare(name, lambda m, b: paper.only_layers(m, b, layers, **ADAMW), changed(fixed_layers=one_more))


def test_thirds_and_frozen_ends():
    for n in (3, 4, 5, 18, 30, 31):
        parts = [third_of(n, third) for third in ("first", "middle", "last")]
        assert sum(parts, ()) == tuple(range(n))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ValueError, match="2 layers, expected at least 3"):
        third_of(2, "first")
    assert trained_when_frozen(30, "lowest", 8) == tuple(range(22, 30))
    assert trained_when_frozen(30, "highest", 30) == tuple(range(30))
    with pytest.raises(ValueError, match="trained_layers is 31, expected 1 to 30"):
        trained_when_frozen(30, "lowest", 31)


# -- importance ----------------------------------------------------------------------------------------------------


def draw_importance(t, norms):
    return paper.race(SEED, SCHEDULES.index("importance"), t, norms, K)


@pytest.mark.parametrize("refresh_every", [3, 4])
@pytest.mark.parametrize("variant", [None, early()])
def test_importance_selection(variant, refresh_every):
    """Period 3 in the reference: 4 is the period off by one."""
    seen = []

    def draw(t, norms):
        seen.append(norms.tolist())
        return draw_importance(t, norms)

    model = lora_model()
    data = batches(model)
    expected = paper.importance(model, data, draw, 3, **ADAMW)
    method = method_of("importance", model, variant, refresh_every=refresh_every)
    optimizer, path, measured = adamw_of(method, model), [], []
    with method:
        for batch in data:
            method.begin()
            loss_and_gradient(method, lambda: model(**batch).loss)  # noqa: B023
            method.step(optimizer)
            path.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
            ((_, newest),) = method.state_dict()["measured"]["schedule"]
            measured.append(newest)

    def same():
        assert_same(path, expected)
        assert np.allclose(measured, seen, rtol=1e-9), "off by the step of the measurement"

    if variant is None and refresh_every == 3:
        same()
    else:
        with pytest.raises(AssertionError, match="off by"):
            same()


# -- cached --------------------------------------------------------------------------------------------------------

BLOCKS = [{0, 1}, {2, 3}]


def without_cache(method):
    method.apply_idle_policy = types.MethodType(SelectiveBackward.apply_idle_policy, method)


def one_visit_late(method):
    """Reuses the gradient of the visit before the last one."""
    kept = {}

    def advance():
        fresh = method._fresh
        method._fresh = [(p, kept.get(id(p), g)) for p, g in fresh]
        kept.update({id(p): g.clone() for p, g in fresh})
        Cached.advance(method)

    method.advance = advance


CACHED_VARIANTS = {
    "right": None,
    "first block one step short": early(),
    "no cache": without_cache,
    "one visit late": one_visit_late,
}


@pytest.mark.parametrize("idle", ["momentum", "frozen"])
@pytest.mark.parametrize("variant", CACHED_VARIANTS)
def test_cached_gradients(variant, idle, monkeypatch):
    arm = ArmConfig(name="cached", method="cached", backward="exact", idle=idle)
    monkeypatch.setitem(NAMED_ARMS, "cached", arm)
    compare("cached", lambda m, b: paper.cached(m, b, BLOCKS, idle, **ADAMW), CACHED_VARIANTS[variant])


def test_cached_gradient_is_the_clipped_one_and_outlives_zero_grad_in_place():
    model = lora_model()
    method = method_of("cached", model)
    optimizer = adamw_of(method, model)
    first, second = batches(model, 2)
    with method:
        method.begin()
        loss_and_gradient(method, lambda: model(**first).loss)
        method.step(optimizer, max_norm=0.01)
        kept = [optimizer.state[p]["cached_gradient"].clone() for p in method.trained_parameters().values()]
        assert float(torch.cat([g.flatten() for g in kept]).norm()) == pytest.approx(0.01, rel=1e-3)
        before = list(method.trained_parameters().values())
        method.begin()
        loss_and_gradient(method, lambda: model(**second).loss)
        method.apply_idle_policy(optimizer)
        assert all((p.grad == g).all() for p, g in zip(before, kept, strict=True))
        optimizer.step()
        method.advance()
        optimizer.zero_grad(set_to_none=False)
        assert all(
            (optimizer.state[p]["cached_gradient"] == g).all() for p, g in zip(before, kept, strict=True)
        )
        assert all(optimizer.state[p]["cached_gradient"].any() for p in method.trained_parameters().values())


# -- stochastic depth ----------------------------------------------------------------------------------------------


def kept_in_forward(method):
    method._run_exact = types.MethodType(SelectiveBackward._run_exact, method)
    method._run_below = types.MethodType(SelectiveBackward._run_below, method)


@pytest.mark.parametrize("variant", [None, kept_in_forward, early()])
def test_stochastic_depth_by_the_schedule(variant):
    compare(
        "stochastic-depth",
        lambda m, b: paper.stochastic_depth(m, b, lambda t: BLOCKS[t % 2], **ADAMW),
        variant,
    )


def survivors(t):
    return paper.survivors(SEED, STREAM, t, N, 0.5)


@pytest.mark.parametrize("variant", [None, early(), changed(last_survival=0.4), kept_in_forward])
def test_stochastic_depth_by_linear_decay(variant):
    compare(
        "stochastic-depth-survival",
        lambda m, b: paper.stochastic_depth(m, b, survivors, **ADAMW),
        variant,
    )


def test_survival_frequencies():
    schedule = Survival("depth-weighted", n_layers=4, seed=0, last_survival=0.5)
    counts = np.bincount(np.concatenate([schedule.selected(t) for t in range(8000)]), minlength=4)
    none = (1 - np.array([0.875, 0.75, 0.625, 0.5])).prod()  # such a step is drawn again
    expected = np.array([0.875, 0.75, 0.625, 0.5]) / (1 - none)
    assert np.abs(counts / 8000 - expected).max() < 4 * np.sqrt(0.25 / 8000)


def test_evaluation_uses_every_layer():
    model = lora_model()
    batch = batches(model, 1)[0]
    with torch.no_grad():
        whole = model(**batch).loss
    with method_of("stochastic-depth", model) as method:
        method.begin()
        assert float(model(**batch).loss.detach() - whole) != 0
        with torch.no_grad():
            assert model(**batch).loss == whole


def test_a_family_whose_layers_answer_with_tuples():
    model = lora_model()
    batch = batches(model, 1)[0]
    layers = model.base_model.model.model.layers
    with method_of("stochastic-depth", model) as method:
        assert isinstance(method, StochasticDepth)
        method.begin()
        expected = model(**batch).loss
        kind, method._as_tuple = type(layers[0]), {}
        state = torch.get_rng_state()
        out = method._run_exact(0, lambda h: (h * 2, torch.rand(1)), torch.ones(1, 1, 2))
        assert isinstance(out, tuple) and method._as_tuple == {kind: True}
        assert (out[0] == 1).all() and (torch.get_rng_state() == state).all()
    assert expected.requires_grad


# -- all of them ---------------------------------------------------------------------------------------------------

METHODS = sorted(name for name, arm in NAMED_ARMS.items() if arm.method != "lcsb" and name != "lisa-layers")


@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_left_as_it_was(name):
    model = lora_model()
    batch = batches(model, 1)[0]
    layers = model.base_model.model.model.layers
    before = (
        [set(layer.__dict__) for layer in layers],
        {n: p.requires_grad for n, p in model.named_parameters()},
    )
    with pytest.raises(KeyboardInterrupt), method_of(name, model) as method:
        method.begin()
        loss_and_gradient(method, lambda: model(**batch).loss)
        method.step(adamw_of(method, model))
        method.begin()
        raise KeyboardInterrupt
    assert before == (
        [set(layer.__dict__) for layer in layers],
        {n: p.requires_grad for n, p in model.named_parameters()},
    )
    assert all(p.grad is None for p in model.parameters())


def test_which_law_idle_layers_obey():
    laws = {name: idle_law_of(method_of(name, lora_model())) for name in [*METHODS, "exact-momentum"]}
    assert laws["cached"] is laws["mezo"] is None
    assert laws["lisa"] == laws["freeze-lowest"] == laws["surgical-middle"] == "T6b"
    assert laws["stochastic-depth"] == laws["exact-momentum"] == "T6"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_a_function_of_seed_and_step(name):
    """Layers of steps 5, 6, ... are the same whether or not steps 0 to 4 were asked for (resume)."""
    straight, resumed = method_of(name, lora_model()), method_of(name, lora_model())
    with straight, resumed:
        for t in range(12):
            straight.t = t
            straight.begin()
            if t >= 5:
                resumed.t = t
                assert resumed.begin() == straight.selected


def test_mezo_and_lisa_are_their_own_classes():
    assert type(method_of("mezo", lora_model())) is MeZO
    assert type(method_of("lisa", lora_model())) is Lisa
    assert type(method_of("surgical-last", lora_model())) is SelectiveBackward
