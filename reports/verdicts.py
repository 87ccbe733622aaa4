"""Schema of verdicts.json."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from reports.decisions import Decision, Verdict
from reports.strict import read_record


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Part(_Strict):
    """One part of a judgement. `counts` is False for what is shown beside it and decides nothing."""

    name: str
    verdict: Verdict
    reason: str
    effect: float | None = None
    unit: str = ""
    margin: float | None = None
    interval: tuple[float, float] | None = None
    n: int = 0
    counts: bool = True

    @classmethod
    def decided(
        cls, name: str, decision: Decision, reason: str, *, unit: str, margin: float, counts: bool = True
    ) -> Part:
        """The part that a decision makes."""
        return cls(
            name=name,
            verdict=decision.verdict,
            reason=reason,
            effect=decision.effect,
            unit=unit,
            margin=margin,
            interval=decision.interval,
            n=decision.n,
            counts=counts,
        )


class Judgement(_Strict):
    """Verdict with its rule, the number that decided it (`effect`, in `unit`) and its 95 % interval.

    n: seeds, held-out batches or timing repeats, as `n_of` says. reason: one plain sentence with the numbers.
    """

    verdict: Verdict
    rule: str
    reason: str
    effect: float | None = None
    unit: str = ""
    margin: float | None = None
    interval: tuple[float, float] | None = None
    n: int = 0
    n_of: str = "seed"
    parts: tuple[Part, ...] = ()


class ClaimVerdict(_Strict):
    """A claim with both verdicts, and the command that reproduces them."""

    claim: str
    title: str
    statement: str
    theorems: tuple[str, ...]
    paper: Judgement
    ours: Judgement
    change: str = ""
    command: str


class Verdicts(_Strict):
    """verdicts.json. `missing`: what the run lacks."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True, serialize_by_alias=True
    )

    schema_: Literal[1] = Field(default=1, alias="schema")
    predictions_sha256: str
    run: str
    verdicts: tuple[ClaimVerdict, ...]
    missing: tuple[str, ...] = ()


def read_verdicts(path: Path) -> Verdicts:
    """Read verdicts.json. Raises ValueError that names file and field."""
    return read_record(path, Verdicts)
