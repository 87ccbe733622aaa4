"""One decoder layer with LoRA adapters, computed from packed weights: h' = h + attention(h), h'' = h' + mlp(h')."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bcd_theory.geometry import PROJECTIONS
from lcsb.engine.architecture import Architecture, rotary, window_mask
from lcsb.engine.mapped import MappedFolder
from lcsb.engine.packed import PackedMatrix, TileBuffer, linear

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_SANDWICH = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def module_of(projection: str) -> str:
    """Name of the branch that holds a projection, as in transformers."""
    return "self_attn" if projection in _ATTENTION else "mlp"


@dataclass(frozen=True)
class Adapter:
    """LoRA matrices of one projection: A [r, inputs], B [outputs, r]."""

    a: Tensor
    b: Tensor


class AdapterLayout:
    """Where each LoRA matrix of a layer lies in the layer's one flat vector.

    Args:
        architecture: gives the shapes.
        r: rank.
        targets: adapted projections.
    """

    def __init__(self, architecture: Architecture, r: int, targets: tuple[str, ...] = PROJECTIONS) -> None:
        self.r, self.targets = r, targets
        self.places: dict[str, tuple[int, tuple[int, int]]] = {}
        offset = 0
        for name in targets:
            outputs, inputs = architecture.shapes[name]
            for part, shape in (("a", (r, inputs)), ("b", (outputs, r))):
                self.places[f"{name}.{part}"] = (offset, shape)
                offset += shape[0] * shape[1]
        self.size = offset

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """`projection.a` and `projection.b` -> matrix, as views of `flat` [size]."""
        return {
            name: flat[offset : offset + shape[0] * shape[1]].view(shape)
            for name, (offset, shape) in self.places.items()
        }


class Layer:
    """One layer's weights and their products.

    `hidden` is [rows * tokens, hidden] throughout; attention alone sees rows apart.
    """

    def __init__(
        self, folder: MappedFolder, architecture: Architecture, index: int, buffer: TileBuffer, prefix: str
    ) -> None:
        self.folder, self.architecture, self.index, self.buffer = folder, architecture, index, buffer
        self.prefix = f"{prefix}layers.{index}."
        self.matrices: dict[str, PackedMatrix] = {}
        self.biases: dict[str, Tensor] = {}
        for name, (rows, columns) in architecture.shapes.items():
            key = f"{self.prefix}{module_of(name)}.{name}"
            self.matrices[name] = packed_matrix(folder, f"{key}.weight", rows, columns)
            if f"{key}.bias" in folder:
                self.biases[name] = folder.tensor(f"{key}.bias").float()
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += list(_SANDWICH) if architecture.sandwich else []
        self.norms = {
            name: self._norm_weight(f"{self.prefix}{name}.weight", architecture.hidden) for name in norms
        }
        if architecture.query_key_norm:
            for name in ("q_norm", "k_norm"):
                key = f"{self.prefix}self_attn.{name}.weight"
                self.norms[name] = self._norm_weight(key, architecture.head_dim)
        self._packed = [
            f"{self.prefix}{module_of(name)}.{name}.weight{part}"
            for name in architecture.shapes
            for part in ("", ".absmax")
        ]

    def _norm_weight(self, key: str, width: int) -> Tensor:
        weight = self.folder.tensor(key)
        if tuple(weight.shape) != (width,):
            raise ValueError(
                f"{self.folder.folder}: {key} has shape {tuple(weight.shape)}, expected ({width},)"
            )
        return weight.float() + self.architecture.norm_offset

    def release(self) -> None:
        """Give the pages of this layer's packed weights back."""
        for name in self._packed:
            self.folder.release(name)

    def packed_bytes(self) -> int:
        """Bytes of this layer's packed weights and their scales."""
        return sum(self.folder.nbytes(name) for name in self._packed)

    # -- the branches --------------------------------------------------------------------------------------------

    def _project(self, x: Tensor, name: str, adapters: Mapping[str, Tensor], scale: float) -> Tensor:
        y = linear(x, self.matrices[name], self.buffer)
        if name in self.biases:
            y = y + self.biases[name]
        if f"{name}.a" in adapters:
            low = (x @ adapters[f"{name}.a"].T) * scale
            y = torch.addmm(y, low, adapters[f"{name}.b"].T)
        return y

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.norms[name]
        return F.rms_norm(x, (weight.shape[0],), weight, self.architecture.eps)

    def attention(
        self, hidden: Tensor, adapters: Mapping[str, Tensor], scale: float, positions: Positions
    ) -> Tensor:
        """The attention branch's output, [rows * tokens, hidden] (what is added to `hidden`)."""
        arch = self.architecture
        rows, tokens = positions.rows, positions.tokens
        x = self._norm(hidden, "input_layernorm")

        def heads(name: str, count: int) -> Tensor:
            return self._project(x, name, adapters, scale).view(rows, tokens, count, arch.head_dim)

        q, k = heads("q_proj", arch.heads), heads("k_proj", arch.kv_heads)
        v = heads("v_proj", arch.kv_heads).transpose(1, 2)
        if arch.query_key_norm:
            q, k = self._norm(q, "q_norm"), self._norm(k, "k_norm")
        cosine, sine = positions.rotary(arch.rope_bases[self.index])
        q, k = _rotate(q.transpose(1, 2), cosine, sine), _rotate(k.transpose(1, 2), cosine, sine)
        mask = positions.mask(arch.windows[self.index])
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=arch.attention_scale,
            enable_gqa=arch.heads != arch.kv_heads,
        )  # fmt: skip
        flat = mixed.transpose(1, 2).reshape(rows * tokens, arch.heads * arch.head_dim)
        output = self._project(flat, "o_proj", adapters, scale)
        return self._norm(output, "post_attention_layernorm") if arch.sandwich else output

    def mlp(self, hidden: Tensor, adapters: Mapping[str, Tensor], scale: float) -> Tensor:
        """The MLP branch's output, [rows * tokens, hidden]."""
        arch = self.architecture
        x = self._norm(hidden, "pre_feedforward_layernorm" if arch.sandwich else "post_attention_layernorm")
        gate = self._project(x, "gate_proj", adapters, scale)
        gate = F.silu(gate) if arch.activation == "silu" else F.gelu(gate, approximate="tanh")
        output = self._project(
            gate * self._project(x, "up_proj", adapters, scale), "down_proj", adapters, scale
        )
        return self._norm(output, "post_feedforward_layernorm") if arch.sandwich else output


