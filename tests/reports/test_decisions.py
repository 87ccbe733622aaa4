"""The decision functions against textbook numbers, their boundaries, and error rates on planted truths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reports.decisions import combine, count, decide, decide_share, t_interval


def test_t_interval_of_a_textbook_sample():
    # n = 5, mean 3, s = sqrt(2.5), t_{0.975, 4} = 2.776445: half-width 1.963243
    low, high = t_interval([1, 2, 3, 4, 5])
    assert low == pytest.approx(3 - 1.963243, abs=1e-6) and high == pytest.approx(3 + 1.963243, abs=1e-6)


def test_t_interval_needs_two_finite_values():
    with pytest.raises(ValueError, match="found 1 values"):
        t_interval([1.0])
    with pytest.raises(ValueError, match="not finite"):
        t_interval([1.0, math.nan])
    assert t_interval([2.0, 2.0]) == (2.0, 2.0)


# Three values mean -+ 0.01: s = 0.01, half-width 4.3027 * 0.01 / sqrt(3) = 0.02484.
HALF = 4.302653 * 0.01 / math.sqrt(3)


def around(mean):
    return [mean - 0.01, mean, mean + 0.01]


@pytest.mark.parametrize(
    ("claim", "mean", "verdict"),
    [
        ("above", 0.5 + HALF + 1e-6, "supported"),
        ("above", 0.5 + HALF - 1e-6, "inconclusive"),
        ("above", 0.5 - HALF + 1e-6, "inconclusive"),
        ("above", 0.5 - HALF - 1e-6, "refuted"),
        ("below", 0.5 - HALF - 1e-6, "supported"),
        ("below", 0.5, "inconclusive"),
        ("below", 0.5 + HALF + 1e-6, "refuted"),
        ("inside", 0.0, "supported"),
        ("inside", 0.5 - HALF - 1e-6, "supported"),
        ("inside", 0.5 - HALF + 1e-6, "inconclusive"),
        ("inside", -0.5 - HALF + 1e-6, "inconclusive"),
        ("inside", 0.5 + HALF + 1e-6, "refuted"),
        ("inside", -0.5 - HALF - 1e-6, "refuted"),
        ("effect", 0.5 + HALF + 1e-6, "supported"),
        ("effect", 0.5, "inconclusive"),
        ("effect", 0.0, "no difference"),
        ("effect", -0.5, "inconclusive"),
        ("effect", -0.5 - HALF - 1e-6, "refuted"),
    ],
)
def test_decide_at_its_boundaries(claim, mean, verdict):
    decision = decide(around(mean), claim, 0.5)
    assert decision.verdict == verdict
    assert decision.effect == pytest.approx(mean) and decision.n == 3
    assert decision.interval == pytest.approx((mean - HALF, mean + HALF), abs=1e-6)


def test_a_value_exactly_at_the_margin():
    assert decide([0.5] * 3, "above", 0.5).verdict == "supported"  # "at least"
    assert decide([0.5] * 3, "below", 0.5).verdict == "refuted"  # "below"
    assert decide([0.5] * 3, "inside", 0.5).verdict == "supported"
    assert decide([0.5] * 3, "effect", 0.5).verdict == "no difference"


@pytest.mark.parametrize("claim", ["above", "below", "inside", "effect"])
@pytest.mark.parametrize("values", [[], [9.0], [9.0, 9.0]])
def test_never_from_fewer_than_three_seeds(claim, values):
    decision = decide(values, claim, 0.5)
    assert decision.verdict == "inconclusive" and decision.n == len(values)
    assert decision.why == (f"{count(len(values), 'seed')}, 3 needed" if values else "no seed")


def test_decide_refuses_nonsense():
    with pytest.raises(ValueError, match="margin is -1"):
        decide([1.0] * 3, "inside", -1)
    with pytest.raises(ValueError, match="expected one of above"):
        decide([1.0] * 3, "abov", 1)  # type: ignore[arg-type]


def test_share_rule_counts_means_and_sure_misses():
    inside, straddling, outside = around(0.0), around(0.11), around(0.2)
    groups = [(values, -0.1, 0.1) for values in [inside] * 9 + [outside]]
    decision = decide_share(groups, 0.9)
    assert (decision.verdict, decision.inside, decision.outside, decision.n) == ("supported", 9, 1, 10)
    assert decide_share([(v, -0.1, 0.1) for v in [inside] * 8 + [outside] * 2], 0.9).verdict == "refuted"
    # Two means miss, but only one surely: not supported and not refuted.
    mixed = decide_share([(v, -0.1, 0.1) for v in [inside] * 8 + [straddling, outside]], 0.9)
    assert (mixed.verdict, mixed.inside, mixed.outside) == ("inconclusive", 8, 1)
    # 27 of 30 is 90 %: not lost to rounding of 0.9 * 30
    assert decide_share([(v, -0.1, 0.1) for v in [inside] * 27 + [outside] * 3], 0.9).verdict == "supported"
    assert decide_share([(v, -0.1, 0.1) for v in [inside] * 26 + [outside] * 4], 0.9).verdict == "refuted"
    assert decide_share([(v, -0.1, 0.1) for v in [inside] * 9 + [outside]], 1.0).verdict == "refuted"


def test_share_rule_needs_enough_values_everywhere():
    assert decide_share([], 0.9).verdict == "inconclusive"
    assert decide_share([([0.0] * 3, -1, 1), ([0.0] * 2, -1, 1)], 0.9).verdict == "inconclusive"
    assert decide_share([([5.0] * 2, -1, 1)] * 4, 0.9).verdict == "inconclusive"
    with pytest.raises(ValueError, match="share is 0"):
        decide_share([], 0)


def test_combine_is_a_conjunction():
    assert combine(["supported", "supported"]) == "supported"
    assert combine(["supported", "refuted", "inconclusive"]) == "refuted"
    assert combine(["supported", "inconclusive"]) == "inconclusive"
    assert combine(["supported", "no difference"]) == "inconclusive" == combine([])


def planted(mean, seeds=5, experiments=400, seed=1):
    generator = np.random.default_rng(seed)
    return [
        decide(generator.normal(mean, 1.0, seeds).tolist(), "effect", 0.0).verdict for _ in range(experiments)
    ]


def test_error_rate_on_planted_truths():
    """No effect at margin 0: 5 % wrong in all, 2.5 % a side. Three standard deviations: decided."""
    absent = planted(0.0)
    assert 1 <= absent.count("supported") <= 24 and 1 <= absent.count("refuted") <= 24
    present = planted(3.0)
    assert present.count("refuted") == 0 and present.count("supported") > 0.95 * len(present)
    assert planted(-3.0).count("supported") == 0
