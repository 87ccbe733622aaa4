"""Seconds of one step by part, from a few rates of this machine that are measured in a second or two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bcd_theory.streaming import FLOAT, Resident, StreamedStep, backward_bytes, forward_bytes
from lcsb.engine.compute import thread_clock
from lcsb.engine.kernels import kernel


@dataclass(frozen=True)
class Rates:
    """What a second of this machine's compute threads does.

    Attributes:
        products: floating-point operations of float32 matrix products.
        dequantised: weights dequantised.
        moved: numbers read and written by elementwise operations.
        mapped: bytes of mapped pages touched anew that the page cache holds.
        filed: bytes copied to a mapped file.
    """

    products: float
    dequantised: float
    moved: float
    mapped: float
    filed: float


def step_seconds(step: StreamedStep, kept: Resident, rates: Rates) -> dict[str, float]:
    """Seconds of one step by part, at the step of a cycle that visits most layers."""
    geometry = step.geometry
    selected, idle = step.visited()
    visited, tokens = selected + idle, step.positions
    layers, adapters = geometry.layers, geometry.lora_parameters(step.rank, step.targets)
    h, v = geometry.hidden, geometry.vocabulary
    one = 2.0 * tokens * geometry.layer_weights / rates.products
    low = 2.0 * tokens * adapters / layers / rates.products
    mixing = 2.0 * tokens * step.tokens * geometry.heads * geometry.head_dim / rates.products
    unpack = geometry.layer_weights / rates.dequantised
    touched_forward = forward_bytes(step) / FLOAT / rates.moved
    touched_backward = backward_bytes(step) / FLOAT / rates.moved
    # Without a norm after it, recompute leaves the last product of a layer out.
    share = 1.0 if geometry.norms == 4 else 1 - h * geometry.intermediate / geometry.layer_weights
    again = share * max(0, visited - min(kept.products, visited))
    pages = 0 if kept.weights else (layers + visited + again) / 2 * geometry.packed_bytes() / layers
    pages += 0 if kept.head else v * h * step.embedding_bytes
    pages += 0 if kept.states else 4.0 * adapters * (1 + visited / layers + 2 * selected / layers)
    filed = 8.0 * visited * tokens * h if kept.inputs == "file" else 0.0
    # A narrow chunk makes thin products: an overhead for each.
    return {
        "forward": layers * (one + low + mixing + touched_forward),
        "recompute": again * one + visited * (low + mixing + touched_forward),
        "backward": visited * (one + 2 * mixing + touched_backward) + (idle + 3 * selected) * low,
        "dequantisation": (layers + visited + again) * unpack,
        "head": 6.0 * tokens * v * h / rates.products * 2 / 3
        + v * (3 * tokens + h) / rates.moved
        + 5e-4 * v / step.head_words(kept.chunk),
        "optimiser": 14.0 * adapters * selected / layers / rates.moved,
        "files": pages / rates.mapped + filed / rates.filed,
    }


@functools.cache
def measured_rates() -> Rates:
    """Rates of this process with the threads that torch has now; takes a second or two, once."""

    clock = thread_clock()

    def best(run: Callable[[], object], number: float) -> float:
        seconds = []
        for _ in range(6):  # the first one warms up; of the others the one that was disturbed least counts
            begin = clock()
            run()
            seconds.append(clock() - begin)
        return number / max(min(seconds[1:]), 1e-9)

    rows = 1024
    x, w, y = torch.ones(256, rows), torch.ones(rows, rows), torch.empty(256, rows)
    codes, scales = torch.zeros(rows * rows // 2, dtype=torch.uint8), torch.ones(rows * rows // 64)
    unpack = kernel(torch.float32, "cpu")
    return Rates(
        products=best(lambda: torch.mm(x, w.T, out=y), 2.0 * 256 * rows * rows),
        dequantised=best(lambda: unpack(codes, scales, 64, w), float(rows * rows)),
        moved=best(lambda: w.mul_(1.0), float(w.numel())),
        mapped=best(lambda: torch.empty(1 << 22, dtype=torch.uint8).fill_(1), float(1 << 22)),
        filed=best(lambda: torch.empty(1 << 20).copy_(w.view(-1)), float(1 << 22)),
    )
