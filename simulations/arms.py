"""What a run does at each step, the blocks it visits, and the product of arms, learning rates and seeds."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bcd_theory.linear import StabilityLimit, stability_limit
from bcd_theory.partition import Partition

Optimizer = Literal["sgd", "sgd-ema", "heavy-ball", "adamw"]
OPTIMIZERS = ("sgd", "sgd-ema", "heavy-ball", "adamw")
IDLE = ("momentum", "frozen")
# The place in this list seeds the orders that draw: append only.
ORDERS = ("full", "cyclic", "reversed", "shuffled", "random", "importance", "greedy", "interleaved")

EVERY_BLOCK, MEASURED = -1, -2


@dataclass(frozen=True)
class Arm:
    """What is done at each step. betas: (beta1, beta2) of AdamW; `momentum`: beta of sgd-ema and heavy-ball.

    order        selected at step t
    full         every coordinate
    cyclic       block t mod p                    reversed     block p - 1 - (t mod p)
    interleaved  coordinates i with i mod p = t mod p, in place of the problem's own blocks
    shuffled     a new permutation of the blocks each cycle        random   one block, uniform, with replacement
    importance   one block, with probability proportional to its gradient norm     greedy   the largest of them

    `importance` and `greedy` read the gradient without noise. `sequence`: blocks visited one after another, repeated,
    in place of `order`. Raises ValueError, which names the nearest name.
    """

    name: str
    optimizer: Optimizer = "sgd"
    idle: Literal["momentum", "frozen"] = "momentum"
    order: str = "cyclic"
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    sequence: tuple[int, ...] | None = None

    @property
    def normalisation(self) -> Literal["ema", "heavy-ball"]:
        """How the momentum is written, by the theory's names."""
        return "heavy-ball" if self.optimizer == "heavy-ball" else "ema"

    def __post_init__(self) -> None:
        _one_of("order", self.order, ORDERS)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("idle", self.idle, IDLE)
        for name, beta in (("momentum", self.momentum), *(("betas", beta) for beta in self.betas)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{name} is {beta}, expected a number in [0, 1)")
        for name, value in (("eps", self.eps), ("weight_decay", self.weight_decay)):
            if not (np.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} is {value}, expected a finite number that is not negative")
        if self.sequence is not None and (not self.sequence or min(self.sequence) < 0):
            raise ValueError(f"sequence is {self.sequence}, expected the numbers of one block or more")


def limit_of(
    arm: Arm, hessian: NDArray[np.float64], blocks: Partition, preconditioner: ArrayLike | None = None
) -> StabilityLimit:
    """The arm's exact limit on a quadratic (T4, T5); raises ValueError for an order that has no linear map."""
    if arm.order not in ("full", "cyclic", "random"):
        raise ValueError(f"arm {arm.name!r}: order {arm.order!r}, expected full, cyclic or random")
    return stability_limit(
        hessian,
        blocks,
        order=arm.order,  # type: ignore[arg-type]
        momentum=arm.momentum,
        idle=arm.idle,
        normalisation=arm.normalisation,
        preconditioner=preconditioner,
    )


def _one_of(field: str, found: str, known: Sequence[str]) -> None:
    if found not in known:
        near = difflib.get_close_matches(str(found), known, n=1, cutoff=0.0)[0]
        raise ValueError(f"{field} is {found!r}, expected one of {', '.join(known)} (nearest: {near})")


def blocks_of(arm: Arm, partition: Partition) -> Partition:
    """The blocks that the arm visits: the problem's, or those of `interleaved`."""
    if arm.order != "interleaved" or arm.sequence is not None:
        return partition
    p = len(partition)
    return Partition([range(j, partition.n, p) for j in range(p)])


def block_sequence(arm: Arm, partition: Partition, steps: int, seeds: ArrayLike) -> NDArray[np.intp] | None:
    """Blocks by step: shape (steps,) where all runs agree, (steps, runs) where each draws its own; None if measured.

    -1 stands for every block. The draws of `shuffled` and `random` depend on the seed and the order alone.
    """
    p, t = len(partition), np.arange(steps)
    if arm.sequence is not None:
        if max(arm.sequence) >= p:
            raise ValueError(
                f"arm {arm.name!r}: sequence names block {max(arm.sequence)}, expected 0 to {p - 1}"
            )
        return np.resize(np.asarray(arm.sequence, dtype=np.intp), steps)
    if arm.order == "full":
        return np.full(steps, EVERY_BLOCK)
    if arm.order in ("cyclic", "interleaved"):
        return t % p
    if arm.order == "reversed":
        return p - 1 - t % p
    if arm.order in ("importance", "greedy"):
        return None
    columns = []
    for seed in np.atleast_1d(np.asarray(seeds)):
        rng = np.random.default_rng([int(seed), ORDERS.index(arm.order)])
        if arm.order == "shuffled":
            columns.append(np.concatenate([rng.permutation(p) for _ in range(-(-steps // p))])[:steps])
        else:
            columns.append(rng.integers(p, size=steps))
    return np.stack(columns, axis=1)


def importance_draws(arm: Arm, steps: int, seed: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one a step, by which `importance` picks its blocks."""
    return np.random.default_rng([int(seed), ORDERS.index(arm.order)]).random(steps)


@dataclass(frozen=True)
class Grid:
    """Every arm at every learning rate with every seed, one run a column; `shape` is (arms, rates, seeds).

    `losses.reshape(-1, *grid.shape)` has the axes (records, arms, rates, seeds).
    """

    arms: tuple[Arm, ...]
    learning_rates: NDArray[np.float64]
    seeds: NDArray[np.intp]
    shape: tuple[int, int, int]


def grid(arms: Sequence[Arm], learning_rates: ArrayLike, seeds: Sequence[int]) -> Grid:
    """The columns of `run`. learning_rates: (rates,) for all arms, or (arms, rates)."""
    rates = np.atleast_1d(np.asarray(learning_rates, dtype=np.float64))
    rates = np.broadcast_to(rates, (len(arms), rates.shape[-1]))
    shape = (len(arms), rates.shape[1], len(seeds))
    return Grid(
        tuple(arm for arm in arms for _ in range(shape[1] * shape[2])),
        np.repeat(rates.reshape(-1), len(seeds)),
        np.tile(np.asarray(seeds, dtype=np.intp), shape[0] * shape[1]),
        shape,
    )
