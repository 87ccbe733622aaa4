"""What the runner asks of a problem: values and gradients of many points at once, one point a column."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from bcd_theory.partition import Partition


class Problem(Protocol):
    """f: R^n -> R with its blocks; points are the columns of X, shape (n, runs), float64."""

    partition: Partition
    minimum: float | None  # f*, where it is known

    def value(self, x: Tensor) -> Tensor:
        """f of each column, shape (runs,)."""

    def gradient(self, x: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of the gradient of each column, shape (len(rows), runs), as a step reads it that selects these rows.

        A problem whose answer depends on what else is selected (a surrogate gradient: T7) also has
        `block_gradients(x) -> (n, runs)`: each block's rows as read by a step that selects this block alone.
        """


def block_rows(partition: Partition) -> list[slice | Tensor]:
    """Each block as a slice where its indices are neighbours (no copy), else as an index tensor."""
    rows: list[slice | Tensor] = []
    for block in partition:
        low, high = block[0], block[-1] + 1
        neighbours = tuple(block) == tuple(range(low, high))
        rows.append(slice(low, high) if neighbours else torch.tensor(block))
    return rows
