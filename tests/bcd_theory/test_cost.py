"""T12: seconds and bytes against step-by-step counts, closed forms, and published parameter counts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from bcd_theory.cost import (
    StepCosts,
    dequantisation_speedup,
    exact_layers_speedup,
    grade_seconds,
    identity_speedup,
    mean_reach,
    plan_seconds,
    speedup,
    step_seconds,
)
from bcd_theory.geometry import GEOMETRIES, PROJECTIONS, peak_bytes, saved_layers
from bcd_theory.partition import contiguous_blocks, interleaved_blocks

COSTS = StepCosts(
    layers=32,
    forward=0.9,
    head=0.3,
    optimizer=0.05,
    recompute=0.8,
    input_gradient=0.7,
    adapter_gradient=0.5,
    dequantisation=0.2,
    attention_recompute=0.2,
    attention_input_gradient=0.25,
)


def by_hand(costs: StepCosts, mode: str, block: list[int], recompute: bool) -> float:
    """One step's time by walking down the layers, in the words of T12."""
    time = costs.forward + costs.head + costs.optimizer
    n = costs.layers
    for layer in reversed(range(n)):
        passing = costs.by_layer("input_gradient")[layer]
        attention = costs.by_layer("attention_input_gradient")[layer]
        if recompute:
            passing += costs.by_layer("recompute")[layer]
            attention += costs.by_layer("attention_recompute")[layer]
        if mode == "full" or layer in block:
            time += passing + costs.by_layer("adapter_gradient")[layer]
        elif layer > min(block):
            time += {"exact": passing, "identity": 0.0, "mlp": passing - attention}[mode]
    return time


def uneven(layers: int, seed: int) -> StepCosts:
    """Costs that differ from layer to layer."""
    rng = np.random.default_rng(seed)
    recompute, passing, adapter = rng.uniform(0.01, 0.1, (3, layers))
    return StepCosts(
        layers=layers,
        forward=1.0,
        head=0.4,
        optimizer=0.02,
        recompute=tuple(recompute),
        input_gradient=tuple(passing),
        adapter_gradient=tuple(adapter),
        attention_recompute=tuple(0.4 * recompute),
        attention_input_gradient=tuple(0.3 * passing),
    )


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("mode", ["full", "exact", "identity", "mlp"])
@pytest.mark.parametrize(("layers", "k"), [(30, 8), (12, 5), (7, 1), (6, 6)])
def test_mean_step_equals_the_walk_down_the_layers(layers: int, k: int, mode: str, recompute: bool) -> None:
    costs = uneven(layers, 3)
    for schedule, make in (("cyclic", contiguous_blocks), ("interleaved", interleaved_blocks)):
        blocks = make(layers, k)
        expected = np.mean([by_hand(costs, mode, list(block), recompute) for block in blocks])
        options = {"layers_per_step": k, "schedule": schedule, "recompute": recompute}
        assert step_seconds(costs, mode, **options) == pytest.approx(expected, rel=1e-12)
        assert step_seconds(costs, mode, blocks=blocks, recompute=recompute) == pytest.approx(
            expected, rel=1e-12
        )


@pytest.mark.parametrize("mode", ["exact", "identity", "mlp"])
def test_random_layers_is_the_mean_over_all_subsets(mode: str) -> None:
    costs = uneven(7, 5)
    subsets = [list(subset) for subset in itertools.combinations(range(7), 3)]
    expected = np.mean([by_hand(costs, mode, subset, True) for subset in subsets])
    found = step_seconds(costs, mode, layers_per_step=3, schedule="random-layers")
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16, 32])
def test_reach_closed_forms(k: int) -> None:
    n, p = 32, 32 // k
    assert mean_reach(n, k) == pytest.approx((1 + 1 / p) / 2, rel=1e-14)
    assert mean_reach(n, k, "interleaved") == pytest.approx(1 - (p - 1) / (2 * n), rel=1e-14)
    assert mean_reach(n, k, "random-layers") == pytest.approx(k * (n + 1) / ((k + 1) * n), rel=1e-12)
    for schedule in ("reversed", "shuffled", "random"):
        assert mean_reach(n, k, schedule) == mean_reach(n, k)


