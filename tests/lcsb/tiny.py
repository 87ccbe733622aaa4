"""Tiny language models built in code (no download, no files), shared by the tests of this folder.

Use as `import tiny` (conftest.py puts this folder on the path). Each builder takes a seed and a dtype and draws its
weights under a forked generator, so the global random state is left alone:

    tiny.llama()      TINY-L: 4 layers, hidden 64, 4 heads / 2 KV heads, vocabulary 97, untied head
    tiny.qwen2()      TINY-Q: 4 layers, biases on q, k, v, tied embeddings, vocabulary 97
    tiny.gemma3()     TINY-G: 6 layers, sliding window 8 on the local layers, tied embeddings, vocabulary 300
    tiny.gpt2(), tiny.gpt_neox()      other shapes of decoder layer (Conv1D, parallel residual)
    tiny.qwen3(), gemma2(), phi3(), mistral(), olmo(), olmo2()      BUILDERS has all of them, by name; gemma2, phi3 and
                      mistral have sliding windows of 8 (gemma2 on every other layer)
    tiny.multimodal() a LLaVA of TINY-L with a CLIP vision stack of its own layers
    tiny.with_lora(model)     PEFT LoRA on every projection; random_b=True draws lora_B too (at its usual zero start
                              lora_A has no gradient, so half of every comparison would be vacuous)
    tiny.batch(model)         input_ids, attention_mask, labels; `lengths` pads on the right
"""

from __future__ import annotations

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# Ids that transformers' defaults would put outside these small vocabularies.
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _build(model_class, config, seed, dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        # Standard deviation 0.02 makes such small models almost linear; 0.1 exercises the nonlinear parts.
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.1)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.05)
    return model.to(dtype).train()


def llama_config(**changes):
    return LlamaConfig(
        **{
            "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "tie_word_embeddings": False, **_IDS, **changes,
        }
    )  # fmt: skip


def llama(seed=0, dtype=torch.float32, **changes):
    """TINY-L."""
    return _build(LlamaForCausalLM, llama_config(**changes), seed, dtype)


def qwen2_config(**changes):
    return Qwen2Config(
        **{
            "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "tie_word_embeddings": True, **_IDS, **changes,
        }
    )  # fmt: skip


def qwen2(seed=0, dtype=torch.float32, **changes):
    """TINY-Q."""
    return _build(Qwen2ForCausalLM, qwen2_config(**changes), seed, dtype)


def gemma3_config(**changes):
    return Gemma3TextConfig(
        **{
            "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16,
            "sliding_window": 8, "max_position_embeddings": 64, "tie_word_embeddings": True, **_IDS, **changes,
        }
    )  # fmt: skip


def gemma3(seed=0, dtype=torch.float32, **changes):
    """TINY-G: five local layers (window 8) to one global, the model's own pattern."""
    return _build(Gemma3ForCausalLM, gemma3_config(**changes), seed, dtype)


def gpt2(seed=0, dtype=torch.float32, **changes):
    config = GPT2Config(
        **{
            "vocab_size": 97, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_IDS, **changes,
        }
    )  # fmt: skip
    return _build(GPT2LMHeadModel, config, seed, dtype)


def gpt_neox(seed=0, dtype=torch.float32, **changes):
    config = GPTNeoXConfig(
        **{
            "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "max_position_embeddings": 128, **_IDS, **changes,
        }
    )  # fmt: skip
    return _build(GPTNeoXForCausalLM, config, seed, dtype)


# Arguments that most families share.
_SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, **_IDS,
}  # fmt: skip


def qwen3(seed=0, dtype=torch.float32, **changes):
    """Norms on q and k, heads wider than hidden / heads."""
    return _build(Qwen3ForCausalLM, Qwen3Config(**{**_SMALL, "head_dim": 24, **changes}), seed, dtype)


def gemma2(seed=0, dtype=torch.float32, **changes):
    """Sandwich norms, capped scores and logits, window 8 on layers 0 and 2, tied embeddings."""
    own = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
    return _build(Gemma2ForCausalLM, Gemma2Config(**{**_SMALL, **own, **changes}), seed, dtype)


def phi3(seed=0, dtype=torch.float32, **changes):
    """Fused qkv and gate-up projections, window 8 on all layers."""
    return _build(Phi3ForCausalLM, Phi3Config(**{**_SMALL, "sliding_window": 8, **changes}), seed, dtype)


def mistral(seed=0, dtype=torch.float32, **changes):
    """Window 8 on all layers."""
    return _build(
        MistralForCausalLM, MistralConfig(**{**_SMALL, "sliding_window": 8, **changes}), seed, dtype
    )


def olmo(seed=0, dtype=torch.float32, **changes):
    """Pre-norm, with norms that have no weights, and clipped q, k, v."""
    return _build(OlmoForCausalLM, OlmoConfig(**{**_SMALL, "clip_qkv": 8.0, **changes}), seed, dtype)


def olmo2(seed=0, dtype=torch.float32, **changes):
    """Norms after the branches, inside the residual; norms on q and k."""
    return _build(Olmo2ForCausalLM, Olmo2Config(**{**_SMALL, **changes}), seed, dtype)


def multimodal(seed=0, dtype=torch.float32):
    """LLaVA: TINY-L under `language_model`, and a CLIP stack of 3 layers that must stay untouched."""
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    )
    config = LlavaConfig(vision_config=vision, text_config=llama_config(), image_token_id=96)
    return _build(LlavaForConditionalGeneration, config, seed, dtype)


BUILDERS = {
    "llama": llama, "qwen2": qwen2, "gemma3": gemma3, "gpt2": gpt2, "gpt_neox": gpt_neox, "qwen3": qwen3,
    "gemma2": gemma2, "phi3": phi3, "mistral": mistral, "olmo": olmo, "olmo2": olmo2,
}  # fmt: skip


def with_lora(model, r=4, random_b=True, seed=1, **settings):
    """PEFT LoRA on the projections of every decoder layer, in the model's dtype."""
    from lcsb.models import attach_lora

    wrapped = attach_lora(model, r=r, seed=seed, **settings)
    if random_b:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data.copy_(0.05 * noise)
    return wrapped


def batch(model, rows=2, tokens=12, seed=0, lengths=None):
    """A batch of random tokens: ids [rows, tokens] from 3 upward, labels equal to the ids, -100 where padded."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # The last id is left out: LLaVA's image token in `multimodal`.
    ids = torch.randint(3, vocabulary - 1, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    for row, length in enumerate(lengths or []):
        ids[row, length:], mask[row, length:], labels[row, length:] = 0, 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def tokenizer(vocab_size=97, add_bos=False):
    """A fast tokenizer with one token a character: 0 <pad>, 1 <bos>, 2 <eos>, 3 <unk>, then space, newline, letters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    text = " \n" + "".join(chr(code) for code in range(33, 127) if chr(code) not in "`~^")
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}
    for character in text[: vocab_size - 4]:
        vocabulary[character] = len(vocabulary)
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    if add_bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
