"""Symbolic derivations: each starts from the algorithm and ends in a formula of Formulas.v.

A second road to the closed forms, independent of the Coq proofs: :func:`outcome` runs the derivation that belongs
to a claim and says whether sympy's expression and the proved formula are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import sympy as sp

from proofs.formulas import Formula, load_formulas

Pair = tuple[sp.Expr, sp.Expr]
"""(what the derivation gives, what Formulas.v says)."""

DERIVATIONS: dict[str, Callable[[dict[str, Formula]], Iterator[Pair]]] = {}


def derivation(*claims: str) -> Callable[[Callable[[dict[str, Formula]], Iterator[Pair]]], object]:
    """Register a derivation for the named claims of Statements.v."""

    def register(function: Callable[[dict[str, Formula]], Iterator[Pair]]) -> object:
        for claim in claims:
            DERIVATIONS[claim] = function
        return function

    return register


@cache
def _formulas() -> dict[str, Formula]:
    return load_formulas()


def outcome(claim: str) -> str:
    """ "checked", "none" (no derivation is written for this claim), or "failed: ..." with the difference."""
    if claim not in DERIVATIONS:
        return "none"
    return _verdict(DERIVATIONS[claim])


@cache
def _verdict(function: Callable[[dict[str, Formula]], Iterator[Pair]]) -> str:
    count = 0
    for derived, proved in function(_formulas()):
        difference = sp.simplify(derived - proved)
        if difference != 0:
            return f"failed: derivation minus formula is {difference}"
        count += 1
    return "checked" if count else "failed: the derivation yields nothing"


def _real(names: str) -> tuple[sp.Symbol, ...]:
    return tuple(sp.symbols(names, real=True))


@derivation("claim_descent")
def block_descent(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Put the step -eta g into the quadratic upper bound."""
    f0, g2, eta, L = _real("f0 g2 eta L")
    bound = f0 - eta * g2 + L / 2 * eta**2 * g2
    yield bound, f0 - formulas["descent_coeff"](eta, L) * g2


@derivation("claim_coast", "claim_coast_limit")
def coasting(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Run the recursion with zero gradient, and take its limit at a numerical momentum."""
    x0, m0, eta, beta = _real("x0 m0 eta beta")
    for steps in range(6):
        x, m = x0, m0
        for _ in range(steps):
            m = beta * m
            x = x - eta * m
        yield x, formulas["coast_position"](x0, m0, eta, beta, steps)
    n = sp.Symbol("n", integer=True, positive=True)
    for value in (sp.Rational(1, 2), sp.Rational(9, 10)):
        position = formulas["coast_position"](x0, m0, eta, value, n)
        yield sp.limit(position, n, sp.oo), formulas["coast_limit"](x0, m0, eta, value)


@derivation("claim_stable")
def momentum_stability(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Characteristic polynomial of one EMA step, and the curvature at which a root reaches -1."""
    eta, beta, lam, z = _real("eta beta lam z")
    step = sp.Matrix([[1 - eta * (1 - beta) * lam, -eta * beta], [(1 - beta) * lam, beta]])
    polynomial = z**2 - formulas["momentum_trace"](beta, eta, lam) * z + beta
    yield (z * sp.eye(2) - step).det(), polynomial
    yield sp.solve(polynomial.subs(z, -1), lam)[0] * eta, formulas["momentum_edge"](beta)


@derivation("claim_true_grad")
def two_layer_gradient(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Differentiate the two-layer residual chain of T7's counterexample."""
    x, a, b = _real("x a b")
    yield sp.diff((1 + b) * ((1 + a) * x), a), formulas["true_grad_a"](x, b)
