"""Puts this folder on the import path, so that the tests here can say `import tiny` (pytest runs with
--import-mode=importlib, which does not), and holds the fixtures that load the demo model.

The demo model is converted once a run, also under pytest-xdist: its cache lies in the temporary folder of the run.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def model_cache(tmp_path_factory):
    """A model cache of this run's own in LCSB_CACHE: no test reads or writes the user's."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = run / "model-cache"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LCSB_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def one_thread():
    """For tests with many tiny trainings: one thread, and a garbage collector that leaves what exists alone.

    A Trainer collects garbage several times, each time through everything that pytest and torch hold.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def demo_cache(model_cache, demo_model):
    """The run's cache with smollm2-135m converted to NF4 in it (the first user pays about 25 s)."""
    from filelock import FileLock

    from lcsb.models import load_quantized

    with FileLock(model_cache / "demo.lock"):
        load_quantized("smollm2-135m")
    return model_cache


@pytest.fixture
def loaded_demo(demo_cache):
    """A freshly loaded (model, tokenizer) of smollm2-135m in NF4."""
    from lcsb.models import load_quantized

    return load_quantized("smollm2-135m")


@pytest.fixture(scope="module")
def nf4(tmp_path_factory, model_cache):
    """A function that loads TINY-L with an NF4 base."""
    import tiny

    from lcsb.models import load_quantized

    folder = tmp_path_factory.mktemp("nf4")
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return lambda: load_quantized(str(folder), quantization="nf4")[0]
