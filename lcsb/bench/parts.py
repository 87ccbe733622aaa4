"""Where the engine's memory goes, measured part by part, independently of the peak that the kernel keeps.

    process    the resident pages that are neither tensors nor the model's: interpreter, libraries, their own memory,
               read at rest after the steps, once the allocator has given back what it held free
    kept       tensors that live between steps
    passing    tensors that come and go: the most that live at once during a step, from torch's own record of each
               allocation
    pages      most pages of the model's and the scratch files resident at once, from the kernel's list of mappings

Their sum is held against VmHWM: what it misses is memory that nobody asked for, holes in the heap.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lcsb.engine.ram import read_status

_SMAPS = Path("/proc/self/smaps")


def mapped_bytes(folders: tuple[Path, ...]) -> int:
    """Resident bytes of all mappings of files below these folders."""
    roots = tuple(str(folder.resolve()) + "/" for folder in folders)
    total, ours = 0, False
    for line in _SMAPS.read_text(errors="replace").splitlines():
        if (
            "-" in line.split(" ", 1)[0]
        ):  # a mapping's first line: addresses, permissions, offset, device, inode, path
            fields = line.split(maxsplit=5)
            ours = len(fields) == 6 and fields[5].startswith(roots)
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def kept_bytes(folders: tuple[Path, ...]) -> int:
    """Bytes of all tensors alive, each storage once; those that are views of a mapped file are left out."""
    mapped = [range(begin, end) for begin, end in _mappings(folders)]
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(size for place, size in found.items() if not any(place in part for part in mapped))


def _mappings(folders: tuple[Path, ...]) -> Iterator[tuple[int, int]]:
    roots = tuple(str(folder.resolve()) + "/" for folder in folders)
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(roots):
            begin, end = fields[0].split("-")
            yield int(begin, 16), int(end, 16)


def passing_bytes(step: Callable[[], object]) -> int:
    """The most bytes of tensors that live at once during `step` beyond those alive at its start."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


class _MostPages:
    """Samples `mapped_bytes` while the context is open; `.bytes` is the largest value seen."""

    def __init__(self, folders: tuple[Path, ...], every_seconds: float = 0.01) -> None:
        self.bytes = 0
        self._folders, self._every, self._stop = folders, every_seconds, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(self._every):
            self.bytes = max(self.bytes, mapped_bytes(self._folders))

    def __enter__(self) -> _MostPages:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


def measured_parts(step: Callable[[], object], folders: tuple[Path, ...]) -> dict[str, int]:
    """Bytes by part; takes two steps, and is called after the steps whose peak is explained.

    Args:
        step: takes one training step.
        folders: of the model and of scratch files.
    """
    with _MostPages(folders) as pages:
        step()
    # Read before the profiler is there, which needs memory of its own.
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    kept = kept_bytes(folders)
    process = read_status("RssAnon") + read_status("RssFile") + read_status("RssShmem")
    process -= kept + mapped_bytes(folders)
    return {"process": process, "kept": kept, "passing": passing_bytes(step), "pages": pages.bytes}
