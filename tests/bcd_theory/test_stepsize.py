"""Bounds: values against formulas written out here, derivations, limiting cases, and the declared problems."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import sympy

from bcd_theory.audit import NOT_TESTABLE, Case, cases, ratio, stored_tightness, tightness
from bcd_theory.bounds import VARIABLES, Formula, Step, symbol
from bcd_theory.problems import PL_OF_H, declared_problems
from bcd_theory.stepsize import BOUNDS

ROUNDING = 1e-7
sqrt, exp = math.sqrt, math.exp


def star(a: float, d: float) -> float:
    return min((1 - d) * (1 - a * (1 - d) / 2), (1 + d) * (1 - a * (1 + d) / 2))


# The theorems once more, as plain Python.
FORMULAS = {
    "T1": lambda eta, L_i, g2: eta * (1 - eta * L_i / 2) * g2,
    "T2-step": lambda eta, L_max, delta, g2: eta * star(eta * L_max, delta) * g2,
    "T2-cycle": lambda eta, L, p, delta, S: (1 + sqrt(p - 1) * L * eta * (1 + delta)) ** 2 * S,
    "T2": lambda eta, L, L_max, p, delta, f0, fstar, K: (
        (1 + sqrt(p - 1) * L * eta * (1 + delta)) ** 2 * (f0 - fstar) / (eta * star(eta * L_max, delta) * K)
    ),
    "T2-exact": lambda L, L_max, p, f0, fstar, K: 2 * L_max * (1 + sqrt(p - 1) * L / L_max) ** 2 * (f0 - fstar) / K,
    "T2-textbook-step": lambda eta, L_max, delta, g2: eta * (1 - delta - eta * L_max * (1 + delta) ** 2 / 2) * g2,
    "T2-textbook-cycle": lambda eta, L, p, delta, S: 2 * (1 + p * (L * eta * (1 + delta)) ** 2) * S,
    "T2-textbook": lambda eta, L, L_max, p, delta, f0, fstar, K: (
        2 * (1 + p * (L * eta * (1 + delta)) ** 2) * (f0 - fstar)
        / (eta * (1 - delta - eta * L_max * (1 + delta) ** 2 / 2) * K)
    ),
    "T2-angle": lambda eta, L_i, cosine, rho, g2: eta * rho * (cosine - eta * L_i * rho / 2) * g2,
    "T3": lambda eta, L, L_max, p, delta, mu, f0, fstar, K: (f0 - fstar)
    * (1 - 2 * mu * eta * star(eta * L_max, delta) / (1 + sqrt(p - 1) * L * eta * (1 + delta)) ** 2) ** K,
    "T3-random": lambda eta, L_max, p, mu, f0, fstar, T: (
        (1 - 2 * mu * eta * (1 - eta * L_max / 2) / p) ** T * (f0 - fstar)
    ),
    "Beck-Tetruashvili": lambda L, L_max, p, K, R: 4 * L_max * (1 + p * L**2 / L_max**2) * R**2 / (K + 8 / p),
    "Beck-Tetruashvili-sharp": lambda L, L_max, p, K, R: (
        2 * L_max * (1 + sqrt(p - 1) * L / L_max) ** 2 * R**2
        / (K + 4 * (L_max / L) * (1 + sqrt(p - 1) * L / L_max) ** 2)
    ),
    "Nesterov": lambda p, T, R1: 2 * p * R1**2 / (T + 4),
    "Nesterov-strong": lambda p, T, sigma, f0, fstar: (1 - sigma / p) ** T * (f0 - fstar),
    "T6": lambda eta, L, L_max, beta, f0, fstar: (
        (f0 - fstar) / (eta * (1 - eta * L_max / 2 - eta * beta * L / (1 - beta)))
    ),
    "T6-cyclic": lambda eta, L, L_max, beta, p, f0, fstar: (
        (f0 - fstar) / (eta * (1 - eta * L_max / 2 - kappa(beta, p) * eta * beta * L / (1 - beta)))
    ),
    "T6-cycles": lambda eta, L, L_max, beta, p, K, f0, fstar: (
        (1 + eta * L * kappa(beta, p) * sqrt(p * (p - 1) / 2)) ** 2
        * (f0 - fstar) / (eta * (1 - eta * L_max / 2 - kappa(beta, p) * eta * beta * L / (1 - beta))) / K
    ),
    "T6-corollary": lambda eta, L, L_max, beta, f0, fstar: 4 * (f0 - fstar) / eta,
    "T6b-energy": lambda eta, L_i, m2: eta * (1 - eta * L_i / 2) * m2,
    "T6b": lambda eta, L_max, beta, f0, fstar: (
        ((1 + beta) / (1 - beta)) ** 2 * (f0 - fstar) / (eta * (1 - eta * L_max / 2))
    ),
    "T6b-cycles": lambda eta, L, L_max, beta, p, f0, fstar: (
        ((1 + beta) / (1 - beta) + eta * L * sqrt(p - 1)) ** 2 * (f0 - fstar) / (eta * (1 - eta * L_max / 2))
    ),
    "T6b-sharp": lambda eta, L_max, beta, f0, fstar: frozen(eta * L_max, beta) * (f0 - fstar) / eta,
    "T6b-sharp-cycles": lambda eta, L, L_max, beta, p, f0, fstar: (
        (sqrt(frozen(eta * L_max, beta)) + eta * L * sqrt(p - 1) / sqrt(1 - eta * L_max / 2)) ** 2 * (f0 - fstar) / eta
    ),
    "T7-bias": lambda lipschitz, m: (1 + lipschitz) ** m - 1,
    "T7-bias-exponential": lambda lipschitz, m: exp(m * lipschitz) - 1,
    "T7-relative": lambda contraction, m: (1 - contraction) ** -m - 1,
    "T7-flow": lambda contraction, m: (1 - contraction) ** m,
    "T8": lambda a, b, s, L_W, G: max(
        np.linalg.eigvalsh(
            [[s**2 * L_W * b**2, s**2 * L_W * a * b + s * G], [s**2 * L_W * a * b + s * G, s**2 * L_W * a**2]]
        )
    ),
    "T8-simple": lambda a, b, s, L_W, G: s**2 * L_W * (a**2 + b**2) + s * G,
    "T8-gradient": lambda a, b, s, L_W, G: G + L_W * s * a * b,
}  # fmt: skip

LIMITS = {
    "T1": lambda L_i: 2 / L_i,
    "T2": lambda L_max, delta: 2 / (L_max * (1 + delta)),
    "T2-textbook": lambda L_max, delta: 2 * (1 - delta) / (L_max * (1 + delta) ** 2),
    "T2-angle": lambda L_i, cosine, rho: 2 * cosine / (L_i * rho),
    "T3-random": lambda L_max: 2 / L_max,
    "T6": lambda L, L_max, beta: 1 / (L_max / 2 + beta * L / (1 - beta)),
    "T6-cyclic": lambda L, L_max, beta, p: 1 / (L_max / 2 + kappa(beta, p) * beta * L / (1 - beta)),
    "T6-corollary": lambda L, L_max, beta: min(1 / (2 * L_max), (1 - beta) / (2 * beta * L)),
    "T6b": lambda L_max: 2 / L_max,
}


def frozen(a: float, beta: float) -> float:
    """Largest sum |g|^2 for a unit of energy over v in [0, u], w in [0, 4u], by search on a grid."""
    b = beta / (1 - beta)
    return max(
        (1 + b * v + b / (1 - beta) * w) / (1 - a / 2 + b / 2 * v + b / 2 * w)
        for v in np.linspace(0, 1, 5)
        for w in np.linspace(0, 4, 9)
    )


def kappa(beta: float, p: float) -> float:
    return sqrt((1 - beta) * (1 + beta**p) / ((1 + beta) * (1 - beta**p)))


def draw(rng: np.random.Generator, names: tuple[str, ...]) -> dict[str, float]:
    """Random values in each variable's interval, the learning rate small enough for every bound."""
    values = {}
    for name in names:
        variable = VARIABLES[name]
        if variable.integer:
            values[name] = float(rng.integers(1, 9))
        elif variable.high == 1.0:
            values[name] = float(rng.uniform(0.05, 0.6))
        else:
            values[name] = float(rng.uniform(0.1, 3))
    if "eta" in names:
        values["eta"] = 0.02 * float(rng.uniform(0.5, 1))
    if "f0" in names:
        values["fstar"] = -1.0
    return values


