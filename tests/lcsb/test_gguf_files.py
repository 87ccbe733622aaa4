"""GGUF files read to the numbers that the reference dequantiser gives, or are refused by name."""

from __future__ import annotations

import hashlib
import importlib.util

import gguf
import numpy as np
import pytest
import tiny
import tiny_gguf
import torch

from lcsb import gguf_files
from lcsb.gguf_files import BUILTIN_MODELS, builtin_gguf, read_gguf
from lcsb.models import load_quantized
from lcsb.quantized import dequantized_weight

QTYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"]


def source(arch):
    # The format has no field for Gemma's query scale: the file stands for the default, 256.
    changes = {"gemma3": {"query_pre_attn_scalar": 256}}.get(arch, {"vocab_size": 300})
    model = tiny.BUILDERS[arch](**changes)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # at their usual start (all equal) a norm in the wrong place would not be seen
                parameter.add_(0.3 * torch.rand(parameter.shape, generator=generator))
    return model


def write(path, arch="llama", qtype="F32", **changes):
    return tiny_gguf.write(path, source(arch), arch, gguf.GGMLQuantizationType[qtype], **changes)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("qtype", QTYPES)
def test_every_tensor_is_the_reference_dequantisation(tmp_path, arch, qtype):
    """U49: permuted rows of q and k, Gemma's norms, every type: equal to the reference dequantiser."""
    path = tmp_path / "tiny.gguf"
    expected = write(path, arch, qtype)
    model, tokenizer = read_gguf(path)
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, matrix in expected.items():
        assert np.array_equal(found[name].detach().numpy(), matrix), name
    original = source(arch)
    batch = tiny.batch(original, tokens=40)
    with torch.no_grad():
        logits = original(**batch).logits
        difference = (model(**batch).logits - logits).abs().max() / logits.abs().max()
        # The file's rounding alone; none in F32, but where Gemma's norms have 1 added.
        bound = {"F32": 1e-5 if arch == "gemma3" else 0, "F16": 1e-2, "BF16": 5e-2, "Q8_0": 5e-2}.get(
            qtype, 1.0
        )
        assert difference <= bound and (qtype == "F32" or difference > 0)
    # The model is plain: no trace of the format keeps it from being saved or trained.
    assert not model.is_quantized and not hasattr(model.config, "quantization_config")
    assert tokenizer.decode(tokenizer("the man\n").input_ids) == "the man\n"
    assert tokenizer("the").input_ids == [257]


@pytest.mark.parametrize("qtype", ["Q4_K", "Q6_K"])
def test_k_types(tmp_path, qtype):
    original = tiny.llama(vocab_size=300, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    path = tmp_path / "k.gguf"
    expected = tiny_gguf.write(path, original, "llama", gguf.GGMLQuantizationType[qtype])
    model, _ = read_gguf(path)
    for name, parameter in model.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), expected[name]), name
        assert parameter.isfinite().all() and parameter.abs().max() > 0


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_path_loads_through_the_cache(tmp_path, model_cache, quantization):
    path = tmp_path / "tiny-cached.gguf"
    expected = write(path, "llama", "Q8_0")
    model, tokenizer = load_quantized(path, quantization=quantization)
    plain, _ = read_gguf(path)
    batch = tiny.batch(plain)
    if quantization is None:
        assert torch.equal(model(**batch).logits, plain.eval()(**batch).logits)
    else:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        for name, matrix in expected.items():
            if name.endswith("_proj.weight"):
                wanted = dequantize_4bit(*quantize_4bit(torch.tensor(matrix), blocksize=64, quant_type="nf4"))
                module = model.get_submodule(name.removesuffix(".weight"))
                assert torch.equal(dequantized_weight(module), wanted)
    assert tokenizer("the").input_ids == [257]
    folder = next(model_cache.glob(f"tiny-cached-{quantization or 'float32'}-*"))
    text = "".join(p.read_text() for p in folder.glob("*.json") if p.name != "tokenizer.json")
    assert str(tmp_path) not in text  # the cache tells nothing of the machine
    # A second load reads the cache: the file is hashed, not converted.
    stamp = (folder / "lcsb-cache.json").stat().st_mtime_ns
    again, _ = load_quantized(path, quantization=quantization)
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    assert (folder / "lcsb-cache.json").stat().st_mtime_ns == stamp
    # Another content under the same name is another model.
    write(path, "llama", "Q4_0")
    other, _ = load_quantized(path, quantization=quantization)
    assert not torch.equal(other(**batch).logits, model(**batch).logits)


