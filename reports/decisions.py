"""Decision functions: a list of paired differences (or a list of yes and no) becomes a verdict.

They know no claim and no file, so that their error rates can be measured on planted truths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Verdict = Literal["supported", "refuted", "no difference", "inconclusive", "not testable here"]
Claim = Literal["above", "below", "inside", "effect"]

CONFIDENCE = 0.95
SEEDS_NEEDED = 3


@dataclass(frozen=True)
class Decision:
    """A verdict with the numbers it rests on. `why`: what kept it from being decided, or ''."""

    verdict: Verdict
    effect: float | None
    interval: tuple[float, float] | None
    n: int
    why: str = ""


@dataclass(frozen=True)
class ShareDecision:
    """Verdict of a share rule: `inside` of `n` means lie in their range, `outside` lie surely outside."""

    verdict: Verdict
    share: float | None
    inside: int
    outside: int
    n: int


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two-sided Student interval of the mean: mean -+ t_{n-1} s / sqrt(n).

    Raises ValueError for fewer than two values or one that is not finite. Equal values give a point: the
    interval says how much they scatter, not how well they were measured.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size < 2:
        raise ValueError(f"found {array.size} values, expected at least 2 for an interval")
    if not np.all(np.isfinite(array)):
        raise ValueError("found a value that is not finite, expected finite values")
    mean = float(np.mean(array))
    half = float(stats.t.ppf((1 + confidence) / 2, array.size - 1) * np.std(array, ddof=1))
    half /= math.sqrt(array.size)
    return mean - half, mean + half


def decide(
    values: Sequence[float], claim: Claim, margin: float, *, needed: int = SEEDS_NEEDED, unit: str = "seed"
) -> Decision:
    """Verdict on the mean of `values` (one per seed, or per held-out batch) by its 95 % t interval [lo, hi].

        claim      supported               refuted                   else
        above      lo >= margin            hi < margin               inconclusive
        below      hi < margin             lo >= margin              inconclusive
        inside     -margin <= lo, hi <= margin   lo > margin or hi < -margin   inconclusive
        effect     lo > margin             hi < -margin              no difference if inside, else inconclusive

    Fewer than `needed` values: inconclusive, whatever they say.
    """
    if claim in ("inside", "effect") and margin < 0:
        raise ValueError(f"margin is {margin}, expected at least 0 for the claim {claim!r}")
    n = len(values)
    if n == 0:
        return Decision("inconclusive", None, None, 0, f"no {unit}")
    effect = float(np.mean(values))
    interval = t_interval(values) if n >= 2 else None
    if n < needed or interval is None:
        return Decision("inconclusive", effect, interval, n, f"{count(n, unit)}, {needed} needed")
    low, high = interval
    inside = low >= -margin and high <= margin
    verdict: Verdict = "inconclusive"
    if claim == "above":
        verdict = "supported" if low >= margin else "refuted" if high < margin else verdict
    elif claim == "below":
        verdict = "supported" if high < margin else "refuted" if low >= margin else verdict
    elif claim == "inside":
        verdict = "supported" if inside else "refuted" if low > margin or high < -margin else verdict
    elif claim == "effect":
        if low > margin:
            verdict = "supported"
        elif high < -margin:
            verdict = "refuted"
        elif inside:
            verdict = "no difference"
    else:
        raise ValueError(f"claim is {claim!r}, expected one of above, below, inside, effect")
    return Decision(
        verdict, effect, interval, n, "" if verdict != "inconclusive" else "the interval is too wide"
    )


def decide_share(
    groups: Sequence[tuple[Sequence[float], float, float]], share: float, *, needed: int = SEEDS_NEEDED
) -> ShareDecision:
    """Verdict on "the mean lies in [low, high] for at least `share` of the groups".

    groups: (values, low, high), one group for each prediction. Supported: the means of at least `share` of
    the groups lie inside. Refuted: more than 1 - share of them lie surely outside, that is with their whole
    95 % interval. Else, without groups, or with a group of fewer than `needed` values: inconclusive.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}, expected a number in (0, 1]")
    n = len(groups)
    if n == 0:
        return ShareDecision("inconclusive", None, 0, 0, 0)
    inside = outside = 0
    enough = all(len(values) >= needed for values, _, _ in groups)
    for values, low, high in groups:
        inside += bool(low <= float(np.mean(values)) <= high)
        if len(values) >= 2:
            lo, hi = t_interval(values)
            outside += hi < low or lo > high
    verdict: Verdict = "inconclusive"
    # Whole numbers on both sides: 0.9 * 30 is not 27 in floating point.
    tolerated = math.floor((1 - share) * n + 1e-9)
    if enough and n - inside <= tolerated:
        verdict = "supported"
    elif enough and outside > tolerated:
        verdict = "refuted"
    return ShareDecision(verdict, inside / n, inside, outside, n)


def combine(verdicts: Sequence[Verdict]) -> Verdict:
    """A conjunction: refuted if a part is refuted, supported if all parts are, else inconclusive."""
    if "refuted" in verdicts:
        return "refuted"
    if verdicts and all(verdict == "supported" for verdict in verdicts):
        return "supported"
    return "inconclusive"


def count(n: int, noun: str) -> str:
    """'1 seed', '3 seeds', '8 held-out batches'."""
    ending = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{n} {noun}{'' if n == 1 else ending}"
