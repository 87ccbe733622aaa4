"""Projections with LoRA that share an input, from packed weights: forward, and a backward pass that keeps no weight.

    y_i = x W_i^T + b_i + s (x A_i^T) B_i^T
    g_x = sum_i  g_i W_i + s (g_i B_i) A_i,     g_A_i = s (g_i B_i)^T x,     g_B_i = s g_i^T (x A_i^T)

q, k and v share one input, gate and up another: one product with all their A's, one sum for g_x. Where the forward pass
kept the outputs, or backward does not look at them, the recompute does without the products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lcsb.engine.packed import PackedMatrix, TileBuffer, packed_product, packed_transposed_product


@dataclass(frozen=True)
class Projection:
    """One matrix of a layer, by its usual name, and its bias."""

    name: str
    matrix: PackedMatrix
    bias: Tensor | None = None


@dataclass(frozen=True)
class Adapters:
    """LoRA matrices of a layer.

    Attributes:
        matrices: `q_proj.a` [r, inputs], `q_proj.b` [outputs, r] and so on.
        scale: s, the factor on B A.
        gradients: under the same names, where backward writes the gradients; None if they are not wanted.
    """

    matrices: Mapping[str, Tensor]
    scale: float
    gradients: Mapping[str, Tensor] | None = None


class Products:
    """Outputs of a layer's projections, kept by the forward pass so that backward need not compute them again.

    Args:
        memory: where the forward pass puts them [numbers]; None if it keeps none.
        unneeded: projections whose outputs the gradient does not depend on.
    """

    def __init__(self, memory: Tensor | None, unneeded: Sequence[str] = ()) -> None:
        self.kept: dict[str, Tensor] = {}
        self.unneeded = frozenset(unneeded)
        self._memory, self._used = memory, 0

    def place(self, projection: str, tokens: int, outputs: int) -> Tensor | None:
        """Memory [tokens, outputs] for a projection's output, which is kept; None if it is not to be."""
        if self._memory is None or projection in self.unneeded:
            return None
        begin, self._used = self._used, self._used + tokens * outputs
        self.kept[projection] = self._memory[begin : self._used].view(tokens, outputs)
        return self.kept[projection]


def project(
    x: Tensor,
    projections: Sequence[Projection],
    adapters: Adapters,
    buffer: TileBuffer,
    products: Products | None = None,
) -> tuple[Tensor, ...]:
    """Outputs [tokens, outputs] of projections that share the input x [tokens, inputs].

    Without a graph they are put into `products` (if it keeps them); with one they are taken from there, and outputs
    that are not needed are zero.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        outputs: tuple[Tensor, ...] = _Project.apply(x, projections, adapters, buffer, products)
        return outputs
    results = []
    for p, low in zip(projections, _lows(x, projections, adapters), strict=True):
        out = products.place(p.name, x.shape[0], p.matrix.rows) if products else None
        results.append(_output(x, p, low, adapters, buffer, out))
    return tuple(results)


def _stacked(projections: Sequence[Projection], adapters: Adapters) -> tuple[Tensor, list[int]] | None:
    """All A's of the projections, one below the other, and the ranks (0 where there is no adapter)."""
    found = [adapters.matrices.get(f"{p.name}.a") for p in projections]
    there = [a for a in found if a is not None]
    return (torch.cat(there), [0 if a is None else a.shape[0] for a in found]) if there else None


def _lows(x: Tensor, projections: Sequence[Projection], adapters: Adapters) -> Sequence[Tensor | None]:
    """s x A^T [tokens, r] of each projection, None where there is no adapter."""
    stacked = _stacked(projections, adapters)
    if stacked is None:
        return [None] * len(projections)
    low = (x @ stacked[0].T).mul_(adapters.scale)
    return [part if part.shape[1] else None for part in low.split(stacked[1], 1)]


def _output(
    x: Tensor,
    projection: Projection,
    low: Tensor | None,
    adapters: Adapters,
    buffer: TileBuffer,
    out: Tensor | None = None,
) -> Tensor:
    y = x.new_empty(x.shape[0], projection.matrix.rows) if out is None else out
    if low is None:
        y.zero_()
    else:
        torch.mm(low, adapters.matrices[f"{projection.name}.b"].T, out=y)
    if projection.bias is not None:
        y.add_(projection.bias)
    return packed_product(x, projection.matrix, buffer, y)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        projections: Sequence[Projection],
        adapters: Adapters,
        buffer: TileBuffer,
        products: Products | None,
    ) -> tuple[Tensor, ...]:
        kept = products.kept if products is not None else {}
        unneeded = products.unneeded if products is not None else frozenset()
        computed = any(p.name not in kept and p.name not in unneeded for p in projections)
        wanted = adapters.gradients is not None
        lows = _lows(x, projections, adapters) if computed or wanted else [None] * len(projections)
        outputs = []
        for p, low in zip(projections, lows, strict=True):
            if p.name in kept:
                outputs.append(kept.pop(p.name))
            elif p.name in unneeded:
                outputs.append(x.new_zeros(1).expand(x.shape[0], p.matrix.rows))
            else:
                outputs.append(_output(x, p, low, adapters, buffer))
        ctx.projections, ctx.adapters, ctx.buffer = projections, adapters, buffer
        ctx.x, ctx.lows = (x.detach(), lows) if wanted else (None, None)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "double backward through a packed product is not computed; measure curvature on the transformers model"
            )
        adapters: Adapters = ctx.adapters
        total: Tensor | None = None
        pulls: list[Tensor] = []  # s g_i B_i
        for i, (p, g) in enumerate(zip(ctx.projections, grads, strict=True)):
            total = packed_transposed_product(g, p.matrix, ctx.buffer, total)
            b = adapters.matrices.get(f"{p.name}.b")
            if b is None:
                continue
            pulls.append((g @ b).mul_(adapters.scale))
            if adapters.gradients is not None:
                torch.mm(pulls[-1].T, ctx.x, out=adapters.gradients[f"{p.name}.a"])
                torch.mm(g.T, ctx.lows[i], out=adapters.gradients[f"{p.name}.b"])
        stacked = _stacked(ctx.projections, adapters)
        if stacked is not None and total is not None:
            total.addmm_(torch.cat(pulls, 1), stacked[0])
        return total, None, None, None, None
