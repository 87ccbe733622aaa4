"""Every bound against runs on the declared problems: is it violated, and how close does it come (tightness)?

The algorithms here are written out plainly and share nothing with the formulas. A ratio is observed / bound for an
upper bound and bound / observed for a lower one: it must not exceed 1, and the largest one is the bound's tightness.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bcd_theory.bounds import Bound
from bcd_theory.problems import Problem, declared_problems, lora_constant, random_lora_model
from bcd_theory.stepsize import BOUNDS

Array = NDArray[np.float64]
# Observed figures below this share of the problem's scale are rounding, not evidence: differences of f carry an error
# of about 1e-15 f, which leaves them nine digits above it.
FLOOR: Final = 1e-6
NOT_TESTABLE: Final = 0.01
CYCLES: Final = 8


class Case(NamedTuple):
    """One comparison: where, what was seen, what the bound says, and the cycle length it was seen at."""

    problem: str
    observed: float
    bound: float
    p: int


@dataclass(frozen=True, slots=True)
class Tightness:
    """How close a bound comes on the declared problems.

    Attributes:
        ratio: largest ratio. problem: where. cases: number of comparisons.
        ratio_coupled: largest ratio with at least two blocks (or layers, or adapters); 0 if there was none.
    """

    ratio: float
    problem: str
    cases: int
    ratio_coupled: float

    @property
    def testable(self) -> bool:
        """False: the bound is so loose on every declared problem that sampling cannot test it."""
        return self.ratio >= NOT_TESTABLE


def ratio(bound: Bound, case: Case) -> float:
    """observed / bound (upper) or bound / observed (lower)."""
    return case.observed / case.bound if bound.sense == "upper" else case.bound / case.observed


@cache
def cases(bound_id: str) -> tuple[Case, ...]:
    """All comparisons of one bound on the declared problems."""
    found = tuple(_EXPERIMENTS[bound_id](BOUNDS[bound_id]))
    if not found:
        raise AssertionError(f"no declared problem says anything about {bound_id}")
    return found


def tightness(bound_id: str) -> Tightness:
    """Run the declared problems and find the bound's largest ratio."""
    bound = BOUNDS[bound_id]
    ratios = [(ratio(bound, case), case) for case in cases(bound_id)]
    largest, where = max(ratios, key=lambda pair: pair[0])
    coupled = max((value for value, case in ratios if case.p > 1), default=0.0)
    return Tightness(ratio=largest, problem=where.problem, cases=len(ratios), ratio_coupled=coupled)


def stored_tightness() -> dict[str, Tightness]:
    """The table that `python -m benchmarks.tightness` wrote into the package."""
    text = resources.files("bcd_theory").joinpath("tightness.json").read_text(encoding="utf-8")
    return {bound_id: Tightness(**row) for bound_id, row in json.loads(text)["bounds"].items()}


# --- the algorithms ----------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What a run left: at each step the block, f before, squared block gradient, and squared m after the step."""

    block: list[int]
    value: list[float]
    g2: list[float]
    m2: list[float]
    energy: list[float]
    full2: list[float]
    left: bool = False


Surrogate = Callable[[Array], Array]


def run(
    problem: Problem,
    learning_rate: float,
    cycles: int,
    order: Callable[[int], NDArray[np.intp]],
    *,
    momentum: float = 0.0,
    idle: str = "frozen",
    surrogate: Surrogate = lambda g: g,
) -> Trace:
    """Block descent with EMA momentum; `order(k)` is cycle k's order, full2 the squared gradient at cycle starts.

    A run that leaves the region in which the constants hold ends there, after the last cycle inside.
    """
    x, m = problem.start.copy(), np.zeros_like(problem.start)
    trace = Trace([], [], [], [], [], [])
    weight = learning_rate * momentum / (2 * (1 - momentum))
    trace.value.append(problem.value(x))
    trace.energy.append(trace.value[0])
    for k in range(cycles):
        gradient = problem.gradient(x)
        start = float(gradient @ gradient)
        part = Trace([], [], [], [], [], [])
        for i in order(k):
            block = problem.blocks[i]
            g = problem.gradient(x)[block]
            if idle == "momentum":
                m = momentum * m
                m[block] += (1 - momentum) * surrogate(g)
                x = x - learning_rate * m
            else:
                m = m.copy()
                m[block] = momentum * m[block] + (1 - momentum) * surrogate(g)
                x = x.copy()
                x[block] -= learning_rate * m[block]
            if not problem.inside(x):
                trace.left = True
                return trace
            part.block.append(int(i))
            part.g2.append(float(g @ g))
            part.m2.append(float(m[block] @ m[block] if idle == "frozen" else m @ m))
            part.value.append(problem.value(x))
            part.energy.append(part.value[-1] + weight * float(m @ m))
        trace.full2.append(start)
        for name in ("block", "value", "g2", "m2", "energy"):
            getattr(trace, name).extend(getattr(part, name))
    return trace