def test_every_bound_has_a_formula_here_and_an_experiment() -> None:
    assert set(FORMULAS) == set(BOUNDS)
    assert all(cases(bound_id) for bound_id in BOUNDS)


@pytest.mark.parametrize("bound_id", BOUNDS)
def test_values_equal_the_formula_written_out(bound_id: str) -> None:
    bound, rng = BOUNDS[bound_id], np.random.default_rng(7)
    draws = [draw(rng, bound.variables) for _ in range(20)]
    expected = [FORMULAS[bound_id](**values) for values in draws]
    together = {name: np.array([values[name] for values in draws]) for name in bound.variables}
    assert bound.evaluate(**together) == pytest.approx(expected, rel=1e-12)
    assert float(bound.evaluate(**draws[0])) == pytest.approx(expected[0], rel=1e-12)


@pytest.mark.parametrize("bound_id", LIMITS)
def test_largest_step_equals_its_closed_form_and_the_bound_ends_there(bound_id: str) -> None:
    bound, rng = BOUNDS[bound_id], np.random.default_rng(8)
    for _ in range(5):
        values = draw(rng, bound.variables)
        names = {free.name for free in bound.largest_step().free_symbols}
        needed = {name: values[name] for name in names}
        limit = float(bound.largest_step_at(**needed))
        assert limit == pytest.approx(LIMITS[bound_id](**needed), rel=1e-12)
        if bound.sense == "upper":
            assert np.isfinite(bound.evaluate(**{**values, "eta": limit * (1 - 1e-9)}))
            assert bound.evaluate(**{**values, "eta": limit * (1 + 1e-9)}) == np.inf
        else:
            assert bound.evaluate(**{**values, "eta": limit * (1 - 1e-9)}) > 0
            assert bound.evaluate(**{**values, "eta": limit * (1 + 1e-9)}) < 0


