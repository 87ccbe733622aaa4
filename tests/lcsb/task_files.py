"""Small data files and tokenizers of the task tests. Use as `import task_files`."""

from __future__ import annotations

import json
from pathlib import Path

import tiny

CHAT = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<eos>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

# Normal texts, one empty, one of spaces, one of one token, one longer than a window of 48.
TEXTS = (
    "a short row", "five.", "another row of some more words", "", "   ", "x",
    "a row that is a good deal longer than the window that it has to be read through, twice over", "the last one",
)  # fmt: skip


def write_jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def arc_row(question, texts, labels, answer):
    return {"id": question, "question": question, "choices": {"text": list(texts), "label": list(labels)},
            "answerKey": answer}  # fmt: skip


def arc_rows():
    """Questions with labels A-D, A-E and 1-4."""
    rows = []
    for n in range(4):
        rows.append(
            arc_row(f"What is {n} and one?", ["two", f"{n + 1}", "no number", "4 or 5"], "ABCD", "ABCD"[n])
        )
        rows.append(
            arc_row(f"Which colour is {n}?", ["red", "blue", "pale green", "x"], "1234", "1234"[-1 - n])
        )
        rows.append(
            arc_row(f"Pick the {n}th.", ["one", "of", "five", "many", "choices"], "ABCDE", "ABCDE"[n + 1])
        )
    return rows


def gsm8k_rows(n=6):
    return [
        {
            "question": f"Tom has {i} apples and buys 3. How many?",
            "answer": f"{i}+3=<<{i}+3={i + 3}>>{i + 3}\n#### {i + 3}",
        }
        for i in range(n)
    ]


def write_tasks(folder: Path) -> Path:
    """A folder with small files of every named task."""
    for name in ("arc-challenge", "gsm8k", "wikitext-2"):
        (folder / name).mkdir(parents=True)
    write_jsonl(folder / "arc-challenge/train.jsonl", arc_rows())
    write_jsonl(folder / "arc-challenge/test.jsonl", arc_rows()[:5])
    write_jsonl(folder / "gsm8k/train.jsonl", gsm8k_rows())
    write_jsonl(folder / "gsm8k/test.jsonl", gsm8k_rows(3))
    (folder / "wikitext-2/valid.txt").write_text(" = Title = \n\n A line of text .\n" * 20, encoding="utf-8")
    (folder / "wikitext-2/test.txt").write_text(" = Other = \n\n Another line here .\n" * 9, encoding="utf-8")
    return folder


def chat_tokenizer():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def merging_tokenizer():
    """Byte-pair tokens: letters, and "ab" wherever a is followed by b."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz .")}
    core = Tokenizer(
        models.BPE(vocab={**letters, "ab": 28, "<unk>": 29}, merges=[("a", "b")], unk_token="<unk>")
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
