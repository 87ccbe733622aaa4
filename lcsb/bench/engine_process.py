"""The process that runs the engine for a benchmark: torch and the engine's own modules are all it imports."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lcsb.bench.channel import Channel, Stopwatch, disk_bytes_read
from lcsb.measure.memory import AnonymousPeak, read_status


def serve(spec: Mapping[str, Any], channel: Channel) -> None:
    """Answer requests until the benchmark goes.

    Spec: folder, mode, layers_per_step, rank, ram (bytes; None: no limit), rates (of this machine, or None), scratch,
    windows (token ids of successive steps), threads, compute_dtype, cold (drop the model's pages before each step),
    sample (follow RssAnon).
    """
    with AnonymousPeak() if spec["sample"] else contextlib.nullcontext() as anonymous:
        session = EngineSession(spec)
        channel.send({"ready": session.described})
        for request in channel.requests():
            channel.send(session.answer(request, anonymous))


class EngineSession:
    """One engine and the steps that it takes."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        import torch

        torch.set_num_threads(int(spec["threads"]))
        from lcsb.config import LCSBConfig
        from lcsb.engine.engine import Engine, LoRASettings

        self.floor = read_status("VmHWM")
        self.spec = spec
        config = LCSBConfig(spec["mode"], layers_per_step=spec["layers_per_step"])
        lora = LoRASettings(r=spec["rank"])
        residency, self.planned = plan_residency(spec, config, lora)
        self.engine = Engine(
            Path(spec["folder"]), config, lora=lora, residency=residency, compute_dtype=spec["compute_dtype"]
        )
        self.windows = [torch.tensor([ids]) for ids in spec["windows"]]
        self.at = 0
        self.described = {
            "floor_bytes": self.floor,
            "cycle_length": self.engine.schedule.cycle_length,
            "planned": self.planned,
        }

    def _next(self) -> Any:
        ids = self.windows[self.at % len(self.windows)]
        self.at += 1
        return ids

    def answer(self, request: Mapping[str, Any], anonymous: AnonymousPeak | None) -> dict[str, Any]:
        """step, forward, profile, memory or parts (after memory: measuring needs some of its own)."""
        kind = request["do"]
        if kind == "step":
            return self.step()
        if kind == "forward":
            from lcsb.bench.ledger import no_gradient_seconds

            return no_gradient_seconds(self.engine, self.windows[0], Stopwatch)
        if kind == "profile":
            return self.profile()
        if kind == "memory":
            return {
                "peak_bytes": read_status("VmHWM"),
                "anonymous_bytes": anonymous.bytes if anonymous is not None else None,
            }
        if kind == "parts":
            return self.parts()
        raise ValueError(f"request: found {kind!r}, expected step, forward, profile, memory or parts")

    def parts(self) -> dict[str, Any]:
        """Bytes by part, at the first block of a cycle: it lies lowest, so its step visits most layers."""
        from lcsb.bench.parts import measured_parts

        def step() -> None:
            self.engine.t = 0
            self.engine.step(self.windows[0])

        return {"parts": measured_parts(step, (Path(self.spec["folder"]), Path(self.spec["scratch"])))}

    def step(self) -> dict[str, Any]:
        """One training step: seconds of the whole and of the layers alone, and bytes read from the disk."""
        if self.spec["cold"]:
            drop_pages(Path(self.spec["folder"]))
        outside: list[dict[str, Any]] = []
        ids = self._next()
        before = disk_bytes_read()
        with _timed_outside(self.engine, outside):
            watch = Stopwatch()
            record = self.engine.step(ids)
            whole = watch.read()
        after = disk_bytes_read()
        layers = {key: whole[key] - sum(part[key] for part in outside) for key in ("cpu", "wall")}
        return {
            "step": whole,
            "layers": layers,
            "loss": self.engine.loss,
            "block": record.block,
            "disk_bytes": None if before is None or after is None else after - before,
        }

    def profile(self) -> dict[str, Any]:
        """A cycle of steps without and one with the ledger: seconds a step of both, and the ledger's table (wall)."""
        from lcsb.bench.ledger import PHASES, ROWS, profiled

        cycle = self.engine.schedule.cycle_length
        with profiled(self.engine):  # pays for what the profiler sets up at its first use
            self.engine.step(self._next())
        plain = [self.step()["step"] for _ in range(cycle)]
        measured, ledgers = [], []
        for _ in range(cycle):
            with profiled(self.engine) as ledger:
                watch = Stopwatch()
                self.engine.step(self._next())
                measured.append(watch.read())
            ledgers.append(ledger)
        tables = [ledger.table() for ledger in ledgers]
        return {
            "plain": {clock: statistics.fmean(s[clock] for s in plain) for clock in ("cpu", "wall")},
            "measured": {clock: statistics.fmean(s[clock] for s in measured) for clock in ("cpu", "wall")},
            "table": {
                row: {phase: statistics.fmean(t[row][phase] for t in tables) for phase in PHASES}
                for row in ROWS
            },
            "product_operations": {
                phase: statistics.fmean(ledger.operations[phase] for ledger in ledgers) for phase in PHASES
            },
        }


@contextlib.contextmanager
def _timed_outside(engine: Any, found: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, what is not the layers' (embedding, head and loss, optimiser) is timed."""
    places = [(engine, "_embed"), (engine, "_loss"), (engine.states, "step"), (engine.states, "idle_steps")]

    def timed(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            watch = Stopwatch()
            result = function(*args, **kwargs)
            found.append(watch.read())
            return result

        return call

    for owner, name in places:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in places:
            delattr(owner, name)


def plan_residency(spec: Mapping[str, Any], config: Any, lora: Any) -> tuple[Any, dict[str, Any]]:
    """What stays in memory under the budget (None: all that there is), and what was predicted for it."""
    from lcsb.engine.architecture import Architecture
    from lcsb.engine.mapped import MappedFolder
    from lcsb.engine.planner import plan
    from lcsb.engine.ram import tame_allocator
    from lcsb.engine.rates import Rates

    folder = MappedFolder(Path(spec["folder"]))
    found = plan(
        Architecture.from_config(folder.config, str(folder.folder / "config.json")),
        tokens=len(spec["windows"][0]),
        config=config,
        lora=lora,
        ram=spec["ram"],
        folder_bytes=sum(folder.nbytes(name) for name in folder.names()),
        scratch=Path(spec["scratch"]),
        rates=Rates(**spec["rates"]) if spec.get("rates") else None,
    )
    if found.tame:
        tame_allocator()
    described = found.as_dict()
    described["residency"].pop("folder")  # a place of this machine
    return found.residency, described


def drop_pages(folder: Path) -> None:
    """Ask the system to forget what it holds of the folder's files (pages that are mapped stay).

    Raises:
        OSError: the system has no posix_fadvise.
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError("cold page cache: this system has no posix_fadvise")
    for path in sorted(folder.glob("*.safetensors")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that wait to be written are not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
