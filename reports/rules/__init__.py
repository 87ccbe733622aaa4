"""The rules of the claims applied to a run, or to several: what counts as evidence and what it decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from reports.cells import Cell, cells_of
from reports.claims import BY_ID, Claim
from reports.evidence import BenchMemory
from reports.rules.bytes import judge_bytes
from reports.rules.descent import judge_descent
from reports.rules.direction import judge_direction
from reports.rules.idle import judge_idle
from reports.rules.order import judge_order
from reports.rules.pooled import pooled
from reports.rules.quality import judge_quality
from reports.rules.speed import judge_speed
from reports.rules.stability import judge_stability
from reports.run import Run
from reports.verdicts import Judgement


@dataclass(frozen=True)
class Material:
    """What there is to judge: run folders, and the JSON of the memory benchmark if there is one."""

    runs: tuple[Run, ...]
    bench: BenchMemory | None = None

    @cached_property
    def cells(self) -> list[Cell]:
        """The arms of all runs, by setting."""
        return cells_of(self.runs)


_OF_RUN: dict[str, Callable[[Run, Claim], tuple[Judgement, Judgement]]] = {
    "C1": judge_direction, "C2": judge_idle, "C3": judge_descent, "C4": judge_speed,
}  # fmt: skip
OF_CELLS: dict[str, Callable[[Sequence[Cell], Claim], tuple[Judgement, Judgement]]] = {
    "C5": judge_quality, "C6": judge_stability, "C8": judge_order,
}  # fmt: skip


def judgements(material: Material | Run, claim_id: str) -> tuple[Judgement, Judgement]:
    """(verdict on the paper's claim, verdict on our prediction). Raises ValueError for an unknown claim."""
    if claim_id not in BY_ID:
        raise ValueError(f"claim is {claim_id!r}, expected one of {', '.join(BY_ID)}")
    if isinstance(material, Run):
        material = Material((material,))
    claim = BY_ID[claim_id]
    if claim_id in OF_CELLS:
        return OF_CELLS[claim_id](material.cells, claim)
    if claim_id == "C7":
        return judge_bytes(material.bench, claim)
    rule = _OF_RUN[claim_id]
    if not material.runs:
        paper, ours = (
            Judgement(verdict="not testable here", rule=text.text, reason="Not tested: no run for it.")
            for text in (claim.paper, claim.ours)
        )
        return paper, ours
    return pooled(claim, [(run, *rule(run, claim)) for run in material.runs])
