"""Identity and mlp modes: bias, gradient flow, composition of cosines (T7).

A residual chain h_{l+1} = h_l + F_l(h_l) has layer Jacobians J_l = I + F_l', |F_l'| <= l_l. Backward takes
the gradient g at the top to J_l' ... J_{N-1}' g at layer l; mode identity replaces J of an idle layer by I,
mode mlp by its MLP branch I + M alone (J = (I + M)(I + A)). All sequences here run over layers from the
embedding up, so the last entry is the layer that backward meets first. Bounds are in units of the top
gradient's norm unless they say relative. None of them bounds an *adapter* gradient: that is measured.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bcd_theory.cost import GRADES, choose

Array = NDArray[np.float64]


# --- bias and gradient flow from Lipschitz constants -------------------------------------------------------


def _constants(values: ArrayLike, name: str = "lipschitz") -> Array:
    array = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if array.ndim != 1 or not np.all(np.isfinite(array)) or np.any(array < 0):
        raise ValueError(f"{name} must be a sequence of finite numbers of at least 0")
    return array


def layer_lipschitz(attention: ArrayLike, mlp: ArrayLike) -> Array:
    """(1 + l_attn)(1 + l_mlp) - 1: Lipschitz constant of a layer's branch from its two halves (T7)."""
    attention, mlp = _constants(attention, "attention"), _constants(mlp, "mlp")
    return np.asarray(attention + mlp + attention * mlp)


def bias_bound(lipschitz: ArrayLike, kept: Collection[int] = ()) -> float:
    """prod(1 + l_j) - prod_{j kept}(1 + l_j): absolute bias when only the kept layers act (T7, upper).

    Every term of the expanded product that is lost holds a factor F_j' of a skipped layer.

    >>> round(bias_bound([0.5, 0.5]), 12), round(bias_bound([0.5, 0.5], kept=[1]), 12)
    (1.25, 0.75)
    """
    factors = 1.0 + _constants(lipschitz)
    chosen = _mask(len(factors), kept)
    return float(np.prod(factors) - np.prod(factors[chosen]))


def bias_bound_exponential(lipschitz: ArrayLike) -> float:
    """exp(sum l_j) - 1, simpler than `bias_bound` with every layer skipped and never smaller (T7, upper)."""
    return float(np.expm1(_constants(lipschitz).sum()))


def relative_bias_bound(lipschitz: ArrayLike, kept: Collection[int] = ()) -> float:
    """Bias in units of the *true* hidden gradient; inf when a skipped or lower layer has l_j >= 1 (T7,
    upper).

    From the top down, a skipped layer takes e to (1 + e)/(1 - l) - 1, a kept one to e (1 + l)/(1 - l): with
    every layer skipped that is prod(1 - l_j)^-1 - 1. Kept layers above the first skipped one cost nothing.

    >>> round(relative_bias_bound([0.5, 0.5]), 12), round(relative_bias_bound([0.5, 0.5], kept=[1]), 12)
    (3.0, 1.0)
    """
    constants = _constants(lipschitz)
    chosen = _mask(len(constants), kept)
    error = 0.0
    for constant, keep in zip(constants[::-1], chosen[::-1], strict=True):
        if keep and error == 0.0:
            continue
        if constant >= 1:
            return float("inf")
        error = error * (1 + constant) / (1 - constant) if keep else (1 + error) / (1 - constant) - 1
    return float(error)


def gradient_flow_bound(lipschitz: ArrayLike) -> float:
    """prod(1 - l_j): least norm of the true hidden gradient below these layers; 0 if some l_j >= 1 (T7,
    lower).
    """
    constants = _constants(lipschitz)
    return float(np.prod(1.0 - constants)) if np.all(constants < 1) else 0.0


def mlp_bias_bound(attention: ArrayLike, mlp: ArrayLike) -> float:
    """prod(1 + l_mlp)(prod(1 + l_attn) - 1): absolute bias of mode mlp with every layer idle (T7, upper)."""
    attention = _constants(attention, "attention")
    return plan_bias_bound(attention, mlp, ["mlp"] * len(attention))


