"""Plain block descent of many runs on one quadratic, where the loss at every step costs almost nothing.

In an orthonormal basis of each block in which A_bb is diagonal, with eigenvalues lambda, plain descent is the same
method, and a step changes the loss by

    f(x - eta U_b g) - f(x) = -eta sum_i g_i^2 + (eta^2 / 2) sum_i lambda_i g_i^2,     g = U_b^T A x,

exact for a quadratic: two weighted sums of squares of the gradient that the step has read anyway.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bcd_theory.partition import Partition
from simulations.problems.quadratic import Quadratic

# Cycles between two losses that are read afresh, so that no rounding is carried further.
FRESH_EVERY = 16


def descend(
    problem: Quadratic,
    partition: Partition,
    sequence: NDArray[np.intp],
    x: Tensor,
    eta: Tensor,
    record_every: int,
) -> Tensor:
    """Losses at the start and after each `record_every` steps, (records, runs); x, (n, runs), is updated in place.

    sequence: block of each step, of all runs. Losses between two fresh ones are summed from that end of the stretch
    where the loss is smaller, so where it falls or rises throughout their relative error is a few roundings; else it is
    a few roundings of the largest loss of the stretch.
    """
    p, steps, runs = len(partition), len(sequence), x.shape[1]
    size = max(len(block) for block in partition)
    basis, weights = _basis(problem, partition, size)
    matrix = basis @ problem.matrix @ basis.T
    state = basis @ x
    rows = [matrix[j * size : (j + 1) * size].clone() for j in range(p)]
    views = [state[j * size : (j + 1) * size] for j in range(p)]
    half = 0.5 * eta * eta
    gradients = torch.empty((p, size, runs), dtype=torch.float64)
    slots = list(gradients)
    whole = Quadratic(matrix.numpy(), Partition([list(range(p * size))]))
    losses = torch.empty((steps // record_every + 1, runs), dtype=torch.float64)
    losses[0] = whole.value(state)
    # Changes by step, or by cycle where no loss is wanted in between; none where records are so rare that reading
    # them afresh costs less.
    by_cycle, by_value = record_every % p == 0, record_every > 4 * p
    sums = torch.empty((FRESH_EVERY * (1 if by_cycle else p), 2, runs), dtype=torch.float64)
    known = losses[0].clone()
    ends: list[int] = []
    chosen, weight = [-1], weights
    for begin in range(0, steps, p):
        blocks = sequence[begin : begin + p].tolist()
        for slot, j in enumerate(blocks):
            g = slots[slot]
            torch.mm(rows[j], state, out=g)
            views[j].addcmul_(g, eta, value=-1.0)
            if by_value and (begin + slot + 1) % record_every == 0:
                losses[(begin + slot + 1) // record_every] = whole.value(state)
        if by_value:
            continue
        end = begin + len(blocks)
        if blocks != chosen:
            chosen, weight = blocks, weights[blocks]
            if by_cycle:
                weight = weight.permute(1, 0, 2).reshape(1, 2, -1)
        squares = gradients[: len(blocks)].view(len(weight), -1, runs)
        torch.bmm(weight, squares.mul_(squares), out=sums[len(ends) : len(ends) + len(weight)])
        ends += [end] if by_cycle else range(begin + 1, end + 1)
        if end == steps or end % (FRESH_EVERY * p) == 0:
            fresh = whole.value(state)
            wanted = [i for i, t in enumerate(ends) if t % record_every == 0]
            if wanted:
                done = sums[: len(ends)]
                after = _between(known, fresh, (done[:, 1] * half).addcmul_(done[:, 0], eta, value=-1.0))
                first = ends[wanted[0]] // record_every
                losses[first : first + len(wanted)] = after if len(wanted) == len(ends) else after[wanted]
            known, ends = fresh, []
    x.copy_(basis.T @ state)
    return losses


def _basis(problem: Quadratic, partition: Partition, size: int) -> tuple[Tensor, Tensor]:
    """Rows of the eigenvectors of each A_bb, blocks filled up with zero rows to one size; weights (p, 2, size)."""
    p = len(partition)
    basis, weights = np.zeros((p * size, partition.n)), np.zeros((p, 2, size))
    for j, block in enumerate(partition.arrays()):
        values, vectors = np.linalg.eigh(problem.A[np.ix_(block, block)])
        basis[j * size : j * size + len(block), block] = vectors.T
        weights[j, 0, : len(block)] = 1.0
        weights[j, 1, : len(block)] = values
    return torch.from_numpy(basis), torch.from_numpy(weights)


def _between(start: Tensor, end: Tensor, changes: Tensor) -> Tensor:
    """Losses after each change, (changes, runs), from the losses before the first and after the last of them."""
    falls = end < start
    forward = backward = None
    if not falls.all():
        forward = changes.cumsum(0).add_(start)
    if falls.any():
        # From the end the decreases are added up, so nothing cancels.
        later = changes[1:].flip(0).cumsum(0).flip(0)
        backward = torch.cat([end - later, end[None]])
    if forward is None or backward is None:
        found = backward if forward is None else forward
        assert found is not None
        return found
    return torch.where(falls, backward, forward)
