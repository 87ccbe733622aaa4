"""Windows, held-out split, order and errors of corpora."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import numpy as np
import pytest
import tiny
import torch

from lcsb.data import load_corpus

TEXT = "".join(f"Line {n} of a text that says very little.\n" for n in range(120))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def decode(window):
    vocabulary = {index: token for token, index in tiny.tokenizer().get_vocab().items()}
    return "".join(vocabulary[int(token)] for token in window)


def test_windows_are_the_text(text_file):
    corpus = load_corpus(text_file, tiny.tokenizer(), tokens=32, held_out_every=5)
    every = torch.empty(len(corpus.train) + len(corpus.held_out), 32, dtype=torch.int64)
    held = torch.arange(len(every)) % 5 == 4
    every[held], every[~held] = corpus.held_out, corpus.train
    assert "".join(map(decode, every)) == TEXT[: every.numel()]
    counts = corpus.counts
    assert counts["text_tokens"] == len(TEXT)  # one token a character
    assert counts["tokens_dropped"] == len(TEXT) - every.numel() < 32
    assert counts["train_windows"] * 32 == corpus.train.numel()
    assert (counts["rows_used"], counts["rows_dropped"], counts["bos_added"]) == (1, 0, 0)
    assert corpus.sha256 == corpus.held_out_sha256 == hashlib.sha256(text_file.read_bytes()).hexdigest()
    assert corpus.train.dtype == torch.int64 and corpus.source == "corpus.txt"
    assert str(counts["text_tokens"]) in corpus.describe()


def test_each_window_begins_with_bos_where_the_tokenizer_adds_one(text_file):
    corpus = load_corpus(text_file, tiny.tokenizer(add_bos=True), tokens=32)
    both = torch.cat([corpus.train, corpus.held_out])
    assert (both[:, 0] == 1).all() and (both[:, 1:] != 1).all()
    counts = corpus.counts
    assert counts["bos_added"] == len(both)
    # Every token of the text is in one window or counted as dropped.
    assert counts["text_tokens"] + counts["bos_added"] == both.numel() + counts["tokens_dropped"]
    assert decode(corpus.train[0][1:]) == TEXT[:31]


def test_special_token_strings_are_split(tmp_path):
    path = tmp_path / "special.txt"
    path.write_text("a <eos> b <bos> " * 20, encoding="utf-8")
    corpus = load_corpus(path, tiny.tokenizer(), tokens=16)
    both = torch.cat([corpus.train, corpus.held_out])
    assert corpus.counts["special_tokens"] == 0 and (both > 3).all()
    assert decode(corpus.train[0]) == "a <eos> b <bos> "


def test_unknown_characters_are_counted(tmp_path):
    path = tmp_path / "unknown.txt"
    path.write_text("é" * 3 + "a" * 61, encoding="utf-8")
    assert load_corpus(path, tiny.tokenizer(), tokens=16).counts["special_tokens"] == 3


def test_jsonl_rows_are_joined_and_empty_ones_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = ["first row", "", "   \n", "x", "a line\u2028separator in a row", "the last row " * 5]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    lines.insert(2, "")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    corpus = load_corpus(path, tiny.tokenizer(), tokens=8, held_out_every=100)
    assert (corpus.counts["rows_used"], corpus.counts["rows_dropped"]) == (4, 3)
    joined = "first row\n\nx\n\na line\u2028separator in a row\n\n" + "the last row " * 5
    assert corpus.sha256 == hashlib.sha256(joined.encode()).hexdigest()
    assert corpus.counts["text_tokens"] == len(joined)
    # Fewer windows than held_out_every: the last one is held out.
    assert len(corpus.held_out) == 1


def test_other_field_and_held_out_source(tmp_path, text_file):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "why " * 40}), encoding="utf-8")
    corpus = load_corpus(text_file, tiny.tokenizer(), tokens=16, text_field="question", held_out_source=path)
    assert len(corpus.train) == len(TEXT) // 16 and len(corpus.held_out) == 10
    assert corpus.counts["text_tokens"] == len(TEXT) + 160
    assert corpus.sha256 != corpus.held_out_sha256 == hashlib.sha256(b"why " * 40).hexdigest()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"", "a.txt holds no text"),
        ("a.txt", b" \n\t ", "a.txt holds no text"),
        ("a.jsonl", b'{"text": ""}\n{"text": "  "}\n', "a.jsonl holds no text .2 rows, all empty"),
        ("a.jsonl", b"", "holds no text .0 rows"),
        ("a.txt", b"a short text", "a.txt holds 12 tokens, expected at least 16 for one window"),
        ("a.txt", b"a text of twenty let", "gives 1 window of 16 tokens, expected at least 2"),
        ("a.txt", b"good \xff bad", r"a.txt: not UTF-8: byte 0xff at offset 5"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl:2: not UTF-8: byte 0xff at offset 10"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'["text"]\n', "a.jsonl:1: list, expected an object with named fields"),
        (
            "a.jsonl",
            b'{"texts": "a", "id": 1}\n',
            "a.jsonl:1: no field 'text' among 'texts', 'id'; nearest is 'texts'",
        ),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl:1: field 'text' is int, expected a string"),
    ],
)
def test_errors_name_file_and_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_corpus(tmp_path / name, tiny.tokenizer(), tokens=16)
    assert "\n" not in str(error.value)


def test_bad_arguments(text_file, tmp_path):
    for arguments in ({"tokens": 1}, {"held_out_every": 1}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            load_corpus(text_file, tiny.tokenizer(), **arguments)
    with pytest.raises(ValueError, match=r"no file .*absent.txt; a corpus is 'pydoc'"):
        load_corpus(tmp_path / "absent.txt", tiny.tokenizer())


def test_order_is_a_function_of_seed_and_step(text_file):
    corpus = load_corpus(text_file, tiny.tokenizer(), tokens=64)
    n = len(corpus.train)
    order = corpus.train_order(3, 3 * n)
    for epoch in range(3):
        assert sorted(order[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))
    assert order[:n].tolist() != order[n : 2 * n].tolist()
    assert order.tolist() != corpus.train_order(4, 3 * n).tolist()
    # A batch may run over the end of an epoch, and needs nothing that came before it.
    size = 7
    for step in (0, 5, n // size, n // size + 1):
        expected = corpus.train[order[step * size : (step + 1) * size]]
        assert torch.equal(corpus.batch(3, step, size), expected)
    state = torch.get_rng_state()
    corpus.batch(3, 1, size)
    assert torch.equal(torch.get_rng_state(), state)


def test_order_is_the_documented_one(text_file):
    """Recorded runs are compared with later ones: the rule is part of the interface."""
    corpus = load_corpus(text_file, tiny.tokenizer(), tokens=64)
    n = len(corpus.train)
    expected = [np.random.default_rng([7, epoch]).permutation(n) for epoch in range(2)]
    assert corpus.train_order(7, 2 * n).tolist() == np.concatenate(expected).tolist()


def test_pydoc_is_the_default_corpus():
    corpus = load_corpus("pydoc", tiny.tokenizer(), tokens=128)
    from pydoc_data.topics import topics

    joined = "\n\n".join(topics[name] for name in sorted(topics))
    assert corpus.sha256 == hashlib.sha256(joined.encode()).hexdigest()
    assert corpus.counts["rows_used"] == len(topics) and corpus.counts["rows_dropped"] == 0
    assert corpus.counts["text_tokens"] == len(joined) > 300_000
    assert len(corpus.held_out) == (len(corpus.train) + len(corpus.held_out)) // 10
    held = Counter(map(tuple, corpus.held_out.tolist()))
    assert not held & Counter(map(tuple, corpus.train.tolist()))


def test_wikitext_and_gsm8k(data_folder):
    wiki = data_folder / "wikitext-2"
    corpus = load_corpus(wiki / "valid.txt", tiny.tokenizer(), tokens=512, held_out_source=wiki / "test.txt")
    lengths = [len((wiki / name).read_text(encoding="utf-8")) for name in ("valid.txt", "test.txt")]
    assert corpus.counts["text_tokens"] == sum(lengths)
    assert [len(corpus.train), len(corpus.held_out)] == [length // 512 for length in lengths]
    assert corpus.sha256 == hashlib.sha256((wiki / "valid.txt").read_bytes()).hexdigest()
    questions = load_corpus(data_folder / "gsm8k/test.jsonl", tiny.tokenizer(), text_field="question")
    assert questions.counts["rows_used"] == 1319
