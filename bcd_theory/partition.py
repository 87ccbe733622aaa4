"""Blocks as index sets: which indices (layers, or coordinates of a parameter vector) are updated together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index

import numpy as np
from numpy.typing import NDArray


def n_blocks(n_layers: int, layers_per_step: int) -> int:
    """Number of blocks p = ceil(N / k).

    Raises ValueError when N < 1, k < 1 or k > N.

    >>> n_blocks(30, 8)
    4
    """
    n, k = _integer(n_layers, "n_layers"), _integer(layers_per_step, "layers_per_step")
    if n < 1:
        raise ValueError(f"n_layers is {n}, expected at least 1")
    if not 1 <= k <= n:
        raise ValueError(f"layers_per_step is {k}, expected 1 to {n} (the number of layers)")
    return -(-n // k)


def contiguous_blocks(n_layers: int, layers_per_step: int) -> tuple[tuple[int, ...], ...]:
    """p = ceil(N / k) runs of neighbouring layers, upward; sizes differ by at most one, larger first.

    >>> [len(block) for block in contiguous_blocks(30, 8)]
    [8, 8, 7, 7]
    """
    p = n_blocks(n_layers, layers_per_step)
    small, larger = divmod(n_layers, p)
    blocks, start = [], 0
    for j in range(p):
        size = small + (j < larger)
        blocks.append(tuple(range(start, start + size)))
        start += size
    return tuple(blocks)


def interleaved_blocks(n_layers: int, layers_per_step: int) -> tuple[tuple[int, ...], ...]:
    """Block j holds the layers l with l mod p = j, p = ceil(N / k).

    >>> interleaved_blocks(5, 2)
    ((0, 3), (1, 4), (2,))
    """
    p = n_blocks(n_layers, layers_per_step)
    return tuple(tuple(range(j, n_layers, p)) for j in range(p))


@dataclass(frozen=True)
class Partition:
    """A partition of 0, ..., n - 1 into non-empty blocks; the order inside a block is kept.

    Raises ValueError when a block is empty, or when an index is missing, repeated or out of range.

    >>> Partition([[0, 2], [1]]).n
    3
    """

    blocks: tuple[tuple[int, ...], ...]

    def __init__(self, blocks: Iterable[Iterable[int]], n: int | None = None) -> None:
        cleaned = tuple(tuple(_integer(i, "block index") for i in block) for block in blocks)
        if not cleaned:
            raise ValueError("the partition has no block, expected at least one")
        for j, block in enumerate(cleaned):
            if not block:
                raise ValueError(f"block {j} is empty, expected at least one index in each block")
        flat = [i for block in cleaned for i in block]
        size = len(flat) if n is None else _integer(n, "n")
        seen: set[int] = set()
        for i in flat:
            if i in seen:
                raise ValueError(f"index {i} occurs more than once, expected disjoint blocks")
            seen.add(i)
        # Without n the size is that of the union, so an index past the end means a missing one.
        outside = [i for i in flat if not 0 <= i < size]
        if outside:
            raise ValueError(f"index {outside[0]} is in a block, expected blocks that cover 0 to {size - 1}")
        if len(flat) < size:
            missing = next(i for i in range(size) if i not in seen)
            raise ValueError(f"index {missing} is in no block, expected blocks that cover 0 to {size - 1}")
        object.__setattr__(self, "blocks", cleaned)

    @property
    def n(self) -> int:
        """Number of indices."""
        return sum(len(block) for block in self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.blocks)

    def __getitem__(self, j: int) -> tuple[int, ...]:
        return self.blocks[j]

    def arrays(self) -> list[NDArray[np.intp]]:
        """The blocks as index arrays."""
        return [np.asarray(block, dtype=np.intp) for block in self.blocks]


def equal_blocks(n: int, p: int) -> Partition:
    """n coordinates in p contiguous blocks whose sizes differ by at most one, larger first.

    >>> equal_blocks(5, 2).blocks
    ((0, 1, 2), (3, 4))
    """
    if not 1 <= _integer(p, "p") <= _integer(n, "n"):
        raise ValueError(f"p is {p}, expected 1 to {n} (the number of coordinates)")
    return Partition([part.tolist() for part in np.array_split(np.arange(n), p)], n)


def as_partition(blocks: Partition | Sequence[Iterable[int]], n: int) -> Partition:
    """`blocks` checked against n coordinates."""
    return Partition(blocks.blocks if isinstance(blocks, Partition) else blocks, n)


def _integer(value: int, name: str) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}, expected an integer")
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected an integer") from None
