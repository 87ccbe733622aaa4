"""The memory meters move by what is allocated, and a failing measurement says why."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    peak, anonymous = map(int, done.stdout.split())
    assert abs(peak - 256) <= 4
    assert abs(anonymous - 256) <= 4


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
