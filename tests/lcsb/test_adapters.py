"""Adapters as files: PEFT's format, read by PEFT alone to the same loss, and by us key by key or not at all."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from lcsb.adapter_files import base_of, load_adapter, save_adapter
from lcsb.cache import whole_folder
from lcsb.config import LCSBConfig
from lcsb.models import attach_lora, load_quantized
from lcsb.selective import selective_backward

KINDS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
FAMILIES = ("qwen2", "gpt2")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """{family: folder of a tiny model}."""
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp(family)
        model = tiny.BUILDERS[family]()
        model.save_pretrained(folders[family])
        tiny.tokenizer(model.config.vocab_size).save_pretrained(folders[family])
    return folders


def train(model, steps=4, seed=0):
    """A few LCSB steps; returns the number of parameters that were trained."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with selective_backward(model.train(), LCSBConfig("exact", layers_per_step=2)) as lcsb:
        for step in range(steps):
            lcsb.begin()
            model(**tiny.batch(model, seed=seed + step)).loss.backward()
            lcsb.step(optimizer)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def loss_of(model):
    with torch.no_grad():
        return model.eval()(**tiny.batch(model, seed=9)).loss.item()


# Read without this project: the base in 4-bit by transformers, the adapter by PEFT, and no module of ours.
ELSEWHERE = """
import importlib.abc, json, sys, warnings
warnings.simplefilter("ignore")
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lcsb", "bcd_theory", "reports", "simulations"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocked())
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
jobs, ids = json.loads(sys.argv[1]), torch.tensor(json.loads(sys.argv[2]))
for source, adapter in jobs:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.float32)
    # Training mode (there is no dropout): in evaluation some CPUs take a rounded kernel.
    model = PeftModel.from_pretrained(base, adapter).train()
    print("LOSS", repr(model(input_ids=ids, labels=ids).loss.item()))
try:
    import lcsb
except ImportError as error:
    print(error)
"""


def test_reload_without_this_project_and_continue(sources, tmp_path):
    """U38: same loss to 1e-6 in a process that cannot import lcsb; training goes on with as many parameters."""
    jobs, expected, ids = [], [], tiny.batch(tiny.qwen2(), seed=9)["input_ids"]
    for family, kind in (("qwen2", "lora"), ("qwen2", "dora"), ("gpt2", "lora"), ("gpt2", "rslora")):
        base, _ = load_quantized(sources[family])
        start = loss_of(base)
        model = attach_lora(base, r=4, **KINDS[kind])
        assert loss_of(model) == pytest.approx(start, abs=1e-6)
        trained = train(model)
        folder = tmp_path / f"{family}-{kind}"
        save_adapter(model, folder)
        assert base_of(folder) == str(sources[family])
        with torch.no_grad():
            loss = model.eval()(input_ids=ids, labels=ids).loss.item()
        assert abs(loss - start) > 1e-3
        jobs.append((str(sources[family]), str(folder)))
        expected.append(loss)
        # Here, on a fresh base: the same, and trainable to the last parameter.
        again = load_adapter(load_quantized(sources[family])[0], folder)
        with torch.no_grad():
            assert again(input_ids=ids, labels=ids).loss.item() == pytest.approx(loss, abs=1e-6)
        before = {n: p.detach().clone() for n, p in again.named_parameters() if p.requires_grad}
        assert train(again, steps=2) == trained > 0
        assert all(not torch.equal(p, before[n]) for n, p in again.named_parameters() if n in before)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, json.dumps(jobs), json.dumps(ids.tolist())],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    found = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("LOSS")]
    assert found == pytest.approx(expected, abs=1e-6) and len(found) == 4
    assert "blocked: lcsb" in done.stdout


