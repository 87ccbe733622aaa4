"""Idle policies around an ordinary torch optimiser (theory: "Idle policies", T6, T6b).

A torch optimiser reads what a layer's gradient *is*: `None` means "leave x, m, v and the step count alone"
(policy `frozen`), a zero tensor means "decay m and v, move x by what is left of m, apply weight decay" (policy
`momentum`). Nothing else is needed, so the optimiser stays the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

SUPPORTED_OPTIMIZERS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimiser inside accelerate's wrapper (Trainer hands that one out)."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], idle: str
) -> None:
    """Refuse an optimiser with which the idle policy would not mean what the theory says.

    Args:
        parameters: name -> every parameter that any step of the cycle can train.
        idle: `momentum` or `frozen`.

    Raises:
        TypeError: an optimiser type whose behaviour under zero and absent gradients has not been established.
        ValueError: a parameter that is in no group or in two (it would silently never be trained, or twice), or
            eps = 0 with idle momentum (a block not yet selected would give 0/0).
    """
    optimizer = _unwrapped(optimizer)
    if not isinstance(optimizer, SUPPORTED_OPTIMIZERS):
        known = ", ".join(f"torch.optim.{kind.__name__}" for kind in SUPPORTED_OPTIMIZERS)
        raise TypeError(f"optimizer: found {type(optimizer).__name__}, expected one of {known}")
    seen: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
        if idle == "momentum" and group.get("eps", 1.0) == 0.0:
            raise ValueError(
                "optimizer: eps is 0; idle momentum needs eps > 0 (0/0 in a block not yet selected)"
            )
    wrong = [name for name, parameter in parameters.items() if seen.get(id(parameter), 0) != 1]
    if wrong:
        raise ValueError(
            f"optimizer: {len(wrong)} of {len(parameters)} adapter parameters are not in exactly one parameter "
            f"group, first {wrong[0]!r} ({seen.get(id(parameters[wrong[0]]), 0)} times); build the optimiser from "
            "all adapters, not from those trainable at one step"
        )


def keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser has per-parameter state after a step (SGD without momentum has none)."""
    optimizer = _unwrapped(optimizer)
    return not isinstance(optimizer, torch.optim.SGD) or any(
        group["momentum"] for group in optimizer.param_groups
    )


def set_idle_gradients(parameters: Iterable[torch.nn.Parameter], idle: str) -> None:
    """Give idle parameters the gradient that makes the optimiser follow the idle policy.

    `momentum`: zero (T6); `frozen`: None (T6b). Any gradient left there by something else is overwritten.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if idle == "momentum" else None
