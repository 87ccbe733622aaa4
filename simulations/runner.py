"""Many runs at once: one tensor program over seeds, learning rates and arms, one run a column, float64.

Where all runs visit the same blocks, a step reads the gradient of the selected block alone (cost n |block| a run on a
quadratic); else one full gradient and a mask. Runs of different arms differ in numbers a column, not in code: `sgd` is
`sgd-ema` at momentum 0 with frozen idle layers. The step's equations are those of `bcd_theory.momentum`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bcd_theory.partition import Partition
from simulations.arms import EVERY_BLOCK, MEASURED, blocks_of, importance_draws
from simulations.arms import ORDERS as ORDERS
from simulations.arms import Arm as Arm
from simulations.arms import Grid as Grid
from simulations.arms import block_sequence as block_sequence
from simulations.arms import grid as grid
from simulations.descent import descend
from simulations.problems.base import Problem, block_rows
from simulations.problems.own import OwnQuadratics
from simulations.problems.quadratic import Quadratic

Array = NDArray[np.float64]
Noise = Callable[[int], Tensor]
Rows = slice | Tensor

# Runs with problems of their own that go through all steps together: so many matrices stay in a core's cache.
OWN_RUNS = 128


@dataclass
class Runs:
    """losses: (records, runs), at the steps `at` (0 is the start). x, m: state after the last step, (n, runs)."""

    at: NDArray[np.intp]
    losses: Array
    x: Tensor
    m: Tensor | None


def run(
    problem: Problem,
    arm: Arm | Sequence[Arm],
    start: ArrayLike,
    learning_rates: ArrayLike,
    steps: int,
    *,
    seeds: ArrayLike | None = None,
    record_every: int = 1,
    noise: Noise | None = None,
    observe: Callable[[int, Tensor, Tensor | None], None] | None = None,
    threads: int | None = 1,
) -> Runs:
    """All runs in one program. `grid` makes the columns of a product of arms, learning rates and seeds.

    problem         one for all runs, or one that holds a problem for each column (`OwnQuadratics`)
    arm             of all runs, or a sequence of one arm a run
    start           (n, runs), or (n,) for all runs
    learning_rates  (runs,) or one number
    seeds           (runs,), of the orders that draw; default 0, 1, ...
    noise           noise(t) of shape (n, runs), added to the gradient read at step t
    observe         called with (t, x, m) after step t
    threads         of torch while this runs; None leaves them. An operation takes microseconds, so more than one
                    gains little, and loses a hundredfold where another process holds a core.

    Plain descent on a `Quadratic` without noise, weight decay and observer goes by `simulations.descent`. Raises
    ValueError for shapes that do not fit.
    """
    # All tensor work lies inside: a parallel clone would leave a thread spinning beside the first steps.
    with _threads(threads):
        return _run(problem, arm, start, learning_rates, steps, seeds, record_every, noise, observe)


def _run(
    problem: Problem,
    arm: Arm | Sequence[Arm],
    start: ArrayLike,
    learning_rates: ArrayLike,
    steps: int,
    seeds: ArrayLike | None,
    record_every: int,
    noise: Noise | None,
    observe: Callable[[int, Tensor, Tensor | None], None] | None,
) -> Runs:
    if steps < 0 or record_every < 1:
        raise ValueError(f"steps {steps}, record_every {record_every}: expected at least 0 and 1")
    n = problem.partition.n
    x = torch.as_tensor(np.array(start, dtype=np.float64))
    eta = torch.as_tensor(np.array(np.atleast_1d(learning_rates), dtype=np.float64))
    x = x[:, None] if x.ndim == 1 else x
    given = 1 if isinstance(arm, Arm) else len(arm)
    runs = max(x.shape[1], len(eta), given)
    if x.shape[0] != n or any(count not in (1, runs) for count in (x.shape[1], len(eta), given)):
        raise ValueError(
            f"start has shape {tuple(x.shape)}, learning_rates {len(eta)}, arms {given}, expected {n} x runs, runs "
            "and runs, or 1 for all runs"
        )
    own = getattr(problem, "runs", None)
    if own not in (None, runs):
        raise ValueError(f"the problem holds {own} runs, found {runs} of start, learning_rates and arms")
    arms = [arm] * runs if isinstance(arm, Arm) else list(arm) * (runs // given)
    x, eta = x.expand(n, runs).clone(), eta.expand(runs).contiguous()
    seeds = np.arange(runs) if seeds is None else np.asarray(seeds)
    if seeds.shape != (runs,):
        raise ValueError(f"seeds has shape {seeds.shape}, expected ({runs},)")
    if isinstance(problem, OwnQuadratics) and runs > OWN_RUNS and noise is None and observe is None:
        columns = [slice(low, low + OWN_RUNS) for low in range(0, runs, OWN_RUNS)]
        return _beside(
            [
                run(
                    problem.part(c), arms[c], x[:, c].numpy(), eta[c].numpy(), steps, seeds=seeds[c],
                    record_every=record_every, threads=None,
                )
                for c in columns
            ]
        )  # fmt: skip
    plan = _Plan(arms, problem.partition, steps, seeds)
    at = np.arange(0, steps + 1, record_every)
    plain = all(one.optimizer == "sgd" and not one.weight_decay for one in plan.distinct)
    if (
        isinstance(problem, Quadratic) and plain and noise is None and observe is None and plan.shared
        and EVERY_BLOCK not in plan.sequence
    ):  # fmt: skip
        losses = descend(problem, plan.partition, plan.sequence, x, eta, record_every)
        return Runs(at, losses.numpy(), x, None)
    losses = torch.empty((len(at), runs), dtype=torch.float64)
    losses[0] = problem.value(x)
    update = _Update(arms, plan, x, eta)
    for t, (g, where, mask) in enumerate(_gradients(problem, plan, x, steps, noise)):
        update.step(g, where, mask)
        if observe is not None:
            observe(t, x, update.m)
        if (t + 1) % record_every == 0:
            losses[(t + 1) // record_every] = problem.value(x)
    return Runs(at, losses.numpy(), x, update.m)


def _beside(parts: Sequence[Runs]) -> Runs:
    # A part of plain runs alone keeps no m; where others do, its rows are 0.
    moments = [torch.zeros_like(part.x) if part.m is None else part.m for part in parts]
    return Runs(
        parts[0].at,
        np.concatenate([part.losses for part in parts], axis=1),
        torch.cat([part.x for part in parts], dim=1),
        None if all(part.m is None for part in parts) else torch.cat(moments, dim=1),
    )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Plan:
    """Which blocks each run visits. `shared`: all the same, known beforehand, and `sequence` has shape (steps,)."""

    def __init__(
        self, arms: Sequence[Arm], partition: Partition, steps: int, seeds: NDArray[np.intp]
    ) -> None:
        self.distinct = list(dict.fromkeys(arms))
        places = {one: np.array([i for i, arm in enumerate(arms) if arm == one]) for one in self.distinct}
        found = [block_sequence(one, partition, steps, seeds[places[one]]) for one in self.distinct]
        blocks = [blocks_of(one, partition) for one in self.distinct]
        first = found[0]
        self.partition = blocks[0]
        self.shared = (
            first is not None and first.ndim == 1 and all(other == blocks[0] for other in blocks)
            and all(other is not None and np.array_equal(other, first) for other in found)
        )  # fmt: skip
        runs = len(arms)
        self.draws = np.zeros((0, runs))
        self.greedy = torch.tensor([arm.order == "greedy" and arm.sequence is None for arm in arms])
        if self.shared:
            assert first is not None
            self.sequence = first
            self.owner = _owner(blocks[0])[:, None]
            return
        self.sequence = np.empty((steps, runs), dtype=np.intp)
        for one, sequence in zip(self.distinct, found, strict=True):
            self.sequence[:, places[one]] = (
                MEASURED if sequence is None else sequence.reshape(steps, -1)
            )  # one column of an order that all share fills its runs
        # One owner a row where the blocks are the same, else one for each run.
        if all(other == blocks[0] for other in blocks):
            self.owner = _owner(blocks[0])[:, None]
        else:
            self.owner = torch.empty((partition.n, runs), dtype=torch.long)
            for one, own in zip(self.distinct, blocks, strict=True):
                self.owner[:, torch.from_numpy(places[one])] = _owner(own)[:, None]
        if any(sequence is None for sequence in found):
            self.draws = np.zeros((steps, runs))
            for i, arm in enumerate(arms):
                if arm.order == "importance" and arm.sequence is None:
                    self.draws[:, i] = importance_draws(arm, steps, int(seeds[i]))

    def chosen(self, t: int, g: Tensor) -> Tensor:
        """Block of each run at step t, (runs,); g: the full gradient without noise."""
        known = torch.from_numpy(self.sequence[t])
        if not len(self.draws):
            return known
        p = len(self.partition)
        owner = self.owner.expand_as(g)
        squares = torch.zeros((p, g.shape[1]), dtype=torch.float64).scatter_add_(0, owner, g * g)
        total = squares.sqrt().numpy().cumsum(axis=0)
        drawn = np.minimum((total <= self.draws[t] * total[-1]).sum(0), p - 1)
        measured = torch.where(self.greedy, squares.argmax(0), torch.from_numpy(drawn))
        return torch.where(known == MEASURED, measured, known)


def _owner(partition: Partition) -> Tensor:
    owner = torch.empty(partition.n, dtype=torch.long)
    for j, block in enumerate(partition.arrays()):
        owner[torch.from_numpy(block)] = j
    return owner


def _gradients(
    problem: Problem, plan: _Plan, x: Tensor, steps: int, noise: Noise | None
) -> Iterator[tuple[Tensor, Rows, Tensor | None]]:
    """For each step (g, where, mask): g holds the rows `where`, of which the mask, (n, runs), says which are read."""
    n, runs = x.shape
    everything = slice(0, n)
    whole = torch.empty((n, runs), dtype=torch.float64)
    if plan.shared:
        rows = block_rows(plan.partition)
        buffers = [torch.empty((len(b), runs), dtype=torch.float64) for b in plan.partition]
        for t, j in enumerate(plan.sequence.tolist()):
            where = everything if j < 0 else rows[j]
            g = problem.gradient(x, where, whole if j < 0 else buffers[j])
            yield g if noise is None else g + noise(t)[where], where, None
        return
    # Where what a step reads depends on what else is selected (T7), each block is read as a step on it alone reads it.
    alone = getattr(problem, "block_gradients", None)
    if alone is not None and not torch.equal(plan.owner, _owner(problem.partition)[:, None]):
        raise ValueError(
            "arms whose orders differ need the problem's own blocks where its gradient depends on the selection"
        )
    for t in range(steps):
        g = problem.gradient(x, everything, whole) if alone is None else alone(x)
        chosen = plan.chosen(t, g)
        if alone is not None and bool((chosen < 0).any()):
            g = torch.where(chosen < 0, problem.gradient(x, everything), g)
        yield g if noise is None else g + noise(t), everything, (plan.owner == chosen) | (chosen < 0)


class _Update:
    """The optimisers' state, (n, runs), and their step in place. Numbers that differ by run are rows (runs,)."""

    def __init__(self, arms: Sequence[Arm], plan: _Plan, x: Tensor, eta: Tensor) -> None:
        self.x, self.eta = x, eta
        self.rates = eta.expand_as(x).contiguous()
        adam = [arm.optimizer == "adamw" for arm in arms]
        plain = [arm.optimizer == "sgd" for arm in arms]
        betas = [
            0.0 if arm.optimizer == "sgd" else arm.betas[0] if arm.optimizer == "adamw" else arm.momentum
            for arm in arms
        ]
        self.beta = _by_run(betas)
        self.gain = _by_run(
            [
                1.0 if arm.optimizer in ("heavy-ball", "sgd") else 1.0 - b
                for arm, b in zip(arms, betas, strict=True)
            ]
        )
        self.beta2, self.eps = _by_run([arm.betas[1] for arm in arms]), _by_run([arm.eps for arm in arms])
        decay = [arm.weight_decay for arm in arms]
        self.keep = None if not any(decay) else 1.0 - eta * torch.tensor(decay, dtype=torch.float64)
        # Runs whose unselected coordinates move too.
        self.moving = torch.tensor([arm.idle == "momentum" and arm.optimizer != "sgd" for arm in arms])
        self.all_move, self.none_move = bool(self.moving.all()), not self.moving.any()
        self.plain = all(plain)
        self.m = None if self.plain else torch.zeros_like(x)
        self.adam = torch.tensor(adam)
        self.v: Tensor | None = None
        if any(adam):
            self.v = torch.zeros_like(x)
            # beta^count of the bias corrections; one column where all runs count alike.
            alike = plan.shared and isinstance(self.beta, float) and isinstance(self.beta2, float)
            alike = alike and (self.all_move or self.none_move)
            self.powers = [
                torch.ones((len(x), 1 if alike else x.shape[1]), dtype=torch.float64) for _ in "mv"
            ]

    def step(self, g: Tensor, where: Rows, mask: Tensor | None) -> None:
        whole = isinstance(where, slice) and where == slice(0, len(self.x))
        if mask is not None:
            self._masked(g, mask)
        elif whole or self.none_move:
            self._rows(g, where)
        elif self.all_move:
            self._everything(g, where)
        else:
            full = torch.zeros_like(self.x)
            full[where] = g
            mask = torch.zeros((len(self.x), 1), dtype=torch.bool)
            mask[where] = True
            self._masked(full, mask.expand_as(self.x))

    def _rows(self, g: Tensor, where: Rows) -> None:
        """Only the rows `where` move, in every run."""
        view = isinstance(where, slice)
        x = self.x[where]
        if self.keep is not None:
            x = x.mul_(self.keep)
        if self.m is None:
            x.addcmul_(g, self.rates[: len(g)], value=-1.0)
        else:
            m = self.m[where].mul_(self.beta).add_(g * self.gain)
            moments = [(self.m, m)]
            direction = m
            if self.v is not None:
                v = self.v[where].mul_(self.beta2).add_(g * g * (1 - self.beta2))
                powers = [
                    power[where].mul_(beta)
                    for power, beta in zip(self.powers, (self.beta, self.beta2), strict=True)
                ]
                direction = self._direction(m, v, powers)
                moments += [(self.v, v), *zip(self.powers, powers, strict=True)]
            x.addcmul_(direction, self.rates[: len(g)], value=-1.0)
            if not view:
                for state, new in moments:
                    state[where] = new
        if not view:
            self.x[where] = x

    def _everything(self, g: Tensor, where: Rows) -> None:
        """Every row moves in every run; g is the gradient of the rows `where`, 0 elsewhere."""
        assert self.m is not None
        self.m.mul_(self.beta)
        self.m[where] += g * self.gain
        direction = self.m
        if self.v is not None:
            self.v.mul_(self.beta2)
            self.v[where] += g * g * (1 - self.beta2)
            for power, beta in zip(self.powers, (self.beta, self.beta2), strict=True):
                power.mul_(beta)
            direction = self._direction(self.m, self.v, self.powers)
        if self.keep is not None:
            self.x.mul_(self.keep)
        self.x.addcmul_(direction, self.rates, value=-1.0)

    def _masked(self, g: Tensor, mask: Tensor) -> None:
        """g is read where the mask says so; the rest is idle."""
        g = torch.where(mask, g, 0.0)
        moves = mask | self.moving
        direction = g
        if self.m is not None:
            direction = self.m.copy_(torch.where(moves, self.m * self.beta + g * self.gain, self.m))
            if self.v is not None:
                new = self.v * self.beta2 + g * g * (1 - self.beta2)
                self.v.copy_(torch.where(moves, new, self.v))
                for power, beta in zip(self.powers, (self.beta, self.beta2), strict=True):
                    power.mul_(torch.where(moves, torch.as_tensor(beta, dtype=torch.float64), 1.0))
                direction = self._direction(self.m, self.v, self.powers)
        if self.keep is not None:
            self.x.mul_(torch.where(moves, self.keep, 1.0))
        self.x.sub_(torch.where(moves, self.rates * direction, 0.0))

    def _direction(self, m: Tensor, v: Tensor, powers: Sequence[Tensor]) -> Tensor:
        direction = (m / (1 - powers[0])) / ((v / (1 - powers[1])).sqrt() + self.eps)
        return direction if bool(self.adam.all()) else torch.where(self.adam, direction, m)


def _by_run(values: Sequence[float]) -> float | Tensor:
    """One number where all runs agree, else (runs,)."""
    return values[0] if len(set(values)) == 1 else torch.tensor(values, dtype=torch.float64)
