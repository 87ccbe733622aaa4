"""The experiment on quantised weights: limits are found by the real rule, and C6's verdict follows the windows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from bcd_theory.linear import stability_limit
from bcd_theory.momentum import steady_movement
from bcd_theory.partition import equal_blocks
from simulations import quantised, windows
from simulations.problems.least_squares import LeastSquares, random_least_squares
from simulations.runner import Arm, run


@pytest.fixture(scope="module")
def record():
    """The quick experiment with fewer seeds and steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quantised.SEEDS, "quick", 3)
        patch.setitem(quantised.STEPS, "quick", 24)
        patch.setitem(quantised.LAWS, "quick", 4)
        yield quantised.EXPERIMENT.run("quick")


def edges(record, ratio, problems=quantised.PROBLEMS, arm=quantised.PAPER):
    """The record with an arm's limits at `ratio` times full's, on some problems."""
    full = {
        (row["problem"], row["base"], row["arithmetic"], row["seed"]): row["limit"]
        for row in record.of("edge")
        if row["arm"] == "full, beta1 = 0.9"
    }
    rows = []
    for row in record.rows:
        if row["kind"] == "edge" and row["arm"] == arm and row["problem"] in problems:
            scatter = 1 + 0.01 * row["seed"]
            key = (row["problem"], row["base"], row["arithmetic"], row["seed"])
            row = {**row, "limit": full[key] * ratio * scatter}
        rows.append(row)
    return dataclasses.replace(record, rows=tuple(rows))


def part(record, name):
    return next(found for found in quantised.judge(record) if name in found.name)


def test_the_laws_hold(record):
    """T11, T4: NF4 is a fixed perturbation, rounding none, and plain descent has the window of both limits."""
    _, found = record
    for name in ("Weyl", "fixed perturbation", "plain descent"):
        assert part(found, name).verdict == "supported"


def test_every_arm_has_a_limit_on_every_problem(record):
    _, found = record
    rows = found.of("edge")
    assert all(row["limit"] for row in rows)
    per_problem = {name: 2 + len(quantised.arms_on("quick", name)) - 1 for name in quantised.PROBLEMS}
    assert len(rows) == sum(per_problem.values()) * 3 * len(quantised.VARIANTS)


@pytest.mark.parametrize(
    ("ratio", "problems", "expected"),
    [
        (2.6, quantised.PROBLEMS, "supported"),  # above sqrt(p) = 2 and a step of the grid
        (2.6, ("tanh net",), "supported"),
        (2.0, quantised.PROBLEMS, "refuted"),  # a window at equal rate, none at equal movement
        (1.0, quantised.PROBLEMS, "refuted"),
        (0.3, quantised.PROBLEMS, "refuted"),
    ],
)
def test_c6_needs_a_window_at_equal_rate_and_at_equal_movement(record, ratio, problems, expected):
    """T9: full moves sqrt(p) times as far as idle momentum, so a window has to be wider than that."""
    _, found = record
    base = edges(found, 0.3)  # what is not set is no window
    verdict = part(edges(base, ratio, problems), f"C6: full diverges where LCSB does not ({quantised.PAPER})")
    assert verdict.verdict == expected
    assert verdict.counts


def test_c6_is_open_when_seeds_disagree(record):
    _, found = record
    rows = []
    for row in found.rows:
        if row["kind"] == "edge" and row["arm"] == quantised.PAPER:
            row = {**row, "limit": row["limit"] * (64.0 if row["seed"] == 0 else 1.0)}
        rows.append(row)
    assert part(dataclasses.replace(found, rows=tuple(rows)), quantised.PAPER).verdict == "inconclusive"


def test_frozen_needs_a_window_of_p(record):
    _, found = record
    assert found.predicted("movement/exact, idle frozen") == pytest.approx(2.0)
    expected = math.log2(4 / steady_movement("momentum", 4, (0.9, 0.999)))
    assert (
        found.predicted(f"movement/{quantised.PAPER}")
        == pytest.approx(expected)
        == pytest.approx(1.0, abs=1e-3)
    )


def test_an_effect_of_quantisation_would_be_seen(record):
    _, found = record
    rows = [
        {**row, "limit": row["limit"] * 2}
        if row["kind"] == "edge" and row["base"] == "nf4" and not row["arm"].startswith("full")
        else row
        for row in found.rows
    ]
    changed = part(dataclasses.replace(found, rows=tuple(rows)), "quantisation does not make")
    assert changed.verdict == "refuted" and changed.effect == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Weyl", {"smoothness": 1e3}),
        ("fixed perturbation", {"from_exact_minimiser": 1.0}),
        ("plain descent", {"full_grows": False}),
        ("plain descent", {"cyclic_falls": False}),
    ],
)
def test_each_law_can_be_refuted(record, name, values):
    _, found = record
    rows = tuple({**row, **values} if row["kind"] == "law" else row for row in found.rows)
    assert part(dataclasses.replace(found, rows=rows), name).verdict == "refuted"


