"""The tasks by name, and every source as training batches (`load_task`) or as things to score (`load_items`)."""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lcsb.data import (
    ROW_SEPARATOR,
    Corpus,
    bos_of,
    check_window,
    corpus_of_texts,
    hold_out,
    jsonl_rows,
    read_texts,
    string_field,
)
from lcsb.tasks import formats
from lcsb.tasks.encoding import Encoded, encode, pad_id, padded
from lcsb.tasks.formats import Passage, Question
from lcsb.tasks.sources import DATA_VARIABLE, HubName, Row, hub_rows, task_file

Item = str | Passage | Question
"""What is scored: a text of which every token is a target, a text with targets, or a question with choices."""


@dataclass(frozen=True)
class Task:
    """A public benchmark by name.

    train_files, test_files: the first one there is used. train_hub, test_hub: where the hub has the same data.
    read: a row as an item; None for plain text files.
    """

    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    train_hub: HubName
    test_hub: HubName
    read: Callable[[Mapping[str, Any], str], Item] | None
    folder: str


def _task(
    folder: str,
    hub: str,
    config: str,
    read: Callable[[Mapping[str, Any], str], Item] | None,
    suffix: str = "jsonl",
) -> Task:
    # The validation split trains where there is no training split on disk (WikiText-2 is often kept without it).
    names = tuple(f"{name}.{suffix}" for name in ("train", "valid", "validation"))
    return Task(names, (f"test.{suffix}",), HubName(hub, config), HubName(hub, config, "test"), read, folder)


TASKS: dict[str, Task] = {
    # On the hub WikiText-2 is a row a line: the same words as in the file, other white space between paragraphs.
    "wikitext-2": _task("wikitext-2", "Salesforce/wikitext", "wikitext-2-v1", None, "txt"),
    "arc-challenge": _task("arc-challenge", "allenai/ai2_arc", "ARC-Challenge", formats.arc_text),
    "arc-challenge-letter": _task("arc-challenge", "allenai/ai2_arc", "ARC-Challenge", formats.arc_letter),
    "gsm8k": _task("gsm8k", "openai/gsm8k", "main", formats.gsm8k),
}


def load_task(
    source: str | Path,
    tokenizer: Any,
    *,
    tokens: int = 128,
    path: str | Path | None = None,
    text_field: str = "text",
    held_out_every: int = 10,
    rows: int | None = None,
) -> Corpus:
    """Training and held-out rows of a task, a file or a hub data set.

    Args:
        source: a name in `TASKS` (its training file trains, its test file is held out); "pydoc"; a UTF-8 text file; a
            .jsonl file of text, of prompt with completion, or of messages; or `owner/name[:config][@split]` of the hub
            with such rows.
        tokens: length of a window, or the most tokens of a row (`encode` has the truncation rule).
        path: folder with the named tasks' files (`path`/gsm8k/train.jsonl, ...); else that of LCSB_DATA; with neither
            they are read from the hub.
        held_out_every: of the sources without a test file, every n-th window or row is held out.
        rows: read at most this many rows of the training data, and as many of the test data.

    Plain text becomes windows of which every token is a target (`load_corpus`). The other kinds become one row each
    (`Examples`): only the completion's, solution's, right answer's or assistant's tokens are targets, and after a
    completion or solution the EOS token. counts then holds: rows_used; rows_dropped (empty); rows_masked (without a
    target, so never in a batch); text_tokens (of the rows used, BOS and EOS apart), tokens_dropped (cut off),
    prompts_cut, completions_cut, bos_added, eos_added, target_tokens, train_windows, held_out_windows.
    text_tokens + bos_added + eos_added == tokens in the rows + tokens_dropped.

    Raises:
        ValueError: an unknown task (names the nearest); a bad row (with file and line); only empty rows; no row with a
            target; fewer than two rows.
        ModuleNotFoundError: the source is on the hub and `datasets` is not installed.
    """
    check_window(tokens, held_out_every)
    name = _name(source)
    train = _items(source, tokenizer, path, text_field, rows, test=False)
    test = _items(source, tokenizer, path, text_field, rows, test=True) if name in TASKS else None
    if any(isinstance(item, str) for item in train):
        every = {"tokens": tokens, "held_out_every": held_out_every}
        return corpus_of_texts(train, tokenizer, name, test, f"{name} (test)", **every)  # type: ignore[arg-type]
    end = not any(
        isinstance(item, Question) for item in train
    )  # a choice is scored against others, not ended
    used, digest, counts = _encoded(train, name, tokenizer, tokens, end)
    if test is not None:
        held_out, held_out_digest, more = _encoded(test, f"{name} (test)", tokenizer, tokens, end)
        counts = {key: counts[key] + more[key] for key in counts}
    elif len(used) < 2:
        raise ValueError(
            f"{name} gives 1 row with a target, expected at least 2 (one to train on, one held out)"
        )
    else:
        marks = hold_out(len(used), held_out_every).tolist()
        held_out = [row for row, mark in zip(used, marks, strict=True) if mark]
        used, held_out_digest = [row for row, mark in zip(used, marks, strict=True) if not mark], digest
    counts |= {"train_windows": len(used), "held_out_windows": len(held_out)}
    pad = pad_id(tokenizer)
    return Corpus(padded(used, pad), padded(held_out, pad), digest, held_out_digest, counts, name)


