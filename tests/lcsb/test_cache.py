"""The cache of conversions: whole folders or none, damage noticed, two processes at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import tiny
import torch

from lcsb.cache import cache_root, cached_folder, folder_sha256
from lcsb.layers import decoder_layers
from lcsb.models import attach_lora, load_quantized


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("LCSB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(folder):
    (folder / "weights").write_bytes(b"numbers")
    (folder / "config.json").write_text("{}")


def refuse(folder):
    raise AssertionError("built again")


def test_place(monkeypatch, tmp_path):
    for name in ("LCSB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "lcsb"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/lcsb")
    monkeypatch.setenv("LCSB_CACHE", "/own")
    assert cache_root() == Path("/own")


def test_built_once_for_each_key(root):
    first = cached_folder("a model/nf4", {"a": "1"}, build)
    assert first.parent == root and first.name.startswith("a-model-nf4-")
    assert cached_folder("a model/nf4", {"a": "1"}, refuse) == first
    assert cached_folder("a model/nf4", {"a": "2"}, build) != first
    assert not list(root.glob(".*"))


def test_a_failed_build_leaves_nothing(root):
    def broken(folder):
        build(folder)
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space left"):
        cached_folder("m", {"a": "1"}, broken)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "manifest", "no manifest"])
def test_damage_is_reported_and_repaired(root, damage):
    folder = cached_folder("m", {"a": "1"}, build)
    weights, manifest = folder / "weights", folder / "lcsb-cache.json"
    {
        "flip": lambda: weights.write_bytes(b"numbbrs"),
        "cut": lambda: weights.write_bytes(b"numb"),
        "delete": weights.unlink,
        "manifest": lambda: manifest.write_text("{"),
        "no manifest": manifest.unlink,
    }[damage]()
    with pytest.warns(UserWarning, match="is damaged .*; converting again"):
        assert cached_folder("m", {"a": "1"}, build) == folder
    assert weights.read_bytes() == b"numbers"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cached_folder("m", {"a": "1"}, refuse) == folder
    assert not list(root.glob(".*"))


def test_remains_of_killed_builds_are_swept_after_a_day(root):
    root.mkdir()
    old, new = root / ".building-old", root / ".building-new"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    cached_folder("m", {"a": "1"}, build)
    assert not old.exists() and new.exists()


def test_two_processes_build_at_once(root):
    """Both are in mid-build before either finishes; each gets a whole folder, the same, and one remains."""
    code = """
import sys, time
from pathlib import Path
from lcsb.cache import cached_folder
root, own, other = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def build(folder):
    (folder / "weights").write_bytes(b"numbers")
    (root / own).touch()
    for _ in range(3000):
        if (root / other).exists():
            break
        time.sleep(0.01)
    else:
        raise SystemExit("the other process never came")
