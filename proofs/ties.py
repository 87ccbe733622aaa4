"""The tie between Coq and the package: each formula of Formulas.v beside the Python that computes it.

A tie is a callable with the formula's arguments in Coq's order. Where the package's formula is symbolic the two
values are compared exactly, at rational points; where it is floating point, to rounding. What has no counterpart
is listed with the reason, and so is every bound of ``bcd_theory`` that no formula covers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import sympy as sp

Tie = Callable[..., Any]


@cache
def _bound(name: str, /) -> sp.Expr:
    from bcd_theory import BOUNDS

    return BOUNDS[name].expression


def _at(expression: sp.Expr, **values: object) -> sp.Expr:
    """``expression`` with values put in by name; every symbol must be given."""
    symbols = {symbol.name: symbol for symbol in expression.free_symbols}
    missing = set(symbols) - set(values)
    if missing:
        raise ValueError(f"no value for {', '.join(sorted(missing))}")
    pairs = [(symbol, sp.sympify(values[name])) for name, symbol in symbols.items()]
    return expression.subs(pairs, simultaneous=True)


def _bound_at(name: str, /, **values: object) -> sp.Expr:
    return _at(_bound(name), **values)


def _from_stepsize(name: str, **values: object) -> sp.Expr:
    from bcd_theory import stepsize

    return _at(getattr(stepsize, name)(), **values)


def _largest_textbook_step(L: Any, delta: Any) -> sp.Expr:
    from bcd_theory import BOUNDS

    limit = BOUNDS["T2-textbook-step"].largest_step()
    assert limit is not None
    return _at(limit, L_max=L, delta=delta)


def _largest_angle_step(L: Any, rho: Any, cosine: Any) -> sp.Expr:
    from bcd_theory import BOUNDS

    limit = BOUNDS["T2-angle"].largest_step()
    assert limit is not None
    return _at(limit, L_i=L, rho=rho, cosine=cosine)


def _coherence(beta: Any, p: Any) -> sp.Expr:
    from bcd_theory.momentum_bounds import coherence_squared

    return _at(coherence_squared(), beta=beta, p=p)


def _idle_bracket(Lmax: Any, L: Any, eta: Any, beta: Any, p: Any = None) -> sp.Expr:
    from bcd_theory import BOUNDS

    condition = BOUNDS["T6" if p is None else "T6-cyclic"].formula.condition
    assert condition is not None
    return _at(condition, L_max=Lmax, L=L, eta=eta, beta=beta, p=p)


def _coast(x0: Any, m0: Any, eta: Any, beta: Any, K: Any) -> float:
    from bcd_theory import idle_displacement

    moved = idle_displacement(
        "sgd-ema", steps=int(K), first_moment=float(m0), learning_rate=float(eta), momentum=float(beta)
    )
    return float(x0) + float(moved)


def _coast_limit(x0: Any, m0: Any, eta: Any, beta: Any) -> float:
    from bcd_theory.momentum import shifted_iterate

    return float(shifted_iterate(float(x0), float(m0), float(eta), float(beta)))


def _uncoupled(beta: Any, p: Any = 1) -> float:
    from bcd_theory.momentum import uncoupled_limit

    return uncoupled_limit(1.0, momentum=float(beta), cycle_length=int(p))


def _energy_weight(eta: Any, beta: Any) -> float:
    from bcd_theory.momentum import block_energy

    return block_energy(0.0, [[1.0]], float(eta), float(beta))


def _adamw_step(m: Any, v: Any, beta1: Any, beta2: Any, eps: Any, s: Any, j: Any) -> float:
    from bcd_theory.momentum import idle_step

    moved = idle_step(
        "adamw",
        k=int(j),
        first_moment=float(m),
        second_moment=float(v),
        step_count=int(s),
        learning_rate=1.0,
        betas=(float(beta1), float(beta2)),
        eps=float(eps),
    )
    return -float(moved)


def _drift(beta1: Any, beta2: Any, p: Any) -> float:
    from bcd_theory import steady_movement

    return steady_movement("momentum", int(p), (float(beta1), float(beta2)))


def _noise(eta: Any, beta: Any, lam: Any, s2: Any) -> float:
    from bcd_theory.noise import uncoupled_variance

    found = uncoupled_variance(float(lam), float(s2), float(eta), momentum=float(beta), idle="full")
    return float(found)


def _reach(p: Any) -> float:
    from bcd_theory.cost import mean_reach

    return mean_reach(5 * int(p), 5)


def _reach_interleaved(p: Any, N: Any) -> float:
    from bcd_theory.cost import mean_reach

    if int(N) % int(p):
        raise ValueError(f"{N} layers do not make {p} equal blocks")
    return mean_reach(int(N), int(N) // int(p), "interleaved")


def _exact_speedup(r_in: Any, r_ad: Any, p: Any) -> sp.Expr:
    from bcd_theory.cost import exact_layers_speedup

    return exact_layers_speedup(r_in, r_ad, (1 + 1 / p) / 2, 1 / p)


def _true_gradient(x: Any, b: Any) -> float:
    from bcd_theory.identity import scalar_counterexample

    return scalar_counterexample(0.25, float(b), float(x)).true


def _cycle_trace(matrix: list[list[float]], eta: float, momentum: float) -> float:
    """Trace of bcd_theory's cycle map with blocks of one coordinate."""
    import numpy as np

    from bcd_theory.cycle import CycleMap, block_rows
    from bcd_theory.partition import Partition

    field = np.asarray(matrix)
    n = len(field)
    partition = Partition([[i] for i in range(n)])
    cycle = CycleMap(partition, block_rows(field, partition), range(n), momentum, 1 - momentum)
    return float(np.trace(cycle.difference(eta, np.eye(cycle.size))) + cycle.size)


