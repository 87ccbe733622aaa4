"""Packed folders with random weights: the engine's geometries, checked at 1/16 before anything is measured on them."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import tiny_packed
import torch
from dense_reference import dense_model, dense_tensors, saved_tensors, scaled_geometry

from bcd_theory.geometry import GEOMETRIES, Geometry
from lcsb import LCSBConfig
from lcsb.engine.engine import Engine, LoRASettings
from lcsb.engine.random_weights import family_of, write_random
from lcsb.models import load_quantized

CASES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "gemma3-1b", "gemma3-4b")
# Longer than a window at 1/16, so that local layers see less than global ones.
TOKENS, WINDOW = 48, 32
# Products of narrow matrices with the spread of wide ones; at 0.02 scores are all but equal, and their gradients, which
# are differences then, agree with float64 to 1e-4 only, transformers' no less than ours.
STD, ALPHA = 0.06, 4


@pytest.mark.parametrize("name", CASES)
def test_a_sixteenth_of_each_geometry_against_dense_autograd(name, tmp_path):
    geometry = scaled_geometry(GEOMETRIES[name])
    folder = write_random(tmp_path / name, geometry, window=WINDOW, std=STD, seed=3)
    model = dense_model(folder, alpha=ALPHA)
    local = sum(kind == "sliding_attention" for kind in model.config.layer_types)
    assert local == (geometry.layers - geometry.layers // 6 if name.startswith("gemma") else 0)
    engine = Engine(folder, LCSBConfig("full"), lora=LoRASettings(r=4, alpha=ALPHA), compute_dtype="float32")
    engine.load_adapter_tensors(tiny_packed.adapters(model))
    ids = tiny_packed.tokens(model, 1, TOKENS)
    found = engine.loss_and_gradient(ids)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    assert abs(found.loss - math.log(geometry.vocabulary)) < 1
    theirs = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if "lora_" in n}
    # The engine's own walk over its states names the views of its flat vectors; gradients are laid out alike.
    for index, flat in found.by_layer.items():
        engine.states.x(index).copy_(flat)
    ours = engine.adapter_tensors()
    assert ours.keys() == theirs.keys() and len(ours) == 14 * geometry.layers
    errors = {
        key: float((ours[key].double() - grad.double()).norm() / grad.double().norm())
        for key, grad in theirs.items()
    }
    worst = max(errors, key=errors.get)
    assert errors[worst] < 1e-5, (worst, errors[worst])


def test_transformers_loads_it_with_the_codes_of_the_file(tmp_path):
    shape = Geometry(2, 64, 128, 4, 2, 16, 97, qkv_bias=True, tied=False)
    folder = write_random(tmp_path / "m", shape, std=0.1)
    ids = torch.arange(3, 23)[None]
    dense = dense_model(folder).get_base_model()
    tiny_packed.tiny.tokenizer(97).save_pretrained(folder)
    model, _ = load_quantized(folder)
    saved = saved_tensors(folder)
    state = model.state_dict()
    assert {name.replace(".nested_", "") for name in state} == saved.keys()
    for name, value in saved.items():
        assert torch.equal(state[name].float().view(-1), value.float().view(-1)), name
    engine = Engine(folder, LCSBConfig("full"), lora=LoRASettings(r=4), compute_dtype="float32")
    total, count = engine.evaluate(ids)
    assert total / count == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-6)
    for name, parameter in dense.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    assert total / count == pytest.approx(dense(input_ids=ids, labels=ids).loss.item(), rel=1e-6)


def test_weights_have_the_spread_that_was_asked_for(tmp_path):
    geometry = Geometry(1, 256, 512, 4, 2, 64, 512)
    folder = write_random(tmp_path / "a", geometry)
    for name, value in dense_tensors(folder).items():
        if value.dim() == 2:
            assert float(value.std()) == pytest.approx(0.02, rel=0.03), name
    assert saved_tensors(folder)["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_same_seed_same_bytes(tmp_path):
    shape = scaled_geometry(GEOMETRIES["gemma3-270m"])
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_random(tmp_path / name, shape, seed=seed)
    a, b, c = (sorted((tmp_path / name).iterdir()) for name in "abc")
    assert [path.name for path in a] == [path.name for path in b] == [path.name for path in c]
    assert all(x.read_bytes() == y.read_bytes() for x, y in zip(a, b, strict=True))
    assert any(x.read_bytes() != y.read_bytes() for x, y in zip(a, c, strict=True))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_families(name):
    """A name's family is that of its model."""
    expected = {"smollm2": "llama", "qwen2.5": "qwen2", "gemma3": "gemma3_text"}
    assert family_of(GEOMETRIES[name]) == expected[name.split("-")[0]]


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"geometry 'gemma3-4', expected one of .*; nearest is 'gemma3-4b'"):
        write_random(tmp_path / "a", "gemma3-4")
    with pytest.raises(ValueError, match="family 'llama' does not fit"):
        write_random(tmp_path / "a", "gemma3-4b", family="llama")
    with pytest.raises(ValueError, match="family 'gpt2', expected one of llama, qwen2, qwen3, gemma3_text"):
        write_random(tmp_path / "a", "gemma3-4b", family="gpt2")
    with pytest.raises(
        ValueError, match=r"q_proj\.weight: 10 x 10, expected an even number of columns and whole"
    ):
        write_random(tmp_path / "a", Geometry(1, 10, 20, 1, 1, 10, 30))
    assert not (tmp_path / "a").exists()


_SMALL = """
import sys
from lcsb.engine.random_weights import write_random
write_random(sys.argv[1], "qwen2.5-0.5b")
heavy = [name for name in ("transformers", "bitsandbytes", "peft") if name in sys.modules]
status = open("/proc/self/status").read()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024, heavy)
"""


@pytest.mark.slow
def test_half_a_billion_weights_in_600_megabytes(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _SMALL, str(tmp_path / "m")], capture_output=True, text=True, check=True
    )
    peak, heavy = done.stdout.split(" ", 1)
    assert int(peak) < 400_000_000 and heavy.strip() == "[]"
