"""f(x) = x^T A x / 2 with chosen coupling, conditioning and blocks; L, L_i, mu and f* = 0 are exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bcd_theory.partition import Partition, equal_blocks

Array = NDArray[np.float64]

TILE = 16


@dataclass
class Quadratic:
    """A symmetric positive semidefinite, shape (n, n); the minimum is 0."""

    A: Array
    partition: Partition
    minimum: float | None = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.matrix = torch.from_numpy(np.ascontiguousarray(self.A))
        self._buffer = torch.empty((0, 0), dtype=torch.float64)
        self._rows: dict[tuple[int | None, int | None], Tensor] = {}
        self._triangle: list[tuple[slice, Tensor]] = []
        n = len(self.A)
        for low in range(0, n, TILE):
            rows = slice(low, min(low + TILE, n))
            weights = self.matrix[rows, : rows.stop].clone()
            weights[:, :low] *= 2.0
            self._triangle.append((rows, weights))

    @property
    def smoothness(self) -> float:
        """L, the largest eigenvalue of A."""
        return float(np.linalg.eigvalsh(self.A)[-1])

    @property
    def block_smoothness(self) -> Array:
        """L_i, the largest eigenvalue of each diagonal block."""
        return np.array([np.linalg.eigvalsh(self.A[np.ix_(b, b)])[-1] for b in self.partition.arrays()])

    @property
    def pl_constant(self) -> float:
        """mu, the smallest eigenvalue of A above rounding."""
        values = np.linalg.eigvalsh(self.A)
        return float(values[values > 1e-12 * values[-1]][0])

    def value(self, x: Tensor) -> Tensor:
        if self._buffer.shape != x.shape:
            self._buffer = torch.empty_like(x)
        # x^T A x from one triangle of blocks: each pair of blocks is read once and counted twice.
        for rows, weights in self._triangle:
            torch.mm(weights, x[: rows.stop], out=self._buffer[rows])
        return self._buffer.mul_(x).sum(0).mul_(0.5)

    def gradient(self, x: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        if not isinstance(rows, slice):
            return torch.mm(self.matrix[rows], x, out=out)
        key = (rows.start, rows.stop)
        if key not in self._rows:
            self._rows[key] = self.matrix[rows]
        return torch.mm(self._rows[key], x, out=out)


def coupled(n: int, p: int, coupling: float, condition: float, rng: np.random.Generator) -> Quadratic:
    """D^(1/2) C D^(1/2): curvatures D spread over `condition`, C = (1 - coupling) I + coupling W W^T normalised.

    C has a unit diagonal and is positive semidefinite (W Gaussian, n x n): coupling 0 gives no coupling at all.
    """
    if not 0.0 <= coupling <= 1.0:
        raise ValueError(f"coupling is {coupling}, expected a number between 0 and 1")
    if condition < 1.0:
        raise ValueError(f"condition is {condition}, expected at least 1")
    w = rng.normal(size=(n, n))
    gram = w @ w.T
    scale = np.sqrt(np.diag(gram))
    c = (1 - coupling) * np.eye(n) + coupling * gram / np.outer(scale, scale)
    d = np.sqrt(rng.permutation(np.geomspace(1.0 / condition, 1.0, n)))
    a = c * np.outer(d, d)
    return Quadratic((a + a.T) / 2, equal_blocks(n, p))


def ring(p: int, ridge: float = 0.01) -> Quadratic:
    """T5's A = [cos((i - j) pi/p)] + ridge I, p scalar blocks: idle momentum diverges below 2/L_max."""
    i = np.arange(p)
    return Quadratic(np.cos((i[:, None] - i) * np.pi / p) + ridge * np.eye(p), equal_blocks(p, p))
