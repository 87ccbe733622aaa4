"""C2: what momentum does to idle layers: T6's law on real states, T9's equivalence and movement."""

from __future__ import annotations

from functools import partial

import numpy as np

from bcd_theory.predictions import LAW_ROUNDINGS, LAW_TOLERANCE
from reports.claims import DROP_MARGIN, MOVEMENT_SHARE, Claim
from reports.decisions import SEEDS_NEEDED, Verdict, combine, count, decide, decide_share
from reports.numbers import fixed, percent, significant
from reports.rules.common import from_part
from reports.run import Run
from reports.verdicts import Judgement, Part


def _law_part(run: Run) -> Part:
    checked = within = violations = moved = 0
    worst, worst_at, rows = 0.0, "", 0
    seeds: set[int] = set()
    frozen = 0
    for (arm, seed), metrics in run.arms.items():
        assert metrics.header is not None
        for law in metrics.laws:
            seeds.add(seed)
            rows += 1
            if metrics.header.arm.idle == "frozen":
                frozen += law.checked
                moved += law.moved if law.moved is not None else law.violations
                continue
            checked += law.checked
            within += law.within_rounding
            violations += law.violations or int(law.worst is None and law.nonfinite)
            if law.worst is not None and law.worst > worst:
                worst, worst_at = law.worst, f"{arm}, seed {seed}, step {law.t}"
    if not rows:
        return Part(name="law (T6)", verdict="inconclusive", reason="No step was checked against T6.")
    broken = violations > 0 or worst >= LAW_TOLERANCE or moved > 0
    n = len(seeds)
    # Both policies must have been looked at, or half of the law is untested.
    whole = checked > 0 and frozen > 0
    reason = (
        f"{checked:,} idle tensors checked, {violations} off, worst relative error "
        f"{significant(worst)}{f' ({worst_at})' if worst_at else ''} against {LAW_TOLERANCE:g}, {within:,} judged by "
        f"{LAW_ROUNDINGS} roundings; frozen: {moved} of {frozen:,} idle tensors moved; {count(n, 'seed')}"
    )
    if not whole:
        reason += f", and the {'frozen' if checked else 'momentum'} policy was not checked"
    if n < SEEDS_NEEDED:
        reason += f", {SEEDS_NEEDED} needed"
    verdict: Verdict = "inconclusive"
    if n >= SEEDS_NEEDED:
        verdict = "refuted" if broken else "supported" if whole else "inconclusive"
    return Part(
        name="law (T6)", verdict=verdict, reason=reason + ".", effect=worst if checked else None,
        unit="relative error", margin=LAW_TOLERANCE, n=n,
    )  # fmt: skip


