"""GGUF files converted: numbers of the reference dequantiser, settings and tokenizer of transformers, faults named."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import tiny
import tiny_gguf
import torch
from dense_reference import saved_tensors
from test_convert import same_settings, same_tensors
from transformers import AutoTokenizer

from lcsb.engine import convert as module
from lcsb.engine.convert import convert
from lcsb.engine.engine import Engine, LoRASettings
from lcsb.engine.gguf_source import GGUFSource
from lcsb.engine.gguf_tokenizer import SPLITS, byte_letters
from lcsb.engine.packed import pack
from lcsb.gguf_files import BUILTIN_MODELS, BuiltinModel
from lcsb.models import load_quantized

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


def model_of(architecture, **changes):
    # Neither the format nor transformers' reader of it knows Gemma's query scale (256) or Qwen3's width of heads (128).
    own = {"gemma3": {"query_pre_attn_scalar": 256}, "qwen3": {"head_dim": 128, "vocab_size": 300}}
    changes = {**own.get(architecture, {"vocab_size": 300}), "intermediate_size": 128, **changes}
    model = tiny.BUILDERS[architecture](**changes)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all equal at their start: one in the wrong place would not be seen
                parameter.add_(0.3 * torch.rand(parameter.shape, generator=generator))
    return model


def write(path, architecture="llama", kind="F32", model=None, **changes):
    model = model or model_of(architecture)
    return tiny_gguf.write(path, model, architecture, gguf.GGMLQuantizationType[kind], **changes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_numbers_of_the_reference_dequantiser(tmp_path, monkeypatch, architecture, kind):
    """U49: permuted rows of q and k, Gemma's norms, each type; read in pieces of a head or a few rows."""
    path = tmp_path / "tiny.gguf"
    expected = write(path, architecture, kind)
    monkeypatch.setattr(module, "NUMBERS_AT_ONCE", 500)
    convert(path, tmp_path / "packed")
    ours = saved_tensors(tmp_path / "packed")
    for name, matrix in expected.items():
        value = torch.from_numpy(np.array(matrix))
        if name.endswith("_proj.weight"):
            codes, scales = pack(value)
            assert torch.equal(ours[name].view(-1), codes) and torch.equal(ours[f"{name}.absmax"], scales), (
                name
            )
        else:
            kept = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
            assert ours[name].dtype == (kept if value.dim() == 2 else torch.float32)
            assert torch.equal(ours[name].float(), value), name
    assert sum(name.endswith("_proj.weight") for name in ours) == 7 * len(model_of(architecture).model.layers)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_everything_that_load_quantized_makes(tmp_path, architecture):
    path = tmp_path / "tiny.gguf"
    write(path, architecture, "Q8_0")
    theirs, tokenizer = load_quantized(path)
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    convert(path, tmp_path / "packed")
    same_tensors(saved_tensors(tmp_path / "packed"), saved_tensors(tmp_path / "theirs"))
    # A byte-level vocabulary under Gemma's name is nothing that exists, and no tokenizer that can be loaded again.
    same_settings(tmp_path / "packed", tmp_path / "theirs", tokenizer=architecture != "gemma3")
    ids = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        loss = theirs(input_ids=ids, labels=ids).loss.item()
    total, count = Engine(tmp_path / "packed", lora=LoRASettings(r=4), compute_dtype="float32").evaluate(ids)
    assert total / count == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_of_256(tmp_path, kind):
    path = tmp_path / "k.gguf"
    model = tiny.llama(vocab_size=300, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    expected = write(path, "llama", kind, model)
    convert(path, tmp_path / "packed")
    ours = saved_tensors(tmp_path / "packed")
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        codes, scales = pack(torch.from_numpy(np.array(expected[name])))
        assert torch.equal(ours[name].view(-1), codes) and torch.equal(ours[f"{name}.absmax"], scales)


def test_parts_are_read_as_one_file(tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write(path, "gemma3", "Q8_0")
    whole = path.read_bytes()
    cuts = [0, 3, 5000, 5001, len(whole) // 2, len(whole)]
    parts = [tmp_path / f"part{i}" for i in range(len(cuts) - 1)]
    for part, first, last in zip(parts, cuts, cuts[1:], strict=False):
        part.write_bytes(whole[first:last])
    one, many = GGUFSource([path], "one.gguf"), GGUFSource(parts, "many.gguf")
    assert one.config == many.config and one.names() == many.names()
    for name in one.names():
        rows = one.shape(name)[0]
        assert torch.equal(one.rows(name, 0, rows), many.rows(name, 0, rows)), name
    # A built-in model is checked against the hash that is known of it.
    monkeypatch.setattr(module, "builtin_parts", lambda _: parts)
    digest = module._joined_sha256([path])["sha256"]
    known = BUILTIN_MODELS["gemma3-270m"]
    with pytest.raises(ValueError, match=r"'gemma3-270m' has sha256 \w+, expected a5fd3b62"):
        convert("gemma3-270m", tmp_path / "packed")
    monkeypatch.setitem(
        BUILTIN_MODELS, "gemma3-270m", BuiltinModel(known.parts, digest, known.install, known.licence)
    )
    convert("gemma3-270m", tmp_path / "packed")
    assert (tmp_path / "packed" / "SOURCE.txt").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {*(p.name for p in parts), "tiny.gguf", "packed"}


# -- tokenizers --------------------------------------------------------------------------------------------------------

TEXT = "It's  the\n\n man's 12345 in \t\u00fcber \u4f60\u597d x=3.14; \U0001f600<|s299|> end "


def vocabulary_file(path, architecture, words, kind, **settings):
    """A GGUF file with a vocabulary and next to no tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for add, value in (
        (writer.add_context_length, 64), (writer.add_block_count, 1), (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 32), (writer.add_head_count, 1), (writer.add_head_count_kv, 1),
        (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_freq_base, 1e4), (writer.add_key_length, 32),
        (writer.add_sliding_window, 8), (writer.add_tokenizer_model, kind), (writer.add_token_list, words),
    ):  # fmt: skip
        add(value)
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(words), 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def both_tokenizers(path, folder):
    folder.mkdir()
    notes = GGUFSource([path], path.name).write_tokenizer(folder)
    assert notes == []
    ours = AutoTokenizer.from_pretrained(folder)
    return ours, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("cut", SPLITS)
def test_byte_level_vocabularies(tmp_path, cut):
    merges = [
        "t h",
        "th e",
        "i n",
        "1 2",
        "12 3",
        "\u0120 \u0120",
        "\u0120 the",
        "' s",
        "n '",
        "\u010a \u010a",
    ]
    letters = byte_letters()
    words = [*letters, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>", "<|s299|>"]
    path = tmp_path / "v.gguf"
    types = [1] * (len(words) - 2) + [3, 4]
    settings = {
        "token_merges": merges,
        "token_types": types,
        "tokenizer_pre": cut,
        "add_bos_token": cut == "llama3",
    }
    vocabulary_file(path, "qwen2", words, "gpt2", bos_token_id=len(words) - 2, eos_token_id=0, **settings)
    ours, theirs = both_tokenizers(path, tmp_path / "ours")
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert len(words) - 1 in ours(TEXT).input_ids
    assert ours.decode(ours("the \u00fcber").input_ids, skip_special_tokens=True) == "the \u00fcber"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentencepiece_vocabularies(tmp_path, architecture):
    """Merges are not in the file: from the scores for Llama, from the order of the words for Gemma."""
    first = ["<pad>", "<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    space = "  " if architecture == "gemma3" else "\u2581\u2581"
    pieces = ["th", "the", "\u2581the", "\u2581t", "man", "ma", "an", space, "in", "\u2581in", "he", "12"]
    letters = ["\u2581", *"Ithesmanx=.;'1234, endub", "\u4f60"]
    words = [*dict.fromkeys([*first, *pieces, *letters])]
    types = [3, 2, 3, 3] + [6] * 256 + [1] * (len(words) - 260)
    if architecture == "gemma3":
        types[words.index(space)] = 4
    scores = [0.0] * 260 + [-float((7 * i) % 5) for i in range(len(words) - 260)]
    path = tmp_path / "v.gguf"
    vocabulary_file(
        path, architecture, words, "llama", token_scores=scores, token_types=types, bos_token_id=2, eos_token_id=3,
        unk_token_id=1, pad_token_id=0,
    )  # fmt: skip
    ours, theirs = both_tokenizers(path, tmp_path / "ours")
    for text in (TEXT, "the man in the  man", " the"):
        assert ours(text).input_ids == theirs(text).input_ids
    assert ours("the").input_ids[0] == 2  # no flag in the file: the first token stands before a text
    assert ours("the", add_special_tokens=False).input_ids != list(map(words.index, "the"))


def test_vocabularies_that_are_not_known(tmp_path):
    path = tmp_path / "v.gguf"
    vocabulary_file(path, "llama", ["a", "b"], "bert")
    with pytest.raises(
        ValueError, match=r"its vocabulary is of kind 'bert', expected gpt2 or llama; give the token"
    ):
        GGUFSource([path], "v.gguf").write_tokenizer(tmp_path)
    vocabulary_file(path, "llama", ["a", "b"], "gpt2", tokenizer_pre="tekken", token_merges=["a b"])
    with pytest.raises(
        ValueError, match=r"its text is cut by the rule 'tekken', expected one of default, gpt-2"
    ):
        GGUFSource([path], "v.gguf").write_tokenizer(tmp_path)


def test_a_tokenizer_of_the_users_choice(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path)
    tiny.tokenizer(97).save_pretrained(tmp_path / "own")
    convert(path, tmp_path / "packed", tokenizer=tmp_path / "own")
    assert (tmp_path / "packed" / "tokenizer.json").read_bytes() == (
        tmp_path / "own" / "tokenizer.json"
    ).read_bytes()
    with pytest.raises(ValueError, match="absent: no such folder, expected one with tokenizer files"):
        convert(path, tmp_path / "other", tokenizer=tmp_path / "absent")


# -- files that do not fit ---------------------------------------------------------------------------------------------


def test_faulty_files_are_named(tmp_path):
    def refused(message, architecture="llama", **changes):
        write(tmp_path / "faulty.gguf", architecture, **changes)
        with pytest.raises(ValueError, match=message) as raised:
            convert(tmp_path / "faulty.gguf", tmp_path / "packed")
        assert "\n" not in str(raised.value) and not (tmp_path / "packed").exists()

    name = "model.layers.2.mlp.up_proj.weight"
    refused(rf"faulty.gguf: no tensor {name}, expected one of shape \(128, 64\)", leave_out=(name,))
    refused(
        r"1 tensors have no place .* first blk.0.attn_sub_norm.weight", extra="blk.0.attn_sub_norm.weight"
    )
    refused(r"scales its rotary positions \(rope_freqs.weight\)", extra="rope_freqs.weight")
    refused(
        r"scales its rotary positions \(llama.rope.scaling.type = linear",
        rope_scaling=gguf.RopeScalingType.LINEAR,
    )
    refused("tensor blk.0.odd.weight has type I8, which cannot", raw_type=gguf.GGMLQuantizationType.I8)


def test_broken_files(tmp_path):
    path = tmp_path / "broken.gguf"
    write(path)
    whole = path.read_bytes()
    for data, message in (
        (b"PK\x03\x04" + whole[4:], r"is not a GGUF file: starts with b'PK.*expected b'GGUF'"),
        (b"GGUF\x01\0\0\0" + whole[8:], "GGUF version 1, expected 2 or 3"),
        (whole[:4], "its header cannot be read, it was cut short"),
        (whole[:100], "its header cannot be read, it was cut short"),
        (whole[: len(whole) // 2], r"ends at byte \d+, the file has \d+; it was cut short"),
        (whole[:-1], r"ends at byte \d+, the file has \d+; it was cut short"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            convert(path, tmp_path / "packed")
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    path.write_bytes(whole[:at] + (99).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(
        ValueError, match=r"tensor token_embd.weight has type 99, which cannot be dequantised"
    ):
        convert(path, tmp_path / "packed")


def test_other_architectures_are_named(tmp_path):
    path = tmp_path / "odd.gguf"
    vocabulary_file(path, "phi3", ["a"], "llama")
    with pytest.raises(
        ValueError, match=r"odd.gguf: architecture 'phi3', expected one of llama, qwen2, qwen3, gem"
    ):
        convert(path, tmp_path / "packed")
