"""Tasks: what is asked in a row, which tokens are targets, truncation, counts, order, and every message."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import numpy as np
import pytest
import task_files
import tiny
import tiny_run
import torch
from task_files import TEXTS, write_jsonl

from lcsb.data import IGNORED, Examples
from lcsb.prepare import held_out_loss, language_batch
from lcsb.tasks import formats
from lcsb.tasks.encoding import encode, padded, rolling
from lcsb.tasks.formats import Passage, Question
from lcsb.tasks.load import TASKS, load_items, load_task
from lcsb.tasks.sources import HubName, hub_rows
from lcsb.train import train_arm
from reports.records import read_metrics


def text_of(ids, tokenizer=None):
    vocabulary = {index: token for token, index in (tokenizer or tiny.tokenizer()).get_vocab().items()}
    return "".join(vocabulary[int(token)] for token in ids)


def target_text(row, tokenizer=None):
    return text_of([token for token, target in zip(row.ids, row.targets, strict=True) if target], tokenizer)


# -- formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["ABCD", "ABCDE", "1234"])
def test_arc_prompts(labels):
    texts = ["red", "blue", "green", "white", "black"][: len(labels)]
    row = task_files.arc_row(" Which colour? ", texts, labels, labels[2])
    assert formats.arc_text(row, "here") == Question(
        "Question: Which colour?\nAnswer:", tuple(f" {text}" for text in texts), 2
    )
    shown = "".join(f"{label}. {text}\n" for label, text in zip(labels, texts, strict=True))
    letter = formats.arc_letter(row, "here")
    assert letter == Question(f"Question: Which colour?\n{shown}Answer:", tuple(f" {c}" for c in labels), 2)
    assert letter.passage() == letter.passage(2) == Passage.of(letter.prompt, f" {labels[2]}")


def test_gsm8k_prompt():
    passage = formats.gsm8k({"question": "How many?\n", "answer": "1+1=<<1+1=2>>2\n#### 2"}, "here")
    assert passage.text == "Question: How many?\nAnswer: 1+1=<<1+1=2>>2\n#### 2"
    ((start, stop),) = passage.targets
    assert passage.text[start:stop] == " 1+1=<<1+1=2>>2\n#### 2"


def test_only_the_assistants_turns_are_targets():
    tokenizer = task_files.chat_tokenizer()
    turns = [
        ("system", "be kind"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "bye"),
        ("assistant", "so long"),
    ]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (encoded,) = encode([formats.conversation(row, "here", tokenizer)], tokenizer, None)
    assert target_text(encoded) == "hello<eos>\nso long<eos>\n"
    whole = "system: be kind<eos>\nuser: hi<eos>\nassistant: hello<eos>\nuser: bye<eos>\nassistant: so long<eos>\n"
    assert text_of(encoded.ids) == whole
    assert encoded.ids.count(2) == 5  # <eos> is the special token, not its letters
    # Too long: the conversation loses its end.
    (cut,) = encode([formats.conversation(row, "here", tokenizer)], tokenizer, 40)
    assert cut.ids == encoded.ids[:40] and cut.completion_cut and not cut.prompt_cut


# -- encoding ----------------------------------------------------------------------------------------------------


def test_prompt_and_completion_are_tokenised_together():
    tokenizer = task_files.merging_tokenizer()
    (row,) = encode([Passage.of("cab da", "b cab.")], tokenizer, None)
    assert text_of(row.ids, tokenizer) == "cab dab cab." and len(row.ids) == 9  # three times the token ab
    # The token over the boundary holds a target character: it is a target. Tokenised apart, it would not exist.
    assert target_text(row, tokenizer) == "ab cab."
    assert [target for target, token in zip(row.targets, row.ids, strict=True) if token == 28] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("add_bos", [False, True])
def test_bos_and_eos(add_bos):
    tokenizer = tiny.tokenizer(add_bos=add_bos)
    (plain,) = encode([Passage.of("ask:", " tell")], tokenizer, None)
    (ended,) = encode([Passage.of("ask:", " tell")], tokenizer, None, end=True)
    assert text_of(plain.ids) == "<bos>" * add_bos + "ask: tell" and target_text(plain) == " tell"
    assert text_of(ended.ids) == "<bos>" * add_bos + "ask: tell<eos>" and target_text(ended) == " tell<eos>"
    (special,) = encode([Passage.of("a <eos>", " <bos>")], tokenizer, None)
    assert special.ids.count(2) == 0 and target_text(special) == " <bos>"  # strings of a plain text are text


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize(
    "tokens, kept, targets, cuts",
    [
        # prompt of 10, completion of 6 characters; with BOS the window holds one more
        (16, "0123456789abcdef", "abcdef", (False, False)),
        (14, "23456789abcdef", "abcdef", (True, False)),
        (12, "456789abcdef", "abcdef", (True, False)),
        (10, "56789abcde", "abcde", (True, True)),
        (4, "89ab", "ab", (True, True)),
        (2, "9a", "a", (True, True)),
    ],
)
def test_truncation_rule(tokens, kept, targets, cuts, add_bos):
    passage = Passage.of("0123456789", "abcdef")
    if not add_bos:
        (row,) = encode([passage], tiny.tokenizer(), tokens)
        assert (text_of(row.ids), target_text(row)) == (kept, targets)
        assert (row.prompt_cut, row.completion_cut) == cuts and row.tokens_cut == 16 - tokens
        return
    (row,) = encode([passage], tiny.tokenizer(add_bos=True), tokens)
    assert len(row.ids) == tokens and row.ids[0] == 1 and row.tokens_cut == 17 - tokens
    # BOS counts with the prompt: together they keep at least half.
    wanted = max(min(tokens // 2, 11), tokens - 6)
    assert len(row.ids) - row.target_count == wanted
    assert "0123456789".endswith(text_of(row.ids[1:wanted])) and "abcdef".startswith(target_text(row))


def test_a_first_token_is_never_a_target():
    """U32: what has nothing before it cannot be predicted."""
    rows = encode(
        [Passage.of("", "ab"), Passage.of("", "a"), Passage.of("a", "")], tiny.tokenizer(), None, end=False
    )
    assert [row.target_count for row in rows] == [1, 0, 0]
    rows = encode([Passage.of("", "a"), Passage.of("a", "")], tiny.tokenizer(add_bos=True), None, end=True)
    assert [row.target_count for row in rows] == [2, 0]


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ValueError, match="gives no character offsets, expected a fast tokenizer"):
        encode([Passage.of("a", "b")], object(), None)


@pytest.mark.parametrize("bos", [(), (1,)])
@pytest.mark.parametrize("length", [1, 2, 5, 8, 9, 16, 37])
@pytest.mark.parametrize("window, stride", [(2, 1), (8, 1), (8, 4), (8, 7), (8, 5), (64, 32)])
def test_rolling_windows_score_each_token_once(bos, length, window, stride):
    """U32, U35: at every stride and length; the context before each window's first target is as long as promised."""
    ids = list(range(100, 100 + length))
    scored, lengths = [], []
    for row in rolling(ids, bos, window, stride):
        assert len(row.ids) <= window and row.ids[: len(bos)] == bos and not row.targets[0]
        body = row.ids[len(bos) :]
        assert list(body) == list(range(body[0], body[0] + len(body)))
        scored += [token for token, target in zip(row.ids, row.targets, strict=True) if target]
        lengths.append(row.targets.index(True))
    assert scored == ids[0 if bos else 1 :]
    assert lengths[:1] == [1] * bool(scored)
    assert all(n == window - stride for n in lengths[1:-1])