@pytest.mark.parametrize("bound_id", BOUNDS)
def test_each_step_of_the_derivation_checks(bound_id: str) -> None:
    steps = BOUNDS[bound_id].derivation()
    assert steps
    for step in steps:
        assert step.check(), step.words


@pytest.mark.parametrize("bound_id", BOUNDS)
def test_the_derivation_ends_in_the_bound(bound_id: str) -> None:
    """Some line's right side is the claimed expression."""
    bound = BOUNDS[bound_id]
    assert any(step.right == bound.expression for step in bound.derivation())


def test_a_wrong_step_is_caught() -> None:
    x, y = sympy.symbols("x y", real=True)
    assert Step("right", (x + y) ** 2, x**2 + 2 * x * y + y**2).check()
    assert not Step("wrong", (x + y) ** 2, x**2 + y**2).check()
    assert Step("a square", x**2 + y**2 - 2 * x * y, (x - y) ** 2, nonnegative=True).check()
    assert not Step("no sign", x + y, y + x, nonnegative=True).check()
    beta = symbol("beta")
    assert Step("below one", 1 - beta, 1 - beta, nonnegative=True).check()
    assert not Step("not below one half", 1 - 2 * beta, 1 - 2 * beta, nonnegative=True).check()


# --- limiting cases ----------------------------------------------------------------------------------------


def test_one_block_is_gradient_descent() -> None:
    f = {"f0": 3.0, "fstar": 1.0, "K": 5}
    assert BOUNDS["T2-exact"].evaluate(L=2.0, L_max=2.0, p=1, **f) == pytest.approx(2 * 2.0 * 2.0 / 5)
    general = BOUNDS["T2"].evaluate(eta=0.5, L=2.0, L_max=2.0, p=1, delta=0.0, **f)
    assert general == pytest.approx(2 * 2.0 * 2.0 / 5)
    pl = BOUNDS["T3"].evaluate(eta=0.5, L=2.0, L_max=2.0, p=1, delta=0.0, mu=0.3, **f)
    assert pl == pytest.approx(2.0 * (1 - 0.3 / 2.0) ** 5)


def test_no_momentum_is_plain_descent() -> None:
    values = {"eta": 0.3, "L": 5.0, "L_max": 2.0, "f0": 1.0, "fstar": 0.0}
    plain = 1 / (0.3 * (1 - 0.3))
    assert BOUNDS["T6"].evaluate(beta=0.0, **values) == pytest.approx(plain)
    assert BOUNDS["T6-cyclic"].evaluate(beta=0.0, p=4, **values) == pytest.approx(plain)
    frozen = {name: value for name, value in values.items() if name != "L"}
    assert BOUNDS["T6b"].evaluate(beta=0.0, **frozen) == pytest.approx(plain)
    both = BOUNDS["T6b-cycles"].evaluate(beta=0.0, p=4, **values)
    assert both == pytest.approx(BOUNDS["T2"].evaluate(delta=0.0, p=4, K=1, **values))


