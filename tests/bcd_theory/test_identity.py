"""T7: every bound against random products of layer Jacobians, and where each is attained."""

from __future__ import annotations

import numpy as np
import pytest

from bcd_theory.identity import (
    bias_bound,
    bias_bound_exponential,
    check_composition,
    compose_cosines,
    composed_cosine_spread,
    cosine_bound,
    fidelity_length,
    gradient_flow_bound,
    guaranteed_share,
    layer_lipschitz,
    mlp_bias_bound,
    opened_angle,
    plan_bias_bound,
    relative_bias_bound,
    scalar_counterexample,
)

ROUNDING = 1e-12


def branch(rng: np.random.Generator, n: int, norm: float) -> np.ndarray:
    """A random matrix of spectral norm `norm`; half of the time close to a multiple of the identity."""
    matrix = rng.standard_normal((n, n))
    if rng.random() < 0.5:
        matrix = rng.choice([-1.0, 1.0]) * np.eye(n) + 0.1 * matrix
    return norm * matrix / np.linalg.norm(matrix, 2)


def chain(factors: list[np.ndarray], n: int) -> np.ndarray:
    """J_1 J_2 ... J_m: the last factor acts on the top gradient first."""
    product = np.eye(n)
    for factor in factors:
        product = product @ factor
    return product


def angle(u: np.ndarray, v: np.ndarray) -> float:
    u, v = u / np.linalg.norm(u), v / np.linalg.norm(v)
    return 2 * float(np.arctan2(np.linalg.norm(u - v), np.linalg.norm(u + v)))


