"""The engine and the law of idle layers on the demo model in NF4, in float32."""

from __future__ import annotations

import pytest
import reference
import torch

from lcsb.config import LCSBConfig
from lcsb.engine.engine import Engine
from lcsb.engine.find_packed import packed_model
from lcsb.engine.layer import module_of
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


def draw_adapters(model):
    """Adapters whose B is not zero, under PEFT's names."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if p.requires_grad}


def in_double(logits, ids):
    """Mean cross entropy. transformers' own, in float32 over 49,152 words, is 3e-6 off, and its gradient 2e-4."""
    return torch.nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:])


def distance(ours, theirs):
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("mode", ["full", "exact", "identity", "mlp"])
def test_memory_engine_computes_the_same(demo, mode):
    """On the same packed weights: loss to 1e-6, every adapter gradient to the rounding of both (3e-5)."""
    model, batch = demo
    config = LCSBConfig(mode, layers_per_step=8)
    engine = Engine(packed_model("smollm2-135m"), config)
    engine.load_adapter_tensors(draw_adapters(model))
    engine.t = 2
    found = engine.loss_and_gradient(batch["input_ids"])
    model.zero_grad(set_to_none=True)
    with selective_backward(model, config, t=2) as lcsb:
        lcsb.begin()
        loss = in_double(model(input_ids=batch["input_ids"]).logits, batch["input_ids"])
        loss.backward()
        assert found.loss == pytest.approx(loss.item(), rel=1e-6)
        assert sorted(found.by_layer) == list(lcsb.selected)
        for index, flat in found.by_layer.items():
            theirs = {name: p.grad for name, p in lcsb.adapters[index].items()}
            for name, view in engine.layout.views(flat).items():
                projection, part = name.split(".")
                (key,) = [n for n in theirs if f".{projection}.lora_{part.upper()}." in n]
                assert distance(view, theirs[key]) < 3e-5, key
    model.zero_grad(set_to_none=True)


@pytest.mark.slow
def test_memory_engine_against_float64(demo, monkeypatch):
    """256 tokens of text, everything in float64 on the same weights: loss to 1e-6, every adapter gradient to float32's
    rounding (seen: 0.8e-5 to 1.2e-5 at the worst, 0.4e-5 in the median)."""
    import copy
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    model, _ = demo
    folder = packed_model("smollm2-135m")
    engine = Engine(folder, LCSBConfig("full"))
    engine.load_adapter_tensors(draw_adapters(model))
    text = "\n".join(topics[name] for name in ("for", "if", "while"))
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"][:, :256]
    assert ids.shape == (1, 256)

    def norm(self, x):  # transformers' own computes in float32 whatever it is given
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    settings = copy.deepcopy(model.config)
    del settings.quantization_config
    dense = LlamaForCausalLM(settings).double()
    embedding = engine.folder.tensor(engine.embedding_name)
    weights = {
        "model.norm.weight": engine.final_norm,
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
    }
    adapters = {}
    for index, layer in enumerate(engine.layers):
        prefix = f"model.layers.{index}."
        weights |= {f"{prefix}{name}.weight": weight for name, weight in layer.norms.items()}
        views = {n: v.double() for n, v in engine.layout.views(engine.states.x(index)).items()}
        for name, projection in layer.projections.items():
            key = f"{prefix}{module_of(name)}.{name}.weight"
            adapters[key] = index, name, views[f"{name}.a"], views[f"{name}.b"]
            weights[key] = projection.matrix.dequantized().double()
            weights[key] += engine.lora.scale * views[f"{name}.b"] @ views[f"{name}.a"]
    dense.load_state_dict(weights)
    loss = in_double(dense.model(input_ids=ids).last_hidden_state @ embedding.double().T, ids)
    loss.backward()
    found = engine.loss_and_gradient(ids)
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    for key, (index, name, a, b) in adapters.items():
        pull = engine.lora.scale * dense.get_parameter(key).grad
        ours = engine.layout.views(found.by_layer[index])
        assert distance(ours[f"{name}.a"], b.T @ pull) < 2e-5, key
        assert distance(ours[f"{name}.b"], pull @ a.T) < 2e-5, key
