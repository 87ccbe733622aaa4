"""C6: divergence rates by a sweep of learning rates, and the contrasts between the rival explanations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from reports.cells import Cell
from reports.claims import EXPLANATIONS, MARGIN_OF_STEP, RATES_NEEDED, Claim, Contrast
from reports.decisions import SEEDS_NEEDED, Decision, Verdict, combine, count, decide
from reports.numbers import fixed, interval, significant
from reports.verdicts import Judgement, Part

Known = Literal["between", "at least", "at most"]
Survives = Literal["survives", "falls", "open"]


@dataclass(frozen=True)
class Rate:
    """log2 of the learning rate at which an arm first diverges, halfway between two neighbours of the grid.

    known: `at least` where it diverges at no rate of the grid, `at most` where it diverges at all of them.
    """

    log2: float
    known: Known = "between"


@dataclass(frozen=True)
class Ladder:
    """One model, base, arithmetic and task over the learning rates of the run.

    diverged: arm -> seed -> rate -> the number of steps that showed it, or None where it did not diverge.

    Rates are the run's, before an arm's own rule: full at eta/sqrt(p) and an arm at eta stand at the same eta, which
    is where they move equally (T9).
    """

    model: str
    task: str
    base: str
    arithmetic: str
    steps: int
    names: Mapping[tuple[str, str, str], str]  # (backward, idle, rule) -> arm
    diverged: Mapping[str, Mapping[int, Mapping[float, int | None]]]

    @property
    def rates(self) -> list[float]:
        """All rates, lowest first."""
        found = {rate for seeds in self.diverged.values() for rates in seeds.values() for rate in rates}
        return sorted(found)

    @property
    def step(self) -> float:
        """The widest step of the grid, in octaves: what a divergence rate is known to."""
        rates = self.rates
        return max((math.log2(b / a) for a, b in pairwise(rates)), default=math.inf)

    @property
    def words(self) -> str:
        """'smollm2-135m on wikitext-2, nf4, 60 steps'."""
        arithmetic = "" if self.arithmetic == "auto" else f", {self.arithmetic} arithmetic"
        return f"{self.model} on {self.task}, {self.base}{arithmetic}, {self.steps} steps"

    def within(self, steps: int, rates: Sequence[float]) -> Ladder:
        """The same, as it would stand after fewer steps and at some of the rates."""
        cut = {
            arm: {
                seed: {
                    rate: at if at is not None and at <= steps else None
                    for rate, at in found.items()
                    if rate in rates
                }
                for seed, found in seeds.items()
            }
            for arm, seeds in self.diverged.items()
        }
        return replace(self, steps=min(steps, self.steps), diverged=cut)

    def arm(self, key: tuple[str, str, str]) -> str | None:
        """The arm of (backward, idle, learning rate rule); full has one idle policy."""
        return self.names.get(key)

    def rate(self, arm: str, seed: int) -> Rate | None:
        """Where the arm first diverges with this seed; None if a rate below that is missing."""
        found = self.diverged.get(arm, {}).get(seed, {})
        before = None
        for rate in self.rates:
            if rate not in found:
                return None
            if found[rate] is not None:
                if before is None:
                    return Rate(math.log2(rate), "at most")
                return Rate((math.log2(before) + math.log2(rate)) / 2)
            before = rate
        return None if before is None else Rate(math.log2(before), "at least")

    def split(self, stable: str, unstable: str) -> float | None:
        """A rate at which `unstable` diverges in every seed and `stable` in none, over the seeds needed; or None."""
        for rate in self.rates:
            sides = [
                {seed: rates[rate] for seed, rates in self.diverged.get(arm, {}).items() if rate in rates}
                for arm in (stable, unstable)
            ]
            shared = sides[0].keys() & sides[1].keys()
            if len(shared) >= SEEDS_NEEDED and all(
                sides[1][s] is not None and sides[0][s] is None for s in shared
            ):
                return rate
        return None


def ladders_of(cells: Sequence[Cell]) -> list[Ladder]:
    """Cells that differ in nothing but the learning rate make one ladder; those of too few rates make none."""
    groups: dict[object, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(replace(cell.setting, learning_rate=0.0), []).append(cell)
    found = []
    for group in groups.values():
        if len({cell.setting.learning_rate for cell in group}) < RATES_NEEDED:
            continue
        names: dict[tuple[str, str, str], str] = {}
        diverged: dict[str, dict[int, dict[float, int | None]]] = {}
        for cell in group:
            for name, arm in cell.arms.items():
                if arm.method != "lcsb" or arm.schedule != "cyclic":
                    continue
                idle = "" if arm.backward == "full" else arm.idle
                names.setdefault((arm.backward, idle, arm.learning_rate_rule), name)
                for seed, result in cell.of(name).items():
                    by_rate = diverged.setdefault(name, {}).setdefault(seed, {})
                    shown = None if result.status != "diverged" else result.established or 0
                    by_rate[cell.setting.learning_rate] = shown
        one = group[0].setting
        found.append(Ladder(one.model, one.task, one.base, one.arithmetic, one.steps, names, diverged))
    return [ladder for ladder in found if len(ladder.rates) >= RATES_NEEDED]


@dataclass(frozen=True)
class Difference:
    """log2 divergence rate of one arm minus that of another, seed by seed, and how far it is known."""

    decision: Decision
    margin: float
    bounds: tuple[Known, ...] = ()

    @property
    def known(self) -> str:
        """Words on the seeds whose difference is only a bound, or ''."""
        parts = [
            f"{self.bounds.count(kind)} only {kind}"
            for kind in ("at least", "at most")
            if kind in self.bounds
        ]
        return f" ({', '.join(parts)} that)" if parts else ""


def difference(
    left: Ladder,
    left_arm: str,
    right: Ladder,
    right_arm: str,
    claim: Literal["above", "below", "inside"] = "above",
    margin: float | None = None,
) -> Difference:
    """Verdict on the paired difference left - right being above `margin`, below -margin, or inside it.

    margin: MARGIN_OF_STEP of the grid's step if None. A seed whose difference is only a bound may carry the verdict
    that the bound implies and no other: `at least` may show "above" and never refute it.
    """
    step = max(left.step, right.step)
    limit = MARGIN_OF_STEP * step if margin is None else margin
    values, bounds = [], []
    for seed in sorted(left.diverged.get(left_arm, {}).keys() & right.diverged.get(right_arm, {}).keys()):
        a, b = left.rate(left_arm, seed), right.rate(right_arm, seed)
        if a is None or b is None:
            continue
        lower = a.known == "at least" or b.known == "at most"
        upper = a.known == "at most" or b.known == "at least"
        if lower and upper:
            continue  # neither side was seen to diverge inside the grid: nothing is known of the difference
        values.append(a.log2 - b.log2)
        bounds.append("at least" if lower else "at most" if upper else "between")
    if claim == "below":
        decision = decide([-value for value in values], "above", limit)
        if decision.effect is not None:
            flipped = None if decision.interval is None else (-decision.interval[1], -decision.interval[0])
            decision = replace(decision, effect=-decision.effect, interval=flipped)
    else:
        decision = decide(values, claim, limit)
    return Difference(_within(decision, claim, limit, tuple(bounds)), limit, tuple(bounds))  # type: ignore[arg-type]


def _within(decision: Decision, claim: str, margin: float, bounds: tuple[str, ...]) -> Decision:
    """Withdraw a verdict that a bound could overturn."""
    if decision.verdict == "inconclusive" or decision.interval is None:
        return decision
    high, low = "at least" in bounds, "at most" in bounds  # the truth may lie higher, or lower
    if claim == "inside":
        safe = not (high or low)
        if decision.verdict == "refuted":
            safe = not (low if decision.interval[0] > margin else high)
    else:
        shows_above = (claim == "above") == (decision.verdict == "supported")
        safe = not (low if shows_above else high)
    return decision if safe else replace(decision, verdict="inconclusive", why="only bounds are known")


PAPER = ("identity", "momentum", "eta")
FULL = ("full", "", "eta")


def equal_movement(idle: str) -> tuple[str, str, str]:
    """Full backpropagation that moves as an arm of this idle policy does (T9)."""
    return ("full", "", "eta/sqrt(p)" if idle == "momentum" else "eta/p")


def judge_stability(cells: Sequence[Cell], claim: Claim) -> tuple[Judgement, Judgement]:
    """Both verdicts from the ladders among the cells."""
    ladders = ladders_of(cells)
    make = partial(Judgement, unit="octaves")
    here = [ladder for ladder in ladders if all(map(ladder.arm, (PAPER, FULL, equal_movement("momentum"))))]
    if not here:
        reason = (
            f"Not tested: no sweep of {RATES_NEEDED} learning rates or more with the identity arm, full, and full at "
            "eta/sqrt(p) (lcsb study DIR --part f runs one)."
        )
        return (make(verdict="not testable here", rule=claim.paper.text, reason=reason),
                make(verdict="not testable here", rule=claim.ours.text, reason=reason))  # fmt: skip
    judged = [_on(ladder) for ladder in here]
    verdicts = [verdict for verdict, _ in judged]
    verdict = "supported" if "supported" in verdicts else combine(verdicts)
    # The clearest model and base speaks: the one that carries the verdict.
    at = verdicts.index(verdict) if verdict in verdicts else 0
    deciding = judged[at][1][1]
    paper = make(
        verdict=verdict,
        rule=claim.paper.text,
        reason=f"{here[at].words}: {judged[at][1][0].reason} {deciding.reason}",
        effect=deciding.effect, interval=deciding.interval, n=deciding.n, margin=deciding.margin,
        parts=tuple(part for _, parts in judged for part in parts),
    )  # fmt: skip
    return paper, _ours(ladders, claim, make)


def _on(ladder: Ladder) -> tuple[Verdict, list[Part]]:
    parts = []
    for name, key in (("equal rate", FULL), ("equal movement", equal_movement("momentum"))):
        arm, other = ladder.arm(PAPER), ladder.arm(key)
        assert arm is not None and other is not None
        found = difference(ladder, arm, ladder, other)
        rate = ladder.split(arm, other)
        decision = found.decision
        if decision.verdict == "supported" and rate is None:
            decision = replace(decision, verdict="inconclusive", why="no rate separates all seeds")
        where = (
            f"at {significant(rate)} {other} diverges in every seed and {arm} in none" if rate is not None
            else f"no rate at which {other} diverges in every seed and {arm} in none"
        )  # fmt: skip
        parts.append(
            Part.decided(
                f"{ladder.words}, {name}",
                decision,
                f"{arm} diverges {_octaves(found)} {other}; {where}.",
                unit="octaves",
                margin=found.margin,
            )
        )
    return combine([part.verdict for part in parts]), parts


def _octaves(found: Difference) -> str:
    decision = found.decision
    if decision.effect is None:
        return f"at a rate that cannot be compared ({decision.why}) with that of"
    bounds = f", 95 % interval {interval(decision.interval, 2)}" if decision.interval else ""
    side = "above" if decision.effect >= 0 else "below"
    few = f", {SEEDS_NEEDED} needed" if decision.n < SEEDS_NEEDED else ""
    return f"{fixed(abs(decision.effect), 2)} octaves{found.known}{bounds}, {count(decision.n, 'seed')}{few}, {side}"


@dataclass(frozen=True)
class ContrastRow:
    """One explanation on one model: what was compared, and whether it survives."""

    explanation: str
    name: str
    compared: str
    found: Difference
    survives: Survives


def contrast_table(ladders: Sequence[Ladder]) -> list[ContrastRow]:
    """The explanations (a) to (e), each by its contrasts, on every ladder (or pair of ladders) that has both cells."""
    rows = []
    for explanation in EXPLANATIONS:
        for left, right in _pairs(ladders, explanation):
            left_arm, right_arm = left.arm(explanation.left), right.arm(explanation.right)
            if left_arm is None or right_arm is None:
                continue
            found = difference(left, left_arm, right, right_arm, explanation.claim)
            survives: Survives = {"supported": "survives", "refuted": "falls"}.get(
                found.decision.verdict, "open"
            )  # type: ignore[assignment]
            compared = f"{left_arm} ({left.words}) against {right_arm}"
            compared += f" ({right.words})" if right is not left else ""
            rows.append(ContrastRow(explanation.id, explanation.name, compared, found, survives))
    return rows


def _pairs(ladders: Sequence[Ladder], explanation: Contrast) -> list[tuple[Ladder, Ladder]]:
    if explanation.between == "arms":
        return [(ladder, ladder) for ladder in ladders]
    found = []
    for left in ladders:
        for right in ladders:
            same = (left.model, left.task) == (right.model, right.task)
            if explanation.between == "bases":
                fits = left.base != "none" and right.base == "none" and left.arithmetic == right.arithmetic
            else:
                fits = (
                    left.arithmetic == "bfloat16"
                    and right.arithmetic in ("auto", "float32")
                    and left.base == right.base
                )
            if same and fits:
                # Equal horizon and equal rates, or the longer run would diverge at lower ones for that alone.
                shared = sorted(set(left.rates) & set(right.rates))
                steps = min(left.steps, right.steps)
                found.append((left.within(steps, shared), right.within(steps, shared)))
    return found


def _ours(ladders: Sequence[Ladder], claim: Claim, make: partial[Judgement]) -> Judgement:
    rows = contrast_table(ladders)
    parts = []
    for row in rows:
        counted = next(contrast.counts for contrast in EXPLANATIONS if contrast.id == row.explanation)
        parts.append(
            Part.decided(
                f"({row.explanation[0]}) {row.name}: {row.compared}",
                row.found.decision,
                f"The first diverges {_octaves(row.found)} the second: the explanation "
                f"{'is open' if row.survives == 'open' else row.survives}.",
                unit="octaves",
                margin=row.found.margin,
                counts=counted,
            )
        )
    counting = [part for part in parts if part.counts]
    wanted = {contrast.id for contrast in EXPLANATIONS if contrast.counts}
    whole = wanted <= {row.explanation for row in rows}
    verdict = combine([part.verdict for part in counting]) if whole else "inconclusive"
    said = ", ".join(
        f"({row.explanation}) {row.name} {'open' if row.survives == 'open' else row.survives}" for row in rows
    )
    effect = counting[0] if counting else None
    return make(
        verdict=verdict,
        rule=claim.ours.text,
        reason=f"{said or 'No contrast has both of its cells'}.",
        effect=effect.effect if effect else None,
        interval=effect.interval if effect else None,
        margin=effect.margin if effect else None,
        n=effect.n if effect else 0,
        parts=tuple(parts),
    )


def median_rate(ladder: Ladder, arm: str) -> float | None:
    """Median over seeds of the learning rate at which the arm first diverges; None without a seed."""
    found = [
        rate.log2 for seed in ladder.diverged.get(arm, {}) if (rate := ladder.rate(arm, seed)) is not None
    ]
    return float(2 ** np.median(found)) if found else None
