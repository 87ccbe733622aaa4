from __future__ import annotations

import numpy as np
import pytest

import simulations.noise_floor as module
from reports.records import RunFolder
from simulations.records import load_record


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small run: 240 runs of 40 cycles."""
    place = RunFolder(tmp_path_factory.mktemp("floor") / "noise_floor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.RUNS, "quick", (240, 40))
        module.EXPERIMENT.register(place, "quick", 0)
        module.EXPERIMENT.record(place)
    return place


def test_every_arm_has_a_law_but_the_two_that_read_the_iterate(folder):
    record = load_record(folder, "noise_floor")
    laws = {
        item.id.removeprefix("excess/") for item in record.predictions.items if item.id.startswith("excess/")
    }
    measured = {row["arm"] for row in record.of("floor")}
    assert measured - laws == {"importance", "greedy"}
    # The small run is coarse; that it is near is enough to catch a wrong arm (they differ by factors).
    for row in record.of("floor"):
        if row["arm"] in laws:
            assert np.mean(row["groups"]) == pytest.approx(record.predicted(f"excess/{row['arm']}"), rel=0.12)


def test_a_law_that_is_six_per_cent_off_is_refuted(folder):
    record = load_record(folder, "noise_floor")
    setting = next(s for s in module.SETTINGS if s.arm.name == "cyclic")
    said = record.predicted("excess/cyclic")
    spread = 1 + 0.001 * np.linspace(-1, 1, 8)
    for factor, verdict in ((1.0, "supported"), (1.06, "refuted"), (0.94, "refuted")):
        row = {"arm": "cyclic", "groups": (said * factor * spread).tolist()}
        assert module._part(record, row, setting).verdict == verdict


def test_the_law_of_adamw_is_self_consistent():
    """At eps = 0 and a vanishing learning rate D is the noise alone, and sqrt(p) smaller under idle momentum."""
    a, sigma = module.draw_problem(0)
    by = {s.arm.name: s for s in module.SETTINGS}
    full = module.law(by["AdamW, full"], a, sigma**2).excess
    idle = module.law(by["AdamW, idle momentum"], a, sigma**2).excess
    frozen = module.law(by["AdamW, idle frozen"], a, sigma**2).excess
    # T9: the walk of idle momentum is sqrt(p) times that of frozen against the same pull.
    assert idle / frozen == pytest.approx(np.sqrt(module.P), rel=0.02)
    assert frozen / full == pytest.approx(1.0, rel=0.02)
