from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from bcd_theory.partition import Partition
from simulations.problems import Quadratic, coupled
from simulations.runner import ORDERS, Arm, block_sequence, run

_spec = importlib.util.spec_from_file_location(
    "loop_reference", Path(__file__).with_name("loop_reference.py")
)
assert _spec and _spec.loader
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-ema", "heavy-ball", "adamw"])
@pytest.mark.parametrize("idle", ["momentum", "frozen"])
@pytest.mark.parametrize("order", ["full", "cyclic", "reversed", "shuffled", "random"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_runner_agrees_with_the_loop(optimizer, idle, order, interleaved):
    rng = np.random.default_rng(3)
    problem = coupled(7, 3, 0.5, 10.0, rng)
    if interleaved:
        problem = Quadratic(problem.A, Partition([[0, 3, 6], [1, 4], [2, 5]]))
    arm = Arm("a", optimizer, idle, order, 0.8, (0.8, 0.95), 1e-6, 0.03)
    start, eta = rng.normal(size=(7, 4)), np.array([0.02, 0.05, 0.1, 0.2])
    found = run(problem, arm, start, eta, 25)
    sequence = block_sequence(arm, problem.partition, 25, np.arange(4))
    for r in range(4):
        steps = sequence if sequence.ndim == 1 else sequence[:, r]
        x, losses = reference.loop_run(
            problem.A,
            problem.partition.blocks,
            steps,
            start[:, r],
            eta[r],
            optimizer,
            idle,
            0.8,
            (0.8, 0.95),
            1e-6,
            0.03,
        )
        np.testing.assert_allclose(found.x[:, r].numpy(), x, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found.losses[1:, r], losses, rtol=1e-10, atol=1e-14)


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


def test_names_are_checked():
    assert "cyclic" in ORDERS
    with pytest.raises(ValueError, match="cyclc"):
        Arm("x", order="cyclc")
    with pytest.raises(ValueError, match="lion"):
        Arm("x", optimizer="lion")
