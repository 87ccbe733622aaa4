from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest

from bcd_theory.partition import contiguous_blocks, interleaved_blocks
from bcd_theory.schedule import SCHEDULES, Schedule

N = 7
NORMS = {0: np.arange(1.0, N + 1) / (2 * N)}


def make(name, **options):
    if name == "fixed":
        options.setdefault("fixed_layers", (5, 1))
    return Schedule(name, n_layers=N, layers_per_step=options.pop("layers_per_step", 2), **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pure_function_of_seed_and_step(name):
    first, second = make(name, seed=3), make(name, seed=3)
    forward = [first.selected(t, NORMS) for t in range(40)]
    backward = [second.selected(t, NORMS) for t in reversed(range(40))][::-1]
    assert forward == backward
    for selection in forward:
        assert list(selection) == sorted(set(selection))
        assert selection and selection[0] >= 0 and selection[-1] < N


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"fixed"}))
def test_all_layers_selected_is_full(name):
    schedule = Schedule(name, n_layers=N)
    assert schedule.cycle_length == 1
    record = {0: np.full(N, 0.6)}
    assert {schedule.selected(t, record) for t in range(5)} == {tuple(range(N))}


@pytest.mark.parametrize("name", ["cyclic", "reversed", "interleaved", "shuffled"])
def test_a_cycle_visits_each_layer_once(name):
    schedule = make(name, seed=11)
    p = schedule.cycle_length
    assert p == 4 == len(schedule.blocks)
    for cycle in range(6):
        steps = range(cycle * p, (cycle + 1) * p)
        assert sorted(layer for t in steps for layer in schedule.selected(t)) == list(range(N))
        assert all(schedule.selected(t) == schedule.blocks[schedule.block_index(t)] for t in steps)


def test_order_within_the_cycle():
    contiguous, interleaved = contiguous_blocks(N, 2), interleaved_blocks(N, 2)
    assert [make("cyclic").selected(t) for t in range(8)] == [*contiguous, *contiguous]
    assert [make("reversed").selected(t) for t in range(4)] == list(contiguous[::-1])
    assert [make("interleaved").selected(t) for t in range(4)] == list(interleaved)


def test_shuffled_draws_every_order_and_random_every_block():
    shuffled = Schedule("shuffled", n_layers=3, layers_per_step=1, seed=5)
    orders = Counter(tuple(shuffled.block_index(3 * c + j) for j in range(3)) for c in range(600))
    assert set(orders) == set(permutations(range(3)))
    assert min(orders.values()) > 60  # mean 100, standard deviation 9.1
    random = Schedule("random", n_layers=3, layers_per_step=1, seed=5)
    draws = [random.block_index(t) for t in range(900)]
    assert min(Counter(draws).values()) > 230  # mean 300, standard deviation 14
    pairs = Counter(pairwise(draws))
    assert len(pairs) == 9 and min(pairs.values()) > 55  # with replacement, independent of the step before


def test_seeds_differ():
    assert [make("random", seed=0).selected(t) for t in range(20)] != [
        make("random", seed=1).selected(t) for t in range(20)
    ]


def test_importance_follows_its_law():
    # Two of three layers, weights 1, 2, 5: successive draws without replacement.
    schedule = Schedule("importance", n_layers=3, layers_per_step=2, seed=2)
    norms = np.array([1.0, 2.0, 5.0])
    share = norms / norms.sum()
    expected = {
        tuple(sorted((i, j))): share[i] * share[j] / (1 - share[i]) + share[j] * share[i] / (1 - share[j])
        for i in range(3)
        for j in range(i)
    }
    draws = 4000
    counts = Counter(schedule.selected(t, {0: norms}) for t in range(draws))
    for pair, probability in expected.items():
        deviation = np.sqrt(draws * probability * (1 - probability))
        assert abs(counts[pair] - draws * probability) < 4 * deviation


def test_importance_reads_the_newest_record_before_the_step():
    schedule = Schedule("importance", n_layers=3, layers_per_step=1, refresh_every=10)
    record = {0: [1, 0, 0], 10: [0, 0, 1]}
    assert {schedule.selected(t, record) for t in range(10)} == {(0,)}
    assert {schedule.selected(t, record) for t in range(10, 20)} == {(2,)}
    assert [t for t in range(25) if schedule.refresh_due(t)] == [0, 10, 20]
    assert not any(make("cyclic").refresh_due(t) for t in range(60))


def test_importance_with_too_few_positive_norms_still_selects_k_layers():
    schedule = Schedule("importance", n_layers=4, layers_per_step=3)
    selections = [schedule.selected(t, {0: [0, 1, 0, 0]}) for t in range(60)]
    assert all(1 in s and len(s) == 3 for s in selections)
    assert len(set(selections)) == 3


