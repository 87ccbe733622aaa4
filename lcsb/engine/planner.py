"""What stays in memory under a budget: the fastest set that fits, its peak bytes and its seconds by part.

Parts are counted by `bcd_theory.streaming`; the constants that no count knows lie in constants.json (`lcsb.engine.fit`
measures them anew). Among all sets the one with the least predicted seconds is taken whose peak, with the margin, lies
within the budget. Layer inputs are rounded to bfloat16 only where there is no folder for a file.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bcd_theory.geometry import Geometry
from bcd_theory.streaming import FLOAT, Resident, StreamedBytes, StreamedStep, streamed_bytes
from lcsb.config import LCSBConfig
from lcsb.engine.architecture import Architecture
from lcsb.engine.engine import LoRASettings, Residency
from lcsb.engine.rates import Rates, step_seconds

CONSTANTS = Path(__file__).with_name("constants.json")
_UNTAMED_BYTES = 5 << 19
#: numbers that the head may hold at once
CHUNKS = tuple(1 << power for power in (22, 21, 20, 19, 18, 17, 16))


class BudgetError(ValueError):
    """A budget that cannot be met.

    Attributes:
        least_bytes: the least that can.
    """

    def __init__(self, ram: int, least_bytes: int, what: str) -> None:
        super().__init__(
            f"ram: {ram} bytes cannot hold {what}; the least budget that can is {least_bytes} bytes"
        )
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class Constants:
    """What no count of tensors knows, measured (see constants.json for where and when).

    Attributes:
        floor_bytes: peak of a process that has imported the engine, and of one that has imported a Trainer.
        runtime_bytes: code pages, threads and workspaces that the first step brings in.
        slack: memory that the allocator holds over the bytes of the tensors that come and go.
        margin: share of the predicted peak that the budget must leave.
        rates: seconds of this machine, for the order of sets where no profile is given.
    """

    floor_bytes: Mapping[str, int]
    runtime_bytes: int
    slack: float
    margin: float
    rates: Rates


@functools.cache
def constants() -> Constants:
    """The package's constants.json."""
    found = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    found.pop("provenance")
    return Constants(**{**found, "rates": Rates(**found["rates"])})


@dataclass(frozen=True)
class Peak:
    """Predicted bytes of the whole process at the phase that needs most."""

    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Plan:
    """What the engine is told to keep, and what that is predicted to take.

    Attributes:
        residency: for `Engine`.
        peak: bytes by part at the phase that needs most.
        phases: bytes by phase and part.
        seconds: of one step by part; None where nothing was measured.
        budget: bytes; None: no limit.
        margin_bytes: what the budget must leave beyond the predicted peak.
        least_bytes: the least budget that could be met.
        tame: whether the process must call `lcsb.engine.ram.tame_allocator` to stay inside the prediction: where the
            tensors inside an MLP are larger than 2.5 MiB, glibc's heap is left with holes (up to 15 % of the peak).
    """

    residency: Residency
    peak: Peak
    phases: Mapping[str, Mapping[str, int]]
    seconds: Mapping[str, float] | None
    budget: int | None
    margin_bytes: int
    least_bytes: int
    tame: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        residency = {**self.residency.__dict__, "folder": None}
        if self.residency.folder is not None:
            residency["folder"] = str(self.residency.folder)
        return {
            "residency": residency,
            "peak": {"phase": self.peak.phase, "parts": dict(self.peak.parts), "total": self.peak.total},
            "phases": {name: dict(parts) for name, parts in self.phases.items()},
            "seconds": None if self.seconds is None else dict(self.seconds),
            "budget": self.budget,
            "margin_bytes": self.margin_bytes,
            "least_bytes": self.least_bytes,
            "tame": self.tame,
        }


def embedding_bytes(geometry: Geometry, folder_bytes: int | None) -> int:
    """Bytes of one entry of the embedding in a folder of that size: 4, or 2 (also where the size is not known)."""
    if folder_bytes is None:
        return 2
    return 4 if folder_bytes - geometry.packed_bytes() > 3 * geometry.embedding_weights else 2


def streamed_step(
    architecture: Architecture,
    tokens: int,
    rows: int = 1,
    config: LCSBConfig | None = None,
    lora: LoRASettings | None = None,
    folder_bytes: int | None = None,
) -> StreamedStep:
    """The step as `bcd_theory.streaming` counts it; arguments as in `plan`."""
    config, lora = config or LCSBConfig(), lora or LoRASettings()
    return StreamedStep(
        architecture.geometry,
        config.backward,
        tokens,
        rows,
        config.layers_per_step,
        config.schedule,
        lora.r,
        lora.targets,
        embedding_bytes(architecture.geometry, folder_bytes),
        windowed=any(window is not None and window < tokens for window in architecture.windows),
    )


