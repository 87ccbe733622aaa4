"""Symbolic derivations: each starts from the algorithm and ends in a formula of Formulas.v.

A second road to the closed forms, independent of the Coq proofs: :func:`outcome` runs the derivation that
belongs to a claim and says whether sympy's expression and the proved formula are the same.
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


@derivation("claim_descent", "claim_block_descent")
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


@derivation("claim_stable", "claim_ema_limit")
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


@derivation("claim_biased_block", "claim_sharp_positive")
def sharp_step(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Least decrease over surrogates of size rho |g|: linear in rho^2, so it sits at rho = 1 -+ delta."""
    a, delta, rho = _real("a delta rho")
    inner = (rho**2 + 1 - delta**2) / 2  # least <g, g~> / |g|^2, from |g~ - g| <= delta |g|
    decrease = inner - a * rho**2 / 2
    yield sp.diff(decrease, rho, 3), sp.Integer(0)
    ends = [decrease.subs(rho, 1 - delta), decrease.subs(rho, 1 + delta)]
    low, high = formulas["sharp_constant"](a, delta).args
    yield sp.expand((ends[0] - low) * (ends[0] - high)), sp.Integer(0)
    yield sp.expand((ends[1] - low) * (ends[1] - high)), sp.Integer(0)


@derivation("claim_biased_cyclic", "claim_biased_one_cycle")
def sharp_cycles(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Minkowski over a cycle, then telescoping: at delta = 0, p = 1 the classical 2 L (f0 - fmin)."""
    f0, fmin, L, U = _real("f0 fmin L U")
    eta, delta, Lmax = sp.symbols("eta delta L_max", positive=True)
    for q in (1, 4):
        drift = sp.sqrt(sum((L * eta * (1 + delta)) ** 2 for _ in range(q)))
        yield sp.sqrt(q) * sp.sqrt((L * eta * (1 + delta)) ** 2), drift
        yield (
            (U + sp.sqrt(q) * L * eta * (1 + delta) * U) ** 2,
            formulas["cycle_factor"](L, eta, delta, q) * U**2,
        )
    yield formulas["cycle_bound"](f0, fmin, Lmax, L, 1 / Lmax, 0, 0), 2 * Lmax * (f0 - fmin)


@derivation("claim_pl_cyclic")
def pl_rate(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Decrease eta c U over a cycle with 2 mu (f - fmin) <= factor U."""
    mu, c, gap, factor, eta = sp.symbols("mu c gap factor eta", positive=True)
    least = sp.solve(2 * mu * gap - factor * sp.Symbol("U"), sp.Symbol("U"))[0]
    yield (gap - eta * c * least) / gap, 1 - 2 * mu * eta * c / factor
    Lmax, L, delta = sp.symbols("L_max L delta", positive=True)
    sharp, cycle = formulas["sharp_constant"](eta * Lmax, delta), formulas["cycle_factor"](L, eta, delta, 4)
    yield 2 * mu * eta * sharp / cycle, formulas["pl_cycle_rate"](mu, Lmax, L, eta, delta, 4)


@derivation("claim_frozen_energy", "claim_frozen_sum")
def frozen_momentum(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """The energy difference is the claimed decrease and a square; the gradient from two momenta."""
    eta, beta, L, old, new = _real("eta beta L old new")
    gradient = (new - beta * old) / (1 - beta)
    weight = formulas["frozen_energy_weight"](eta, beta)
    rise = -eta * gradient * new + L / 2 * eta**2 * new**2 + weight * (new**2 - old**2)
    yield rise + weight * (new - old) ** 2, -formulas["descent_coeff"](eta, L) * new**2
    f0, fmin, Lmax = _real("f0 fmin L_max")
    total = (f0 - fmin) / formulas["descent_coeff"](eta, Lmax)
    # (1 - beta)^2 |g|^2 <= (1 + beta) |new|^2 + beta (1 + beta) |old|^2, both sums at most the total
    factor = ((1 + beta) + beta * (1 + beta)) / (1 - beta) ** 2
    yield factor * total, formulas["frozen_bound"](f0, fmin, Lmax, eta, beta)


@derivation("claim_change_of_variable", "claim_momentum_descent", "claim_idle_sum", "claim_idle_simple")
def idle_momentum(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """z = x - eta beta/(1 - beta) m moves by -eta g; the displaced gradient costs the rest of the bracket."""
    x, m, g, eta, beta, L, Lmax = _real("x m g eta beta L L_max")
    m_next = beta * m + (1 - beta) * g
    shift = eta * beta / (1 - beta)
    yield (x - eta * m_next) - shift * m_next, (x - shift * m) - eta * g
    size = sp.Symbol("size", positive=True)  # |m| = |g| = size, the worst case of Cauchy-Schwarz at kappa = 1
    decrease = eta * size**2 - eta * L * shift * size * size - Lmax / 2 * eta**2 * size**2
    yield decrease / (eta * size**2), formulas["idle_bracket"](Lmax, L, eta, beta)
    f0, fmin = _real("f0 fmin")
    yield (f0 - fmin) / (eta * sp.Rational(1, 4)), formulas["idle_simple_bound"](f0, fmin, eta)


@derivation("claim_coherence", "claim_idle_sum_cyclic", "claim_idle_cycles_cyclic")
def coherence(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Periodic gradients are the worst case: kappa^2 is the energy of a block's momentum over one cycle."""
    beta, g = sp.symbols("beta g", positive=True)
    for p in (1, 2, 4):
        after = sp.solve(beta**p * sp.Symbol("m") + (1 - beta) * g - sp.Symbol("m"), sp.Symbol("m"))[0]
        energy = sum((beta**k * after) ** 2 for k in range(p))
        yield energy / g**2, formulas["coherence_squared"](beta, p)
    f0, fmin, Lmax, L, eta = sp.symbols("f0 fmin L_max L eta", positive=True)
    whole = formulas["idle_bound"](f0, fmin, Lmax, L, eta, beta)
    yield whole, formulas["cyclic_idle_bound"](f0, fmin, Lmax, L, eta, beta, 1)


@derivation("claim_angle", "claim_angle_limit")
def angle(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Put a surrogate of given length and cosine into the block's quadratic upper bound."""
    eta, L, rho, cosine, g = sp.symbols("eta L rho cosine g", positive=True)
    decrease = eta * cosine * g * (rho * g) - L / 2 * eta**2 * (rho * g) ** 2
    yield decrease / g**2, formulas["angle_coeff"](eta, L, rho, cosine)
    yield sp.solve(decrease / (eta * g**2), eta)[0], formulas["angle_step_max"](L, rho, cosine)


@derivation("claim_lora_simple")
def lora_simple(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """The two bounds at a = b, and their squares less half the trace in general."""
    a, b, c, g = sp.symbols("a b c sG", positive=True)
    yield formulas["lora_curvature"](c, a, a, g), formulas["lora_curvature_simple"](c, a, a, g)
    half = c * (a**2 + b**2) / 2
    simple, sharp = (
        formulas[name](c, a, b, g) - half for name in ("lora_curvature_simple", "lora_curvature")
    )
    yield sp.expand(simple**2 - sharp**2), sp.expand(c * g * (a - b) ** 2)


@derivation("claim_cycle_is_ema", "claim_uncoupled_limit", "claim_uncoupled_decays")
def uncoupled(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Run p steps, gradient at the first only: a cycle's matrix has trace and determinant of EMA with beta^p."""
    eta, beta, lam, z = _real("eta beta lam z")
    for p in (1, 2, 3):
        cycle = sp.eye(2)
        for step in range(p):
            h = lam if step == 0 else 0
            cycle = sp.Matrix([[1 - eta * (1 - beta) * h, -eta * beta], [(1 - beta) * h, beta]]) * cycle
        yield cycle.trace(), formulas["momentum_trace"](beta**p, eta, lam)
        yield cycle.det(), beta**p
        polynomial = z**2 - cycle.trace() * z + cycle.det()
        yield sp.solve(polynomial.subs(z, -1), lam)[0] * eta, formulas["uncoupled_edge"](beta, p)


@derivation("claim_pulse", "claim_pulse_total")
def pulse(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Run the recursion after one gradient."""
    x0, g, eta, beta = _real("x0 g eta beta")
    x, m = x0, (1 - beta) * g
    for k in range(1, 6):
        x = x - eta * m
        m = beta * m
        yield x, formulas["pulse_position"](x0, eta, beta, g, k)


@derivation("claim_two_blocks")
def two_blocks(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Multiply the two coordinate steps; at eta = 2 the largest root has modulus 1 for every coupling."""
    a, eta = _real("a eta")
    first = sp.Matrix([[1 - eta, -eta * a], [0, 1]])
    second = sp.Matrix([[1, 0], [-eta * a, 1 - eta]])
    cycle = second * first
    yield cycle.trace(), formulas["two_block_trace"](a, eta)
    yield cycle.det(), (1 - eta) ** 2
    yield sp.Integer(1), cycle.det().subs(eta, 2)


@derivation("claim_adamw_idle")
def adamw_idle(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Run torch's AdamW update with zero gradient: decay first, eps after the root, both corrections counting."""
    x0, m0, eta, lam = _real("x0 m0 eta lam")
    v0 = sp.Symbol("v0", positive=True)
    beta1, beta2, eps = sp.Rational(9, 10), sp.Rational(99, 100), sp.Rational(1, 7)
    start = 2
    x, m, v = x0, m0, v0
    closed = x0
    for j in range(1, 4):
        m, v = beta1 * m, beta2 * v
        corrected = m / (1 - beta1 ** (start + j)), v / (1 - beta2 ** (start + j))
        x = x * (1 - eta * lam) - eta * corrected[0] / (sp.sqrt(corrected[1]) + eps)
        closed = (1 - eta * lam) * closed - eta * formulas["adamw_idle_step"](
            m0, v0, beta1, beta2, eps, start, j
        )
        yield sp.expand(x), sp.expand(closed)


@derivation("claim_adamw_drift", "claim_drift_limit")
def adamw_drift(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Sum the movement of one period of the periodic state, at betas whose roots are rational; then the limit."""
    beta1 = sp.Rational(1, 3)
    for p in (1, 2, 4):
        beta2 = sp.Rational(9, 16)
        m, v = (1 - beta1) / (1 - beta1**p), (1 - beta2) / (1 - beta2**p)
        moved = sum(beta1**k * m / sp.sqrt(beta2**k * v) for k in range(p))
        yield moved, formulas["adamw_drift_per_cycle"](beta1, beta2, p)
    b = sp.Symbol("b", positive=True)
    for p in (2, 4):
        yield sp.limit(formulas["adamw_drift_per_cycle"](beta1, b, p), b, 1, "-"), sp.sqrt(p)


@derivation("claim_lora_block", "claim_lora_attained")
def lora_curvature(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Larger root of the characteristic polynomial of the 2 x 2 form."""
    a, b, c, g = sp.symbols("a b c sG", positive=True)
    u, v = _real("u v")
    form = c * (b * u + a * v) ** 2 + 2 * g * u * v
    matrix = sp.hessian(form, (u, v)) / 2
    value = formulas["lora_curvature"](c, a, b, g)
    yield sp.expand(value**2 - matrix.trace() * value + matrix.det()), sp.Integer(0)
    # the larger root: above half the trace by the square root
    yield sp.expand((value - matrix.trace() / 2) ** 2), sp.expand(matrix.trace() ** 2 / 4 - matrix.det())


@derivation("claim_noise_floor")
def noise_floor(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Solve the stationary equation P = M P M^T + Q of one EMA step with gradient noise."""
    eta, beta, lam, s2 = sp.symbols("eta beta lam s2", positive=True)
    xx, xm, mm = sp.symbols("xx xm mm")
    step = sp.Matrix([[1 - eta * (1 - beta) * lam, -eta * beta], [(1 - beta) * lam, beta]])
    kick = sp.Matrix([-eta * (1 - beta), 1 - beta])
    moments = sp.Matrix([[xx, xm], [xm, mm]])
    residual = step * moments * step.T + kick * kick.T * s2 - moments
    solution = sp.solve([residual[0, 0], residual[0, 1], residual[1, 1]], [xx, xm, mm], dict=True)[0]
    yield solution[xx], formulas["noise_variance"](eta, beta, lam, s2)


@derivation("claim_reach", "claim_reach_interleaved", "claim_exact_speedup")
def reach(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Sum the reached shares over the blocks of a cycle."""
    p, N = sp.symbols("p N", integer=True, positive=True)
    j = sp.Symbol("j", integer=True)
    yield sp.summation(1 - j / p, (j, 0, p - 1)) / p, formulas["reach_mean"](p)
    yield sp.summation(1 - j / N, (j, 0, p - 1)) / p, formulas["reach_interleaved_mean"](p, N)
    r_in, r_ad = _real("r_in r_ad")
    time = 1 + r_in * formulas["reach_mean"](p) + r_ad / p
    yield (1 + r_in + r_ad) / time, formulas["exact_layer_speedup"](r_in, r_ad, p)


@derivation("claim_lora_derivative")
def lora_derivative(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Differentiate f(W + s (B + t Y)(A + t X)) twice for a generic polynomial f."""
    W, s, A, B, X, Y, t, w = _real("W s A B X Y t w")
    c = sp.symbols("c0:5", real=True)
    f = sum(c[i] * w**i for i in range(5))
    weight = W + s * (B + t * Y) * (A + t * X)
    second = sp.diff(f.subs(w, weight), t, 2).subs(t, 0)
    at = W + s * B * A
    form = (
        sp.diff(f, w, 2).subs(w, at) * (s * (B * X + Y * A)) ** 2 + 2 * s * sp.diff(f, w).subs(w, at) * Y * X
    )
    yield sp.expand(second), sp.expand(form)


@derivation("claim_telescope", "claim_pl")
def telescoping(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """T equal decreases c g use up f0 - fmin; a contraction repeated T times."""
    f0, fmin, c, g, q = _real("f0 fmin c g q")
    for steps in (1, 2, 5):
        yield sp.solve(f0 - steps * c * g - fmin, g)[0], formulas["telescope_bound"](f0, fmin, c, steps)
        gap = f0 - fmin
        for _ in range(steps):
            gap = gap - q * gap
        yield gap, formulas["pl_bound"](f0, fmin, q, steps)


@derivation("claim_cyclic", "claim_biased", "claim_biased_step", "claim_textbook_cyclic")
def textbook(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """(u + e)^2 <= 2 u^2 + 2 e^2 over a cycle, and Cauchy-Schwarz and the triangle inequality for the bias."""
    L, eta, delta, g, U, f0, fmin = sp.symbols("L eta delta g U f0 fmin", positive=True)
    for p in (1, 3):
        drift = sum((L * eta) ** 2 * U for _ in range(p))
        yield (2 * U + 2 * drift) / U, formulas["cyclic_factor"](p, L, eta)
    inner, size = g**2 - g * (delta * g), (g + delta * g) ** 2
    decrease = eta * inner - L / 2 * eta**2 * size
    yield decrease / g**2, formulas["biased_coeff"](eta, L, delta)
    yield sp.solve(sp.cancel(decrease / (eta * g**2)), eta)[0], formulas["biased_step_max"](L, delta)
    total = (f0 - fmin) / (decrease / g**2)
    factor = (2 * U + 2 * 3 * (L * eta * (1 + delta)) ** 2 * U) / U
    yield factor * total, formulas["textbook_bound"](f0, fmin, L, L, eta, delta, 3)


@derivation("claim_pl_random")
def pl_random(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Mean decrease over p equally likely blocks, then PL."""
    mu, Lmax, eta, gap = sp.symbols("mu L_max eta gap", positive=True)
    for p in (1, 4):
        squares = sp.symbols(f"s0:{p}", positive=True)
        mean = sum(formulas["descent_coeff"](eta, Lmax) * s for s in squares) / p
        least = mean.subs(squares[0], 2 * mu * gap - sum(squares[1:]))
        yield sp.expand(least / gap), sp.expand(formulas["pl_random_rate"](mu, Lmax, eta, p))


@derivation("claim_frozen_cycles", "claim_idle_cycles")
def momentum_cycles(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Minkowski: gradients r sqrt(D) and moves eta L sqrt(p - 1) sqrt(D); idle moves add up as 0 + ... + p - 1."""
    f0, fmin, Lmax, L, eta, D = sp.symbols("f0 fmin L_max L eta D", positive=True)
    beta = sp.Symbol("beta", positive=True)
    for q in (1, 4):
        both = ((1 + beta) / (1 - beta) * sp.sqrt(D) + eta * L * sp.sqrt(q) * sp.sqrt(D)) ** 2
        total = (f0 - fmin) / formulas["descent_coeff"](eta, Lmax)
        yield formulas["frozen_total"](f0, fmin, Lmax, eta), total
        yield both.subs(D, 1) * total, formulas["frozen_cycle_bound"](f0, fmin, Lmax, L, eta, beta, q)
    for p in (2, 3):
        drift = eta * L * sp.sqrt(sum(range(p)))
        expected = (1 + drift) ** 2 * formulas["idle_bound"](f0, fmin, Lmax, L, eta, beta)
        yield expected, formulas["idle_cycle_bound"](f0, fmin, Lmax, L, eta, beta, p)
        kappa = sp.sqrt(formulas["coherence_squared"](sp.Rational(3, 4), p))
        bound = formulas["cyclic_idle_bound"](f0, fmin, Lmax, L, eta, sp.Rational(3, 4), p)
        found = formulas["cyclic_idle_cycle_bound"](f0, fmin, Lmax, L, eta, sp.Rational(3, 4), p)
        yield (1 + drift * kappa) ** 2 * bound, found
        bracket = formulas["cyclic_bracket"](Lmax, L, eta, sp.Rational(3, 4), p)
        yield (f0 - fmin) / bound / eta, bracket


@derivation("claim_quadratic_limit", "claim_sharp_attained")
def quadratic_step(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """One coordinate of f = L x^2/2: the exact step, and the surrogate (1 + delta) g at the edge, which returns -x."""
    x, eta, L, delta = sp.symbols("x eta L delta", positive=True)
    decrease = L * x**2 / 2 - L * (x - eta * L * x) ** 2 / 2
    yield decrease / (L * x) ** 2, formulas["descent_coeff"](eta, L)
    yield (x - eta * (1 + delta) * x).subs(eta, 2 / (1 + delta)), -x


@derivation("claim_idle_limit")
def idle_limit(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Multiply the three steps on (x, m): the row vector is an eigenvector with eigenvalue -(21/20)^3."""
    a, eta, beta = sp.Rational(6737, 15155), sp.Rational(27, 14), sp.Rational(3, 10)
    hessian = sp.Matrix([[1, a, -a], [a, 1, a], [-a, a, 1]])
    cycle = sp.eye(6)
    for block in range(3):
        gradient = sp.diag(*[int(i == block) for i in range(3)]) * hessian
        m_row = ((1 - beta) * gradient).row_join(beta * sp.eye(3))
        x_row = sp.eye(3).row_join(sp.zeros(3)) - eta * m_row
        cycle = x_row.col_join(m_row) * cycle
    row = sp.Matrix([[2765, 4879, 2401, 2165, -905, -2947]])
    yield from zip(row * cycle, -(sp.Rational(21, 20) ** 3) * row, strict=True)
    for minor in range(1, 4):  # positive definite, by its leading minors; unit diagonal
        yield sp.sign(hessian[:minor, :minor].det()), sp.Integer(1)


@derivation("claim_two_blocks_full")
def full_descent(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Eigenvalues 1 +- a of the matrix; the step at which the larger one reaches -1."""
    a, eta = _real("a eta")
    step = sp.eye(2) - eta * sp.Matrix([[1, a], [a, 1]])
    yield step.det(), (1 - eta * (1 + a)) * (1 - eta * (1 - a))
    yield sp.solve(1 - eta * (1 + a) + 1, eta)[0], 2 / (1 + a)


@derivation("claim_identity_ascends")
def identity_ascends(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """Change of the two-layer loss along the surrogate x: minus the true gradient times the step."""
    x, a, b, eta = _real("x a b eta")
    change = (1 + b) * (1 + a - eta * x) * x - (1 + b) * (1 + a) * x
    yield change, -eta * x * formulas["true_grad_a"](x, b)


@derivation("claim_skip_bias", "claim_identity_bias", "claim_gradient_flow", "claim_relative_bias")
def scalar_chain(formulas: dict[str, Formula]) -> Iterator[Pair]:
    """The bounds are attained by scalar chains: branches +l for the bias, -l for what is left of the gradient."""
    ls = sp.symbols("l0:3", positive=True)
    v = sp.Symbol("v", positive=True)
    true = kept = weak = v
    for j, branch in enumerate(ls):
        true, weak = true + branch * true, weak - branch * weak
        kept = kept + branch * kept if j == 1 else kept
    whole = sp.prod([1 + branch for branch in ls])
    least = sp.prod([1 - branch for branch in ls])
    yield true - kept, (whole - (1 + ls[1])) * v
    yield true - v, (whole - 1) * v
    yield weak, least * v
    yield (v - weak) / weak, 1 / least - 1
