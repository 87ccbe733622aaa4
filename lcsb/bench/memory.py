"""`lcsb bench memory`: each arm's peak in a fresh process of its own, and seconds per step against the products."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lcsb.bench.cases import BLOCKS, DESCRIPTIONS, OURS, PEERS, Case, verdict
from lcsb.bench.processes import ALLOCATORS, BenchProcess, folder_of, windows_of
from lcsb.bench.products import PARTS
from lcsb.bench.store import Store

Report = Callable[[float, str], None]
#: largest relative error of a predicted peak
PREDICTED_WITHIN = 0.10
#: largest relative distance of the measured parts' sum from the measured peak
PARTS_WITHIN = 0.05
#: rows of tokens that successive steps go through, the same for every arm
WINDOWS = 8


@dataclass(frozen=True)
class Setup:
    """What every process of a benchmark is given.

    Attributes:
        tokens: length of the one row of a batch.
        rank: of the adapters on all seven projections.
        threads: compute threads of each process.
        models: where folders of random weights lie.
        steps: steps of each arm; None: one cycle, and two steps where the cycle is one step.
        cold: drop the model's pages from the page cache before each step of ours.
        rates: of this machine, for predicted seconds; None: none are predicted.
        compute_dtype: of the large products, in our processes, the peers' and the products alone: float32 or bfloat16.
        allocator: name of the peers' allocator settings; ours are what the engine itself makes of the system's.
    """

    tokens: int = 256
    rank: int = 16
    threads: int = 1
    models: Path = Path("bench-models")
    steps: int | None = None
    cold: bool = False
    allocator: str = "small"
    compute_dtype: str = "float32"
    rates: Mapping[str, float] | None = None

    def described(self) -> dict[str, Any]:
        """Everything but the place of files, and rates, which no two measurements give alike."""
        return {key: value for key, value in asdict(self).items() if key not in ("models", "rates")}

    def settings(self, case: Case, **more: Any) -> dict[str, Any]:
        """What a part was measured with: what it must agree in to be found again."""
        return {"case": case.name, "ram": case.memory_limit, "geometry": asdict(case.geometry),
                **self.described(), **more}  # fmt: skip

    def spec(
        self, case: Case, arm: str, folder: Path, windows: Sequence[Sequence[int]], scratch: str
    ) -> dict[str, Any]:
        """The first line that a process reads."""
        geometry = case.geometry
        ours = arm in OURS
        return {
            "kind": "engine" if ours else arm,
            "mode": arm if ours else None,
            "folder": str(folder),
            "layers_per_step": None if arm in ("full", "qlora") else -(-geometry.layers // BLOCKS),
            "cycle": BLOCKS,
            "rank": self.rank,
            "ram": case.memory_limit,
            "rates": self.rates,
            "scratch": scratch,
            "windows": windows,
            "threads": self.threads,
            "cold": self.cold and ours,
            "sample": False,
            "geometry": asdict(geometry),
            "tokens": self.tokens,
            "compute_dtype": self.compute_dtype,
        }

    def allocator_of(self, arm: str) -> dict[str, str]:
        """Environment of the C library's allocator for an arm."""
        return dict(ALLOCATORS[self.allocator]) if arm in PEERS else {}


def default_arms(case: Case) -> tuple[str, ...]:
    """Every arm on trained weights; on random ones ours in the mode that holds most."""
    return (*OURS, *PEERS) if case.real else ("full",)


def measure_arm(case: Case, arm: str, setup: Setup) -> dict[str, Any]:
    """One fresh process: its peak, and seconds of its steps without the first where there is another."""
    folder = folder_of(case, setup.models)
    windows = windows_of(case, folder, setup.tokens, WINDOWS)
    with tempfile.TemporaryDirectory(dir=folder.parent if not case.real else None) as scratch:
        spec = {**setup.spec(case, arm, folder, windows, scratch), "sample": True}
        with BenchProcess(spec, setup.allocator_of(arm)) as process:
            cycle = process.ready["cycle_length"]
            steps = [process.ask({"do": "step"}) for _ in range(setup.steps or max(2, cycle))]
            memory = process.ask({"do": "memory"})
            if arm in OURS:
                memory |= process.ask({"do": "parts"})
    timed = steps[1:] if cycle == 1 and len(steps) > 1 else steps
    return {
        **memory,
        "floor_bytes": process.ready["floor_bytes"],
        "planned": process.ready["planned"],
        "cycle_length": cycle,
        "seconds": {key: statistics.fmean(s["step"][key] for s in timed) for key in ("cpu", "wall")},
        "disk_bytes": [s["disk_bytes"] for s in timed],
        "losses": [s["loss"] for s in steps],
    }


