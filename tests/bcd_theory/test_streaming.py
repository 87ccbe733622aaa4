"""Bytes of the streaming engine's step (T12) against an independent count on a tiny model, and its limiting cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bcd_theory.geometry import GEOMETRIES, Geometry, peak_bytes, tile_numbers
from bcd_theory.streaming import Resident, StreamedStep, backward_bytes, forward_bytes, streamed_bytes

# 4 layers of width 64, 4 query heads and 2 key heads of 16, MLP 128, 512 words.
TINY = Geometry(4, 64, 128, 4, 2, 16, 512)
STREAMED = Resident(weights=False, head=False, states=False, inputs="file", chunk=1 << 10)


def test_every_part_of_a_tiny_model_counted_by_hand() -> None:
    step = StreamedStep(TINY, "exact", 8, rows=2, layers_per_step=2, rank=4)
    found = streamed_bytes(step, Resident(chunk=1 << 11), floor=1000, runtime=10)
    # Weights of a layer: q 64x64, k and v 32x64, o 64x64, gate and up 128x64, down 64x128; half a byte each, and 4
    # bytes for 64 of them.
    weights = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64
    adapters = 4 * (2 * (64 + 64) + 2 * (32 + 64) + 3 * (128 + 64))
    state = 16 * 64 * 4
    assert found.throughout == {
        "floor": 1000,
        "runtime": 10,
        "vectors": 4 * (4 * 2 * 64 + 64),
        "weights": 4 * (weights // 2 + weights // 64 * 4),
        "embedding": 512 * 64 * 2,
        "states": 3 * 4 * 4 * adapters,
        "tile": 4 * 128 * 64,
        "tables": 8 * 16 * 4,
        "head buffer": 4 * 64 * 64,  # 2,048 / 64 is 32 words: the least is 64
        "layer inputs": 4 * state,
        "products": 0,
    }
    assert found.phases["head"]["logits"] == 16 * 64 * 4
    assert found.phases["head"]["activations"] == 5 * state
    # Block 0 is the lowest two layers: both gradients are there when backward has come down to layer 0.
    assert found.phases["optimiser"]["gradients"] == 2 * adapters * 4
    assert found.total == sum(found.throughout.values()) + max(sum(p.values()) for p in found.phases.values())


def test_backward_through_a_layer_counted_by_hand() -> None:
    step = StreamedStep(TINY, "full", 8, rank=4)
    # A token: input, gradient above; attention's normed state, q, k, v, output, 4 sums, projection, state after it; 4
    # ranks of 4; MLP's normed state, gate, activation, up, product, 3 ranks; three gradients as wide as the MLP.
    numbers = 64 * 2 + (64 + 64 + 32 + 32 + 64 + 4 + 64 + 64) + 16 + (64 + 4 * 128) + 12 + 3 * 128
    assert backward_bytes(step) == 8 * numbers * 4
    # Forward: state between the branches, attention's output, the normed state, gate, up and the activation.
    assert forward_bytes(step) == 8 * (3 * 64 + 3 * 128) * 4


def test_idle_layers_hold_less_than_selected_ones() -> None:
    step = StreamedStep(TINY, "exact", 8, layers_per_step=2)
    assert backward_bytes(step, "mlp") < backward_bytes(step, "exact") < backward_bytes(step, "selected")


@pytest.mark.parametrize("name", GEOMETRIES)
def test_monotone_in_tokens_and_in_what_is_kept(name: str) -> None:
    def total(tokens: int, resident: Resident) -> int:
        return streamed_bytes(StreamedStep(GEOMETRIES[name], "full", tokens), resident).total

    lengths = [total(tokens, STREAMED) for tokens in (1, 64, 256, 1024, 4096)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    for more in ({"weights": True}, {"head": True}, {"states": True}, {"inputs": "memory"}, {"products": 3}):
        assert total(256, replace(STREAMED, **more)) >= total(256, STREAMED)  # type: ignore[arg-type]


def test_inputs_in_bfloat16_take_half() -> None:
    step = StreamedStep(TINY, "full", 8)
    inputs = {
        place: streamed_bytes(step, Resident(inputs=place)).throughout["layer inputs"]
        for place in ("memory", "bfloat16", "file")
    }
    assert inputs["memory"] == 2 * inputs["bfloat16"] == 4 * 8 * 64 * 4
    assert inputs["file"] == 0


def test_identity_keeps_the_selected_layers_alone_and_full_is_exact_with_all_layers() -> None:
    identity = streamed_bytes(StreamedStep(TINY, "identity", 8, layers_per_step=1), Resident())
    assert identity.throughout["layer inputs"] == 8 * 64 * 4
    full = streamed_bytes(StreamedStep(TINY, "full", 8), Resident())
    assert full == streamed_bytes(StreamedStep(TINY, "exact", 8, layers_per_step=4), Resident())


def test_tile_is_the_one_that_the_general_count_has() -> None:
    for geometry in GEOMETRIES.values():
        general = peak_bytes(geometry, "full", tokens=8)
        streamed = streamed_bytes(StreamedStep(geometry, "full", 8), Resident())
        assert general.tile == streamed.throughout["tile"] == 4 * tile_numbers(geometry)


def test_a_window_shorter_than_the_row_needs_masks() -> None:
    plain = StreamedStep(TINY, "full", 512)
    windowed = replace(plain, windowed=True)
    assert forward_bytes(windowed) - forward_bytes(plain) == 4 * 512 * 512
    assert backward_bytes(windowed) - backward_bytes(plain) == 4 * 512 * 512


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        StreamedStep(TINY, "full", 0)
