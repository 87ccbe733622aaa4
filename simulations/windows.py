"""The learning rate at which an arm begins to diverge, on many instances at once, by the rule that real runs use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reports.metrics import DIVERGED_WINDOW, diverged_at, no_progress
from simulations.problems.base import Problem
from simulations.runner import Arm, run

Array = NDArray[np.float64]
LOWEST, HIGHEST = 2.0**-12, 2.0**4
COARSE, FINE = 4.0, 2.0**0.25  # factors between neighbouring rates of the two grids


class Instances(Problem, Protocol):
    """A problem whose columns are instance-major."""

    instances: int


@dataclass(frozen=True)
class Edge:
    """stable: the largest rate below the first one that fails, failed: that one; None where there is none.

    drop: final loss over first loss at `stable`.
    """

    stable: float | None
    failed: float | None
    drop: float | None

    @property
    def limit(self) -> float | None:
        """Geometric mean of both rates, known to half a step of the fine grid."""
        if self.stable is None or self.failed is None:
            return None
        return float(np.sqrt(self.stable * self.failed))


def first_failure(
    problem: Instances, arm: Arm, starts: Array, steps: int, *, needs_progress: bool
) -> list[Edge]:
    """The edge of each instance. starts (n, instances).

    Rates rise by 4 from 2^-12 to 16; between the last that holds and the first that does not, by 2^(1/4). A run has
    diverged if the mean loss over 20 steps, read once a cycle, exceeds 1.2 times the first loss, or is not finite. A
    run fails if it has diverged or, with `needs_progress`, if its last loss is not below its first one. Failure at a
    rate below another that holds counts: it is the first one that is looked for.
    """
    rates = np.exp2(np.arange(np.log2(LOWEST), np.log2(HIGHEST) + 0.5, np.log2(COARSE)))
    coarse = np.tile(rates, (problem.instances, 1))
    failed, drops = _try(problem, arm, starts, coarse, steps, needs_progress)
    first = [int(np.argmax(row)) if row.any() else 0 for row in failed]
    low = np.array([row[max(j - 1, 0)] for row, j in zip(coarse, first, strict=True)])
    parts = round(np.log(COARSE) / np.log(FINE))
    fine = low[:, None] * FINE ** np.arange(1, parts)
    inner, inner_drops = _try(problem, arm, starts, fine, steps, needs_progress)
    edges = []
    for i, j in enumerate(first):
        if j == 0:  # no rate failed, or the lowest did
            edges.append(Edge(None, None, None))
            continue
        bad = np.array([False, *inner[i], True])
        grid = np.array([coarse[i, j - 1], *fine[i], coarse[i, j]])
        final = [drops[i, j - 1], *inner_drops[i]]
        k = int(np.argmax(bad))
        edges.append(Edge(float(grid[k - 1]), float(grid[k]), float(final[k - 1])))
    return edges


def _try(
    problem: Instances, arm: Arm, starts: Array, rates: Array, steps: int, needs_progress: bool
) -> tuple[NDArray[np.bool_], Array]:
    """(whether each run fails, its final loss over its first), both of the shape of rates, (instances, rates)."""
    p = len(problem.partition)
    losses = run(
        problem, arm, np.repeat(starts, rates.shape[1], 1), rates.ravel(), steps, record_every=p
    ).losses
    window = -(-DIVERGED_WINDOW // p)
    failed = []
    for column in losses.T.tolist():
        bad = diverged_at(column[1:], column[0], window=window) is not None
        failed.append(bad or (needs_progress and no_progress(column[-1], column[0])))
    with np.errstate(all="ignore"):
        drops = losses[-1] / losses[0]
    return np.array(failed).reshape(rates.shape), drops.reshape(rates.shape)
