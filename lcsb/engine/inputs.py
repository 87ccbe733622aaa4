"""Layer inputs kept between the forward pass and the backward pass: in memory, in bfloat16, or in a mapped file.

They lie in one block that every step uses again. Tensors of a layer's own, allocated among those that come and go,
would leave the heap full of holes.
"""

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
        layers, numbers: most layers kept at once, and most values of one input.
        folder: where the temporary file is made.
        device: where they lie if in memory.
    """

    def __init__(
        self,
        placement: Placement,
        layers: int,
        numbers: int,
        folder: Path | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.placement, self.numbers = placement, numbers
        self._kept: dict[int, tuple[int, Tensor]] = {}  # layer -> place, input
        self._map: mmap.mmap | None = None
        if placement != "file":
            dtype = torch.bfloat16 if placement == "bfloat16" else torch.float32
            self._all = torch.empty(layers, numbers, dtype=dtype, device=device)
            return
        # Unlinked at once: a killed process leaves nothing behind.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(layers * numbers * 4)
            self._map = mmap.mmap(file.fileno(), layers * numbers * 4)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._all = torch.frombuffer(self._map, dtype=torch.float32).view(layers, numbers)

    def put(self, layer: int, hidden: Tensor) -> None:
        """Keep a layer's input, in the next place: as much memory is touched as layers are kept."""
        place = len(self._kept)
        view = self._all[place, : hidden.numel()].view(hidden.shape)
        self._kept[layer] = place, view.copy_(hidden)
        self._release(place)

    def take(self, layer: int) -> Tensor:
        """The layer's input in float32, valid until the next `clear`."""
        place, kept = self._kept[layer]
        if self._map is None:
            return kept.float()
        copy = kept.clone()
        self._release(place)
        return copy

    def clear(self) -> None:
        """Keep nothing, before a new step."""
        self._kept.clear()

    def _release(self, place: int) -> None:
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin, end = place * self.numbers * 4, (place + 1) * self.numbers * 4
        begin -= begin % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
