"""Ruff and mypy are tests, so that one closing line tells everything. `make lint` and `make types` run the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

COMMANDS = {
    "ruff check": ["ruff", "check", "--output-format", "concise", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "mypy strict": ["mypy", "--strict", "bcd_theory", "reports"],
    "mypy": ["mypy", "lcsb", "simulations", "proofs"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_source_passes(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", *COMMANDS[name]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{name} failed\n{done.stdout}{done.stderr}"
