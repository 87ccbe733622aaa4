"""What the rules share."""

from __future__ import annotations

from collections.abc import Sequence

from reports.verdicts import Judgement, Part


def from_part(rule: str, part: Part, n_of: str, parts: Sequence[Part], reason: str) -> Judgement:
    return Judgement(
        verdict=part.verdict,
        rule=rule,
        reason=reason,
        effect=part.effect,
        unit=part.unit,
        margin=part.margin,
        interval=part.interval,
        n=part.n,
        n_of=n_of,
        parts=tuple(parts),
    )