TIES: dict[str, Tie] = {
    "descent_coeff": lambda eta, L: _from_stepsize("descent_coefficient", eta=eta, L_i=L),
    # a sum over T steps with c of decrease: T2 with one block, delta = 0, eta = 2 c and eta L_max = 1
    "telescope_bound": lambda f0, fstar, c, T: _bound_at(
        "T2", f0=f0, fstar=fstar, eta=2 * c, L_max=1 / (2 * c), L=1, delta=0, p=1, K=T
    ),
    # the contraction by q: T3 for random blocks with p = 1, eta = L_max = 1 and mu = q
    "pl_bound": lambda f0, fstar, q, T: _bound_at(
        "T3-random", f0=f0, fstar=fstar, eta=1, L_max=1, mu=q, p=1, T=T
    ),
    "cyclic_factor": lambda N, L, eta: _from_stepsize("textbook_factor", p=N, L=L, eta=eta, delta=0),
    "coast_position": _coast,
    "coast_limit": _coast_limit,
    "true_grad_a": _true_gradient,
    "biased_coeff": lambda eta, L, delta: (
        eta * _from_stepsize("textbook_constant", eta=eta, L_max=L, delta=delta)
    ),
    "biased_step_max": _largest_textbook_step,
    "momentum_trace": lambda beta, eta, lam: _cycle_trace([[float(lam)]], float(eta), float(beta)),
    "momentum_edge": _uncoupled,
    "sharp_constant": lambda a, delta: _from_stepsize("biased_constant", eta=a, L_max=1, delta=delta),
    "cycle_factor": lambda L, eta, delta, q: _from_stepsize(
        "cycle_factor", L=L, eta=eta, delta=delta, p=q + 1
    ),
    "cycle_bound": lambda f0, fmin, Lmax, L, eta, delta, q: _bound_at(
        "T2", f0=f0, fstar=fmin, L_max=Lmax, L=L, eta=eta, delta=delta, p=q + 1, K=1
    ),
    "textbook_bound": lambda f0, fmin, Lmax, L, eta, delta, p: _bound_at(
        "T2-textbook", f0=f0, fstar=fmin, L_max=Lmax, L=L, eta=eta, delta=delta, p=p, K=1
    ),
    "pl_cycle_rate": lambda mu, Lmax, L, eta, delta, q: (
        1 - _bound_at("T3", f0=1, fstar=0, mu=mu, L_max=Lmax, L=L, eta=eta, delta=delta, p=q + 1, K=1)
    ),
    "pl_random_rate": lambda mu, Lmax, eta, p: (
        1 - _bound_at("T3-random", f0=1, fstar=0, mu=mu, L_max=Lmax, eta=eta, p=p, T=1)
    ),
    "frozen_energy_weight": _energy_weight,
    "frozen_total": lambda f0, fmin, Lmax, eta: _bound_at(
        "T6b", f0=f0, fstar=fmin, L_max=Lmax, eta=eta, beta=0
    ),
    "frozen_bound": lambda f0, fmin, Lmax, eta, beta: _bound_at(
        "T6b", f0=f0, fstar=fmin, L_max=Lmax, eta=eta, beta=beta
    ),
    "frozen_cycle_bound": lambda f0, fmin, Lmax, L, eta, beta, q: _bound_at(
        "T6b-cycles", f0=f0, fstar=fmin, L_max=Lmax, L=L, eta=eta, beta=beta, p=q + 1
    ),
    "idle_bracket": _idle_bracket,
    "idle_bound": lambda f0, fmin, Lmax, L, eta, beta: _bound_at(
        "T6", f0=f0, fstar=fmin, L_max=Lmax, L=L, eta=eta, beta=beta
    ),
    "coherence_squared": _coherence,
    "cyclic_bracket": _idle_bracket,
    "cyclic_idle_bound": lambda f0, fmin, Lmax, L, eta, beta, p: _bound_at(
        "T6-cyclic", f0=f0, fstar=fmin, L_max=Lmax, L=L, eta=eta, beta=beta, p=p
    ),
    "cyclic_idle_cycle_bound": lambda f0, fmin, Lmax, L, eta, beta, p: _bound_at(
        "T6-cycles", f0=f0, fstar=fmin, L_max=Lmax, L=L, eta=eta, beta=beta, p=p, K=1
    ),
    "angle_coeff": lambda eta, L, rho, cosine: _bound_at(
        "T2-angle", eta=eta, L_i=L, rho=rho, cosine=cosine, g2=1
    ),
    "angle_step_max": _largest_angle_step,
    "idle_simple_bound": lambda f0, fmin, eta: _bound_at("T6-corollary", f0=f0, fstar=fmin, eta=eta),
    "uncoupled_edge": _uncoupled,
    "two_block_trace": lambda a, eta: _cycle_trace([[1.0, float(a)], [float(a), 1.0]], float(eta), 0.0),
    "adamw_idle_step": _adamw_step,
    "adamw_drift_per_cycle": _drift,
    "lora_curvature_simple": lambda c, a, b, sG: _bound_at("T8-simple", a=a, b=b, s=1, L_W=c, G=sG),
    "lora_curvature": lambda c, a, b, sG: _bound_at("T8", a=a, b=b, s=1, L_W=c, G=sG),
    "noise_variance": _noise,
    "reach_mean": _reach,
    "reach_interleaved_mean": _reach_interleaved,
    "exact_layer_speedup": _exact_speedup,
}

