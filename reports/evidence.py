"""Schemas of evidence/<kind>.json: what was measured after the predictions were registered."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from bcd_theory.predictions import Fidelity

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Evidence(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class FidelityBatch(_Evidence):
    """Fidelity by layer on one held-out batch, before ('start') or after ('after') fine-tuning.

    gradient_norm: 2-norm of the true adapter gradient by layer.
    """

    batch: int
    adapter_seed: int
    stage: Literal["start", "after"]
    rows: list[Fidelity]
    gradient_norm: list[float | None] = []


class FidelityEvidence(_Evidence):
    kind: Literal["fidelity"]
    predictions_sha256: Sha256
    batches: list[FidelityBatch]


class TimingRow(_Evidence):
    """Seconds of a step. seconds: the median of each block of the cycle; repeats: each repeat's blocks.

    speedups: each repeat's speed-up over the `full` steps timed around it.
    """

    mode: str
    cycle_length: int
    seconds: list[float]
    mean_seconds: float
    speedup: float
    speedups: list[float] = []
    repeats: list[list[float]] = []

    def cycle_means(self) -> list[float]:
        """Mean seconds of a step over the cycle, one value a repeat; [] when repeats are not listed."""
        return [sum(blocks) / len(blocks) for blocks in self.repeats if blocks]


class TimingEvidence(_Evidence):
    """`dequantisation_share_of_backward`: of the full mode's backward time in the layers."""

    kind: Literal["timing"]
    predictions_sha256: Sha256
    rows: list[TimingRow]
    threads: int | None = None
    dequantisation_share_of_backward: float | None = None


class MemoryRow(_Evidence):
    """Bytes of the whole process; `floor_bytes`: of a process that only imported what it needs."""

    mode: str
    peak_bytes: int
    rss_anon_bytes: int | None = None
    floor_bytes: int | None = None


class MemoryEvidence(_Evidence):
    kind: Literal["memory"]
    predictions_sha256: Sha256
    meter: str
    rows: list[MemoryRow]


class ProbeStep(_Evidence):
    """One plain block gradient step from a saved point, tried and taken back; losses on the same batch.

    point: where it was taken, for example 'exact-momentum, step 60'. multiple: of the step 1/L_i. mode: of the backward
    pass that gave the direction. gradient_squared: |g_i|^2 of the true gradient of the block, in the norm of D for
    AdamW. smoothness: L_i, the largest eigenvalue of the block's Hessian at the point. cosine, norm_ratio: of the
    surrogate with g_i; 1 in mode exact. loss_after: None where it was not finite.
    """

    point: str
    seed: int
    block: int
    multiple: Annotated[float, Field(gt=0)]
    mode: Literal["exact", "identity", "mlp"]
    loss_before: float
    loss_after: float | None
    gradient_squared: Annotated[float, Field(ge=0)]
    smoothness: Annotated[float, Field(gt=0)]
    cosine: float = 1.0
    norm_ratio: float = 1.0


class ProbeEvidence(_Evidence):
    kind: Literal["probes"]
    predictions_sha256: Sha256
    steps: list[ProbeStep]


class _BenchPlan(_Evidence):
    peak: dict[str, float]


class BenchMemoryArm(_Evidence):
    """One arm of `lcsb bench memory`: bytes of the whole process, and what the planner promised."""

    name: str
    page_cache: Literal["warm", "cold"] = "warm"
    peak_bytes: Annotated[int, Field(gt=0)]
    planned: _BenchPlan | None = None

    @property
    def predicted_bytes(self) -> float | None:
        """The planned peak."""
        return self.planned.peak.get("total") if self.planned else None


class BenchMemoryCase(_Evidence):
    weights: Literal["real", "random weights"]
    arms: list[BenchMemoryArm]


class BenchMemory(_Evidence):
    """The JSON of `lcsb bench memory`, as far as it is judged."""

    benchmark: Literal["memory"]
    cases: dict[str, BenchMemoryCase]
