"""What every stage of a run starts from: model with adapters, corpus and optimiser, all from a `RunConfig`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from lcsb.data import IGNORED, Corpus, Examples
from lcsb.layers import decoder_layers
from lcsb.methods import unfreeze
from lcsb.models import attach_lora, load_quantized
from lcsb.tasks.load import load_task
from reports.records import RunConfig


def prepare(config: RunConfig, seed: int, recompute: bool, whole_layers: bool = False) -> tuple[Any, Corpus]:
    """The configured model with adapters drawn from `seed`, and the corpus, tokenised for it.

    With `whole_layers` there are no adapters: every weight of the model, which must not be quantised, is trainable.

    The process's global generators are seeded too, because dropout draws from them: call this from a process of
    one's own, not from a library.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    base, tokenizer = load_quantized(
        config.model,
        quantization=config.quantization,
        double_quant=config.double_quant,
        compute_dtype=config.compute_dtype,
    )
    longest = getattr(base.config, "max_position_embeddings", None)
    if longest is not None and config.data.tokens > longest:
        raise ValueError(
            f"data.tokens: found {config.data.tokens}, expected at most {longest}, the longest of {config.model}"
        )
    model = base if whole_layers else attach_lora(base, **config.lora.model_dump(), seed=seed)
    if whole_layers:
        unfreeze(model)
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model, read_corpus(config, tokenizer)


def read_corpus(config: RunConfig, tokenizer: Any) -> Corpus:
    """The configured corpus in windows, or rows of a task, of `config.data.tokens` tokens at most."""
    data = config.data
    return load_task(
        data.source,
        tokenizer,
        tokens=data.tokens,
        path=data.path,
        text_field=data.text_field,
        held_out_every=max(2, round(1 / data.held_out)),
        rows=data.rows,
    )


def language_batch(windows: torch.Tensor | Examples, model: nn.Module) -> dict[str, torch.Tensor]:
    """Model arguments for windows [rows, tokens] of a corpus, every token a target, or for the rows of a task.

    A task's rows are cut to the longest of the batch.
    """
    device = next(model.parameters()).device
    if isinstance(windows, torch.Tensor):
        ids = windows.to(device)
        return {"input_ids": ids, "labels": ids}
    width = int(windows.attention_mask.sum(dim=1).max())
    names = ("input_ids", "labels", "attention_mask")
    return {name: getattr(windows, name)[:, :width].to(device) for name in names}


def make_optimizer(model: nn.Module, config: RunConfig, learning_rate: float) -> torch.optim.AdamW:
    """AdamW over every adapter of every layer, constant learning rate."""
    settings = config.optimizer
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def layers_per_step(model: nn.Module, config: RunConfig, cycle_length: int | None = None) -> int:
    """k for the configured (or given) cycle length on this model."""
    return config.layers_per_step(len(decoder_layers(model)), cycle_length)


@torch.no_grad()
def held_out_loss(
    model: nn.Module, windows: torch.Tensor | Examples, batch_size: int = 4
) -> tuple[float, int]:
    """Mean loss per target token over held-out windows or rows [n, tokens], in nats, and the number of targets.

    Sums of token losses are added in float64, so the value does not depend on the batch size beyond rounding.
    """
    total, count, training = 0.0, 0, model.training
    model.eval()
    try:
        for rows in windows.split(batch_size):
            batch = language_batch(rows, model)
            tokens = int((batch["labels"][:, 1:] != IGNORED).sum())
            total += float(model(**batch).loss.double()) * tokens
            count += tokens
    finally:
        model.train(training)
    return total / count, count
