"""Adapters and AdamW's moments of all layers, in memory or in a mapped file, and the optimiser's step on one layer.

A layer's adapters are one flat vector x, with m, v of the same length and a step count. Under idle policy `momentum`
an idle step is owed until the layer is touched again, and k owed steps are taken at once (T6):

    x_{s+k} = x_s - eta sum_{j=1..k} u_j,
    u_j = [beta1^j m_s / (1 - beta1^(s+j))] / [sqrt(beta2^j v_s / (1 - beta2^(s+j))) + eps]

(decay factors as in T6.) The forward pass of every step needs x of every layer, so there is one owed step at most
while training; more are owed only where steps are taken without a forward pass through the layer.
"""

from __future__ import annotations

import math
import mmap
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamWSettings:
    """AdamW as torch has it: decay before the step, eps after the square root."""

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


class LayerStates:
    """x, m, v [layers, size] in float32 and each layer's step count.

    Args:
        layers, size: number of layers and adapter parameters of each.
        file: where they lie; None keeps them in memory. An existing file is used as it is.

    Raises:
        ValueError: a file of another size.
    """

    def __init__(self, layers: int, size: int, file: Path | None = None) -> None:
        self.layers, self.size, self.file = layers, size, file
        self.steps = [0] * layers
        self._map: mmap.mmap | None = None
        if file is None:
            self._all = torch.zeros(layers, 3, size)
            return
        length = layers * 3 * size * 4
        if not file.exists():
            with file.open("wb") as new:
                new.truncate(length)
        if file.stat().st_size != length:
            raise ValueError(f"{file}: {file.stat().st_size} bytes, expected {length}")
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), length)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._all = torch.frombuffer(self._map, dtype=torch.float32).view(layers, 3, size)

    def x(self, layer: int) -> Tensor:
        """The layer's adapters, a view [size]."""
        return self._all[layer, 0]

    def moments(self, layer: int) -> tuple[Tensor, Tensor]:
        """m and v of the layer, views [size]."""
        return self._all[layer, 1], self._all[layer, 2]

    def release(self, layer: int) -> None:
        """Give the pages of a layer back to the system (its contents stay in the file)."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        page = mmap.PAGESIZE
        begin = layer * 3 * self.size * 4
        end = begin + 3 * self.size * 4
        begin -= begin % page
        self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def flush(self) -> None:
        """Write what is in memory of the file to the disk."""
        if self._map is not None:
            self._map.flush()

    @torch.no_grad()
    def step(self, layer: int, gradient: Tensor, settings: AdamWSettings) -> None:
        """One AdamW step of a selected layer, in the order of operations of torch's own."""
        self.steps[layer] += 1
        count = self.steps[layer]
        x, (m, v) = self.x(layer), self.moments(layer)
        beta1, beta2 = settings.betas
        if settings.weight_decay:
            x.mul_(1 - settings.learning_rate * settings.weight_decay)
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        rate = settings.learning_rate / (1 - beta1**count)
        denominator = (v.sqrt() / math.sqrt(1 - beta2**count)).add_(settings.eps)
        x.addcdiv_(m, denominator, value=-rate)

    @torch.no_grad()
    def idle_steps(self, layer: int, count: int, settings: AdamWSettings) -> None:
        """`count` steps with gradient zero (T6), reading and writing m and v once."""
        if count < 1:
            return
        x, (m, v) = self.x(layer), self.moments(layer)
        beta1, beta2 = settings.betas
        shrink = 1 - settings.learning_rate * settings.weight_decay
        root = v.sqrt()
        for j in range(1, count + 1):
            total = self.steps[layer] + j
            rate = settings.learning_rate * beta1**j / (1 - beta1**total)
            denominator = (root * math.sqrt(beta2**j / (1 - beta2**total))).add_(settings.eps)
            if settings.weight_decay:
                x.mul_(shrink)
            x.addcdiv_(m, denominator, value=-rate)
        m.mul_(beta1**count)
        v.mul_(beta2**count)
        self.steps[layer] += count
