"""The skip policy of conftest.py, tried on planted test files in a fresh pytest process, with and without xdist."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

PLANTED = {
    "test_listed.py": """
        import pytest
        def test_passes(): pass
        def test_skips(): pytest.skip("needs Coq: planted")
        @pytest.fixture
        def missing(): pytest.skip("needs Coq: planted in a fixture")
        def test_skips_by_fixture(missing): pass
        @pytest.mark.xfail(reason="planted")
        def test_expected_failure(): assert False
    """,
    "test_unlisted.py": """
        import pytest
        def test_skips(): pytest.skip("I did not feel like it")
        @pytest.mark.skip(reason="Coq will be needed soon")
        def test_skips_by_mark(): pass
    """,
    "test_module.py": """
        import pytest
        pytest.importorskip("a_module_that_nobody_has")
        def test_never_runs(): pass
    """,
}


def run_planted(folder: Path, names: list[str], *options: str, **variables: str) -> tuple[int, str]:
    """Exit code and output of pytest on the named planted files beside a copy of this project's conftest.py."""
    for source in ("conftest.py", "README.md"):
        shutil.copy(HERE / source, folder / source)
    for name in names:
        lines = PLANTED[name].strip("\n").splitlines()
        (folder / name).write_text("\n".join(line[8:] for line in lines) + "\n")
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("REQUIRE_", "PYTEST_"))
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(folder),
            *options,
            *names,
        ],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("options", [[], ["-n", "2", "--dist", "loadfile"]], ids=["one process", "xdist"])
def test_unlisted_reasons_fail_and_listed_ones_are_counted(tmp_path: Path, options: list[str]) -> None:
    code, output = run_planted(tmp_path, list(PLANTED), "--continue-on-collection-errors", *options)
    assert code == 1, output
    assert "1 failed, 1 passed, 2 skipped, 1 xfailed, 2 errors in" in output.splitlines()[-1]
    assert "does not list: I did not feel like it" in output
    assert "does not list: Coq will be needed soon" in output
    assert "does not list: could not import 'a_module_that_nobody_has'" in output
    table = output.split("skips by reason")[1]
    assert "    2  needs Coq\n" in table


def test_listed_reasons_alone_pass(tmp_path: Path) -> None:
    code, output = run_planted(tmp_path, ["test_listed.py"])
    assert code == 0, output
    assert "1 passed, 2 skipped, 1 xfailed in" in output.splitlines()[-1]


def test_a_required_thing_fails_instead_of_skipping(tmp_path: Path) -> None:
    code, output = run_planted(tmp_path, ["test_listed.py"], REQUIRE_COQ="1")
    assert code == 1, output
    assert "1 failed, 1 passed, 1 xfailed, 1 error in" in output.splitlines()[-1]
    assert "REQUIRE_COQ is set, so this may not be skipped: needs Coq: planted" in output
    assert "no test was skipped" in output


def load_conftest(folder: Path) -> object:
    spec = importlib.util.spec_from_file_location("planted_conftest", folder / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def test_a_table_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    shutil.copy(HERE / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "README.md").write_text("# Tests\n\n## Reasons for which a test may skip\n\nnone\n")
    with pytest.raises(ValueError, match="no rows found"):
        load_conftest(tmp_path)
