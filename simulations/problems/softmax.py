"""Softmax regression with a ridge: smooth and strongly convex, with curvature bounds in closed form (T1-T3)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bcd_theory.partition import Partition, equal_blocks

Array = NDArray[np.float64]


@dataclass
class Softmax:
    """f(W) = mean_s [log sum_c exp <w_c, a_s> - <w_{y_s}, a_s>] + ridge |W|^2/2; blocks are groups of features.

    data (samples, features); labels (samples,) of 0 ... classes - 1; x holds W feature by feature (feature-major), so
    that a group of features is a contiguous block of n = features * classes coordinates.
    """

    data: Array
    labels: NDArray[np.intp]
    classes: int
    p: int
    ridge: float
    partition: Partition = field(init=False)
    minimum: float | None = field(init=False)

    def __post_init__(self) -> None:
        samples, features = self.data.shape
        if self.labels.shape != (samples,) or not 0 <= self.labels.min() <= self.labels.max() < self.classes:
            raise ValueError(f"labels: expected {samples} integers between 0 and {self.classes - 1}")
        if self.ridge <= 0:
            raise ValueError(f"ridge is {self.ridge}, expected a positive number")
        groups = equal_blocks(features, self.p)
        c = self.classes
        self.partition = Partition([range(g[0] * c, (g[-1] + 1) * c) for g in groups])
        self._a = torch.from_numpy(self.data)
        self._y = torch.from_numpy(np.eye(c)[self.labels])
        self.minimiser = self._newton()
        self.minimum = float(self.value(torch.from_numpy(self.minimiser[:, None]))[0])

    @property
    def smoothness(self) -> float:
        """L <= |A|^2/(2 samples) + ridge: diag(q) - q q^T has no eigenvalue above 1/2 (upper)."""
        return self._bound(self.data)

    @property
    def block_smoothness(self) -> Array:
        """L_i <= |A_i|^2/(2 samples) + ridge, A_i the block's features (upper)."""
        c = self.classes
        return np.array([self._bound(self.data[:, b[0] // c : (b[-1] + 1) // c]) for b in self.partition])

    @property
    def pl_constant(self) -> float:
        """mu >= ridge: f is strongly convex."""
        return self.ridge

    def _bound(self, a: Array) -> float:
        return float(np.linalg.norm(a, 2) ** 2 / (2 * len(a)) + self.ridge)

    def _logits(self, x: Tensor) -> Tensor:
        w = x.reshape(self.data.shape[1], self.classes * x.shape[1])
        return (self._a @ w).reshape(len(self._a), self.classes, -1)

    def value(self, x: Tensor) -> Tensor:
        logits = self._logits(x)
        fit = torch.logsumexp(logits, 1) - (logits * self._y[:, :, None]).sum(1)
        return fit.mean(0) + 0.5 * self.ridge * x.square().sum(0)

    def gradient(self, x: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        away = (torch.softmax(self._logits(x), 1) - self._y[:, :, None]) / len(self._a)
        if not isinstance(rows, slice) or rows.start % self.classes or rows.stop % self.classes:
            return self._whole(away, x)[rows]
        features = slice(rows.start // self.classes, rows.stop // self.classes)
        fit = self._a[:, features].T @ away.reshape(len(self._a), -1)
        return fit.reshape(-1, x.shape[1]) + self.ridge * x[rows]

    def _whole(self, away: Tensor, x: Tensor) -> Tensor:
        return (self._a.T @ away.reshape(len(self._a), -1)).reshape(-1, x.shape[1]) + self.ridge * x

    def _newton(self) -> Array:
        c, n = self.classes, self.partition.n
        x = np.zeros(n)
        for _ in range(50):
            column = torch.from_numpy(x[:, None])
            g = self.gradient(column, slice(0, n))[:, 0].numpy()
            if np.linalg.norm(g) < 1e-13:
                return x
            q = torch.softmax(self._logits(column), 1)[:, :, 0].numpy()
            inner = np.einsum("sc,ce->sce", q, np.eye(c)) - np.einsum("sc,se->sce", q, q)
            h = np.einsum("si,sj,sce->icje", self.data, self.data, inner).reshape(n, n) / len(q)
            step = np.linalg.solve(h + self.ridge * np.eye(n), g)
            # A full step can overshoot far from the minimiser; halved until f falls.
            scale, now = 1.0, float(self.value(column)[0])
            while scale > 1e-6 and float(self.value(torch.from_numpy((x - scale * step)[:, None]))[0]) > now:
                scale /= 2
            x = x - scale * step
        if np.linalg.norm(g) > 1e-10:
            raise ValueError(
                f"Newton's method stopped at a gradient of {np.linalg.norm(g):.1e}; ridge too small?"
            )
        return x


def random_softmax(
    samples: int,
    features: int,
    classes: int,
    p: int,
    rng: np.random.Generator,
    ridge: float = 0.01,
    share: float = 0.3,
) -> Softmax:
    """Gaussian features, correlated through one common direction of weight `share`; labels drawn from a softmax."""
    common = rng.normal(size=(samples, 1))
    data = np.sqrt(1 - share) * rng.normal(size=(samples, features)) + np.sqrt(share) * common
    logits = data @ rng.normal(size=(features, classes))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    return Softmax(data, labels, classes, p, ridge)
