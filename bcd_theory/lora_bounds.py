"""Smoothness of a LoRA block (T8), and T7's bias and gradient flow for equal layers, as bounds."""

from __future__ import annotations

from typing import Final

from bcd_theory.bounds import Bound, Formula, Step, symbols


def _t8() -> Formula:
    import sympy

    a, b, s, L_W, G = symbols("a b s L_W G")
    u, v = sympy.symbols("u v", real=True)
    c = s**2 * L_W
    corner = c * a * b + s * G
    expression = c * (a**2 + b**2) / 2 + sympy.sqrt(c**2 * (a**2 - b**2) ** 2 / 4 + corner**2)
    matrix = sympy.Matrix([[c * b**2, corner], [corner, c * a**2]])
    form = (sympy.Matrix([[u, v]]) * matrix * sympy.Matrix([u, v]))[0]
    return Formula(
        expression,
        steps=(
            Step(
                "W moves by s (B dA + dB A) to first order and by s dB dA to second: with |dA| = u, |dB| = v the "
                "Hessian's "
                "form is at most L_W s^2 (b u + a v)^2 + 2 s |G| u v",
                L_W * s**2 * (b * u + a * v) ** 2 + 2 * s * G * u * v,
                form,
            ),
            Step(
                "the form's largest eigenvalue is a root of its characteristic polynomial",
                (matrix - expression * sympy.eye(2)).det(),
                sympy.S.Zero,
            ),
            Step(
                "and the larger one",
                matrix.trace() / 2 + sympy.sqrt(sympy.expand(matrix.trace() ** 2 / 4 - matrix.det())),
                expression,
            ),
        ),
    )


def _t8_simple() -> Formula:
    import sympy

    a, b, s, L_W, G = symbols("a b s L_W G")
    c = s**2 * L_W
    half = c * (a**2 + b**2) / 2
    inside = c**2 * (a**2 - b**2) ** 2 / 4 + (c * a * b + s * G) ** 2
    simple = 2 * half + s * G
    return Formula(
        simple,
        steps=(
            Step(
                "above the sharp bound: squares of the two sides, less half the trace, differ by",
                (simple - half) ** 2 - inside,
                c * s * G * (a - b) ** 2,
                nonnegative=True,
            ),
            Step("equal at a = b", (simple - half).subs(b, a), sympy.sqrt(sympy.factor(inside.subs(b, a)))),
            Step("so the sharp bound is at most", half + sympy.sqrt((half + s * G) ** 2), simple),
        ),
    )


def _t8_gradient() -> Formula:
    a, b, s, L_W, G = symbols("a b s L_W G")
    return Formula(
        G + L_W * s * a * b,
        steps=(
            Step(
                "|grad_W f(W + s B A)| <= |G_0| + L_W |s B A| and |B A| <= a b",
                G + L_W * (s * b * a),
                G + L_W * s * a * b,
            ),
        ),
    )


def _t7_bias() -> Formula:
    import sympy

    lipschitz, m = symbols("lipschitz m")
    return Formula(
        (1 + lipschitz) ** m - 1,
        steps=(
            Step(
                "the expanded product of m factors I + F' less I is at most the same product of numbers less 1 "
                "(shown for m = 4)",
                sum(sympy.binomial(4, j) * lipschitz**j for j in range(1, 5)),
                ((1 + lipschitz) ** m - 1).subs(m, 4),
            ),
            Step(
                "one layer more takes a bias of d to (1 + l) d + l",
                (1 + lipschitz) * ((1 + lipschitz) ** (m - 1) - 1) + lipschitz,
                (1 + lipschitz) ** m - 1,
            ),
        ),
    )


