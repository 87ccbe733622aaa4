"""Amounts of memory."""

from __future__ import annotations

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
