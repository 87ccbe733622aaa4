from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

import reports.decisions
from simulations.planted import (
    EFFECTS,
    EXPERIMENT,
    SEEDS,
    always_inconclusive,
    calibrate,
    measure,
    planted,
    predict,
    shares,
    sign_only,
    the_judge,
)
from simulations.registry import get


@pytest.fixture(scope="module")
def scale():
    return measure("standard", 0)["scale"]


@pytest.fixture(scope="module")
def experiments(scale):
    return planted(200, 0, scale)


@pytest.mark.parametrize(
    ("judge", "passes"), [(the_judge, True), (always_inconclusive, False), (sign_only, False)]
)
def test_the_judge_passes_its_calibration_and_mutants_fail_it(experiments, judge, passes):
    found = calibrate(judge, experiments)
    assert found["total"] == 200 and found["passed"] is passes
    assert (found["wrong"] <= 3 and found["decided_rate"] >= 0.8) is passes


def test_the_judge_is_the_one_of_the_claims(monkeypatch, experiments):
    """A fault planted in `reports.decisions`, by which real runs are judged, is seen: intervals half as wide."""
    true = reports.decisions.t_interval

    def narrow(values, confidence=0.95):
        low, high = true(values, confidence)
        middle, half = (low + high) / 2, (high - low) / 4
        return middle - half, middle + half

    monkeypatch.setattr(reports.decisions, "t_interval", narrow)
    assert not calibrate(the_judge, experiments)["passed"]


def test_what_counts_as_wrong():
    """Supported where absent or opposite, refuted where present, and nothing else."""
    table = {
        (truth, verdict): calibrate(lambda values, v=verdict: v, [
            {"truth": t, "values": [0.0]} for t in ("present", truth)
        ])["wrong"] - (verdict == "refuted")
        for truth in EFFECTS
        for verdict in ("supported", "refuted", "no difference", "inconclusive")
    }  # fmt: skip
    wrong = {pair for pair, count in table.items() if count}
    assert wrong == {("absent", "supported"), ("opposite", "supported"), ("present", "refuted")}


def test_every_truth_is_planted_as_often_and_in_standard_deviations(experiments):
    for truth, effect in EFFECTS.items():
        values = np.array([e["values"] for e in experiments if e["truth"] == truth])
        assert values.shape == (50, SEEDS)
        assert abs(values.mean() - effect) < 4 / np.sqrt(values.size)
        assert abs(values.std() - 1) < 0.2


def test_the_differences_are_those_of_equal_arms_and_near_normal(scale):
    found = measure("standard", 0)
    assert found["scale"] == scale > 0 and abs(found["mean"]) < 4 / np.sqrt(found["pairs"])
    assert abs(found["excess_kurtosis"]) < 0.5


def test_the_predicted_shares_are_those_of_a_simulation():
    rng = np.random.default_rng(0)
    for effect in (0.0, 0.2, 1.0):
        drawn = rng.normal(effect, 1.0, size=(20000, SEEDS))
        t = drawn.mean(1) / (drawn.std(1, ddof=1) / np.sqrt(SEEDS))
        critical = stats.t.ppf(0.975, SEEDS - 1)
        np.testing.assert_allclose(
            shares(effect), [(t > critical).mean(), (t < -critical).mean()], atol=0.012
        )
    assert shares(0.0) == pytest.approx((0.025, 0.025), rel=1e-9)


def test_the_predictions_are_registered_before_the_experiments(scale):
    said = {p.id: p.value for p in predict({"scale": scale})}
    assert said["wrong-share"] == pytest.approx(0.025 / 4, rel=1e-3) and said["decided-rate"] > 0.99


def test_the_last_line(capsys, tmp_path):
    from simulations.experiment import main

    assert main(EXPERIMENT, ["--size", "standard", "--json", "--out", str(tmp_path)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["total"] == 200 and line["wrong"] <= 3 and line["decided_rate"] >= 0.8
    assert line["mutants_passed"] == {"always inconclusive": False, "sign only": False}
    assert sum(line["verdicts"]["tiny"].values()) == 50
    assert get("planted") is EXPERIMENT
