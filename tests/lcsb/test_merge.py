"""Merging: the folder read back is the function that was trained, and what may be called the same is."""

from __future__ import annotations

import json
import sys

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lcsb import merge as merge_module
from lcsb.adapter_files import load_adapter, save_adapter
from lcsb.merge import MergeError, dequantized_model, merge_adapter, merge_table
from lcsb.models import load_quantized

SETTINGS = {
    "nf4": ("nf4", False),
    "nf4, scales too": ("nf4", True),
    "int8": ("int8", False),
    "plain": (None, False),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folders = {}
    for family in ("qwen2", "gpt2", "gemma3", "phi3"):
        folders[family] = tmp_path_factory.mktemp(family)
        model = tiny.BUILDERS[family]()
        model.save_pretrained(folders[family])
        tiny.tokenizer(model.config.vocab_size).save_pretrained(folders[family])
    return folders


def adapted(source, folder, quantization="nf4", double_quant=False, **settings):
    base, _ = load_quantized(source, quantization=quantization, double_quant=double_quant)
    model = tiny.with_lora(base, **settings)
    save_adapter(model, folder)
    return model.eval()


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize(
    "family, kind",
    [
        ("qwen2", "nf4"),
        ("gpt2", "nf4"),
        ("gemma3", "nf4, scales too"),
        ("gpt2", "plain"),
        pytest.param("phi3", "int8", marks=pytest.mark.slow),
    ],
)
def test_merged_folder_is_the_adapter_on_its_base(sources, tmp_path, family, kind):
    """U39, a = b: read by transformers alone; also GPT-2's transposed layers and tied heads."""
    quantization, double_quant = SETTINGS[kind]
    settings = {"quantization": quantization, "double_quant": double_quant}
    model = adapted(sources[family], tmp_path / "a", use_dora=kind == "nf4, scales too", **settings)
    ids = tiny.batch(model, seed=2)["input_ids"]
    expected, base = logits(model, ids), logits(load_quantized(sources[family], **settings)[0], ids)
    report = merge_adapter(sources[family], tmp_path / "a", tmp_path / "out", **settings)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    scale = expected.abs().max()
    assert (logits(again, ids) - expected).abs().max() <= 1e-5 * scale < 1e-2 * (base - expected).abs().max()
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert report.logit_difference < 1e-5 and abs(report.loss_merged - report.loss_adapter) < 1e-5
    tied = family in ("qwen2", "gpt2", "gemma3")
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied
    assert report.modules == {"qwen2": 28, "gpt2": 16, "gemma3": 42, "phi3": 16}[family] and not report.untied
    text = (tmp_path / "out" / "config.json").read_text()
    assert "quantization_config" not in text and str(tmp_path) not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out"]


@pytest.mark.parametrize("quantization", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_four_way_table(sources, tmp_path, quantization):
    """U39 on TINY-Q against losses computed here from the matrices: only b is the model that was trained."""
    model = adapted(sources["qwen2"], tmp_path / "a", quantization)
    rows = tiny.batch(model, rows=6, tokens=24, seed=3)["input_ids"]
    table = {
        row.row: row for row in merge_table(sources["qwen2"], tmp_path / "a", rows, quantization=quantization)
    }
    assert list(table) == ["a", "b", "c", "d"]
    plain, _ = load_quantized(sources["qwen2"], quantization=None)
    truth = {"a": model, "d": load_adapter(plain, tmp_path / "a", trainable=False)}
    for row, function in truth.items():
        with torch.no_grad():
            loss = function.eval()(input_ids=rows, labels=rows).loss.item()
        assert table[row].loss == pytest.approx(loss, abs=1e-5)
    assert abs(table["b"].gap) <= 1e-5 and table["b"].logit_difference < 1e-5
    assert [table[row].same for row in "abcd"] == [True, True, False, False]
    for row in "cd":
        assert abs(table[row].gap) > 1e-4 and table[row].logit_difference > 1e-3
        assert table[row].gap == pytest.approx(table[row].loss - table["a"].loss, abs=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_dequantised_model_stands_for_the_same_numbers(sources, family):
    model, _ = load_quantized(sources[family])
    plain = dequantized_model(model)
    ids = tiny.batch(model)["input_ids"]
    assert (logits(plain, ids) - logits(model, ids)).abs().max() < 1e-5
    assert type(plain) is type(model) and not hasattr(plain.config, "quantization_config")
    original = tiny.BUILDERS[family]()
    assert {n: p.shape for n, p in plain.named_parameters()} == {
        n: p.shape for n, p in original.named_parameters()
    }
    assert {n: b.shape for n, b in plain.named_buffers()} == {n: b.shape for n, b in original.named_buffers()}
    changed = [n for n, p in plain.named_parameters() if not torch.equal(p, original.get_parameter(n))]
    assert changed and all(".layers." in name or ".h." in name for name in changed)


ENDS = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ENDS)
def test_tied_head_or_embedding_is_refused_or_untied(sources, tmp_path, kind):
    """U39: merged into one matrix, the change of one end would move the other too, or be lost at the next load."""
    base, _ = load_quantized(sources["qwen2"])
    start = base.lm_head.weight.clone()
    model = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **ENDS[kind]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_adapter(model, tmp_path / "a")
    ids = tiny.batch(tiny.qwen2())["input_ids"]
    expected = logits(model, ids)
    with pytest.raises(
        ValueError, match=r"changes .* of Qwen2ForCausalLM, whose head and embedding are one"
    ) as error:
        merge_adapter(sources["qwen2"], tmp_path / "a", tmp_path / "out")
    assert "--untie" in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "out").exists()
    report = merge_adapter(sources["qwen2"], tmp_path / "a", tmp_path / "out", untie=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert report.untied and again.config.tie_word_embeddings is False
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert (logits(again, ids) - expected).abs().max() <= 1e-5 * expected.abs().max()
    head, embedding = again.lm_head.weight, again.model.embed_tokens.weight
    assert torch.equal(head, start) == (kind == "embedding") != torch.equal(embedding, start)


def test_a_merge_that_reads_back_otherwise_is_not_kept(sources, tmp_path, monkeypatch):
    adapted(sources["qwen2"], tmp_path / "a")
    whole = merge_module.merged_weights

    def wrong(plain, adapter):
        merged = whole(plain, adapter)
        merged.model.layers[2].mlp.up_proj.weight.data.mul_(1.01)
        return merged

    monkeypatch.setattr(merge_module, "merged_weights", wrong)
    with pytest.raises(MergeError, match=r"read back, the loss is .*; nothing was written"):
        merge_adapter(sources["qwen2"], tmp_path / "a", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.fixture
def command(monkeypatch, capsys):
    from lcsb.cli import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lcsb", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        output = capsys.readouterr()
        return stopped.value.code or 0, output.out, output.err

    return run


def test_command(sources, tmp_path, command):
    adapted(sources["qwen2"], tmp_path / "a")
    out = tmp_path / "out"
    code, text, _ = command("merge", "--adapter", tmp_path / "a", "--out", out, "--json")
    report = json.loads(text.splitlines()[-1])
    assert code == 0 and report["modules"] == 28 and (out / "model.safetensors").is_file()
    code, _, error = command("merge", "--adapter", tmp_path / "a", "--out", out)
    assert code == 2 and f"{out} exists already, expected a new or empty folder" in error
    notes = tmp_path / "notes.txt"
    notes.write_text("the cat sat on the mat and looked at the dog. " * 80)
    arguments = ("--model", sources["qwen2"], "--data", notes, "--windows", 2)
    code, text, _ = command("merge", "--adapter", tmp_path / "a", "--table", *arguments)
    assert code == 0 and text.count("another model") == 2 and text.count("the same") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "give --out FOLDER to write the merged model, or --table to compare"),
        (("--out", "x", "--table"), "give --out FOLDER"),
        (("--out", "x"), "absent/adapter_config.json: cannot be read"),
        (("--out", "x", "--model", "smollm2-135n"), "nearest built-in name is 'smollm2-135m'"),
        (("--table", "--model", "m", "--quantization", "none"), "expected nf4, fp4 or int8"),
        (("--out", "x", "--model", "m", "--quantization", "nf3"), "quantization='nf3', expected one of"),
    ],
)
def test_command_refuses_in_one_line(tmp_path, command, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = command("merge", "--adapter", tmp_path / "absent", *arguments)
    assert code == 2 and message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
