from __future__ import annotations

import numpy as np
import pytest

from bcd_theory.partition import (
    Partition,
    as_partition,
    contiguous_blocks,
    equal_blocks,
    interleaved_blocks,
    n_blocks,
)


def test_thirty_layers_in_steps_of_eight():
    assert [len(b) for b in contiguous_blocks(30, 8)] == [8, 8, 7, 7]
    assert [len(b) for b in interleaved_blocks(30, 8)] == [8, 8, 7, 7]


@pytest.mark.parametrize("n", range(1, 33))
def test_every_size_covers_each_layer_once(n):
    for k in range(1, n + 1):
        for blocks in (contiguous_blocks(n, k), interleaved_blocks(n, k)):
            sizes = [len(b) for b in blocks]
            assert len(blocks) == n_blocks(n, k) == int(np.ceil(n / k))
            assert sorted(i for b in blocks for i in b) == list(range(n))
            assert max(sizes) <= k and max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)
        contiguous = [i for b in contiguous_blocks(n, k) for i in b]
        assert contiguous == list(range(n))
        p = n_blocks(n, k)
        assert all(layer % p == j for j, b in enumerate(interleaved_blocks(n, k)) for layer in b)


def test_limiting_cases():
    assert contiguous_blocks(6, 6) == interleaved_blocks(6, 6) == (tuple(range(6)),)
    assert contiguous_blocks(4, 1) == interleaved_blocks(4, 1) == ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("n", "k", "message"), [(4, 5, "is 5, expected 1 to 4"), (4, 0, "is 0"), (0, 1, "n_layers is 0")]
)
def test_bad_sizes_are_named(n, k, message):
    with pytest.raises(ValueError, match=message):
        contiguous_blocks(n, k)


def test_non_integers_are_refused():
    with pytest.raises(TypeError, match="layers_per_step"):
        contiguous_blocks(4, 2.0)
    with pytest.raises(TypeError, match="layers_per_step"):
        contiguous_blocks(4, True)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "no block"),
        ([[0], []], "block 1 is empty"),
        ([[0, 1], [1]], "index 1 occurs more than once"),
        ([[0], [2]], "index 2 is in a block"),
        ([[-1], [0]], "index -1"),
    ],
)
def test_partition_refuses(blocks, message):
    with pytest.raises(ValueError, match=message):
        Partition(blocks)


def test_partition_against_a_size():
    assert as_partition([[2, 0], [1]], 3).blocks == ((2, 0), (1,))
    with pytest.raises(ValueError, match="index 2 is in no block"):
        as_partition([[0], [1]], 3)
    assert as_partition(Partition([[0], [1]]), 2) == Partition([[0], [1]])


def test_equal_blocks():
    assert [len(b) for b in equal_blocks(11, 4)] == [3, 3, 3, 2]
    assert equal_blocks(5, 5).blocks == ((0,), (1,), (2,), (3,), (4,))
    with pytest.raises(ValueError, match="p is 6"):
        equal_blocks(5, 6)
