"""A model's own switches that a selective pass takes over: recompute, and the cache of keys and values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def switch_off_recompute(model: nn.Module, stack: contextlib.ExitStack) -> bool:
    """Switch the model's own recompute off until `stack` closes; returns whether it was on."""
    on = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in on:
        stack.callback(setattr, module, "gradient_checkpointing", True)
        setattr(module, "gradient_checkpointing", False)  # noqa: B010 - not declared on nn.Module
    return bool(on)


@contextlib.contextmanager
def without_recompute(model: nn.Module) -> Iterator[None]:
    """Inside, no layer is recomputed in backward (activation checkpointing is off)."""
    with contextlib.ExitStack() as stack:
        switch_off_recompute(model, stack)
        yield


def cache_settings(model: nn.Module) -> list[Any]:
    """The model's configuration objects that carry `use_cache` (multimodal wrappers have one for the text part)."""
    found: dict[int, Any] = {}
    for module in model.modules():
        configuration = getattr(module, "config", None)
        if configuration is not None and hasattr(configuration, "use_cache"):
            found[id(configuration)] = configuration
    return list(found.values())
