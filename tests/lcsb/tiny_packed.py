"""Tiny models packed in NF4 and saved as transformers saves them, for the memory engine's tests.

folder = tiny_packed.write(tmp_path, "gemma3")     a folder that `Engine` reads
model = tiny_packed.reference(folder)              the same weights in transformers, with adapters of both kinds drawn
"""

from __future__ import annotations

import json

import tiny
import torch
from safetensors.torch import save_file

from lcsb.engine.layer import module_of
from lcsb.engine.packed import pack
from lcsb.models import load_quantized

ENGINE_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")


def write(folder, family, **changes):
    """Save a tiny model of `family`, packed."""
    plain, packed = folder / f"{family}-plain", folder / f"{family}-nf4"
    tiny.BUILDERS[family](**changes).save_pretrained(plain)
    vocabulary = tiny.BUILDERS[family](**changes).config.vocab_size
    tokenizer = tiny.tokenizer(min(vocabulary, 97))
    tokenizer.save_pretrained(plain)
    model, _ = load_quantized(str(plain), quantization="nf4", compute_dtype="float32")
    model.save_pretrained(packed)
    tokenizer.save_pretrained(packed)
    return packed


def reference(folder, r=4, seed=1):
    """The packed model in transformers, with adapters whose A and B are both drawn."""
    model, _ = load_quantized(str(folder))
    return tiny.with_lora(model, r=r, seed=seed).train()


def adapters(model):
    """The model's adapters under the names that PEFT saves."""
    return {
        name.replace(".default", ""): parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }


def tokens(model, rows, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.get_input_embeddings().weight.shape[0], (rows, count), generator=generator)


def write_geometry(folder, geometry, seed=0):
    """A llama of the given shapes with random packed weights, written without transformers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"model.norm.weight": torch.ones(geometry.hidden)}
    embedding = torch.randn(geometry.vocabulary, geometry.hidden, generator=generator)
    tensors["model.embed_tokens.weight"] = embedding * 0.02
    for layer in range(geometry.layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(geometry.hidden)
        for name, shape in geometry.projections().items():
            key = f"{prefix}{module_of(name)}.{name}.weight"
            codes, scales = pack(torch.randn(shape, generator=generator) * 0.02)
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(shape)}
            tensors |= {key: codes[:, None], f"{key}.absmax": scales}
            packed_state = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
            tensors[f"{key}.quant_state.bitsandbytes__nf4"] = packed_state
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": geometry.layers, "rms_norm_eps": 1e-5,
        "hidden_size": geometry.hidden, "intermediate_size": geometry.intermediate, "head_dim": geometry.head_dim,
        "num_attention_heads": geometry.heads, "num_key_value_heads": geometry.kv_heads,
        "vocab_size": geometry.vocabulary, "tie_word_embeddings": geometry.tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
