"""Classical rates of exact block descent: Beck and Tetruashvili (cyclic, convex) and Nesterov (random)."""

from __future__ import annotations

from typing import Final

from bcd_theory.bounds import Bound, Formula, Step, contraction_step, symbols

SMOOTH = "the gradient of f along each block is Lipschitz (L_i), uniformly over the other blocks"
JOINT = "the gradient of f is Lipschitz (L)"
CONVEX = "f is convex and the level set of the start is bounded"
NO_MOMENTUM = "exact block gradients, no momentum"
CYCLIC = "each cycle visits each of the p blocks once, in any order"


def _beck_tetruashvili(sharp: bool) -> Formula:
    import sympy

    L, L_max, p, K, R = symbols("L L_max p K R")
    ratio = L / L_max
    root = sympy.sqrt(p - 1)
    # phi / (2 L_max): |grad f(x^k)|^2 <= 2 L_max phi (f_k - f_{k+1}) at eta = 1/L_max, by T2 with delta = 0.
    factor = (1 + root * ratio) ** 2 if sharp else 2 * (1 + p * ratio**2)
    start = 4 * L_max * factor / L  # 1/(gamma gap_0) where gap_0 is at its largest, L R^2 / 2
    offset = start if sharp else 8 / p
    expression = 2 * L_max * factor * R**2 / (K + offset)
    gamma, x = sympy.symbols("gamma x", positive=True)
    w = sympy.Symbol("w", nonnegative=True)
    weaker = Step(
        "the published offset is smaller: with L = p L_max/(1 + w), as L <= p L_max, by",
        sympy.together(start.subs(L, p * L_max / (1 + w)) - offset),
        sympy.together(8 * w / p + 8 * p**2 / (1 + w)),
        nonnegative=True,
    )
    return Formula(
        expression,
        steps=(
            Step(
                "convexity: gap <= R |grad f|, so gap_k - gap_{k+1} >= gamma gap_k^2; then 1/gap grows by at least "
                "gamma, as 1/y - 1/x for y = x - gamma x^2 exceeds gamma by",
                sympy.together(1 / (x - gamma * x**2) - 1 / x - gamma),
                gamma**2 * x / (1 - gamma * x),
            ),
            Step(
                "gamma = 1/(2 L_max phi R^2) gives the rate",
                (1 / (gamma * (K + offset))).subs(gamma, 1 / (2 * L_max * factor * R**2)),
                expression,
            ),
            Step(
                "gap_0 <= L R^2/2, so 1/(gamma gap_0) is at least",
                (1 / (gamma * L * R**2 / 2)).subs(gamma, 1 / (2 * L_max * factor * R**2)),
                start,
            ),
            *(() if sharp else (weaker,)),
        ),
    )


def _nesterov() -> Formula:
    import sympy

    p, T, R1 = symbols("p T R1")
    gamma, x = sympy.symbols("gamma x", positive=True)
    expression = 2 * p * R1**2 / (T + 4)
    return Formula(
        expression,
        steps=(
            Step(
                "a step at 1/L_i gains |g_i|^2 / (2 L_i); on average (1/2p) sum |g_i|^2/L_i >= gap^2/(2 "
                "p R1^2) by convexity",
                gamma.subs(gamma, 1 / (2 * p * R1**2)) * x**2,
                x**2 / (2 * p * R1**2),
            ),
            Step(
                "1/E[gap] grows by at least 1/(2 p R1^2) a step, from at least 2/(p R1^2), as f0 - fstar "
                "<= p R1^2/2",
                1 / (2 / (p * R1**2) + T / (2 * p * R1**2)),
                expression,
            ),
        ),
    )


def _nesterov_strong() -> Formula:
    import sympy

    p, T, sigma, f0, fstar = symbols("p T sigma f0 fstar")
    gap = sympy.symbols("gap", positive=True)
    return Formula(
        (1 - sigma / p) ** T * (f0 - fstar),
        steps=(
            Step(
                "(1/2p) sum |g_i|^2/L_i >= (1/2p) 2 sigma gap by strong convexity in the weighted norm",
                gap - 2 * sigma * gap / (2 * p),
                (1 - sigma / p) * gap,
            ),
            contraction_step(sigma / p, T),
        ),
    )


CLASSICAL_BOUNDS: Final[tuple[Bound, ...]] = (
    Bound("Beck-Tetruashvili", "cyclic block descent, convex rate", "upper", "upper", "f - fstar after K cycles",
          (SMOOTH, JOINT, CONVEX, NO_MOMENTUM, CYCLIC, "eta = 1/L_max"),
          "Beck and Tetruashvili, SIAM J. Optim. 23(4), 2013, Theorem 3.6 with all block constants L_max",
          ("L", "L_max", "p", "K", "R"), lambda: _beck_tetruashvili(sharp=False)),
    Bound("Beck-Tetruashvili-sharp", "cyclic block descent, convex rate with T2's factor", "upper", "upper",
          "f - fstar after K cycles", (SMOOTH, JOINT, CONVEX, NO_MOMENTUM, CYCLIC, "eta = 1/L_max"),
          "Theorem 3.6 of Beck and Tetruashvili (2013) with the cycle factor of T2 and the start's own offset",
          ("L", "L_max", "p", "K", "R"), lambda: _beck_tetruashvili(sharp=True)),
    Bound("Nesterov", "random block descent, convex rate", "upper", "upper",
          "expectation of f - fstar after T steps",
          (SMOOTH, CONVEX, NO_MOMENTUM, "uniform block, independent of the iterate", "eta = 1/L_i"),
          "Nesterov, SIAM J. Optim. 22(2), 2012, Theorem 1 at alpha = 0", ("p", "T", "R1"), _nesterov),
    Bound("Nesterov-strong", "random block descent, strongly convex rate", "upper", "upper",
          "expectation of f - fstar after T steps",
          (SMOOTH, "f is sigma-strongly convex in the norm sqrt(sum L_i |x_i|^2)", NO_MOMENTUM,
           "uniform block, independent of the iterate", "eta = 1/L_i"),
          "Nesterov, SIAM J. Optim. 22(2), 2012, Theorem 2 at alpha = 0",
          ("p", "T", "sigma", "f0", "fstar"), _nesterov_strong),
)  # fmt: skip