@pytest.mark.parametrize("k", [1, 4, 8, 32])
def test_speedup_closed_forms(k: int) -> None:
    p = 32 // k
    backward = 0.8 + 0.7 + 0.5
    assert speedup(COSTS, "identity", layers_per_step=k) == pytest.approx(
        identity_speedup(0.9, 0.3, 0.05, backward, k / 32), rel=1e-12
    )
    layers_only = replace(COSTS, head=0.0, optimizer=0.0)
    r_in, r_ad = COSTS.backward_ratio()
    closed = exact_layers_speedup(r_in, r_ad, (1 + 1 / p) / 2, 1 / p)
    assert speedup(layers_only, "exact", layers_per_step=k) == pytest.approx(closed, rel=1e-12)
    assert (r_in, r_ad) == pytest.approx((1.5 / 0.9, 0.5 / 0.9))


@pytest.mark.parametrize("mode", ["exact", "identity", "mlp"])
@pytest.mark.parametrize("recompute", [True, False])
def test_all_layers_selected_costs_what_full_costs(mode: str, recompute: bool) -> None:
    full = step_seconds(COSTS, "full", recompute=recompute)
    assert step_seconds(COSTS, mode, recompute=recompute) == pytest.approx(full, rel=1e-12)
    assert step_seconds(COSTS, mode, layers_per_step=32, recompute=recompute) == pytest.approx(
        full, rel=1e-12
    )


def test_modes_are_ordered_and_mlp_is_exact_less_attention() -> None:
    times = [step_seconds(COSTS, m, layers_per_step=8) for m in ("identity", "mlp", "exact", "full")]
    assert times == sorted(times) and len(set(times)) == 4
    no_attention = replace(COSTS, attention_recompute=0.0, attention_input_gradient=0.0)
    assert step_seconds(no_attention, "mlp", layers_per_step=8) == step_seconds(
        COSTS, "exact", layers_per_step=8
    )
    # p = 4: idle layers above the lowest selected one are 24, 16, 8, 0 of 32: 12 on average.
    saved = step_seconds(COSTS, "exact", layers_per_step=8) - step_seconds(COSTS, "mlp", layers_per_step=8)
    assert saved == pytest.approx((0.2 + 0.25) * 12 / 32, rel=1e-12)


def test_frozen_optimizer_touches_selected_layers_only() -> None:
    momentum = step_seconds(COSTS, "exact", layers_per_step=8)
    frozen = step_seconds(COSTS, "exact", layers_per_step=8, idle="frozen")
    assert momentum - frozen == pytest.approx(0.05 * 24 / 32, rel=1e-12)
    assert step_seconds(COSTS, "full", idle="frozen") == step_seconds(COSTS, "full")


def test_certified_plans_reach_the_pure_modes_and_mix() -> None:
    costs = uneven(12, 8)
    blocks = contiguous_blocks(12, 3)
    for grade in ("identity", "mlp", "exact"):
        plans = [[grade] * 12 for _ in blocks]
        found = step_seconds(costs, "certified", layers_per_step=3, plans=plans)
        assert found == pytest.approx(step_seconds(costs, grade, layers_per_step=3), rel=1e-12)
    grades = grade_seconds(costs)
    plan = [None] * 3 + ["identity"] * 4 + ["mlp", "exact", "identity", "identity", "mlp"]
    expected = grades["mlp"][7] + grades["exact"][8] + grades["mlp"][11]
    assert plan_seconds(costs, [0, 1, 2], plan) == pytest.approx(expected, rel=1e-12)
    assert plan_seconds(costs, [9, 10, 11], ["exact"] * 12) == 0.0


def test_dequantisation_speedup() -> None:
    assert dequantisation_speedup(0.0, 2.0) == 1.0
    assert dequantisation_speedup(1.0, 2.0) == 3.0
    # The same as a step without the dequantisation time.
    layers_only = replace(COSTS, head=0.0, optimizer=0.0)
    without = replace(layers_only, recompute=0.6, dequantisation=0.0)
    backward = 2.0
    ratio = step_seconds(layers_only, "full") / step_seconds(without, "full")
    assert dequantisation_speedup(0.2 / backward, backward / 0.9) == pytest.approx(ratio, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers"),
        ({"forward": -1.0}, "forward"),
        ({"head": math.nan}, "head"),
        ({"recompute": (0.1, 0.2)}, "recompute"),
        ({"attention_recompute": 0.9}, "attention_recompute"),
        ({"dequantisation": 1.6}, "dequantisation"),
    ],
)
def test_bad_costs_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(COSTS, **change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "identitty"}, "did you mean 'identity'"),
        ({"mode": "exact", "schedule": "cyclical"}, "did you mean 'cyclic'"),
        ({"mode": "exact", "layers_per_step": 33}, "33"),
        ({"mode": "exact", "blocks": []}, "empty"),
        ({"mode": "exact", "blocks": [[]]}, "empty"),
        ({"mode": "exact", "blocks": [[1, 32]]}, "not a set of layers"),
        ({"mode": "exact", "blocks": [[1]], "layers_per_step": 3}, "either"),
        ({"mode": "certified", "blocks": [[1]]}, "plans"),
        ({"mode": "exact", "blocks": [[1]], "plans": [["exact"] * 32]}, "plans"),
        ({"mode": "certified", "blocks": [[1]], "plans": [["exact"] * 3]}, "32 layers"),
        ({"mode": "certified", "blocks": [[1]], "plans": [["exactt"] * 32]}, "did you mean 'exact'"),
    ],
)
def test_bad_selections_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_seconds(COSTS, **options)