def measure_products(case: Case, setup: Setup) -> dict[str, Any]:
    """Seconds of the model's own matrix products, by part."""
    spec = setup.spec(case, "products", Path(), [], "")
    with BenchProcess(spec, {}) as process:
        seconds = process.ask({"do": "measure", "repeats": 2})
        return {"seconds": seconds, **process.ready}


def prediction(found: Mapping[str, Any]) -> dict[str, Any]:
    """How far the predicted peak is from the measured one, relative to it."""
    if not found["planned"]:
        return verdict(None, None)
    return verdict(abs(found["planned"]["peak"]["total"] / found["peak_bytes"] - 1), PREDICTED_WITHIN)


def parts_sum(found: Mapping[str, Any]) -> dict[str, Any]:
    """How far the parts' sum is from the measured peak, relative to it."""
    if not found.get("parts"):
        return verdict(None, None)
    return verdict(abs(sum(found["parts"].values()) / found["peak_bytes"] - 1), PARTS_WITHIN)


def row_of(
    case: Case, arm: str, found: dict[str, Any], cold: bool, products: dict[str, Any] | None
) -> dict[str, Any]:
    """What was measured, and what it is held against."""
    row = {
        "name": arm,
        "what": DESCRIPTIONS[arm],
        "page_cache": "cold" if cold else "warm",
        **found,
        "peak": verdict(found["peak_bytes"], case.memory_limit if arm in OURS else None),
        "prediction": prediction(found),
        "parts_sum": parts_sum(found),
    }
    if products is not None:
        alone = sum(products["seconds"][part]["cpu"] for part in PARTS)
        row["products_seconds"] = alone
        row["times_products"] = found["seconds"]["cpu"] / alone
    return row


def measure_memory(
    cases: Sequence[Case],
    arms: Sequence[str] | None,
    setup: Setup,
    out: Path,
    progress: Callable[[str], contextlib.AbstractContextManager[Report]],
) -> dict[str, Any]:
    """Measure every case and arm that is not measured yet; returns the whole report, which is in `out` too.

    Args:
        arms: names; None: every arm on trained weights, and `full` on random ones. Peers run on trained weights only.
    """
    store = Store(out, setup.threads)
    entries: dict[str, Any] = {}
    plan = [
        (case, arm, cold)
        for case in cases
        for arm in arms or default_arms(case)
        for cold in ((False, True) if setup.cold and arm in OURS else (False,))
        if case.real or arm in OURS
    ]
    with progress("memory") as show:
        for done, (case, arm, cold) in enumerate(plan):
            show(done / len(plan), f"{case.name} {arm}{' cold' if cold else ''}")
            one = replace(setup, cold=cold)
            settings = one.settings(case, arm=arm)
            key = f"{case.name}.{arm}{'.cold' if cold else ''}"
            found = store.part(key, settings, partial(measure_arm, case, arm, one))
            products = None
            if arm == "full":
                settings = {
                    "geometry": asdict(case.geometry),
                    "tokens": setup.tokens,
                    "threads": setup.threads,
                    "compute_dtype": setup.compute_dtype,
                }
                products = store.part(
                    f"{case.name}.products", settings, partial(measure_products, case, setup)
                )
            entry = entries.setdefault(
                case.name, {"weights": case.weights, "limit": case.memory_limit, "arms": []}
            )
            entry["arms"].append(row_of(case, arm, found, cold, products))
    return store.whole("memory", setup.described(), cases=entries)
