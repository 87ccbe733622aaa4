"""Tiny models packed in NF4 and saved as transformers saves them, for the memory engine's tests.

folder = tiny_packed.write(tmp_path, "gemma3")     a folder that `Engine` reads
model = tiny_packed.reference(folder)              the same weights in transformers, with adapters of both kinds drawn
"""

from __future__ import annotations

import tiny
import torch

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
