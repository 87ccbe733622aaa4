"""One cycle on a quadratic as a linear map, applied block by block and never multiplied out (T4, T5).

State: x (shape n) without momentum, (x, m) stacked (shape 2n) with it; columns are vectors. G is the
gradient's matrix (A for f = x^T A x/2), P_b the projection on block b, c = 1 - beta (EMA form) or 1 (heavy
ball):

    no momentum       x_b <- x_b - eta (G x)_b
    idle `momentum`   m <- beta m, m_b <- m_b + c (G x)_b, x <- x - eta m
    idle `frozen`     m_b <- beta m_b + c (G x)_b, x_b <- x_b - eta m_b

The map is written as its difference from the identity: an eigenvalue of a cycle is mu = 1 + nu, and |mu| <
1 iff 2 Re nu + |nu|^2 < 0, which keeps its sign for slow modes (|nu| far below rounding of 1) where |mu|
does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bcd_theory.partition import Partition
from bcd_theory.quadratic import is_sparse

Array = NDArray[np.float64]
Idle = Literal["momentum", "frozen"]


@dataclass
class CycleMap:
    """Steps and cycles of block descent on the field G.

    rows      for each block an object with `rows @ Y` = (G Y)_b: dense or sparse rows of G, or `OperatorRows`
    sequence  blocks of one cycle, in order
    products  matrix-vector products with G used so far (the rows of all blocks together count as one)
    """

    partition: Partition
    rows: Sequence[Any]
    sequence: Sequence[int]
    momentum: float = 0.0
    gain: float = 1.0
    idle: Idle = "momentum"
    products: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.n = self.partition.n
        self.size = self.n if self.momentum == 0.0 else 2 * self.n
        self._index = self.partition.arrays()

    def difference(self, eta: float | Array, state: Array, field_times_x: Array | None = None) -> Array:
        """(M(eta) - I) applied to the columns of `state`, shape (..., size, k).

        eta may be an array of shape (...). `field_times_x` = G x, where it is known more accurately than it
        can be computed (for eigenvectors: lambda x); it then carries over to the result.
        """
        return self.steps(eta, state, self.sequence, field_times_x)

    def steps(
        self, eta: float | Array, state: Array, sequence: Sequence[int], field_times_x: Array | None = None
    ) -> Array:
        """The same for the steps of `sequence` alone: state after them less state before."""
        n, k = self.n, state.shape[-1]
        rate = np.asarray(eta, dtype=np.float64)[..., None, None]
        lead = np.broadcast_shapes(rate.shape[:-2], state.shape[:-2])
        x = state[..., :n, :]
        change = np.zeros((*lead, n, k))
        # With G x given only the change goes through G; else x + change does, at the same cost.
        moving = change if field_times_x is not None else np.array(np.broadcast_to(x, (*lead, n, k)))
        m = np.array(np.broadcast_to(state[..., n:, :], (*lead, n, k))) if self.momentum else None
        for j in sequence:
            b = self._index[j]
            g = self.rows[j] @ moving
            self.products += len(b) / n * k * int(np.prod(lead))
            if field_times_x is not None:
                g = g + field_times_x[..., b, :]
            if m is None:
                step = rate * g
                where: Any = b
            elif self.idle == "frozen":
                m[..., b, :] = self.momentum * m[..., b, :] + self.gain * g
                step, where = rate * m[..., b, :], b
            else:
                m *= self.momentum
                m[..., b, :] += self.gain * g
                step, where = rate * m, slice(None)
            change[..., where, :] -= step
            if moving is not change:
                moving[..., where, :] -= step
        if m is None:
            return change
        return np.concatenate([change, m - state[..., n:, :]], axis=-2)


class OperatorRows:
    """Rows of block b of a matrix that is only known by its products."""

    def __init__(self, operator: Any, block: NDArray[np.intp]) -> None:
        self.operator, self.block = operator, block

    def __matmul__(self, y: Array) -> Array:
        return np.asarray(self.operator @ y)[self.block]


def block_rows(matrix: Any, partition: Partition) -> list[Any]:
    """The rows of G by block. Dense blocks of neighbouring indices are views, not copies."""
    rows: list[Any] = []
    for b in partition.arrays():
        contiguous = np.array_equal(b, np.arange(b[0], b[0] + len(b)))
        if isinstance(matrix, np.ndarray):
            rows.append(matrix[b[0] : b[0] + len(b)] if contiguous else matrix[b])
        elif is_sparse(matrix):
            rows.append(matrix.tocsr()[b])
        else:
            rows.append(OperatorRows(matrix, b))
    return rows


def quotient_matrix(
    cycle: CycleMap, eta: Array, basis: Array, image: Array, sequence: Sequence[int] | None = None
) -> Array:
    """Dense M(eta) - I on the quotient by ker G, shape (len(eta), s, s), s = r without momentum and r + n with it.

    sequence  steps to take instead of a whole cycle

    basis   orthonormal n x r basis of the complement of ker G (range of A for symmetric A)
    image   G @ basis
    ker G is fixed by every step, so the quotient's matrix is the compression to its complement. m needs no
    quotient.
    """
    r = basis.shape[1]
    sequence = cycle.sequence if sequence is None else sequence
    if cycle.momentum == 0.0:
        return basis.T @ cycle.steps(eta, basis, sequence, image)
    n = cycle.n
    state = np.zeros((2 * n, r + n))
    state[:n, :r] = basis
    state[n:, r:] = np.eye(n)
    known = np.hstack([image, np.zeros((n, n))])
    change = cycle.steps(eta, state, sequence, known)
    return np.concatenate([basis.T @ change[..., :n, :], change[..., n:, :]], axis=-2)


def growth(nu: NDArray[np.complex128]) -> Array:
    """|1 + nu|^2 - 1, without cancellation for small nu."""
    return np.asarray(2 * nu.real + np.abs(nu) ** 2, dtype=np.float64)