def test_loaded_for_inference_or_into_a_model_that_has_one(tmp_path):
    model = tiny.with_lora(tiny.llama())
    save_adapter(model, tmp_path / "a")
    frozen = load_adapter(tiny.llama(), tmp_path / "a", trainable=False)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert loss_of(frozen) == loss_of(model)
    other = tiny.with_lora(tiny.llama(), seed=5)
    assert loss_of(other) != loss_of(model)
    assert load_adapter(other, tmp_path / "a") is other and loss_of(other) == loss_of(model)
    # Saving replaces the folder whole.
    save_adapter(tiny.with_lora(tiny.llama(), seed=6), tmp_path / "a")
    assert loss_of(load_adapter(tiny.llama(), tmp_path / "a")) != loss_of(model)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def damaged(folder, edit):
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path)


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


def rename(weights):
    weights[FIRST.replace("layers.0", "layers.9")] = weights.pop(FIRST)


def reshape(weights):
    weights[FIRST] = weights[FIRST].T.contiguous()


def poison(weights):
    weights[FIRST][0, 0] = float("nan")


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    "edit, message",
    [
        (rename, r"1 keys are missing and 1 are left over, first '.*layers.0.mlp.down_proj.lora_A.weight'"),
        (lambda weights: weights.pop(FIRST), r"1 keys are missing and 0 are left over, .*\(not in the file\)"),
        (lambda weights: weights.update(odd=torch.ones(2)), r"0 keys are missing and 1 .*'odd' \(not in the model\)"),
        (reshape, r"down_proj.lora_A.weight' has shape \[96, 4\], expected \[4, 96\]"),
        (poison, r"down_proj.lora_A.weight' is not finite"),
        (lambda weights: weights.clear(), "holds no tensor"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit(tmp_path, edit, message, fresh):
    """U38: PEFT's own load passes over each of these."""
    save_adapter(tiny.with_lora(tiny.llama()), tmp_path / "a")
    damaged(tmp_path / "a", edit)
    model = tiny.llama() if fresh else tiny.with_lora(tiny.llama(), seed=3)
    before = loss_of(model)
    with pytest.raises(ValueError, match=message) as error:
        load_adapter(model, tmp_path / "a")
    assert "\n" not in str(error.value) and str(tmp_path / "a") in str(error.value)
    assert loss_of(model) == before
    assert fresh is not any("lora_" in name for name, _ in model.named_parameters())


def test_files_that_are_no_adapter(tmp_path):
    def refused(message, model=None):
        with pytest.raises(ValueError, match=message) as error:
            load_adapter(model or tiny.llama(), tmp_path / "a")
        assert "\n" not in str(error.value)

    refused("a: no such folder; expected the folder of a PEFT adapter")
    (tmp_path / "a").mkdir()
    refused("no adapter_model.safetensors in it")
    save_adapter(tiny.with_lora(tiny.llama()), tmp_path / "a")
    refused(r"adapter of another model", tiny.gpt2())
    refused(r"has shape \[64, 4\], expected \[32, 4\]", tiny.llama(hidden_size=32, num_attention_heads=2))
    weights, settings = tmp_path / "a" / "adapter_model.safetensors", tmp_path / "a" / "adapter_config.json"
    whole, text = weights.read_bytes(), settings.read_text()
    for cut in (3, 100, len(whole) // 2):
        weights.write_bytes(whole[:cut])
        refused(r"adapter_model.safetensors: cannot be read \(")
    weights.write_bytes(b"\xff" * len(whole))
    refused(r"adapter_model.safetensors: cannot be read \(")
    weights.write_bytes(whole)
    for changed, message in (
        (text.replace('"LORA"', '"IA3"'), "is of PEFT type IA3, expected LORA"),
        (text[: len(text) // 2], r"adapter_config.json: cannot be read \(JSONDecodeError"),
        ("{}", r"adapter_config.json: cannot be read \(KeyError"),
    ):
        settings.write_text(changed)
        refused(message)
    settings.unlink()
    refused(r"adapter_config.json: cannot be read \(FileNotFoundError")


def test_another_base_of_the_same_shape_is_said(tmp_path):
    first, second = tiny.llama(), tiny.llama(seed=1)
    first.name_or_path, second.name_or_path = "model-one", "model-two"
    save_adapter(tiny.with_lora(first), tmp_path / "a")
    with pytest.warns(UserWarning, match=r"a: adapter trained on 'model-one', put on 'model-two'"):
        load_adapter(second, tmp_path / "a")
    again = tiny.llama()
    again.name_or_path = "model-one"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*adapter trained on")
        load_adapter(again, tmp_path / "a")


OTHERS = {
    "IA3": lambda peft: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "VERA": lambda peft: peft.VeraConfig(target_modules=["q_proj"], r=2),
    "LOHA": lambda peft: peft.LoHaConfig(target_modules=["q_proj"], r=2),
    "OFT": lambda peft: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=16, r=0),
    "PROMPT_TUNING": lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_methods_are_refused_by_name(kind, tmp_path):
    import peft

    model = peft.get_peft_model(tiny.llama(), OTHERS[kind](peft))
    with pytest.raises(ValueError, match=f"PEFT type {kind}, expected LORA"):
        selective_backward(model)
    save_adapter(model, tmp_path / "a")
    with pytest.raises(ValueError, match=f"(PEFT type {kind}, expected LORA|adapter of another model)"):
        load_adapter(tiny.llama(), tmp_path / "a")


@pytest.mark.parametrize(
    "field, value",
    [("target_parameters", ["model.layers.0.mlp.up_proj.weight"]), ("trainable_token_indices", [3]),
     ("layer_replication", [(0, 4), (2, 4)]), ("alora_invocation_tokens", [5])],
)  # fmt: skip
def test_other_methods_under_the_name_of_lora(field, value):
    import peft

    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **{field: value})
    model = peft.get_peft_model(tiny.llama(), config)
    with pytest.raises(ValueError, match=f"is a LoRA with {field}, expected LoRA, rsLoRA or DoRA"):
        selective_backward(model)


# Disks


def test_a_file_in_the_way_and_a_folder_that_is_not_empty(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path):
        with (
            pytest.raises(OSError, match="exists already, expected a new or empty folder"),
            whole_folder(place),
        ):
            raise AssertionError("entered")
    with pytest.raises(OSError, match=r"file/a cannot be written: File exists"):
        save_adapter(tiny.with_lora(tiny.llama()), tmp_path / "file" / "a")
    (tmp_path / "empty").mkdir()
    with whole_folder(tmp_path / "empty") as folder:
        (folder / "x").write_text("x")
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["x"]
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "stopped") as folder:
        (folder / "x").write_text("x")
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_full_disk_keeps_what_was_there(tmp_path):
    """Files may grow to 8 kB and no further, which the system enforces: the old adapter stays, nothing else does."""
    model = tiny.with_lora(tiny.llama())
    save_adapter(model, tmp_path / "a")
    before = loss_of(model)
    changed = tiny.with_lora(tiny.llama(), seed=4)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, old[1]))
    try:
        with pytest.raises(OSError, match=r"a cannot be written: .*[Ff]ile too large") as error:
            save_adapter(changed, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert loss_of(load_adapter(tiny.llama(), tmp_path / "a")) == before


def test_full_disk_while_converting(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("LCSB_CACHE", str(tmp_path / "cache"))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, old[1]))
    try:
        with pytest.raises(OSError, match=r"cache/.* cannot be written: .*[Ff]ile too large"):
            load_quantized(sources["qwen2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert list((tmp_path / "cache").iterdir()) == []
    load_quantized(sources["qwen2"])


def test_read_only_disk():
    """As a user who may not write there (the superuser may always)."""
    model = tiny.with_lora(tiny.llama())
    place = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    place.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(OSError, match=r"a cannot be written: Permission denied"):
            save_adapter(model, place / "a")
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    assert list(place.iterdir()) == []
    place.rmdir()