@pytest.mark.parametrize("stride", [0, 8, 9])
def test_a_stride_without_context_is_refused(stride):
    with pytest.raises(ValueError, match=f"stride={stride} with window=8, expected 1 <= stride < window"):
        rolling(range(20), (), 8, stride)


def test_padding_on_either_side():
    rows = encode([Passage.of("ab", "c"), Passage.of("abcd", "ef")], tiny.tokenizer(), None)
    right, left = padded(rows, 0), padded(rows, 0, "left")
    assert right.attention_mask.tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert left.attention_mask.tolist() == [[0, 0, 0, 1, 1, 1], [1] * 6]
    for batch in (right, left):
        kept = batch.labels[0] != IGNORED
        assert (
            kept.sum() == 1
            and (batch.labels[kept.nonzero()[0, 0] * 0, kept] == batch.input_ids[0, kept]).all()
        )


# -- sources as training data ------------------------------------------------------------------------------------


def completions(path):
    rows = [{"prompt": f"say {text}: ", "completion": text} for text in TEXTS]
    rows += [{"prompt": "", "completion": "  "}, {"prompt": "", "completion": "y"}]
    return write_jsonl(path, rows)


@pytest.mark.parametrize("add_bos", [False, True])
def test_rows_used_dropped_and_masked_are_counted(tmp_path, add_bos):
    """U30, U32: empty rows and rows without a target are left out and counted; no token is lost uncounted."""
    tokenizer = tiny.tokenizer(add_bos=add_bos)
    corpus = load_task(completions(tmp_path / "c.jsonl"), tokenizer, tokens=48, held_out_every=3)
    counts = corpus.counts
    # Dropped: the row with nothing at all. Masked: the empty completion. "y" alone has its EOS to predict.
    assert (counts["rows_used"], counts["rows_dropped"], counts["rows_masked"]) == (8, 1, 1)
    # Two texts are too long with their prompt (and longer than half a window themselves).
    assert (counts["prompts_cut"], counts["completions_cut"]) == (2, 2)
    both = [corpus.train, corpus.held_out]
    assert (counts["train_windows"], counts["held_out_windows"]) == tuple(map(len, both)) == (6, 2)
    tokens = sum(int(part.attention_mask.sum()) for part in both)
    assert (
        counts["text_tokens"] + counts["bos_added"] + counts["eos_added"] == tokens + counts["tokens_dropped"]
    )
    assert counts["bos_added"] == 8 * add_bos and counts["eos_added"] == 8
    targets = sum(int((part.labels != IGNORED).sum()) for part in both)
    assert counts["target_tokens"] == targets
    assert all(int((part.labels[:, 1:] != IGNORED).sum(dim=1).min()) > 0 for part in both)
    described = corpus.describe()
    assert "8 rows used, 1 dropped, 1 without a target" in described and "rows of at most 48" in described
    assert corpus.source == "c.jsonl" and corpus.train.shape[1] <= 48


