"""C3: T1's decrease inequality on probe steps of plain block gradient descent, and the angle of the surrogate (T2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from scipy import stats

from reports.claims import PROBE_SHARE, PROBES_NEEDED, Claim
from reports.decisions import SEEDS_NEEDED, Verdict, combine, count, decide
from reports.evidence import ProbeStep
from reports.numbers import percent, significant
from reports.rules.direction import BATCH, cosines
from reports.run import Run
from reports.verdicts import Judgement, Part

#: roundings of the loss allowed: each of the two losses is known to this many float32 units in the last place
LOSS_ROUNDINGS = 8
FLOAT32_ROUNDING = 2.0**-24


def promised(step: ProbeStep) -> float:
    """T1's decrease at the step 1/L_i: |g_i|^2/(2 L_i); for a surrogate rho (2 cos - rho) times that (T2)."""
    share = step.norm_ratio * (2 * step.cosine - step.norm_ratio)
    return share * step.gradient_squared / (2 * step.smoothness)


def holds(step: ProbeStep) -> bool:
    """f(x - m g_i / L_i) <= f(x) - promised, up to the rounding of the two losses.

    Theory promises it at m = 1; at 2 and 4 it is a question of how sharp L_i is.
    """
    if step.loss_after is None:
        return False
    slack = 2 * LOSS_ROUNDINGS * FLOAT32_ROUNDING * abs(step.loss_before)
    return step.loss_after <= step.loss_before - promised(step) + slack


def judge_descent(run: Run, claim: Claim) -> tuple[Judgement, Judgement]:
    """Both verdicts from evidence/probes.json and, for the surrogate, from the fidelity of the run."""
    probes = run.probes
    make = partial(Judgement, margin=PROBE_SHARE, unit="share of probe steps", n_of="seed")
    if probes is None or not probes.steps:
        reason = (
            "Not tested: no probe steps were taken (lcsb validate --claims C3, or lcsb study, takes them)."
        )
        return (make(verdict="not testable here", rule=claim.paper.text, reason=reason),
                make(verdict="not testable here", rule=claim.ours.text, reason=reason))  # fmt: skip
    exact = inequality_part(probes.steps, "exact", 1.0, counts=True)
    surrogate = inequality_part(probes.steps, "identity", 1.0, counts=False)
    beside = [
        inequality_part(probes.steps, mode, multiple, counts=False)
        for mode in ("exact", "identity")
        for multiple in (2.0, 4.0)
    ]
    beside = [part for part in (surrogate, *beside) if part.n]
    angle = angle_part(run)
    paper = make(
        verdict=combine([exact.verdict, angle.verdict]),
        rule=claim.paper.text,
        reason=f"{exact.reason} {angle.reason}",
        effect=exact.effect, n=exact.n, parts=(exact, angle, *beside),
    )  # fmt: skip
    ours = make(
        verdict=exact.verdict, rule=claim.ours.text, reason=exact.reason, effect=exact.effect, n=exact.n,
        parts=(exact, *beside),
    )  # fmt: skip
    return paper, ours


def inequality_part(steps: Sequence[ProbeStep], mode: str, multiple: float, *, counts: bool) -> Part:
    """The share of probe steps of one mode and multiple of 1/L_i on which the inequality holds."""
    mine = [step for step in steps if (step.mode, step.multiple) == (mode, multiple)]
    name = f"{mode}, step {multiple:g}/L_i"
    seeds = len({step.seed for step in mine})
    if not mine:
        return Part(name=name, verdict="inconclusive", reason=f"No probe step in mode {mode} at {multiple:g}/L_i.",
                    counts=counts)  # fmt: skip
    good = sum(map(holds, mine))
    verdict = share_verdict(good, len(mine), seeds)
    fell = sum(step.loss_after is not None and step.loss_after < step.loss_before for step in mine)
    worst = min(mine, key=_slack)
    few = ""
    if seeds < SEEDS_NEEDED or len(mine) < PROBES_NEEDED:
        few = f"; {count(seeds, 'seed')}, {SEEDS_NEEDED} needed, and {PROBES_NEEDED} probe steps"
    return Part(
        name=name, verdict=verdict, effect=good / len(mine), unit="share of probe steps", margin=PROBE_SHARE, n=seeds,
        counts=counts,
        reason=f"In mode {mode} at {multiple:g}/L_i the inequality holds on {good} of {len(mine)} probe steps "
        f"({percent(good / len(mine))}), the loss falls on {fell}; closest: {worst.point}, block {worst.block}, seed "
        f"{worst.seed} ({significant(_slack(worst))} of the promised decrease to spare){few}.",
    )  # fmt: skip


def _slack(step: ProbeStep) -> float:
    """Decrease of the loss over the promised one, less 1: negative where the promise is not kept."""
    if step.loss_after is None:
        return -math.inf
    promise = promised(step)
    return (step.loss_before - step.loss_after - promise) / abs(promise) if promise else 0.0


def share_verdict(good: int, n: int, seeds: int) -> Verdict:
    """Supported: a share of at least PROBE_SHARE holds. Refuted: even the upper 95 % limit (Clopper-Pearson) is below.

    Fewer seeds or probe steps than needed: inconclusive.
    """
    if seeds < SEEDS_NEEDED or n < PROBES_NEEDED:
        return "inconclusive"
    if good >= PROBE_SHARE * n - 1e-9:
        return "supported"
    upper = float(stats.beta.ppf(0.975, good + 1, n - good))
    return "refuted" if upper < PROBE_SHARE else "inconclusive"


def angle_part(run: Run) -> Part:
    """Identity mode: the cosine of every layer above 0 with its 95 % interval, and what T2 then guarantees.

    With the best step for its angle the surrogate's block descent is promised cos^2 of what the true gradient's is.
    """
    name = "identity, cosine"
    by_layer = [values for values in cosines(run, "identity", "cyclic", "start") if values]
    if not by_layer:
        return Part(name=name, verdict="inconclusive", reason="No cosine was measured in identity mode.")
    decisions = [decide(values, "above", 0.0, unit=BATCH) for values in by_layer]
    above = sum(decision.verdict == "supported" for decision in decisions)
    below = sum(decision.verdict == "refuted" for decision in decisions)
    verdict: Verdict = "refuted" if below else "supported" if above == len(decisions) else "inconclusive"
    shares = [max(0.0, float(np.mean(values))) ** 2 for values in by_layer]
    n = min(decision.n for decision in decisions)
    return Part(
        name=name,
        verdict=verdict,
        reason=f"The surrogate's cosine is above 0 with its 95 % interval in {above} of {len(decisions)} layers, "
        f"below in {below}, {count(n, BATCH)}; T2 then guarantees cos^2 of the descent: {percent(min(shares))} in "
        f"the worst layer, {percent(float(np.median(shares)))} in the middle one.",
        effect=above / len(decisions),
        unit="share of layers",
        margin=1.0,
        n=n,
    )
