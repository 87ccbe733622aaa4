"""The rules of the claims applied to a run: what counts as evidence and what it decides."""

from __future__ import annotations

from reports.claims import BY_ID
from reports.rules.direction import judge_direction
from reports.rules.idle import judge_idle
from reports.rules.speed import judge_speed
from reports.run import Run
from reports.verdicts import Judgement

_RULES = {"C1": judge_direction, "C2": judge_idle, "C4": judge_speed}


def judgements(run: Run, claim_id: str) -> tuple[Judgement, Judgement]:
    """(verdict on the paper's claim, verdict on our prediction). Raises ValueError for an unknown claim."""
    if claim_id not in BY_ID:
        raise ValueError(f"claim is {claim_id!r}, expected one of {', '.join(BY_ID)}")
    claim = BY_ID[claim_id]
    if not claim.untested:
        return _RULES[claim_id](run, claim)
    paper, ours = (
        Judgement(
            verdict="not testable here",
            rule=rule.text,
            reason=f"Not tested: {claim.untested}.",
            margin=rule.margin,
            unit=rule.unit,
        )
        for rule in (claim.paper, claim.ours)
    )
    return paper, ours