def _equivalence_part(run: Run, idle: str, rule: str) -> Part:
    name = f"{idle} equivalence (T9)"
    arm, control = run.arm_like("exact", idle), run.arm_like("full", rule=rule)
    full = run.arm_like("full")
    if arm is None or control is None or full is None:
        return Part(
            name=name, verdict="inconclusive", reason="The run has not all three arms that this needs."
        )
    differences: list[float] = []
    drops: list[float] = []
    lost: list[str] = []
    for seed in run.config.seeds:
        outcomes = [run.outcome(which, seed) for which in (arm, control, full)]
        bad = next((outcome for outcome in outcomes if outcome.drop is None), None)
        if bad is not None:
            lost.append(f"seed {seed}: {bad.arm} {bad.status}")
            continue
        starts = [outcome.loss_at_start for outcome in outcomes]
        if max(starts) - min(starts) > 1e-6 * max(starts):  # type: ignore[type-var, operator]
            lost.append(f"seed {seed}: the arms did not start equal")
            continue
        here = [outcome.drop for outcome in outcomes]
        differences.append(here[0] - here[1])  # type: ignore[operator]
        drops.append(here[2])  # type: ignore[arg-type]
    without = f"; left out: {', '.join(lost)}" if lost else ""
    if not differences:
        return Part(name=name, verdict="inconclusive", reason=f"No seed has all three final losses{without}.")
    drop = float(np.mean(drops))
    if drop <= 0:
        return Part(
            name=name, verdict="inconclusive", n=len(drops),
            reason=f"Full backpropagation made no progress (drop {fixed(drop)} nats), so there is no scale{without}.",
        )  # fmt: skip
    decision = decide([value / drop for value in differences], "inside", DROP_MARGIN)
    inside = {
        "supported": f"wholly within ±{percent(DROP_MARGIN, 0)}",
        "refuted": f"wholly outside ±{percent(DROP_MARGIN, 0)}",
    }.get(decision.verdict, f"{decision.why}: not wholly on one side of ±{percent(DROP_MARGIN, 0)}")
    if decision.n < SEEDS_NEEDED:
        inside = f"{SEEDS_NEEDED} needed"
    assert decision.effect is not None
    bounds = f", 95 % interval {_percents(decision.interval)}" if decision.interval else ""
    return Part(
        name=name,
        verdict=decision.verdict,
        reason=f"The held-out loss of {arm} falls by {fixed(abs(decision.effect) * drop, 4)} nats "
        f"{'less' if decision.effect < 0 else 'more'} than that of {control}, {percent(decision.effect)} of full's "
        f"drop of {fixed(drop)}{bounds}, "
        f"{count(decision.n, 'seed')}: {inside}{without}.",
        effect=decision.effect,
        unit="share of full's drop",
        margin=DROP_MARGIN,
        interval=decision.interval,
        n=decision.n,
    )


def _short(pair: Part, idle: str) -> str:
    if pair.effect is None:
        return f"no paired difference for {idle}"
    bounds = f", 95 % interval {_percents(pair.interval)}" if pair.interval else ""
    seeds = count(pair.n, "seed")
    return f"{idle} differs from full at T9's rate by {percent(pair.effect)} of full's drop{bounds} ({seeds})"


def _percents(bounds: tuple[float, float] | None) -> str:
    return "none" if bounds is None else f"[{percent(bounds[0])}, {percent(bounds[1])}]"


def movement_ratios(run: Run, arm: str) -> list[list[float]]:
    """For each block: its movement |x_T - x_0| (rms) relative to full's at eta, one value a seed."""
    full = run.arm_like("full")
    ratios: list[list[float]] = []
    for seed in run.config.seeds:
        mine, theirs = run.arms.get((arm, seed)), run.arms.get((full or "", seed))
        if not (mine and theirs and mine.header and mine.movements and theirs.movements):
            continue
        blocks = mine.header.blocks
        if not ratios:
            ratios = [[] for _ in blocks]
        for j, block in enumerate(blocks):
            above, below = (
                [metrics.movements[-1].layer_rms[layer] for layer in block] for metrics in (mine, theirs)
            )
            if None in above or None in below:
                continue
            size = float(np.linalg.norm(np.asarray(below, dtype=np.float64)))
            if size > 0:
                ratios[j].append(float(np.linalg.norm(np.asarray(above, dtype=np.float64))) / size)
    return ratios


def _movement_part(run: Run, idle: str) -> Part:
    name = f"{idle} movement (T9)"
    arm = run.arm_like("exact", idle)
    identifier = f"movement/{idle}/ratio"
    ratios = movement_ratios(run, arm) if arm else []
    if not any(ratios) or identifier not in run.predictions:
        return Part(
            name=name, verdict="inconclusive", reason="No movement was recorded for this pair of arms."
        )
    bounds = run.predictions[identifier].value
    if not isinstance(bounds, tuple) or len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
        return Part(name=name, verdict="inconclusive", reason="No range was predicted.")
    low, high = bounds[0], bounds[1]
    groups = [(values, low, high) for values in ratios if values]
    decision = decide_share(groups, MOVEMENT_SHARE)
    means = [float(np.mean(values)) for values, _, _ in groups]
    n = min(len(values) for values, _, _ in groups)
    few = f", {SEEDS_NEEDED} needed" if n < SEEDS_NEEDED else ""
    return Part(
        name=name,
        verdict=decision.verdict,
        reason=f"{decision.inside} of {count(decision.n, 'block')} lie between the predicted drift and diffusion "
        f"ratios {fixed(low)} and {fixed(high)}, {decision.outside} surely outside; measured "
        f"{', '.join(fixed(mean) for mean in means)} from the lowest block up, {count(n, 'seed')}{few}.",
        effect=float(np.mean(means)),
        unit="ratio to full",
        margin=None,
        n=n,
    )


