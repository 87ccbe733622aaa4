"""The README's Python example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.usefixtures("demo_cache")
def test_example_runs():
    code = re.search(
        r"<!-- executed by tests/lcsb/test_readme.py -->\n```python\n(.*?)```", README.read_text(), re.S
    )
    assert code is not None
    names: dict = {}
    exec(compile(code.group(1), str(README), "exec"), names)
    assert names["record"].taken and names["record"].t == 3
    assert names["record"].selected == tuple(range(23, 30))
    assert names["lcsb"].t == 4


def test_every_command_named_exists():
    from lcsb.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    named = set(re.findall(r"`lcsb ([a-z]+)", README.read_text()))
    assert named and named <= known, named - known
