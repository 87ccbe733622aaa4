"""Measures what no count of tensors knows (constants.json), and how far predictions lie from measured peaks.

`python -m lcsb.engine.fit constants FOLDER OUT` measures steps of one model at length 256, each in a fresh process, and
writes OUT (constants.json). `python -m lcsb.engine.fit check CASES OUT` measures a list of cases and writes predicted
and measured peaks. A case has folder, mode, k, tokens, rows, rank, steps, tame (call `tame_allocator`) and residency
(fields of `bcd_theory.streaming.Resident`), all but folder, mode, tokens and residency optional.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bcd_theory.streaming import Resident, StreamedStep, streamed_bytes
from lcsb.config import LCSBConfig
from lcsb.engine.architecture import Architecture
from lcsb.engine.engine import Engine, LoRASettings, Residency
from lcsb.engine.mapped import MappedFolder
from lcsb.engine.planner import CONSTANTS, counted_bytes, streamed_step
from lcsb.engine.ram import peak_bytes, read_status, tame_allocator

#: what the constants are fitted on: mode, layers of a block, and what is kept
FIT_TOKENS = 256
_LEAST = {"weights": False, "head": False, "states": False, "inputs": "file"}
FIT_CASES: tuple[dict[str, Any], ...] = (
    {"mode": "full", "residency": {}},
    {"mode": "full", "residency": _LEAST},
    {"mode": "full", "residency": {"products": 30}},
    {"mode": "exact", "k": 8, "residency": _LEAST},
    {"mode": "identity", "k": 8, "residency": {**_LEAST, "chunk": 1 << 19}},
)


def measure(case: Mapping[str, Any]) -> dict[str, Any]:
    """A case's peak in a fresh process with torch and the engine alone.

    Returns:
        floor_bytes (after the imports), opened_bytes, peak_bytes, phases (phase -> largest VmHWM, RssAnon, RssFile) and
        seconds (CPU) of the last step.

    Raises:
        RuntimeError: the process failed; with the last line that it wrote.
    """
    threads = str(case.get("threads", 1))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "lcsb.engine.fit", "child", json.dumps({**case, "scratch": scratch})]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"a step in a process of its own failed (exit {done.returncode}): {last}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _child(case: Mapping[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(int(case.get("threads", 1)))
    if case.get("tame"):
        tame_allocator()
    floor = peak_bytes()
    config = LCSBConfig(case["mode"], layers_per_step=case.get("k"))
    kept = dict(case["residency"])
    chunk = kept.pop("chunk", 1 << 22)
    residency = Residency(**kept, chunk_logits=chunk, folder=Path(case["scratch"]))
    engine = Engine(
        Path(case["folder"]),
        config,
        lora=LoRASettings(r=case.get("rank", 16)),
        residency=residency,
        compute_dtype="float32",
    )
    opened, phases = peak_bytes(), _follow(engine)
    lowest = next(t for t in range(engine.schedule.cycle_length) if 0 in engine.schedule.selected(t))
    generator = torch.Generator().manual_seed(0)
    shape = (case.get("rows", 1), case["tokens"])
    seconds = 0.0
    for _ in range(case.get("steps", 2)):
        engine.t = lowest  # backward reaches lowest there, and most is kept
        begin = time.process_time()
        engine.step(torch.randint(3, engine.architecture.vocabulary, shape, generator=generator))
        seconds = time.process_time() - begin
    return {
        "floor_bytes": floor,
        "opened_bytes": opened,
        "peak_bytes": max([peak_bytes(), *(found["VmHWM"] for found in phases.values())]),
        "phases": phases,
        "seconds": seconds,
    }


def _follow(engine: Any) -> dict[str, dict[str, int]]:
    """Wraps the engine's phases; the dict fills with each phase's own peak and what lies in memory at its end."""
    phases: dict[str, dict[str, int]] = {}
    places = {"_forward": "forward", "_loss": "head", "_backward": "backward"}

    def followed(function: Any, phase: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            _note(phases, "between")
            try:
                return function(*args, **kwargs)
            finally:
                _note(phases, phase)

        return call

    for name, phase in places.items():
        setattr(engine, name, followed(getattr(engine, name), phase))
    engine.states.step = followed(engine.states.step, "optimiser")
    return phases


def _note(phases: dict[str, dict[str, int]], phase: str) -> None:
    found = {field: read_status(field) for field in ("VmHWM", "RssAnon", "RssFile")}
    if phase not in phases or phases[phase]["VmHWM"] < found["VmHWM"]:
        phases[phase] = found
    try:  # Linux: start the peak anew
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def step_of(case: Mapping[str, Any]) -> StreamedStep:
    """A case's step, from its folder's config.json and sizes."""
    folder = MappedFolder(Path(case["folder"]))
    return streamed_step(
        Architecture.from_config(folder.config),
        case["tokens"],
        case.get("rows", 1),
        LCSBConfig(case["mode"], layers_per_step=case.get("k")),
        LoRASettings(r=case.get("rank", 16)),
        sum(folder.nbytes(name) for name in folder.names()),
    )


def check(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Predicted and measured peaks of cases; error: (predicted - measured) / measured."""
    rows = []
    for case in cases:
        measured = measure(case)
        counted = counted_bytes(step_of(case), Resident(**case["residency"]))
        rows.append(
            {
                "case": {**case, "folder": Path(case["folder"]).name},
                "predicted_bytes": counted.total,
                "measured_bytes": measured["peak_bytes"],
                "error": counted.total / measured["peak_bytes"] - 1,
                "phase": counted.phase,
                "parts": counted.parts(),
                "measured": measured,
            }
        )
    return rows


def fit_constants(folder: Path) -> dict[str, Any]:
    """constants.json with floor and runtime measured anew; the rest as it was.

    Runtime is the mean of what measured peaks have beyond floor and count. Slack cannot be told from it at one length,
    and stays as stated: 1, since what one phase lets go is there for the next (and see `tame_allocator`).
    """
    cases = [{"folder": str(folder), "tokens": FIT_TOKENS, **case} for case in FIT_CASES]
    measured = [measure(case) for case in cases]
    floor = round(statistics.median(found["floor_bytes"] for found in measured))
    peaks = [found["peak_bytes"] for found in measured]
    fixed = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    counts = [
        streamed_bytes(step_of(case), Resident(**case["residency"]), floor=floor, slack=fixed["slack"]).total
        for case in cases
    ]
    runtime = round(statistics.fmean(peak - count for peak, count in zip(peaks, counts, strict=True)))
    fixed["floor_bytes"]["torch"] = floor
    fixed["runtime_bytes"] = runtime
    fixed["provenance"] = {
        "command": "python -m lcsb.engine.fit constants FOLDER OUT",
        "date": datetime.date.today().isoformat(),
        "folder": folder.name,
        "tokens": FIT_TOKENS,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cases": [
            {**case, "measured_bytes": peak, "fitted_bytes": runtime + count}
            for case, peak, count in zip(FIT_CASES, peaks, counts, strict=True)
        ],
    }
    return dict(fixed)


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    kind, *rest = arguments
    if kind == "child":
        sys.stdout.write(json.dumps(_child(json.loads(rest[0]))) + "\n")
        return
    source, out = Path(rest[0]), Path(rest[1])
    found: Any
    if kind == "constants":
        found = fit_constants(source)
    elif kind == "check":
        found = check(json.loads(source.read_text(encoding="utf-8")))
    else:
        raise SystemExit(f"found {kind!r}, expected constants or check")
    out.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
