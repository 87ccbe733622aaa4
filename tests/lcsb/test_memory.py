"""The memory meters move by what is allocated, and a failing measurement says why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import tiny_packed

from bcd_theory.geometry import Geometry, peak_bytes
from lcsb.measure.memory import STATUS, AnonymousPeak, measure_memory, read_status

pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")

PROBE = """
import time
from lcsb.measure.memory import AnonymousPeak, read_status
before, floor = read_status("VmHWM"), read_status("RssAnon")
with AnonymousPeak() as peak:
    block = bytearray(256 << 20)
    time.sleep(0.25)  # a sampler sees what is held for longer than its period
    del block
print((read_status("VmHWM") - before) >> 20, (peak.bytes - floor) >> 20)
"""


def test_a_known_allocation_moves_both_meters():
    """U42."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    peak, anonymous = map(int, done.stdout.split())
    assert abs(peak - 256) <= 2
    assert abs(anonymous - 256) <= 2


ENGINE_PROBE = """
import sys
from pathlib import Path
import torch
from lcsb.config import LCSBConfig
from lcsb.engine.engine import Engine
from lcsb.measure.memory import read_status
torch.set_num_threads(1)
ids = torch.randint(1000, (1, 512), generator=torch.Generator().manual_seed(0))
first = Engine(Path(sys.argv[1]), LCSBConfig("exact", layers_per_step=1))
first.step(ids[:, :32])  # what the first step loads of the libraries is part of the floor
del first
floor = read_status("VmHWM")
engine = Engine(Path(sys.argv[2]), LCSBConfig("exact", layers_per_step=2))
for _ in range(4):
    engine.step(ids)
print(floor, read_status("VmHWM"))
"""


def test_parts_of_the_engines_peak(tmp_path):
    """U40: T12's parts sum to the peak of the whole process within 5 %, and are a good part of it."""
    shapes = {"small": Geometry(2, 64, 128, 4, 2, 16, 1000), "large": Geometry(8, 512, 1536, 8, 4, 64, 32000)}
    for name, geometry in shapes.items():
        (tmp_path / name).mkdir()
        tiny_packed.write_geometry(tmp_path / name, geometry)
    command = [sys.executable, "-c", ENGINE_PROBE, *(str(tmp_path / name) for name in shapes)]
    # A large block freed goes back to the system at once: what is measured is the program, not the allocator's habits.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    floor, peak = map(int, done.stdout.split())
    parts = peak_bytes(
        shapes["large"], "exact", tokens=512, layers_per_step=2, floor=floor, embedding_bytes=4, logit_rows=128,
        logit_copies=1,
    )  # fmt: skip
    assert parts.total == pytest.approx(peak, rel=0.05)
    assert peak - floor > 0.3 * floor


def test_peak_is_at_least_what_is_live():
    with AnonymousPeak() as peak:
        pass
    assert peak.bytes > 0
    assert read_status("VmHWM") >= read_status("VmRSS")


def test_unknown_field():
    with pytest.raises(ValueError, match="no field 'VmNothing'"):
        read_status("VmNothing")


def test_a_failing_measurement_is_one_line(tmp_path):
    with pytest.raises(RuntimeError, match=r"mode 'full' failed \(exit 1\): .*absent\.yaml"):
        measure_memory(tmp_path / "absent.yaml", "full")