def test_the_labels_are_the_completions_tokens(tmp_path):
    corpus = load_task(completions(tmp_path / "c.jsonl"), tiny.tokenizer(), tokens=200)
    said = set()
    for part in (corpus.train, corpus.held_out):
        for labels, ids in zip(part.labels, part.input_ids, strict=True):
            assert ((labels == ids) | (labels == IGNORED)).all()
            said.add(text_of(labels[labels != IGNORED]))
    assert said == {f"{text}<eos>" for text in TEXTS if text} | {"<eos>"}  # "y": its only target is the EOS


def test_batches_are_a_function_of_seed_and_step(tmp_path):
    rows = [{"prompt": f"{n}?", "completion": f" {n}" * (n % 4 + 1)} for n in range(23)]
    corpus = load_task(write_jsonl(tmp_path / "c.jsonl", rows), tiny.tokenizer(), tokens=16)
    assert isinstance(corpus.train, Examples) and len(corpus.train) == 21
    order = np.concatenate([np.random.default_rng([5, epoch]).permutation(21) for epoch in range(3)])
    for step in (0, 3, 7):
        batch = corpus.batch(5, step, 4)
        wanted = torch.from_numpy(order[4 * step : 4 * step + 4])
        assert torch.equal(batch.input_ids, corpus.train.input_ids[wanted])
        assert torch.equal(batch.labels, corpus.train.labels[wanted])
    again = load_task(tmp_path / "c.jsonl", tiny.tokenizer(), tokens=16)
    assert torch.equal(again.batch(5, 7, 4).input_ids, corpus.batch(5, 7, 4).input_ids)
    assert again.sha256 == corpus.sha256