def test_one_block_has_no_coherence_gain() -> None:
    values = {"eta": 0.01, "L": 5.0, "L_max": 2.0, "f0": 1.0, "fstar": 0.0}
    for beta in (0.3, 0.9):
        any_order = BOUNDS["T6"].evaluate(beta=beta, **values)
        assert BOUNDS["T6-cyclic"].evaluate(beta=beta, p=1, **values) == pytest.approx(any_order)
        assert BOUNDS["T6-cyclic"].evaluate(beta=beta, p=4, **values) < any_order


def test_sharp_forms_are_never_worse() -> None:
    rng = np.random.default_rng(3)
    for sharp, textbook in (
        ("T2-step", "T2-textbook-step"),
        ("T2-cycle", "T2-textbook-cycle"),
        ("T2", "T2-textbook"),
        ("Beck-Tetruashvili-sharp", "Beck-Tetruashvili"),
        ("T6b-sharp", "T6b"),
        ("T6b-sharp-cycles", "T6b-cycles"),
        ("T8", "T8-simple"),
        ("T7-bias", "T7-bias-exponential"),
    ):
        for _ in range(50):
            values = draw(rng, BOUNDS[sharp].variables)
            if "eta" in values:
                values["eta"] = float(rng.uniform(0.01, 2))
            if "beta" in values:
                values["beta"] = float(rng.uniform(0.1, 0.99))
            if sharp.startswith("Beck"):
                values["L"] = values["L_max"] * float(rng.uniform(1, values["p"]))
            better, worse = BOUNDS[sharp].evaluate(**values), BOUNDS[textbook].evaluate(**values)
            if BOUNDS[sharp].sense == "lower":
                better, worse = -better, -worse
            assert better <= worse + 1e-12 * abs(worse), (sharp, values)


def test_equal_norms_make_both_forms_of_t8_equal() -> None:
    values = {"a": 1.7, "b": 1.7, "s": 2.0, "L_W": 0.3, "G": 5.0}
    assert BOUNDS["T8"].evaluate(**values) == pytest.approx(BOUNDS["T8-simple"].evaluate(**values))


def test_biased_limit_is_exact() -> None:
    """On x^2 / 2 with g~ = (1 + delta) g: descent just below 2/(L (1 + delta)), ascent just above."""
    for delta in (0.0, 0.3, 0.95):
        limit = float(BOUNDS["T2"].largest_step_at(L_max=1.0, delta=delta))
        for factor, descends in ((1 - 1e-6, True), (1 + 1e-6, False)):
            moved = 1 - limit * factor * (1 + delta)
            assert (moved**2 < 1) == descends


@pytest.mark.parametrize("delta", [0.0, 0.2, 0.7])
@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_one_step_bounds_are_attained(delta: float, share: float) -> None:
    eta = share * 2 / (1 + delta)
    decrease = min((1 - (1 - eta * (1 + sign * delta)) ** 2) / 2 for sign in (-1, 1))
    assert BOUNDS["T2-step"].evaluate(eta=eta, L_max=1.0, delta=delta, g2=1.0) == pytest.approx(
        decrease, rel=1e-12
    )


# --- the declared problems ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bound_id", BOUNDS)
def test_no_bound_is_violated(bound_id: str) -> None:
    bound = BOUNDS[bound_id]
    worst = max(cases(bound_id), key=lambda case: ratio(bound, case))
    assert ratio(bound, worst) <= 1 + ROUNDING, worst


