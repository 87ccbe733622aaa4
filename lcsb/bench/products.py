"""Seconds that a model's own matrix products take alone: the same shapes, preallocated memory, no dequantisation.

The seven projections of each layer and the head's logits in the forward pass; in backward the product with each matrix
once more, for the gradient of its input. LoRA's products and attention's are not among them, and neither is recompute.
All layers share one layer's weights and all chunks of the vocabulary one chunk's, so less memory is touched than a
model has: the times are the least that could be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bcd_theory.geometry import Geometry
from lcsb.bench.channel import Channel, Stopwatch
from lcsb.engine.head import chunks, words_per_chunk

PARTS = ("layers_forward", "head_forward", "layers_backward", "head_backward")


def shapes(geometry: Geometry, tokens: int) -> dict[str, list[tuple[int, int, int]]]:
    """(tokens, inputs, outputs) of each product of one step by part; 2 x their product is its floating-point count."""
    layer = [(tokens, columns, rows) for rows, columns in geometry.projections().values()]
    words = words_per_chunk(tokens, geometry.vocabulary)
    head = [(tokens, geometry.hidden, last - first) for first, last in chunks(geometry.vocabulary, words)]
    return {
        "layers_forward": layer * geometry.layers,
        "head_forward": head,
        "layers_backward": [(n, outputs, inputs) for n, inputs, outputs in reversed(layer)] * geometry.layers,
        "head_backward": [(n, outputs, inputs) for n, inputs, outputs in head],
    }


def operations(geometry: Geometry, tokens: int) -> dict[str, int]:
    """Floating-point operations of each part (a multiplication and an addition are two)."""
    return {part: sum(2 * n * i * o for n, i, o in found) for part, found in shapes(geometry, tokens).items()}


class Products:
    """The products of one geometry in preallocated memory."""

    def __init__(self, geometry: Geometry, tokens: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self._shapes = shapes(geometry, tokens)
        # One matrix for each projection of a layer and one for a chunk of the head, as [outputs, inputs].
        layer = [(rows, columns) for rows, columns in geometry.projections().values()]
        head = (self._shapes["head_forward"][0][2], geometry.hidden)
        self._layer = [torch.randn(shape, generator=generator).to(dtype) for shape in layer]
        self._head = torch.randn(head, generator=generator).to(dtype)
        widest = max(max(rows, columns) for rows, columns in [*layer, head])
        self._input = torch.randn(tokens * widest, generator=generator).to(dtype)
        self._output = torch.empty(tokens * widest, dtype=dtype)

    def warm_up(self) -> None:
        """Touch the memory and let the library choose its kernels: one layer and one chunk, both ways."""
        for weight in (*self._layer, self._head):
            outputs, inputs = weight.shape
            tokens = self._shapes["head_forward"][0][0]
            x, y = (self._input[: tokens * inputs].view(tokens, inputs), self._output[: tokens * outputs])
            torch.mm(x, weight.T, out=y.view(tokens, outputs))
            torch.mm(self._input[: tokens * outputs].view(tokens, outputs), weight, out=torch.empty_like(x))

    def run(self, part: str) -> None:
        """All products of one part, once."""
        backward = part.endswith("backward")
        weights = self._weights(part)
        for (tokens, inputs, outputs), weight in zip(self._shapes[part], weights, strict=True):
            x = self._input[: tokens * inputs].view(tokens, inputs)
            y = self._output[: tokens * outputs].view(tokens, outputs)
            torch.mm(x, weight if backward else weight.T, out=y)

    def _weights(self, part: str) -> Sequence[torch.Tensor]:
        count = len(self._shapes[part])
        if part.startswith("head"):
            wide = [o if part == "head_forward" else i for _, i, o in self._shapes[part]]
            return [self._head[:words] for words in wide]
        layer = self._layer[::-1] if part == "layers_backward" else self._layer
        return layer * (count // len(layer))


def serve(spec: Mapping[str, Any], channel: Channel) -> None:
    """Answer `measure` requests: seconds of each part, the least of `repeats`."""
    torch.set_num_threads(int(spec["threads"]))
    products = Products(
        Geometry(**spec["geometry"]), int(spec["tokens"]), getattr(torch, spec["compute_dtype"])
    )
    channel.send(
        {"ready": {"floating_point_operations": operations(Geometry(**spec["geometry"]), spec["tokens"])}}
    )
    with torch.no_grad():
        products.warm_up()
        for request in channel.requests():
            channel.send({part: _least(products, part, int(request["repeats"])) for part in PARTS})


def _least(products: Products, part: str, repeats: int) -> dict[str, float]:
    found = []
    for _ in range(repeats):
        watch = Stopwatch()
        products.run(part)
        found.append(watch.read())
    return min(found, key=lambda seconds: seconds["cpu"])
