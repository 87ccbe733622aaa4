"""LoRA's start as `lcsb.models.attach_lora` draws it, one layer after another, without peft."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bcd_theory.geometry import PROJECTIONS
from lcsb.engine.layer import AdapterLayout


@torch.no_grad()
def drawn_adapters(layout: AdapterLayout, layers: int, seed: int) -> Iterator[Tensor]:
    """Flat adapters [layout.size] of layer 0, 1, ...; each is overwritten by the next.

    PEFT makes two `torch.nn.Linear` for a projection, which draws A and B, and draws A once more; B is then zero. So
    the start is that of the unbudgeted run, number by number, and can be had again at any time.
    """
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(layout.size)
    views = layout.views(flat)
    for _ in range(layers):
        for name in (projection for projection in PROJECTIONS if projection in layout.targets):
            a, b = views[f"{name}.a"], views[f"{name}.b"]
            for matrix in (a, b, a):
                nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
            b.zero_()
        yield flat
