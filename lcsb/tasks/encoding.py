"""Passages to tokens and target marks, the truncation rule, and rolling windows over a long text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lcsb.data import IGNORED, Examples, bos_of
from lcsb.tasks.formats import Passage


@dataclass(frozen=True)
class Encoded:
    """Tokens of one row, and which of them are targets (never the first).

    tokens_cut: how many tokens the truncation took; prompt_cut, completion_cut: where it took them.
    """

    ids: tuple[int, ...]
    targets: tuple[bool, ...]
    tokens_cut: int = 0
    prompt_cut: bool = False
    completion_cut: bool = False

    @property
    def target_count(self) -> int:
        """Number of targets."""
        return sum(self.targets)


def encode(
    passages: Sequence[Passage], tokenizer: Any, tokens: int | None, end: bool = False
) -> list[Encoded]:
    """Tokenise each passage as one text, and mark every token that holds a target character.

    Prompt and completion are tokenised together, as the model will meet them; the tokens' character offsets decide
    which are targets, and a token that reaches over the boundary is one. A plain text gets the tokenizer's BOS in front
    where it adds one, and with `end` its EOS behind, a target like the rest (so that a trained model learns to stop).

    Truncation to `tokens` (None: none). A plain passage loses the beginning of its prompt first (never BOS), until
    prompt and BOS fill half of the tokens, then the end of its targets. A conversation loses its end. What is left
    without a target stays in the list; the caller counts it.

    Raises:
        ValueError: a tokenizer without character offsets (a slow one).
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} gives no character offsets, expected a fast tokenizer")
    bos = bos_of(tokenizer)
    eos = [tokenizer.eos_token_id] if end and tokenizer.eos_token_id is not None else []
    rows = []
    for passage, ids, offsets in zip(passages, *_tokenised(passages, tokenizer), strict=True):
        targets = [
            any(stop > first and (start < last or stop <= last) for first, last in passage.targets)
            for start, stop in offsets
        ]
        if not passage.templated:
            behind = eos if any(targets) else []
            ids, targets = bos + ids + behind, [False] * len(bos) + targets + [True] * len(behind)
        rows.append(_truncated(ids, targets, tokens, len(bos), passage.templated))
    return rows


def _tokenised(
    passages: Sequence[Passage], tokenizer: Any
) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """ids and character offsets of each text, without added special tokens."""
    ids: list[list[int]] = [[] for _ in passages]
    offsets: list[list[tuple[int, int]]] = [[] for _ in passages]
    for templated in (False, True):
        places = [index for index, passage in enumerate(passages) if passage.templated == templated]
        if not places:
            continue
        output = tokenizer(
            [passages[index].text for index in places],
            add_special_tokens=False,
            split_special_tokens=not templated,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        for index, row, spans in zip(places, output["input_ids"], output["offset_mapping"], strict=True):
            ids[index], offsets[index] = row, spans
    return ids, offsets


def _truncated(
    ids: list[int], targets: list[bool], tokens: int | None, head: int, keep_start: bool
) -> Encoded:
    excess = 0 if tokens is None else max(0, len(ids) - tokens)
    from_prompt = 0
    if tokens is not None and excess and not keep_start:
        first = targets.index(True) if any(targets) else len(ids)
        from_prompt = min(excess, max(0, first - max(1, tokens // 2)))
        ids = ids[:head] + ids[head + from_prompt :]
        targets = targets[:head] + targets[head + from_prompt :]
    before = sum(targets)
    ids, targets = ids[:tokens], targets[:tokens]
    cut = sum(targets) < before
    if targets:
        targets[0] = False  # nothing stands before it
    return Encoded(tuple(ids), tuple(targets), excess, from_prompt > 0, cut)


def rolling(ids: Sequence[int], bos: Sequence[int], window: int, stride: int) -> list[Encoded]:
    """A long text in windows that together score each of its tokens once.

    The first window holds the text's first tokens and scores them all; each further one moves on by `stride` tokens and
    scores the tokens that it adds, with window - stride tokens before them. With `bos` every window begins with it.
    Without, the very first token has nothing before it and is not scored: len(ids) - 1 tokens are, else len(ids).

    Raises:
        ValueError: stride outside 1..window-1 (a token at the start of a window would have nothing before it).
    """
    if not 1 <= stride < window:
        raise ValueError(f"stride={stride} with window={window}, expected 1 <= stride < window")
    room = window - len(bos)
    rows: list[Encoded] = []
    done = 0
    while done < len(ids):
        stop = min(len(ids), done + (stride if rows else room))
        start = max(0, stop - room)
        targets = [False] * len(bos) + [position >= done for position in range(start, stop)]
        targets[0] = False
        rows.append(Encoded((*bos, *ids[start:stop]), tuple(targets)))
        done = stop
    return [row for row in rows if any(row.targets)]


def padded(rows: Sequence[Encoded], pad: int, side: str = "right") -> Examples:
    """Rows padded to the longest one, on the given side."""
    width = max(len(row.ids) for row in rows)
    shape = (len(rows), width)
    ids = torch.full(shape, pad, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(0, len(row.ids)) if side == "right" else slice(width - len(row.ids), width)
        tokens = torch.tensor(row.ids, dtype=torch.int64)
        ids[index, place] = tokens
        labels[index, place] = torch.where(torch.tensor(row.targets), tokens, IGNORED)
        mask[index, place] = 1
    return Examples(ids, labels, mask)


def pad_id(tokenizer: Any) -> int:
    """A token to pad with; what it is does not matter, since padding is masked."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
