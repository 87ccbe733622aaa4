"""Text to fixed windows of tokens, a held-out part, and a data order that is a function of seed and step alone."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Between the rows of a corpus: a paragraph break, which every tokenizer knows and no chat format gives a meaning.
ROW_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Corpus:
    """Windows of tokens, and what became of the text.

    train, held_out: int64 [windows, tokens]; no token of the text lies in both.
    sha256: of the UTF-8 text that was tokenised (for a text file: of the file); held_out_sha256: the same of the
        held-out source, equal to sha256 where the held-out windows come from the same text.
    counts: rows_used, rows_dropped (empty or only white space), text_tokens, train_windows, held_out_windows,
        tokens_dropped (a last part shorter than a window), bos_added, special_tokens (ids in the text that the
        tokenizer calls special: its unknown token, if any). text_tokens + bos_added ==
        tokens * (train_windows + held_out_windows) + tokens_dropped.
    source: "pydoc" or the file's name.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    sha256: str
    held_out_sha256: str
    counts: Mapping[str, int]
    source: str

    def train_order(self, seed: int, n: int) -> torch.Tensor:
        """Indices [n] of the first n training windows a run with this seed sees."""
        return _order(seed, 0, n, len(self.train))

    def batch(self, seed: int, step: int, batch_size: int) -> torch.Tensor:
        """Windows [batch_size, tokens] of a step (from 0): the same for every arm, and after a resume.

        Epoch e passes the windows in the order numpy.random.default_rng([seed, e]).permutation(len(train)); a batch
        may reach into the next epoch.
        """
        return self.train[_order(seed, step * batch_size, (step + 1) * batch_size, len(self.train))]

    def describe(self) -> str:
        """The counts in one line."""
        c = self.counts
        return (
            f"{self.source}: {c['rows_used']} rows used, {c['rows_dropped']} dropped; {c['text_tokens']} tokens, "
            f"{c['tokens_dropped']} dropped; {c['train_windows']} training and {c['held_out_windows']} held-out "
            f"windows of {self.train.shape[1]}"
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
    if tokens < 2:
        raise ValueError(f"tokens={tokens}, expected windows of at least 2 tokens")
    if held_out_every < 2:
        raise ValueError(f"held_out_every={held_out_every}, expected at least 2")
    windows, digest, counts = _windows(source, tokenizer, tokens, text_field)
    if held_out_source is not None:
        train = windows
        held_out, held_out_digest, held_out_counts = _windows(held_out_source, tokenizer, tokens, text_field)
        counts = {name: counts[name] + held_out_counts[name] for name in counts}
    else:
        if len(windows) < 2:
            raise ValueError(
                f"{_name(source)} gives {len(windows)} window of {tokens} tokens, expected at least 2 "
                "(one to train on, one held out)"
            )
        every = min(held_out_every, len(windows))
        is_held_out = torch.arange(len(windows)) % every == every - 1
        train, held_out, held_out_digest = windows[~is_held_out], windows[is_held_out], digest
    counts |= {"train_windows": len(train), "held_out_windows": len(held_out)}
    return Corpus(train, held_out, digest, held_out_digest, counts, _name(source))


def _windows(
    source: str | Path, tokenizer: Any, tokens: int, text_field: str
) -> tuple[torch.Tensor, str, dict[str, int]]:
    rows = _rows(source, text_field)
    used = [row for row in rows if row.strip()]
    if not used:
        raise ValueError(f"{_name(source)} holds no text ({len(rows)} rows, all empty)")
    text = ROW_SEPARATOR.join(used)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    bos = _bos(tokenizer)
    fresh = tokens - len(bos)
    count = len(ids) // fresh
    if count == 0:
        raise ValueError(f"{_name(source)} holds {len(ids)} tokens, expected at least {fresh} for one window")
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


def _rows(source: str | Path, text_field: str) -> list[str]:
    if source == "pydoc":
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(f"no file {path}; a corpus is 'pydoc', a .jsonl file or a UTF-8 text file")
    if path.suffix != ".jsonl":
        return [_decoded(path.read_bytes(), str(path))]
    # Split at line feeds only: other line separators may stand inside a JSON string.
    lines = path.read_bytes().split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [_json_row(line, f"{path}:{number}", text_field) for number, line in enumerate(lines, start=1)]


def _json_row(line: bytes, where: str, text_field: str) -> str:
    text = _decoded(line, where)
    if not text.strip():
        return ""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {type(row).__name__}, expected an object with a field {text_field!r}")
    if text_field not in row:
        near = difflib.get_close_matches(text_field, row, n=1, cutoff=0.0)
        hint = f"; nearest is {near[0]!r}" if near else ""
        raise ValueError(f"{where}: no field {text_field!r} among {', '.join(map(repr, row))}{hint}")
    value = row[text_field]
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {text_field!r} is {type(value).__name__}, expected a string")
    return value


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise ValueError(f"{where}: not UTF-8: byte 0x{byte:02x} at offset {error.start}") from None


def _bos(tokenizer: Any) -> list[int]:
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
