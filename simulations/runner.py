"""Many runs at once: one tensor program over seeds and learning rates, one point a column, float64.

A step reads the gradient of the selected block alone (cost n |block| a run on a quadratic) and updates in place.
Runs whose orders differ (random orders, one stream a run) use one full gradient and a mask. The step's equations are
those of `bcd_theory.momentum`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bcd_theory.partition import Partition
from simulations.problems.base import Problem, block_rows

Array = NDArray[np.float64]
Optimizer = Literal["sgd", "sgd-ema", "heavy-ball", "adamw"]
ORDERS = ("full", "cyclic", "reversed", "shuffled", "random", "importance", "greedy")
Noise = Callable[[int], Tensor]


@dataclass(frozen=True)
class Arm:
    """What is done at each step. betas: (beta1, beta2) of AdamW; `momentum`: beta of sgd-ema and heavy-ball.

    order `interleaved` is `cyclic` on interleaved blocks, which belong to the problem. `importance` draws a block
    with probability proportional to its gradient norm, `greedy` takes the largest; both read the full gradient.
    """

    name: str
    optimizer: Optimizer = "sgd"
    idle: Literal["momentum", "frozen"] = "momentum"
    order: str = "cyclic"
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order is {self.order!r}, expected one of {', '.join(ORDERS)}")
        if self.optimizer not in ("sgd", "sgd-ema", "heavy-ball", "adamw"):
            raise ValueError(f"optimizer is {self.optimizer!r}, expected sgd, sgd-ema, heavy-ball or adamw")
        if self.idle not in ("momentum", "frozen"):
            raise ValueError(f"idle is {self.idle!r}, expected 'momentum' or 'frozen'")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum}, expected a number in [0, 1)")


@dataclass
class Runs:
    """losses: (records, runs), at the steps `at` (0 is the start). x, m: state after the last step, (n, runs)."""

    at: NDArray[np.intp]
    losses: Array
    x: Tensor
    m: Tensor | None


def block_sequence(arm: Arm, partition: Partition, steps: int, seeds: ArrayLike) -> NDArray[np.intp] | None:
    """Blocks by step: shape (steps,) where all runs agree, (steps, runs) where each draws its own; None if measured."""
    p, t = len(partition), np.arange(steps)
    if arm.order == "full":
        return np.full(steps, -1)
    if arm.order == "cyclic":
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


def run(
    problem: Problem,
    arm: Arm,
    start: ArrayLike,
    learning_rates: ArrayLike,
    steps: int,
    *,
    seeds: ArrayLike | None = None,
    record_every: int = 1,
    noise: Noise | None = None,
    observe: Callable[[int, Tensor, Tensor | None], None] | None = None,
) -> Runs:
    """All runs of one arm.

    start           (n, runs), or (n,) for all runs
    learning_rates  (runs,) or one number
    seeds           (runs,), of the orders that draw; default 0, 1, ...
    noise           noise(t) of shape (n, runs), added to the gradient read at step t
    observe         called with (t, x, m) after step t
    """
    if steps < 0 or record_every < 1:
        raise ValueError(f"steps {steps}, record_every {record_every}: expected at least 0 and 1")
    n = problem.partition.n
    x = torch.as_tensor(np.array(start, dtype=np.float64))
    eta = torch.as_tensor(np.array(np.atleast_1d(learning_rates), dtype=np.float64))
    x = x[:, None] if x.ndim == 1 else x
    runs = max(x.shape[1], len(eta))
    if x.shape[0] != n or x.shape[1] not in (1, runs) or len(eta) not in (1, runs):
        raise ValueError(
            f"start has shape {tuple(x.shape)}, learning_rates {len(eta)}, expected {n} x runs and runs"
        )
    x, eta = x.expand(n, runs).clone(), eta.expand(runs).contiguous()
    seeds = np.arange(runs) if seeds is None else np.asarray(seeds)
    rows = block_rows(problem.partition)
    sequence = block_sequence(arm, problem.partition, steps, seeds)
    shared = sequence is not None and sequence.ndim == 1
    owner = torch.empty(n, dtype=torch.long)
    for j, block in enumerate(problem.partition.arrays()):
        owner[torch.from_numpy(block)] = j
    rngs = (
        [np.random.default_rng([int(s), ORDERS.index(arm.order)]) for s in seeds] if sequence is None else []
    )
    update = _Update(arm, x, eta)
    everything = slice(0, n)
    buffers = [torch.empty((len(b), runs), dtype=torch.float64) for b in problem.partition]
    whole = torch.empty((n, runs), dtype=torch.float64)
    at, losses = [0], [problem.value(x)]
    # Plain exact descent on a quadratic: the loss follows from the block's step, and is read afresh once a cycle.
    change = getattr(problem, "change", None) if shared and noise is None else None
    if arm.optimizer != "sgd" or arm.weight_decay or record_every > 1 or arm.order == "full":
        change = None
    for t in range(steps):
        known = None
        if shared:
            assert sequence is not None
            j = int(sequence[t])
            where = everything if j < 0 else rows[j]
            g = problem.gradient(x, where, whole if j < 0 else buffers[j])
            if noise is not None:
                g = g + noise(t)[where]
            known = losses[-1] + change(g, where, eta) if change is not None and (t + 1) % len(rows) else None
            update.block(g, where)
        else:
            # Where the gradient that a step reads depends on what else is selected, each block is read alone.
            alone = getattr(problem, "block_gradients", None)
            g = problem.gradient(x, everything, whole) if alone is None else alone(x)
            chosen = (
                torch.from_numpy(sequence[t])
                if sequence is not None
                else _measured(arm, g, owner, len(rows), rngs)
            )
            if noise is not None:
                g = g + noise(t)
            update.masked(g, owner[:, None] == chosen[None, :])
        if observe is not None:
            observe(t, x, update.m)
        if (t + 1) % record_every == 0:
            at.append(t + 1)
            losses.append(problem.value(x) if known is None else known)
    return Runs(np.array(at), torch.stack(losses).numpy(), x, update.m)


def _measured(arm: Arm, g: Tensor, owner: Tensor, p: int, rngs: list[np.random.Generator]) -> Tensor:
    squares = torch.zeros((p, g.shape[1]), dtype=torch.float64).index_add_(0, owner, g * g)
    if arm.order == "greedy":
        return squares.argmax(0)
    norms = squares.sqrt().numpy()
    total = np.cumsum(norms, axis=0)
    draws = np.array([rng.random() for rng in rngs]) * total[-1]
    return torch.from_numpy(np.minimum((total <= draws).sum(0), p - 1))


class _Update:
    """The optimiser's state and its step, in place."""

    def __init__(self, arm: Arm, x: Tensor, eta: Tensor) -> None:
        self.arm, self.x, self.eta = arm, x, eta
        self.views: dict[int, tuple[Tensor, Tensor]] = {}
        self.rates = eta.expand_as(x).contiguous() if arm.optimizer == "sgd" else eta
        self.m = None if arm.optimizer == "sgd" else torch.zeros_like(x)
        adam = arm.optimizer == "adamw"
        self.v = torch.zeros_like(x) if adam else None
        # Under idle `momentum` every count is the step's number; `frozen` counts a block's own steps.
        self.count = torch.zeros_like(x) if adam else None
        self.beta = arm.betas[0] if adam else arm.momentum
        self.gain = 1.0 if arm.optimizer == "heavy-ball" else 1.0 - self.beta

    def block(self, g: Tensor, where: slice | Tensor) -> None:
        if self.m is None:
            if isinstance(where, slice):
                if self.arm.weight_decay:
                    self._decay(where)
                # Rates spelled out for every row: three times as fast as a broadcast.
                if where.start not in self.views or len(self.views[where.start][0]) != len(g):
                    self.views[where.start] = self.x[where], self.rates[: len(g)]
                view, rates = self.views[where.start]
                view.addcmul_(g, rates, value=-1.0)
            else:
                self._decay(where)
                self.x[where] = self.x[where] - self.eta * g
            return
        whole = isinstance(where, slice) and where == slice(0, len(self.x))
        if self.arm.idle == "frozen" or whole:
            self.m[where] = self.beta * self.m[where] + self.gain * g
            if self.v is not None and self.count is not None:
                self.v[where] = self.arm.betas[1] * self.v[where] + (1 - self.arm.betas[1]) * g * g
                self.count[where] += 1
            self._decay(where)
            self.x[where] = self.x[where] - self.eta * self._direction(where)
            return
        self.m *= self.beta
        self.m[where] += self.gain * g
        if self.v is not None and self.count is not None:
            self.v *= self.arm.betas[1]
            self.v[where] += (1 - self.arm.betas[1]) * g * g
            self.count += 1
        everything = slice(None)
        self._decay(everything)
        if self.v is None:
            self.x.addcmul_(self.m, self.eta, value=-1.0)
        else:
            self.x -= self.eta * self._direction(everything)

    def masked(self, g: Tensor, mask: Tensor) -> None:
        everything = slice(None)
        if self.m is None:
            if self.arm.weight_decay:
                self.x *= torch.where(mask, 1.0 - self.eta * self.arm.weight_decay, 1.0)
            self.x -= self.eta * torch.where(mask, g, 0.0)
            return
        frozen = self.arm.idle == "frozen"
        g = torch.where(mask, g, 0.0)
        moves = mask if frozen else torch.ones_like(mask)
        self.m.copy_(torch.where(moves, self.beta * self.m + self.gain * g, self.m))
        if self.v is not None and self.count is not None:
            beta2 = self.arm.betas[1]
            self.v.copy_(torch.where(moves, beta2 * self.v + (1 - beta2) * g * g, self.v))
            self.count += moves
        if self.arm.weight_decay:
            self.x *= torch.where(moves, 1.0 - self.eta * self.arm.weight_decay, 1.0)
        self.x -= torch.where(moves, self.eta * self._direction(everything), 0.0)

    def _decay(self, where: slice | Tensor) -> None:
        if self.arm.weight_decay:
            self.x[where] = self.x[where] * (1.0 - self.eta * self.arm.weight_decay)

    def _direction(self, where: slice | Tensor) -> Tensor:
        assert self.m is not None
        if self.v is None or self.count is None:
            return self.m[where]
        beta1, beta2 = self.arm.betas
        count = self.count[where].clamp(min=1.0)
        m_hat = self.m[where] / (1 - beta1**count)
        return m_hat / ((self.v[where] / (1 - beta2**count)).sqrt() + self.arm.eps)
