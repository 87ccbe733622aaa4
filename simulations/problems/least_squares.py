"""Least squares through frozen weights, many instances side by side: what NF4 and rounding do, in closed form (T11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bcd_theory.partition import Partition, equal_blocks
from bcd_theory.quantization import round_trip

Array = NDArray[np.float64]


@dataclass
class LeastSquares:
    """f(x) = |W x - y|^2/(2 rows); W (instances, rows, n) frozen, y (instances, rows). Columns are instance-major.

    bfloat16: (instances,) of bool, whose gradients are rounded to bfloat16.
    """

    W: Array
    y: Array
    partition: Partition
    bfloat16: NDArray[np.bool_] | None = None
    minimum: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.instances, rows, n = self.W.shape
        if self.y.shape != (self.instances, rows) or self.partition.n != n:
            raise ValueError(
                f"W has shape {self.W.shape}, y {self.y.shape}, the partition {self.partition.n} indices"
            )
        self._w, self._y = torch.from_numpy(self.W), torch.from_numpy(self.y)[:, :, None]
        self._flags = None if self.bfloat16 is None else torch.from_numpy(self.bfloat16)

    @property
    def hessians(self) -> Array:
        """W^T W/rows of each instance."""
        return np.asarray(np.einsum("irj,irk->ijk", self.W, self.W) / self.W.shape[1])

    @property
    def minimisers(self) -> Array:
        """(n, instances)."""
        return np.stack(
            [np.linalg.lstsq(w, y, rcond=None)[0] for w, y in zip(self.W, self.y, strict=True)], axis=1
        )

    def _residual(self, x: Tensor) -> Tensor:
        if x.shape[1] % self.instances:
            raise ValueError(f"{x.shape[1]} runs, expected a multiple of the {self.instances} instances")
        columns = x.reshape(len(x), self.instances, -1).transpose(0, 1)
        return torch.bmm(self._w, columns) - self._y

    def value(self, x: Tensor) -> Tensor:
        return 0.5 * self._residual(x).square().mean(1).reshape(-1)

    def gradient(self, x: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        found = torch.bmm(self._w[:, :, rows].transpose(1, 2), self._residual(x)) / self.W.shape[1]
        found = found.transpose(0, 1).reshape(-1, x.shape[1])
        if self._flags is None:
            return found
        flags = self._flags.repeat_interleave(x.shape[1] // self.instances)
        return torch.where(flags, found.to(torch.bfloat16).to(found.dtype), found)

    def quantised(self) -> LeastSquares:
        """The same on NF4 weights, y unchanged."""
        return replace(self, W=np.stack([round_trip(w) for w in self.W]))


def random_least_squares(rngs: Sequence[np.random.Generator], n: int, p: int) -> LeastSquares:
    """Columns of W share one direction of weight 0.2 to 0.8; y = W x + noise, x Gaussian. One instance a generator."""
    weights, targets = [], []
    for rng in rngs:
        share = rng.uniform(0.2, 0.8)
        w = rng.normal(size=(4 * n, n)) * np.sqrt(1 - share) + rng.normal(size=(4 * n, 1)) * np.sqrt(share)
        weights.append(w)
        targets.append(w @ rng.normal(size=n) + 0.3 * rng.normal(size=4 * n))
    return LeastSquares(np.stack(weights), np.stack(targets), equal_blocks(n, p))
