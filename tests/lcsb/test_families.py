"""Every family of decoder layer, in every backward mode, against its own equations written out in float64.

The reference here knows nothing of lcsb: each family's layer is its equation (`EQUATIONS`), in which the outputs of
detached branches are constants. That the equations are the library's is shown by equal losses, to the last bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import tiny
import torch

from lcsb.config import LCSBConfig
from lcsb.selective import selective_backward

# family -> (dotted path of its layers, attention, equation)
PRE = ("model.layers", "self_attn", "pre")
FAMILIES = {
    "llama": PRE, "qwen2": PRE, "qwen3": PRE, "mistral": PRE, "olmo": PRE, "phi3": PRE,
    "gemma2": ("model.layers", "self_attn", "sandwich"), "gemma3": ("model.layers", "self_attn", "sandwich"),
    "olmo2": ("model.layers", "self_attn", "post"), "gpt2": ("transformer.h", "attn", "gpt2"),
    "gpt_neox": ("gpt_neox.layers", "attention", "parallel"),
}  # fmt: skip
MODES = ("full", "exact", "identity", "mlp")
WINDOW = 8
LOCAL = {"gemma2": (0, 2), "gemma3": (0, 1, 2, 3, 4), "phi3": (0, 1, 2, 3), "mistral": (0, 1, 2, 3)}


def pre(layer, h, attention, mlp):
    a = h + attention(layer.input_layernorm(h))
    return a + mlp(layer.post_attention_layernorm(a))


def sandwich(layer, h, attention, mlp):
    a = h + layer.post_attention_layernorm(attention(layer.input_layernorm(h)))
    return a + layer.post_feedforward_layernorm(mlp(layer.pre_feedforward_layernorm(a)))


def post(layer, h, attention, mlp):
    a = h + layer.post_attention_layernorm(attention(h))
    return a + layer.post_feedforward_layernorm(mlp(a))


def gpt2(layer, h, attention, mlp):
    a = attention(layer.ln_1(h)) + h
    return a + mlp(layer.ln_2(a))


def parallel(layer, h, attention, mlp):
    # Both branches start from h: in mode mlp the gradient takes the skip and the MLP, never the attention.
    attended = attention(layer.input_layernorm(h))
    return mlp(layer.post_attention_layernorm(h)) + attended + h


EQUATIONS = {"pre": pre, "sandwich": sandwich, "post": post, "gpt2": gpt2, "parallel": parallel}


@contextlib.contextmanager
def written_out(layers, attention_name, equation, backward, selected):
    """Each layer's forward is its equation; idle layers' branches are constants as the mode says."""

    def forward_of(index, layer):
        detach_attention = index not in selected and backward in ("identity", "mlp")
        detach_mlp = index not in selected and backward == "identity"
        branch = getattr(layer, attention_name)

        def forward(hidden, *args, **kwargs):
            if args:  # GPT-2: cache, mask and (no) encoder states by position
                kwargs = dict(zip(("cache", "attention_mask"), args, strict=False)) | kwargs
                kwargs.pop("encoder_attention_mask", None)

            def attention(x):
                value = branch(x, **kwargs)[0]
                return value.detach() if detach_attention else value

            def mlp(x):
                value = layer.mlp(x)
                return value.detach() if detach_mlp else value

            return EQUATIONS[equation](layer, hidden, attention, mlp)

        return forward

    for index, layer in enumerate(layers):
        layer.forward = forward_of(index, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def build(family, dtype=torch.float64, lora=None, **changes):
    builder = tiny.multimodal if family == "multimodal" else tiny.BUILDERS[family]
    model = builder(dtype=dtype, **changes)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):  # at their start (all equal) norms commute
                parameter.add_(0.3 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64))
    return tiny.with_lora(model, **(lora or {}))


@functools.cache
def shared(family):
    """A float64 model that several tests use: the engine leaves it as it found it."""
    return build(family)


def stack(model, family):
    return model.get_base_model().get_submodule(FAMILIES[family][0])


def reference(model, family, batch, backward, selected):
    """(gradients of the selected layers' adapters, loss)."""
    layers = stack(model, family)
    wanted = {id(p) for i in selected for p in layers[i].parameters() if p.requires_grad}
    named = {name: p for name, p in model.named_parameters() if id(p) in wanted}
    with written_out(layers, *FAMILIES[family][1:], backward, set(selected)):
        loss = model(**batch, use_cache=False).loss
        values = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, values, strict=True)), loss.detach()


def engine(model, batch, config, step=0, seed=None):
    with selective_backward(model, config, t=step) as lcsb, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        selected = lcsb.begin()
        loss = model(**batch).loss
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
    return found, loss.detach(), selected