@pytest.mark.parametrize("name", ["importance", "greedy"])
def test_missing_and_bad_measurements_are_refused(name):
    with pytest.raises(
        ValueError, match=rf"'{name}' needs gradient norms recorded at or before step 4, found none"
    ):
        make(name).selected(4, {5: np.ones(N)})
    for bad in (np.ones(N - 1), np.full(N, np.nan), -np.ones(N)):
        with pytest.raises(ValueError, match="finite non-negative gradient norms"):
            make(name).selected(4, {0: bad})


def test_greedy_takes_the_block_of_largest_norm():
    schedule = Schedule("greedy", n_layers=4, layers_per_step=2)
    assert schedule.selected(0, {0: [3, 3, 4, 0]}) == (0, 1)  # sqrt(18) > 4
    assert schedule.selected(0, {0: [2, 3, 4, 0]}) == (2, 3)
    assert schedule.block_index(0, {0: [2, 3, 4, 0]}) == 1


def test_depth_weighted_prefers_deep_layers_and_exponent_zero_is_uniform():
    def share(exponent):
        schedule = Schedule("depth-weighted", n_layers=4, layers_per_step=1, depth_exponent=exponent)
        counts = Counter(schedule.selected(t)[0] for t in range(4000))
        return np.array([counts[i] for i in range(4)]) / 4000

    assert np.allclose(share(1.0), np.arange(1, 5) / 10, atol=0.03)  # four standard deviations
    assert np.allclose(share(0.0), 0.25, atol=0.03)


def test_fixed():
    schedule = make("fixed")
    assert {schedule.selected(t) for t in range(5)} == {(1, 5)}
    assert schedule.blocks == ((1, 5),) and schedule.cycle_length == 1 and schedule.block_index(3) == 0


def test_adaptive_changes_k_at_cycle_ends_only():
    schedule = Schedule("adaptive", n_layers=8, layers_per_step=2, min_cosine=0.5)
    low = {1: [0.9, 0.2]}
    assert [schedule.layers_per_step_at(t, low) for t in range(8)] == [2, 2, 2, 2, 4, 4, 4, 4]
    assert [schedule.selected(t, low) for t in range(4, 6)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    # A record from before the change is not used twice; a later one is.
    assert schedule.layers_per_step_at(30, low) == 4
    assert schedule.layers_per_step_at(6, {**low, 5: [0.1]}) == 8
    high = {0: [0.95, 0.9]}
    assert [schedule.layers_per_step_at(t, high) for t in range(6)] == [2, 2, 2, 2, 1, 1]
    assert schedule.layers_per_step_at(9, {0: [0.6]}) == 2
    assert [schedule.selected(t) for t in range(6)] == [
        Schedule("cyclic", n_layers=8, layers_per_step=2).selected(t) for t in range(6)
    ]


def test_adaptive_stays_in_range_and_visits_every_layer_each_cycle():
    for value, bound in ((0.01, 8), (0.99, 1)):
        schedule = Schedule("adaptive", n_layers=8, layers_per_step=3)
        record = {t: [value] for t in range(80)}
        assert schedule.layers_per_step_at(79, record) == bound
        t = 0
        while t < 60:
            assert schedule.block_index(t, record) == 0
            end = next(s for s in range(t + 1, 100) if schedule.block_index(s, record) == 0)
            assert [x for s in range(t, end) for x in schedule.selected(s, record)] == list(range(8))
            t = end


def test_adaptive_by_time_budget():
    schedule = Schedule("adaptive", n_layers=8, layers_per_step=4, seconds_per_step=1.0)
    assert schedule.layers_per_step_at(2, {0: 1.5}) == 2
    assert schedule.layers_per_step_at(2, {0: 0.4}) == 8
    assert schedule.layers_per_step_at(2, {0: 0.8}) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cylic"}, "did you mean 'cyclic'"),
        ({"name": "depth_weighted"}, "did you mean 'depth-weighted'"),
        ({"layers_per_step": 8}, "layers_per_step is 8, expected 1 to 7"),
        ({"layers_per_step": 0}, "layers_per_step is 0, expected 1 to 7"),
        ({"seed": -1}, "seed is -1"),
        ({"name": "fixed"}, "needs fixed_layers"),
        ({"name": "fixed", "fixed_layers": (7,)}, "expected distinct layers between 0 and 6"),
        ({"name": "fixed", "fixed_layers": (1, 1)}, "expected distinct layers"),
        ({"fixed_layers": (1,)}, "is for the schedule 'fixed'"),
        ({"min_cosine": 1.0}, "min_cosine is 1.0"),
        ({"refresh_every": 0}, "refresh_every is 0"),
        ({"seconds_per_step": 0.0}, "seconds_per_step is 0.0"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**{"n_layers": N, **arguments})


def test_adaptive_refuses_what_is_no_cosine():
    with pytest.raises(ValueError, match="expected cosines between -1 and 1"):
        make("adaptive").selected(9, {0: [3.0]})


def test_bad_step():
    with pytest.raises(ValueError, match="step is -1"):
        make("cyclic").selected(-1)
