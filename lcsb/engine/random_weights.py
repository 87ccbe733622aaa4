"""A packed folder of a given geometry with random weights: the engine's memory and time depend on shapes alone.

Written layer by layer. Codes are random bytes (each of the 16 levels as often as the others), scales lie within 10 % of
the value that gives the weights their standard deviation. Embedding (and head, where it is not tied) are bfloat16.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bcd_theory.geometry import GEOMETRIES, Geometry
from lcsb.cache import whole_folder
from lcsb.engine.layer import module_of
from lcsb.engine.packed import NF4_LEVELS
from lcsb.engine.shards import (
    INDEX,
    Content,
    ShardFile,
    count,
    index_json,
    put_descriptions,
    quantization_config,
    shard_name,
    write_json,
)

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
BLOCK_SIZE = 64
_LEVEL_RMS = (sum(level**2 for level in NF4_LEVELS) / 16) ** 0.5
_NUMBERS_AT_ONCE = 1 << 21
# Draws, their bfloat16 copy and the buffers of one write; measured on all geometries.
_WORKING_BYTES = 64 << 20
_WINDOWS = {"gemma3-4b": 1024}
_LOCAL_TO_GLOBAL = 6


def family_of(geometry: Geometry) -> str:
    """The family that a geometry's norms and biases belong to."""
    if geometry.norms == 4:
        return "gemma3_text"
    if geometry.qkv_bias:
        return "qwen2"
    return "qwen3" if geometry.qk_norm else "llama"


def write_random(
    folder: Path,
    geometry: str | Geometry,
    *,
    family: str | None = None,
    seed: int = 0,
    ram: int | None = None,
    window: int | None = None,
    std: float = 0.02,
) -> Path:
    """Write a folder that `Engine` and transformers read: NF4 matrices, random weights, config.json; no tokenizer.

    Args:
        folder: new or empty.
        geometry: shapes, or a name in `bcd_theory.geometry.GEOMETRIES`.
        family: llama, qwen2, qwen3 or gemma3_text; default: the one that the geometry's norms and biases belong to.
        seed: of all draws; the same seed gives the same bytes.
        ram: bytes that the whole process may hold.
        window: sliding window of Gemma's local layers (five of six); default that of the named model, else 512.
        std: standard deviation of the weights.

    Returns:
        The folder.

    Raises:
        ValueError: an unknown name; a family that the geometry does not fit; more memory needed than `ram`.
        OSError: the folder cannot be written.
    """
    shape = _named(geometry) if isinstance(geometry, str) else geometry
    family = family or family_of(shape)
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}, expected one of {', '.join(FAMILIES)}")
    if family != family_of(shape):
        raise ValueError(
            f"family {family!r} does not fit {shape}: its norms and biases are those of {family_of(shape)}"
        )
    if ram is not None:
        from lcsb.engine.ram import peak_bytes

        least = peak_bytes() + _WORKING_BYTES
        if ram < least:
            raise ValueError(f"random weights need {least} bytes of process memory, the budget is {ram}")
    config = _config(shape, family, window or _WINDOWS.get(str(geometry), 512))
    generator = torch.Generator().manual_seed(seed)
    contents = [_outer(shape), *(_layer(shape, index, family) for index in range(shape.layers))]
    with whole_folder(Path(folder)) as place:
        for number, content in enumerate(contents):
            with ShardFile(place / shard_name(number, len(contents)), content.entries) as shard:
                _fill(shard, content, family, std, generator)
        write_json(place / INDEX, index_json(contents))
        write_json(place / "config.json", config)
    return Path(folder)


def config_of(name: str) -> dict[str, Any]:
    """config.json of a named geometry, as `write_random` writes it.

    Raises:
        ValueError: an unknown name.
    """
    shape = _named(name)
    return _config(shape, family_of(shape), _WINDOWS.get(name, 512))


def _named(name: str) -> Geometry:
    if name not in GEOMETRIES:
        near = difflib.get_close_matches(name, GEOMETRIES, n=1)
        hint = f"; nearest is {near[0]!r}" if near else ""
        raise ValueError(f"geometry {name!r}, expected one of {', '.join(GEOMETRIES)}{hint}")
    return GEOMETRIES[name]


def _config(shape: Geometry, family: str, window: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
        "quantization_config": quantization_config(),
    }
    if family != "gemma3_text":
        rope = {"rope_type": "default", "rope_theta": 1e4 if family == "llama" else 1e6}
        return config | {"hidden_act": "silu", "rope_parameters": rope}
    kinds = [
        "sliding_attention" if (index + 1) % _LOCAL_TO_GLOBAL else "full_attention"
        for index in range(shape.layers)
    ]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": window,
        "query_pre_attn_scalar": shape.head_dim,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }


def _outer(shape: Geometry) -> Content:
    table = (torch.bfloat16, (shape.vocabulary, shape.hidden))
    plain = {"model.embed_tokens.weight": table, "model.norm.weight": (torch.float32, (shape.hidden,))}
    return Content(plain if shape.tied else plain | {"lm_head.weight": table}, {})


def _layer(shape: Geometry, index: int, family: str) -> Content:
    prefix = f"model.layers.{index}."
    norms = {"input_layernorm": shape.hidden, "post_attention_layernorm": shape.hidden}
    if family == "gemma3_text":
        norms |= {"pre_feedforward_layernorm": shape.hidden, "post_feedforward_layernorm": shape.hidden}
    if shape.qk_norm:
        norms |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}
    plain = {f"{prefix}{norm}.weight": (torch.float32, (width,)) for norm, width in norms.items()}
    packed = {}
    for name, (rows, columns) in shape.projections().items():
        key = f"{prefix}{module_of(name)}.{name}"
        packed[f"{key}.weight"] = (rows, columns)
        if shape.qkv_bias and name in ("q_proj", "k_proj", "v_proj"):
            plain[f"{key}.bias"] = (torch.float32, (rows,))
    return Content(plain, packed, BLOCK_SIZE)


def _fill(shard: ShardFile, content: Content, family: str, std: float, generator: torch.Generator) -> None:
    for name, (dtype, shape) in content.plain.items():
        numbers = count(shape)
        for first in range(0, numbers, _NUMBERS_AT_ONCE):
            drawn = torch.empty(min(_NUMBERS_AT_ONCE, numbers - first))
            if name.endswith("norm.weight"):
                drawn.uniform_(-0.1, 0.1, generator=generator)
                # Gemma's files hold w - 1.
                drawn.add_(0.0 if family == "gemma3_text" else 1.0)
            else:
                drawn.normal_(0, 0.1 if name.endswith(".bias") else std, generator=generator)
            shard.put(name, drawn.to(dtype), first)
    for name, (rows, columns) in content.packed.items():
        length = rows * columns // 2
        for first in range(0, length, 8 * _NUMBERS_AT_ONCE):
            shard.put(name, _random_bytes(min(8 * _NUMBERS_AT_ONCE, length - first), generator), first)
        scales = torch.empty(rows * columns // BLOCK_SIZE).uniform_(0.9, 1.1, generator=generator)
        shard.put(f"{name}.absmax", scales.mul_(std / _LEVEL_RMS))
    put_descriptions(shard, content)


def _random_bytes(length: int, generator: torch.Generator) -> Tensor:
    words = torch.empty(-(-length // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:length]
