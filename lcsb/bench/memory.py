"""`lcsb bench memory`: each arm's peak in a fresh process of its own, and seconds per step against the products."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lcsb.bench.cases import BLOCKS, CASES, DESCRIPTIONS, OURS, PEERS, Case, verdict
from lcsb.bench.processes import ALLOCATORS, BenchProcess, folder_of, windows_of
from lcsb.bench.products import PARTS
from lcsb.bench.store import Store

Report = Callable[[float, str], None]
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
        allocator: name of the peers' allocator settings; ours are what the engine itself makes of the system's.
    """

    tokens: int = 256
    rank: int = 16
    threads: int = 1
    models: Path = Path("bench-models")
    steps: int | None = None
    cold: bool = False
    allocator: str = "small"

    def described(self) -> dict[str, Any]:
        """For a part's settings: everything but the place of files."""
        return {key: value for key, value in asdict(self).items() if key != "models"}

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
            "scratch": scratch,
            "windows": windows,
            "threads": self.threads,
            "cold": self.cold and ours,
            "sample": False,
            "geometry": asdict(geometry),
            "tokens": self.tokens,
        }

    def allocator_of(self, arm: str) -> dict[str, str]:
        """Environment of the C library's allocator for an arm."""
        return dict(ALLOCATORS[self.allocator]) if arm in PEERS else {}


def default_arms(case: Case) -> tuple[str, ...]:
    """Every arm on trained weights; on random ones ours in the mode that holds most."""
    return (*OURS, *PEERS) if case.real else ("full",)


def measure_arm(case: Case, arm: str, setup: Setup) -> dict[str, Any]:
    """One fresh process: its peak, and seconds of its steps without the first where there is another."""
    folder = folder_of(case.name, setup.models)
    windows = windows_of(folder, setup.tokens, WINDOWS, case.real, case.geometry.vocabulary)
    with tempfile.TemporaryDirectory(dir=folder.parent if not case.real else None) as scratch:
        spec = {**setup.spec(case, arm, folder, windows, scratch), "sample": True}
        with BenchProcess(spec, setup.allocator_of(arm)) as process:
            cycle = process.ready["cycle_length"]
            steps = [process.ask({"do": "step"}) for _ in range(setup.steps or max(2, cycle))]
            memory = process.ask({"do": "memory"})
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
        seconds = process.ask({"do": "measure"})
        return {"seconds": seconds, **process.ready}


def row_of(case: Case, arm: str, found: dict[str, Any], products: dict[str, Any] | None) -> dict[str, Any]:
    """What was measured, and what it is held against."""
    ours = arm in OURS
    row = {
        "name": arm,
        "what": DESCRIPTIONS[arm],
        **found,
        "peak": verdict(found["peak_bytes"], case.memory_limit if ours else None),
    }
    if products is not None and arm == "full":
        alone = sum(products["seconds"][part]["cpu"] for part in PARTS)
        row["products_seconds"] = alone
        row["times_products"] = found["seconds"]["cpu"] / alone
    return row


def measure_memory(
    names: Sequence[str],
    arms: Sequence[str] | None,
    setup: Setup,
    out: Path,
    progress: Callable[[str], contextlib.AbstractContextManager[Report]],
) -> dict[str, Any]:
    """Measure every case and arm that is not measured yet; returns the whole report, which is in `out` too."""
    store = Store(out, setup.threads)
    cases: dict[str, Any] = {}
    plan = [(name, arm) for name in names for arm in arms or default_arms(CASES[name])]
    plan = [(name, arm) for name, arm in plan if CASES[name].real or arm in OURS]
    with progress("memory") as show:
        for done, (name, arm) in enumerate(plan):
            case = CASES[name]
            show(done / len(plan), f"{name} {arm}")
            settings = {"case": name, "arm": arm, **setup.described()}
            found = store.part(f"{name}.{arm}", settings, partial(measure_arm, case, arm, setup))
            products = None
            if arm == "full":
                settings = {"case": name, "tokens": setup.tokens, "threads": setup.threads}
                products = store.part(f"{name}.products", settings, partial(measure_products, case, setup))
            entry = cases.setdefault(
                name,
                {
                    "weights": "real" if case.real else "random weights",
                    "limit": case.memory_limit,
                    "arms": [],
                },
            )
            entry["arms"].append(row_of(case, arm, found, products))
    return store.whole("memory", setup.described(), cases=cases)