def recompute(model, on):
    if on:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()
    else:
        model.activation_checkpointing_disable()


def difference(found, truth):
    assert found.keys() == truth.keys() and found
    return max(float((found[n] - truth[n]).abs().max() / truth[n].abs().max()) for n in truth)


@pytest.mark.parametrize("backward", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_the_equations(family, backward):
    """U06, U14: modes on every family, rows longer than the window, padded, cache switched on in the config."""
    model = shared(family)
    layers = range(len(stack(model, family)))
    half = len(layers) // 2
    batch = tiny.batch(model, rows=2, tokens=20, lengths=[20, 13])
    model.config.use_cache = True
    config = LCSBConfig(backward, layers_per_step=half)
    blocks = [layers] if backward == "full" else [layers[:half], layers[half:]]
    for step, block in enumerate(blocks):
        selected = tuple(block)
        truth, true_loss = reference(model, family, batch, backward, selected)
        for on in (False, True):
            recompute(model, on)
            found, loss, chosen = engine(model, batch, config, step)
            assert chosen == selected and torch.equal(loss, true_loss)
            assert difference(found, truth) < 1e-10
        recompute(model, False)
    assert model.config.use_cache is True


@pytest.mark.parametrize("family", FAMILIES)
def test_modes_are_told_apart(family):
    """The modes' gradients differ by far more than the tolerance above, so equality there means something."""
    model = shared(family)
    batch = tiny.batch(model, tokens=20)
    found = {mode: engine(model, batch, LCSBConfig(mode, layers_per_step=2))[0] for mode in MODES[1:]}
    assert difference(found["identity"], found["exact"]) > 1e-3
    assert difference(found["mlp"], found["exact"]) > 1e-3
    assert difference(found["mlp"], found["identity"]) > 1e-3


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "mistral", "olmo", "olmo2"])
def test_all_layers_selected_is_plain_training_bit_for_bit(family):
    model = build(family, torch.float32)
    batch = tiny.batch(model, tokens=20)
    model(**batch).loss.backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    found, _, _ = engine(model, batch, LCSBConfig("identity"))
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


DROPOUTS = {
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.2},
    "phi3": {"resid_pdrop": 0.2, "attention_dropout": 0.2},
    "gpt_neox": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
}


@pytest.mark.parametrize("backward", ["identity", "mlp"])
@pytest.mark.parametrize("family", DROPOUTS)
def test_dropout_inside_and_around_the_branches(family, backward):
    """The model's own dropout and the adapters': forward as in plain training, recompute draws the same numbers."""
    model = build(family, lora={"dropout": 0.3}, attn_implementation="eager", **DROPOUTS[family])
    batch = tiny.batch(model, tokens=12)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        plain = model(**batch, use_cache=False).loss.detach()
    runs = []
    for on in (False, True):
        recompute(model, on)
        found, loss, _ = engine(model, batch, LCSBConfig(backward, layers_per_step=2), seed=3)
        assert torch.equal(loss, plain)
        runs.append(found)
    assert difference(*runs) < 1e-12
    other, _, _ = engine(model, batch, LCSBConfig(backward, layers_per_step=2), seed=4)
    assert difference(other, runs[0]) > 1e-3


