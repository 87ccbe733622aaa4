"""f(x) = <c, x>: a constant gradient, on which AdamW's movement is known exactly (T9)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from bcd_theory.partition import Partition


@dataclass
class LinearLoss:
    """c: (n,), float64. Unbounded below: it measures movement, not convergence."""

    c: Tensor
    partition: Partition
    minimum: float | None = field(default=None, init=False)

    def value(self, x: Tensor) -> Tensor:
        return self.c @ x

    def gradient(self, x: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        return self.c[rows][:, None].expand(-1, x.shape[1])
