"""The engine and the law of idle layers on the demo model in NF4, in float32."""

from __future__ import annotations

import pytest
import reference
import torch

from lcsb.config import LCSBConfig
from lcsb.idle_law import IdleLaw
from lcsb.models import attach_lora, load_quantized
from lcsb.selective import selective_backward


@pytest.fixture(scope="module")
def demo(demo_cache):
    """SmolLM2 in NF4 with adapters, and one batch [1, 24]."""
    base, tokenizer = load_quantized("smollm2-135m")
    model = attach_lora(base, seed=0).train()
    text = "A for statement is used to iterate over the elements of a sequence such as a string, a tuple or a list."
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :24]
    assert ids.shape == (1, 24)
    return model, {"input_ids": ids, "labels": ids}


def test_full_equals_plain_backward_bit_for_bit(demo):
    model, batch = demo
    truth, true_loss = reference.gradients(model, batch)
    with selective_backward(model, LCSBConfig("full")) as lcsb:
        lcsb.begin()
        loss = model(**batch).loss
        loss.backward()
        found = {name: p.grad for name, p in lcsb.parameters().items()}
        model.zero_grad(set_to_none=True)
    assert torch.equal(loss.detach(), true_loss)
    assert found.keys() == truth.keys() and len(found) == 30 * 7 * 2
    assert all(torch.equal(found[name], truth[name]) for name in truth)
    assert sum(bool(gradient.any()) for gradient in truth.values()) == 30 * 7  # lora_B starts at zero


@pytest.mark.parametrize("idle", ["momentum", "frozen"])
def test_idle_layers_obey_the_law(demo, idle):
    model, batch = demo
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0
    )
    rows, losses = [], []
    with selective_backward(model, LCSBConfig("exact", idle, layers_per_step=8)) as lcsb:
        law = IdleLaw(lcsb.adapters, optimizer, idle)
        for t in range(4):
            law.before_step(lcsb.begin())
            loss = model(**batch).loss
            losses.append(float(loss.detach()))
            loss.backward()
            lcsb.step(optimizer)
            rows.append(law.after_step(t))
    assert [row["checked"] for row in rows] == [14 * n for n in (22, 22, 23, 23)]
    assert losses[-1] < losses[0]
    if idle == "frozen":
        assert [row["moved"] for row in rows] == [0] * 4
    else:
        assert [row["violations"] for row in rows] == [0] * 4
        assert 0 < max(row["worst"] for row in rows) < 1e-4
