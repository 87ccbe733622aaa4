"""A function that is not convex but obeys the Polyak-Lojasiewicz inequality, with its constants (T3)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bcd_theory.partition import Partition, equal_blocks
from bcd_theory.problems import PL_OF_H

Array = NDArray[np.float64]


@dataclass
class NonConvexPL:
    """f(x) = sum_i h((M x)_i), h(t) = t^2 + 3 sin(t)^2; M (m, n) of full row rank, m <= n; f* = 0.

    -4 <= h'' <= 8 gives L = 8 |M|^2 and L_i = 8 |M_i|^2 (attained at M x = 0). h'^2 >= 2 PL_OF_H h gives |grad f|^2 =
    |M^T h'|^2 >= sigma_min(M)^2 |h'|^2 >= 2 mu f, mu = PL_OF_H sigma_min(M)^2. For m < n minimisers fill a subspace.
    """

    M: Array
    partition: Partition
    minimum: float | None = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._singular = np.linalg.svd(self.M, compute_uv=False)
        if len(self.M) > self.M.shape[1] or self._singular[-1] <= 1e-9 * self._singular[0]:
            raise ValueError(
                f"M has shape {self.M.shape}, expected full row rank with no more rows than columns"
            )
        if self.M.shape[1] != self.partition.n:
            raise ValueError(f"M has {self.M.shape[1]} columns, the partition {self.partition.n} coordinates")
        self._m = torch.from_numpy(self.M)

    @property
    def smoothness(self) -> float:
        """L = 8 |M|^2."""
        return float(8 * self._singular[0] ** 2)

    @property
    def block_smoothness(self) -> Array:
        """L_i = 8 |M_i|^2."""
        return np.array([8 * np.linalg.norm(self.M[:, b], 2) ** 2 for b in self.partition.arrays()])

    @property
    def pl_constant(self) -> float:
        """mu, a lower bound on the best constant."""
        return float(PL_OF_H * self._singular[-1] ** 2)

    def value(self, x: Tensor) -> Tensor:
        t = self._m @ x
        return (t.square() + 3 * torch.sin(t).square()).sum(0)

    def gradient(self, x: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        t = self._m @ x
        return torch.mm(self._m[:, rows].T, 2 * t + 3 * torch.sin(2 * t), out=out)


def random_pl(m: int, n: int, p: int, coupling: float, rng: np.random.Generator) -> NonConvexPL:
    """M: the first m rows of I + coupling * Gaussian/sqrt(n)."""
    mixing = np.eye(n) + coupling * rng.normal(size=(n, n)) / np.sqrt(n)
    return NonConvexPL(mixing[:m], equal_blocks(n, p))
