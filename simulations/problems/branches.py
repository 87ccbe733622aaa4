"""Residual branches with hand-written derivatives: tanh, causal attention, SwiGLU; all runs at once, float64.

h has shape (runs, positions, width). A branch owns some linear maps; their weights arrive merged with the adapters,
W + s B A, one matrix a run, so that a branch knows of no adapter. backward takes the gradient g that leaves the branch
to the one that enters it, and on request gives dW = sum over positions of (outgoing gradient) x (input).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

EPS = 1e-6  # of the RMS norm, added to the mean square


class Passed(NamedTuple):
    """Gradient by the branch's input, and by its weights (None unless asked for)."""

    hidden: Tensor
    weights: list[Tensor] | None


class Branch(Protocol):
    """F in h' = h + F(h)."""

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of its linear maps."""

    def forward(self, h: Tensor, weights: list[Tensor]) -> tuple[Tensor, Any]:
        """(F(h), what backward needs)."""

    def backward(self, g: Tensor, weights: list[Tensor], saved: Any, adapters: bool) -> Passed:
        """F'(h)^T g, without the identity path."""


def _apply(h: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(h, weight.transpose(1, 2))


def _outer(g: Tensor, h: Tensor) -> Tensor:
    return torch.bmm(g.transpose(1, 2), h)


def _norm(h: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
    return h * scale, scale


def _norm_backward(g: Tensor, n: Tensor, scale: Tensor) -> Tensor:
    return scale * (g - n * (g * n).mean(-1, keepdim=True))


@dataclass(frozen=True)
class Tanh:
    """F(h) = V tanh(W h); W: (inner, width), V: (width, inner)."""

    width: int
    inner: int
    shapes: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", ((self.inner, self.width), (self.width, self.inner)))

    def forward(self, h: Tensor, weights: list[Tensor]) -> tuple[Tensor, Any]:
        t = torch.tanh(_apply(h, weights[0]))
        return _apply(t, weights[1]), (h, t)

    def backward(self, g: Tensor, weights: list[Tensor], saved: Any, adapters: bool) -> Passed:
        h, t = saved
        inner = torch.bmm(g, weights[1]) * (1.0 - t * t)
        by_weight = [_outer(inner, h), _outer(g, t)] if adapters else None
        return Passed(torch.bmm(inner, weights[0]), by_weight)


@dataclass(frozen=True)
class SwiGLU:
    """F(h) = D (silu(G n) * (U n)), n = h / rms(h); G, U: (inner, width), D: (width, inner)."""

    width: int
    inner: int
    shapes: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        up = (self.inner, self.width)
        object.__setattr__(self, "shapes", (up, up, (self.width, self.inner)))

    def forward(self, h: Tensor, weights: list[Tensor]) -> tuple[Tensor, Any]:
        n, scale = _norm(h)
        gate, up = _apply(n, weights[0]), _apply(n, weights[1])
        sigmoid = torch.sigmoid(gate)
        product = gate * sigmoid * up
        return _apply(product, weights[2]), (n, scale, gate, sigmoid, up, product)

    def backward(self, g: Tensor, weights: list[Tensor], saved: Any, adapters: bool) -> Passed:
        n, scale, gate, sigmoid, up, product = saved
        inner = torch.bmm(g, weights[2])
        at_up = inner * gate * sigmoid
        at_gate = inner * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        by_weight = [_outer(at_gate, n), _outer(at_up, n), _outer(g, product)] if adapters else None
        at_norm = torch.bmm(at_gate, weights[0]) + torch.bmm(at_up, weights[1])
        return Passed(_norm_backward(at_norm, n, scale), by_weight)


@dataclass(frozen=True)
class Attention:
    """F(h) = O softmax(Q n (K n)^T / sqrt(width), causal) V n, n = h / rms(h); one head, windows of `tokens`."""

    width: int
    tokens: int
    shapes: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", ((self.width, self.width),) * 4)

    def _windows(self, h: Tensor) -> Tensor:
        return h.reshape(-1, self.tokens, self.width)

    def forward(self, h: Tensor, weights: list[Tensor]) -> tuple[Tensor, Any]:
        n, scale = _norm(h)
        q, k, v = (self._windows(_apply(n, weight)) for weight in weights[:3])
        scores = torch.bmm(q, k.transpose(1, 2)) / self.width**0.5
        future = torch.ones(self.tokens, self.tokens, dtype=torch.bool).triu(1)
        chances = torch.softmax(scores.masked_fill(future, -torch.inf), -1)
        mixed = torch.bmm(chances, v).reshape(h.shape)
        return _apply(mixed, weights[3]), (n, scale, q, k, v, chances, mixed)

    def backward(self, g: Tensor, weights: list[Tensor], saved: Any, adapters: bool) -> Passed:
        n, scale, q, k, v, chances, mixed = saved
        at_mixed = self._windows(torch.bmm(g, weights[3]))
        at_chances = torch.bmm(at_mixed, v.transpose(1, 2))
        at_v = torch.bmm(chances.transpose(1, 2), at_mixed).reshape(n.shape)
        at_scores = chances * (at_chances - (chances * at_chances).sum(-1, keepdim=True))
        at_scores = at_scores / self.width**0.5
        at_q = torch.bmm(at_scores, k).reshape(n.shape)
        at_k = torch.bmm(at_scores.transpose(1, 2), q).reshape(n.shape)
        by_weight = [_outer(at, n) for at in (at_q, at_k, at_v)] + [_outer(g, mixed)] if adapters else None
        at_norm = sum(torch.bmm(at, weight) for at, weight in zip((at_q, at_k, at_v), weights, strict=False))
        assert isinstance(at_norm, Tensor)
        return Passed(_norm_backward(at_norm, n, scale), by_weight)
