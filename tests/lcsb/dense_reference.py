"""A packed folder in transformers with dense weights: an independent reference for the memory engine.

Codes are looked up here, block by block over the whole matrix: bitsandbytes' CPU kernel misreads rows that are no
multiple of the quantisation block long, and geometries at 1/16 have such rows.
"""

from __future__ import annotations

import json
from dataclasses import replace

import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

_STATE = ".quant_state.bitsandbytes__nf4"


def scaled_geometry(geometry, by=16):
    """Widths and vocabulary divided by `by`; same layers, heads, head groups, norms and biases."""
    widths = {
        name: getattr(geometry, name) // by for name in ("hidden", "intermediate", "head_dim", "vocabulary")
    }
    return replace(geometry, **widths)


def saved_tensors(folder):
    """Every tensor of a folder, whichever of its files holds it."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def dense_tensors(folder):
    """The weights that a packed folder stands for, in float32."""
    saved, dense = saved_tensors(folder), {}
    for name, value in saved.items():
        if f"{name}{_STATE}" in saved:
            state = json.loads(bytes(saved[f"{name}{_STATE}"].tolist()))
            codes = torch.stack([value >> 4, value & 15], -1).view(-1).long()
            blocks = saved[f"{name}.quant_map"][codes].view(-1, state["blocksize"])
            dense[name] = (blocks * saved[f"{name}.absmax"][:, None]).view(state["shape"])
        elif not any(part in name for part in (".absmax", ".quant_map", ".quant_state")):
            dense[name] = value.float()
    return dense


def dense_model(folder, r=4, seed=1, **settings):
    """The same weights in transformers, unquantised, with adapters whose A and B are both drawn."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(dense_tensors(folder), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return tiny.with_lora(model, r=r, seed=seed, **settings).train()