UNTIED_FORMULAS: dict[str, str] = {
    "pulse_position": "the package needs the response to a pulse only through the trajectories it simulates",
    "idle_cycle_bound": "any order (kappa = 1); the package computes the cyclic order's cyclic_idle_cycle_bound",
}

UNPROVED_BOUNDS: dict[str, str] = {
    "T2-exact": "T2 at delta = 0, eta = 1/L_max: a value of cycle_bound, compared in the tests of ties",
    "T2-cycle": "S times cycle_factor",
    "T2-textbook-cycle": "S times the textbook factor; proved inside claim_textbook_cyclic",
    "Beck-Tetruashvili": "a published theorem, cited and not formalised",
    "Beck-Tetruashvili-sharp": "a published theorem, cited and not formalised",
    "Nesterov": "a published theorem, cited and not formalised",
    "Nesterov-strong": "a published theorem, cited and not formalised",
    "T6b-sharp": "sharper than frozen_bound, derived symbolically in bcd_theory only",
    "T6b-sharp-cycles": "sharper than frozen_cycle_bound, derived symbolically in bcd_theory only",
    "T7-bias": "a product over layers: claim_identity_bias, not a scalar closed form",
    "T7-bias-exponential": "a sum over layers: claim_identity_bias, not a scalar closed form",
    "T7-relative": "a product over layers: claim_relative_bias, not a scalar closed form",
    "T7-flow": "a product over layers: claim_gradient_flow, not a scalar closed form",
    "T8-gradient": "the bound on |G| over the region is derived symbolically in bcd_theory only",
}
"""Bounds of ``bcd_theory.BOUNDS`` that no formula of Formulas.v covers, and why."""

COVERED_BOUNDS: dict[str, str] = {
    "T1": "descent_coeff",
    "T2-step": "sharp_constant",
    "T2": "cycle_bound",
    "T2-textbook-step": "biased_coeff",
    "T2-textbook": "textbook_bound",
    "T3": "pl_cycle_rate",
    "T3-random": "pl_random_rate",
    "T6": "idle_bound",
    "T6-cyclic": "cyclic_idle_bound",
    "T6-cycles": "cyclic_idle_cycle_bound",
    "T6-corollary": "idle_simple_bound",
    "T6b-energy": "descent_coeff",
    "T6b": "frozen_bound",
    "T6b-cycles": "frozen_cycle_bound",
    "T2-angle": "angle_coeff",
    "T8": "lora_curvature",
    "T8-simple": "lora_curvature_simple",
}
"""Bounds of ``bcd_theory.BOUNDS`` and the formula that carries each."""