def test_refusals_name_the_file_and_the_fault(tmp_path):
    """U49: a missing tensor, one left over, positions that cannot be read, an unknown type."""

    def refused(message, kind=ValueError, **changes):
        path = tmp_path / "faulty.gguf"
        write(path, **changes)
        with pytest.raises(kind, match=message) as error:
            read_gguf(path)
        assert "\n" not in str(error.value)

    refused(
        r"faulty.gguf: 1 weights of LlamaForCausalLM have no tensor: model.layers.2.mlp.up_proj.weight",
        leave_out=("model.layers.2.mlp.up_proj.weight",),
    )
    refused(r"tensors hold \d+ numbers, LlamaForCausalLM takes \d+", extra="blk.0.attn_sub_norm.weight")
    refused(r"scales its rotary positions \(rope_freqs.weight\)", extra="rope_freqs.weight")
    refused(
        r"scales its rotary positions \(llama.rope.scaling.type = linear",
        rope_scaling=gguf.RopeScalingType.LINEAR,
    )
    refused(
        r"tensor blk.0.odd.weight has type I8, which cannot be dequantised",
        raw_type=gguf.GGMLQuantizationType.I8,
    )


def test_unknown_type_number_and_other_broken_files(tmp_path):
    path = tmp_path / "broken.gguf"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ValueError, match=r"is not a GGUF file: starts with b'PK.*expected b'GGUF'"):
        read_gguf(path)
    for size in (4, 100, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"broken.gguf cannot be read as GGUF"):
            read_gguf(path)
    name = b"token_embd.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two dimensions
    assert whole[at : at + 4] == (0).to_bytes(4, "little")
    path.write_bytes(whole[:at] + (99).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(ValueError, match=r"broken.gguf cannot be read as GGUF: .*99"):
        read_gguf(path)
    with pytest.raises(ValueError, match=r"no file .*absent.gguf"):
        load_quantized(tmp_path / "absent.gguf")


def test_unknown_architecture_is_named(tmp_path):
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "no-such-architecture")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"odd.gguf: .*no-such-architecture"):
        read_gguf(path)


def planted(tmp_path, monkeypatch, contents):
    """Stand-ins for the packages of gemma3-270m, found on the path and never imported."""
    for (package, file), content in zip(BUILTIN_MODELS["gemma3-270m"].parts, contents, strict=True):
        target = tmp_path / package / file
        target.parent.mkdir(parents=True)
        target.write_bytes(content)
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


def test_parts_are_joined_in_order_and_checked(tmp_path, monkeypatch):
    contents = [b"one", b"two", b"three", b"four"]
    planted(tmp_path, monkeypatch, contents)
    with (
        pytest.raises(ValueError, match=r"'gemma3-270m' has sha256 \w+, expected a5fd3b62"),
        builtin_gguf("gemma3-270m"),
    ):
        pass
    known = BUILTIN_MODELS["gemma3-270m"]
    digest = hashlib.sha256(b"".join(contents)).hexdigest()
    changed = gguf_files.BuiltinModel(known.parts, digest, known.install, known.licence)
    monkeypatch.setitem(BUILTIN_MODELS, "gemma3-270m", changed)
    with builtin_gguf("gemma3-270m") as path:
        assert path.read_bytes() == b"onetwothreefour"
    assert not path.exists()


def test_demo_file_is_the_known_one(demo_model):
    """The installed package holds the file whose hash names the cache."""
    with builtin_gguf("smollm2-135m") as path:
        assert path == demo_model
