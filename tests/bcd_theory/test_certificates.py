"""Worst cases by performance estimation: known values, theorems never below them, bad solver answers refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("PEPit")

from bcd_theory.audit import run
from bcd_theory.certificates import (
    Certificate,
    SolverError,
    check_residuals,
    check_status,
    cyclic_convex,
    cyclic_nonconvex,
    gradient_descent_distance,
    random_convex,
    random_strongly_convex,
)
from bcd_theory.problems import declared_problems


@pytest.mark.parametrize(("learning_rate", "factor"), [(1.0, 0.81), (0.5, 0.9025), (1.9, 0.81)])
def test_gradient_descent_distance_is_the_known_one(learning_rate: float, factor: float) -> None:
    found = gradient_descent_distance(learning_rate)
    assert found.value == pytest.approx(factor, abs=1e-5) and found.looseness == pytest.approx(1.0, abs=1e-5)
    assert found.status == "optimal" and found.solver == "CLARABEL"


@pytest.mark.parametrize(
    ("blocks", "cycles", "value"), [(2, 1, 0.22515), (2, 2, 0.15385), (2, 3, 0.11765), (3, 1, 0.44339)]
)
def test_convex_cyclic_values_measured_before(blocks: int, cycles: int, value: float) -> None:
    found = cyclic_convex([1.0] * blocks, cycles, level_set=False)
    assert found.value == pytest.approx(value, abs=1e-5)
    assert found.theorem is None and found.looseness is None


@pytest.mark.parametrize("cycles", [1, 2])
def test_beck_tetruashvili_lies_above_the_worst_case(cycles: int) -> None:
    found = cyclic_convex([1.0, 1.0], cycles)
    assert found.looseness is not None and found.looseness > 1
    assert found.value <= cyclic_convex([1.0, 1.0], cycles, level_set=False).value + 1e-7


@pytest.mark.parametrize("cycles", [1, 2, 3])
def test_t2_is_tight_for_one_block_at_the_classical_step(cycles: int) -> None:
    found = cyclic_nonconvex(1, 1.0, cycles)
    assert found.value == pytest.approx(2 / cycles, abs=1e-5)
    assert found.looseness == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": 2, "learning_rate": 1.0, "cycles": 2},
        {"blocks": 3, "learning_rate": 0.5, "cycles": 2},
        {"blocks": 4, "learning_rate": 0.5, "cycles": 2},
        {"blocks": 1, "learning_rate": 1.0, "cycles": 2, "delta": 0.3},
        {"blocks": 2, "learning_rate": 0.5, "cycles": 2, "delta": 0.3},
        {"blocks": 2, "learning_rate": 0.2, "cycles": 2, "momentum": 0.5, "idle": "momentum"},
        {"blocks": 2, "learning_rate": 0.2, "cycles": 2, "momentum": 0.5, "idle": "frozen"},
        {"blocks": 1, "learning_rate": 0.2, "cycles": 3, "momentum": 0.5, "idle": "momentum"},
    ],
)
def test_theorems_lie_above_the_nonconvex_worst_case(options: dict[str, float]) -> None:
    found = cyclic_nonconvex(**options)
    assert found.bound_id in ("T2", "T6-cycles", "T6b-sharp-cycles")
    assert found.theorem is not None and found.value <= found.theorem * (1 + 1e-6)
    assert abs(found.gap) < 1e-5


def test_bias_and_momentum_make_the_worst_case_worse() -> None:
    plain = cyclic_nonconvex(2, 0.5, 2)
    assert cyclic_nonconvex(2, 0.5, 2, delta=0.3).value > plain.value * 1.01
    assert cyclic_nonconvex(2, 0.5, 2, delta=0.02).value == pytest.approx(plain.value, rel=5e-2)
    assert cyclic_nonconvex(2, 0.2, 2, momentum=0.5).value > cyclic_nonconvex(2, 0.2, 2).value


def test_worst_case_lies_above_every_declared_quadratic() -> None:
    """f scaled to L = 1 and f(x^0) - inf f = 1 belongs to the class."""
    worst = cyclic_nonconvex(2, 0.5, 2).value
    shares = []
    for problem in declared_problems():
        if problem.family == "quadratic" and problem.p == 2:
            trace = run(problem, 0.5 / problem.smoothness, 2, lambda k: np.arange(2))
            shares.append(np.mean(trace.full2) / (problem.smoothness * (trace.value[0] - problem.infimum)))
    assert len(shares) > 20
    assert max(shares) <= worst * (1 + 1e-6)
    assert max(shares) > 0.4 * worst


def test_random_blocks() -> None:
    for blocks in (2, 3):
        found = random_strongly_convex(blocks, 1.0)
        assert found.theorem is not None and 1.0 <= found.theorem / found.value < 1.05
    # One block is gradient descent.
    assert random_strongly_convex(1, 1.0).value == pytest.approx(0.81, abs=1e-5)
    found = random_convex([1.0, 1.0])
    assert found.value == pytest.approx(np.sqrt(2) / 4, abs=1e-5) and found.looseness == pytest.approx(
        2.2627, abs=1e-3
    )


def test_doubtful_answers_are_refused() -> None:
    for status in ("optimal_inaccurate", "infeasible", "unbounded", "user_limit"):
        with pytest.raises(SolverError, match=status):
            check_status("x", status)
    good = Certificate("x", 2.0, 3.0, "T2", "optimal", "CLARABEL", 1e-9, -1e-9, -1e-9)
    check_residuals(good)
    for field in ("gap", "least_multiplier", "least_eigenvalue"):
        with pytest.raises(SolverError, match="x: "):
            check_residuals(replace(good, **{field: -1e-3}))
    with pytest.raises(SolverError, match="gap"):
        check_residuals(replace(good, gap=float("nan")))
    with pytest.raises(ValueError, match="not both"):
        cyclic_nonconvex(2, 0.1, delta=0.1, momentum=0.5)
