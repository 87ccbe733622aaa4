"""U11: recompute in either form, on either base, with any selection: every selected adapter gets its true gradient."""

from __future__ import annotations

import pytest
import tiny
import tiny_packed
import torch

from lcsb import LCSBConfig, selective_backward

SELECTIONS = {"lowest": (0,), "highest": (3,), "all": (0, 1, 2, 3)}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return tiny_packed.write(tmp_path_factory.mktemp("recompute"), "llama", intermediate_size=128)


def model_on(base, packed):
    if base == "nf4":
        return tiny_packed.reference(packed)
    return tiny.with_lora(tiny.llama(intermediate_size=128))


def gradients(model, selected, recompute, reentrant):
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    ids = tiny.batch(model)["input_ids"]
    config = LCSBConfig("exact", "frozen", schedule="fixed", fixed_layers=selected)
    with selective_backward(model, config) as lcsb:
        assert lcsb.begin() == selected
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in lcsb.trained_parameters().items() if p.grad is not None}


@pytest.mark.parametrize("base", ["float32", "nf4"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_recompute_changes_no_gradient(packed, base, selection):
    selected = SELECTIONS[selection]
    plain = gradients(model_on(base, packed), selected, False, False)
    assert len(plain) == 14 * len(selected)  # A and B of seven projections
    for reentrant in (False, True):
        found = gradients(model_on(base, packed), selected, True, reentrant)
        assert found.keys() == plain.keys()
        for name, value in plain.items():
            assert float(value.norm()) > 0, name
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_no_adapter_stays_at_its_start(packed, reentrant):
    """After one cycle no B is zero any more."""
    model = tiny.with_lora(tiny.llama(), random_b=False)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = tiny.batch(model)
    with selective_backward(model, LCSBConfig("exact", "frozen", layers_per_step=1)) as lcsb:
        for _ in range(4):
            lcsb.begin()
            model(**batch).loss.backward()
            lcsb.step(optimizer)
    assert all(float(p.norm()) > 0 for name, p in model.named_parameters() if "lora_B" in name)
