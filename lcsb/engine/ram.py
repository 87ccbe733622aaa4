"""Amounts of memory as people write them, and this process's own."""

from __future__ import annotations

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
