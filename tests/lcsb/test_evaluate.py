"""Scores: invariant to batch and padding, each token once, equal to float64 by hand, finite in the report."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import task_files
import tiny
import tiny_run
import torch
from task_files import TEXTS, write_jsonl
from torch import nn

import lcsb.cli
from lcsb.adapter_files import save_adapter
from lcsb.evaluate import evaluate, final_number, perplexity, token_losses
from lcsb.tasks import formats
from lcsb.tasks.encoding import Encoded, encode, rolling
from lcsb.tasks.formats import Passage
from lcsb.tasks.load import load_items

# One token a character, so that a text's tokens are written down by hand.
VOCABULARY = tiny.tokenizer().get_vocab()


def log_probabilities(model, ids):
    """log p of each next token, [tokens, vocabulary], from one unpadded float64 pass."""
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([list(ids)])).logits[0].double(), dim=-1)


def loss_by_hand(model, row):
    rows = log_probabilities(model, row.ids)
    return -sum(float(rows[i - 1, row.ids[i]]) for i in range(len(row.ids)) if row.targets[i])


class Bigram(nn.Module):
    """A model whose logits depend on the last token alone: figures can be worked out on paper."""

    def __init__(self, logits):
        super().__init__()
        self.table = nn.Parameter(logits)

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        return SimpleNamespace(logits=self.table[input_ids])


# -- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt_neox"])
def test_sums_and_counts_do_not_depend_on_batch_padding_or_order(name):
    """U35, U32, U23: TEXTS at batch 1, 2 and 8, padded left and right, shuffled; against unpadded float64 rows."""
    ids = [[VOCABULARY[c] for c in text] for text in TEXTS]
    rows = [row for text in ids for row in rolling(text, [], 48, 24)]
    exact = tiny.with_lora(tiny.BUILDERS[name](dtype=torch.float64)).eval()
    wanted = [loss_by_hand(exact, row) for row in rows]
    model = tiny.with_lora(tiny.BUILDERS[name](), dropout=0.5).train()  # dropout must be off
    model.load_state_dict(exact.state_dict())
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    for batch_size in (1, 2, 8):
        for side in ("right", "left"):
            for chosen in (range(len(rows)), order):
                found = token_losses(
                    model, [rows[i] for i in chosen], batch_size=batch_size, padding_side=side, pad=5
                )
                for index, loss in zip(chosen, found, strict=True):
                    assert loss.tokens == rows[index].target_count
                    assert loss.total == pytest.approx(wanted[index], rel=1e-5)
    assert model.training  # put back
    assert sum(row.target_count for row in rows) == sum(max(0, len(text) - 1) for text in TEXTS)


def test_only_targets_count():
    model = tiny.llama(dtype=torch.float64)
    ids = tuple(range(3, 40))
    rows = [
        Encoded(ids, tuple(i in places for i in range(len(ids))))
        for places in ({5}, {1, 30}, {36}, {2, 3, 20})
    ]
    together = token_losses(model, rows, batch_size=4)
    assert [row.tokens for row in together] == [1, 2, 1, 3]
    for row, loss in zip(rows, together, strict=True):
        assert loss.total == pytest.approx(loss_by_hand(model, row), rel=1e-6)
    with pytest.raises(ValueError, match="batch_size=0, expected at least 1"):
        token_losses(model, rows, batch_size=0)


def test_choices_of_one_token_share_a_pass(monkeypatch):
    """Rows that differ in the last token alone cost one forward pass, and score as they do one by one."""
    model = tiny.llama()
    rows = [Encoded((3, 4, 5, last), (False, False, False, True)) for last in (6, 7, 8)]
    rows += [
        Encoded((3, 4, 5, 6), (False, True, False, True)),
        Encoded((9, 6), (False, False)),
        Encoded((9, 6), (False, True)),
    ]
    seen = []
    real = model.forward
    model.forward = lambda input_ids, attention_mask, position_ids, logits_to_keep, use_cache: (
        seen.append(len(input_ids))
        or real(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            logits_to_keep=logits_to_keep,
            use_cache=use_cache,
        )
    )
    together = token_losses(model, rows, batch_size=8)
    assert seen == [2]
    assert [row.tokens for row in together] == [1, 1, 1, 2, 0, 1] and together[4].total == 0.0
    for row, loss in zip(rows, together, strict=True):
        (alone,) = token_losses(model, [row])
        assert loss.tokens == alone.tokens and loss.total == pytest.approx(alone.total, rel=1e-5)


def test_the_model_is_put_back_after_an_error():
    model = tiny.llama().train()
    with pytest.raises(IndexError):
        token_losses(model, [Encoded((3, 5000), (False, True))])
    assert model.training


# -- texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("window, stride", [(16, 8), (16, 15), (16, 1), (64, 32)])
def test_perplexity_is_that_of_a_plain_loop(window, stride, add_bos):
    """U35: one token after the other, each once, with the context that its window gives it."""
    tokenizer, model = tiny.tokenizer(add_bos=add_bos), tiny.llama(dtype=torch.float64).eval()
    text = "the model reads this text, some of it more than once."
    result = evaluate(model, tokenizer, [text], "t", window=window, stride=stride, batch_size=3)
    bos = [1] if add_bos else []
    ids, total, count = [VOCABULARY[c] for c in text], 0.0, 0
    room = window - len(bos)
    for i in range(0 if add_bos else 1, len(ids)):
        # Token i is scored in the first window that reaches it: the windows end at room, room + stride, ...
        steps = max(0, -(-(i + 1 - room) // stride))
        stop = min(len(ids), room + steps * stride)
        rows = log_probabilities(model, bos + ids[max(0, stop - room) : i])
        total -= float(rows[-1, ids[i]])
        count += 1
    name = f"window{window}_stride{stride}"
    assert set(result.metrics) == {f"loss_{name}", f"perplexity_{name}"}
    assert result.counts["tokens_scored"] == count == len(text) - (not add_bos)
    assert result.metrics[f"loss_{name}"] == pytest.approx(total / count, rel=1e-6)
    assert result.metrics[f"perplexity_{name}"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_texts_used_and_dropped_are_counted():
    """U32: the empty, the blank and the one-token text have nothing to predict."""
    result = evaluate(tiny.llama(), tiny.tokenizer(), list(TEXTS), "texts", window=48)
    assert result.counts["rows_used"] == 5 and result.counts["rows_dropped"] == 3
    assert result.counts["tokens_scored"] == sum(len(text) - 1 for text in TEXTS if len(text.strip()) > 1)
    assert set(result.metrics) == {"loss_window48_stride24", "perplexity_window48_stride24"}
    with_bos = evaluate(tiny.llama(), tiny.tokenizer(add_bos=True), list(TEXTS), "texts", window=48)
    assert with_bos.counts["rows_used"] == 6  # after BOS one token can be predicted
    assert with_bos.counts["tokens_scored"] == sum(len(text) for text in TEXTS if text.strip())
    limited = evaluate(tiny.llama(), tiny.tokenizer(), list(TEXTS), "texts", window=48, limit=2)
    assert (
        limited.counts["windows"] == 2
        and limited.counts["tokens_scored"] == len(TEXTS[0]) + len(TEXTS[1]) - 2
    )


@pytest.mark.parametrize(
    "items, arguments, message",
    [
        ([], {}, r"t holds no text \(0 rows\)"),
        (["", "  "], {}, r"t holds no text \(2 rows, all empty\)"),
        (["x", "y"], {}, r"t: no row holds two tokens, so nothing can be predicted \(2 rows\)"),
        ([Passage("", ())], {}, r"t holds no text \(1 rows, all empty\)"),
        ([Passage.of("ask", "")], {}, "t: none of its 1 rows has a target within 64 tokens"),
        (["some text"], {"window": 1}, "window=1, expected at least 2 tokens"),
        (["some text"], {"window": 8, "stride": 8}, "stride=8 with window=8"),
        (["some text"], {"limit": 0}, "limit=0, expected at least 1"),
        (
            ["some text"],
            {"window": 129},
            "window=129, expected at most 128, the longest that the model takes",
        ),
    ],
)
def test_nothing_to_score_is_an_error(items, arguments, message):
    """U30, U32: never a loss of 0."""
    with pytest.raises(ValueError, match=message):
        evaluate(tiny.llama(), tiny.tokenizer(), items, "t", **{"window": 64, **arguments})


def test_a_large_loss_does_not_overflow_the_report():
    """U35: exp of a large loss is left out; the loss is there, and the report is strict JSON."""
    logits = torch.zeros(97, 97)
    logits[:, VOCABULARY["a"]] = 2000.0
    result = evaluate(Bigram(logits), tiny.tokenizer(), ["bcb"], "t", window=8)
    assert result.metrics["loss_window8_stride4"] == pytest.approx(2000)
    assert result.metrics["perplexity_window8_stride4"] is None
    broken = evaluate(Bigram(logits * math.nan), tiny.tokenizer(), ["bcb"], "t", window=8)
    assert set(broken.metrics.values()) == {None}
    json.dumps([result.metrics, broken.metrics], allow_nan=False)
    assert [perplexity(x) for x in (0.0, math.inf, math.nan)] == [1.0, None, None]
    assert perplexity(math.log(50)) == pytest.approx(50) and perplexity(700.0) is None


# -- passages and questions --------------------------------------------------------------------------------------


def test_the_loss_of_completions_is_over_their_tokens(tmp_path):
    rows = [{"prompt": f"{'p' * n} ", "completion": "c" * (n + 1)} for n in range(6)] + [
        {"prompt": "a", "completion": ""}
    ]
    tokenizer, model = tiny.tokenizer(), tiny.llama(dtype=torch.float64).eval()
    items = load_items(write_jsonl(tmp_path / "c.jsonl", rows), tokenizer)
    result = evaluate(model, tokenizer, items, "c", window=64)
    rows = encode(items[:-1], tokenizer, None)
    tokens = sum(n + 1 for n in range(6))
    assert result.counts["tokens_scored"] == tokens
    assert (result.counts["rows_used"], result.counts["rows_masked"]) == (6, 1)
    assert result.metrics["loss"] == pytest.approx(
        sum(loss_by_hand(model, row) for row in rows) / tokens, rel=1e-6
    )
    assert result.metrics["perplexity"] == pytest.approx(math.exp(result.metrics["loss"]))
    short = evaluate(model, tokenizer, items, "c", window=6)
    assert short.counts["prompts_cut"] > 0 and short.counts["completions_cut"] > 0


@pytest.mark.parametrize("read", [formats.arc_text, formats.arc_letter])
def test_accuracy_standard_error_and_answer_loss(read):
    tokenizer, model = tiny.tokenizer(), tiny.llama(dtype=torch.float64).eval()
    questions = [read(row, "here") for row in task_files.arc_rows()]
    result = evaluate(model, tokenizer, questions, "arc", window=128, batch_size=5)
    hits, by_length, right, tokens = [], [], 0.0, 0
    for question in questions:
        scores = []
        for choice in question.choices:
            ids = [VOCABULARY.get(c, 3) for c in question.prompt + choice]
            start = len(question.prompt)
            row = Encoded(tuple(ids), tuple(i >= start for i in range(len(ids))))
            scores.append(-loss_by_hand(model, row))
        hits.append(int(np.argmax(scores)) == question.right)
        lengths = [len(choice.strip()) for choice in question.choices]
        by_length.append(int(np.argmax(np.array(scores) / lengths)) == question.right)
        right -= scores[question.right]
        tokens += len(question.choices[question.right])
    assert 0 < sum(hits) < len(hits)  # so that the figures below could be wrong
    assert result.metrics["accuracy"] == np.mean(hits)
    error = np.std(hits, ddof=1) / math.sqrt(len(hits))
    assert result.metrics["accuracy_standard_error"] == pytest.approx(error)
    assert result.metrics["right_answer_loss"] == pytest.approx(right / tokens, rel=1e-6)
    assert result.counts["right_answer_tokens"] == tokens and result.counts["questions"] == 12
    if read is formats.arc_text:
        assert result.metrics["accuracy_per_character"] == np.mean(by_length)
    else:
        assert "accuracy_per_character" not in result.metrics  # all choices are of one length
    one = evaluate(model, tokenizer, questions, "arc", window=128, limit=1)
    assert one.counts["questions"] == 1 and one.metrics["accuracy_standard_error"] is None


def test_the_right_letter_wins():
    """A model that always says B: right where B is, for letters and for figures alike."""
    logits = torch.zeros(97, 97)
    logits[:, VOCABULARY["B"]] = logits[:, VOCABULARY["2"]] = 5.0
    questions = [formats.arc_letter(row, "here") for row in task_files.arc_rows()]
    expected = [question.choices[question.right].strip() in "B2" for question in questions]
    result = evaluate(Bigram(logits), tiny.tokenizer(), questions, "arc", window=128)
    assert 0 < sum(expected) < 12 and result.metrics["accuracy"] == sum(expected) / 12
    logits[VOCABULARY[" "]] = math.nan
    broken = evaluate(Bigram(logits), tiny.tokenizer(), questions[:4], "arc", window=128)
    assert broken.metrics["right_answer_loss"] is None


def reading_tokenizer():
    """The tiny tokenizer, decoding to text without spaces between its tokens."""
    from tokenizers import decoders

    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize(
    "text, number",
    [
        ("so 3.\n#### 42", "42.0"),
        ("#### $1,234", "1234.0"),
        ("#### -7.50 dollars", "-7.5"),
        ("####12.", "12.0"),
        ("#### 3\n\nQuestion: next?\nAnswer: #### 5", "3.0"),
        ("Question: #### 3", None),
        ("the answer is 42", None),
        ("#### none", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


def test_exact_match_generates_greedily_from_the_prompt_alone(tmp_path, monkeypatch):
    folder = task_files.write_tasks(tmp_path)
    tokenizer, model = reading_tokenizer(), tiny.llama(max_position_embeddings=1024)
    items = load_items("gsm8k", tokenizer, path=folder)
    asked = []

    def generate(input_ids, attention_mask, max_new_tokens, do_sample, **settings):
        assert not do_sample and attention_mask.all() and not model.training
        asked.append("".join(tokenizer.convert_ids_to_tokens(input_ids[0].tolist())))
        said = " 3 apples\n#### 3Question:" if len(asked) != 2 else " I do not know"
        return torch.cat([input_ids, torch.tensor([[VOCABULARY[c] for c in said]])], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    result = evaluate(model, tokenizer, items, "gsm8k", exact_match=True)
    assert asked == [item.text[: item.targets[0][0]] for item in items]
    assert result.metrics["exact_match"] == pytest.approx(1 / 3)  # only the first one's answer is 3
    assert result.counts["generated"] == 3
    assert "exact_match" not in evaluate(model, tokenizer, items, "gsm8k").metrics


def test_exact_match_runs_with_a_real_generate(tmp_path):
    """A model trained to the answer by heart gives it, and stops at the next question."""
    tokenizer, model = reading_tokenizer(), tiny.llama(max_position_embeddings=1024)
    items = load_items("gsm8k", tokenizer, path=task_files.write_tasks(tmp_path))[:1]
    result = evaluate(model, tokenizer, items, "gsm8k", exact_match=True)
    assert result.metrics["exact_match"] == 0.0 and model.training
    (row,) = encode([Passage(items[0].text + "\nQuestion: ", items[0].targets)], tokenizer, None)
    ids = torch.tensor([row.ids])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(60):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    lengths = []
    real = model.generate
    model.generate = lambda **settings: lengths.append(real(**settings)) or lengths[-1]
    result = evaluate(model, tokenizer, items, "gsm8k", exact_match=True)
    assert result.metrics["exact_match"] == 1.0
    assert tokenizer.decode(lengths[0][0]).count("Question:") == 2  # its own, and the one that stopped it
    assert len(lengths[0][0]) == len(row.ids) - 1


# -- command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_cache):
    """A saved tiny model with an adapter for it, an adapter for a wider one, and task files."""
    place = tiny_run.write_model(tmp_path_factory.mktemp("evaluate"))
    base = tiny.llama()
    base.name_or_path = str(place / "model")
    save_adapter(tiny.with_lora(base), place / "adapter")
    other = tiny.llama(hidden_size=32)
    other.name_or_path = str(place / "model")
    save_adapter(tiny.with_lora(other), place / "other")
    task_files.write_tasks(place / "data")
    return place


def run_command(monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr) of `lcsb evaluate`."""
    monkeypatch.setattr(sys, "argv", ["lcsb", "evaluate", "--quantization", "none", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        lcsb.cli.main()
    captured = capsys.readouterr()
    return exit_.value.code or 0, captured.out, captured.err


def test_the_command_scores_an_adapter(folder, monkeypatch, capsys):
    """The adapter's own base is found, and the figures are those of the model in memory."""
    arguments = (
        "--adapter",
        folder / "adapter",
        "--task",
        "gsm8k",
        "--path",
        folder / "data",
        "--window",
        96,
    )
    code, out, _ = run_command(monkeypatch, capsys, *arguments, "--json")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    tokenizer = tiny.tokenizer()
    model = tiny.with_lora(tiny.llama())
    wanted = evaluate(
        model, tokenizer, load_items("gsm8k", tokenizer, path=folder / "data"), "gsm8k", window=96
    )
    assert result["metrics"]["loss"] == pytest.approx(wanted.metrics["loss"], rel=1e-6)
    assert result["counts"] == wanted.counts
    base = ("--model", folder / "model", "--task", "gsm8k", "--path", folder / "data", "--window", 96)
    code, out, _ = run_command(monkeypatch, capsys, *base, "--json")
    assert abs(json.loads(out.splitlines()[-1])["metrics"]["loss"] - wanted.metrics["loss"]) > 1e-3
    code, out, _ = run_command(monkeypatch, capsys, *base)
    assert code == 0 and "perplexity" in out and "tokens scored" in out


def test_the_command_names_window_and_stride(folder, monkeypatch, capsys):
    arguments = ("--model", folder / "model", "--task", "wikitext-2", "--path", folder / "data", "--limit", 3)
    code, out, _ = run_command(monkeypatch, capsys, *arguments, "--window", 32, "--stride", 8, "--json")
    result = json.loads(out.splitlines()[-1])
    assert code == 0 and result["task"] == "wikitext-2"
    assert set(result["metrics"]) == {"loss_window32_stride8", "perplexity_window32_stride8"}
    assert result["counts"]["windows"] == 3 and result["counts"]["tokens_scored"] == 31 + 8 + 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--adapter", "{other}"], r"other: adapter of another model; .* has shape"),
        (
            ["--adapter", "{data}"],
            r"data: no adapter_config.json in it, expected the folder of a PEFT adapter",
        ),
        (["--task", "gsm9k"], r"'gsm9k' is no task .*; nearest task is 'gsm8k'"),
        (["--quantization", "nf5"], r"quantization is 'nf5', expected nf4, fp4, int8 or none"),
        (["--size", "huge"], r"size is 'huge', expected one of quick, standard, full"),
        (["--limit", "0"], r"limit=0, expected at least 1"),
        (["--window", "500"], r"window=500, expected at most 128"),
        (["--task", "{bad}"], r"bad.jsonl:2: not JSON"),
        (["--task", "{empty}"], r"empty.jsonl holds no text"),
    ],
)
def test_the_command_refuses_in_one_line(folder, monkeypatch, capsys, arguments, message):
    import re

    (folder / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt"\n', encoding="utf-8")
    (folder / "empty.jsonl").write_text('{"text": " "}\n', encoding="utf-8")
    places = {name: folder / name for name in ("other", "data")}
    places |= {name: folder / f"{name}.jsonl" for name in ("bad", "empty")}
    given = {"--task": "gsm8k", "--path": folder / "data", "--window": "96"}
    if "--adapter" not in arguments:
        given["--model"] = folder / "model"
    given |= dict(zip(arguments[::2], (text.format(**places) for text in arguments[1::2]), strict=True))
    code, out, err = run_command(monkeypatch, capsys, *(part for pair in given.items() for part in pair))
    assert code == 2 and out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("lcsb: ") and re.search(message, last), err