def _fixed_order(problem: Problem, rng: np.random.Generator) -> Callable[[int], NDArray[np.intp]]:
    permutation = rng.permutation(problem.p)
    return lambda k: permutation


def _any_order(problem: Problem, rng: np.random.Generator) -> Callable[[int], NDArray[np.intp]]:
    """Blocks drawn with replacement: one cycle need not visit each block."""
    seed = int(rng.integers(2**31))
    return lambda k: np.random.default_rng([seed, k]).integers(0, problem.p, problem.p)


def _wrong(delta: float, rng: np.random.Generator) -> Surrogate:
    """A gradient whose relative error is delta: towards, away from, or across the truth."""
    kind = int(rng.integers(3))

    def surrogate(g: Array) -> Array:
        if kind < 2:
            return (1 + (2 * kind - 1) * delta) * g
        u = rng.standard_normal(len(g))
        return g + delta * float(np.linalg.norm(g)) * u / float(np.linalg.norm(u))

    return surrogate


def _problems(experiment: int, **needs: bool) -> Iterator[tuple[Problem, np.random.Generator]]:
    for index, problem in enumerate(declared_problems()):
        if all(getattr(problem, need) is not None for need in needs):
            yield problem, np.random.default_rng([experiment, index])


def _mean_after(problem: Problem, steps: int, rates: Array) -> float:
    """Exact expectation of f - fstar over all p^steps equally likely sequences of blocks."""
    values = []
    for sequence in itertools.product(range(problem.p), repeat=steps):
        x = problem.start.copy()
        for i in sequence:
            x[problem.blocks[i]] -= rates[i] * problem.gradient(x)[problem.blocks[i]]
        values.append(problem.value(x) - problem.infimum)
    return float(np.mean(values))


# --- experiments: one step ---------------------------------------------------------------------------------


def _number(bound: Bound, **values: Any) -> float:
    return float(bound.evaluate(**values))


def _one_step(bound: Bound, experiment: int, surrogate_error: bool) -> Iterator[Case]:
    for problem, rng in _problems(experiment):
        delta = float(rng.choice([0.0, rng.uniform(0, 0.9)])) if surrogate_error else 0.0
        L_max = float(problem.block_smoothness.max())
        limit = (
            bound.largest_step_at(L_max=L_max, delta=delta)
            if surrogate_error
            else bound.largest_step_at(L_i=L_max)
        )
        eta = float(rng.uniform(0.05, 0.99) * limit)
        trace = run(problem, eta, CYCLES, _fixed_order(problem, rng), surrogate=_wrong(delta, rng))
        constants = (
            {"L_max": L_max, "delta": delta}
            if surrogate_error
            else {"L_i": problem.block_smoothness[trace.block]}
        )
        found = bound.evaluate(eta=eta, g2=trace.g2, **constants)
        yield from _decreases(problem, trace.value, found)


def _decreases(problem: Problem, values: list[float], bounds: Array) -> Iterator[Case]:
    before, after = np.array(values[:-1]), np.array(values[1:])
    clear = before - after > FLOOR * (np.abs(before) + abs(values[0]))
    for decrease, found in zip((before - after)[clear], bounds[clear], strict=True):
        yield Case(problem.name, float(decrease), float(found), problem.p)


def _angle(bound: Bound) -> Iterator[Case]:
    for problem, rng in _problems(12):
        x, i = problem.start, int(rng.integers(problem.p))
        block, L_i = problem.blocks[i], float(problem.block_smoothness[i])
        g = problem.gradient(x)[block]
        norm = float(np.linalg.norm(g))
        if norm < FLOOR:
            continue
        surrogate = rng.uniform(0.2, 3) * (g + rng.uniform(0, 2) * norm * _unit(rng, len(g)))
        rho = float(np.linalg.norm(surrogate)) / norm
        cosine = float(np.clip(surrogate @ g / (rho * norm**2), -1, 1))
        if cosine <= 0:
            continue
        eta = float(rng.uniform(0.05, 0.99) * bound.largest_step_at(L_i=L_i, cosine=cosine, rho=rho))
        moved = x.copy()
        moved[block] -= eta * surrogate
        decrease = problem.value(x) - problem.value(moved)
        if problem.inside(moved) and decrease > FLOOR * abs(problem.value(x)):
            found = _number(bound, eta=eta, L_i=L_i, cosine=cosine, rho=rho, g2=norm**2)
            yield Case(problem.name, decrease, found, problem.p)


