"""C5: the gap of held-out loss to full backpropagation, at equal steps, equal updates per block, equal wall time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from reports.cells import Cell, Result
from reports.claims import GAP_MARGIN, MODELS_NEEDED, Claim
from reports.decisions import SEEDS_NEEDED, Decision, Verdict, combine, count, decide
from reports.numbers import interval, percent
from reports.rules.stability import ladders_of
from reports.verdicts import Judgement, Part

STEPS, UPDATES, TIME = "equal steps", "equal updates per block", "equal wall time"


@dataclass(frozen=True)
class Gaps:
    """Seed -> (arm - full)/full of the final held-out loss, and seed -> the share of full's drop that the arm misses.

    broken: seeds whose arm has no finite final loss while full has one, so that the gap has no upper limit.
    """

    values: dict[int, float]
    missed: dict[int, float]
    broken: tuple[int, ...] = ()

    @property
    def seeds(self) -> int:
        return len(self.values) + len(self.broken)


def longer(cells: Sequence[Cell], cell: Cell) -> Cell | None:
    """The cell of the same setting that trains p times as many steps: equal updates per block."""
    wanted = replace(cell.setting, steps=cell.setting.steps * cell.setting.cycle_length)
    return next((other for other in cells if other.setting == wanted), None)


def gaps(cell: Cell, arm: str, how: str = STEPS, companion: Cell | None = None) -> Gaps:
    """Gaps of one arm at one setting. `companion`: see `longer`; equal updates need it, equal time may."""
    full_name = cell.like("full")
    if full_name is None:
        return Gaps({}, {})
    there = companion.of(arm) if companion is not None else {}
    values, missed, broken = {}, {}, []
    for seed, full in cell.of(full_name).items():
        if full.final is None or full.status == "diverged":
            continue
        mine = there.get(seed) if how == UPDATES else cell.of(arm).get(seed)
        loss = None
        if how == TIME:
            # A broken arm is broken at any time; else the longest log that reaches full's seconds.
            if mine is not None and mine.final is None:
                broken.append(seed)
                continue
            for log in (there.get(seed), mine):
                loss = _after(log, full.seconds) if loss is None else loss
            if loss is None:
                continue
        elif mine is None:
            continue
        else:
            loss = mine.final
        if loss is None:
            broken.append(seed)
            continue
        values[seed] = (loss - full.final) / full.final
        if full.start is not None and full.start > full.final:
            missed[seed] = (loss - full.final) / (full.start - full.final)
    return Gaps(values, missed, tuple(broken))


def _after(log: Result | None, seconds: float | None) -> float | None:
    return None if log is None or seconds is None else log.loss_after(seconds)


def pooled(found: Sequence[Gaps]) -> list[float]:
    """One value a seed: the mean over the cells, for the seeds that every cell has. Seeds are the sample."""
    seeds = sorted(set.intersection(*(set(gap.values) for gap in found))) if found else []
    return [float(np.mean([gap.values[seed] for gap in found])) for seed in seeds]


def judge_gap(found: Sequence[Gaps], *, below: bool = True) -> Decision:
    """Verdict on "the pooled gap is below the margin" (or not below), broken seeds included.

    A broken seed counts as above every margin: with one, "below" is never supported; it is refuted when in some cell
    every seed, three or more, is broken.
    """
    decision = decide(pooled(found), "below" if below else "above", GAP_MARGIN)
    broken = sum(len(gap.broken) for gap in found)
    if not broken:
        return decision
    everywhere = any(len(gap.broken) >= SEEDS_NEEDED and not gap.values for gap in found)
    against: Verdict = "refuted" if below else "supported"
    verdict = against if everywhere or decision.verdict == against else "inconclusive"
    return replace(
        decision, verdict=verdict, why=f"{count(broken, 'seed')} of the arm without a finite final loss"
    )


def judge_quality(cells: Sequence[Cell], claim: Claim) -> tuple[Judgement, Judgement]:
    """Both verdicts from every cell that has full and the paper's arm (identity, idle momentum)."""
    here = [cell for cell in cells if cell.like("full") and cell.like("identity", "momentum")]
    here = [cell for cell in here if not _is_companion(cells, cell) and _gaps(cell, "identity").seeds]
    # The rates of a sweep are no models and tasks to be pooled over.
    swept = {(ladder.model, ladder.task, ladder.base, ladder.steps) for ladder in ladders_of(cells)}
    here = [cell for cell in here if _place(cell) not in swept]
    make_paper = partial(Judgement, rule=claim.paper.text, margin=GAP_MARGIN, unit="gap")
    make_ours = partial(Judgement, rule=claim.ours.text, margin=GAP_MARGIN, unit="gap")
    if not here:
        reason = (
            "Not tested: no finished seed of full and of the identity arm with idle momentum at one setting."
        )
        return (make_paper(verdict="not testable here", reason=reason),
                make_ours(verdict="not testable here", reason=reason))  # fmt: skip
    found = [_gaps(cell, "identity") for cell in here]
    decision = judge_gap(found)
    each = [
        _part(f"{cell.setting.words}, {STEPS}", judge_gap([gap]), gap)
        for cell, gap in zip(here, found, strict=True)
    ]
    models = sorted({cell.setting.model for cell in here})
    beside = _beside(cells, here)
    verdict, tail = decision.verdict, ""
    if verdict == "supported" and any(part.verdict == "refuted" for part in each):
        verdict, tail = "inconclusive", ", but one model and task lies wholly above it"
    elif verdict == "supported" and len(models) < MODELS_NEEDED:
        verdict, tail = "inconclusive", f", but one model alone cannot support it ({MODELS_NEEDED} needed)"
    paper = make_paper(
        verdict=verdict,
        reason=f"At equal steps the gap of the identity arm, pooled over {count(len(here), 'pair')} of model and "
        f"task, is {_said(decision)}{tail}.",
        effect=decision.effect, interval=decision.interval, n=decision.n, parts=(*each, *beside),
    )  # fmt: skip
    return paper, _ours(here, found, make_ours)


