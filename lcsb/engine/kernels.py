"""Dequantisation of NF4 codes into a tile: bitsandbytes' CPU kernels without its Python package, or table look-up."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# bitsandbytes' table of 4-bit NormalFloat levels (QLoRA, arXiv 2305.14314, appendix E).
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

#: kernel(codes, scales, block size, out): writes all weights of the codes into out
Kernel = Callable[[Tensor, Tensor, int, Tensor], None]
_SUFFIX = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@functools.cache
def kernel(dtype: torch.dtype, device: str) -> Kernel:
    """The fastest kernel there is for tiles of this type on this kind of device."""
    return (_bitsandbytes_kernel(dtype) if device == "cpu" else None) or look_up


def _bitsandbytes_kernel(dtype: torch.dtype) -> Kernel | None:
    """bitsandbytes' own CPU kernel, called without importing the package (which holds 114 MiB); None if not there."""
    spec = importlib.util.find_spec("bitsandbytes")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("libbitsandbytes_cpu.*")):
            try:
                function = getattr(ctypes.CDLL(str(path)), f"cdequantize_blockwise_cpu_nf4_{_SUFFIX[dtype]}")
            except (OSError, AttributeError):
                continue
            function.restype = None
            function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_longlong] * 3
            return functools.partial(_call, function)
    return None


def _call(function: Any, codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
    # As one long row: given rows, the kernel takes wrong scales where a row is no multiple of the quantisation block.
    function(codes.data_ptr(), scales.data_ptr(), out.data_ptr(), block_size, 1, out.numel())


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    levels = torch.tensor(NF4_LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)


def look_up(codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
    """The same weights by table look-up: for GPUs, and where bitsandbytes has no library for this system."""
    weights = _pairs(codes.device)[codes.int()].view(-1, block_size).mul_(scales[:, None])
    out.view(-1, block_size).copy_(weights)
