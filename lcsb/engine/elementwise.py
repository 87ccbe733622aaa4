"""RMS norm and rotary positions with hand-written gradients: fewer passes over memory than autograd makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x w / sqrt(mean(x^2) + eps) over the last dimension; differentiable in x.

    g_x = r (g w) - x r^3 mean(x g w),  r = 1 / sqrt(mean(x^2) + eps).
    """
    result: Tensor = _RMSNorm.apply(x, weight, eps)
    return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse)
        ctx.weight = weight
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _once()
        x, inverse = ctx.saved_tensors
        pulled = grad * ctx.weight
        along = torch.linalg.vecdot(pulled, x).unsqueeze(-1).mul_(inverse.pow(3)).div_(-x.shape[-1])
        return pulled.mul_(inverse).addcmul_(x, along), None, None


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions: the halves (a, b) of the last dimension become (a cos - b sin, b cos + a sin).

    Args:
        x: [rows, tokens, heads, head_dim].
        cosine, sine: [tokens, 1, head_dim / 2].
    """
    result: Tensor = _Rotate.apply(x, cosine, sine)
    return result


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.cosine, ctx.sine = cosine, sine
        return _turned(x, cosine, sine, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _once()
        return _turned(grad, ctx.cosine, ctx.sine, -1.0), None, None


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = x.chunk(2, -1)
    low, high = out.chunk(2, -1)
    torch.mul(first, cosine, out=low).addcmul_(second, sine, value=-sign)
    torch.mul(second, cosine, out=high).addcmul_(first, sine, value=sign)
    return out


def _once() -> None:
    if torch.is_grad_enabled():  # create_graph=True
        raise RuntimeError(
            "double backward through the engine is not computed; measure curvature on the transformers model"
        )
