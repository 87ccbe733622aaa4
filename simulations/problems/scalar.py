"""T7's scalar chain y_{l+1} = (1 + a_l) y_l as a problem to be run: where the identity shortcut has the wrong sign."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bcd_theory.partition import Partition


@dataclass
class ScalarChain:
    """f(a_1 ... a_N) = y_N (loss `linear`) or (y_N - target)^2/2 (`squared`), y_N = x prod(1 + a_l); one block a layer.

    The derivative by a_l is f'(y_N) y_{l-1} prod_{j > l}(1 + a_j); mode `identity` reads f'(y_N) y_{l-1}. Its sign is
    wrong exactly where the product over the skipped layers is negative; for N = 2 (a, b) where b < -1.
    """

    layers: int = 2
    x: float = 1.0
    mode: str = "identity"
    loss: str = "linear"
    target: float = 0.0
    partition: Partition = field(init=False)
    minimum: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.mode not in ("exact", "identity"):
            raise ValueError(f"mode is {self.mode!r}, expected 'exact' or 'identity'")
        if self.loss not in ("linear", "squared"):
            raise ValueError(f"loss is {self.loss!r}, expected 'linear' or 'squared'")
        if self.x == 0:
            raise ValueError("x is 0, expected another number: every derivative would be 0")
        self.partition = Partition([[layer] for layer in range(self.layers)])
        if self.loss == "squared":
            self.minimum = 0.0

    def output(self, a: Tensor) -> Tensor:
        """y_N of each column."""
        return self.x * torch.prod(1 + a, 0)

    def value(self, a: Tensor) -> Tensor:
        y = self.output(a)
        return y if self.loss == "linear" else 0.5 * (y - self.target).square()

    def gradient(self, a: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        """Rows as steps read them that select one layer; all rows at once: the gradient of full backpropagation."""
        indices = torch.arange(self.layers)[rows]
        exact = self.mode == "exact" or len(indices) == self.layers
        top = torch.ones_like(a[0]) if self.loss == "linear" else self.output(a) - self.target
        found = []
        for layer in indices.tolist():
            kept = [a[:layer], a[layer + 1 :]] if exact else [a[:layer]]
            found.append(top * self.x * torch.prod(1 + torch.cat(kept), 0))
        return torch.stack(found)

    def block_gradients(self, a: Tensor) -> Tensor:
        """Each row as a step reads it that selects this layer alone."""
        return torch.cat([self.gradient(a, slice(layer, layer + 1)) for layer in range(self.layers)])
