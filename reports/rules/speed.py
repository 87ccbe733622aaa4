"""C4: speed-up by mode and cycle length, measured against the paper's and against the prediction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from reports.claims import PAPER_DEQUANTISATION, PAPER_SPEEDUP, SPEEDUP_TOLERANCE, Claim
from reports.decisions import SEEDS_NEEDED, Verdict, count, decide, decide_share
from reports.numbers import fixed, interval, percent
from reports.run import Run
from reports.verdicts import Judgement, Part

PAPER_MODE = "identity"


@dataclass(frozen=True)
class Speed:
    """Speed-up of one mode and cycle length: medians' ratio, one ratio a repeat, and what was predicted."""

    mode: str
    cycle_length: int
    measured: float
    repeats: list[float]
    predicted: float | None


def speeds(run: Run) -> list[Speed]:
    """Every timed mode and cycle length but full, in the order of the record."""
    if run.timing is None:
        return []
    full = next((row for row in run.timing.rows if row.mode == "full"), None)
    base = full.cycle_means() if full else []
    found = []
    for row in run.timing.rows:
        if row.mode == "full":
            continue
        identifier = f"speedup/{row.mode}/{row.cycle_length}"
        predicted = run.predictions.number(identifier) if identifier in run.predictions else None
        ratios = row.speedups or [
            mine / theirs for mine, theirs in zip(base, row.cycle_means(), strict=False)
        ]
        found.append(Speed(row.mode, row.cycle_length, row.speedup, ratios, predicted))
    return found


def judge_speed(run: Run, claim: Claim) -> tuple[Judgement, Judgement]:
    rows = speeds(run)
    return _paper(run, claim, rows), _ours(claim, rows)


def _paper(run: Run, claim: Claim, rows: list[Speed]) -> Judgement:
    share = run.timing.dequantisation_share_of_backward if run.timing else None
    parts: tuple[Part, ...] = ()
    if share is not None:
        low, high = PAPER_DEQUANTISATION
        where = "inside" if low <= share <= high else "below" if share < low else "above"
        parts = (
            Part(
                name="share of dequantisation", verdict="inconclusive", counts=False, effect=share,
                unit="share of backward", n=1,
                reason=f"Dequantisation takes {percent(share)} of the layers' backward time on this machine, {where} "
                f"the paper's {percent(low, 0)} to {percent(high, 0)}; one machine decides nothing.",
            ),
        )  # fmt: skip
    make = partial(
        Judgement,
        rule=claim.paper.text,
        margin=PAPER_SPEEDUP,
        unit="speed-up",
        n_of="repeat",
        parts=parts,
    )
    candidates = [row for row in rows if row.mode == PAPER_MODE and row.cycle_length > 1]
    if not candidates:
        reason = "No step in identity mode was timed."
        return make(verdict="inconclusive", reason=reason)
    decided = [(decide(row.repeats, "above", PAPER_SPEEDUP, unit="repeat"), row) for row in candidates]
    # The claim is "at some cycle length": the fastest one whose interval reaches the margin, else the fastest.
    reached = [pair for pair in decided if pair[0].verdict == "supported"]
    decision, row = max(reached or decided, key=lambda pair: pair[1].measured)
    each = ", ".join(f"{fixed(row.measured, 2)} at p = {row.cycle_length}" for row in candidates)
    if reached:
        tail = f"reached at p = {row.cycle_length} with a 95 % interval of {interval(decision.interval, 2)}"
    elif decision.n < SEEDS_NEEDED:
        tail = f"not decided ({SEEDS_NEEDED} needed)"
    else:
        tail = "not reached on this model with its 95 % interval, which leaves other models open"
    shown = f"; dequantisation {percent(share)} of backward (paper: 32 to 42 %)" if share is not None else ""
    return make(
        verdict="supported" if reached else "inconclusive",
        reason=f"Identity mode is {each} times as fast as full, {count(decision.n, 'repeat')}: "
        f"{PAPER_SPEEDUP:.2f} {tail}{shown}.",
        effect=row.measured,
        interval=decision.interval,
        n=decision.n,
    )


def _ours(claim: Claim, rows: list[Speed]) -> Judgement:
    make = partial(
        Judgement, rule=claim.ours.text, margin=SPEEDUP_TOLERANCE, unit="relative error", n_of="repeat"
    )
    both = [(row, row.predicted) for row in rows if row.predicted is not None]
    if not both:
        reason = "No predicted mode and cycle length was timed."
        return make(verdict="inconclusive", reason=reason)
    errors = [predicted / row.measured - 1 for row, predicted in both]
    at = max(range(len(both)), key=lambda i: abs(errors[i]))
    worst, predicted = both[at]
    within = sum(abs(error) <= SPEEDUP_TOLERANCE for error in errors)
    n = min(len(row.repeats) for row, _ in both)
    few = "" if n >= SEEDS_NEEDED else f"; {count(n, 'repeat')} listed, {SEEDS_NEEDED} needed"
    outside = 0
    verdict: Verdict = "inconclusive"
    if n >= SEEDS_NEEDED:
        # predicted within 10 % of measured: measured in [predicted / 1.1, predicted / 0.9]
        decision = decide_share(
            [(row.repeats, p / (1 + SPEEDUP_TOLERANCE), p / (1 - SPEEDUP_TOLERANCE)) for row, p in both], 1.0
        )
        outside = decision.outside
        verdict = "refuted" if outside else "supported" if within == len(both) else "inconclusive"
    return make(
        verdict=verdict,
        reason=f"{within} of {len(both)} predicted speed-ups are within {percent(SPEEDUP_TOLERANCE, 0)} of the "
        f"measured ones, {outside} surely outside; worst: {worst.mode} at p = {worst.cycle_length}, predicted "
        f"{fixed(predicted, 3)}, measured {fixed(worst.measured, 3)} ({percent(errors[at])}){few}.",
        effect=errors[at],
        n=n,
    )
