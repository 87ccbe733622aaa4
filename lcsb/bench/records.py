"""What the benchmarks write, as schemas: a report that does not fit them is not written."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Clock = Literal["cpu", "wall"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Verdict(_Record):
    """A figure against its target; `met` is None where there is no target."""

    value: float | None
    limit: float | None
    met: bool | None


class MemoryArm(_Record):
    """One arm in one fresh process. Bytes, and seconds of a step (mean over a cycle).

    peak_bytes: VmHWM. anonymous_bytes: largest RssAnon. floor_bytes: VmHWM after the imports. planned: what the planner
    promised. parts: bytes by part at the peak. disk_bytes: read from the disk at each timed step.
    """

    name: str
    what: str
    page_cache: Literal["warm", "cold"]
    peak: Verdict
    prediction: Verdict
    peak_bytes: int
    anonymous_bytes: int | None
    floor_bytes: int
    planned: dict[str, Any] | None
    parts: dict[str, int] | None = None
    parts_sum: Verdict | None = None
    cycle_length: int
    seconds: dict[Clock, float]
    disk_bytes: list[int | None]
    losses: list[float]
    products_seconds: float | None = None
    times_products: float | None = None
    load_average: list[float | None]


class MemoryCase(_Record):
    """All arms of one model."""

    weights: Literal["real", "random weights"]
    limit: int
    arms: list[MemoryArm]


class SpeedArm(_Record):
    """One arm among the others. Seconds of a step, of the layers alone, and both over QLoRA's (CPU; wall beside)."""

    name: str
    what: str
    peak_bytes: int
    peak: Verdict | None = None
    step: dict[Clock, float]
    layers: dict[Clock, float]
    step_ratio: Verdict
    step_wall_ratio: float | None
    layers_ratio: Verdict
    layers_wall_ratio: float | None


class Forward(_Record):
    """CPU seconds of a forward pass by part, of its matrix products alone, and the share of these in it."""

    seconds: dict[Literal["layers", "head", "whole"], float]
    products_seconds: dict[str, float]
    layers_share: float
    head_share: float
    share: Verdict


class SpeedCase(_Record):
    """All arms of one model, and every round that the medians come from."""

    weights: Literal["real", "random weights"]
    arms: list[SpeedArm]
    forward: Forward | None
    first_losses_apart: Verdict
    measured: dict[str, Any]


class ProfileCase(_Record):
    """Wall seconds of one step: row -> phase -> seconds (see `lcsb.bench.ledger`)."""

    mode: str
    table: dict[str, dict[str, float]]
    seconds: float
    measured_seconds: float
    plain_seconds: float
    cost_of_measuring: float
    dequantisation_of_backward: float
    product_operations: dict[str, float]
    measured: dict[str, Any]


class _Report(_Record):
    settings: dict[str, Any]
    targets: int
    met: bool
    missed: list[str]
    environment: dict[str, Any]


class MemoryReport(_Report):
    """`lcsb bench memory`."""

    benchmark: Literal["memory"]
    cases: dict[str, MemoryCase]


class SpeedReport(_Report):
    """`lcsb bench speed`."""

    benchmark: Literal["speed"]
    cases: dict[str, SpeedCase]


class ProfileReport(_Report):
    """`lcsb bench speed --profile`."""

    benchmark: Literal["profile"]
    cases: dict[str, ProfileCase]


class GrowthPoint(_Record):
    """One model and length. Bytes, and seconds of a step; predictions are None where nothing was planned."""

    name: str
    value: int
    tokens: int
    peak_bytes: int
    predicted_bytes: int
    seconds: dict[Clock, float]
    predicted_seconds: float | None
    error: Verdict
    planned: dict[str, Any]
    load_average: list[float | None]


class GrowthReport(_Report):
    """`lcsb bench memory --growth`."""

    benchmark: Literal["growth"]
    base: dict[str, Any]
    rates: dict[str, float]
    sweeps: dict[str, list[GrowthPoint]]


REPORTS: dict[str, type[_Report]] = {
    "memory": MemoryReport,
    "speed": SpeedReport,
    "profile": ProfileReport,
    "growth": GrowthReport,
}
