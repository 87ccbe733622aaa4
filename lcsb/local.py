"""One layer at a time: a recorded exact pass, and backward passes in any plan from its records (T7).

The refresh of mode certified needs the adapter gradients that a plan would give, on a batch for which the true backward
pass has just been made. The surrogate gradient at a layer's output depends on the layers above alone, so each layer is
run again by itself, at the hidden state, random state and precision that it had, and differentiated at the surrogate
gradient: forward and backward of one layer, and nothing of embedding, head and loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lcsb.branches import detached_attention, require_path

Gradient = Mapping[str, torch.Tensor]


def first(output: Any) -> torch.Tensor:
    """The hidden state in a layer's output (a tensor, or a tuple that starts with it)."""
    return output[0] if isinstance(output, tuple) else output


def inner(a: Gradient, b: Gradient) -> float:
    """Inner product in float64 of two gradients over the same parameters."""
    if a.keys() != b.keys():
        raise RuntimeError(f"gradients over different parameters: {sorted(set(a) ^ set(b))[:3]}")
    return float(sum(torch.dot(a[k].double().flatten(), b[k].double().flatten()) for k in a))


def adapter_cosine(surrogate: Gradient, truth: Gradient) -> float | None:
    """Cosine of two gradients of one layer's adapters; None if the true one is exactly zero (it has no direction)."""
    true_square = inner(truth, truth)
    if true_square == 0.0:
        return None
    square = inner(surrogate, surrogate)
    return inner(surrogate, truth) / (square * true_square) ** 0.5 if square > 0 else 0.0


def hidden_cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of two gradients of hidden states (0 if one is exactly zero)."""
    x, y = a.double().flatten(), b.double().flatten()
    norms = float(x.norm() * y.norm())
    return max(-1.0, min(1.0, float(torch.dot(x, y)) / norms)) if norms > 0 else 0.0


@dataclass
class _Surroundings:
    """What a layer's forward depends on beside its arguments: random state (dropout) and autocast."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    device_type: str
    autocast: tuple[bool, torch.dtype]

    @classmethod
    def of(cls, hidden: torch.Tensor) -> _Surroundings:
        kind = hidden.device.type
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state(hidden.device) if hidden.is_cuda else None,
            kind,
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        )

    @contextlib.contextmanager
    def restored(self, device: torch.device) -> Iterator[None]:
        enabled, dtype = self.autocast
        devices = [device] if self.cuda is not None else []
        with torch.random.fork_rng(devices), torch.autocast(self.device_type, dtype, enabled):
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, device)
            yield


@dataclass
class LayerCall:
    """One layer's call in the recorded pass: `run(hidden)` repeats it, with all other arguments, at `hidden`."""

    layer: nn.Module
    run: Callable[[torch.Tensor], Any]
    hidden: torch.Tensor
    surroundings: _Surroundings

    def backward(
        self, above: torch.Tensor, grade: str, parameters: Sequence[nn.Parameter] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Gradients of the hidden state below and of `parameters`, given the one above.

        Args:
            above: gradient at the layer's output.
            grade: `exact` (also of a selected layer), `mlp` or `identity`.
        """
        if grade == "identity":
            return above, []
        hidden = self.hidden.requires_grad_(True)
        attention = detached_attention(self.layer) if grade == "mlp" else contextlib.nullcontext
        with torch.enable_grad(), self.surroundings.restored(hidden.device), attention():
            output = first(self.run(hidden))
        require_path(self.layer, hidden, output)
        below, *own = torch.autograd.grad(output, [hidden, *parameters], above)
        return below, own


class RecordedPass:
    """The exact pass of one micro-batch: each layer's call, and the true gradient above each layer.

    Attributes:
        calls: one a layer, as far as the pass has come.
        above: true gradient of the hidden state at each layer's output, None until backward has reached it.
        truth: true adapter gradient of each layer, filled in at the end of backward.
    """

    def __init__(self, n_layers: int) -> None:
        self.calls: list[LayerCall] = []
        self.above: list[torch.Tensor | None] = [None] * n_layers
        self.truth: list[dict[str, torch.Tensor]] = [{} for _ in range(n_layers)]

    @property
    def open(self) -> bool:
        """Whether the forward pass is still under way."""
        return len(self.calls) < len(self.above)

    def note(self, layer: nn.Module, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> None:
        """Record a layer's call, before it is made."""
        self.calls.append(LayerCall(layer, run, hidden.detach(), _Surroundings.of(hidden)))

    def watch(self, output: torch.Tensor, reached: Callable[[], None] | None = None) -> None:
        """Record the gradient at the newest layer's output when backward comes by; then call `reached`."""
        index = len(self.calls) - 1

        def hook(gradient: torch.Tensor) -> None:
            self.above[index] = gradient.detach()
            if reached is not None:
                reached()

        output.register_hook(hook)

    def complete(self, lowest: int) -> bool:
        """Whether backward has come down to layer `lowest`, with finite gradients all the way."""
        seen = self.above[lowest:]
        return all(value is not None and bool(torch.isfinite(value).all()) for value in seen)

    def true_above(self, index: int) -> torch.Tensor:
        """The true gradient at a layer's output."""
        value = self.above[index]
        if value is None:
            raise RuntimeError(f"layer {index}: backward has not come by")
        return value
