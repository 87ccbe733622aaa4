"""Rates of block descent with momentum: idle momentum (T6) and frozen momentum (T6b).

EMA form: m <- beta m + (1 - beta) g, x <- x - eta m, m = 0 at the start, exact block gradients g.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bcd_theory.bounds import Bound, Formula, Step, symbols

if TYPE_CHECKING:
    import sympy

SMOOTH = "the gradient of f along each block is Lipschitz (L_i), uniformly over the other blocks"
JOINT = "the gradient of f is Lipschitz (L)"
BELOW = "f is bounded below by fstar"
EXACT = "exact block gradients, EMA momentum, zero at the start"
MOMENTUM = "idle policy momentum: idle blocks decay their momentum and move"
FROZEN = "idle policy frozen: idle blocks keep parameters and momentum"
CYCLIC = "each cycle visits each of the p blocks once, in the same order"


def _gap() -> sympy.Expr:
    f0, fstar = symbols("f0 fstar")
    return f0 - fstar


def coherence_squared() -> sympy.Expr:
    """kappa^2 of cyclic order: (1 - beta)(1 + beta^p)/((1 + beta)(1 - beta^p)); 1 for p = 1 (T6)."""
    beta, p = symbols("beta p")
    return (1 - beta) * (1 + beta**p) / ((1 + beta) * (1 - beta**p))


def _bracket(kappa: sympy.Expr) -> sympy.Expr:
    eta, L, L_max, beta = symbols("eta L L_max beta")
    return 1 - eta * L_max / 2 - kappa * eta * beta * L / (1 - beta)


def _common(kappa: sympy.Expr) -> tuple[Step, ...]:
    import sympy

    eta, L, L_max, beta = symbols("eta L L_max beta")
    x, m, g = sympy.symbols("x m g", real=True)
    A, B = sympy.symbols("A B", nonnegative=True)
    total, bracket = sympy.symbols("total bracket", positive=True)
    shift = eta * beta / (1 - beta)
    after = beta * m + (1 - beta) * g
    return (
        Step(
            "z = x - eta beta/(1 - beta) m is moved by -eta g: in z the method has no momentum",
            (x - eta * after) - shift * after,
            (x - shift * m) - eta * g,
        ),
        Step(
            "the descent lemma at z, with a gradient read at x, eta beta/(1 - beta) |m| away: a step "
            "gains at least",
            eta * A**2 - eta * L * (shift * B) * A - L_max / 2 * eta**2 * A**2,
            eta * ((1 - eta * L_max / 2) * A**2 - eta * beta * L / (1 - beta) * A * B),
        ),
        Step(
            "Cauchy-Schwarz over the steps with sum |m|^2 <= kappa^2 sum |g|^2: the gain is at least",
            eta * ((1 - eta * L_max / 2) * total - eta * beta * L / (1 - beta) * kappa * total),
            eta * _bracket(kappa) * total,
        ),
        Step(
            "and at most f0 - fstar, so the sum is at most",
            sympy.solve(eta * bracket * total - _gap(), total)[0].subs(bracket, _bracket(kappa)),
            _gap() / (eta * _bracket(kappa)),
        ),
    )


def _t6() -> Formula:
    import sympy

    eta, beta = symbols("eta beta")
    bracket = _bracket(sympy.S.One)
    young = Step(
        "kappa = 1: m is g convolved with (1 - beta) beta^j, whose sum over n terms is 1 - beta^n <= 1 (shown for 6)",
        (1 - beta) * sum(beta**j for j in range(6)),
        1 - beta**6,
    )
    return Formula(_gap() / (eta * bracket), condition=bracket, steps=(young, *_common(sympy.S.One)))


def _kernel_steps() -> tuple[Step, ...]:
    beta, p = symbols("beta p")
    whole = 4
    energy = sum(((1 - beta) * beta**k / (1 - beta**whole)) ** 2 for k in range(whole))
    return (
        Step(
            "cyclic order: at phase k of a cycle a block's m is its gradients convolved with (1 - beta) "
            "beta^(k + p j), of sum "
            "(1 - beta) beta^k/(1 - beta^p); the squares of these sums add up to kappa^2 (shown for p = 4)",
            energy,
            coherence_squared().subs(p, whole),
        ),
        Step("one block: kappa = 1", coherence_squared().subs(p, 1), symbols("p")[0] ** 0),
    )


def _t6_cyclic() -> Formula:
    import sympy

    eta = symbols("eta")[0]
    kappa = sympy.sqrt(coherence_squared())
    bracket = _bracket(kappa)
    return Formula(_gap() / (eta * bracket), condition=bracket, steps=(*_kernel_steps(), *_common(kappa)))


def _t6_cycles() -> Formula:
    import sympy

    eta, L, p, K = symbols("eta L p K")
    kappa = sympy.sqrt(coherence_squared())
    bracket = _bracket(kappa)
    drift = eta * L * kappa * sympy.sqrt(p * (p - 1) / 2)
    moves = sympy.symbols("m1:5", nonnegative=True)
    u = sympy.Symbol("u", nonnegative=True)
    count = 4
    squares = sum(i * sum(moves[:i]) for i in range(count))
    return Formula(
        (1 + drift) ** 2 * _gap() / (eta * bracket) / K,
        condition=bracket,
        steps=(
            Step(
                "after i steps of a cycle x has moved by at most eta sqrt(i) sqrt(the first i of |m|^2); over the "
                "cycle that is at most eta^2 p (p-1)/2 sum |m|^2 (shown for p = 4)",
                sympy.Rational(count * (count - 1), 2) * sum(moves) - squares,
                sum(j * (j + 1) * move / 2 for j, move in enumerate(moves)),
                nonnegative=True,
            ),
            Step("Minkowski", (u + drift * u) ** 2, (1 + drift) ** 2 * u**2),
            Step(
                "and T6 for the sum of |g|^2",
                ((1 + drift) ** 2 * u**2).subs(u**2, _gap() / (eta * bracket)) / K,
                (1 + drift) ** 2 * _gap() / (eta * bracket) / K,
            ),
        ),
    )


def _t6_corollary() -> Formula:
    import sympy

    eta, L, L_max, beta = symbols("eta L L_max beta")
    limit = 1 / sympy.Max(2 * L_max, 2 * beta * L / (1 - beta))
    u, v = sympy.symbols("u v", nonnegative=True)
    # eta L_max = 1/(2 (1 + u)) and eta beta L/(1 - beta) = 1/(2 (1 + v)) run over all steps up to the limit.
    first, second = 1 / (2 * (1 + u)), 1 / (2 * (1 + v))
    return Formula(
        4 * _gap() / eta,
        step_limit=limit,
        condition=1 - eta * sympy.Max(2 * L_max, 2 * beta * L / (1 - beta)),
        closed=True,
        steps=(
            Step(
                "eta L_max <= 1/2 and eta beta L/(1 - beta) <= 1/2 leave the bracket of T6 at least 1/4, by",
                sympy.together((1 - first / 2 - second) - sympy.Rational(1, 4)),
                sympy.together(u / (4 * (1 + u)) + v / (2 * (1 + v))),
                nonnegative=True,
            ),
            Step("so the sum is at most", _gap() / (eta * sympy.Rational(1, 4)), 4 * _gap() / eta),
        ),
    )


# --- T6b ---------------------------------------------------------------------------------------------------


def _ratio() -> sympy.Expr:
    beta = symbols("beta")[0]
    return (1 + beta) / (1 - beta)


def _budget() -> sympy.Expr:
    eta, L_max = symbols("eta L_max")
    return _gap() / (eta * (1 - eta * L_max / 2))


def _t6b_energy() -> Formula:
    import sympy

    eta, L_i, beta, m2 = symbols("eta L_i beta m2")
    m, after = sympy.symbols("m m_after", real=True)
    g = (after - beta * m) / (1 - beta)
    weight = eta * beta / (2 * (1 - beta))
    gain = eta * g * after - L_i / 2 * eta**2 * after**2
    return Formula(
        eta * (1 - eta * L_i / 2) * m2,
        condition=1 - eta * L_i / 2,
        steps=(
            Step("the momentum after the step holds the gradient", beta * m + (1 - beta) * g, after),
            Step(
                "E = f + eta beta/(2 (1 - beta)) |m|^2: the decrease in E exceeds the claim by",
                gain + weight * (m**2 - after**2) - eta * (1 - eta * L_i / 2) * after**2,
                weight * (m - after) ** 2,
                nonnegative=True,
            ),
            Step(
                "nothing at m = m+, where the decrease is",
                gain.subs(m, after).subs(after, sympy.sqrt(m2)),
                eta * (1 - eta * L_i / 2) * m2,
            ),
        ),
    )


def _t6b() -> Formula:
    import sympy

    eta, L_max, beta = symbols("eta L_max beta")
    u = sympy.Symbol("u", nonnegative=True)
    return Formula(
        _ratio() ** 2 * _budget(),
        condition=1 - eta * L_max / 2,
        steps=(
            Step(
                "|g| <= (|m+| + beta |m|)/(1 - beta), and Minkowski over the steps: the last m of a "
                "block is an earlier m+",
                ((u + beta * u) / (1 - beta)) ** 2,
                _ratio() ** 2 * u**2,
            ),
            Step(
                "the energy telescopes: sum |m+|^2 <= D",
                (_ratio() ** 2 * u**2).subs(u**2, _budget()),
                _ratio() ** 2 * _budget(),
            ),
        ),
    )


def _t6b_cycles() -> Formula:
    import sympy

    eta, L, L_max, p = symbols("eta L L_max p")
    moves = sympy.symbols("m1:6", nonnegative=True)
    u = sympy.Symbol("u", nonnegative=True)
    count = 5
    factor = (_ratio() + eta * L * sympy.sqrt(p - 1)) ** 2
    return Formula(
        factor * _budget(),
        condition=1 - eta * L_max / 2,
        steps=(
            Step(
                "before its turn a block sees the point moved by the earlier blocks' eta m+, once each: "
                "summed over blocks at "
                "most (p-1) sum |m+|^2 (shown for p = 5)",
                (count - 1) * sum(moves) - sum(sum(moves[:i]) for i in range(count)),
                sum(j * move for j, move in enumerate(moves)),
                nonnegative=True,
            ),
            Step(
                "Minkowski with sum |g|^2 <= r^2 D",
                (_ratio() * u + eta * L * sympy.sqrt(p - 1) * u) ** 2,
                factor * u**2,
            ),
            Step("and sum |m+|^2 <= D", (factor * u**2).subs(u**2, _budget()), factor * _budget()),
        ),
    )


def _rays() -> tuple[list[sympy.Expr], list[sympy.Expr]]:
    """Numerators and denominators of sum |g|^2 over the energy spent, at the corners v in {0, u}, w in {0, 4u}."""
    eta, L_max, beta = symbols("eta L_max beta")
    b, a = beta / (1 - beta), eta * L_max
    far = 4 * beta / (1 - beta) ** 2
    numerators = [1 + b * s + far * t for s in (0, 1) for t in (0, 1)]
    denominators = [1 - a / 2 + b / 2 * s + 2 * b * t for s in (0, 1) for t in (0, 1)]
    return numerators, denominators


def frozen_constant() -> sympy.Expr:
    """The largest of the four ratios; r^2/(r - a/2) decides once it is at least 2 and above 1/(1 - a/2) (T6b)."""
    import sympy

    return sympy.Max(*(top / bottom for top, bottom in zip(*_rays(), strict=True)))


def _t6b_sharp() -> Formula:
    import sympy

    eta, L_max, beta = symbols("eta L_max beta")
    m, after = sympy.symbols("m m_after", real=True)
    s, t, constant = sympy.symbols("s t C", nonnegative=True)
    b = beta / (1 - beta)
    g = (after - beta * m) / (1 - beta)
    weight = eta * beta / (2 * (1 - beta))
    corners = [(1 - s) * (1 - t), (1 - s) * t, s * (1 - t), s * t]
    numerators, denominators = _rays()
    return Formula(
        _gap() / eta * frozen_constant(),
        condition=1 - eta * L_max / 2,
        steps=(
            Step(
                "the energy's decrease, nothing dropped (T6b-energy drops the second term)",
                eta * g * after - L_max / 2 * eta**2 * after**2 + weight * (m**2 - after**2),
                eta * (1 - eta * L_max / 2) * after**2 + weight * (after - m) ** 2,
            ),
            Step(
                "the gradient by the same quantities; the middle term telescopes over the steps of a block",
                g**2,
                after**2 + b * (after**2 - m**2) + beta / (1 - beta) ** 2 * (after - m) ** 2,
            ),
            Step(
                "u = sum |m+|^2, v = sum over blocks of the last |m|^2, w = sum |m+ - m|^2: v <= u, and w <= 4 u by",
                2 * after**2 + 2 * m**2 - (after - m) ** 2,
                (after + m) ** 2,
                nonnegative=True,
            ),
            Step(
                "with v = s u and w = 4 t u the sum of |g|^2 lies between its values at the corners",
                1 + b * s + 4 * beta / (1 - beta) ** 2 * t,
                sum(corner * top for corner, top in zip(corners, numerators, strict=True)),
            ),
            Step(
                "and so does the energy spent, u + ... times eta, which is at most f0 - fstar",
                1 - eta * L_max / 2 + b / 2 * s + 2 * b * t,
                sum(corner * bottom for corner, bottom in zip(corners, denominators, strict=True)),
            ),
            Step("the corner s = 0, t = 1 is r^2/(r - a/2)", numerators[1], _ratio() ** 2),
            Step("its denominator", denominators[1], _ratio() - eta * L_max / 2),
            Step(
                "so the sum is at most the largest ratio times the energy",
                constant.subs(constant, frozen_constant()) * (_gap() / eta),
                _gap() / eta * frozen_constant(),
            ),
        ),
    )


def _t6b_sharp_cycles() -> Formula:
    import sympy

    eta, L, L_max, p = symbols("eta L L_max p")
    drift = eta * L * sympy.sqrt(p - 1)
    x, y = sympy.symbols("x y", nonnegative=True)
    expression = (sympy.sqrt(frozen_constant()) + drift / sympy.sqrt(1 - eta * L_max / 2)) ** 2 * _gap() / eta
    return Formula(
        expression,
        condition=1 - eta * L_max / 2,
        steps=(
            Step(
                "Minkowski as in T6b, with x^2 = sum |g|^2 over its energy and y^2 = sum |m+|^2 over its own",
                ((x + drift * y) ** 2 * _gap() / eta).subs(
                    {x: sympy.sqrt(frozen_constant()), y: 1 / sympy.sqrt(1 - eta * L_max / 2)}
                ),
                expression,
            ),
        ),
    )


_T6 = (SMOOTH, JOINT, BELOW, EXACT, MOMENTUM)
_T6B = (SMOOTH, BELOW, EXACT, FROZEN)
_SUM = "sum over all steps of the squared gradient of the selected block"
MOMENTUM_BOUNDS: Final[tuple[Bound, ...]] = (
    Bound("T6", "idle momentum, any order", "upper", "upper", _SUM, _T6, "T6",
          ("eta", "L", "L_max", "beta", "f0", "fstar"), _t6),
    Bound("T6-cyclic", "idle momentum, cyclic order", "upper", "upper", _SUM, (*_T6, CYCLIC), "T6",
          ("eta", "L", "L_max", "beta", "p", "f0", "fstar"), _t6_cyclic),
    Bound("T6-cycles", "idle momentum, mean over cycles", "upper", "upper",
          "mean over cycles of the squared full gradient at the start of each cycle", (*_T6, CYCLIC), "T6",
          ("eta", "L", "L_max", "beta", "p", "K", "f0", "fstar"), _t6_cycles),
    Bound("T6-corollary", "idle momentum, any order, small steps", "upper", "upper", _SUM,
          (*_T6, "eta <= min{1/(2 L_max), (1 - beta)/(2 beta L)}"), "T6",
          ("eta", "L", "L_max", "beta", "f0", "fstar"), _t6_corollary),
    Bound("T6b-energy", "frozen momentum, energy of one step", "upper", "lower",
          "decrease of f + eta beta/(2 (1 - beta)) sum |m_i|^2 in one step", (SMOOTH, EXACT, FROZEN), "T6b",
          ("eta", "L_i", "m2"), _t6b_energy, attained="f = L_i x^2 / 2 at beta = 0, or with m = m+"),
    Bound("T6b", "frozen momentum, any order", "upper", "upper", _SUM, _T6B, "T6b",
          ("eta", "L_max", "beta", "f0", "fstar"), _t6b),
    Bound("T6b-sharp", "frozen momentum, any order, sharp", "upper", "upper", _SUM, _T6B,
          "T6b with the energy's second term kept", ("eta", "L_max", "beta", "f0", "fstar"), _t6b_sharp),
    Bound("T6b-sharp-cycles", "frozen momentum, sum over cycles, sharp", "upper", "upper",
          "sum over cycles of the squared full gradient at the start of each cycle",
          (*_T6B, JOINT, "each cycle visits each of the p blocks once, in any order"),
          "T6b with the energy's second term kept",
          ("eta", "L", "L_max", "beta", "p", "f0", "fstar"), _t6b_sharp_cycles),
    Bound("T6b-cycles", "frozen momentum, sum over cycles", "upper", "upper",
          "sum over cycles of the squared full gradient at the start of each cycle",
          (*_T6B, JOINT, "each cycle visits each of the p blocks once, in any order"), "T6b",
          ("eta", "L", "L_max", "beta", "p", "f0", "fstar"), _t6b_cycles),
)  # fmt: skip