@pytest.mark.parametrize("backward", ["exact", "mlp"])
@pytest.mark.parametrize("family", LOCAL)
def test_each_layer_attends_within_its_own_window(family, backward):
    """Attention weights as they are under the engine, in forward and recompute: none beyond a local layer's window."""
    model = build(family, attn_implementation="eager")
    layers = stack(model, family)
    batch = tiny.batch(model, rows=1, tokens=24)
    recompute(model, True)
    seen = {index: [] for index in range(len(layers))}
    handles = [
        layer.self_attn.register_forward_hook(lambda m, a, out, i=index: seen[i].append(out[1].detach()))
        for index, layer in enumerate(layers)
    ]
    _, loss, _ = engine(model, batch, LCSBConfig(backward, layers_per_step=2))
    for handle in handles:
        handle.remove()
    distance = torch.arange(24)[:, None] - torch.arange(24)[None, :]
    for index, calls in seen.items():
        reach = WINDOW if index in LOCAL[family] else 24
        allowed = (distance >= 0) & (distance < reach)
        assert calls
        for weights in calls:
            assert bool((weights[..., ~allowed] == 0).all()) and bool((weights[..., allowed] > 0).all())
    assert sum(map(len, seen.values())) > len(layers)  # recompute was on
    fused = copy.deepcopy(model)
    if family != "gemma2":  # the scores' cap has no fused kernel on the CPU
        fused.get_base_model().set_attn_implementation("sdpa")
        _, other, _ = engine(fused, batch, LCSBConfig(backward, layers_per_step=2))
        assert abs(float(other - loss)) < 1e-12


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gemma2", "gpt2", "gpt_neox"])
def test_cache_is_off_in_training_and_back_for_generation(family):
    """U14: two steps of training with use_cache on equal those with it off, and generation is as before."""
    ids = tiny.batch(build(family))["input_ids"][:1, :5]
    outcomes = []
    for use_cache in (True, False):
        model = build(family, torch.float32)
        model.config.use_cache = use_cache
        recompute(model, True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with selective_backward(model, LCSBConfig("exact", layers_per_step=2)) as lcsb:
            for step in range(2):
                lcsb.begin()
                output = model(**tiny.batch(model, tokens=20, seed=step))
                assert output.cache is None
                output.loss.backward()
                lcsb.step(optimizer)
        assert model.config.use_cache is use_cache
        recompute(model, False)
        model.eval()
        with torch.no_grad():
            assert (model(input_ids=ids).cache is not None) == use_cache
            text = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        outcomes.append((text, {n: p.detach() for n, p in model.named_parameters()}))
    (first, weights), (second, others) = outcomes
    assert torch.equal(first, second) and first.shape[1] > 5
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def multimodal_batch():
    batch = tiny.batch(tiny.multimodal(), rows=2, tokens=14)
    batch["input_ids"][:, 1:5] = 96  # one image of four patches
    batch["labels"][:, 1:5] = -100
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
    return batch | {"pixel_values": pixels}


@pytest.mark.parametrize("backward", MODES)
def test_multimodal_text_layers_alone_take_part(backward):
    """U06: gradients of the text layers by the equations, with an image in the batch; vision is not touched."""
    model = shared("multimodal")
    inner = model.get_base_model().model
    batch = multimodal_batch()
    layers = inner.language_model.layers
    selected = (0, 1, 2, 3) if backward == "full" else (2, 3)
    wanted = {id(p) for i in selected for p in layers[i].parameters() if p.requires_grad}
    named = {name: p for name, p in model.named_parameters() if id(p) in wanted}
    with written_out(layers, "self_attn", "pre", backward, set(selected)):
        loss = model(**batch, use_cache=False).loss
        values = torch.autograd.grad(loss, list(named.values()))
    truth = dict(zip(named, values, strict=True))
    with selective_backward(model, LCSBConfig(backward, layers_per_step=2)) as lcsb:
        assert [id(layer) for layer in lcsb.layers] == [id(layer) for layer in layers]
        assert not any("forward" in module.__dict__ for module in inner.vision_tower.modules())
    found, value, _ = engine(model, batch, LCSBConfig(backward, layers_per_step=2), step=1)
    assert torch.equal(value, loss.detach()) and difference(found, truth) < 1e-10
    assert not any("vision" in name or "projector" in name for name in found)
    without = engine(model, batch | {"pixel_values": -batch["pixel_values"]}, LCSBConfig(backward))[1]
    assert not torch.equal(without, value)  # the image is seen


def bloom():
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=97, hidden_size=64, n_layer=4, n_head=4, pad_token_id=0)
    return tiny.with_lora(BloomForCausalLM(config).double())


@pytest.mark.parametrize("on", [False, True])
def test_residual_inside_the_attention_is_refused_in_mode_mlp_alone(on):
    """BLOOM's attention adds the skip itself: detaching it would cut the gradient of every layer below, in silence."""
    model = bloom()
    batch = tiny.batch(model)
    recompute(model, on)
    with pytest.raises(
        ValueError, match=r"mode mlp: BloomBlock adds the residual inside BloomAttention"
    ) as error:
        engine(model, batch, LCSBConfig("mlp", layers_per_step=2))
    assert "\n" not in str(error.value)
    model.zero_grad(set_to_none=True)
    found, _, _ = engine(model, batch, LCSBConfig("exact", layers_per_step=2))
    model(**batch, use_cache=False).loss.backward()
    plain = {n: p.grad for n, p in model.named_parameters() if n in found}
    assert difference(found, plain) < 1e-10


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_cache_in_a_training_pass(family):
    """U14: asked for by name it is harmless, but refused where recompute would fill it twice."""
    model = shared(family)
    batch = tiny.batch(model)
    config = LCSBConfig("exact", layers_per_step=2)
    expected, _, _ = engine(model, batch, config)
    found, _, _ = engine(model, batch | {"use_cache": True}, config)
    assert difference(found, expected) < 1e-12
    recompute(model, True)
    with pytest.raises(ValueError, match=r"given a key/value cache \(DynamicCache\) with recompute on"):
        engine(model, batch | {"use_cache": True}, config)
    recompute(model, False)
