"""One decoder layer with LoRA adapters, computed from packed weights: h' = h + attention(h), h'' = h' + mlp(h')."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bcd_theory.geometry import PROJECTIONS
from lcsb.engine.architecture import Architecture, rotary, window_mask
from lcsb.engine.elementwise import rms_norm, rotate
from lcsb.engine.mapped import MappedFolder
from lcsb.engine.packed import PackedMatrix, TileBuffer
from lcsb.engine.projections import Adapters, Products, Projection, project

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_SANDWICH = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def module_of(projection: str) -> str:
    """Name of the branch that holds a projection, as in transformers."""
    return "self_attn" if projection in _ATTENTION else "mlp"


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
        self.projections: dict[str, Projection] = {}
        for name, (rows, columns) in architecture.shapes.items():
            key = f"{self.prefix}{module_of(name)}.{name}"
            matrix = packed_matrix(folder, f"{key}.weight", rows, columns)
            bias = folder.tensor(f"{key}.bias").float().to(buffer.device) if f"{key}.bias" in folder else None
            self.projections[name] = Projection(name, matrix, bias)
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
        return weight.float().to(self.buffer.device) + self.architecture.norm_offset

    def release(self) -> None:
        """Give the pages of this layer's packed weights back."""
        for name in self._packed:
            self.folder.release(name)

    def packed_bytes(self) -> int:
        """Bytes of this layer's packed weights and their scales."""
        return sum(self.folder.nbytes(name) for name in self._packed)

    def products(self, memory: Tensor | None) -> Products:
        """A store for this layer's projections, in `memory` [`product_numbers` x tokens] or keeping none."""
        return Products(memory, self._unneeded)

    @property
    def _unneeded(self) -> tuple[str, ...]:
        # Without a norm after it, no gradient depends on the last projection's output.
        return () if self.architecture.sandwich else ("down_proj",)

    @property
    def product_numbers(self) -> int:
        """Numbers of one token's kept outputs."""
        shapes = self.architecture.shapes
        return sum(outputs for name, (outputs, _) in shapes.items() if name not in self._unneeded)

    # -- the branches --------------------------------------------------------------------------------------------

    def _project(
        self, x: Tensor, names: tuple[str, ...], adapters: Adapters, products: Products | None
    ) -> tuple[Tensor, ...]:
        return project(x, [self.projections[name] for name in names], adapters, self.buffer, products)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.norms[name], self.architecture.eps)

    def attention(
        self, hidden: Tensor, adapters: Adapters, positions: Positions, products: Products | None = None
    ) -> Tensor:
        """The attention branch's output, [rows * tokens, hidden] (what is added to `hidden`)."""
        arch = self.architecture
        rows, tokens = positions.rows, positions.tokens
        x = self._norm(hidden, "input_layernorm")
        flat = self._project(x, ("q_proj", "k_proj", "v_proj"), adapters, products)
        q, k, v = (y.view(rows, tokens, -1, arch.head_dim) for y in flat)
        if arch.query_key_norm:
            q, k = self._norm(q, "q_norm"), self._norm(k, "k_norm")
        table = positions.rotary(arch.rope_bases[self.index])
        q, k = rotate(q, *table), rotate(k, *table)
        mask = positions.mask(arch.windows[self.index])
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, is_causal=mask is None,
            scale=arch.attention_scale, enable_gqa=arch.heads != arch.kv_heads,
        )  # fmt: skip
        joined = mixed.transpose(1, 2).reshape(rows * tokens, arch.heads * arch.head_dim)
        (output,) = self._project(joined, ("o_proj",), adapters, products)
        return self._norm(output, "post_attention_layernorm") if arch.sandwich else output

    def mlp(self, hidden: Tensor, adapters: Adapters, products: Products | None = None) -> Tensor:
        """The MLP branch's output, [rows * tokens, hidden]."""
        arch = self.architecture
        x = self._norm(hidden, "pre_feedforward_layernorm" if arch.sandwich else "post_attention_layernorm")
        gate, up = self._project(x, ("gate_proj", "up_proj"), adapters, products)
        gate = F.silu(gate) if arch.activation == "silu" else F.gelu(gate, approximate="tanh")
        inner = gate * up if torch.is_grad_enabled() else gate.mul_(up)
        (output,) = self._project(inner, ("down_proj",), adapters, products)
        return self._norm(output, "post_feedforward_layernorm") if arch.sandwich else output


class Positions:
    """Rotary tables and masks of one batch shape, made once."""

    def __init__(self, rows: int, tokens: int, head_dim: int, device: torch.device | None = None) -> None:
        self.rows, self.tokens, self._head_dim, self._device = rows, tokens, head_dim, device
        self._rotary: dict[float, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int | None, Tensor | None] = {}

    def rotary(self, base: float) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, 1, head_dim / 2]."""
        if base not in self._rotary:
            cosine, sine = rotary(self.tokens, self._head_dim, base)
            self._rotary[base] = cosine.to(self._device), sine.to(self._device)
        return self._rotary[base]

    def mask(self, window: int | None) -> Tensor | None:
        """Which keys each query sees; None for all before it."""
        if window not in self._masks:
            mask = window_mask(self.tokens, window)
            self._masks[window] = None if mask is None else mask.to(self._device)
        return self._masks[window]


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