@pytest.mark.parametrize("seed", range(60))
def test_bias_bounds_hold_for_random_chains(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, layers = 4, int(rng.integers(1, 7))
    constants = rng.uniform(0.01, 0.9, layers)
    jacobians = [np.eye(n) + branch(rng, n, c) for c in constants]
    kept = [j for j in range(layers) if rng.random() < 0.4]
    truth = chain(jacobians, n)
    surrogate = chain([j if i in kept else np.eye(n) for i, j in enumerate(jacobians)], n)
    top = rng.standard_normal(n)
    top /= np.linalg.norm(top)
    bias, true_norm = np.linalg.norm((truth - surrogate) @ top), np.linalg.norm(truth @ top)
    assert np.linalg.norm(truth - surrogate, 2) <= bias_bound(constants, kept) + ROUNDING
    assert bias_bound(constants, kept) <= bias_bound(constants) <= bias_bound_exponential(constants)
    assert bias / true_norm <= relative_bias_bound(constants, kept) * (1 + ROUNDING) + ROUNDING
    assert true_norm >= gradient_flow_bound(constants) - ROUNDING


@pytest.mark.parametrize("seed", range(40))
def test_plan_bias_bound_holds_for_random_branches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, layers = 3, int(rng.integers(1, 6))
    attention, mlp = rng.uniform(0, 1.5, (2, layers))
    plan = [str(grade) for grade in rng.choice(["identity", "mlp", "exact"], layers)]
    truth, surrogate = [], []
    for a, m, grade in zip(attention, mlp, plan, strict=True):
        first, second = np.eye(n) + branch(rng, n, a), np.eye(n) + branch(rng, n, m)
        truth.append(first @ second)
        surrogate.append({"exact": first @ second, "mlp": second, "identity": np.eye(n)}[grade])
    bias = np.linalg.norm(chain(truth, n) - chain(surrogate, n), 2)
    assert bias <= plan_bias_bound(attention, mlp, plan) + ROUNDING
    combined = layer_lipschitz(attention, mlp)
    assert plan_bias_bound(attention, mlp, ["identity"] * layers) == pytest.approx(bias_bound(combined))
    assert plan_bias_bound(attention, mlp, ["exact"] * layers) == pytest.approx(0.0, abs=1e-12)
    product = np.prod(1 + mlp) * (np.prod(1 + attention) - 1)
    assert mlp_bias_bound(attention, mlp) == pytest.approx(product)


def test_bounds_are_attained_by_scalar_layers() -> None:
    constants = np.array([0.3, 0.1, 0.7])
    assert bias_bound(constants) == pytest.approx(np.prod(1 + constants) - 1, rel=1e-14)
    shrinking = np.prod(1 - constants)
    assert gradient_flow_bound(constants) == pytest.approx(shrinking, rel=1e-14)
    assert relative_bias_bound(constants) == pytest.approx((1 - shrinking) / shrinking, rel=1e-14)


def test_limiting_cases_of_the_bias() -> None:
    assert bias_bound([0.4, 0.2], kept=[0, 1]) == 0.0 == relative_bias_bound([0.4, 0.2], kept=[0, 1])
    assert bias_bound([]) == 0.0 and gradient_flow_bound([]) == 1.0
    assert relative_bias_bound([1.0, 0.2]) == np.inf
    # A kept layer above every skipped one changes nothing, however large its branch.
    assert relative_bias_bound([0.5, 3.0], kept=[1]) == 1.0
    assert gradient_flow_bound([0.5, 1.0]) == 0.0
    assert mlp_bias_bound([0.0, 0.0], [5.0, 2.0]) == 0.0


def test_scalar_counterexample_is_the_difference_quotient() -> None:
    x, a, step = 0.7, 0.2, 1e-6
    for b in (-2.0, -0.5, 0.0, 1.0):
        forward = lambda value, b=b: (1 + b) * (1 + value) * x  # noqa: E731
        true, surrogate = scalar_counterexample(a, b, x)
        assert true == pytest.approx((forward(a + step) - forward(a - step)) / (2 * step), rel=1e-8)
        assert (true == surrogate) == (b == 0)
        # The identity step ascends exactly when the true derivative has the other sign.
        assert (forward(a - 0.1 * surrogate) > forward(a)) == (b < -1)


@pytest.mark.parametrize("seed", range(60))
def test_cosine_bound_holds_for_every_chain(seed: int) -> None:
    """Angles of any plan, with condition numbers computed from the surrogate's own Jacobians."""
    rng = np.random.default_rng(seed)
    n, layers = 3, int(rng.integers(1, 6))
    truth = surrogate = rng.standard_normal(n)
    cosines, kappas = [], []
    for _ in range(layers):
        first, second = np.eye(n) + branch(rng, n, 0.6), np.eye(n) + branch(rng, n, 0.6)
        own = [np.eye(n), second, first @ second][int(rng.integers(3))]
        cosines.append(np.cos(angle(own @ truth, first @ second @ truth)))
        kappas.append(np.linalg.cond(own))
        truth, surrogate = first @ second @ truth, own @ surrogate
    measured = np.cos(angle(truth, surrogate))
    assert measured >= cosine_bound(cosines[::-1], kappas[::-1]) - 1e-7


def test_identity_only_needs_no_condition_numbers_and_is_attained_in_a_plane() -> None:
    turn = lambda t: np.array([[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]])  # noqa: E731
    angles = [0.2, 0.5, 0.3]
    top = np.array([1.0, 0.0])
    truth = chain([turn(t) for t in angles], 2) @ top
    assert cosine_bound(np.cos(angles)) == pytest.approx(float(truth @ top), rel=1e-12)
    assert cosine_bound(np.cos([2.0, 2.0])) == -1.0


def test_wielandt_opening_is_attained() -> None:
    for kappa in (1.0, 3.0, 50.0):
        for start in (0.1, 1.0, np.pi / 2, 3.0):
            u = np.array([np.cos(start / 2), np.sin(start / 2)])
            v = u * [1, -1]
            opened = angle(u * [1, kappa], v * [1, kappa])
            assert opened_angle(np.array([start]), kappa)[0] == pytest.approx(opened, rel=1e-12)


def test_composed_cosine_and_spread_by_simulation() -> None:
    """Mean and spread over chains whose deviations are uniform and independent, the law's assumption."""
    rng = np.random.default_rng(11)
    cosines, n, draws = [0.8, 0.6, 0.9, 0.7], 12, 20000
    top = np.zeros((draws, n))
    top[:, 0] = 1.0
    u = top
    for cosine in cosines[::-1]:
        w = rng.standard_normal((draws, n))
        w -= np.sum(w * u, axis=1, keepdims=True) * u
        w /= np.linalg.norm(w, axis=1, keepdims=True)
        u = cosine * u + np.sqrt(1 - cosine**2) * w
    composed = np.sum(u * top, axis=1)
    spread = composed_cosine_spread(cosines, n)
    assert composed.mean() == pytest.approx(compose_cosines(cosines), abs=4 * spread / np.sqrt(draws))
    assert composed.std() == pytest.approx(spread, rel=0.03)
    assert composed_cosine_spread([0.8], n) == pytest.approx(0.0, abs=1e-8)
    assert composed.min() >= cosine_bound(cosines) - ROUNDING


def test_check_composition_reads_top_layers_and_finds_impossible_figures() -> None:
    cosines = [0.1, 0.9, 0.8]
    check = check_composition(cosines, [0.8, 0.71])
    assert check.predicted == pytest.approx([0.8, 0.72])
    assert check.bound == pytest.approx([0.8, np.cos(np.arccos(0.8) + np.arccos(0.9))])
    assert check.rms_error == pytest.approx(0.01 / np.sqrt(2))
    assert check.consistent
    assert not check_composition(cosines, [0.7], skipped=[1]).consistent
    with pytest.raises(ValueError, match="counts between 1 and 3"):
        check_composition(cosines, [0.5], skipped=[4])


def test_fidelity_length() -> None:
    # The measured curves of theory.md: both branches, MLP, attention detached.
    skipped = [1, 2, 4, 6, 10, 14, 22, 30]
    assert fidelity_length([0.66, 0.59, 0.46, 0.32, 0.15, 0.07, 0.02, 0.0], skipped=skipped) == 4
    assert fidelity_length([0.70, 0.65, 0.54, 0.53, 0.43, 0.19, 0.04, 0.0], skipped=skipped) == 10
    assert fidelity_length([0.96, 0.94, 0.91, 0.78, 0.63, 0.55, 0.55, 0.36], skipped=skipped) == 30
    assert fidelity_length([0.9, np.nan, 0.5]) == np.inf
    assert fidelity_length(np.cumprod([0.8] * 6)) == 4  # 0.8^4 = 0.41
    with pytest.raises(ValueError, match="rising"):
        fidelity_length([0.9, 0.8], skipped=[2, 1])


def test_guaranteed_share_is_the_ratio_of_the_two_decreases() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        g = rng.standard_normal(4)
        surrogate = rng.standard_normal(4) + g
        rho = np.linalg.norm(surrogate) / np.linalg.norm(g)
        cosine = surrogate @ g / np.linalg.norm(surrogate) / np.linalg.norm(g)
        step = rng.uniform(0.05, 1.9)
        # f = |x|^2 / 2 at x = g: L = 1 and the bound is an equality.
        before, exact, moved = (0.5 * v @ v for v in (g, (1 - step) * g, g - step * surrogate))
        share = max((before - moved) / (before - exact), 0.0)
        assert guaranteed_share(cosine, rho, step) == pytest.approx(share, rel=1e-9, abs=1e-12)
        best = max(cosine, 0.0) / rho
        at_best = (before - 0.5 * np.sum((g - best * surrogate) ** 2)) / before
        assert guaranteed_share(cosine, rho) == pytest.approx(at_best, rel=1e-9, abs=1e-12)
    assert guaranteed_share(1.0, 1.0, 0.7) == 1.0
    assert guaranteed_share([0.5, -0.2]) == pytest.approx([0.25, 0.0])
    with pytest.raises(ValueError, match="between 0 and 2"):
        guaranteed_share(0.5, 1.0, 2.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bias_bound([-0.1]), "at least 0"),
        (lambda: bias_bound([0.1], kept=[1]), "kept layer 1"),
        (lambda: plan_bias_bound([0.1], [0.1], ["mpl"]), "did you mean 'mlp'"),
        (lambda: plan_bias_bound([0.1], [0.1], []), "equal lengths"),
        (lambda: compose_cosines([1.2]), "between -1 and 1"),
        (lambda: compose_cosines([np.nan]), "between -1 and 1"),
        (lambda: cosine_bound([0.5], 0.5), "at least 1"),
        (lambda: composed_cosine_spread([0.5], 1), "dimension"),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
