"""Products with a packed NF4 matrix, one tile of it dequantised at a time.

    y = x W^T  and, in backward,  g_x = g_y W,  W [rows, columns] read in tiles of some 1,024 rows

The tile lies in a buffer that every product of the process uses again: a fresh output for each matrix would cost four
times the dequantisation itself in page faults. Nothing keeps the buffer beyond the product it was filled for (pitfall
U10). On a GPU the codes of the next tile are copied through pinned memory while this one's product runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lcsb.engine.kernels import NF4_LEVELS, kernel

TILE_ROWS = 1024


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [rows, columns] of 4-bit codes.

    Attributes:
        codes: uint8 [rows * columns / 2], two codes a byte, the first in the high half.
        scales: float32, the largest magnitude of each quantisation block of `block_size` successive weights.
    """

    codes: Tensor
    scales: Tensor
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
        step = max(1, self.block_size // math.gcd(self.columns, self.block_size))
        return min(self.rows, max(step, TILE_ROWS // step * step))

    def tiles(self) -> Iterator[tuple[int, int]]:
        """(first, last) rows of each tile, last exclusive."""
        step = self.rows_per_tile
        for first in range(0, self.rows, step):
            yield first, min(first + step, self.rows)

    def part(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of rows [first, last)."""
        begin, end = first * self.columns, last * self.columns
        return self.codes[begin // 2 : end // 2], self.scales[
            begin // self.block_size : end // self.block_size
        ]

    def dequantize(self, first: int, last: int, out: Tensor) -> Tensor:
        """Rows [first, last) into `out`'s memory; returns a view [last - first, columns] of it."""
        tile = out[: (last - first) * self.columns].view(last - first, self.columns)
        kernel(out.dtype, "cpu")(*self.part(first, last), self.block_size, tile)
        return tile

    def dequantized(self) -> Tensor:
        """The whole matrix, in float32 memory of its own."""
        return self.dequantize(0, self.rows, torch.empty(self.rows * self.columns))


class TileBuffer:
    """The one tile that all products share; grows to the largest tile asked for.

    Args:
        dtype: of the tile, and so of the products: float32 or bfloat16 (sums of products are float32).
        device: where products are computed.

    Attributes:
        poison: fill the tile with NaN after each use (tests: whoever kept it would show).
    """

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self.memory = torch.empty(0, dtype=dtype, device=self.device)
        self.poison = False
        self._copies = _StagedCopies(self.device) if self.device.type == "cuda" else None

    def each(self, matrix: PackedMatrix) -> Iterator[tuple[int, int, Tensor]]:
        """(first, last, W[first:last]) for each tile; a tile is valid until the next one is asked for."""
        needed = matrix.rows_per_tile * matrix.columns
        if self.memory.numel() < needed:
            self.memory = torch.empty(needed, dtype=self.dtype, device=self.device)
        dequantise = kernel(self.dtype, self.device.type)
        bounds = list(matrix.tiles())
        parts = (matrix.part(*bound) for bound in bounds)
        for (first, last), part in zip(
            bounds, self._copies.each(parts) if self._copies else parts, strict=True
        ):
            tile = self.memory[: (last - first) * matrix.columns].view(last - first, matrix.columns)
            dequantise(*part, matrix.block_size, tile)
            yield first, last, tile
            if self.poison:
                self.memory.fill_(float("nan"))


class _StagedCopies:
    """Codes and scales on their way to a GPU: two pinned slots, filled and sent by a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._pinned: list[tuple[Tensor, Tensor] | None] = [None, None]
        self._sent: list[torch.cuda.Event | None] = [None, None]

    def each(self, parts: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The parts on the device, the next one's copy begun before this one is given."""
        waiting: tuple[Tensor, Tensor] | None = None
        ready: torch.cuda.Event | None = None
        for index, part in enumerate(parts):
            coming, event = self._send(index % 2, part)
            if waiting is not None:
                yield self._arrived(waiting, ready)
            waiting, ready = coming, event
        if waiting is not None:
            yield self._arrived(waiting, ready)

    def _send(self, slot: int, part: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], torch.cuda.Event]:
        sent = self._sent[slot]
        if sent is not None:
            sent.synchronize()  # the copy that read this pinned slot before
        pinned = self._pinned[slot]
        if pinned is None or any(p.numel() < t.numel() for p, t in zip(pinned, part, strict=True)):
            pinned = (
                part[0].new_empty(part[0].numel()).pin_memory(),
                part[1].new_empty(part[1].numel()).pin_memory(),
            )
            self._pinned[slot] = pinned
        slices = [p[: t.numel()].copy_(t) for p, t in zip(pinned, part, strict=True)]
        with torch.cuda.stream(self.stream):
            codes, scales = (s.to(self.device, non_blocking=True) for s in slices)
            event = self._sent[slot] = torch.cuda.Event()
            event.record(self.stream)
        return (codes, scales), event

    def _arrived(self, part: tuple[Tensor, Tensor], ready: torch.cuda.Event | None) -> tuple[Tensor, Tensor]:
        current = torch.cuda.current_stream(self.device)
        if ready is not None:
            current.wait_event(ready)
        for tensor in part:
            tensor.record_stream(current)  # made by the copying stream, used by this one
        return part


def packed_product(x: Tensor, matrix: PackedMatrix, buffer: TileBuffer, onto: Tensor) -> Tensor:
    """x W^T for x [tokens, columns], added to `onto` [tokens, rows], float32, in place, without a graph."""
    narrow = x.to(buffer.dtype)
    for first, last, tile in buffer.each(matrix):
        if narrow is x:
            onto[:, first:last].addmm_(x, tile.T)
        else:
            onto[:, first:last].add_(narrow @ tile.T)
    return onto


def packed_transposed_product(
    grad: Tensor, matrix: PackedMatrix, buffer: TileBuffer, onto: Tensor | None = None
) -> Tensor:
    """g W for g [tokens, rows]: [tokens, columns], without a graph; added to `onto` in place if that is given."""
    total = grad.new_empty(grad.shape[0], matrix.columns) if onto is None else onto
    narrow = grad.to(buffer.dtype)
    for first, last, tile in buffer.each(matrix):
        part = narrow[:, first:last]
        if first == 0 and onto is None:
            total.copy_(part @ tile) if narrow is not grad else torch.mm(part, tile, out=total)
        else:
            total.add_(part @ tile) if narrow is not grad else total.addmm_(part, tile)
    return total


def pack(weight: Tensor, block_size: int = 64) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix, as bitsandbytes' quantize_4bit gives them (nf4, plain scales)."""
    levels = torch.tensor(NF4_LEVELS)
    blocks = weight.detach().float().reshape(-1, block_size)
    scales = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / scales.clamp(min=1e-38))[:, None]).clamp_(-1, 1)
    codes = torch.bucketize(scaled.view(-1), (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    return (codes[::2] << 4) | codes[1::2], scales
