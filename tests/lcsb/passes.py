"""One backward pass of a tiny model by the engine, and how far two gradients are apart."""

from __future__ import annotations

import tiny
import torch

from lcsb.selective import selective_backward

FAMILIES = ("llama", "qwen2", "gemma3", "gpt2", "gpt_neox")


def build(family="llama", dtype=torch.float64, **settings):
    return tiny.with_lora(tiny.BUILDERS[family](dtype=dtype), **settings)


def engine_gradients(model, batch, config, step=0):
    """Adapter gradients (selected layers only) and loss of one backward pass at step `step`, by the engine."""
    with selective_backward(model, config, t=step) as lcsb:
        selected = lcsb.begin()
        loss = model(**batch).loss
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for parameter in model.parameters():
            parameter.grad = None
    return found, loss.detach(), selected


def largest_difference(a, b):
    assert a.keys() == b.keys() and a
    return max(float((a[k] - b[k]).abs().max() / (1e-12 + b[k].abs().max())) for k in a)