@pytest.mark.parametrize("bound_id", BOUNDS)
def test_stored_tightness_is_current_and_catches_a_mutant(bound_id: str) -> None:
    bound, stored = BOUNDS[bound_id], stored_tightness()[bound_id]
    found = tightness(bound_id)
    assert found.ratio == pytest.approx(stored.ratio, rel=1e-6)
    assert found.ratio_coupled == pytest.approx(stored.ratio_coupled, rel=1e-6)
    assert found.cases == pytest.approx(stored.cases, abs=3)  # a case at the floor may fall on either side
    if not stored.testable:
        pytest.skip(f"tightness {stored.ratio:.1e} is below {NOT_TESTABLE}: not testable by sampling")
    mutant = 0.9 * stored.ratio
    shrunk = [Case(c.problem, c.observed, c.bound * (mutant if bound.sense == "upper" else 1 / mutant), c.p)
              for c in cases(bound_id)]  # fmt: skip
    assert any(ratio(bound, case) > 1 + ROUNDING for case in shrunk)
    # 1.2 c is no violation: the same test does not cry wolf.
    assert all(ratio(bound, case) / (1.2 * stored.ratio) <= 1 + ROUNDING for case in cases(bound_id))


def test_stored_table_has_every_bound_and_nothing_else() -> None:
    assert set(stored_tightness()) == set(BOUNDS)


def test_declared_problems_state_true_constants() -> None:
    """Difference quotients never exceed L and L_i, PL holds, and the infimum is not undercut."""
    rng = np.random.default_rng(5)
    for problem in declared_problems()[::3]:
        for _ in range(4):
            x = problem.start * rng.uniform(0.1, 1)
            g = problem.gradient(x)
            assert problem.value(x) >= problem.infimum - 1e-9 * abs(problem.value(x))
            if problem.pl is not None:
                assert g @ g >= 2 * problem.pl * (problem.value(x) - problem.infimum) * (1 - 1e-9)
            step = 1e-3 * rng.standard_normal(len(x))
            moved = problem.gradient(x + step)
            if problem.inside(x) and problem.inside(x + step):
                assert np.linalg.norm(moved - g) <= problem.smoothness * np.linalg.norm(step) * (1 + 1e-6)
            for block, constant in zip(problem.blocks, problem.block_smoothness, strict=True):
                along = np.zeros_like(x)
                along[block] = step[block]
                if problem.inside(x) and problem.inside(x + along):
                    change = problem.gradient(x + along)[block] - g[block]
                    assert np.linalg.norm(change) <= constant * np.linalg.norm(along) * (1 + 1e-6)
    t = np.linspace(1e-3, 20, 400_000)
    assert np.min((2 * t + 3 * np.sin(2 * t)) ** 2 / (2 * (t**2 + 3 * np.sin(t) ** 2))) >= PL_OF_H


# --- the object --------------------------------------------------------------------------------------------


def test_importing_the_bounds_does_not_import_sympy() -> None:
    code = (
        "import sys, bcd_theory.stepsize, bcd_theory.identity, bcd_theory.cost; print('sympy' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_bad_arguments_are_named() -> None:
    bound = BOUNDS["T1"]
    with pytest.raises(TypeError, match="did you mean 'L_i'"):
        bound.evaluate(eta=0.1, L_j=1.0, g2=1.0)
    with pytest.raises(TypeError, match="needs g2"):
        bound.evaluate(eta=0.1, L_i=1.0)
    with pytest.raises(ValueError, match=r"eta \(learning rate\) takes numbers in \(0, inf\)"):
        bound.evaluate(eta=0.0, L_i=1.0, g2=1.0)
    with pytest.raises(ValueError, match=r"delta .* in \[0, 1\)"):
        BOUNDS["T2-step"].evaluate(eta=0.1, L_max=1.0, delta=1.0, g2=1.0)
    with pytest.raises(ValueError, match="whole numbers"):
        BOUNDS["T7-flow"].evaluate(contraction=0.1, m=1.5)
    with pytest.raises(ValueError, match="no limit on the learning rate"):
        BOUNDS["T8"].largest_step_at(a=1.0)
    wrong = replace(bound, build=lambda: Formula(symbol("eta") * symbol("L")))
    with pytest.raises(AssertionError, match="T1 declares"):
        wrong.evaluate(eta=0.1, L_i=1.0, g2=1.0)


def test_metadata_is_complete() -> None:
    for bound_id, bound in BOUNDS.items():
        assert bound.id == bound_id and bound.assumptions and bound.source and bound.name and bound.quantity
        assert bound.kind in ("tight", "upper", "law") and bound.sense in ("upper", "lower", "equal")
        assert "\\" in bound.latex() or bound_id == "T8-gradient" or bound.latex()
        assert all(name in VARIABLES for name in bound.variables)
    with pytest.raises(TypeError):
        BOUNDS["T1"] = BOUNDS["T2"]  # type: ignore[index]
