"""The benchmark's end of its processes: start one, ask it, end it; and what they all are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from lcsb.bench.cases import Case
from lcsb.jobs import JobError

#: For the peers' memory: as `lcsb.engine.ram.tame_allocator` in ours, but blocks from 128 KiB instead of 1 MiB go back
#: at once, which makes QLoRA on SmolLM2 another 200 MiB smaller and twice as slow.
SMALL = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072"}
#: Freed memory is kept, so that a tensor of 50 MB does not cost its page faults at each step.
FAST = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
}
ALLOCATORS: Mapping[str, Mapping[str, str]] = {"small": SMALL, "fast": FAST, "default": {}}


class BenchProcess:
    """`python -m lcsb.bench.worker` with its specification.

    Raises (here and in `ask`):
        JobError: the process failed; with the last line of what it wrote.
    """

    def __init__(self, spec: Mapping[str, Any], allocator: Mapping[str, str]) -> None:
        threads = str(spec["threads"])
        environment = {**os.environ, **allocator, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
                       "OPENBLAS_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
        self.name = f"{spec['kind']} {spec.get('mode') or ''}".strip()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lcsb.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.ready: dict[str, Any] = self.ask(spec)["ready"]

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or ["it wrote nothing"])[-1]
            raise JobError(
                f"process {self.name!r} ended with {self._process.returncode}: {last}",
                bad_input=last.startswith(("ValueError", "OSError", "BudgetError", "FileExistsError")),
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> BenchProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Let the process finish; it is killed where it does not."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.write('{"do": "stop"}\n')
                self._process.stdin.close()
            except (BrokenPipeError, ValueError):
                pass
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def load_average() -> float | None:
    """Runnable processes over the last minute: a timing taken beside others says so."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def folder_of(case: Case, models: Path) -> Path:
    """The packed folder of a case: its own, a built-in model's in the cache, or random weights under `models`.

    A folder of random weights is written where it is not there yet.
    """
    if case.folder is not None:
        return case.folder
    if case.real:
        from lcsb.models import packed_builtin

        return packed_builtin(case.name)
    from lcsb.engine.random_weights import write_random

    folder = models / f"{case.name}-random-nf4"
    if not (folder / "config.json").exists():
        write_random(folder, case.shapes or case.name, seed=0)
    return folder


def windows_of(case: Case, folder: Path, tokens: int, count: int) -> list[list[int]]:
    """`count` windows of `tokens` ids: of the Python language reference, or drawn where the weights are random."""
    import torch

    if not case.real:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(3, case.geometry.vocabulary, (count, tokens), generator=generator)
        return [list(map(int, row)) for row in drawn]
    from transformers import AutoTokenizer

    from lcsb.data import load_corpus

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    train: Any = load_corpus("pydoc", tokenizer, tokens=tokens).train
    return [list(map(int, row)) for row in train[:count]]