def test_messages_as_training_rows(tmp_path):
    def chat(*turns):
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    rows = [
        chat(("user", "hi"), ("assistant", "hello")),
        chat(("user", "hi")),  # no assistant turn
        {"messages": []},
        chat(("user", "q" * 60), ("assistant", "cut away")),  # the answer lies beyond the window
        chat(("user", "bye"), ("assistant", "so long")),
    ]
    corpus = load_task(write_jsonl(tmp_path / "chat.jsonl", rows), task_files.chat_tokenizer(), tokens=48)
    counts = corpus.counts
    assert (counts["rows_used"], counts["rows_dropped"], counts["rows_masked"]) == (2, 1, 2)
    assert counts["bos_added"] == counts["eos_added"] == 0  # the template brings its own
    labels = corpus.train.labels[0]
    assert text_of(labels[labels != IGNORED]) == "hello<eos>\n"


def test_text_rows_are_a_corpus_of_windows(tmp_path):
    """U32: rows of text join into windows, as `load_corpus` makes them."""
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": text} for text in TEXTS])
    corpus = load_task(path, tiny.tokenizer(), tokens=16)
    assert isinstance(corpus.train, torch.Tensor)
    assert (corpus.counts["rows_used"], corpus.counts["rows_dropped"]) == (6, 2)
    with pytest.raises(ValueError, match=r"t.jsonl holds \d+ tokens, expected at least 512 for one window"):
        load_task(path, tiny.tokenizer(), tokens=512)
    # A text field wins over others.
    both = write_jsonl(tmp_path / "b.jsonl", [{"text": "a" * 40, "prompt": "p", "completion": "c"}])
    assert isinstance(load_task(both, tiny.tokenizer(), tokens=16).train, torch.Tensor)


def test_named_tasks_from_a_folder(tmp_path, monkeypatch):
    folder = task_files.write_tasks(tmp_path / "data")
    sizes = {"arc-challenge": (12, 5), "arc-challenge-letter": (12, 5), "gsm8k": (6, 3)}
    for name, expected in sizes.items():
        corpus = load_task(name, tiny.tokenizer(), tokens=128, path=folder)
        assert (len(corpus.train), len(corpus.held_out)) == expected and corpus.source == name
        assert corpus.counts["eos_added"] == (9 if name == "gsm8k" else 0)
        assert len(load_items(name, tiny.tokenizer(), path=folder)) == expected[1]
    labels = load_task("arc-challenge-letter", tiny.tokenizer(), path=folder).train.labels
    assert {text_of(row[row != IGNORED]) for row in labels} == {f" {label}" for label in "ABCDE1234"}
    wiki = load_task("wikitext-2", tiny.tokenizer(), tokens=16, path=folder)
    files = [(folder / f"wikitext-2/{name}.txt").read_bytes() for name in ("valid", "test")]
    assert [wiki.sha256, wiki.held_out_sha256] == [hashlib.sha256(data).hexdigest() for data in files]
    assert len(load_task("gsm8k", tiny.tokenizer(), path=folder, rows=2).train) == 2
    # The files may lie in the folder itself, and the folder may come from the environment.
    monkeypatch.setenv("LCSB_DATA", str(folder / "gsm8k"))
    assert len(load_task("gsm8k", tiny.tokenizer()).train) == 6
    (folder / "gsm8k/test.jsonl").unlink()
    with pytest.raises(ValueError, match=r"no test.jsonl of the task 'gsm8k' in it, nor in .*gsm8k/gsm8k"):
        load_task("gsm8k", tiny.tokenizer())


