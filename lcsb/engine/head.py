"""Head and loss by vocabulary chunks: the logits of all tokens and all words are never held at once.

    loss = mean over targets of  log sum_v exp(x . w_v) - x . w_target,     d loss / dx = (softmax W - w_target) / count

One pass reads each chunk of W once, for the loss and for the gradient: the running maximum and sum are rescaled as in
an online softmax, and the sum of exp(x . w_v) w_v with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: largest number of logits, and of weights, held at once (tokens x words and words x hidden), 16 MiB in float32
CHUNK_LOGITS = 1 << 22


def words_per_chunk(width: int, vocabulary: int, most: int = CHUNK_LOGITS) -> int:
    """Words of a chunk, so that width x words stays at `most` numbers (at least 64 words); width: tokens or hidden."""
    return min(vocabulary, max(64, most // max(1, width)))


def chunked_cross_entropy(
    x: Tensor,
    targets: Tensor,
    vocabulary: int,
    weight: Callable[[int, int], Tensor],
    words: int,
    gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Sum of the targets' cross entropies, and its gradient.

    Args:
        x: [tokens, hidden], float32; every row has a target.
        targets: int64 [tokens].
        weight: weight(first, last) gives rows [first, last) of the head's matrix, float32; valid until the next call.
        words: rows of a chunk.
        gradient: whether the gradient is wanted.

    Returns:
        The sum (a scalar), and d sum / dx [tokens, hidden] or None.
    """
    tokens = x.shape[0]
    highest = x.new_full((tokens,), -torch.inf)
    total = x.new_zeros(tokens)
    score = x.new_zeros(tokens)  # x . w_target
    pull = torch.zeros_like(x) if gradient else None  # sum of exp(x . w_v - highest) w_v
    target_rows = torch.empty_like(x) if gradient else None
    # Of every chunk's logits in turn: a fresh tensor each would cost its page faults.
    memory = x.new_empty(words * tokens)
    for first, last in chunks(vocabulary, words):
        w = weight(first, last)
        logits = torch.mm(x, w.T, out=memory[: tokens * (last - first)].view(tokens, last - first))
        here = ((targets >= first) & (targets < last)).nonzero().squeeze(1)
        local = targets[here] - first
        score[here] = logits[here, local]
        higher = torch.maximum(highest, logits.amax(1))
        shrink = torch.exp(highest - higher)
        logits.sub_(higher[:, None]).exp_()
        total.mul_(shrink).add_(logits.sum(1))
        if pull is not None and target_rows is not None:
            pull.mul_(shrink[:, None]).addmm_(logits, w)
            target_rows[here] = w[local]
        highest = higher
    loss = (highest + total.log() - score).double().sum()
    if pull is None or target_rows is None:
        return loss, None
    return loss, pull.div_(total[:, None]).sub_(target_rows)


def chunks(vocabulary: int, words: int) -> Iterator[tuple[int, int]]:
    """(first, last) of each chunk, last exclusive."""
    for first in range(0, vocabulary, words):
        yield first, min(first + words, vocabulary)
