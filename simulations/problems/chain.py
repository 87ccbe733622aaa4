"""Linear residual chain h_{l+1} = (I + W_l) h_l + B_l x_l, loss |h_N - target|^2/2: exact Jacobian products (T7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bcd_theory.partition import Partition

Array = NDArray[np.float64]


@dataclass
class Chain:
    """W: (N, d, d) frozen layers; B: (N, d, r), the adapter x_l of layer l adds B_l x_l; one block a layer.

    true, surrogate: dh_N/dx and what identity mode takes for it, (d, N r): the adapter of layer l passes through the
    layers above it, or through none. mode `exact` or `identity` chooses the gradient that a step on one layer reads.
    """

    W: Array
    B: Array
    target: Array
    mode: str = "exact"
    minimum: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        layers, d, r = self.B.shape
        if self.W.shape != (layers, d, d) or self.target.shape != (d,):
            raise ValueError(
                f"W has shape {self.W.shape}, target {self.target.shape}, expected {layers} x d x d and d"
            )
        if self.mode not in ("exact", "identity"):
            raise ValueError(f"mode is {self.mode!r}, expected 'exact' or 'identity'")
        above, columns = np.eye(d), []
        for layer in range(layers - 1, -1, -1):
            columns.append(above @ self.B[layer])
            above = above @ (np.eye(d) + self.W[layer])
        self.true = np.concatenate(columns[::-1], axis=1)
        self.surrogate = np.concatenate(list(self.B), axis=1)
        self.partition = Partition([list(range(r * j, r * j + r)) for j in range(layers)])
        self._true = torch.from_numpy(self.true)
        self._passed = torch.from_numpy(self.true if self.mode == "exact" else self.surrogate)
        self._target = torch.from_numpy(self.target)[:, None]

    @property
    def field(self) -> Array:
        """G: a step reads G x + const. S^T R, symmetric for `exact` only."""
        return np.asarray(self._passed.numpy().T @ self.true)

    def value(self, x: Tensor) -> Tensor:
        return 0.5 * ((self._true @ x - self._target) ** 2).sum(0)

    def gradient(self, x: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        """What a step reads that selects these rows' layers; all rows at once: the true gradient in any mode."""
        every = isinstance(rows, slice) and rows == slice(0, len(x))
        passed = self._true if every else self._passed
        return torch.mm(passed[:, rows].T, self._true @ x - self._target, out=out)

    def block_gradients(self, x: Tensor) -> Tensor:
        """(n, runs): each layer's rows as a step reads them that selects this layer alone."""
        return self._passed.T @ (self._true @ x - self._target)

    def true_gradient(self, x: Tensor) -> Tensor:
        return self._true.T @ (self._true @ x - self._target)


class ChainStack:
    """Chains of one shape side by side; columns are instance-major, `runs / len(chains)` each."""

    minimum: float | None = None

    def __init__(self, chains: Sequence[Chain]) -> None:
        self.instances, self.partition = len(chains), chains[0].partition
        self._true = torch.stack([torch.from_numpy(chain.true) for chain in chains])
        self._passed = torch.stack([chain._passed for chain in chains])
        self._target = torch.stack([torch.from_numpy(chain.target) for chain in chains])[:, :, None]

    def _residual(self, x: Tensor) -> Tensor:
        columns = x.reshape(len(x), self.instances, -1).transpose(0, 1)
        return torch.bmm(self._true, columns) - self._target

    def value(self, x: Tensor) -> Tensor:
        return 0.5 * self._residual(x).square().sum(1).reshape(-1)

    def gradient(self, x: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        every = isinstance(rows, slice) and rows == slice(0, len(x))
        return self._read(self._true if every else self._passed, x, rows)

    def block_gradients(self, x: Tensor) -> Tensor:
        return self._read(self._passed, x, slice(0, len(x)))

    def _read(self, passed: Tensor, x: Tensor, rows: slice | Tensor) -> Tensor:
        found = torch.bmm(passed[:, :, rows].transpose(1, 2), self._residual(x))
        return found.transpose(0, 1).reshape(-1, x.shape[1])


def random_chain(
    layers: int, d: int, r: int, branch_norm: float, mode: str, rng: np.random.Generator
) -> Chain:
    """Gaussian layers scaled to spectral norm `branch_norm`, orthonormal B_l."""
    w = rng.normal(size=(layers, d, d))
    w *= branch_norm / np.linalg.norm(w, ord=2, axis=(1, 2))[:, None, None]
    b = np.stack([np.linalg.qr(rng.normal(size=(d, r)))[0] for _ in range(layers)])
    return Chain(w, b, rng.normal(size=d), mode)
