"""Which tensor of a source goes where in a packed folder: every one must be there, have its shape, and have a place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lcsb.engine.architecture import Architecture
from lcsb.engine.layer import module_of
from lcsb.engine.shards import Content, count
from lcsb.engine.sources import FLOATS, NUMBERS_AT_ONCE, Source


@dataclass
class Job:
    """A source, and which of its tensors goes where."""

    source: Source
    architecture: Architecture
    block_size: int
    embedding: str
    contents: list[Content] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def numbers(self) -> int:
        """Numbers to be written, for progress."""
        return sum(count(shape) for content in self.contents for _, shape in content.plain.values()) + sum(
            r * c for content in self.contents for r, c in content.packed.values()
        )


def lay_out(job: Job) -> None:
    """Fill in contents and origins; every tensor must be there, have its shape, and have a place."""
    source, arch = job.source, job.architecture
    left = dict.fromkeys(source.names())
    prefix = "model." if "model.embed_tokens.weight" in left else ""

    def take(target: str, shape: tuple[int, ...]) -> str:
        name = target if target.startswith("lm_head") else prefix + target.removeprefix("model.")
        if name not in left:
            raise ValueError(f"{source.label}: no tensor {name}, expected one of shape {shape}")
        del left[name]
        if tuple(source.shape(name)) != shape:
            raise ValueError(
                f"{source.label}: {name} has shape {tuple(source.shape(name))}, expected {shape}"
            )
        if source.packed(name) is None and source.dtype(name) not in FLOATS:
            raise ValueError(
                f"{source.label}: {name} is {type_name(source.dtype(name))}, expected float32, float16 or bfloat16"
            )
        job.origin[target] = name
        return name

    table = (arch.vocabulary, arch.hidden)
    outer: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for target in ["model.embed_tokens.weight"] + ([] if arch.tied else ["lm_head.weight"]):
        name = take(target, table)
        kept = source.dtype(name) if job.embedding == "source" else getattr(torch, job.embedding)
        outer[target] = (kept, table)
    take("model.norm.weight", (arch.hidden,))
    job.contents = [Content(outer | {"model.norm.weight": (torch.float32, (arch.hidden,))}, {})]
    for index in range(arch.layers):
        job.contents.append(_lay_out_layer(job, index, take))
    _refuse_left_over(job, left)
    packed = {name: source.packed(job.origin[name]) for content in job.contents for name in content.packed}
    plain = [name for name, state in packed.items() if state is None]
    if plain and len(plain) < len(packed):
        raise ValueError(
            f"{source.label}: {plain[0]} is plain but other matrices are packed, expected all of one kind"
        )
    misread = [
        name
        for content in job.contents
        for name, (_, columns) in content.packed.items()
        if columns % job.block_size
    ]
    if misread:
        job.notes.append(
            f"{len(misread)} matrices, first {misread[0]}, have rows that are no multiple of {job.block_size} long: "
            "bitsandbytes on the CPU reads wrong scales for them, the engine does not"
        )
    described = {state["dtype"] for state in packed.values() if state}
    if described - {"float32"}:
        job.notes.append(
            f"the source's matrices are marked {', '.join(sorted(described))}, to which transformers rounds each "
            "dequantised weight; the result is marked float32 and rounds nothing"
        )


def _lay_out_layer(job: Job, index: int, take: Callable[[str, tuple[int, ...]], str]) -> Content:
    arch, source = job.architecture, job.source
    prefix = f"model.layers.{index}."
    norms = {"input_layernorm": arch.hidden, "post_attention_layernorm": arch.hidden}
    if arch.sandwich:
        norms |= {"pre_feedforward_layernorm": arch.hidden, "post_feedforward_layernorm": arch.hidden}
    if arch.query_key_norm:
        norms |= {"self_attn.q_norm": arch.head_dim, "self_attn.k_norm": arch.head_dim}
    plain, packed = {}, {}
    for norm, width in norms.items():
        take(f"{prefix}{norm}.weight", (width,))
        plain[f"{prefix}{norm}.weight"] = (torch.float32, (width,))
    for name, (rows, columns) in arch.shapes.items():
        key = f"{prefix}{module_of(name)}.{name}"
        state = source.packed(take(f"{key}.weight", (rows, columns)))
        if state is not None and int(state["blocksize"]) != job.block_size:
            raise ValueError(
                f"{source.label}: {key}.weight is packed in blocks of {state['blocksize']}, expected {job.block_size}"
            )
        packed[f"{key}.weight"] = (rows, columns)
        if _has_bias(source.config, name):
            take(f"{key}.bias", (rows,))
            plain[f"{key}.bias"] = (torch.float32, (rows,))
    content = Content(plain, packed, job.block_size)
    try:
        _ = content.entries
    except ValueError as error:
        raise ValueError(f"{source.label}: {error}") from None
    return content


def _has_bias(config: Mapping[str, Any], projection: str) -> bool:
    if config["model_type"] == "qwen2":
        return projection in ("q_proj", "k_proj", "v_proj")
    return bool(config.get("attention_bias")) and module_of(projection) == "self_attn"


def _refuse_left_over(job: Job, left: dict[str, None]) -> None:
    source = job.source
    for name in list(left):
        if name.endswith("rotary_emb.inv_freq"):
            del left[name]  # a buffer of old files, which is computed from the configuration
    if job.architecture.tied and "lm_head.weight" in left:
        embedding = job.origin["model.embed_tokens.weight"]
        rows, columns = source.shape(embedding)
        same = tuple(source.shape("lm_head.weight")) == (rows, columns)
        step = max(1, NUMBERS_AT_ONCE // columns)
        for first in range(0, rows if same else 0, step):
            places = first, min(first + step, rows)
            same = same and torch.equal(
                source.rows("lm_head.weight", *places), source.rows(embedding, *places)
            )
        if not same:
            raise ValueError(
                f"{source.label}: its configuration ties the head to the embedding, but lm_head.weight differs from it"
            )
        del left["lm_head.weight"]
    if left:
        raise ValueError(
            f"{source.label}: {len(left)} tensors have no place in a {source.config['model_type']} of "
            f"{job.architecture.layers} layers, first {next(iter(left))}"
        )


def type_name(dtype: torch.dtype) -> str:
    """float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")