def test_the_real_files(data_folder):
    tokenizer = tiny.tokenizer()
    labels = Counter()
    for name, train, test in (("arc-challenge", 1056, 1172), ("gsm8k", 7473, 1319)):
        rows = load_items(name, tokenizer, path=data_folder)
        assert len(rows) == test
        lines = (data_folder / name / "train.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == train
    for question in load_items("arc-challenge-letter", tokenizer, path=data_folder):
        labels.update(choice.strip() for choice in question.choices)
        assert question.choices[question.right].strip() in labels
    assert set("ABCDE") <= set(labels) <= set("ABCDE1234")  # this copy may have numbers turned into letters
    corpus = load_task("arc-challenge", tokenizer, tokens=256, path=data_folder)
    assert (len(corpus.train), len(corpus.held_out)) == (1056, 1172) and corpus.counts["rows_masked"] == 0


# -- messages ----------------------------------------------------------------------------------------------------


ARC = task_files.arc_row("q", ["a", "b"], "AB", "A")


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"prompt": "a"}], r":1: no field 'completion' among 'prompt'; nearest is 'prompt'"),
        ([{"prompt": "a", "completion": 3}], r":1: field 'completion' is int, expected a string"),
        (
            [{"prompt": "a", "completion": "b"}, {"promt": "a"}],
            r":2: no field 'text', no 'messages' and no 'prompt' with 'completion' among 'promt'; "
            r"nearest is 'promt' to 'prompt'",
        ),
        ([{}], r":1: no field 'text', .* among none"),
        (
            [{"prompt": "a", "completion": "b"}, {"text": "c"}],
            r":2: a row of text, but .*:1 is one of completion; expected one kind in a file",
        ),
        ([{"messages": "hi"}], r":1: field 'messages' is str, expected a list of messages"),
        ([{"messages": ["hi"]}], r":1: message 1 is str, expected an object with role and content"),
        ([{"messages": [{"role": "user"}]}], r":1: message 1: no field 'content' among 'role'; nearest is 'role'"),
        (
            [{"messages": [{"role": "assistant", "content": "a"}]}],
            r":1: message 1 is the assistant's, expected one of a system or user before it",
        ),
        ([{"prompt": "", "completion": " "}], r"bad.jsonl holds no text \(1 rows, all empty\)"),
        ([{"messages": []}] * 2, r"bad.jsonl holds no text \(2 rows, all empty\)"),
        ([{"prompt": "a", "completion": ""}] * 3, r"bad.jsonl: none of its 3 rows has a target within 128 tokens"),
        ([{"prompt": "a", "completion": "b"}], r"bad.jsonl gives 1 row with a target, expected at least 2"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, rows, message):
    """U30 among them: a file from which nothing could be learned is an error, not a loss of 0."""
    with pytest.raises(ValueError, match=message) as error:
        load_task(write_jsonl(tmp_path / "bad.jsonl", rows), task_files.chat_tokenizer())
    assert "\n" not in str(error.value)


def test_bad_lines_are_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": "a", \n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad.jsonl:3: not JSON"):
        load_task(path, tiny.tokenizer())
    path.write_text('{"prompt": "a", "completion": "b"}\n\n' * 3, encoding="utf-8")
    corpus = load_task(path, tiny.tokenizer())
    assert (corpus.counts["rows_used"], corpus.counts["rows_dropped"]) == (3, 3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"choices": ["a", "b"]}, "field 'choices' is list, expected an object with text and label"),
        ({"choices": {"text": ["a", "b"]}}, "field 'choices': no field 'label' among 'text'"),
        (
            {"choices": {"text": ["a", 1], "label": ["A", "B"]}},
            "field 'choices.text' is not a list of strings",
        ),
        (
            {"choices": {"text": ["a"], "label": ["A", "B"]}},
            "1 choices with labels A, B, expected at least two",
        ),
        ({"choices": {"text": ["a", "b"], "label": ["A", "A"]}}, "each with a label of its own"),
        ({"answerKey": "C"}, "field 'answerKey' is 'C', expected one of A, B"),
        ({"answerKey": 1}, "field 'answerKey' is int, expected a string"),
    ],
)
def test_bad_arc_rows_are_named(tmp_path, change, message):
    folder = task_files.write_tasks(tmp_path / "data")
    write_jsonl(folder / "arc-challenge/train.jsonl", [ARC, {**ARC, **change}])
    with pytest.raises(ValueError, match=rf"train.jsonl:2: {message}|train.jsonl:2: .*{message}"):
        load_task("arc-challenge", tiny.tokenizer(), path=folder)


