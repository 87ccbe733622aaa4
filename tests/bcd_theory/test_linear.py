from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bcd_theory.linear import stability_limit

GOLDEN = Path(__file__).parents[1] / "golden" / "cycle_limits.json"


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()))
def test_golden_limits(case):
    found = stability_limit(
        np.array(case["A"]),
        case["blocks"],
        order=case["order"],
        momentum=case["beta"],
        idle="momentum" if case["idle"] == "-" else case["idle"],
    )
    assert found.learning_rate == pytest.approx(case["eta_limit"], rel=1e-6)
    assert found.stable_again_later == case["stable_again_later"]
    assert found.smoothness == pytest.approx(case["L"], rel=1e-6)
    if case["order"] != "full":
        assert found.block_smoothness == pytest.approx(case["L_blocks"], rel=1e-6)
