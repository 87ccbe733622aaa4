"""A quadratic of its own for every run: f_r(x) = x^T A_r x / 2."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bcd_theory.partition import Partition


@dataclass
class OwnQuadratics:
    """A: (runs, n, n), symmetric positive semidefinite; column r of a point belongs to A[r]. The minimum is 0."""

    A: NDArray[np.float64]
    partition: Partition
    minimum: float | None = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        runs, n, m = self.A.shape
        if (n, m) != (self.partition.n, self.partition.n):
            raise ValueError(
                f"A has shape {self.A.shape}, expected runs x {self.partition.n} x {self.partition.n}"
            )
        self.runs = runs
        self.A = np.ascontiguousarray(self.A)

    def part(self, columns: slice) -> OwnQuadratics:
        """The problems of some runs, without a copy."""
        return OwnQuadratics(self.A[columns], self.partition)

    def value(self, x: Tensor) -> Tensor:
        return 0.5 * (x * self.gradient(x, slice(0, len(x)))).sum(0)

    def gradient(self, x: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        where = rows if isinstance(rows, slice) else rows.numpy()
        # numpy's product of many small matrices with a vector each takes half the time of torch.bmm.
        found = torch.from_numpy(np.matmul(self.A[:, where], x.numpy().T[:, :, None])[:, :, 0].T)
        return found if out is None else out.copy_(found)
