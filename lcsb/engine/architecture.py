"""What the engine needs to know of a decoder, read from its config.json; what it does not compute is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bcd_theory.geometry import Geometry

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class Architecture:
    """A pre-norm decoder with grouped-query attention, rotary positions and a gated MLP.

    Attributes:
        windows: one entry a layer: tokens that a query sees (itself among them), None for all before it.
        rope_bases: one entry a layer: base of the rotary frequencies.
        norm_offset: added to norm weights (1 for Gemma, whose files hold w - 1).
        sandwich: whether each branch's output is normed too (Gemma).
        query_key_norm: whether queries and keys are normed by head (Qwen3, Gemma 3).
        embedding_scale: factor on the embedded tokens (Gemma: sqrt(hidden)).
        attention_scale: factor on the scores.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    activation: str
    windows: tuple[int | None, ...]
    rope_bases: tuple[float, ...]
    tied: bool
    norm_offset: float = 0.0
    sandwich: bool = False
    query_key_norm: bool = False
    embedding_scale: float = 1.0
    attention_scale: float = 1.0

    @property
    def geometry(self) -> Geometry:
        """The same shapes as the theory counts them (T12)."""
        return Geometry(
            self.layers, self.hidden, self.intermediate, self.heads, self.kv_heads, self.head_dim, self.vocabulary,
            tied=self.tied, norms=4 if self.sandwich else 2, qk_norm=self.query_key_norm,
        )  # fmt: skip

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the seven matrices of a layer."""
        return self.geometry.projections()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config.json") -> Architecture:
        """Read transformers' configuration.

        Raises:
            ValueError: a model type, activation, rotary scaling or soft cap that the engine does not compute.
        """
        kind = config.get("model_type")
        if kind not in _FAMILIES:
            raise ValueError(f"{source}: model_type is {kind!r}, expected one of {', '.join(_FAMILIES)}")
        gemma = kind == "gemma3_text"
        activation = config.get("hidden_activation") if gemma else config.get("hidden_act")
        if activation not in _ACTIVATIONS:
            raise ValueError(
                f"{source}: activation is {activation!r}, expected one of {', '.join(_ACTIVATIONS)}"
            )
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(key) is not None:
                raise ValueError(f"{source}: {key} is {config[key]}, expected none")
        if config.get("mlp_bias") or config.get("use_bidirectional_attention"):
            raise ValueError(
                f"{source}: MLP biases or bidirectional attention, which the engine does not compute"
            )
        layers, heads, hidden = (
            int(config[key]) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        head_dim = int(config.get("head_dim") or hidden // heads)
        kinds = _layer_kinds(config, kind, layers)
        bases = {name: _rope_base(config, name, source) for name in set(kinds)}
        scale = config.get("query_pre_attn_scalar") or head_dim if gemma else head_dim
        return cls(
            layers=layers,
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            vocabulary=int(config["vocab_size"]),
            eps=float(config["rms_norm_eps"]),
            activation=str(activation),
            windows=tuple(
                int(config["sliding_window"]) if name == "sliding_attention" else None for name in kinds
            ),
            rope_bases=tuple(bases[name] for name in kinds),
            tied=bool(config.get("tie_word_embeddings", gemma)),
            norm_offset=1.0 if gemma else 0.0,
            sandwich=gemma,
            query_key_norm=gemma or kind == "qwen3",
            embedding_scale=math.sqrt(hidden) if gemma else 1.0,
            attention_scale=scale**-0.5,
        )


def _layer_kinds(config: Mapping[str, Any], kind: str, layers: int) -> list[str]:
    if config.get("layer_types"):
        return [str(name) for name in config["layer_types"]]
    if kind == "mistral" and config.get("sliding_window"):
        return ["sliding_attention"] * layers
    return ["full_attention"] * layers


def _rope_base(config: Mapping[str, Any], kind: str, source: str) -> float:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = parameters.get(kind, parameters)
    rope = parameters.get("rope_type", "default")
    if rope != "default":
        raise ValueError(f"{source}: rotary scaling {rope!r}, expected 'default'")
    return float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))


def rotary(tokens: int, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [tokens, 1, head_dim / 2] of the rotary positions 0, 1, ..."""
    frequencies = 1.0 / (base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.arange(tokens).float()[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def window_mask(tokens: int, window: int | None) -> torch.Tensor | None:
    """Boolean [tokens, tokens], True where a query sees a key; None if plain causal attention does."""
    if window is None or tokens <= window:
        return None
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    return (distance >= 0) & (distance < window)
