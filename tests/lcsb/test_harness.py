"""Our figures against lm-evaluation-harness on one task file: accuracies equal, log-likelihoods to 1e-5."""

from __future__ import annotations

import importlib
import math
import random
import sys

import pytest
import task_files
import tiny
import torch

from lcsb.evaluate import evaluate, token_losses
from lcsb.harness import evaluate_by_harness
from lcsb.tasks.encoding import encode
from lcsb.tasks.formats import Question
from lcsb.tasks.load import load_items


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return task_files.write_tasks(tmp_path / "data")


@pytest.fixture(scope="module")
def model():
    return tiny.with_lora(tiny.llama(max_position_embeddings=256)).eval()


def log_likelihoods(model, tokenizer, items):
    """Ours, item by item: every choice of a question, or the passage's targets."""
    found = []
    for item in items:
        passages = (
            [item.passage(i) for i in range(len(item.choices))] if isinstance(item, Question) else [item]
        )
        found.append([-loss.total for loss in token_losses(model, encode(passages, tokenizer, 256))])
    return found


@pytest.mark.parametrize(
    "task, add_bos", [("arc-challenge", False), ("arc-challenge-letter", True), ("gsm8k", True)]
)
def test_the_harness_agrees(task, add_bos, model, data):
    pytest.importorskip("lm_eval")
    tokenizer = tiny.tokenizer(add_bos=add_bos)
    (data / "arc-challenge/train.jsonl").replace(data / "arc-challenge/test.jsonl")  # all 12 questions
    importlib.import_module("lm_eval.models.huggingface")  # some of what it imports draws at import
    state = random.getstate(), torch.get_rng_state()
    theirs = evaluate_by_harness(model, tokenizer, task, path=data)
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])
    items = load_items(task, tokenizer, path=data)
    ours = evaluate(model, tokenizer, items, task, window=256)
    lists = log_likelihoods(model, tokenizer, items)
    assert [len(row) for row in theirs.log_likelihoods] == [len(row) for row in lists]
    for mine, their in zip(lists, theirs.log_likelihoods, strict=True):
        assert sum(mine) == pytest.approx(sum(their), rel=1e-5)
        assert mine == pytest.approx(list(their), rel=1e-5)
    total = math.fsum(map(sum, lists))
    assert math.fsum(map(sum, theirs.log_likelihoods)) == pytest.approx(total, rel=1e-5)
    if task == "gsm8k":
        assert -ours.metrics["loss"] * ours.counts["tokens_scored"] == pytest.approx(total, rel=1e-5)
        assert theirs.metrics["log_likelihood"] == pytest.approx(total, rel=1e-5)
        return
    shared = {name for name in ours.metrics if name.startswith("accuracy")}
    assert shared == {name for name in theirs.metrics if name.startswith("accuracy")}
    assert {name: theirs.metrics[name] for name in shared} == pytest.approx(
        {n: ours.metrics[n] for n in shared}
    )
    right = -ours.metrics["right_answer_loss"] * ours.counts["right_answer_tokens"]
    assert theirs.metrics["log_likelihood"] == pytest.approx(right, rel=1e-5)


def test_completions_and_limit(model, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    rows = [{"prompt": f"say {n}:", "completion": f" {n}{n}" * (n + 1)} for n in range(5)]
    path = task_files.write_jsonl(tmp_path / "c.jsonl", rows)
    theirs = evaluate_by_harness(model, tiny.tokenizer(), str(path), limit=3)
    ours = evaluate(model, tiny.tokenizer(), load_items(path, tiny.tokenizer()), "c", window=256, limit=3)
    assert theirs.counts["items"] == 3
    total = -ours.metrics["loss"] * ours.counts["tokens_scored"]
    assert theirs.metrics["log_likelihood"] == pytest.approx(total, rel=1e-5)


def test_refusals(model, tmp_path, data):
    pytest.importorskip("lm_eval")
    for task, message in (
        ("wikitext-2", "wikitext-2: the harness reads texts in other windows"),
        ("gsm9k", "gsm9k: expected arc-challenge, arc-challenge-letter, gsm8k, or a .jsonl file"),
        (
            str(task_files.write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])),
            "rows of text, expected prompt and",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_by_harness(model, tiny.tokenizer(), task, path=data)


def test_without_the_harness_the_install_line_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lcsb\[eval\]'"):
        evaluate_by_harness(model, tiny.tokenizer(), "gsm8k")
