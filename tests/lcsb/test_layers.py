"""Decoder layers are found by structure, in every kind of model and wrapping, or refused in one line."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import nn

from lcsb.layers import attention_module, decoder_layers, named_decoder_layers, token_embedding

COUNTS = {kind: 6 if kind == "gemma3" else 4 for kind in tiny.BUILDERS}
STACKS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}
ATTENTIONS = {"gpt2": "attn", "gpt_neox": "attention"}


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_layers_and_attention_of_each_kind(kind, wrapped):
    model = tiny.BUILDERS[kind]()
    stack = model.get_submodule(STACKS.get(kind, "model.layers"))
    outer = tiny.with_lora(model) if wrapped else model
    found = named_decoder_layers(outer)
    assert [layer for _, layer in found] == list(stack)
    assert len(found) == COUNTS[kind]
    for name, layer in found:
        assert outer.get_submodule(name) is layer
        assert attention_module(layer) is layer.get_submodule(ATTENTIONS.get(kind, "self_attn"))


def test_multimodal_wrapper_gives_text_layers_only():
    model = tiny.multimodal()
    assert decoder_layers(model) == list(model.model.language_model.layers)
    vision = [layer for name, layer in model.named_modules() if "vision" in name and name.endswith("layers")]
    assert len(vision) == 1 and len(vision[0]) == 3  # there is a vision stack, and it was passed over


def test_quantised_layers_are_found(tmp_path):
    from transformers import BitsAndBytesConfig

    tiny.llama().save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map={"": "cpu"})
    assert decoder_layers(model) == list(model.model.layers)


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x, attention_mask=None):
        return self.proj(x)


class _Layer(nn.Module):
    def __init__(self, attentions=1, mlp=True):
        super().__init__()
        for index in range(attentions):
            setattr(self, f"attn{index}", _Attention())
        if mlp:
            self.mlp = nn.Linear(4, 4)

    def forward(self, x):
        return x


class _Model(nn.Module):
    """An unknown architecture: `blocks` beside the embedding, whatever they are."""

    def __init__(self, **stacks):
        super().__init__()
        self.wte = nn.Embedding(10, 4)
        for name, layers in stacks.items():
            setattr(self, name, nn.ModuleList(layers))

    def get_input_embeddings(self):
        return self.wte


def test_unknown_architecture_with_the_right_structure():
    model = _Model(norms=[nn.LayerNorm(4) for _ in range(3)], blocks=[_Layer(), _Layer()])
    assert decoder_layers(model) == list(model.blocks)


def test_given_layers_win():
    model = tiny.llama()
    assert decoder_layers(model, "model.layers") == list(model.model.layers)
    chosen = list(model.model.layers)[1:3]
    assert decoder_layers(model, chosen) == chosen
    wrapped = tiny.with_lora(tiny.llama())
    expected = list(wrapped.base_model.model.model.layers)
    assert decoder_layers(wrapped, "model.layers") == expected
    assert decoder_layers(wrapped, "base_model.model.model.layers") == expected
    found = named_decoder_layers(wrapped, "model.layers")
    assert all(wrapped.get_submodule(name) is layer for name, layer in found)
    # Where discovery must refuse, the argument still decides.
    double = _Model(a=[_Layer()], b=[_Layer(), _Layer()])
    assert decoder_layers(double, "b") == list(double.b)


@pytest.mark.parametrize(
    "layers, message",
    [
        ("model.layer", "'model.layer' names no module of LlamaForCausalLM; nearest is 'model.layers'"),
        ("model.norm", "LlamaRMSNorm, expected a non-empty ModuleList"),
        ([], "empty sequence"),
        ([nn.Linear(2, 2)], r"layers\[0\] \(Linear\) is not a module of LlamaForCausalLM"),
    ],
)
def test_wrong_layers_argument(layers, message):
    with pytest.raises(ValueError, match=message):
        decoder_layers(tiny.llama(), layers)


def test_same_layer_twice_is_refused():
    model = tiny.llama()
    with pytest.raises(ValueError, match="more than once"):
        decoder_layers(model, [model.model.layers[0], model.model.layers[0]])


def _t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return T5ForConditionalGeneration(config)


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4,
        )
    )  # fmt: skip


def _shared_keys():
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    return Gemma3nForCausalLM(
        Gemma3nTextConfig(
            vocab_size=97, vocab_size_per_layer_input=97, hidden_size=32, hidden_size_per_layer_input=8,
            intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            num_kv_shared_layers=2, activation_sparsity_pattern=[0.0] * 4,
            layer_types=["sliding_attention", "full_attention"] * 2, laurel_rank=4,
        )
    )  # fmt: skip


def _mamba():
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=2))


@pytest.mark.parametrize(
    "build, message",
    [
        (_t5, "T5ForConditionalGeneration is an encoder-decoder"),
        (_mixtral, "MixtralForCausalLM is a mixture of experts"),
        (_shared_keys, "Gemma3nForCausalLM shares keys and values.*num_kv_shared_layers=2"),
        (
            _mamba,
            "found no decoder layers in MambaForCausalLM: looked for .*; found ModuleLists backbone.layers",
        ),
    ],
)
def test_refusals_name_the_class_in_one_line(build, message):
    model = build()
    with pytest.raises(ValueError, match=message) as error:
        decoder_layers(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layers", [None, "blocks"])
def test_experts_are_seen_without_a_config(layers):
    model = _Model(blocks=[_Layer(), _Layer()])
    model.blocks[1].mlp = nn.Sequential()
    model.blocks[1].mlp.experts = nn.ModuleList([nn.Linear(4, 4)])
    with pytest.raises(ValueError, match=r"mixture of experts \(blocks.1.mlp.experts\)"):
        decoder_layers(model, layers)


def test_two_stacks_are_ambiguous():
    with pytest.raises(ValueError, match=r"2 stacks of decoder layers .*\(a, b\); choose one"):
        decoder_layers(_Model(a=[_Layer()], b=[_Layer()]))


def test_no_token_embedding():
    with pytest.raises(ValueError, match="Linear names no token embedding"):
        decoder_layers(nn.Linear(2, 2))
    assert token_embedding(tiny.qwen2()).weight.shape == torch.Size([97, 64])


def test_attention_must_be_one():
    with pytest.raises(ValueError, match=r"exactly one attention branch.*found attn0, attn1"):
        attention_module(_Layer(attentions=2))
    with pytest.raises(ValueError, match=r"found none among mlp \(Linear\)"):
        attention_module(_Layer(attentions=0))
    with pytest.raises(ValueError, match="found no decoder layers"):
        decoder_layers(_Model(blocks=[_Layer(mlp=False)]))
