"""Layer inputs kept between the forward pass and the backward pass: in memory, in bfloat16, or in a mapped file."""

from __future__ import annotations

import mmap
import tempfile
import warnings
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Placement = Literal["memory", "bfloat16", "file"]


class LayerInputs:
    """One [rows * tokens, hidden] tensor a layer, put in the forward pass and taken once in the backward pass.

    Args:
        placement: `memory` (float32), `bfloat16` (half the bytes, rounded once) or `file` (float32 in a mapped
            temporary file, whose pages are given back at once).
        layers, numbers: number of layers, and of values of one input.
        folder: where the temporary file is made.
    """

    def __init__(self, placement: Placement, layers: int, numbers: int, folder: Path | None = None) -> None:
        self.placement = placement
        self._kept: dict[int, Tensor] = {}
        self._numbers = numbers
        self._map: mmap.mmap | None = None
        if placement == "file":
            # Unlinked at once: a killed process leaves nothing behind.
            with tempfile.TemporaryFile(dir=folder) as file:
                file.truncate(layers * numbers * 4)
                self._map = mmap.mmap(file.fileno(), layers * numbers * 4)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self._all = torch.frombuffer(self._map, dtype=torch.float32).view(layers, numbers)

    def put(self, layer: int, hidden: Tensor) -> None:
        """Keep a layer's input."""
        if self._map is not None:
            self._all[layer, : hidden.numel()].copy_(hidden.reshape(-1))
            self._kept[layer] = self._all[layer, : hidden.numel()].view(hidden.shape)
            self._release(layer)
        else:
            self._kept[layer] = hidden.bfloat16() if self.placement == "bfloat16" else hidden

    def take(self, layer: int) -> Tensor:
        """The layer's input in float32; it is no longer kept."""
        kept = self._kept.pop(layer)
        if self._map is None:
            return kept.float()
        copy = kept.clone()
        self._release(layer)
        return copy

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()

    def _release(self, layer: int) -> None:
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin, length = layer * self._numbers * 4, self._numbers * 4
        begin -= begin % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, begin, layer * self._numbers * 4 + length - begin)
