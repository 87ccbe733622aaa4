"""How the branches of a decoder layer leave, or do not leave, a graph: what the backward modes are made of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lcsb.layers import attention_module


def _refuse_double_backward() -> None:
    # In backward, grad mode is on exactly when the caller asked for create_graph=True.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "double backward through an identity or mlp branch: its field is not the gradient of a loss, so a second "
            "derivative taken this way is wrong (T7); use mode exact or full, or difference the field"
        )


class IdentityPath(torch.autograd.Function):
    """Value `output`, Jacobian the identity with respect to `hidden`; bit-exact, unlike h + (out - h)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _refuse_double_backward()
        return grad, None


class OnceDifferentiable(torch.autograd.Function):
    """The identity, which refuses a second differentiation."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _refuse_double_backward()
        return grad


def on_hidden(output: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `function` to the hidden state in a layer's output (a tensor, or a tuple that starts with it)."""
    if isinstance(output, tuple):
        return (function(output[0]), *output[1:])
    return function(output)


def require_path(layer: nn.Module, hidden: torch.Tensor, output: Any) -> None:
    """Check that a layer whose attention is detached still passes a gradient on.

    Raises:
        ValueError: it does not: its attention module adds the residual itself (BLOOM, RoBERTa), so that mode mlp,
            h' = a + MLP(a) with a = h + constant, would cut the skip connection too.
    """
    value = output[0] if isinstance(output, tuple) else output
    if hidden.requires_grad and not value.requires_grad:
        raise ValueError(
            f"mode mlp: {type(layer).__name__} adds the residual inside {type(attention_module(layer)).__name__}, so "
            "that detaching it leaves no gradient; expected h + attention(h); use mode exact or identity"
        )


def refuse_cache(arguments: Iterable[Any]) -> None:
    """Refuse a key/value cache among a layer's arguments where the layer will be run again (recompute).

    The second run would append to it once more.

    Raises:
        ValueError: there is one.
    """
    for value in arguments:
        if hasattr(value, "get_seq_length"):
            raise ValueError(
                f"a training forward pass was given a key/value cache ({type(value).__name__}) with recompute on; "
                "expected none: leave use_cache out, it is off in training"
            )


@contextlib.contextmanager
def shadowed_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module.forward` replaced for the duration, on the instance; an earlier instance attribute comes back."""
    missing = object()
    before = module.__dict__.get("forward", missing)
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is missing:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


@contextlib.contextmanager
def without_adapter_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Operations recorded inside do not differentiate with respect to `parameters`.

    The flag is put back at once: outside a forward pass every adapter counts as trainable, for optimisers, for
    Trainer and for the user.
    """
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class _DetachedAttention:
    """Runs an attention module without a graph, and only once: a recompute gets the first run's output.

    The state of the random generators after attention is kept beside it, so that dropout further up the layer draws
    the same numbers in the recompute.
    """

    def __init__(self, forward: Callable[..., Any], keep: bool) -> None:
        self._forward, self._keep = forward, keep
        self._kept: tuple[Any, torch.Tensor, torch.Tensor | None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._kept is not None:
            output, cpu_state, cuda_state = self._kept
            torch.set_rng_state(cpu_state)
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state)
            return output
        with torch.no_grad():
            output = self._forward(*args, **kwargs)
        if self._keep:
            first = output[0] if isinstance(output, tuple) else output
            cuda_state = torch.cuda.get_rng_state(first.device) if first.is_cuda else None
            self._kept = (output, torch.get_rng_state(), cuda_state)
        return output


def detached_attention(
    layer: nn.Module, keep: bool = False
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A factory of contexts inside which `layer`'s attention branch leaves no graph (mode mlp).

    Args:
        keep: the first context's attention output is reused in later ones (recompute).
    """
    attention = attention_module(layer)
    detached = _DetachedAttention(attention.forward, keep)
    return lambda: shadowed_forward(attention, detached)


def reaches(node: Any, targets: set[int]) -> bool:
    """Whether the graph below `node` ends in a parameter whose id is in `targets`."""
    stack, seen = [node], set()
    while stack:
        current = stack.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        if id(getattr(current, "variable", None)) in targets:
            return True
        stack.extend(parent for parent, _ in current.next_functions)
    return False
