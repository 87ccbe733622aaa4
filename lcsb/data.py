"""Text to fixed windows of tokens, a held-out part, and a data order that is a function of seed and step alone."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Between the rows of a corpus: a paragraph break, which every tokenizer knows and no chat format gives a meaning.
ROW_SEPARATOR = "\n\n"

# A label that no loss counts.
IGNORED = -100


@dataclass(frozen=True)
class Examples:
    """Rows of a task, padded on the right to one length; takes the place of a tensor of windows.

    input_ids, labels, attention_mask: int64 [rows, tokens]. A label is the token itself where it is a target and
    `IGNORED` elsewhere; the first token of a row is never a target, because nothing stands before it.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, rows: slice | torch.Tensor) -> Examples:
        return Examples(self.input_ids[rows], self.labels[rows], self.attention_mask[rows])

    @property
    def shape(self) -> torch.Size:
        """(rows, tokens)."""
        return self.input_ids.shape

    def split(self, size: int) -> Iterator[Examples]:
        """Parts of `size` rows, the last one perhaps shorter."""
        return (self[start : start + size] for start in range(0, len(self), size))


@dataclass(frozen=True)
class Corpus:
    """Windows of tokens, and what became of the text.

    train, held_out: int64 [windows, tokens], of which every token is a target, or the `Examples` of a task; no token
        of the text lies in both.
    sha256: of the UTF-8 text that was tokenised (for a text file: of the file); held_out_sha256: the same of the
        held-out source, equal to sha256 where the held-out windows come from the same text.
    counts: rows_used, rows_dropped (empty or only white space), text_tokens, train_windows, held_out_windows,
        tokens_dropped (a last part shorter than a window), bos_added, special_tokens (ids in the text that the
        tokenizer calls special: its unknown token, if any). text_tokens + bos_added ==
        tokens * (train_windows + held_out_windows) + tokens_dropped. For the counts of a task see `load_task`.
    source: "pydoc", the file's name, or a task's or hub data set's.
    """

    train: torch.Tensor | Examples
    held_out: torch.Tensor | Examples
    sha256: str
    held_out_sha256: str
    counts: Mapping[str, int]
    source: str

    def train_order(self, seed: int, n: int) -> torch.Tensor:
        """Indices [n] of the first n training windows a run with this seed sees."""
        return _order(seed, 0, n, len(self.train))

    def batch(self, seed: int, step: int, batch_size: int) -> torch.Tensor | Examples:
        """Windows [batch_size, tokens] of a step (from 0): the same for every arm, and after a resume.

        Epoch e passes the windows in the order numpy.random.default_rng([seed, e]).permutation(len(train)); a batch
        may reach into the next epoch.
        """
        return self.train[_order(seed, step * batch_size, (step + 1) * batch_size, len(self.train))]

    def describe(self) -> str:
        """The counts in one line."""
        c = self.counts
        unit = "rows of at most" if isinstance(self.train, Examples) else "windows of"
        masked = f", {c['rows_masked']} without a target" if "rows_masked" in c else ""
        return (
            f"{self.source}: {c['rows_used']} rows used, {c['rows_dropped']} dropped{masked}; {c['text_tokens']} "
            f"tokens, {c['tokens_dropped']} dropped; {c['train_windows']} training and {c['held_out_windows']} "
            f"held-out {unit} {max(self.train.shape[1], self.held_out.shape[1])}"
        )


def load_corpus(
    source: str | Path,
    tokenizer: Any,
    *,
    tokens: int = 128,
    text_field: str = "text",
    held_out_every: int = 10,
    held_out_source: str | Path | None = None,
) -> Corpus:
    """Read a corpus and cut it into windows.

    Args:
        source: "pydoc" (the language reference that every CPython carries: pydoc_data.topics, in the order of the
            topics' names), a .jsonl file with a text field, or a UTF-8 text file (one row).
        tokenizer: special-token strings in the text are split like any text and never become special tokens.
        tokens: length of a window. Each begins with the BOS token where the tokenizer adds one to a text.
        text_field: field of the JSONL rows.
        held_out_every: n: windows n-1, 2n-1, ... are held out (the last one, if there are fewer than n). Spread over
            the text and not its last share, so that both parts are of one kind.
        held_out_source: a second source, all of whose windows are held out; then every window of the first trains.

    Rows are joined by a blank line and windows run across rows; what is left at the end is dropped and counted.

    Raises:
        ValueError: no such file; not UTF-8 (with the byte); a bad JSONL row (with file and line); no text at all;
            too little text for the windows asked for.
    """
    rows = read_texts(source, text_field)
    held_out = None if held_out_source is None else read_texts(held_out_source, text_field)
    name = _name(source)
    held_out_name = name if held_out_source is None else _name(held_out_source)
    return corpus_of_texts(
        rows, tokenizer, name, held_out, held_out_name, tokens=tokens, held_out_every=held_out_every
    )


def check_window(tokens: int, held_out_every: int) -> None:
    """Raise ValueError for windows that hold no prediction, or a held-out part that is everything."""
    if tokens < 2:
        raise ValueError(f"tokens={tokens}, expected windows of at least 2 tokens")
    if held_out_every < 2:
        raise ValueError(f"held_out_every={held_out_every}, expected at least 2")


def hold_out(rows: int, every: int) -> torch.Tensor:
    """bool [rows]: which rows are held out: every-1, 2*every-1, ..., or the last one if there are fewer."""
    every = min(every, rows)
    return torch.arange(rows) % every == every - 1