def _gaps(
    cell: Cell, mode: str, how: str = STEPS, companion: Cell | None = None, idle: str = "momentum"
) -> Gaps:
    arm = cell.like(mode, idle)
    return Gaps({}, {}) if arm is None else gaps(cell, arm, how, companion)


def _place(cell: Cell) -> tuple[str, str, str, int]:
    return cell.setting.model, cell.setting.task, cell.setting.base, cell.setting.steps


def _is_companion(cells: Sequence[Cell], cell: Cell) -> bool:
    return any(longer(cells, other) is cell and other.like("full") for other in cells if other is not cell)


def _said(decision: Decision, margin: float = GAP_MARGIN) -> str:
    if decision.effect is None:
        return f"not known ({decision.why})"
    bounds = f", 95 % interval {interval(decision.interval, 1, scale=100)} %" if decision.interval else ""
    few = f", {SEEDS_NEEDED} needed" if decision.n < SEEDS_NEEDED else ""
    why = f"; {decision.why}" if "finite" in decision.why else ""
    return f"{percent(decision.effect)}{bounds}, {count(decision.n, 'seed')}{few} (margin {percent(margin, 0)}){why}"


def _part(name: str, decision: Decision, gap: Gaps, counts: bool = True) -> Part:
    missed = list(gap.missed.values())
    share = ""
    if missed:
        bounds = decide(missed, "effect", 0.0).interval
        share = f"; it misses {percent(float(np.mean(missed)))} of full's drop"
        share += f", 95 % interval {interval(bounds, 1, scale=100)} %" if bounds else ""
    return Part.decided(
        name, decision, f"Gap {_said(decision)}{share}.", unit="gap", margin=GAP_MARGIN, counts=counts
    )


def _beside(cells: Sequence[Cell], here: Sequence[Cell]) -> list[Part]:
    """The same arm at equal updates and equal time, and every other selecting arm: shown, deciding nothing."""
    parts = []
    for cell in here:
        companion = longer(cells, cell)
        full = cell.like("full")
        arms = [
            arm
            for name, arm in cell.arms.items()
            if name != full and arm.method == "lcsb" and arm.backward != "full"
        ]
        for arm in arms:
            paper = arm.name == cell.like("identity", "momentum")
            for how in (STEPS, UPDATES, TIME):
                if paper and how == STEPS:
                    continue
                gap = gaps(cell, arm.name, how, companion)
                if gap.seeds:
                    name = f"{cell.setting.words}, {arm.name}, {how}"
                    parts.append(_part(name, judge_gap([gap]), gap, counts=False))
    return parts


def _ours(here: Sequence[Cell], found: Sequence[Gaps], make: partial[Judgement]) -> Judgement:
    size = judge_gap(found, below=False)
    first = Part.decided("size of the gap", size, f"{_said(size)}.", unit="gap", margin=GAP_MARGIN)
    differences = []
    for cell, gap in zip(here, found, strict=True):
        exact = _gaps(cell, "exact")
        differences.append(
            Gaps(
                {seed: gap.values[seed] - exact.values[seed] for seed in gap.values.keys() & exact.values}, {}
            )
        )
    order = decide(pooled(differences), "effect", 0.0)
    second = Part.decided(
        "identity behind exact", order,
        f"The gap of identity is larger than that of exact by {_said(order, 0.0)}.", unit="gap", margin=0.0,
    )  # fmt: skip
    return make(
        verdict=combine([first.verdict, second.verdict]),
        reason=f"At equal steps the pooled gap is {_said(size)}; identity minus exact: {_said(order, 0.0)}.",
        effect=size.effect, interval=size.interval, n=size.n, parts=(first, second),
    )  # fmt: skip