def _unit(rng: np.random.Generator, n: int) -> Array:
    u = rng.standard_normal(n)
    return np.asarray(u / np.linalg.norm(u))


def _energy(bound: Bound) -> Iterator[Case]:
    for problem, rng in _problems(13):
        beta = float(rng.choice([0.1, 0.5, 0.9, 0.99]))
        eta = float(rng.uniform(0.05, 0.99) * 2 / problem.block_smoothness.max())
        trace = run(problem, eta, CYCLES, _any_order(problem, rng), momentum=beta)
        found = bound.evaluate(eta=eta, L_i=problem.block_smoothness[trace.block], m2=trace.m2)
        yield from _decreases(problem, trace.energy, found)


# --- experiments: cycles without momentum ------------------------------------------------------------------


def _cycle(bound: Bound) -> Iterator[Case]:
    for problem, rng in _problems(21):
        delta = float(rng.choice([0.0, rng.uniform(0, 0.9)]))
        eta = float(rng.uniform(0.05, 1.5) / problem.block_smoothness.max())
        trace = run(problem, eta, CYCLES, _fixed_order(problem, rng), surrogate=_wrong(delta, rng))
        S = np.array(trace.g2).reshape(-1, problem.p).sum(axis=1)
        found = bound.evaluate(eta=eta, L=problem.smoothness, p=problem.p, delta=delta, S=S)
        for observed, value, total in zip(trace.full2, found, S, strict=True):
            if total > FLOOR * trace.full2[0]:
                yield Case(problem.name, observed, float(value), problem.p)


def _rate(bound: Bound, exact: bool) -> Iterator[Case]:
    for problem, rng in _problems(22):
        delta = 0.0 if exact else float(rng.choice([0.0, rng.uniform(0, 0.9)]))
        L_max = float(problem.block_smoothness.max())
        eta = 1 / L_max
        settings = {"L": problem.smoothness, "L_max": L_max, "p": problem.p}
        if not exact:
            eta = float(rng.uniform(0.2, 0.9) * bound.largest_step_at(L_max=L_max, delta=delta))
            settings |= {"eta": eta, "delta": delta}
        trace = run(problem, eta, CYCLES, _fixed_order(problem, rng), surrogate=_wrong(delta, rng))
        K = np.arange(1, len(trace.full2) + 1)
        found = bound.evaluate(f0=trace.value[0], fstar=problem.infimum, K=K, **settings)
        for observed, value in zip(np.cumsum(trace.full2) / K, found, strict=True):
            yield Case(problem.name, float(observed), float(value), problem.p)


def _gaps(
    bound: Bound, needs: str, settings: Callable[[Problem, float, float], dict[str, Any]]
) -> Iterator[Case]:
    """f - fstar after K cycles; eta = 1/L_max and exact gradients unless the bound has a delta."""
    for problem, rng in _problems(23, **{needs: True}):
        L_max = float(problem.block_smoothness.max())
        biased = "delta" in bound.variables
        delta = float(rng.choice([0.0, rng.uniform(0, 0.9)])) if biased else 0.0
        eta = 1 / L_max
        if biased:
            eta = float(rng.uniform(0.2, 0.9) * bound.largest_step_at(L_max=L_max, delta=delta))
        trace = run(problem, eta, CYCLES, _fixed_order(problem, rng), surrogate=_wrong(delta, rng))
        gaps = np.array(trace.value[:: problem.p]) - problem.infimum
        K = np.arange(1, len(gaps))
        constants = settings(problem, eta, delta)
        found = bound.evaluate(L=problem.smoothness, L_max=L_max, p=problem.p, K=K, **constants)
        for observed, value in zip(gaps[1:], found, strict=True):
            if observed > FLOOR * gaps[0]:
                yield Case(problem.name, float(observed), float(value), problem.p)


def _t3_settings(problem: Problem, eta: float, delta: float) -> dict[str, Any]:
    f0 = problem.value(problem.start)
    return {"eta": eta, "delta": delta, "mu": problem.pl, "f0": f0, "fstar": problem.infimum}


