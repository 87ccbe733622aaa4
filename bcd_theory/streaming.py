"""Peak bytes of a training step that streams its weights (T12's memory paragraph, for the memory engine).

    peak = floor + what lies in memory throughout + the largest phase
    phases: forward of one layer | head and loss by chunks | backward of one layer | optimiser step of one layer

Throughout: norm vectors, one dequantised tile, rotary tables, and whatever is resident of packed weights, embedding,
and adapters with their moments; of what is not resident one layer's pages (of the embedding one chunk's) at a time.
Kept layer inputs and kept outputs of projections have memory of their own, which every step uses again; the gradients
of the selected layers are at their most when backward ends. Counts are exact for the shapes; what a phase holds at
once is a model of the program, and `runtime` and `slack` are what no count knows (libraries' own memory, the
allocator's), fitted on one case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bcd_theory.geometry import PROJECTIONS, Geometry, saved_layers, tile_numbers

FLOAT = 4


@dataclass(frozen=True, slots=True)
class Resident:
    """What a streaming process keeps in memory between its uses.

    Attributes:
        weights: packed weights of all layers.
        head: the embedding (and head).
        states: adapters, m and v.
        inputs: where kept layer inputs lie: memory (float32), bfloat16 or file.
        products: layers, from the top, whose projections' outputs are kept from forward to backward.
        chunk: numbers of logits, and of head weights, held at once.
    """

    weights: bool = True
    head: bool = True
    states: bool = True
    inputs: str = "memory"
    products: int = 0
    chunk: int = 1 << 22


@dataclass(frozen=True, slots=True)
class StreamedBytes:
    """Bytes by part: `throughout` the step, and by phase; all numbers in bytes."""

    throughout: dict[str, int]
    phases: dict[str, dict[str, int]]

    @property
    def phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def total(self) -> int:
        """Predicted peak."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Parts that are alive at the peak; their sum is the peak."""
        return {**self.throughout, **self.phases[self.phase]}


