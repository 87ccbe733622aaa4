from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from bcd_theory.partition import Partition
from simulations.arms import importance_draws
from simulations.problems import Quadratic, coupled
from simulations.problems.own import OwnQuadratics
from simulations.runner import ORDERS, Arm, block_sequence, grid, run

_spec = importlib.util.spec_from_file_location(
    "loop_reference", Path(__file__).with_name("loop_reference.py")
)
assert _spec and _spec.loader
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

OPTIMIZERS = ("sgd", "sgd-ema", "heavy-ball", "adamw")
STEPS = 25


def looped(a, partition, arm, seed, start, eta, steps=STEPS):
    sequence = block_sequence(arm, partition, steps, [seed])
    blocks = partition.blocks
    draws = importance_draws(arm, steps, seed) if arm.order == "importance" else None
    if sequence is None:
        return reference.loop_run(a, blocks, steps, start, eta, arm, draws)
    return reference.loop_run(a, blocks, sequence.reshape(steps), start, eta, arm)


def compare(found, r, x, losses):
    scale = max(losses.max(), found.losses[0, r])
    np.testing.assert_allclose(found.x[:, r].numpy(), x, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.losses[1:, r], losses, rtol=1e-10, atol=1e-14 * scale)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("idle", ["momentum", "frozen"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("decay", [0.0, 0.03])
def test_the_runner_agrees_with_the_loop(optimizer, idle, order, decay):
    rng = np.random.default_rng(3)
    problem = coupled(7, 3, 0.5, 10.0, rng)
    arm = Arm("a", optimizer, idle, order, 0.8, (0.8, 0.95), 1e-6, decay)
    start, eta = rng.normal(size=(7, 4)), np.array([0.02, 0.05, 0.1, 0.2])
    found = run(problem, arm, start, eta, STEPS)
    for r in range(4):
        x, losses, _ = looped(problem.A, problem.partition, arm, r, start[:, r], eta[r])
        compare(found, r, x, losses)


ALL_ARMS = [
    Arm(f"{optimizer} {idle} {order}", optimizer, idle, order, momentum, (0.8, 0.95), 1e-6, decay)
    for (optimizer, idle, order), (momentum, decay) in zip(
        product(OPTIMIZERS, ("momentum", "frozen"), ORDERS),
        [(0.8, 0.0), (0.6, 0.03), (0.0, 0.1)] * 99,
        strict=False,
    )
]


@pytest.mark.parametrize("own", [False, True])
def test_all_arms_in_one_program_agree_with_the_loop(own):
    """Every optimiser, idle policy and order, with two rates and two seeds, as the columns of one call."""
    rng = np.random.default_rng(4)
    shared = coupled(7, 3, 0.5, 10.0, rng)
    columns = grid(ALL_ARMS, [0.03, 0.15], [5, 11])
    assert columns.shape == (64, 2, 2)
    runs = len(columns.arms)
    start = rng.normal(size=(7, runs))
    a = np.stack([coupled(7, 3, 0.5, 10.0, rng).A for _ in range(runs)]) if own else shared.A
    problem = OwnQuadratics(a, shared.partition) if own else shared
    found = run(problem, columns.arms, start, columns.learning_rates, STEPS, seeds=columns.seeds)
    assert found.losses.reshape(-1, *columns.shape).shape == (STEPS + 1, 64, 2, 2)
    for r, arm in enumerate(columns.arms):
        x, losses, _ = looped(
            a[r] if own else a,
            shared.partition,
            arm,
            int(columns.seeds[r]),
            start[:, r],
            columns.learning_rates[r],
        )
        compare(found, r, x, losses)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("order", ["cyclic", "full", "interleaved"])
def test_arms_of_one_order_in_one_program_agree_with_the_loop(order, own):
    """All runs visit the same blocks, so the program reads block gradients; optimisers and idle policies differ."""
    arms = [arm for arm in ALL_ARMS if arm.order == order]
    assert len(arms) == 8
    rng = np.random.default_rng(5)
    shared = coupled(8, 3, 0.5, 10.0, rng)
    a = np.stack([coupled(8, 3, 0.5, 10.0, rng).A for _ in arms]) if own else shared.A
    problem = OwnQuadratics(a, shared.partition) if own else shared
    start = rng.normal(size=(8, len(arms)))
    found = run(problem, arms, start, 0.1, STEPS)
    for r, arm in enumerate(arms):
        x, losses, _ = looped(a[r] if own else a, shared.partition, arm, r, start[:, r], 0.1)
        compare(found, r, x, losses)


@pytest.mark.parametrize("every", [1, 3, 4, 100])
@pytest.mark.parametrize("order", ["cyclic", "reversed", "interleaved", "sequence"])
@pytest.mark.parametrize("blocks", [((0, 3, 6), (1, 4), (2, 5)), ((0, 1, 2), (3, 4), (5, 6)), None])
def test_plain_descent_agrees_with_the_loop(every, order, blocks):
    """The program of its own, over several cycles, a last cycle cut short, rates that fall, vanish and grow."""
    rng = np.random.default_rng(6)
    problem = coupled(7, 3, 0.5, 10.0, rng)
    partition = Partition([[i] for i in range(7)] if blocks is None else blocks)
    problem = Quadratic(problem.A, partition)
    arm = Arm("a", order="cyclic" if order == "sequence" else order)
    if order == "sequence":
        arm = replace(arm, sequence=(1, 1, 0, 2, 1))
    start, eta = rng.normal(size=(7, 5)), np.array([0.0, 0.3, 1.2, 2.2, 4.0])
    steps = 107
    found = run(problem, arm, start, eta, steps, record_every=every)
    assert found.at.tolist() == list(range(0, steps + 1, every)) and len(found.losses) == len(found.at)
    for r in range(5):
        x, losses, _ = looped(problem.A, partition, arm, r, start[:, r], eta[r], steps)
        kept = np.concatenate([[found.losses[0, r]], losses])[found.at]
        np.testing.assert_allclose(found.losses[:, r], kept, rtol=1e-10)
        np.testing.assert_allclose(found.x[:, r].numpy(), x, rtol=1e-9, atol=1e-12 * max(1.0, abs(x).max()))


def test_losses_that_vanish_in_one_cycle_stay_accurate():
    """Uncoupled blocks at exactly 1/L_i: a forward sum of changes would leave rounding of the start's size."""
    problem = Quadratic(np.diag([1.0, 1.0, 1.0, 1e-24]), Partition([[0], [1], [2], [3]]))
    found = run(problem, Arm("a"), np.ones(4), 1.0, 8)
    np.testing.assert_allclose(found.losses[1:4, 0], [1.0, 0.5, 5e-25], rtol=1e-12)
    assert (found.losses >= 0).all()


def test_an_overflowing_run_leaves_the_others_and_its_own_past():
    problem = Quadratic(np.eye(4), Partition([[0], [1], [2], [3]]))
    found = run(problem, Arm("a"), np.ones((4, 2)), [1e60, 0.5], 64)
    assert not np.isfinite(found.losses[-1, 0]) and np.isfinite(found.losses[:, 1]).all()
    np.testing.assert_allclose(found.losses[1, 0], 0.5 * (3 + 1e120), rtol=1e-12)


def test_the_slow_path_and_plain_descent_agree():
    """An observer takes the general program; it sees x and changes nothing."""
    problem = coupled(12, 4, 0.6, 50.0, np.random.default_rng(7))
    seen = []
    slow = run(problem, Arm("a"), np.ones(12), 0.7, 90, observe=lambda t, x, m: seen.append((t, m)))
    fast = run(problem, Arm("a"), np.ones(12), 0.7, 90)
    assert seen == [(t, None) for t in range(90)]
    np.testing.assert_allclose(fast.losses, slow.losses, rtol=1e-12)


def test_noise_is_added_to_the_gradient_that_is_read():
    problem = Quadratic(np.zeros((4, 4)), Partition([[0, 1], [2, 3]]))
    for arms in (Arm("a"), [Arm("a"), Arm("r", order="reversed")]):
        found = run(
            problem, arms, np.zeros((4, 2)), 1.0, 1, noise=lambda t: torch.ones(4, 2, dtype=torch.float64)
        )
        np.testing.assert_array_equal(found.x[:, 0].numpy(), [-1, -1, 0, 0])
    np.testing.assert_array_equal(found.x[:, 1].numpy(), [0, 0, -1, -1])


def test_greedy_takes_the_block_of_the_largest_gradient():
    problem = Quadratic(np.diag([1.0, 2.0, 4.0]), Partition([[0], [1], [2]]))
    found = run(problem, Arm("g", order="greedy"), np.ones(3), 0.1, 1)
    np.testing.assert_allclose(found.x[:, 0].numpy(), [1.0, 1.0, 0.6])


def test_importance_draws_in_proportion_to_the_gradient_norm():
    problem = Quadratic(np.diag([1.0, 3.0]), Partition([[0], [1]]))
    found = run(problem, Arm("i", order="importance"), np.ones((2, 2000)), 0.1, 1)
    share = float((found.x[1] < 1).double().mean())
    assert abs(share - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 2000)


def test_shuffled_visits_each_block_once_a_cycle():
    problem = coupled(8, 4, 0.1, 2.0, np.random.default_rng(0))
    sequence = block_sequence(Arm("s", order="shuffled"), problem.partition, 12, [5])
    for cycle in sequence[:, 0].reshape(3, 4):
        assert sorted(cycle) == [0, 1, 2, 3]


def test_one_block_is_gradient_descent():
    problem = coupled(6, 1, 0.5, 10.0, np.random.default_rng(8))
    for order in ORDERS:
        x = run(problem, Arm("a", order=order), np.ones(6), 0.4, 10).x[:, 0].numpy()
        np.testing.assert_allclose(x, np.linalg.matrix_power(np.eye(6) - 0.4 * problem.A, 10) @ np.ones(6))


def test_threads_are_given_back():
    before = torch.get_num_threads()
    problem = coupled(6, 2, 0.5, 10.0, np.random.default_rng(8))
    seen = []
    torch.set_num_threads(2)
    try:
        run(
            problem,
            Arm("a"),
            np.ones(6),
            0.4,
            1,
            observe=lambda t, x, m: seen.append(torch.get_num_threads()),
        )
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_names_and_numbers_are_checked():
    with pytest.raises(ValueError, match="nearest: cyclic"):
        Arm("x", order="cyclc")
    with pytest.raises(ValueError, match="lion"):
        Arm("x", optimizer="lion")
    with pytest.raises(ValueError, match=r"betas is 1\.0"):
        Arm("x", betas=(0.9, 1.0))
    problem = coupled(6, 2, 0.5, 10.0, np.random.default_rng(8))
    with pytest.raises(ValueError, match="names block 2, expected 0 to 1"):
        run(problem, Arm("x", sequence=(0, 2)), np.ones(6), 0.1, 1)
    with pytest.raises(ValueError, match="arms 2"):
        run(problem, [Arm("x"), Arm("y")], np.ones((6, 3)), 0.1, 1)
    with pytest.raises(ValueError, match="holds 4 runs, found 3"):
        run(OwnQuadratics(np.stack([problem.A] * 4), problem.partition), Arm("x"), np.ones((6, 3)), 0.1, 1)
    with pytest.raises(ValueError, match="seeds has shape"):
        run(problem, Arm("x"), np.ones(6), 0.1, 1, seeds=[1, 2])