def corpus_of_texts(
    rows: Sequence[str],
    tokenizer: Any,
    name: str,
    held_out_rows: Sequence[str] | None = None,
    held_out_name: str = "held-out rows",
    *,
    tokens: int = 128,
    held_out_every: int = 10,
) -> Corpus:
    """`load_corpus` of texts already read. `name` stands for them in the corpus and in messages."""
    check_window(tokens, held_out_every)
    windows, digest, counts = _windows(rows, name, tokenizer, tokens)
    if held_out_rows is not None:
        train = windows
        held_out, held_out_digest, held_out_counts = _windows(held_out_rows, held_out_name, tokenizer, tokens)
        counts = {key: counts[key] + held_out_counts[key] for key in counts}
    else:
        if len(windows) < 2:
            raise ValueError(
                f"{name} gives {len(windows)} window of {tokens} tokens, expected at least 2 "
                "(one to train on, one held out)"
            )
        is_held_out = hold_out(len(windows), held_out_every)
        train, held_out, held_out_digest = windows[~is_held_out], windows[is_held_out], digest
    counts |= {"train_windows": len(train), "held_out_windows": len(held_out)}
    return Corpus(train, held_out, digest, held_out_digest, counts, name)


def _windows(
    rows: Sequence[str], name: str, tokenizer: Any, tokens: int
) -> tuple[torch.Tensor, str, dict[str, int]]:
    used = [row for row in rows if row.strip()]
    if not used:
        raise ValueError(f"{name} holds no text ({len(rows)} rows, all empty)")
    text = ROW_SEPARATOR.join(used)
    ids = token_ids(text, tokenizer)
    bos = bos_of(tokenizer)
    fresh = tokens - len(bos)
    count = len(ids) // fresh
    if count == 0:
        raise ValueError(f"{name} holds {len(ids)} tokens, expected at least {fresh} for one window")
    body = torch.tensor(ids[: count * fresh], dtype=torch.int64).reshape(count, fresh)
    windows = torch.cat([torch.tensor(bos, dtype=torch.int64).expand(count, len(bos)), body], dim=1)
    special = set(tokenizer.all_special_ids)
    counts = {
        "rows_used": len(used),
        "rows_dropped": len(rows) - len(used),
        "text_tokens": len(ids),
        "tokens_dropped": len(ids) - count * fresh,
        "bos_added": count * len(bos),
        "special_tokens": sum(token in special for token in ids),
    }
    return windows, hashlib.sha256(text.encode()).hexdigest(), counts


def token_ids(text: str, tokenizer: Any) -> list[int]:
    """Tokens of a plain text: no special token is added, and strings that look like one are split like any text."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
        "input_ids"
    ]
    return ids


def read_texts(source: str | Path, text_field: str = "text") -> list[str]:
    """The texts of "pydoc", of a .jsonl file's text field, or of a UTF-8 file (one). Raises as `load_corpus`."""
    if source == "pydoc":
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(f"no file {path}; a corpus is 'pydoc', a .jsonl file or a UTF-8 text file")
    if path.suffix != ".jsonl":
        return [_decoded(path.read_bytes(), str(path))]
    return ["" if row is None else string_field(row, text_field, where) for where, row in jsonl_rows(path)]


def jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """("file:line", object) of each line of a .jsonl file; None where the line is blank.

    Raises:
        ValueError: not UTF-8, not JSON, or not an object (with file and line).
    """
    # Split at line feeds only: other line separators may stand inside a JSON string.
    lines = path.read_bytes().split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        text = _decoded(line, where)
        if not text.strip():
            yield where, None
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: {type(row).__name__}, expected an object with named fields")
        yield where, row


def field_of(row: Mapping[str, Any], name: str, where: str) -> Any:
    """The named field of a row. Raises ValueError with the nearest name there is."""
    if name not in row:
        near = difflib.get_close_matches(name, row, n=1, cutoff=0.0)
        hint = f"; nearest is {near[0]!r}" if near else ""
        raise ValueError(f"{where}: no field {name!r} among {', '.join(map(repr, row))}{hint}")
    return row[name]


def string_field(row: Mapping[str, Any], name: str, where: str) -> str:
    """The named field of a row, which must be a string."""
    value = field_of(row, name, where)
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {name!r} is {type(value).__name__}, expected a string")
    return value


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise ValueError(f"{where}: not UTF-8: byte 0x{byte:02x} at offset {error.start}") from None


def bos_of(tokenizer: Any) -> list[int]:
    """[BOS] where the tokenizer puts one before a text, else []."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _name(source: str | Path) -> str:
    # The file's name and not its path: records of a run hold no paths.
    return "pydoc" if source == "pydoc" else Path(source).name


def _order(seed: int, start: int, stop: int, windows: int) -> torch.Tensor:
    """Window indices at positions start..stop-1 of the endless order: one permutation of `windows` after another."""
    positions = np.arange(start, stop)
    order = np.empty(len(positions), dtype=np.int64)
    epochs = positions // windows
    for epoch in np.unique(epochs):
        here = epochs == epoch
        order[here] = _permutation(seed, int(epoch), windows)[positions[here] % windows]
    return torch.from_numpy(order)


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, windows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    permutation = np.random.default_rng([seed, epoch]).permutation(windows)
    permutation.flags.writeable = False
    return permutation