@dataclass(frozen=True, slots=True)
class StreamedStep:
    """One training step of the memory engine, as far as its memory depends on it.

    Attributes:
        geometry: the model's shapes.
        mode: backward mode (certified counts as exact).
        tokens, rows: tokens of a row, rows of a batch.
        layers_per_step, schedule: as in `bcd_theory.cost.step_seconds`.
        rank, targets: of the adapters.
        embedding_bytes: of one number of the embedding as it lies on disk.
        windowed: whether some layer sees a sliding window narrower than the row.
    """

    geometry: Geometry
    mode: str
    tokens: int
    rows: int = 1
    layers_per_step: int | None = None
    schedule: str = "cyclic"
    rank: int = 16
    targets: Sequence[str] = PROJECTIONS
    embedding_bytes: int = 2
    windowed: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "rows", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def positions(self) -> int:
        """Tokens of a batch."""
        return self.rows * self.tokens

    @property
    def layer_adapter_bytes(self) -> int:
        """float32 bytes of one layer's adapters."""
        return self.geometry.lora_parameters(self.rank, self.targets) // self.geometry.layers * FLOAT

    def visited(self) -> tuple[int, int]:
        """(selected, idle) layers that backward visits, at the step that visits most."""
        if self.schedule in ("cyclic", "reversed", "shuffled", "random", "interleaved"):
            return saved_layers(self.geometry.layers, self.mode, self.layers_per_step, self.schedule)
        chosen = self.layers_per_step or self.geometry.layers
        if self.mode == "full":
            chosen = self.geometry.layers
        return chosen, 0 if self.mode == "identity" else self.geometry.layers - chosen

    def product_bytes(self) -> int:
        """Outputs of one layer's projections that backward looks at; without a norm after it, not down_proj's."""
        shapes = self.geometry.projections()
        names = PROJECTIONS if self.geometry.norms > 2 else tuple(n for n in PROJECTIONS if n != "down_proj")
        return self.positions * sum(shapes[name][0] for name in names) * FLOAT

    def head_words(self, chunk: int) -> int:
        """Words of a chunk of the head: at most `chunk` logits, and numbers of its matrix (but at least 64 words)."""
        width = max(self.positions, self.geometry.hidden)
        return min(self.geometry.vocabulary, max(64, chunk // width))

    def mask_bytes(self) -> tuple[int, int]:
        """(the mask itself, what attention makes of it): truth values, and the same in float32."""
        return (self.tokens**2, FLOAT * self.tokens**2) if self.windowed else (0, 0)


def streamed_bytes(
    step: StreamedStep, resident: Resident, *, floor: int = 0, runtime: int = 0, slack: float = 1.0
) -> StreamedBytes:
    """Peak bytes of one step by part (T12).

    Args:
        step: model, batch, mode and adapters.
        resident: what is kept in memory.
        floor: bytes of the process with its imports.
        runtime: bytes that libraries take at their first use.
        slack: factor on what is allocated and freed within a phase.
    """
    geometry, positions = step.geometry, step.positions
    selected, idle = step.visited()
    visited = selected + idle
    state = positions * geometry.hidden * FLOAT
    packed, adapters = geometry.packed_bytes(), step.layer_adapter_bytes
    words = step.head_words(resident.chunk)
    head_width = words * geometry.hidden
    throughout = {
        "floor": floor,
        "runtime": runtime,
        "vectors": (geometry.layers * geometry.layer_vectors + geometry.hidden) * FLOAT,
        "weights": packed if resident.weights else 0,
        "embedding": geometry.vocabulary * geometry.hidden * step.embedding_bytes if resident.head else 0,
        "states": 3 * adapters * geometry.layers if resident.states else 0,
        "tile": tile_numbers(geometry) * FLOAT,
        "tables": step.tokens * geometry.head_dim * FLOAT * (2 if step.windowed else 1)
        + step.mask_bytes()[0],
        "head buffer": 0 if step.embedding_bytes == FLOAT else head_width * FLOAT,
        "layer inputs": {"memory": state, "bfloat16": state // 2, "file": 0}[resident.inputs] * visited,
        "products": step.product_bytes() * min(resident.products, visited),
    }
    # Pages of what is not resident: one layer's weights and states at a time, and one chunk of the head.
    layer_pages = 0 if resident.weights else packed // geometry.layers
    state_pages = 0 if resident.states else 3 * adapters
    chunk_pages = 0 if resident.head else head_width * step.embedding_bytes

    def layer(activations: int) -> dict[str, int]:
        return {"pages": layer_pages + state_pages, "activations": int(slack * activations)}

    phases = {
        "forward": layer(forward_bytes(step) + state),
        "head": {
            "pages": chunk_pages,
            # the last layer's output, its rows with targets, these normed, the sum of the words' pulls, target words
            "activations": int(slack * 5 * state),
            "logits": positions * words * FLOAT,
        },
        "backward": max(
            (
                {
                    **layer(backward_bytes(step, "selected" if index < selected else step.mode)),
                    "gradients": adapters * max(0, selected - index),
                }
                for index in range(visited)
            ),
            key=lambda parts: sum(parts.values()),
        ),
        "optimiser": {
            "pages": state_pages,
            "gradients": adapters * selected,
            "activations": int(slack * 2 * adapters),
        },
    }
    return StreamedBytes(throughout, phases)


def forward_bytes(step: StreamedStep) -> int:
    """What one layer's forward pass holds at once beside its input: the larger of its two branches.

    Attention: the normed state, q, k and v, the normed (Gemma, Qwen3) and rotated q and k, attention's output and its
    projection. MLP: the state between the branches, attention's output, the normed state, gate, up and the activation
    of gate, where gate is let go before the projection is made.
    """
    g = step.geometry
    h, i, q, k = g.hidden, g.intermediate, g.heads * g.head_dim, g.kv_heads * g.head_dim
    normed = h if g.norms > 2 else 0
    attention = h + (q + 2 * k) + (q + k) + max(q + k if g.qk_norm else 0, q + h + normed)
    mlp = 3 * h + max(3 * i, 2 * i + h + normed)
    return step.positions * max(attention, mlp) * FLOAT + step.mask_bytes()[1]


def backward_bytes(step: StreamedStep, role: str = "selected") -> int:
    """What backward through one layer holds at once: both branches' graphs, and the gradients inside one of them.

    The layer's input and the gradient above it. Attention's graph: the normed state, rotated q and k (before their
    norms too, where they are normed), v, the output, its logarithms of sums, its projection, the state between the
    branches. The MLP's: the normed state, gate, its activation, up, their product. Then the gradients of the product
    and of its two factors; or, with the MLP's graph gone, those inside attention.

    Args:
        role: selected; mlp (idle: no graph through attention); anything else (idle: no projection keeps its input).
    """
    g = step.geometry
    h, i, q, k = g.hidden, g.intermediate, g.heads * g.head_dim, g.kv_heads * g.head_dim
    normed = h if g.norms > 2 else 0
    selected = role == "selected"
    attention = (q + k) + k + q + g.heads + 2 * h + normed
    attention += q + k if g.qk_norm else 0
    attention += h + 4 * step.rank if selected else 0
    mlp = 3 * i + 2 * normed + (h + i + 3 * step.rank if selected else 0)
    within_mlp = 2 * h + mlp + 3 * i + normed + (0 if role == "mlp" else attention)
    within_attention = 0 if role == "mlp" else 3 * h + attention + normed + 2 * q + (q + 2 * k)
    mask = 0 if role == "mlp" else step.mask_bytes()[1]
    return step.positions * max(within_mlp, within_attention) * FLOAT + mask
