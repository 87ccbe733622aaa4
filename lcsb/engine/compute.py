"""Which type the large matrix products are computed in: the faster one, by measurement on this machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
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
        return torch.bfloat16 if bfloat16_gain(inputs, outputs, device) > _GAIN else torch.float32
    if choice not in ("float32", "bfloat16"):
        raise ValueError(f"compute_dtype: found {choice!r}, expected auto, float32 or bfloat16")
    return torch.bfloat16 if choice == "bfloat16" else torch.float32


def bfloat16_gain(inputs: int, outputs: int, device: torch.device | None = None) -> float:
    """Seconds of float32 products over those of bfloat16 ones, measured; above 1 where bfloat16 is faster."""
    where = device or torch.device("cpu")
    wide, narrow = (product_seconds(t, where, inputs, outputs) for t in (torch.float32, torch.bfloat16))
    return wide / narrow


@functools.cache
def product_seconds(
    dtype: torch.dtype, device: torch.device, inputs: int, outputs: int, tokens: int = 128
) -> float:
    """Least seconds of five products [tokens, inputs] x [inputs, outputs], of at most 1,024 outputs."""
    x = torch.ones(tokens, inputs, dtype=dtype, device=device)
    weight = torch.ones(min(outputs, 1024), inputs, dtype=dtype, device=device)
    clock = thread_clock() if device.type == "cpu" else time.perf_counter
    seconds = []
    for _ in range(6):  # the first one warms up
        begin = clock()
        x @ weight.T
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - begin)
    return max(min(seconds[1:]), 1e-9)


def thread_clock() -> Callable[[], float]:
    """CPU seconds if torch computes on one thread, which other processes' work does not lengthen; else wall seconds."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter
