"""Amounts of memory as people write them, and this process's own."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

STATUS = Path("/proc/self/status")

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_ram(amount: str | int) -> int:
    """Bytes of an amount: 1GB = 10^9, 1GiB = 2^30; also KB to TB, KiB to TiB, decimals (1.5GB) and plain bytes.

    Raises:
        ValueError: not an amount, or less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", str(amount), re.IGNORECASE)
    if match is None or match.group(2).lower() not in _UNITS:
        raise ValueError(
            f"memory: found {amount!r}, expected an amount such as 1GB (10^9 bytes) or 1GiB (2^30)"
        )
    found = int(float(match.group(1)) * _UNITS[match.group(2).lower()])
    if found < 1:
        raise ValueError(f"memory: found {amount!r}, expected at least one byte")
    return found


def shown(number: float) -> str:
    """Bytes for people: 650 MiB."""
    return f"{number / 2**20:,.0f} MiB"


def tame_allocator(threshold: int = 1 << 20) -> bool:
    """Make glibc give blocks of at least `threshold` bytes back at once, and keep one arena.

    By default its threshold grows to 32 MiB with use, and long rows leave a heap full of holes: SmolLM2-135M peaks at
    541 MiB for one row of 2,048 tokens, and at 457 MiB after this call; at 512 tokens in mode exact at 595 and 551.
    Each large tensor costs its page faults again: 7 to 16 % more seconds there. For the rest of the process.

    Returns:
        Whether the system's allocator took it (False where it is not glibc's).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    # malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX
    settings = ((-3, threshold), (-1, 1 << 17), (-8, 1))
    taken = [bool(mallopt(ctypes.c_int(name), ctypes.c_int(value))) for name, value in settings]
    return all(taken)


def peak_bytes() -> int:
    """Largest resident memory of this process so far, file pages included (VmHWM).

    Raises:
        OSError: no /proc on this system.
    """
    return read_status("VmHWM")


def read_status(field: str) -> int:
    """A field of /proc/self/status in bytes (VmHWM: peak resident; RssAnon: resident now, without files).

    Raises:
        OSError: no /proc on this system.
        ValueError: the kernel does not report the field.
    """
    match = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"{STATUS}: no field {field!r}")
    return int(match.group(1)) * 1024
