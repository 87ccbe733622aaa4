"""Amounts of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lcsb.engine.ram import parse_ram


@pytest.mark.parametrize(
    ("text", "number"),
    [("1GB", 10**9), ("1GiB", 2**30), ("1.5 gb", 15 * 10**8), ("650MiB", 650 * 2**20), ("900MB", 9 * 10**8),
     ("12kB", 12_000), ("3KiB", 3072), ("77", 77), (77, 77), ("5b", 5)],
)  # fmt: skip
def test_amounts(text, number):
    assert parse_ram(text) == number


@pytest.mark.parametrize("text", ["", "GB", "1 elephant", "-1GB", "0", "1ib", "1e9", "nan", None, True])
def test_what_is_no_amount(text):
    with pytest.raises(
        ValueError, match=r"memory: found .*, expected (an amount such as 1GB|at least one byte)"
    ):
        parse_ram(text)


def test_a_tamed_allocator_gives_large_blocks_back():
    """Blocks of 2 MiB below one that stays: where its threshold has risen, glibc keeps them without the call."""
    code = (
        "import ctypes\n"
        "from lcsb.engine.ram import read_status, tame_allocator\n"
        "assert tame_allocator()\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "libc.free(libc.malloc(31 << 20))\n"  # raises the threshold where it is free to rise
        "blocks = [libc.malloc(2 << 20) for _ in range(40)]\n"
        "for block in blocks: ctypes.memset(block, 1, 2 << 20)\n"
        "last = libc.malloc(1000)\n"
        "before = read_status('RssAnon')\n"
        "for block in blocks[:-1]: libc.free(block)\n"
        "print(before - read_status('RssAnon'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 70 << 20
