"""Shapes of a decoder-only model, and the bytes that training it takes (T12's memory paragraph).

    peak = memory floor + resident weights + one dequantised tile + saved layer inputs
           + one layer's activations + logits (chunk x vocabulary) + adapters + their gradients + m and v

Counts of parameters and packed bytes are exact for the geometry; the activations of one layer are counted
from the tensors that autograd keeps in a pre-norm gated layer, a model of the program and not a law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import gcd
from typing import Final

from bcd_theory.cost import BLOCK_SCHEDULES, MODES, choose
from bcd_theory.partition import contiguous_blocks, interleaved_blocks

PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes of a Llama-like decoder.

    Attributes:
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary: as in the model's configuration.
        tied: whether head and embedding share one matrix.
        qkv_bias: biases on the q, k and v projections (Qwen2).
        norms: vectors of width hidden in one layer (2; Gemma 3: 4).
        qk_norm: vectors of width head_dim that normalise queries and keys (Gemma 3, Qwen3).
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True
    qkv_bias: bool = False
    norms: int = 2
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")

    def projections(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) = (outputs, inputs) of the seven matrices of one layer, by their usual names."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (queries, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    @property
    def layer_weights(self) -> int:
        """Entries of the seven matrices of one layer."""
        return sum(rows * columns for rows, columns in self.projections().values())

    @property
    def layer_vectors(self) -> int:
        """Entries of norms and biases of one layer."""
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        return self.norms * self.hidden + biases + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def embedding_weights(self) -> int:
        """Entries of embedding and, where it is not tied, head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    def parameters(self) -> int:
        """Parameters of the base model.

        >>> GEOMETRIES["smollm2-135m"].parameters()
        134515008
        """
        return self.layers * (self.layer_weights + self.layer_vectors) + self.embedding_weights + self.hidden

    def lora_parameters(self, rank: int, targets: Sequence[str] = PROJECTIONS) -> int:
        """Adapter parameters of all layers: rank (rows + columns) for each adapted matrix.

        >>> GEOMETRIES["smollm2-135m"].lora_parameters(16)
        4884480
        """
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        shapes = self.projections()
        chosen = [shapes[choose(name, PROJECTIONS, "projection")] for name in targets]
        return self.layers * rank * sum(rows + columns for rows, columns in chosen)

    def packed_bytes(self, block_size: int = 64, double_quantisation: bool = False, bits: int = 4) -> int:
        """Bytes of all layers' matrices, quantised: codes and scales (T11's blocks run over each matrix).

        One fp32 scale for each `block_size` weights; with double quantisation one byte for each scale and one
        fp32 scale for each 256 of those (bitsandbytes' scheme), its offset and 256-entry table not counted.
        """
        return self.layers * sum(
            quantised_bytes(rows * columns, block_size, double_quantisation, bits)
            for rows, columns in self.projections().values()
        )