class Positions:
    """Rotary tables and masks of one batch shape, made once."""

    def __init__(self, rows: int, tokens: int, head_dim: int) -> None:
        self.rows, self.tokens, self._head_dim = rows, tokens, head_dim
        self._rotary: dict[float, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int | None, Tensor | None] = {}

    def rotary(self, base: float) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, head_dim]."""
        if base not in self._rotary:
            self._rotary[base] = rotary(self.tokens, self._head_dim, base)
        return self._rotary[base]

    def mask(self, window: int | None) -> Tensor | None:
        """Which keys each query sees; None for all before it."""
        if window not in self._masks:
            self._masks[window] = window_mask(self.tokens, window)
        return self._masks[window]


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cosine + torch.cat([-x[..., half:], x[..., :half]], -1) * sine


def packed_matrix(folder: MappedFolder, name: str, rows: int, columns: int) -> PackedMatrix:
    """A packed matrix of a folder.

    Raises:
        ValueError: not there, not packed as NF4 with plain scales, or of another shape.
    """
    state = folder.quantization(name)
    if state is None:
        raise ValueError(
            f"{folder.folder}: {name} is {'not packed' if name in folder else 'not there'}, expected an NF4 matrix "
            f"of {rows} x {columns}; `lcsb convert` writes one"
        )
    if list(state["shape"]) != [rows, columns]:
        raise ValueError(
            f"{folder.folder}: {name} has shape {tuple(state['shape'])}, expected {(rows, columns)}"
        )
    scales = folder.tensor(f"{name}.absmax")
    return PackedMatrix(folder.tensor(name).view(-1), scales.float(), rows, columns, int(state["blocksize"]))