def _radius(problem: Problem, eta: float, delta: float) -> dict[str, Any]:
    assert problem.radii is not None
    return {"R": problem.radii[0]}


def _expected(bound: Bound, needs: str, own_rates: bool) -> Iterator[Case]:
    """Exact expectation over random blocks after 1, 2, ... steps."""
    for problem, rng in _problems(24, **{needs: True}):
        L_max = float(problem.block_smoothness.max())
        share = 1.0 if own_rates else float(rng.uniform(0.1, 1.9))
        rates = 1 / problem.block_smoothness if own_rates else np.full(problem.p, share / L_max)
        values: dict[str, Any] = {
            "p": problem.p,
            "f0": problem.value(problem.start),
            "fstar": problem.infimum,
        }
        values |= {"eta": share / L_max, "L_max": L_max, "mu": problem.pl}
        if problem.strong is not None and problem.radii is not None:
            values |= {"sigma": problem.strong[1], "R1": problem.radii[1]}
        for T in range(1, 4 if problem.p <= 4 else 3):
            observed = _mean_after(problem, T, rates)
            if observed > FLOOR * (values["f0"] - values["fstar"]):
                chosen = {name: values[name] for name in bound.variables if name != "T"}
                yield Case(problem.name, observed, _number(bound, T=T, **chosen), problem.p)


# --- experiments: momentum ---------------------------------------------------------------------------------