def quantised_bytes(
    weights: int, block_size: int = 64, double_quantisation: bool = False, bits: int = 4
) -> int:
    """Bytes of one matrix of `weights` entries: packed codes and the scales of its quantisation blocks.

    >>> quantised_bytes(4096), quantised_bytes(4096, double_quantisation=True)
    (2304, 2116)
    """
    scales = -(-weights // block_size)
    scale_bytes = scales + 4 * -(-scales // 256) if double_quantisation else 4 * scales
    return -(-weights * bits // 8) + scale_bytes


GEOMETRIES: Final[dict[str, Geometry]] = {
    "smollm2-135m": Geometry(30, 576, 1536, 9, 3, 64, 49152),
    "qwen2.5-0.5b": Geometry(24, 896, 4864, 14, 2, 64, 151936, qkv_bias=True),
    "qwen2.5-1.5b": Geometry(28, 1536, 8960, 12, 2, 128, 151936, qkv_bias=True),
    "qwen2.5-3b": Geometry(36, 2048, 11008, 16, 2, 128, 151936, qkv_bias=True),
    "gemma3-270m": Geometry(18, 640, 2048, 4, 1, 256, 262144, norms=4, qk_norm=True),
    "gemma3-1b": Geometry(26, 1152, 6912, 4, 1, 256, 262144, norms=4, qk_norm=True),
    "gemma3-4b": Geometry(34, 2560, 10240, 8, 4, 256, 262208, norms=4, qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """Peak bytes of a training process by part; `total` is their sum (all parts are alive at the peak)."""

    floor: int
    weights: int
    embedding: int
    tile: int
    layer_inputs: int
    activations: int
    logits: int
    adapters: int
    adapter_gradients: int
    moments: int

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(asdict(self).values())

    def table(self) -> dict[str, int]:
        """Parts and total, in bytes."""
        return {**asdict(self), "total": self.total}


def tile_numbers(geometry: Geometry, tile_rows: int | None = 1024, block_size: int = 64) -> int:
    """Entries of the largest tile: some `tile_rows` rows dequantised at a time; None: the whole matrix.

    A tile ends with a whole quantisation block, so its rows are a multiple of block / gcd(columns, block).

    >>> tile_numbers(Geometry(1, 96, 1000, 2, 1, 16, 100), 15)  # down_proj has 1,000 columns: 8 rows are whole blocks
    8000
    """
    largest = 0
    for rows, columns in geometry.projections().values():
        step = max(1, block_size // gcd(columns, block_size))
        whole = rows if tile_rows is None else max(step, tile_rows // step * step)
        largest = max(largest, min(rows, whole) * columns)
    return largest


def activation_floats(geometry: Geometry, rank: int, fused_attention: bool = True, tokens: int = 1) -> int:
    """Numbers that autograd keeps for one token in one layer beyond the layer's input.

    Two norm outputs and the state between the branches (3 hidden), q, k, v and the rotated q and k,
    attention's output, gate, up, the activation of gate and its product with up (4 intermediate), the
    rank-wide product of each of seven adapters, and heads x tokens probabilities unless attention is fused.
    """
    queries, keys = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
    probabilities = geometry.heads * (1 if fused_attention else tokens)
    return 3 * geometry.hidden + 3 * queries + 3 * keys + 4 * geometry.intermediate + 7 * rank + probabilities


def saved_layers(
    layers: int, mode: str, layers_per_step: int | None = None, schedule: str = "cyclic"
) -> tuple[int, int]:
    """(selected, idle) layers whose inputs are kept, at the step of the cycle that keeps most (T12).

    full keeps all N; identity the selected layers; exact and mlp those from the lowest selected layer up. A
    certified plan lies between identity and exact: its upper end is given.
    """
    choose(mode, MODES, "backward mode")
    if mode == "full":
        return layers, 0
    choose(schedule, (*BLOCK_SCHEDULES, "interleaved"), "block schedule")
    k = layers if layers_per_step is None else layers_per_step
    blocks = (interleaved_blocks if schedule == "interleaved" else contiguous_blocks)(layers, k)
    if mode == "identity":
        return max(len(block) for block in blocks), 0
    # Block 0 holds the lowest layer and is never smaller than another block.
    return len(blocks[0]), layers - len(blocks[0])


def peak_bytes(
    geometry: Geometry,
    mode: str,
    *,
    tokens: int,
    batch: int = 1,
    layers_per_step: int | None = None,
    schedule: str = "cyclic",
    rank: int = 16,
    targets: Sequence[str] = PROJECTIONS,
    floor: int = 0,
    quantised: bool = True,
    block_size: int = 64,
    double_quantisation: bool = False,
    compute_bytes: int = 4,
    embedding_bytes: int = 2,
    adapter_bytes: int = 4,
    tile_rows: int | None = 1024,
    logit_rows: int | None = None,
    logit_copies: int = 2,
    fused_attention: bool = True,
    recompute: bool = True,
    inputs_on_disk: bool = False,
    weights_resident: bool = True,
) -> PeakBytes:
    """Peak bytes of one training step by part (T12).

    Args:
        geometry: the model's shapes.
        mode: full, exact, identity, mlp or certified (counted as exact, its upper end).
        tokens, batch: tokens of one sequence and sequences of one step.
        layers_per_step, schedule: as in `bcd_theory.cost.step_seconds`; the cycle's largest step counts.
        rank, targets: of the adapters.
        floor: bytes of the bare process with its imports, measured.
        quantised: 4-bit matrices; otherwise they are held in compute_bytes and there is no tile.
        compute_bytes, embedding_bytes, adapter_bytes: bytes of one number of each kind.
        tile_rows: rows of a matrix dequantised at a time; None: the whole matrix.
        logit_rows: positions whose logits are alive at once; None: all batch x tokens.
        logit_copies: logits and their gradient make 2.
        recompute: without it the activations of every layer that backward enters are kept.
        inputs_on_disk: saved layer inputs are offloaded; one stays in memory.
        weights_resident: False: matrices are streamed, one layer's is in memory.

    Raises:
        ValueError: unknown names, sizes below 1.
    """
    for name, value in (("tokens", tokens), ("batch", batch), ("rank", rank)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    positions = batch * tokens
    selected, idle = saved_layers(geometry.layers, mode, layers_per_step, schedule)
    if quantised:
        matrices = geometry.packed_bytes(block_size, double_quantisation)
        tile = tile_numbers(geometry, tile_rows, block_size) * compute_bytes
    else:
        matrices, tile = geometry.layers * geometry.layer_weights * compute_bytes, 0
    if not weights_resident:
        matrices //= geometry.layers
    state = positions * geometry.hidden * compute_bytes
    one_layer = positions * activation_floats(geometry, rank, fused_attention, tokens) * compute_bytes
    # Without recompute an idle mlp layer keeps its MLP's tensors and the state between the branches.
    mlp_part = positions * (4 * geometry.intermediate + 2 * geometry.hidden + 3 * rank) * compute_bytes
    kept = selected * one_layer + idle * (mlp_part if mode == "mlp" else one_layer)
    adapters = geometry.lora_parameters(rank, targets) * adapter_bytes
    chunk = positions if logit_rows is None else min(logit_rows, positions)
    return PeakBytes(
        floor=floor,
        weights=matrices + (geometry.layers * geometry.layer_vectors + geometry.hidden) * compute_bytes,
        embedding=geometry.embedding_weights * embedding_bytes,
        tile=tile,
        layer_inputs=state * (1 if inputs_on_disk else selected + idle),
        activations=one_layer if recompute else kept,
        logits=logit_copies * chunk * geometry.vocabulary * compute_bytes,
        adapters=adapters,
        adapter_gradients=adapters * selected // geometry.layers,
        moments=2 * adapters,
    )
