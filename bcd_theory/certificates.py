"""Worst cases by performance estimation, next to the theorems (extra `pep`).

Each function builds the semidefinite program whose value is the exact worst case of a method over a class of
functions (an upper bound of it where the class has no known interpolation conditions, as block-smooth convex
functions), solves it, and sets it beside the theorem's value: T2 with biased gradients, T6 and T6b with momentum,
T3 and Nesterov for random blocks, Beck and Tetruashvili for convex ones. Kamri, Hendrickx and Glineur, arXiv
2211.12604, treat the convex cyclic case.

Only multipliers read from the constraints themselves are used: the tables of PEPit's block-smooth classes are built as
[[]] * n, one list shared by all rows, and cannot be read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bcd_theory.stepsize import BOUNDS

SOLVER: Final = "CLARABEL"
# The Gram matrices of block methods have no interior (blocks are orthogonal), which stops CLARABEL short of its usual
# 1e-8: it is asked for 1e-6 and more regularisation, and the answer is checked against TOLERANCE.
SOLVER_OPTIONS: Final = {
    "tol_gap_abs": 1e-6,
    "tol_gap_rel": 1e-6,
    "tol_feas": 1e-6,
    "static_regularization_constant": 1e-7,
    "max_iter": 500,
}
TOLERANCE: Final = 1e-5


class SolverError(RuntimeError):
    """The solver's answer is not one to build on: wrong status, open duality gap, or multipliers of wrong sign."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A worst case and what a theorem says about it.

    Attributes:
        name: method and class of functions.
        value: worst case, by the dual: the sum that the multipliers prove.
        theorem, bound_id: the theorem's value at the same settings, and its id; None if no theorem applies.
        status, solver: the solver's own words.
        gap: dual less primal value. least_multiplier: of an inequality, at least 0 up to rounding.
        least_eigenvalue: of the dual's matrix, at least 0 up to rounding.
        settings: arguments.
    """

    name: str
    value: float
    theorem: float | None
    bound_id: str | None
    status: str
    solver: str
    gap: float
    least_multiplier: float
    least_eigenvalue: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def looseness(self) -> float | None:
        """theorem / value: 1 if the theorem is tight for this class; None without a theorem."""
        return None if self.theorem is None else self.theorem / self.value


def _pepit() -> Any:
    try:
        import PEPit
    except ImportError:
        raise ImportError("worst cases need the extra 'pep': pip install 'lcsb[pep]'") from None
    return PEPit


def _solve(
    problem: Any, name: str, bound_id: str | None, theorem: float | None, **settings: Any
) -> Certificate:
    try:
        value = problem.solve(wrapper="cvxpy", solver=SOLVER, verbose=0, **SOLVER_OPTIONS)
    except Exception as error:
        # cvxpy's own SolverError, which is PEPit's dependency and not ours to import.
        if type(error).__name__ != "SolverError":
            raise
        raise SolverError(f"{name}: {SOLVER} failed: {error}") from error
    status = str(problem.wrapper.prob.status)
    check_status(name, status)
    multipliers = [
        float(constraint.eval_dual())
        for constraint in problem._list_of_prepared_constraints
        if constraint.equality_or_inequality == "inequality"
    ]
    certificate = Certificate(
        name=name,
        value=float(value),
        theorem=theorem,
        bound_id=bound_id,
        status=status,
        solver=str(problem.wrapper.solver_name),
        gap=float(value - problem.objective.eval()),
        least_multiplier=min(multipliers, default=0.0),
        least_eigenvalue=float(np.linalg.eigvalsh(problem.residual)[0]),
        settings=settings,
    )
    check_residuals(certificate)
    return certificate


def check_status(name: str, status: str) -> None:
    """Raise SolverError unless the status is plainly 'optimal' ('optimal_inaccurate' is refused)."""
    if status != "optimal":
        raise SolverError(f"{name}: the solver says {status!r}, expected 'optimal'")


def check_residuals(certificate: Certificate) -> None:
    """Raise SolverError if the primal and dual values differ or a multiplier has the wrong sign."""
    scale = max(abs(certificate.value), 1.0)
    for what, size in (
        ("duality gap", abs(certificate.gap)),
        ("negative multiplier", -certificate.least_multiplier),
        ("negative eigenvalue of the dual matrix", -certificate.least_eigenvalue),
    ):
        if not size <= TOLERANCE * scale:
            raise SolverError(f"{certificate.name}: {what} of {size:.1e} at value {certificate.value:.6g}")


# --- the method --------------------------------------------------------------------------------------------


def _step(
    problem: Any,
    function: Any,
    partition: Any,
    x: Any,
    momenta: list[Any],
    block: int,
    learning_rate: float,
    delta: float,
    momentum: float,
    idle: str,
) -> Any:
    """One step on one block; `momenta` is updated in place."""
    gradient = partition.get_block(function.gradient(x), block)
    if delta > 0:
        error = partition.get_block(_pepit().Point(), block)
        problem.add_constraint(error**2 <= delta**2 * gradient**2)
        gradient = gradient + error
    for i in range(len(momenta)):
        if i == block:
            momenta[i] = momentum * momenta[i] + (1 - momentum) * gradient
        elif idle == "momentum":
            momenta[i] = momentum * momenta[i]
    for i in range(len(momenta)):
        if i == block or idle == "momentum":
            x = x - learning_rate * momenta[i]
    return x


def cyclic_nonconvex(
    blocks: int,
    learning_rate: float,
    cycles: int = 1,
    *,
    smoothness: float = 1.0,
    delta: float = 0.0,
    momentum: float = 0.0,
    idle: str = "frozen",
) -> Certificate:
    """Mean squared gradient at the starts of K cycles over all L-smooth f with f(x^0) - inf f <= 1 (all L_i = L).

    Beside T2 (momentum = 0), T6-cycles (idle momentum) or T6b-sharp-cycles over K (frozen). The learning rate is eta;
    the class holds every L-smooth function that stays above its infimum, and nothing else.

    Raises:
        ValueError: momentum together with delta, of which no theorem speaks. SolverError, ImportError.
    """
    if momentum > 0 and delta > 0:
        raise ValueError("no theorem covers biased gradients with momentum: give delta or momentum, not both")
    pepit = _pepit()
    from PEPit.functions import SmoothFunction

    problem = pepit.PEP()
    partition = problem.declare_block_partition(d=blocks)
    function = problem.declare_function(SmoothFunction, L=smoothness)
    x = problem.set_initial_point()
    infimum = pepit.Expression()
    problem.set_initial_condition(function(x) - infimum <= 1)
    momenta = [0 * x for _ in range(blocks)]
    squares = []
    for _ in range(cycles):
        squares.append(function.gradient(x) ** 2)
        for block in range(blocks):
            x = _step(problem, function, partition, x, momenta, block, learning_rate, delta, momentum, idle)
    function.gradient(x)
    # f >= inf f everywhere: each point's own descent step stays above it.
    for _, gradient, value in function.list_of_points:
        problem.add_constraint(value - gradient**2 / (2 * smoothness) >= infimum)
    problem.set_performance_metric(sum(squares[1:], squares[0]) / cycles)

    values: dict[str, Any] = {
        "eta": learning_rate,
        "L": smoothness,
        "L_max": smoothness,
        "p": blocks,
        "K": cycles,
        "f0": 1.0,
        "fstar": 0.0,
        "delta": delta,
        "beta": momentum,
    }
    bound_id = "T2" if momentum == 0 else {"momentum": "T6-cycles", "frozen": "T6b-sharp-cycles"}[idle]
    bound = BOUNDS[bound_id]
    theorem = float(bound.evaluate(**{name: values[name] for name in bound.variables}))
    theorem /= cycles if bound_id == "T6b-sharp-cycles" else 1
    settings: dict[str, Any] = {
        "blocks": blocks,
        "learning_rate": learning_rate,
        "cycles": cycles,
        "delta": delta,
    }
    settings |= {"momentum": momentum, "idle": idle, "smoothness": smoothness}
    return _solve(problem, f"cyclic, L-smooth, {bound_id}", bound_id, theorem, **settings)


def cyclic_convex(
    block_smoothness: Sequence[float], cycles: int = 1, *, level_set: bool = True
) -> Certificate:
    """f - f* after K cycles at eta = 1/L_i over block-smooth convex f with |x^0 - x*| <= 1.

    level_set: every iterate is kept within 1 of x*, as the level set's radius in Beck and Tetruashvili's theorem
    does; their rate (with T2's factor, joint smoothness at most sum L_i) stands beside it if all L_i are equal.
    Without it only the start is, and no theorem here applies.
    """
    pepit = _pepit()
    from PEPit.functions import BlockSmoothConvexFunctionCheap

    constants = [float(constant) for constant in block_smoothness]
    blocks = len(constants)
    problem = pepit.PEP()
    partition = problem.declare_block_partition(d=blocks)
    function = problem.declare_function(BlockSmoothConvexFunctionCheap, L=constants, partition=partition)
    minimiser = function.stationary_point()
    x = problem.set_initial_point()
    problem.set_initial_condition((x - minimiser) ** 2 <= 1)
    momenta = [0 * x for _ in constants]
    for step in range(cycles * blocks):
        block = step % blocks
        x = _step(problem, function, partition, x, momenta, block, 1 / constants[block], 0.0, 0.0, "frozen")
        if level_set:
            problem.add_constraint((x - minimiser) ** 2 <= 1)
    problem.set_performance_metric(function(x) - function(minimiser))
    theorem = None
    if level_set and len(set(constants)) == 1:
        bound = BOUNDS["Beck-Tetruashvili-sharp"]
        theorem = float(bound.evaluate(L=sum(constants), L_max=constants[0], p=blocks, K=cycles, R=1.0))
    settings = {"block_smoothness": constants, "cycles": cycles, "level_set": level_set}
    bound_id = None if theorem is None else "Beck-Tetruashvili-sharp"
    return _solve(problem, "cyclic, block-smooth convex", bound_id, theorem, **settings)


def random_strongly_convex(
    blocks: int, learning_rate: float, *, smoothness: float = 1.0, pl_constant: float = 0.1
) -> Certificate:
    """E[f - f*] after one random block step over L-smooth mu-strongly convex f with f(x^0) - f* <= 1 (T3-random)."""
    pepit = _pepit()
    from PEPit.functions import SmoothStronglyConvexFunction

    problem = pepit.PEP()
    partition = problem.declare_block_partition(d=blocks)
    function = problem.declare_function(SmoothStronglyConvexFunction, mu=pl_constant, L=smoothness)
    minimiser = function.stationary_point()
    x = problem.set_initial_point()
    problem.set_initial_condition(function(x) - function(minimiser) <= 1)
    gradient = function.gradient(x)
    after = [function(x - learning_rate * partition.get_block(gradient, block)) for block in range(blocks)]
    problem.set_performance_metric(sum(after[1:], after[0]) / blocks - function(minimiser))
    theorem = BOUNDS["T3-random"].evaluate(
        eta=learning_rate, L_max=smoothness, p=blocks, mu=pl_constant, f0=1.0, fstar=0.0, T=1
    )
    settings = {
        "blocks": blocks,
        "learning_rate": learning_rate,
        "smoothness": smoothness,
        "pl_constant": pl_constant,
    }
    return _solve(problem, "random, strongly convex", "T3-random", float(theorem), **settings)


def random_convex(block_smoothness: Sequence[float]) -> Certificate:
    """E[f - f*] after one random step at 1/L_i over block-smooth convex f, beside Nesterov's rate.

    The start has sum L_i |x_i - x*_i|^2 <= 1.
    """
    pepit = _pepit()
    from PEPit.functions import BlockSmoothConvexFunctionCheap

    constants = [float(constant) for constant in block_smoothness]
    blocks = len(constants)
    problem = pepit.PEP()
    partition = problem.declare_block_partition(d=blocks)
    function = problem.declare_function(BlockSmoothConvexFunctionCheap, L=constants, partition=partition)
    minimiser = function.stationary_point()
    x = problem.set_initial_point()
    away = x - minimiser
    parts = [constants[block] * partition.get_block(away, block) ** 2 for block in range(blocks)]
    problem.set_initial_condition(sum(parts[1:], parts[0]) <= 1)
    gradient = function.gradient(x)
    after = [
        function(x - 1 / constants[block] * partition.get_block(gradient, block)) for block in range(blocks)
    ]
    problem.set_performance_metric(sum(after[1:], after[0]) / blocks - function(minimiser))
    theorem = float(BOUNDS["Nesterov"].evaluate(p=blocks, T=1, R1=1.0))
    settings = {"block_smoothness": constants}
    return _solve(problem, "random, block-smooth convex", "Nesterov", theorem, **settings)


def gradient_descent_distance(
    learning_rate: float, smoothness: float = 1.0, strong: float = 0.1
) -> Certificate:
    """|x^1 - x*|^2 of one gradient step over L-smooth mu-strongly convex f from |x^0 - x*| <= 1.

    Known to be max((1 - mu eta)^2, (1 - L eta)^2): a check of solver and library.
    """
    pepit = _pepit()
    from PEPit.functions import SmoothStronglyConvexFunction

    problem = pepit.PEP()
    function = problem.declare_function(SmoothStronglyConvexFunction, mu=strong, L=smoothness)
    minimiser = function.stationary_point()
    x = problem.set_initial_point()
    problem.set_initial_condition((x - minimiser) ** 2 <= 1)
    problem.set_performance_metric((x - learning_rate * function.gradient(x) - minimiser) ** 2)
    theorem = max((1 - strong * learning_rate) ** 2, (1 - smoothness * learning_rate) ** 2)
    settings = {"learning_rate": learning_rate, "smoothness": smoothness, "strong": strong}
    return _solve(problem, "gradient descent, strongly convex", None, theorem, **settings)
