"""Fidelity from local vector-Jacobian products equals what whole backward passes give, in float64."""

from __future__ import annotations

import pytest
import reference
import tiny
import torch

from lcsb.layers import decoder_layers
from lcsb.measure.fidelity import compare, cyclic_gradients, measure_fidelity


def reference_rows(model, batch, mode, block_of):
    """Cosine, rho and delta by layer from plain autograd: one pass a layer, that layer's block selected."""
    layers = decoder_layers(model)
    truth, _ = reference.gradients(model, batch)
    rows = []
    for index, layer in enumerate(layers):
        own = {id(p) for p in layer.parameters() if p.requires_grad}
        names = [name for name, p in model.named_parameters() if id(p) in own]
        surrogate, _ = reference.gradients(model, batch, mode, block_of(index))
        a = torch.cat([surrogate[name].flatten() for name in names])
        b = torch.cat([truth[name].flatten() for name in names])
        rows.append(
            (
                float(a @ b / (a.norm() * b.norm())),
                float(a.norm() / b.norm()),
                float((a - b).norm() / b.norm()),
            )
        )
    return rows


@pytest.mark.parametrize("mode", ["identity", "mlp"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_both_layouts_equal_plain_autograd(family, mode):
    model = tiny.with_lora(tiny.BUILDERS[family](dtype=torch.float64))
    batch = tiny.batch(model, lengths=[12, 7])
    n, k = len(decoder_layers(model)), 2
    found = {(row.mode, row.layout): row for row in measure_fidelity(model, batch, k).rows}
    blocks = {
        "cyclic": lambda i: range(k * (i // k), min(k * (i // k) + k, n)),
        "all-above": lambda i: [i],
    }
    for layout, block_of in blocks.items():
        row = found[mode, layout]
        expected = reference_rows(model, batch, mode, block_of)
        for values, position in ((row.cosine, 0), (row.norm_ratio, 1)):
            assert values == pytest.approx([e[position] for e in expected], abs=1e-10)
        # delta is the root of a difference of squares: rounding of 1e-16 shows as 1e-8 where delta is 0
        assert row.relative_error == pytest.approx([e[2] for e in expected], abs=1e-7)


def test_the_top_block_is_exact():
    model = tiny.with_lora(tiny.llama(dtype=torch.float64))
    for row in measure_fidelity(model, tiny.batch(model), 2).rows:
        if row.layout == "cyclic":
            assert row.cosine[2:] == pytest.approx((1.0, 1.0), abs=1e-12)
            assert max(row.cosine[:2]) < 0.999


@pytest.mark.parametrize("recompute", [False, True])
def test_engine_reference_and_recompute(recompute):
    model = tiny.with_lora(tiny.llama(dtype=torch.float64))
    batch = tiny.batch(model)
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    truth = cyclic_gradients(model, batch, "full", None)
    expected = compare("mlp", "cyclic", cyclic_gradients(model, batch, "mlp", 2), truth)
    found = next(r for r in measure_fidelity(model, batch, 2).rows if (r.mode, r.layout) == ("mlp", "cyclic"))
    assert found.cosine == pytest.approx(expected.cosine, abs=1e-12)
    assert all(p.grad is None for p in model.parameters())


def test_hidden_cosines():
    """Against hooks on the hidden states of a plain pass: identity takes the gradient above for the one below."""
    model = tiny.with_lora(tiny.llama(dtype=torch.float64))
    batch = tiny.batch(model)
    hidden = []
    handles = [
        layer.register_forward_hook(lambda m, a, out: hidden.append(out)) for layer in decoder_layers(model)
    ]
    loss = model(**batch).loss
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(loss, hidden)
    cosines = [
        float(a.flatten() @ b.flatten() / (a.norm() * b.norm()))
        for a, b in zip(gradients[1:], gradients[:-1], strict=True)
    ]
    found = measure_fidelity(model, batch, 2)
    assert found.hidden_cosine["identity"][1:] == pytest.approx(cosines, abs=1e-12)
    assert min(found.hidden_cosine["mlp"]) > min(found.hidden_cosine["identity"])
    assert found.loss == pytest.approx(float(loss.detach()))


def test_a_true_gradient_of_zero_has_no_direction():
    zero, one = {"a": torch.zeros(3)}, {"a": torch.ones(3)}
    row = compare("identity", "cyclic", [one, zero, one], [zero, one, one])
    assert row.cosine[0] is None and row.norm_ratio[0] is None and row.relative_error[0] is None
    assert (row.cosine[1], row.norm_ratio[1], row.relative_error[1]) == (0.0, 0.0, 1.0)
    assert (row.cosine[2], row.norm_ratio[2], row.relative_error[2]) == pytest.approx((1.0, 1.0, 0.0))


def test_dropout_is_refused():
    model = tiny.with_lora(tiny.llama(), dropout=0.1)
    with pytest.raises(ValueError, match="dropout is active in 'base_model"):
        measure_fidelity(model, tiny.batch(model), 2)