# --- the search for the limit -----------------------------------------------------------------------------------


def quadratics():
    """Least squares with y = 0: quadratics whose limits T4 gives."""
    problem = random_least_squares([np.random.default_rng([5, i]) for i in range(3)], 8, 4)
    return LeastSquares(problem.W, np.zeros_like(problem.y), problem.partition)


@pytest.mark.parametrize("order", ["full", "cyclic"])
def test_the_search_finds_the_limits_of_plain_descent(order):
    """T4: within one step of the grid, 2^(1/4)."""
    problem = quadratics()
    start = np.random.default_rng(1).normal(size=(8, 3))
    found = windows.first_failure(problem, Arm("a", order=order), start, 4000, needs_progress=False)
    for edge, hessian in zip(found, problem.hessians, strict=True):
        limit = stability_limit(hessian, equal_blocks(8, 4), order=order).learning_rate
        assert edge.stable < limit < edge.failed * 1.001
        assert edge.failed / edge.stable == pytest.approx(2**0.25)
        assert edge.stable < edge.limit < edge.failed


class Steps:
    """f is a chosen function of the learning rate: x falls from 1 by rate a step, so f reads the rate off x."""

    partition = equal_blocks(1, 1)
    minimum = None
    instances = 2

    def __init__(self, final):
        self.final = final

    def value(self, x):
        return torch.where(x[0] == 1.0, torch.ones_like(x[0]), self.final((1.0 - x[0]).clamp(min=1e-9)))

    def gradient(self, x, rows, out=None):
        return torch.where(x == 1.0, 1.0, 0.0)  # one step, then rest


@pytest.mark.parametrize("needs_progress", [False, True])
def test_divergence_and_missing_progress_are_told_apart(needs_progress):
    """Between 0.1 and 1 the loss stays at 1.1 (no progress), from 1 on at 1.3 (diverged: above 1.2)."""
    problem = Steps(lambda rate: torch.where(rate < 0.1, 0.9, torch.where(rate < 0.99, 1.1, 1.3)).double())
    found = windows.first_failure(problem, Arm("a"), np.ones((1, 2)), 40, needs_progress=needs_progress)
    edge = 0.1 if needs_progress else 0.99
    assert all(one.stable < edge <= one.failed for one in found)
    assert all((one.drop < 1) == needs_progress for one in found)


def test_a_limit_outside_the_grid_is_none():
    for value in (0.5, 2.0):
        problem = Steps(lambda rate, value=value: torch.full_like(rate, value))
        found = windows.first_failure(problem, Arm("a"), np.ones((1, 2)), 40, needs_progress=False)
        assert [edge.limit for edge in found] == [None, None]


def test_a_hole_of_stability_does_not_hide_the_first_failure():
    problem = Steps(lambda rate: torch.where((rate > 0.05) & (rate < 0.2), 2.0, 0.5).double())
    (edge, _) = windows.first_failure(problem, Arm("a"), np.ones((1, 2)), 40, needs_progress=False)
    assert edge.stable <= 0.05 < edge.failed


# --- least squares ----------------------------------------------------------------------------------------------


def test_least_squares_is_what_it_says():
    problem = random_least_squares([np.random.default_rng(i) for i in range(2)], 8, 4)
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(8, 4))).requires_grad_()
    problem.value(x).sum().backward()
    for rows in (slice(0, 8), slice(2, 4), torch.tensor([1, 6])):
        np.testing.assert_allclose(problem.gradient(x.detach(), rows), x.grad[rows], rtol=1e-12, atol=1e-13)
    value = 0.5 * np.mean((problem.W[1] @ x.detach().numpy()[:, 2] - problem.y[1]) ** 2)
    assert float(problem.value(x.detach())[2]) == pytest.approx(value)
    at = torch.from_numpy(problem.minimisers)
    assert float(problem.gradient(at, slice(0, 8)).abs().max()) < 1e-12


def test_rounded_gradients_descend_to_the_same_point_nf4_to_another():
    """T11: rounding is relative to the gradient and vanishes with it; a changed weight does not."""
    exact = random_least_squares([np.random.default_rng(2)], 8, 4)
    rounded = LeastSquares(exact.W, exact.y, exact.partition, np.array([True]))
    rate = 0.5 * stability_limit(exact.hessians[0], equal_blocks(8, 4)).learning_rate
    ends = [
        run(p, Arm("c"), np.zeros(8), rate, 4000, record_every=4000).x
        for p in (exact, rounded, exact.quantised())
    ]
    away = [float((end - torch.from_numpy(exact.minimisers)).norm()) for end in ends]
    assert away[0] < 1e-10 and away[1] < 1e-6 and away[2] > 1e-2
    assert not torch.equal(ends[0], ends[1])
