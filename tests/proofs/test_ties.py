"""The package computes what Coq proves: every formula of Formulas.v against bcd_theory, at rational points."""

from __future__ import annotations

import math
from itertools import product

import pytest
import sympy as sp

from bcd_theory import BOUNDS
from proofs import ties
from proofs.formulas import Formula, load_formulas

FORMULAS = load_formulas()
R = sp.Rational
VALUES: dict[str, tuple[sp.Rational, sp.Rational]] = {
    "eta": (R(1, 7), R(3, 10)),
    "L": (R(5, 3), R(7, 2)),
    "Lmax": (R(3, 2), R(2)),
    "L_i": (R(3, 2), R(2)),
    "delta": (R(1, 4), R(2, 5)),
    "mu": (R(1, 5), R(1, 3)),
    "beta": (R(1, 3), R(9, 10)),
    "beta1": (R(1, 3), R(9, 10)),
    "beta2": (R(3, 4), R(99, 100)),
    "a": (R(1, 2), R(4, 5)),
    "p": (R(3), R(4)),
    "q": (R(1, 4), R(2, 5)),
    "r_in": (R(1), R(5, 4)),
    "r_ad": (R(1, 2), R(3, 4)),
}
OTHERS = ((R(3, 7), R(2, 5)), (R(7, 4), R(5, 6)), (R(1, 6), R(9, 8)), (R(4, 3), R(1, 5)))
NATURALS: dict[str, tuple[int, int]] = {"N": (12, 24), "p": (3, 4), "q": (4, 7), "s": (1, 5), "j": (1, 3)}


def points(formula: Formula) -> list[tuple[object, ...]]:
    both = [
        NATURALS.get(a.name, (2, 5)) if a.is_integer else VALUES.get(a.name, OTHERS[i % 4])
        for i, a in enumerate(formula.arguments)
    ]
    firsts, seconds = tuple(x[0] for x in both), tuple(x[1] for x in both)
    mixed = tuple(x[i % 2] for i, x in enumerate(both))
    return [firsts, seconds, mixed]


def same(found: sp.Expr, expected: sp.Expr) -> bool:
    """Equal: both are exact numbers; nested roots that sympy does not untangle are compared to 80 digits."""
    difference = sp.sympify(found) - expected
    return bool(sp.simplify(difference) == 0 or abs(sp.N(difference, 80)) < sp.Float("1e-70"))


@pytest.mark.parametrize("name", sorted(ties.TIES))
def test_python_computes_the_proved_formula(name: str) -> None:
    formula = FORMULAS[name]
    for values in points(formula):
        expected, found = formula(*values), ties.TIES[name](*values)
        if isinstance(found, float):
            assert math.isclose(found, float(expected), rel_tol=1e-12), (name, values)
        else:
            assert same(found, expected), (name, values)


def test_every_formula_is_tied_or_listed_with_a_reason() -> None:
    assert set(ties.TIES) & set(ties.UNTIED_FORMULAS) == set()
    assert set(ties.TIES) | set(ties.UNTIED_FORMULAS) == set(FORMULAS)
    assert all(len(reason) > 20 for reason in ties.UNTIED_FORMULAS.values())


def test_every_bound_of_the_package_is_covered_or_listed_with_a_reason() -> None:
    assert set(ties.COVERED_BOUNDS) & set(ties.UNPROVED_BOUNDS) == set()
    assert set(BOUNDS) - set(ties.COVERED_BOUNDS) - set(ties.UNPROVED_BOUNDS) == set()
    assert set(ties.COVERED_BOUNDS) <= set(BOUNDS)
    assert set(ties.COVERED_BOUNDS.values()) <= set(ties.TIES)


def test_a_wrong_python_formula_is_seen() -> None:
    formula = FORMULAS["frozen_bound"]
    wrong = ties.TIES["frozen_total"]
    values = points(formula)[0]
    assert sp.simplify(wrong(*values[:-1]) - formula(*values)) != 0


def test_the_points_differ_in_every_argument() -> None:
    for formula in FORMULAS.values():
        for first, second in zip(*points(formula)[:2], strict=True):
            assert first != second, formula.name


@pytest.mark.parametrize(("L", "Lmax", "q"), list(product([R(2), R(3)], [R(1), R(3, 2)], [1, 4])))
def test_exact_gradients_at_the_classical_step(L: sp.Rational, Lmax: sp.Rational, q: int) -> None:
    expected = FORMULAS["cycle_bound"](5, 1, Lmax, L, 1 / Lmax, 0, q)
    found = ties._bound_at("T2-exact", f0=5, fstar=1, L=L, L_max=Lmax, p=q + 1, K=1)
    assert sp.simplify(found - expected) == 0
