"""Peak bytes of a training step that streams its weights (T12's memory paragraph, for the memory engine).

    peak = floor + what lies in memory throughout + the largest phase
    phases: forward of one layer | head and loss by chunks | backward of one layer | optimiser step of one layer

Throughout: norm vectors, one dequantised tile, rotary tables, and whatever is resident of packed weights, embedding,
and adapters with their moments; of what is not resident one layer's pages (of the embedding one chunk's) at a time.
Kept layer inputs and kept outputs of projections are at their most when backward begins, the gradients of the selected
layers when it ends. Counts are exact for the shapes; what a phase holds at once is a model of the program, and
`runtime` and `slack` are what no count knows (libraries' own memory, the allocator's), fitted on one case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from bcd_theory.geometry import PROJECTIONS, Geometry, saved_layers

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

    def tile_bytes(self, tile_rows: int = 1024, block_size: int = 64) -> int:
        """The largest tile: about `tile_rows` rows, a whole number of quantisation blocks."""
        tiles = []
        for rows, columns in self.geometry.projections().values():
            step = max(1, block_size // gcd(columns, block_size))
            tiles.append(min(rows, max(step, tile_rows // step * step)) * columns)
        return max(tiles) * FLOAT

    def head_words(self, chunk: int) -> int:
        """Words of a chunk of the head."""
        width = max(self.positions, self.geometry.hidden)
        return min(self.geometry.vocabulary, max(64, chunk // width))


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
    state = positions * geometry.hidden * FLOAT
    packed = geometry.packed_bytes()
    adapters = step.layer_adapter_bytes
    words = step.head_words(resident.chunk)
    head_width = words * geometry.hidden
    embedding = geometry.embedding_weights * step.embedding_bytes
    masks = 5 * step.tokens**2 if step.windowed else 0
    throughout = {
        "floor": floor,
        "runtime": runtime,
        "vectors": (geometry.layers * geometry.layer_vectors + geometry.hidden) * FLOAT,
        "weights": packed if resident.weights else packed // geometry.layers,
        "embedding": embedding if resident.head else 0,
        "states": 3 * adapters * (geometry.layers if resident.states else 1),
        "tile": step.tile_bytes(),
        "tables": step.tokens * geometry.head_dim * FLOAT * (2 if step.windowed else 1) + masks,
        "head buffer": 0 if step.embedding_bytes == FLOAT else head_width * FLOAT,
    }
    per_input = {"memory": state, "bfloat16": state // 2, "file": 0}[resident.inputs]
    kept = {
        "layer inputs": per_input * (selected + idle),
        "products": step.product_bytes() * min(resident.products, selected + idle),
    }

    def slackened(number: int) -> int:
        return int(slack * number)

    chunk_pages = 0 if resident.head else head_width * step.embedding_bytes
    phases = {
        "forward": {**kept, "activations": slackened(forward_bytes(step))},
        "head": {
            **kept,
            "activations": slackened(6 * state),
            "logits": slackened(positions * words * FLOAT),
            "head chunk": chunk_pages,
        },
        "backward": {
            **kept,
            "activations": slackened(backward_bytes(step)),
            "gradients": adapters,
        },
        "end of backward": {
            "activations": slackened(backward_bytes(step)),
            "gradients": adapters * selected,
        },
        "optimiser": {"gradients": adapters * selected, "activations": slackened(2 * adapters)},
    }
    return StreamedBytes(throughout, phases)


def forward_bytes(step: StreamedStep) -> int:
    """What one layer holds at once without a graph: the larger of its two branches."""
    g, n = step.geometry, step.positions
    queries, keys = g.heads * g.head_dim, g.kv_heads * g.head_dim
    # q, k, v, both rotated, k and v repeated for each query head, the attention's output
    attention = 2 * g.hidden + 5 * queries + 3 * keys
    mlp = 3 * g.hidden + 3 * g.intermediate
    return n * max(attention, mlp) * FLOAT


def backward_bytes(step: StreamedStep) -> int:
    """What one selected layer holds at once: graphs of both branches, and the gradients inside the MLP.

    Of the MLP: gate, its activation, up, their product; gradients of the product and of the two factors.
    """
    g, n = step.geometry, step.positions
    queries, keys = g.heads * g.head_dim, g.kv_heads * g.head_dim
    attention = 2 * g.hidden + 4 * queries + 4 * keys
    mlp = 3 * g.hidden + 7 * g.intermediate
    gradient = 2 * g.hidden
    return n * (attention + mlp + gradient) * FLOAT


def least_resident(step: StreamedStep, chunk: int = 1 << 22) -> Resident:
    """What needs least memory while every number stays the same."""
    return Resident(weights=False, head=False, states=False, inputs="file", products=0, chunk=chunk)


def with_products(resident: Resident, layers: int) -> Resident:
    """The same with the outputs of so many layers' projections kept."""
    return replace(resident, products=layers)
