"""The table of faults in README.md: every number has a row, and every test that a row names exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
_KEPT = (
    *range(1, 8), *range(9, 13), 14, *range(16, 22), 23, 24, 27, 29, 30, 32, 33, 35, *range(37, 47), 48, 49, 51
)  # fmt: skip
NUMBERS = [f"U{number:02}" for number in _KEPT]
ROW = re.compile(r"^\| (U\d\d) [^|]+ \| (.+) \|$", re.MULTILINE)
ROWS = dict(ROW.findall((HERE / "README.md").read_text(encoding="utf-8")))


@functools.cache
def names_in(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_number_has_its_row():
    assert list(ROWS) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_named_tests_exist(number):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", ROWS[number])
    assert named
    for file, name in named:
        assert name in names_in(HERE / file), f"{file} has no {name}"