def counted_bytes(step: StreamedStep, resident: Resident, floor: int | None = None) -> StreamedBytes:
    """Predicted bytes of the whole process by part, with the package's constants."""
    fixed = constants()
    process = fixed.floor_bytes["torch"] if floor is None else floor
    return streamed_bytes(step, resident, floor=process, runtime=fixed.runtime_bytes, slack=fixed.slack)


def plan(
    architecture: Architecture,
    *,
    tokens: int,
    rows: int = 1,
    config: LCSBConfig | None = None,
    lora: LoRASettings | None = None,
    ram: int | None = None,
    floor: int | None = None,
    folder_bytes: int | None = None,
    scratch: Path | None = None,
    rates: Rates | None = None,
    states_in_file: bool = True,
    chunk: int | None = None,
) -> Plan:
    """The fastest set of residents that fits.

    Args:
        architecture: of the model.
        tokens, rows: of one batch.
        config: mode, blocks and idle policy.
        lora: rank and adapted projections.
        ram: bytes of the whole process; None: no limit.
        floor: bytes that the process holds before the engine is made; None: those of one with torch alone.
        folder_bytes: of all tensors of the packed folder (tells the embedding's type).
        scratch: folder for mapped files; None: nothing can be put in a file.
        rates: of this machine, for `seconds` (see `lcsb.engine.rates.measured_rates`).
        states_in_file: whether adapters and moments may lie in a file (a Trainer's optimiser has them in memory).
        chunk: numbers that the head holds at once, of a run that goes on (the order of its sums depends on it); None:
            the plan chooses.

    Raises:
        BudgetError: the budget cannot be met; names the least that could.
        ValueError: sizes below 1.
    """
    step = streamed_step(architecture, tokens, rows, config, lora, folder_bytes)

    def needed(resident: Resident) -> int:
        total = counted_bytes(step, resident, floor).total
        return total + _margin(total)

    sets = [resident for resident in _sets(scratch is not None) if states_in_file or resident.states]
    if chunk is not None:
        sets = [replace(resident, chunk=chunk) for resident in sets if resident.chunk == CHUNKS[0]]
    least = min(needed(resident) for resident in sets)
    fitting = [resident for resident in sets if ram is None or needed(resident) <= ram]
    # Rounding changes the numbers: only where nothing else fits.
    fitting = [resident for resident in fitting if resident.inputs != "bfloat16"] or fitting
    # The head's sums keep their order, and so every number its last bit, unless nothing else fits.
    widest = max((resident.chunk for resident in fitting), default=0)
    fitting = [resident for resident in fitting if resident.chunk == widest]
    if not fitting:
        assert ram is not None
        raise BudgetError(ram, least, f"a step of {rows} x {tokens} tokens of this model")
    filled = [_with_products(resident, architecture.layers, ram, needed) for resident in fitting]
    used = rates or constants().rates
    best = min(filled, key=lambda one: (sum(step_seconds(step, one, used).values()), needed(one)))
    peak = counted_bytes(step, best, floor)
    return Plan(
        Residency(
            best.weights,
            best.head,
            best.states,
            best.inputs,  # type: ignore[arg-type]
            best.products,
            best.chunk,
            scratch,
        ),
        Peak(peak.phase, peak.parts()),
        peak.phases,
        None if rates is None else step_seconds(step, best, rates),
        ram,
        _margin(peak.total),
        least,
        step.positions * architecture.intermediate * FLOAT > _UNTAMED_BYTES,
    )


def _sets(scratch: bool) -> Iterator[Resident]:
    """Every set without kept products. Without a folder nothing is put into a file."""
    flags = (True, False)
    for weights, head, states, place, chunk in itertools.product(
        flags, flags, flags if scratch else (True,), ("memory", "file" if scratch else "bfloat16"), CHUNKS
    ):
        yield Resident(weights, head, states, place, 0, chunk)


def _with_products(
    resident: Resident, layers: int, ram: int | None, needed: Callable[[Resident], int]
) -> Resident:
    """The same set with the products of as many layers as fit: each saves its share of the recompute."""
    low, high = 0, layers
    while low < high:
        middle = (low + high + 1) // 2
        fits = ram is None or needed(replace(resident, products=middle)) <= ram
        low, high = (middle, high) if fits else (low, middle - 1)
    return replace(resident, products=low)


def _margin(total: int) -> int:
    return int(constants().margin * total)
