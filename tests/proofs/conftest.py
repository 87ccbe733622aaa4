"""One build of the Coq proofs for the whole session, in a temporary folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proofs import check


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not check.have_coq():
        if os.environ.get("REQUIRE_COQ") == "1":
            pytest.fail(f"REQUIRE_COQ=1, but this machine {check.INSTALL_HINT}")
        pytest.skip(check.INSTALL_HINT)
    folder = tmp_path_factory.mktemp("coq")
    check.build(folder)
    return folder