def load_items(
    source: str | Path,
    tokenizer: Any,
    *,
    path: str | Path | None = None,
    text_field: str = "text",
    rows: int | None = None,
) -> list[Item]:
    """What `evaluate` scores: a named task's test rows, or all rows of a file or hub data set; see `load_task`.

    Raises:
        as `load_task`, where it concerns reading.
    """
    return _items(source, tokenizer, path, text_field, rows, test=_name(source) in TASKS)


def _encoded(
    items: Sequence[Item], name: str, tokenizer: Any, tokens: int, end: bool
) -> tuple[list[Encoded], str, dict[str, int]]:
    passages = [item.passage() if isinstance(item, Question) else item for item in items]
    there = [passage for passage in passages if isinstance(passage, Passage) and not passage.empty]
    if not there:
        raise ValueError(f"{name} holds no text ({len(items)} rows, all empty)")
    rows = encode(there, tokenizer, tokens, end)
    pairs = [(passage, row) for passage, row in zip(there, rows, strict=True) if row.target_count]
    if not pairs:
        raise ValueError(
            f"{name}: none of its {len(there)} rows has a target within {tokens} tokens "
            "(empty completions, no assistant turn, or cut off); nothing could be learned"
        )
    used = [row for _, row in pairs]
    plain = sum(not passage.templated for passage, _ in pairs)
    eos = tokenizer.eos_token_id is not None and end
    counts = {
        "rows_used": len(used),
        "rows_dropped": len(items) - len(there),
        "rows_masked": len(there) - len(used),
        "tokens_dropped": sum(row.tokens_cut for row in used),
        "prompts_cut": sum(row.prompt_cut for row in used),
        "completions_cut": sum(row.completion_cut for row in used),
        "bos_added": plain * len(bos_of(tokenizer)),
        "eos_added": plain * eos,
        "target_tokens": sum(row.target_count for row in used),
    }
    whole = sum(len(row.ids) + row.tokens_cut for row in used)
    counts["text_tokens"] = whole - counts["bos_added"] - counts["eos_added"]
    text = ROW_SEPARATOR.join(passage.text for passage, _ in pairs)
    return used, hashlib.sha256(text.encode()).hexdigest(), counts


def _items(
    source: str | Path, tokenizer: Any, path: str | Path | None, text_field: str, rows: int | None, test: bool
) -> list[Item]:
    name = str(source)
    if name in TASKS:
        return _task_items(name, path, rows, test)
    if name == "pydoc":
        return list(itertools.islice(read_texts(name), rows))
    file = Path(source).expanduser()
    if file.suffix == ".jsonl" and file.is_file():
        return _own_items(itertools.islice(jsonl_rows(file), rows), tokenizer, text_field)
    if file.is_file():
        return list(read_texts(file))
    hub = HubName.parse(name)
    if hub is not None and not name.endswith((".jsonl", ".txt", ".json")):
        return _own_items(hub_rows(hub, rows), tokenizer, text_field)
    raise ValueError(_unknown(name))


def _task_items(name: str, path: str | Path | None, rows: int | None, test: bool) -> list[Item]:
    task = TASKS[name]
    file = task_file(task.folder, task.test_files if test else task.train_files, path)
    if task.read is None and file is not None:
        return list(read_texts(file))
    found: Iterator[Row]
    if file is not None:
        found = itertools.islice(jsonl_rows(file), rows)
    else:
        try:
            found = iter(list(hub_rows(task.test_hub if test else task.train_hub, rows)))
        except (ValueError, ModuleNotFoundError) as error:
            message = f"{error}; or name a folder with {task.folder}/{task.test_files[0]} (path, or {DATA_VARIABLE})"
            raise type(error)(message) from None
    read = task.read or (lambda row, where: string_field(row, "text", where))
    return [read(row, where) for where, row in found if row is not None]


def _own_items(rows: Iterator[Row], tokenizer: Any, text_field: str) -> list[Item]:
    items: list[Item] = []
    blank: list[int] = []
    kind = first = None
    for where, row in rows:
        if row is None:
            blank.append(len(items))
            items.append("")
            continue
        found = formats.kind_of(row, where, text_field)
        kind, first = (found, where) if kind is None else (kind, first)
        if found != kind:
            raise ValueError(
                f"{where}: a row of {found}, but {first} is one of {kind}; expected one kind in a file"
            )
        if kind == "text":
            items.append(string_field(row, text_field, where))
        elif kind == "messages":
            items.append(formats.conversation(row, where, tokenizer))
        else:
            items.append(formats.completion(row, where))
    if kind != "text" and kind is not None:
        for index in blank:
            items[index] = Passage("", ())
    return items


def _name(source: str | Path) -> str:
    # The file's name and not its path: records of a run hold no paths.
    text = str(source)
    return (
        text if text in TASKS or text == "pydoc" or not Path(text).expanduser().is_file() else Path(text).name
    )


def _unknown(name: str) -> str:
    known = ["pydoc", *TASKS]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; nearest task is {near[0]!r}" if near else ""
    return f"{name!r} is no task ({', '.join(known)}), no file and no hub name (owner/name[:config][@split]){hint}"
