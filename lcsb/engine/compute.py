"""Which type the large matrix products are computed in: the faster one, by measurement on this machine."""

from __future__ import annotations

import functools
import time
from typing import Literal

import torch

ComputeType = Literal["auto", "float32", "bfloat16"]

# bfloat16 rounds every product to 8 bits, so a small gain is not worth it.
_GAIN = 1.3


def compute_dtype(choice: str, device: torch.device, inputs: int, outputs: int) -> torch.dtype:
    """The type of tiles and products; `auto` takes bfloat16 only where it is at least 1.3 times as fast as float32.

    Many CPUs compute bfloat16 by conversion, two to five times slower than float32.

    Args:
        choice: auto, float32 or bfloat16.
        device: where products are computed.
        inputs, outputs: shape of the model's largest matrix.

    Raises:
        ValueError: another choice.
    """
    if choice == "auto":
        faster = product_seconds(torch.float32, device, inputs, outputs) > _GAIN * product_seconds(
            torch.bfloat16, device, inputs, outputs
        )
        return torch.bfloat16 if faster else torch.float32
    if choice not in ("float32", "bfloat16"):
        raise ValueError(f"compute_dtype: found {choice!r}, expected auto, float32 or bfloat16")
    return torch.bfloat16 if choice == "bfloat16" else torch.float32


@functools.cache
def product_seconds(
    dtype: torch.dtype, device: torch.device, inputs: int, outputs: int, tokens: int = 128
) -> float:
    """Least seconds of three products [tokens, inputs] x [inputs, outputs], of at most 1,024 outputs."""
    x = torch.ones(tokens, inputs, dtype=dtype, device=device)
    weight = torch.ones(min(outputs, 1024), inputs, dtype=dtype, device=device)
    seconds = []
    for _ in range(4):  # the first one warms up
        begin = time.perf_counter()
        x @ weight.T
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