def plan_bias_bound(attention: ArrayLike, mlp: ArrayLike, plan: Sequence[str]) -> float:
    """Absolute bias of a plan: prod of all branch factors less the prod of those that the plan keeps (T7,
    upper).

    exact keeps both branches of a layer, mlp the MLP branch, identity none.
    """
    attention, mlp = _constants(attention, "attention"), _constants(mlp, "mlp")
    if not len(attention) == len(mlp) == len(plan):
        raise ValueError(
            f"attention, mlp and plan need equal lengths, got {len(attention)}, {len(mlp)}, {len(plan)}"
        )
    grades = [choose(grade, GRADES, "grade") for grade in plan]
    both = np.concatenate([attention, mlp])
    kept = [j for j, grade in enumerate(grades) if grade == "exact"]
    kept += [len(grades) + j for j, grade in enumerate(grades) if grade != "identity"]
    return bias_bound(both, kept)


def _mask(n: int, kept: Collection[int]) -> NDArray[np.bool_]:
    outside = [j for j in kept if not 0 <= j < n]
    if outside:
        raise ValueError(f"kept layer {outside[0]} is not between 0 and {n - 1}")
    mask = np.zeros(n, dtype=np.bool_)
    mask[list(kept)] = True
    return mask


class ScalarGradients(NamedTuple):
    """True and surrogate derivative by the selected parameter."""

    true: float
    surrogate: float


def scalar_counterexample(a: float, b: float, x: float) -> ScalarGradients:
    """d/da of loss = (1 + b)(1 + a) x with the layer of b skipped: (1 + b) x against x (T7, law).

    Equal forward values, different gradients for every b != 0 (x != 0), opposite signs for b < -1: the
    identity step then ascends. Neither derivative depends on a.

    >>> scalar_counterexample(a=0.3, b=-1.5, x=2.0)
    ScalarGradients(true=-1.0, surrogate=2.0)
    """
    return ScalarGradients(true=(1 + b) * x, surrogate=x)


# --- cosines ----------------------------------------------------------------------------------------------


def as_cosines(values: ArrayLike, name: str = "cosines") -> Array:
    array = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if not np.all(np.abs(array) <= 1 + 1e-9):
        raise ValueError(f"{name} must lie between -1 and 1")
    return np.clip(array, -1.0, 1.0)


def compose_cosines(cosines: ArrayLike) -> float:
    """prod c_j: expected cosine after layers whose own cosines are c_j (T7, a law under an assumption).

    c_j is the cosine between the true gradient leaving layer j and the surrogate made from the true gradient
    entering it. Write the unit gradient leaving a layer as c u + sqrt(1 - c^2) w, w orthogonal to the
    entering u. Assumption: w is uniform on that sphere and independent between layers (and kept Jacobians
    do not change angles). Then E<w, u_top> = 0 and the expectation of the composed cosine is the product.
    """
    return float(np.prod(as_cosines(cosines)))


def composed_cosine_spread(cosines: ArrayLike, dimension: int) -> float:
    """Standard deviation of the composed cosine under `compose_cosines`'s assumption, in R^dimension.

    The second moment q obeys q <- c^2 q + (1 - c^2)(1 - q)/(dimension - 1), because w has variance
    (1 - <u, u_top>^2)/(dimension - 1) along u_top.
    """
    if dimension < 2:
        raise ValueError(f"dimension must be at least 2, got {dimension}")
    values = as_cosines(cosines)
    second = 1.0
    for cosine in values[::-1]:
        second = cosine**2 * second + (1 - cosine**2) * (1 - second) / (dimension - 1)
    return float(np.sqrt(max(second - float(np.prod(values)) ** 2, 0.0)))


def cosine_bound(cosines: ArrayLike, condition_numbers: ArrayLike = 1.0) -> float:
    """Least possible composed cosine (T7, lower bound; no assumption on directions).

    The angle a between surrogate and truth obeys, from the top layer down,

        a <- min(pi, 2 atan(kappa tan(a / 2)) + arccos c)

    by the triangle inequality for angles and Wielandt's inequality (Bauer and Householder, Numer. Math. 2,
    1960) for how much a matrix of condition number kappa opens an angle. kappa belongs to the Jacobian that
    the *surrogate* uses in that layer: 1 for identity, at most (1 + l)/(1 - l) for a kept branch with l <
    1. Layers skipped whole with nothing kept below them have kappa = 1 and the bound is cos(min(pi, sum of
    angles)).
    """
    values = as_cosines(cosines)
    kappas = np.broadcast_to(np.asarray(condition_numbers, dtype=np.float64), values.shape)
    if np.any(kappas < 1):
        raise ValueError("condition numbers are at least 1")
    angle = np.zeros(1)
    for cosine, kappa in zip(values[::-1], kappas[::-1], strict=True):
        angle = opened_angle(angle, float(kappa)) + np.arccos(cosine)
    return float(np.cos(min(float(angle[0]), np.pi)))


