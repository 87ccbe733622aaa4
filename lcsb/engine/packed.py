"""Products with a packed NF4 matrix, one tile of it dequantised at a time.

    y = x W^T  and, in backward,  g_x = g_y W,  W [rows, columns] read in tiles of some 1,024 rows

The tile lies in a buffer that every product of the process uses again: a fresh output for each matrix would cost four
times the dequantisation itself in page faults. Nothing keeps the buffer beyond the product it was filled for (pitfall
U10).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TILE_ROWS = 1024

# bitsandbytes' table of 4-bit NormalFloat levels (QLoRA, arXiv 2305.14314, appendix E).
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [rows, columns] of 4-bit codes.

    Attributes:
        codes: uint8 [rows * columns / 2], two codes a byte, the first in the high half.
        scales: float32, the largest magnitude of each quantisation block of `block_size` successive weights.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rows: int
    columns: int
    block_size: int = 64

    def __post_init__(self) -> None:
        weights = self.rows * self.columns
        if self.columns % 2 or weights % self.block_size:
            raise ValueError(
                f"packed matrix {self.rows} x {self.columns}: expected an even number of columns and whole "
                f"quantisation blocks of {self.block_size}"
            )
        if self.codes.numel() * 2 != weights or self.scales.numel() * self.block_size != weights:
            raise ValueError(
                f"packed matrix {self.rows} x {self.columns}: found {self.codes.numel()} bytes of codes and "
                f"{self.scales.numel()} scales, expected {weights // 2} and {weights // self.block_size}"
            )

    @property
    def rows_per_tile(self) -> int:
        """Rows of a tile: about TILE_ROWS, so that a tile begins and ends with whole quantisation blocks."""
        step = max(1, self.block_size // _common_divisor(self.columns, self.block_size))
        return min(self.rows, max(step, TILE_ROWS // step * step))

    def tiles(self) -> Iterator[tuple[int, int]]:
        """(first, last) rows of each tile, last exclusive."""
        step = self.rows_per_tile
        for first in range(0, self.rows, step):
            yield first, min(first + step, self.rows)

    def dequantize(self, first: int, last: int, out: torch.Tensor) -> torch.Tensor:
        """Rows [first, last) into `out`'s memory; returns a view [last - first, columns] of it."""
        count = (last - first) * self.columns
        tile = out[:count].view(last - first, self.columns)
        codes = self.codes[first * self.columns // 2 : last * self.columns // 2]
        scales = self.scales[first * self.columns // self.block_size : last * self.columns // self.block_size]
        _kernel()(codes, scales, self.block_size, tile)
        return tile

    def dequantized(self) -> torch.Tensor:
        """The whole matrix, in float32 memory of its own."""
        out = torch.empty(self.rows * self.columns)
        return self.dequantize(0, self.rows, out)


def _common_divisor(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


class TileBuffer:
    """The one float32 tile that all products share; grows to the largest tile asked for.

    Attributes:
        poison: fill the tile with NaN after each use (tests: whoever kept it would show).
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0)
        self.poison = False

    def reserve(self, matrix: PackedMatrix) -> None:
        needed = matrix.rows_per_tile * matrix.columns
        if self.memory.numel() < needed:
            self.memory = torch.empty(needed)

    def each(self, matrix: PackedMatrix) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first, last, W[first:last]) for each tile; a tile is valid until the next one is asked for."""
        self.reserve(matrix)
        for first, last in matrix.tiles():
            yield first, last, matrix.dequantize(first, last, self.memory)
            if self.poison:
                self.memory.fill_(float("nan"))


def packed_product(x: torch.Tensor, matrix: PackedMatrix, buffer: TileBuffer) -> torch.Tensor:
    """x W^T for x [tokens, columns]: [tokens, rows], without a graph."""
    y = x.new_empty(x.shape[0], matrix.rows)
    for first, last, tile in buffer.each(matrix):
        torch.mm(x, tile.T, out=y[:, first:last])
    return y


def packed_transposed_product(
    grad: torch.Tensor, matrix: PackedMatrix, buffer: TileBuffer, onto: torch.Tensor | None = None
) -> torch.Tensor:
    """g W for g [tokens, rows]: [tokens, columns], without a graph; added to `onto` in place if that is given."""
    total = grad.new_empty(grad.shape[0], matrix.columns) if onto is None else onto
    for first, last, tile in buffer.each(matrix):
        if first == 0 and onto is None:
            torch.mm(grad[:, first:last], tile, out=total)
        else:
            total.addmm_(grad[:, first:last], tile)
    return total


Kernel = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]


@functools.cache
def _kernel() -> Kernel:
    return _bitsandbytes_kernel() or _torch_kernel


def _bitsandbytes_kernel() -> Kernel | None:
    """bitsandbytes' own CPU kernel, called without importing the package (which holds 114 MiB); None if not there."""
    spec = importlib.util.find_spec("bitsandbytes")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("libbitsandbytes_cpu.*")):
            try:
                function = ctypes.CDLL(str(path)).cdequantize_blockwise_cpu_nf4_fp32
            except (OSError, AttributeError):
                continue
            function.restype = None
            function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_longlong] * 3
            return functools.partial(_call, function)
    return None


def _call(
    function: Any, codes: torch.Tensor, scales: torch.Tensor, block_size: int, out: torch.Tensor
) -> None:
    # As one long row: given rows, the kernel takes wrong scales where a row is no multiple of the quantisation block.
    function(codes.data_ptr(), scales.data_ptr(), out.data_ptr(), block_size, 1, out.numel())


def _torch_kernel(codes: torch.Tensor, scales: torch.Tensor, block_size: int, out: torch.Tensor) -> None:
    """The same matrix by table look-up, where bitsandbytes has no library for this system."""
    levels = torch.tensor(NF4_LEVELS)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)
    flat = out.view(-1)
    flat.view(-1, 2).copy_(pairs[codes.int()])
    flat.view(-1, block_size).mul_(scales[:, None])


def pack(weight: torch.Tensor, block_size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix, as bitsandbytes' quantize_4bit gives them (nf4, plain scales)."""
    levels = torch.tensor(NF4_LEVELS)
    blocks = weight.detach().float().reshape(-1, block_size)
    scales = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / scales.clamp(min=1e-38))[:, None]).clamp_(-1, 1)
    codes = torch.bucketize(scaled.view(-1), (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    return (codes[::2] << 4) | codes[1::2], scales