print(cached_folder("m", {"a": "1"}, build))
"""
    root.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(root), own, other],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for own, other in (("one", "two"), ("two", "one"))
    ]  # fmt: skip
    outputs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    folders = {output.strip() for output, _ in outputs}
    assert len(folders) == 1
    assert (Path(folders.pop()) / "weights").read_bytes() == b"numbers"
    assert len([path for path in root.iterdir() if path.is_dir()]) == 1


def test_folder_hash_follows_names_and_contents(tmp_path):
    (tmp_path / "a").write_text("1")
    first = folder_sha256(tmp_path)
    (tmp_path / ".hidden").write_text("x")
    assert folder_sha256(tmp_path) == first
    (tmp_path / "a").write_text("2")
    second = folder_sha256(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert len({first, second, folder_sha256(tmp_path)}) == 3


# load_quantized's sources: folders and the hub's local store


def saved(folder, tokenizer=True):
    folder.mkdir(parents=True)
    tiny.llama().save_pretrained(folder)
    if tokenizer:
        tiny.tokenizer().save_pretrained(folder)
    return folder


def test_damaged_model_is_converted_again(root, tmp_path):
    source = saved(tmp_path / "source")
    model, _ = load_quantized(source)
    weights = next(root.glob("source-nf4-*")) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-10] ^= 1
    weights.write_bytes(data)
    with pytest.warns(UserWarning, match=r"model.safetensors does not have the sha256 recorded"):
        again, _ = load_quantized(source)
    batch = tiny.batch(model)
    assert torch.equal(model(**batch).logits, again(**batch).logits)


def test_incomplete_folders_are_refused(root, tmp_path):
    from safetensors.torch import load_file, save_file

    source = saved(tmp_path / "source")
    file = source / "model.safetensors"
    tensors = load_file(file)
    gone = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    for quantization in ("nf4", None):
        with pytest.raises(
            ValueError, match=r"1 missing keys for LlamaForCausalLM: model.layers.1.mlp.up_proj"
        ):
            load_quantized(source, quantization=quantization)
    tensors["model.layers.1.mlp.up_proj.weight"] = gone[:-1].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    for quantization in ("nf4", "int8", None):
        with pytest.raises((ValueError, RuntimeError), match=r"up_proj|size mismatch|mismatched"):
            load_quantized(source, quantization=quantization)
    assert not list(root.glob("*"))
    with pytest.raises(ValueError, match=r"no model's folder, expected one with config.json"):
        load_quantized(tmp_path)


@pytest.mark.parametrize(
    "name, contents, message",
    [
        ("model.safetensors", lambda whole: whole[:1000], "model.safetensors: cannot be read as safetensors"),
        (
            "model.safetensors",
            lambda whole: whole[:-9],
            "model.safetensors: cannot be read as safetensors .*covered",
        ),
        ("model.safetensors", lambda whole: b"\xff" * 99, "model.safetensors: cannot be read as safetensors"),
        ("config.json", lambda whole: whole[:-9], "config.json: cannot be read as JSON"),
        (
            "config.json",
            lambda whole: b'{"model_type": "odd"}',
            "the model cannot be loaded .*model type `odd`",
        ),
        ("tokenizer.json", lambda whole: whole[:99], "tokenizer.json: cannot be read as JSON"),
        ("tokenizer.json", lambda whole: b"{}", "the tokenizer cannot be loaded"),
    ],
)
def test_corrupt_model_files_are_named_in_one_line(root, tmp_path, name, contents, message):
    source = saved(tmp_path / "source")
    path = source / name
    path.write_bytes(contents(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        load_quantized(source)
    assert str(source) in str(error.value) and "\n" not in str(error.value)
    assert not list(root.glob("*"))


def test_scales_of_another_file_are_refused(root, tmp_path):
    """A quantised file with scales that no layer asks for: its other numbers would be read under wrong ones."""
    from safetensors.torch import load_file, save_file

    model, tokenizer = load_quantized(saved(tmp_path / "source"))
    folder = tmp_path / "quantised"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.9.mlp.up_proj.weight.absmax"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected keys for LlamaForCausalLM: model.layers.9.mlp.up_proj"):
        load_quantized(folder)


def test_other_quantisers_and_adapter_folders_are_named(root, tmp_path):
    source = saved(tmp_path / "gptq")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(
        ValueError, match="is quantised by 'gptq', expected an unquantised or bitsandbytes model"
    ):
        load_quantized(source)
    adapter = tmp_path / "adapter"
    tiny.with_lora(tiny.llama()).save_pretrained(adapter)
    with pytest.raises(ValueError, match="is an adapter's folder"):
        load_quantized(adapter)


def test_multimodal_and_encoder_decoder_folders(root, tmp_path):
    folder = tmp_path / "llava"
    tiny.multimodal().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    model, _ = load_quantized(folder)
    assert len(decoder_layers(model)) == 4
    adapted = {name for name, module in attach_lora(model).named_modules() if hasattr(module, "lora_A")}
    assert len(adapted) == 28 and all("language_model" in name for name in adapted)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    with pytest.raises(ValueError, match="holds a 't5' model, expected a decoder-only language model"):
        load_quantized(folder)


def test_hub_ids(root, tmp_path, monkeypatch):
    from huggingface_hub import constants

    store = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(store))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = store / "models--someone--tiny-llama"
    saved(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    model, _ = load_quantized("someone/tiny-llama", local_files_only=True)
    assert model.config.name_or_path == "someone/tiny-llama" and len(model.model.layers) == 4
    assert (
        load_quantized("someone/tiny-llama", revision=commit, local_files_only=True)[0].dtype == model.dtype
    )
    for name, message in {
        "someone/absent": "'someone/absent' is no folder or built-in name, and the hub gave nothing: ",
        "smollm-135m": "hub gave nothing: .*nearest built-in name is 'smollm2-135m'",
        "no/such/folder": "neither a folder, a .gguf file, a hub id nor a built-in name",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            load_quantized(name, local_files_only=True)
        assert "\n" not in str(error.value)