def opened_angle(angle: Array, kappa: float) -> Array:
    """Largest angle that a matrix of condition number kappa makes of `angle` (Wielandt)."""
    if kappa == 1.0:
        return angle
    closed = np.clip(angle, 0.0, np.pi)
    return np.where(closed >= np.pi, np.pi, 2 * np.arctan(kappa * np.tan(closed / 2)))


@dataclass(frozen=True, slots=True)
class CompositionCheck:
    """Composed cosines by the product law against measured ones, after skipping the top 1, 2, ... layers.

    Attributes:
        predicted: the product law. bound: the angle-sum bound. measured: as given.
        rms_error: root mean square of predicted - measured.
        consistent: no measured value lies below the bound by more than `tolerance`. The bound is the triangle
            inequality, so a violation means that the figures do not come from one batch.
    """

    predicted: Array
    bound: Array
    measured: Array
    rms_error: float
    consistent: bool


def check_composition(
    cosines: ArrayLike, measured: ArrayLike, skipped: ArrayLike | None = None, tolerance: float = 1e-3
) -> CompositionCheck:
    """Compare per-layer cosines with cosines measured after skipping the top `skipped` (default 1, 2, ...)
    layers.
    """
    values, observed = as_cosines(cosines), as_cosines(measured, "measured")
    counts = np.arange(1, len(observed) + 1) if skipped is None else np.asarray(skipped, dtype=np.int64)
    if counts.shape != observed.shape or np.any(counts < 1) or np.any(counts > len(values)):
        raise ValueError(f"skipped must give {len(observed)} counts between 1 and {len(values)}")
    predicted = np.array([compose_cosines(values[-count:]) for count in counts])
    bound = np.array([cosine_bound(values[-count:]) for count in counts])
    return CompositionCheck(
        predicted=predicted,
        bound=bound,
        measured=observed,
        rms_error=float(np.sqrt(np.mean((predicted - observed) ** 2))),
        consistent=bool(np.all(observed >= bound - tolerance)),
    )


def fidelity_length(
    cosines: ArrayLike, threshold: float = 0.5, skipped: Sequence[int] | None = None
) -> float:
    """Number of skipped layers after which the cosine falls below the threshold (T7); inf if it never does.

    Args:
        cosines: measured or predicted cosine after skipping 1, 2, ... layers (or as many as `skipped` says);
            NaN where there is none (a gradient of exactly zero has no direction).
        threshold: 0.5 by definition of the fidelity length.
        skipped: rising numbers of skipped layers, one a cosine; the answer is one of them.

    >>> fidelity_length([0.66, 0.59, 0.46, 0.32], skipped=[1, 2, 4, 6])
    4.0
    """
    given = np.atleast_1d(np.asarray(cosines, dtype=np.float64))
    as_cosines(given[~np.isnan(given)])
    counts = list(range(1, len(given) + 1)) if skipped is None else list(skipped)
    if len(counts) != len(given) or counts != sorted(set(counts)):
        raise ValueError(f"skipped must be {len(given)} rising numbers of layers, got {counts}")
    below = np.flatnonzero(given < threshold)
    return float(counts[int(below[0])]) if len(below) else float("inf")


def guaranteed_share(cosine: ArrayLike, rho: ArrayLike = 1.0, relative_step: float | None = None) -> Array:
    """Share of the exact gradient's guaranteed decrease that the surrogate still guarantees (T2's angle
    form).

    With a = eta L_i (`relative_step`): rho (cos - a rho/2) / (1 - a/2), both at the same step. None: each
    at its own best step, which gives cos^2 whatever rho. 0 where the bound guarantees nothing. Shapes
    broadcast.

    >>> float(guaranteed_share(0.2)), float(guaranteed_share(0.2, 0.2, relative_step=1.0))
    (0.04000000000000001, 0.04000000000000001)
    """
    cosine, rho = np.asarray(cosine, dtype=np.float64), np.asarray(rho, dtype=np.float64)
    if relative_step is None:
        return np.asarray(np.where(rho > 0, np.maximum(cosine, 0.0) ** 2, 0.0))
    if not 0 < relative_step < 2:
        raise ValueError(f"relative_step (eta L) must lie between 0 and 2, got {relative_step}")
    share = rho * (cosine - relative_step * rho / 2) / (1 - relative_step / 2)
    return np.asarray(np.maximum(share, 0.0))
