"""Scores of a model on a task: perplexity, loss of completions, accuracy on questions, exact match.

Everything rests on `token_losses`: sums of token losses row by row, added in float64, so that no figure depends on the
batch size, the padding side or the order of the rows beyond rounding.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from lcsb.data import IGNORED, Examples, bos_of, token_ids
from lcsb.tasks.encoding import Encoded, encode, pad_id, padded, rolling
from lcsb.tasks.formats import Passage, Question
from lcsb.tasks.load import Item

EXACT_MATCH_ITEMS = 100
EXACT_MATCH_TOKENS = 320
_QUESTION = "Question:"
_LARGEST_EXPONENT = math.log(1e300)

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True)
class RowLoss:
    """Sum of the losses of one row's targets in nats, and their number."""

    total: float
    tokens: int


@dataclass(frozen=True)
class Evaluation:
    """Figures of one model on one task.

    metrics: by name; losses are means per scored token in nats. None where there is no finite figure (a perplexity
        beyond 1e300, a loss that is not finite, a standard error from one question).
    counts: rows used and left out and why, tokens scored.
    """

    task: str
    metrics: dict[str, float | None]
    counts: dict[str, int] = field(default_factory=dict)


@torch.no_grad()
def token_losses(
    model: nn.Module,
    rows: Sequence[Encoded],
    *,
    pad: int = 0,
    batch_size: int = 4,
    padding_side: Literal["right", "left"] = "right",
    progress: Progress | None = None,
) -> list[RowLoss]:
    """-sum of log p(target | tokens before it in the row), for each row, in the order given.

    Rows are batched by length (the longest first), and rows that differ in their last token alone (choices of one
    token) share a forward pass; neither changes a figure. Dropout is off and the model's mode is put back.

    Args:
        pad: the id to pad with. Padding is masked and positions count from each row's first token, on either side.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}, expected at least 1")
    by_input: dict[tuple[int, ...], list[int]] = {}
    losses = {index: RowLoss(0.0, 0) for index, row in enumerate(rows) if not row.target_count}
    for index, row in enumerate(rows):
        if row.target_count:
            by_input.setdefault(row.ids[:-1], []).append(index)
    order = sorted(by_input, key=len, reverse=True)
    with _evaluating(model):
        for start in range(0, len(order), batch_size):
            inputs = order[start : start + batch_size]
            members = [(place, index) for place, key in enumerate(inputs) for index in by_input[key]]
            batch = padded([Encoded(key, (False,) * len(key)) for key in inputs], pad, padding_side)
            # Labels stand where the logits that predict them come out.
            following = [Encoded(rows[index].ids[1:], rows[index].targets[1:]) for _, index in members]
            labels = padded(following, pad, padding_side).labels
            owner = torch.tensor([place for place, _ in members])
            sums, counts = _sums(model, batch, labels, owner)
            for (_, index), total, count in zip(members, sums, counts, strict=True):
                losses[index] = RowLoss(total, count)
            if progress is not None:
                progress(len(losses), len(rows))
    return [losses[index] for index in range(len(rows))]


def _sums(
    model: nn.Module, batch: Examples, labels: torch.Tensor, owner: torch.Tensor
) -> tuple[list[float], list[int]]:
    """Sum of losses and number of targets of each row of labels [rows, tokens]; row r belongs to input owner[r]."""
    device = next(model.parameters()).device
    accepted = _parameters(model)
    # Logits are asked for where some row has a target: over a large vocabulary they cost most.
    places = (labels != IGNORED).any(dim=0).nonzero().flatten()
    arguments = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": (batch.attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "logits_to_keep": places,
    }
    arguments = {name: value.to(device) for name, value in arguments.items() if name in accepted}
    logits = model(**arguments, use_cache=False).logits
    if "logits_to_keep" not in accepted:
        logits = logits[:, places.to(device)]
    log_probability = torch.log_softmax(logits.float(), dim=-1)
    labels, owner = labels[:, places].to(device), owner.to(device)
    column = torch.arange(len(places), device=device)
    found = log_probability[owner[:, None], column[None, :], labels.clamp(min=0)]
    values = torch.where(labels == IGNORED, 0.0, -found.double())
    return values.sum(dim=1).tolist(), (labels != IGNORED).sum(dim=1).tolist()


def _parameters(model: nn.Module) -> set[str]:
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return set(inspect.signature(base.forward).parameters)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    items: Sequence[Item],
    task: str,
    *,
    window: int = 512,
    stride: int | None = None,
    limit: int | None = None,
    exact_match: bool = False,
    batch_size: int = 4,
    progress: Progress | None = None,
) -> Evaluation:
    """Score a model on the items of a task.

    Texts: loss and perplexity over rolling windows, each token scored once; window and stride are part of the figures'
    names, because they change them. Passages: loss and perplexity of the targets. Questions: accuracy (the choice of
    largest log-probability; and, where choices differ in length, of largest log-probability a character), standard
    error sqrt(a (1 - a) / (n - 1)), and the loss of the right choice.

    Args:
        window: most tokens a row may have; texts are read in such windows, longer rows are cut (`encode`).
        stride: tokens by which a window moves on; window // 2 if None.
        limit: only the first so many passages or questions; windows, for texts.
        exact_match: for solutions that end in "#### number": also generate greedily, for the first 100 items, and
            compare the number.

    Raises:
        ValueError: nothing to score (all empty, or no targets); a bad window, stride or limit.
    """
    if window < 2:
        raise ValueError(f"window={window}, expected at least 2 tokens")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}, expected at least 1")
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if longest is not None and window > longest:
        raise ValueError(f"window={window}, expected at most {longest}, the longest that the model takes")

    def losses(rows: Sequence[Encoded]) -> list[RowLoss]:
        return token_losses(model, rows, pad=pad_id(tokenizer), batch_size=batch_size, progress=progress)

    if not items:
        raise ValueError(f"{task} holds no text (0 rows)")
    if all(isinstance(item, str) for item in items):
        texts = [item for item in items if isinstance(item, str)]
        return _texts(
            losses, tokenizer, texts, task, window, window // 2 if stride is None else stride, limit
        )
    if all(isinstance(item, Question) for item in items):
        questions = [item for item in items[:limit] if isinstance(item, Question)]
        return _questions(losses, tokenizer, questions, task, window)
    passages = [item for item in items[:limit] if isinstance(item, Passage)]
    result = _passages(losses, tokenizer, passages, task, window)
    if exact_match:
        result.metrics.update(_exact_match(model, tokenizer, passages[:EXACT_MATCH_ITEMS], window, progress))
        result.counts["generated"] = min(len(passages), EXACT_MATCH_ITEMS)
    return result


def perplexity(loss: float) -> float | None:
    """exp(loss), or None where that is beyond 1e300 or the loss is not a number."""
    return math.exp(loss) if loss < _LARGEST_EXPONENT else None


def _mean(rows: Sequence[RowLoss]) -> tuple[float, int]:
    tokens = sum(row.tokens for row in rows)
    return math.fsum(row.total for row in rows) / tokens, tokens


def _loss_and_perplexity(rows: Sequence[RowLoss], suffix: str = "") -> dict[str, float | None]:
    loss, _ = _mean(rows)
    return {
        f"loss{suffix}": loss if math.isfinite(loss) else None,
        f"perplexity{suffix}": perplexity(loss),
    }


_Losses = Callable[[Sequence[Encoded]], list[RowLoss]]


def _texts(
    losses: _Losses,
    tokenizer: Any,
    texts: Sequence[str],
    task: str,
    window: int,
    stride: int,
    limit: int | None,
) -> Evaluation:
    used = [text for text in texts if text.strip()]
    if not used:
        raise ValueError(f"{task} holds no text ({len(texts)} rows, all empty)")
    bos = bos_of(tokenizer)
    by_text = [rolling(token_ids(text, tokenizer), bos, window, stride) for text in used]
    windows = [row for rows in by_text for row in rows]
    if not windows:
        raise ValueError(f"{task}: no row holds two tokens, so nothing can be predicted ({len(texts)} rows)")
    windows = windows[:limit]
    scored = losses(windows)
    counts = {
        "rows_used": sum(bool(rows) for rows in by_text),
        "rows_dropped": len(texts) - sum(bool(rows) for rows in by_text),
        "windows": len(windows),
        "tokens_scored": _mean(scored)[1],
    }
    return Evaluation(task, _loss_and_perplexity(scored, f"_window{window}_stride{stride}"), counts)


def _passages(
    losses: _Losses, tokenizer: Any, passages: Sequence[Passage], task: str, window: int
) -> Evaluation:
    there = [passage for passage in passages if not passage.empty]
    if not there:
        raise ValueError(f"{task} holds no text ({len(passages)} rows, all empty)")
    rows = encode(there, tokenizer, window)
    used = [row for row in rows if row.target_count]
    if not used:
        raise ValueError(f"{task}: none of its {len(there)} rows has a target within {window} tokens")
    scored = losses(used)
    counts = {
        "rows_used": len(used),
        "rows_dropped": len(passages) - len(there),
        "rows_masked": len(there) - len(used),
        "prompts_cut": sum(row.prompt_cut for row in used),
        "completions_cut": sum(row.completion_cut for row in used),
        "tokens_scored": _mean(scored)[1],
    }
    return Evaluation(task, _loss_and_perplexity(scored), counts)


def _questions(
    losses: _Losses, tokenizer: Any, questions: Sequence[Question], task: str, window: int
) -> Evaluation:
    rows = encode([q.passage(i) for q in questions for i in range(len(q.choices))], tokenizer, window)
    mute = next((row for row in rows if not row.target_count), None)
    if mute is not None:
        raise ValueError(f"{task}: a choice has no token to score within {window} tokens")
    scored = iter(losses(rows))
    hits: list[bool] = []
    hits_by_length: list[bool] = []
    right: list[RowLoss] = []
    for question in questions:
        choices = [next(scored) for _ in question.choices]
        # A loss that is not a number is the worst of all.
        totals = [choice.total if math.isfinite(choice.total) else math.inf for choice in choices]
        # Lengths without the space that joins a choice to its prompt.
        by_length = [total / len(text.lstrip()) for total, text in zip(totals, question.choices, strict=True)]
        hits.append(totals.index(min(totals)) == question.right)
        hits_by_length.append(by_length.index(min(by_length)) == question.right)
        right.append(choices[question.right])
    metrics = _accuracy("accuracy", hits)
    if any(len({len(text) for text in question.choices}) > 1 for question in questions):
        metrics |= _accuracy("accuracy_per_character", hits_by_length)
    loss, tokens = _mean(right)
    metrics["right_answer_loss"] = loss if math.isfinite(loss) else None
    counts = {
        "questions": len(questions),
        "choices": len(rows),
        "rows_cut": sum(row.tokens_cut > 0 for row in rows),
        "right_answer_tokens": tokens,
    }
    return Evaluation(task, metrics, counts)


def _accuracy(name: str, hits: Sequence[bool]) -> dict[str, float | None]:
    n = len(hits)
    value = sum(hits) / n
    error = math.sqrt(value * (1 - value) / (n - 1)) if n > 1 else None
    return {name: value, f"{name}_standard_error": error}


@torch.no_grad()
def _exact_match(
    model: nn.Module, tokenizer: Any, passages: Sequence[Passage], window: int, progress: Progress | None
) -> dict[str, float | None]:
    hits = []
    bos = bos_of(tokenizer)
    with _evaluating(model):
        for done, passage in enumerate(passages, start=1):
            start, stop = passage.targets[0]
            ids = (bos + token_ids(passage.text[:start], tokenizer))[-window:]
            prompt = torch.tensor([ids], device=next(model.parameters()).device)
            output = model.generate(  # type: ignore[operator]
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=EXACT_MATCH_TOKENS,
                do_sample=False,
                use_cache=True,
                pad_token_id=pad_id(tokenizer),
                stopping_criteria=[_next_question(tokenizer, len(ids))],
            )
            said = final_number(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))
            hits.append(said is not None and said == final_number(passage.text[start:stop]))
            if progress is not None:
                progress(done, len(passages))
    return _accuracy("exact_match", hits)


def _next_question(tokenizer: Any, start: int) -> Callable[..., torch.Tensor]:
    # A model that has not learned to stop goes on with a question of its own. transformers' stop_strings would build a
    # table over the vocabulary, and fails for some tokenizers.
    def stop(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([_QUESTION in tokenizer.decode(row[start:]) for row in ids], device=ids.device)

    return stop


def final_number(text: str) -> str | None:
    """The number after "####", without commas, currency signs and a closing full stop; None where there is none.

    What follows the next "Question:" is not looked at: a model that has not learned to stop goes on with another one.
    """
    match = re.search(r"####\s*\$?\s*(-?\$?[\d,]*\.?\d+)", text.split(_QUESTION)[0])
    if match is None:
        return None
    number = match[1].replace(",", "").replace("$", "")
    return str(float(number)) if number.strip("-.") else None