def _t7_exponential() -> Formula:
    import sympy

    lipschitz, m = symbols("lipschitz m")
    z = sympy.Symbol("z", nonnegative=True)
    t = sympy.Symbol("t", nonnegative=True)
    return Formula(
        sympy.exp(m * lipschitz) - 1,
        steps=(
            Step(
                "1 + z <= exp z: the difference is the integral of t exp(z - t) over t in [0, z] (Taylor)",
                sympy.exp(z) - 1 - z,
                sympy.integrate(t * sympy.exp(z - t), (t, 0, z)),
            ),
            Step(
                "so the product of the 1 + l is at most",
                sympy.exp(lipschitz) ** m - 1,
                sympy.exp(m * lipschitz) - 1,
            ),
        ),
    )


def _t7_relative() -> Formula:
    contraction, m = symbols("contraction m")
    return Formula(
        (1 - contraction) ** (-m) - 1,
        steps=(
            Step(
                "|J^-1| <= 1/(1 - l), so 1 + |J^-1 - I| <= 1 + l/(1 - l)",
                1 + contraction / (1 - contraction),
                1 / (1 - contraction),
            ),
            Step(
                "the product of m such factors, less 1, bounds the inverse of the true product less I: one layer "
                "more "
                "takes a relative bias of e to (1 + e)/(1 - l) - 1",
                (1 + ((1 - contraction) ** (1 - m) - 1)) / (1 - contraction) - 1,
                (1 - contraction) ** (-m) - 1,
            ),
        ),
    )


def _t7_flow() -> Formula:
    contraction, m = symbols("contraction m")
    return Formula(
        (1 - contraction) ** m,
        steps=(
            Step(
                "each |J g| >= |g| - l |g| = (1 - l) |g|: one layer more",
                (1 - contraction) * (1 - contraction) ** (m - 1),
                (1 - contraction) ** m,
            ),
        ),
    )


_CHAIN = "residual chain, every skipped branch Lipschitz"
_SMOOTH_W = (
    "|Hessian of f by W| <= L_W; spectral norms |A| <= a, |B| <= b; gradient by W at most G in spectral norm"
)
_UNITS = "hidden gradient, in units of the top gradient"
LORA_BOUNDS: Final[tuple[Bound, ...]] = (
    Bound("T7-bias", "identity mode, absolute bias of m equal layers", "upper", "upper", f"bias of the {_UNITS}",
          (_CHAIN,), "T7", ("lipschitz", "m"), _t7_bias, attained="scalar layers J = 1 + l"),
    Bound("T7-bias-exponential", "identity mode, absolute bias, exponential form", "upper", "upper",
          f"bias of the {_UNITS}", (_CHAIN,), "T7", ("lipschitz", "m"), _t7_exponential),
    Bound("T7-relative", "identity mode, bias relative to the true hidden gradient", "upper", "upper",
          "bias over the norm of the true hidden gradient", (_CHAIN, "Lipschitz constants below 1"), "T7",
          ("contraction", "m"), _t7_relative, attained="scalar layers J = 1 - l"),
    Bound("T7-flow", "gradient flow through m layers", "upper", "lower", f"norm of the true {_UNITS}",
          (_CHAIN, "Lipschitz constants below 1"), "T7", ("contraction", "m"), _t7_flow,
          attained="scalar layers J = 1 - l"),
    Bound("T8", "smoothness of a LoRA block", "upper", "upper",
          "norm of the Hessian of (A, B) -> f(W + s B A)", (_SMOOTH_W,), "T8",
          ("a", "b", "s", "L_W", "G"), _t8, attained="one-dimensional W, A = a, B = b"),
    Bound("T8-simple", "smoothness of a LoRA block, simpler form", "upper", "upper",
          "norm of the Hessian of (A, B) -> f(W + s B A)", (_SMOOTH_W,), "T8",
          ("a", "b", "s", "L_W", "G"), _t8_simple, attained="one-dimensional W, A = B = a"),
    Bound("T8-gradient", "gradient by the adapted weights over the region", "upper", "upper",
          "spectral norm of grad_W f(W + s B A), from G at B A = 0", (_SMOOTH_W,), "T8",
          ("a", "b", "s", "L_W", "G"), _t8_gradient),
)  # fmt: skip