# Parameter counts as the models' cards state them.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_geometries_have_the_published_number_of_parameters(name: str) -> None:
    assert GEOMETRIES[name].parameters() == PUBLISHED[name]


def test_adapter_and_packed_counts() -> None:
    smol = GEOMETRIES["smollm2-135m"]
    assert smol.lora_parameters(16) == 4_884_480
    assert smol.lora_parameters(16, ["q_proj"]) == 30 * 16 * (576 + 576)
    assert set(smol.projections()) == set(PROJECTIONS)
    # 4 bits a weight and 4 bytes for each 64; every matrix of this geometry is a multiple of 64.
    weights = smol.parameters() - 49152 * 576 - 61 * 576
    assert smol.packed_bytes() == weights // 2 + 4 * weights // 64
    assert smol.packed_bytes(double_quantisation=True) < smol.packed_bytes()
    with pytest.raises(ValueError, match="did you mean 'q_proj'"):
        smol.lora_parameters(16, ["q_prj"])


def test_saved_layer_inputs_by_mode() -> None:
    assert saved_layers(30, "full", 8) == (30, 0)
    assert saved_layers(30, "identity", 8) == (8, 0)
    assert saved_layers(30, "exact", 8) == (8, 22)
    assert saved_layers(30, "exact", 8, "interleaved") == (8, 22)


def test_peak_bytes_follow_the_memory_paragraph() -> None:
    model = GEOMETRIES["qwen2.5-3b"]
    state = 256 * 2048 * 4
    peaks = {
        mode: peak_bytes(model, mode, tokens=256, layers_per_step=9, logit_rows=32)
        for mode in ("full", "exact", "mlp", "identity")
    }
    assert peaks["full"].layer_inputs == peaks["exact"].layer_inputs == 36 * state
    assert peaks["identity"].layer_inputs == 9 * state
    assert peaks["identity"].total < peaks["exact"].total < peaks["full"].total
    full = peaks["full"]
    assert full.table()["total"] == full.total == sum(list(full.table().values())[:-1])
    assert full.tile == 1024 * 11008 * 4
    assert full.logits == 2 * 32 * 151936 * 4
    assert full.moments == 2 * full.adapters == 2 * full.adapter_gradients == 8 * 29_933_568
    assert peaks["exact"].adapter_gradients * 4 == full.adapter_gradients
    # Only what is said to change changes.
    disk = peak_bytes(model, "full", tokens=256, logit_rows=32, inputs_on_disk=True)
    assert full.total - disk.total == 35 * state
    kept = peak_bytes(model, "full", tokens=256, logit_rows=32, recompute=False)
    assert kept.activations == 36 * full.activations
    assert peak_bytes(model, "full", tokens=256, floor=10**6, logit_rows=32).total == full.total + 10**6


def test_forward_without_a_graph_by_plan():
    """A certified plan: identity layers and those below the lowest selected one run forward without a graph."""
    costs = StepCosts(4, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, graph_forward=0.4)
    plans = [(None, "identity", "mlp", "exact"), (None, None, "exact", "identity")]
    found = step_seconds(costs, "certified", blocks=[[0], [1]], plans=plans)
    # layer 1 in the first step, layers 0 and 3 in the second: 0.1 each
    assert found == pytest.approx((1.0 - 0.1 + 1.0 - 0.2) / 2)
    with pytest.raises(ValueError, match="graph_forward"):
        StepCosts(4, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, graph_forward=1.1)
