"""Each bound on a rate, run on its own terms: what is measured, at which learning rate, and what the theorem allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bcd_theory import BOUNDS
from bcd_theory.partition import equal_blocks
from simulations.problems import Quadratic, coupled
from simulations.problems.base import block_rows
from simulations.runner import Arm, block_sequence, run

Array = NDArray[np.float64]
P, N, CYCLES = 4, 12, 60
AT = (1, 2, 5, 10, 20, 60)  # cycles at which a bound that depends on them is looked at
RANDOM_RUNS = 1000
Quantity = Literal[
    "gradient mean", "gap", "expected gap", "step decrease", "block gradients", "all gradients"
]


@dataclass(frozen=True)
class Case:
    """A bound with the arm it speaks of. share: learning rate in units of its largest step; None: 1/L_max."""

    bound: str
    quantity: Quantity
    order: str = "cyclic"
    optimizer: Literal["sgd", "sgd-ema"] = "sgd"
    idle: Literal["momentum", "frozen"] = "momentum"
    share: tuple[float, float] | None = (0.05, 0.95)
    equal_constants: bool = False

    @property
    def name(self) -> str:
        return f"{self.bound}, {self.order}"


CASES = (
    Case("T2-step", "step decrease"),
    Case("T2", "gradient mean"),
    Case("T2", "gradient mean", "shuffled"),
    Case("T3", "gap"),
    Case("T3", "gap", "shuffled"),
    Case("T3-random", "expected gap", "random"),
    Case("Beck-Tetruashvili", "gap", share=None),
    Case("Beck-Tetruashvili-sharp", "gap", share=None),
    # Their rates are 1/L_i by block; with equal constants that is one rate.
    Case("Nesterov", "expected gap", "random", share=None, equal_constants=True),
    Case("Nesterov-strong", "expected gap", "random", share=None, equal_constants=True),
    *(Case("T6", "block gradients", order, "sgd-ema") for order in ("cyclic", "shuffled", "random")),
    Case("T6-cyclic", "block gradients", "cyclic", "sgd-ema"),
    Case("T6-cycles", "all gradients", "cyclic", "sgd-ema"),
    *(
        Case("T6b", "block gradients", order, "sgd-ema", "frozen")
        for order in ("cyclic", "shuffled", "random")
    ),
    Case("T6b-sharp", "block gradients", "cyclic", "sgd-ema", "frozen"),
    Case("T6b-cycles", "all gradients", "cyclic", "sgd-ema", "frozen"),
    Case("T6b-sharp-cycles", "all gradients", "cyclic", "sgd-ema", "frozen"),
)


def draw(case: Case, seed: int, i: int) -> tuple[Quadratic, Array, float, float]:
    """(problem, start, beta, place of the learning rate in `share`) of the i-th problem of a case."""
    rng = np.random.default_rng([seed, 2, i])
    problem = coupled(N, P, float(rng.uniform(0, 1)), 10.0, rng)
    if case.equal_constants:
        scale = np.repeat(1 / np.sqrt(problem.block_smoothness), N // P)
        problem = Quadratic(problem.A * np.outer(scale, scale), problem.partition)
    return problem, rng.normal(size=N), float(rng.choice([0.3, 0.6, 0.9])), float(rng.uniform())


def constants(case: Case, hessian: Array, start: Array, beta: float, place: float) -> dict[str, float]:
    """The constants that the bounds may ask for, and the learning rate `eta`, from the Hessian and the start."""
    values = np.linalg.eigvalsh(hessian)
    mu = float(values[values > 1e-12 * values[-1]][0])
    blocks = equal_blocks(len(hessian), P).arrays()
    largest = max(float(np.linalg.eigvalsh(hessian[np.ix_(b, b)])[-1]) for b in blocks)
    f0 = float(0.5 * start @ hessian @ start)
    radius = float(np.sqrt(2 * f0 / mu))  # of the level set of the start
    found = {
        "L": float(values[-1]), "L_max": largest, "mu": mu, "sigma": mu / largest, "p": P, "beta": beta, "delta": 0.0,
        "f0": f0, "fstar": 0.0, "R": radius, "R1": radius * np.sqrt(largest),
    }  # fmt: skip
    if case.share is None:
        return found | {"eta": 1 / largest}
    bound = BOUNDS[case.bound]
    needed = {symbol.name for symbol in bound.largest_step().free_symbols}  # type: ignore[union-attr]
    limit = float(bound.largest_step_at(**{name: found[name] for name in needed}))
    return found | {"eta": (case.share[0] + place * (case.share[1] - case.share[0])) * limit}


def allowed(case: Case, values: dict[str, float]) -> list[float]:
    """What the bound allows: at each of AT cycles, or once. `step decrease`: of each unit of squared gradient."""
    bound = BOUNDS[case.bound]
    chosen: dict[str, Any] = {name: values[name] for name in bound.variables if name in values}
    if "g2" in bound.variables:
        chosen["g2"] = 1.0
    if "K" in bound.variables:
        # T6-cycles is the mean over K cycles; at K = 1 it is the sum.
        chosen["K"] = 1 if case.quantity == "all gradients" else np.array(AT)
    if "T" in bound.variables:
        chosen["T"] = P * np.array(AT)
    return [float(value) for value in np.atleast_1d(bound.evaluate(**chosen))]


def measured(case: Case, seed: int, i: int, eta: float) -> list[float]:
    """The bounded quantity of one run, at the same places as `allowed`."""
    problem, start, beta, _ = draw(case, seed, i)
    rows = block_rows(problem.partition)
    arm = Arm(case.name, case.optimizer, case.idle, case.order, beta if case.optimizer == "sgd-ema" else 0.0)
    if case.quantity == "expected gap":
        found = run(problem, arm, start, np.full(RANDOM_RUNS, eta), CYCLES * P, record_every=P).losses
        # A mean of runs against a bound on the expectation: its lower 99.9 % end.
        low = found.mean(1) - 3.1 * found.std(1, ddof=1) / np.sqrt(RANDOM_RUNS)
        return [float(low[k]) for k in AT]
    blocks: list[float] = []
    whole: list[float] = []
    decrease: list[float] = []
    last = [torch.from_numpy(start)[:, None], problem.value(torch.from_numpy(start)[:, None])]

    def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
        g = problem.matrix @ last[0]
        j = int(stepped[t])
        blocks.append(float((g[rows[j]] ** 2).sum()))
        if t % P == 0:
            whole.append(float((g * g).sum()))
        if case.quantity == "step decrease":
            value = problem.value(x)
            decrease.append(float(last[1] - value) / blocks[-1])
            last[1] = value
        last[0] = x.clone()

    stepped = _sequence(arm, problem)
    found = run(problem, arm, start, eta, CYCLES * P, record_every=P, observe=observe, seeds=[0]).losses[:, 0]
    results: dict[str, Callable[[], list[float]]] = {
        "gradient mean": lambda: [float(np.mean(whole[:k])) for k in AT],
        "gap": lambda: [float(found[k]) for k in AT],
        # Rounding of the loss drowns late decreases: the first ten cycles.
        "step decrease": lambda: [float(np.min(decrease[: 10 * P]))],
        "block gradients": lambda: [float(np.sum(blocks))],
        "all gradients": lambda: [float(np.sum(whole))],
    }
    return results[case.quantity]()


def _sequence(arm: Arm, problem: Quadratic) -> NDArray[np.intp]:
    found = block_sequence(arm, problem.partition, CYCLES * P, [0])
    assert found is not None
    return found if found.ndim == 1 else found[:, 0]