def idle_share(run: Run, arm: str, seed: int) -> float | None:
    """Path of the idle layers over the whole path: sum_t |dx_idle| / sum_t |dx|, from the second step on.

    At the first step no layer has a moment yet, so nothing idle can move.
    """
    metrics = run.arms.get((arm, seed))
    steps = [step for step in metrics.steps[1:] if not step.nonfinite] if metrics else []
    whole = sum(float(np.linalg.norm(np.asarray(step.displacement, dtype=np.float64))) for step in steps)
    idle = sum(step.displacement_idle or 0.0 for step in steps)
    return idle / whole if whole > 0 else None


def judge_idle(run: Run, claim: Claim) -> tuple[Judgement, Judgement]:
    law = _law_part(run)
    pairs = (
        _equivalence_part(run, "momentum", "eta/sqrt(p)"),
        _equivalence_part(run, "frozen", "eta/p"),
    )
    movement = tuple(_movement_part(run, idle) for idle in ("momentum", "frozen"))
    parts = (law, *pairs, *movement)
    verdict = combine([part.verdict for part in parts])
    supported = f"{sum(part.verdict == 'supported' for part in parts)} of {len(parts)} parts supported"
    others = "".join(
        f", {other}: {' and '.join(names)}"
        for other in ("refuted", "inconclusive")
        if (names := [part.name for part in parts if part.verdict == other])
    )
    law_words = "no idle tensor was checked"
    if law.effect is not None:
        law_words = f"T6 holds to {significant(law.effect)}" if law.verdict != "refuted" else "T6 is violated"
    reason = (
        f"{supported}{others}: {law_words}; {_short(pairs[0], 'momentum')}; {_short(pairs[1], 'frozen')}."
    )
    ours = from_part(claim.ours.text, pairs[0], "seed", parts, reason).model_copy(update={"verdict": verdict})
    return _paper(run, claim, law), ours


def _paper(run: Run, claim: Claim, law: Part) -> Judgement:
    arms = [
        arm.name
        for arm in run.config.arms
        if arm.method == "lcsb" and arm.idle == "momentum" and arm.backward != "full"
    ]
    shares: list[float] = []
    for seed in run.config.seeds:
        here = [share for arm in arms if (share := idle_share(run, arm, seed)) is not None]
        if here:
            shares.append(float(np.mean(here)))
    make = partial(
        Judgement, rule=claim.paper.text, margin=0.0, unit="share of the path", n_of="seed", parts=(law,)
    )
    if not shares:
        reason = "No step with an idle layer under momentum was recorded."
        return make(verdict="inconclusive", reason=reason)
    decision = decide(shares, "effect", 0.0)
    # An interval that is exactly 0 is 'no difference' from standing still: the layers did not move.
    verdict: Verdict = "inconclusive"
    if decision.verdict == "no difference":
        verdict = "refuted"
    elif decision.verdict == law.verdict == "supported":
        verdict = "supported"
    assert decision.effect is not None
    bounds = f", 95 % interval {_percents(decision.interval)}" if decision.interval else ""
    few = f" ({SEEDS_NEEDED} needed)" if decision.n < SEEDS_NEEDED else ""
    return make(
        verdict=verdict,
        reason=f"Under idle momentum {percent(decision.effect)} of the path of the adapters is made by idle layers"
        f"{bounds}, {count(decision.n, 'seed')}{few}; law: {law.verdict}.",
        effect=decision.effect,
        interval=decision.interval,
        n=decision.n,
    )