def _momentum(bound: Bound, idle: str, order: Callable[..., Any], quantity: str) -> Iterator[Case]:
    for problem, rng in _problems(31):
        beta = float(rng.choice([0.1, 0.3, 0.9, 0.97]))
        values: dict[str, Any] = {
            "L": problem.smoothness,
            "L_max": float(problem.block_smoothness.max()),
            "beta": beta,
            "p": problem.p,
            "f0": problem.value(problem.start),
            "fstar": problem.infimum,
        }
        needed = {free.name for free in bound.largest_step().free_symbols}  # type: ignore[union-attr]
        limit = bound.largest_step_at(**{name: values[name] for name in needed})
        eta = float(rng.uniform(0.2, 0.95) * limit)
        cycles = min(-(-60 // problem.p), 30)
        trace = run(problem, eta, cycles, order(problem, rng), momentum=beta, idle=idle)
        if not trace.g2:
            continue
        observed = {
            "sum": sum(trace.g2),
            "cycles": sum(trace.full2),
            "mean": float(np.mean(trace.full2)),
        }[quantity]
        values |= {"eta": eta, "K": len(trace.full2)}
        found = _number(bound, **{name: values[name] for name in bound.variables})
        yield Case(problem.name, observed, found, problem.p)


# --- experiments: matrices ---------------------------------------------------------------------------------


def _lora(bound: Bound) -> Iterator[Case]:
    """Hessian of one LoRA pair at points of its region, half of them on its boundary."""
    # One weight, A = a, B = b, residual of the sign that adds up: attained.
    for a, b in ((1.0, 1.0), (2.0, 0.5)):
        values = {"a": a, "b": b, "s": 1.0, "L_W": 3.0, "G": 2.0}
        hessian = np.array([[3 * b * b, 3 * a * b + 2], [3 * a * b + 2, 3 * a * a]])
        yield Case(
            f"one weight, a = {a:g}, b = {b:g}",
            float(np.linalg.norm(hessian, 2)),
            _number(bound, **values),
            1,
        )
    for seed in range(60):
        model, start = random_lora_model(seed)
        rng = np.random.default_rng([41, seed])
        x = start if seed % 2 else rng.standard_normal(len(start))
        pairs = model.factors(x)
        x = np.concatenate(
            [
                part.ravel()
                for A, B in pairs
                for part in (
                    A * model.a / np.linalg.norm(A, 2),
                    B * model.b / max(float(np.linalg.norm(B, 2)), 1e-30) if np.any(B) else B,
                )
            ]
        )
        size = model.adapter_size
        observed = float(np.linalg.norm(model.hessian(x)[:size, :size], 2))
        G = float(np.linalg.norm(model.residual(x) @ model.covariance, 2))
        values = {"a": model.a, "b": model.b, "s": model.scale, "L_W": model.weight_smoothness, "G": G}
        yield Case(f"lora-{seed}", observed, _number(bound, **values), 2)
        # The same with the gradient's bound over the region, on which descent runs rest.
        values["G"] = model.gradient_bound()
        if bound.id == "T8" and abs(_number(bound, **values) / lora_constant(model, 1) - 1) > 1e-12:
            raise AssertionError(f"two roads to T8 differ on lora-{seed}")
        yield Case(f"lora-{seed}-region", observed, _number(bound, **values), 2)


def _lora_gradient(bound: Bound) -> Iterator[Case]:
    for seed in range(60):
        model, _ = random_lora_model(seed)
        rng = np.random.default_rng([42, seed])
        outputs, inputs = model.target.shape
        A, B = _unit(rng, inputs)[None, :] * model.a, _unit(rng, outputs)[:, None] * model.b
        start = -model.target @ model.covariance
        if seed % 3 == 0:  # aligned with the gradient at the start
            left, _, right = np.linalg.svd(start)
            A, B = right[:1] * model.a, left[:, :1] * model.b
        observed = np.linalg.norm(start + model.scale * B @ A @ model.covariance, 2)
        values = {"a": model.a, "b": model.b, "s": model.scale, "L_W": model.weight_smoothness}
        found = _number(bound, G=float(np.linalg.norm(start, 2)), **values)
        yield Case(f"lora-{seed}", float(observed), found, 2)


def _chains(bound: Bound) -> Iterator[Case]:
    """Products of equal-norm residual layers, every fourth of them scalar."""
    for seed in range(80):
        rng = np.random.default_rng([43, seed])
        m, n, norm = int(rng.integers(1, 8)), 3, float(rng.uniform(0.02, 0.8))
        scalar = seed % 4 == 0
        sign = -1.0 if bound.id in ("T7-relative", "T7-flow") else 1.0
        truth = np.eye(n)
        for _ in range(m):
            branch = sign * np.eye(n) if scalar else rng.standard_normal((n, n))
            truth = truth @ (np.eye(n) + norm * branch / np.linalg.norm(branch, 2))
        top = _unit(rng, n)
        bias, length = float(np.linalg.norm(truth @ top - top)), float(np.linalg.norm(truth @ top))
        observed = {"T7-flow": length, "T7-relative": bias / length}.get(bound.id, bias)
        name = "contraction" if "contraction" in bound.variables else "lipschitz"
        found = _number(bound, m=m, **{name: norm})
        yield Case(f"chain-{seed}", observed, found, m)


_EXPERIMENTS: Final[dict[str, Callable[[Bound], Iterator[Case]]]] = {
    "T1": lambda bound: _one_step(bound, 10, surrogate_error=False),
    "T2-step": lambda bound: _one_step(bound, 11, surrogate_error=True),
    "T2-textbook-step": lambda bound: _one_step(bound, 11, surrogate_error=True),
    "T2-angle": _angle,
    "T2-cycle": _cycle,
    "T2-textbook-cycle": _cycle,
    "T2": lambda bound: _rate(bound, exact=False),
    "T2-textbook": lambda bound: _rate(bound, exact=False),
    "T2-exact": lambda bound: _rate(bound, exact=True),
    "T3": lambda bound: _gaps(bound, "pl", _t3_settings),
    "T3-random": lambda bound: _expected(bound, "pl", own_rates=False),
    "Beck-Tetruashvili": lambda bound: _gaps(bound, "radii", _radius),
    "Beck-Tetruashvili-sharp": lambda bound: _gaps(bound, "radii", _radius),
    "Nesterov": lambda bound: _expected(bound, "radii", own_rates=True),
    "Nesterov-strong": lambda bound: _expected(bound, "strong", own_rates=True),
    "T6": lambda bound: _momentum(bound, "momentum", _any_order, "sum"),
    "T6-cyclic": lambda bound: _momentum(bound, "momentum", _fixed_order, "sum"),
    "T6-cycles": lambda bound: _momentum(bound, "momentum", _fixed_order, "mean"),
    "T6-corollary": lambda bound: _momentum(bound, "momentum", _any_order, "sum"),
    "T6b-energy": _energy,
    "T6b": lambda bound: _momentum(bound, "frozen", _any_order, "sum"),
    "T6b-sharp": lambda bound: _momentum(bound, "frozen", _any_order, "sum"),
    "T6b-sharp-cycles": lambda bound: _momentum(bound, "frozen", _fixed_order, "cycles"),
    "T6b-cycles": lambda bound: _momentum(bound, "frozen", _fixed_order, "cycles"),
    "T7-bias": _chains,
    "T7-bias-exponential": _chains,
    "T7-relative": _chains,
    "T7-flow": _chains,
    "T8": _lora,
    "T8-simple": _lora,
    "T8-gradient": _lora_gradient,
}