def test_chat_templates_that_cannot_be_used(tmp_path):
    turns = [("user", "hi"), ("assistant", "yes"), ("user", "sure?"), ("assistant", "no")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    path = write_jsonl(tmp_path / "chat.jsonl", [row])
    with pytest.raises(ValueError, match=r"chat.jsonl:1: field 'messages' needs a chat template"):
        load_task(path, tiny.tokenizer())
    tokenizer = tiny.tokenizer()
    # Writes only the last answer in full, as templates of reasoning models do.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last or m.role == 'user' else '...' }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(
        ValueError, match=r"chat.jsonl:1: the chat template writes message 2 otherwise when more"
    ):
        load_task(path, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(
        ValueError, match=r"chat.jsonl:1: the chat template refuses these messages: no such role"
    ):
        load_task(path, tokenizer)


def test_unknown_names(tmp_path, monkeypatch):
    monkeypatch.delenv("LCSB_DATA", raising=False)
    for name, nearest in (
        ("gsm-8k", "gsm8k"),
        ("arc_challenge", "arc-challenge"),
        ("wikitext2", "wikitext-2"),
    ):
        with pytest.raises(ValueError, match=f"{name!r} is no task .*; nearest task is {nearest!r}"):
            load_task(name, tiny.tokenizer())
    with pytest.raises(ValueError, match=r"absent.jsonl' is no task"):
        load_task(tmp_path / "absent.jsonl", tiny.tokenizer())
    for arguments in ({"tokens": 1}, {"held_out_every": 1}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            load_task("pydoc", tiny.tokenizer(), **arguments)


def test_a_named_task_without_folder_or_network(monkeypatch):
    monkeypatch.delenv("LCSB_DATA", raising=False)
    pytest.importorskip("datasets")
    with pytest.raises(
        ValueError, match=r"openai/gsm8k:main@train: the hub gave nothing: .*; or name a folder with"
    ):
        load_task("gsm8k", tiny.tokenizer())
    with pytest.raises(ValueError, match=r"some/data:part@train\[:3\]: the hub gave nothing"):
        load_task("some/data:part@train[:3]", tiny.tokenizer())


def test_without_datasets_the_install_line_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"some/data@train: .*pip install 'lcsb\[eval\]'"):
        load_task("some/data", tiny.tokenizer())
    monkeypatch.delenv("LCSB_DATA", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"lcsb\[eval\]'; or name a folder with gsm8k/test.jsonl"):
        load_task("gsm8k", tiny.tokenizer())


def test_hub_names():
    assert HubName.parse("a/b") == HubName("a/b", None, "train")
    assert HubName.parse("allenai/ai2_arc:ARC-Challenge@test") == HubName(
        "allenai/ai2_arc", "ARC-Challenge", "test"
    )
    assert str(HubName.parse("a/b:c")) == "a/b:c@train"
    assert [HubName.parse(text) for text in ("plain", "/a/b", "a/b/c", "a b/c")] == [None] * 4
    assert TASKS["arc-challenge"].test_hub == HubName("allenai/ai2_arc", "ARC-Challenge", "test")


# -- streaming ---------------------------------------------------------------------------------------------------


def test_streaming_reads_no_further_than_asked(tmp_path, monkeypatch):
    """The hub's path with a local builder: the same rows as the file, and a broken row behind the limit is not met."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": f"{n}?", "completion": f" {n}"} for n in range(30)]
    files = [str(write_jsonl(tmp_path / f"{n}.jsonl", rows[n * 10 : n * 10 + 10])) for n in range(2)]
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{not json\n", encoding="utf-8")
    source = HubName("json", None, "train")
    found = list(hub_rows(source, 15, data_files={"train": [*files, str(broken)]}))
    assert [row for _, row in found] == rows[:15] and found[14][0] == "json@train row 15"
    assert list(hub_rows(source, None, data_files={"train": files})) == [
        (f"json@train row {n + 1}", row) for n, row in enumerate(rows[:20])
    ]
    with pytest.raises(ValueError, match="json@train: the hub gave nothing"):
        list(hub_rows(source, None, data_files={"train": [*files, str(broken)]}))
    # The same through `load_task`, by the name that a user gives.
    import lcsb.tasks.load as load

    monkeypatch.setattr(
        load, "hub_rows", lambda name, limit: hub_rows(source, limit, data_files={"train": files})
    )
    streamed = load_task("some/data", tiny.tokenizer(), tokens=16, rows=20)
    local = load_task(write_jsonl(tmp_path / "all.jsonl", rows[:20]), tiny.tokenizer(), tokens=16)
    assert torch.equal(streamed.train.labels, local.train.labels) and streamed.source == "some/data"


# -- in a run ----------------------------------------------------------------------------------------------------


def test_the_held_out_loss_is_over_target_tokens(tmp_path):
    """U33: rows of 3 to 40 tokens; the mean over all targets, not of rows' or batches' means."""
    rows = [{"prompt": "p" * n, "completion": "abc "[: 1 + n % 4] * (n % 7 + 1)} for n in range(1, 21)]
    path = write_jsonl(tmp_path / "c.jsonl", rows)
    corpus = load_task(path, tiny.tokenizer(), tokens=64, held_out_every=2)
    model = tiny.with_lora(tiny.llama(dtype=torch.float64))
    total, count = 0.0, 0
    for ids, labels, mask in zip(
        corpus.held_out.input_ids, corpus.held_out.labels, corpus.held_out.attention_mask, strict=True
    ):
        length = int(mask.sum())
        with torch.no_grad():
            logits = model(input_ids=ids[None, :length]).logits[0]
        for place in range(1, length):
            if labels[place] != IGNORED:
                total -= float(torch.log_softmax(logits[place - 1], dim=0)[ids[place]])
                count += 1
    for batch_size in (1, 3, 10):
        loss, tokens = held_out_loss(model, corpus.held_out, batch_size)
        assert tokens == count and abs(loss - total / count) < 1e-6 * loss  # transformers' loss is float32
    batch = language_batch(corpus.held_out[:2], model)
    assert batch["input_ids"].shape[1] == int(corpus.held_out.attention_mask[:2].sum(dim=1).max())


def test_a_run_on_a_task(tmp_path, model_cache):
    """A run whose data.source is a named task: measured, predicted, trained; only targets are counted."""
    folder = tiny_run.write_model(tmp_path)
    data = task_files.write_tasks(tmp_path / "data")
    config = tiny_run.settings(
        folder, data__source="gsm8k", data__path=str(data), data__tokens=64, eval_windows=3, batch_size=2, steps=4,
        eval_every=4, fidelity_batches=1,
    )  # fmt: skip
    run = tiny_run.start(tmp_path / "run", config)
    assert train_arm(run, "exact-momentum", 0) == "done"
    metrics = read_metrics(run.arm("exact-momentum", 0).metrics)
    answers = [row["answer"] for row in task_files.gsm8k_rows(3)]
    assert metrics.evals[-1].tokens == sum(len(f" {answer}") + 1 for answer in answers)  # and the EOS
    assert metrics.evals[-1].held_out_loss < metrics.header.loss_at_start
    facts = json.loads(run.environment.read_text())
    assert facts["corpus"]["source"] == "gsm8k" and facts["corpus"]["counts"]["rows_used"] == 9
    assert str(tmp_path) not in json.dumps(facts["corpus"])
