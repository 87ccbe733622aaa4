"""Step sizes and rates of block descent: T1, T2 (sharp, textbook, angles), T3, and the table of all bounds.

`BOUNDS` maps ids to `Bound` objects, also those of `bcd_theory.classical_bounds`,
`bcd_theory.momentum_bounds` (T6, T6b) and `bcd_theory.lora_bounds` (T7, T8). eta is the learning rate,
a = eta L_max; a cycle visits each of p blocks once.

>>> float(BOUNDS["T1"].evaluate(eta=0.5, L_i=2.0, g2=4.0))
1.0
>>> BOUNDS["T2"].largest_step()
2/(L_max*(delta + 1))
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from bcd_theory.bounds import Bound, Formula, Step, contraction_step, symbols
from bcd_theory.classical_bounds import CLASSICAL_BOUNDS
from bcd_theory.lora_bounds import LORA_BOUNDS
from bcd_theory.momentum_bounds import MOMENTUM_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sympy

SMOOTH = "the gradient of f along each block is Lipschitz (L_i), uniformly over the other blocks"
JOINT = "the gradient of f is Lipschitz (L)"
BELOW = "f is bounded below by fstar"
BIASED = "|g~ - g| <= delta |g|, delta < 1, for the updated block at the point of its update"
NO_MOMENTUM = "plain steps x <- x - eta g~ of the selected block, no momentum"
CYCLIC = "each cycle visits each of the p blocks once, in any order"
PL = "|grad f|^2 >= 2 mu (f - fstar)"


# --- shared expressions ------------------------------------------------------------------------------------


def descent_coefficient() -> sympy.Expr:
    """eta (1 - eta L_i / 2): what a step along one block gains for each unit of squared gradient."""
    eta, L_i = symbols("eta L_i")
    return eta * (1 - eta * L_i / 2)


def biased_constant() -> sympy.Expr:
    """c*, the least of (1 -+ delta)(1 - a (1 -+ delta)/2)."""
    import sympy

    a, delta = _relative_step(), symbols("delta")[0]
    return sympy.Min((1 - delta) * (1 - a * (1 - delta) / 2), (1 + delta) * (1 - a * (1 + delta) / 2))


def textbook_constant() -> sympy.Expr:
    """(1 - delta) - a (1 + delta)^2 / 2."""
    delta = symbols("delta")[0]
    return (1 - delta) - _relative_step() * (1 + delta) ** 2 / 2


def cycle_factor() -> sympy.Expr:
    """(1 + sqrt(p-1) L eta (1 + delta))^2: from gradients along a cycle to the full gradient at its start."""
    import sympy

    eta, L, p, delta = symbols("eta L p delta")
    return (1 + sympy.sqrt(p - 1) * L * eta * (1 + delta)) ** 2


def textbook_factor() -> sympy.Expr:
    """2 (1 + p L^2 eta^2 (1 + delta)^2)."""
    eta, L, p, delta = symbols("eta L p delta")
    return 2 * (1 + p * L**2 * eta**2 * (1 + delta) ** 2)


def _relative_step() -> sympy.Expr:
    eta, L_max = symbols("eta L_max")
    return eta * L_max


def _gap() -> sympy.Expr:
    f0, fstar = symbols("f0 fstar")
    return f0 - fstar


# --- T1 ----------------------------------------------------------------------------------------------------


def _t1() -> Formula:
    import sympy

    eta, L_i, g2 = symbols("eta L_i g2")
    t, s2, f0, x = sympy.symbols("t s2 f0 x", real=True)
    coefficient = descent_coefficient()
    quadratic = L_i * x**2 / 2
    return Formula(
        coefficient * g2,
        condition=1 - eta * L_i / 2,
        steps=(
            Step(
                "f(x + s) - f(x) - <g, s> is the integral of <grad f(x + t s) - g, s> over t in [0, 1], "
                "at most L_i t |s|^2",
                sympy.Integral(L_i * t * s2, (t, 0, 1)).doit(),
                L_i * s2 / 2,
            ),
            Step(
                "put s = -eta g into f(x) + <g, s> + L_i |s|^2 / 2: the decrease is at least",
                f0 - (f0 - eta * g2 + L_i / 2 * eta**2 * g2),
                coefficient * g2,
            ),
            Step(
                "attained by f = L_i x^2 / 2, whose g is L_i x",
                quadratic - quadratic.subs(x, x - eta * L_i * x),
                coefficient * (L_i * x) ** 2,
            ),
        ),
    )


# --- T2 ----------------------------------------------------------------------------------------------------


def _t2_step() -> Formula:
    import sympy

    eta, delta, g2 = symbols("eta delta g2")
    tau, u, v = sympy.symbols("tau u v", real=True)
    a = _relative_step()

    def along(angle: sympy.Expr | int) -> sympy.Expr:
        return 1 + delta * angle - a * (1 + 2 * delta * angle + delta**2) / 2

    def gain(y: sympy.Expr) -> sympy.Expr:
        return y - a * y**2 / 2

    return Formula(
        eta * biased_constant() * g2,
        condition=1 - a * (1 + delta) / 2,
        steps=(
            Step(
                "a step gains at least eta (<g, g~> - a |g~|^2 / 2), a concave function of g~ (shown for "
                "numbers): least on "
                "the sphere |g~ - g| = delta |g|",
                gain((u + v) / 2) - (gain(u) + gain(v)) / 2,
                a * (u - v) ** 2 / 8,
                nonnegative=True,
            ),
            Step(
                "there, with g~ = g + delta |g| u and tau = <u, g>/|g|, it is affine in tau: least at an "
                "end, tau = -1 or 1",
                along(tau),
                (1 + tau) / 2 * along(1) + (1 - tau) / 2 * along(-1),
            ),
            Step("the end tau = -1", along(-1), (1 - delta) * (1 - a * (1 - delta) / 2)),
            Step("the end tau = +1", along(1), (1 + delta) * (1 - a * (1 + delta) / 2)),
            Step(
                "the smaller end is c*",
                eta * g2 * sympy.Min(sympy.factor(along(-1)), sympy.factor(along(1))),
                eta * biased_constant() * g2,
            ),
            Step(
                "both ends are positive while a < 2/(1 + delta), which is the smaller of the two limits",
                2 / (1 - delta) - 2 / (1 + delta),
                4 * delta / (1 - delta**2),
                nonnegative=True,
            ),
        ),
    )


def _t2_cycle() -> Formula:
    import sympy

    eta, L, p, delta, S = symbols("eta L p delta S")
    y = sympy.Symbol("y", nonnegative=True)
    moves = sympy.symbols("s1:6", nonnegative=True)
    count = 5
    double = sum(sum(moves[:i]) for i in range(count))
    return Formula(
        cycle_factor() * S,
        steps=(
            Step(
                "block i sees the gradient at a point eta (1 + delta) sqrt(sum_{j<i} s_j) away from the "
                "cycle's start, s_j the "
                "squared gradients; summed over i this is at most (p-1) S (shown for p = 5)",
                (count - 1) * sum(moves) - double,
                sum(j * move for j, move in enumerate(moves)),
                nonnegative=True,
            ),
            Step(
                "Minkowski: |grad f| <= sqrt(S) + y sqrt(S), y = sqrt(p-1) L eta (1 + delta)",
                (sympy.sqrt(S) + y * sympy.sqrt(S)) ** 2,
                (1 + y) ** 2 * S,
            ),
            Step(
                "with that y",
                ((1 + y) ** 2 * S).subs(y, sympy.sqrt(p - 1) * L * eta * (1 + delta)),
                cycle_factor() * S,
            ),
        ),
    )


def _t2() -> Formula:
    eta, K = symbols("eta K")
    expression = cycle_factor() * _gap() / (eta * biased_constant() * K)
    return Formula(
        expression, condition=_t2_step().condition, steps=_telescoping(biased_constant(), cycle_factor())
    )


def _telescoping(constant: sympy.Expr, factor: sympy.Expr) -> tuple[Step, ...]:
    import sympy

    eta, K = symbols("eta K")
    values = sympy.symbols("F0:5", real=True)
    c, phi = sympy.symbols("c phi", positive=True)
    return (
        Step(
            "the gains of successive cycles telescope (shown for 4)",
            sum(values[j] - values[j + 1] for j in range(4)),
            values[0] - values[4],
        ),
        Step(
            "so eta c sum_k S_k <= f0 - fstar; with |grad f(x^k)|^2 <= phi S_k the mean over K cycles is "
            "at most",
            phi / K * (_gap() / (eta * c)),
            phi * _gap() / (eta * c * K),
        ),
        Step(
            "with c and phi of this theorem",
            (phi * _gap() / (eta * c * K)).subs({c: constant, phi: factor}),
            factor * _gap() / (eta * constant * K),
        ),
    )


def _t2_textbook_step() -> Formula:
    eta, delta, g2 = symbols("eta delta g2")
    a = _relative_step()
    low, high = (1 - delta) * (1 - a * (1 - delta) / 2), (1 + delta) * (1 - a * (1 + delta) / 2)
    return Formula(
        eta * textbook_constant() * g2,
        condition=textbook_constant(),
        steps=(
            Step(
                "put <g, g~> >= (1 - delta) |g|^2 and |g~| <= (1 + delta) |g| into <g, g~> - a |g~|^2 / 2",
                eta * ((1 - delta) * g2 - a * (1 + delta) ** 2 * g2 / 2),
                eta * textbook_constant() * g2,
            ),
            Step(
                "never above the first part of c*", low - textbook_constant(), 2 * a * delta, nonnegative=True
            ),
            Step("nor above the second", high - textbook_constant(), 2 * delta, nonnegative=True),
        ),
    )


def _t2_textbook_cycle() -> Formula:
    import sympy

    eta, L, p, delta, S = symbols("eta L p delta S")
    y = L * eta * (1 + delta)
    u, v = sympy.symbols("u v", real=True)
    return Formula(
        textbook_factor() * S,
        steps=(
            Step(
                "(u + v)^2 <= 2 u^2 + 2 v^2",
                2 * u**2 + 2 * v**2 - (u + v) ** 2,
                (u - v) ** 2,
                nonnegative=True,
            ),
            Step(
                "each of p blocks has moved the point by at most eta (1 + delta) sqrt(S)",
                2 * S + 2 * p * y**2 * S,
                textbook_factor() * S,
            ),
            Step(
                "never below the sharp factor",
                textbook_factor() - cycle_factor(),
                (1 - sympy.sqrt(p - 1) * y) ** 2 + 2 * y**2,
                nonnegative=True,
            ),
        ),
    )


def _t2_textbook() -> Formula:
    eta, K = symbols("eta K")
    constant, factor = textbook_constant(), textbook_factor()
    return Formula(
        factor * _gap() / (eta * constant * K), condition=constant, steps=_telescoping(constant, factor)
    )


def _t2_exact() -> Formula:
    import sympy

    L, L_max, p, K = symbols("L L_max p K")
    eta, delta = symbols("eta delta")
    expression = 2 * L_max * (1 + sympy.sqrt(p - 1) * L / L_max) ** 2 * _gap() / K
    general = cycle_factor() * _gap() / (eta * biased_constant() * K)
    return Formula(
        expression,
        steps=(
            Step(
                "T2 at delta = 0 and eta = 1/L_max", general.subs(delta, 0).subs(eta, 1 / L_max), expression
            ),
            Step(
                "one block (L_max = L): the classical 2 L (f0 - fstar)/K",
                expression.subs({p: 1, L_max: L}),
                2 * L * _gap() / K,
            ),
        ),
    )


def _t2_angle() -> Formula:
    import sympy

    eta, L_i, cosine, rho, g2 = symbols("eta L_i cosine rho g2")
    gain = eta * rho * (cosine - eta * L_i * rho / 2)
    return Formula(
        gain * g2,
        condition=cosine - eta * L_i * rho / 2,
        steps=(
            Step(
                "put <g, g~> = rho cos |g|^2 and |g~|^2 = rho^2 |g|^2 into the descent lemma",
                eta * (rho * cosine * g2) - L_i / 2 * eta**2 * rho**2 * g2,
                gain * g2,
            ),
            Step(
                "delta^2 = 1 - 2 rho cos + rho^2, so delta < 1 iff rho < 2 cos",
                1 - (1 - 2 * rho * cosine + rho**2),
                rho * (2 * cosine - rho),
            ),
            Step(
                "the best step is eta = cos/(L_i rho)",
                sympy.diff(gain, eta).subs(eta, cosine / (L_i * rho)),
                sympy.S.Zero,
            ),
            Step(
                "where it keeps cos^2 of the exact gradient's best gain 1/(2 L_i)",
                gain.subs(eta, cosine / (L_i * rho)),
                cosine**2 / (2 * L_i),
            ),
        ),
    )


# --- T3 ----------------------------------------------------------------------------------------------------


def _t3() -> Formula:
    import sympy

    eta, mu, K = symbols("eta mu K")
    q = 2 * mu * eta * biased_constant() / cycle_factor()
    c, phi, gap = sympy.symbols("c phi gap", positive=True)
    return Formula(
        (1 - q) ** K * _gap(),
        condition=_t2_step().condition,
        steps=(
            Step(
                "one cycle gains at least eta c S >= eta c |grad f|^2 / phi >= 2 mu eta c gap / phi",
                gap - eta * c * (2 * mu * gap) / phi,
                (1 - 2 * mu * eta * c / phi) * gap,
            ),
            Step(
                "with c* and T2's factor",
                (2 * mu * eta * c / phi).subs({c: biased_constant(), phi: cycle_factor()}),
                q,
            ),
            contraction_step(q, K),
        ),
    )


def _t3_random() -> Formula:
    import sympy

    eta, mu, L_max, p, T = symbols("eta mu L_max p T")
    q = 2 * mu * eta * (1 - eta * L_max / 2) / p
    return Formula(
        (1 - q) ** T * _gap(),
        condition=1 - eta * L_max / 2,
        steps=(
            Step(
                "a uniform block gains eta (1 - eta L_max/2) |grad f|^2 / p on average; PL",
                eta * (1 - eta * L_max / 2) / p * (2 * mu),
                q,
            ),
            Step("best at eta = 1/L_max", sympy.diff(q, eta).subs(eta, 1 / L_max), sympy.S.Zero),
            Step("where the factor is 1 - mu/(p L_max)", 1 - q.subs(eta, 1 / L_max), 1 - mu / (p * L_max)),
            contraction_step(q, T),
        ),
    )


_RATE = "mean over cycles of the squared full gradient at the start of each cycle"
_T2 = (SMOOTH, BIASED, NO_MOMENTUM)
_BOUNDS: Final[tuple[Bound, ...]] = (
    Bound("T1", "block descent", "upper", "lower", "decrease of f in one step along block i",
          (SMOOTH, "exact block gradient", NO_MOMENTUM), "T1; the block descent lemma",
          ("eta", "L_i", "g2"), _t1, attained="f = L_i x^2 / 2"),
    Bound("T2-step", "biased block descent, one step", "upper", "lower", "decrease of f in one step", _T2,
          "T2", ("eta", "L_max", "delta", "g2"), _t2_step, attained="f = x^2 / 2 with g~ = (1 -+ delta) g"),
    Bound("T2-cycle", "from one cycle's block gradients to the full gradient", "upper", "upper",
          "squared full gradient at the start of a cycle", (JOINT, BIASED, NO_MOMENTUM, CYCLIC), "T2",
          ("eta", "L", "p", "delta", "S"), _t2_cycle),
    Bound("T2", "biased cyclic block descent, non-convex rate", "upper", "upper", _RATE,
          (*_T2, JOINT, BELOW, CYCLIC), "T2",
          ("eta", "L", "L_max", "p", "delta", "f0", "fstar", "K"), _t2),
    Bound("T2-exact", "exact cyclic block descent at eta = 1/L_max", "upper", "upper", _RATE,
          (SMOOTH, JOINT, BELOW, NO_MOMENTUM, CYCLIC, "delta = 0", "eta = 1/L_max"), "T2",
          ("L", "L_max", "p", "f0", "fstar", "K"), _t2_exact),
    Bound("T2-textbook-step", "biased block descent, one step, textbook constant", "upper", "lower",
          "decrease of f in one step", _T2, "T2", ("eta", "L_max", "delta", "g2"), _t2_textbook_step),
    Bound("T2-textbook-cycle", "from one cycle's block gradients to the full gradient, textbook factor",
          "upper", "upper", "squared full gradient at the start of a cycle",
          (JOINT, BIASED, NO_MOMENTUM, CYCLIC), "T2", ("eta", "L", "p", "delta", "S"), _t2_textbook_cycle),
    Bound("T2-textbook", "biased cyclic block descent, non-convex rate, textbook constants", "upper", "upper",
          _RATE, (*_T2, JOINT, BELOW, CYCLIC), "T2",
          ("eta", "L", "L_max", "p", "delta", "f0", "fstar", "K"), _t2_textbook),
    Bound("T2-angle", "biased block descent in angles, one step", "upper", "lower", "decrease of f in one step",
          (SMOOTH, "cosine and norm ratio of g~ and g are cos and rho", NO_MOMENTUM), "T2",
          ("eta", "L_i", "cosine", "rho", "g2"), _t2_angle, attained="f = L_i |x|^2 / 2"),
    Bound("T3", "biased cyclic block descent, linear rate", "upper", "upper", "f - fstar after K cycles",
          (*_T2, JOINT, CYCLIC, PL), "T3",
          ("eta", "L", "L_max", "p", "delta", "mu", "f0", "fstar", "K"), _t3),
    Bound("T3-random", "random block descent, linear rate", "upper", "upper",
          "expectation of f - fstar after T steps",
          (SMOOTH, "exact block gradient", NO_MOMENTUM, "uniform block, independent of the iterate", PL),
          "T3", ("eta", "L_max", "p", "mu", "f0", "fstar", "T"), _t3_random),
)  # fmt: skip

BOUNDS: Final[Mapping[str, Bound]] = MappingProxyType(
    {bound.id: bound for bound in (*_BOUNDS, *CLASSICAL_BOUNDS, *MOMENTUM_BOUNDS, *LORA_BOUNDS)}
)
