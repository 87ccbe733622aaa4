"""What a run has measured so far and goes on by: schedule measurements and certified plans, as strict JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PlanRecord:
    """The plan of one block in mode certified, and what was measured when it was made.

    Attributes:
        block: the selected layers that it belongs to.
        grades: identity, mlp or exact for each idle layer above the lowest selected one, None elsewhere; one a
            decoder layer.
        measured_at: step whose first micro-batch it was measured on.
        cosine: lowest cosine of a selected layer's adapter gradient with the truth, by a backward pass in this very
            plan on that micro-batch.
        cost: backward cost of its idle layers, in layers: exact counts 1, identity 0, mlp the MLP branch's share.
        exact_cost: the same if every idle layer were exact.
        trials: backward passes in some plan that it took to find this one (0 where no layer above the block is idle).
        work: layers run again for it, forward and backward; the exact pass of the refresh is not counted.
        held: refreshes in a row on which it has been measured and kept.
        replaced_age: age in steps of the plan before it, None for the first.
        replaced_cosine: what `cosine` was for the plan before it on this micro-batch, just before replanning.
        replaced_cost: `cost` of the plan before it.
    """

    block: tuple[int, ...]
    grades: tuple[str | None, ...]
    measured_at: int
    cosine: float
    cost: float
    exact_cost: float
    trials: int
    work: int
    held: int = 0
    replaced_age: int | None = None
    replaced_cosine: float | None = None
    replaced_cost: float | None = None

    @property
    def summary(self) -> str:
        """The grades from the embedding up, one letter a layer: e(xact), m(lp), i(dentity), - (no grade)."""
        return "".join("-" if grade is None else grade[0] for grade in self.grades)

    def log(self, t: int) -> dict[str, float | str]:
        """What the run log of step t shows of it."""
        return {
            "lcsb/plan": self.summary,
            "lcsb/plan_age": t - self.measured_at,
            "lcsb/plan_cosine": self.cosine,
            "lcsb/plan_cost": self.cost,
            "lcsb/plan_exact_cost": self.exact_cost,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlanRecord:
        """The inverse of `dataclasses.asdict`, lists for tuples allowed."""
        names = {f.name for f in dataclasses.fields(cls)}
        if set(values) != names:
            raise ValueError(f"plan: fields {sorted(set(values) ^ names)} are missing or unknown")
        fields = dict(values)
        fields["block"], fields["grades"] = tuple(values["block"]), tuple(values["grades"])
        return cls(**fields)


@dataclass
class Measured:
    """Measurements that later steps depend on.

    Attributes:
        schedule: step -> values, as `bcd_theory.schedule.Schedule` reads them. `importance`: adapter-gradient norm of
            each layer, the newest only. `adaptive`: cosines by layer, or seconds of the steps of a cycle.
        plans: block (its layers) -> its plan.
        cycle_seconds: seconds of the steps of the cycle under way (`adaptive` by a time budget).
    """

    schedule: dict[int, list[float]] = field(default_factory=dict)
    plans: dict[tuple[int, ...], PlanRecord] = field(default_factory=dict)
    cycle_seconds: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict (floats survive JSON bit for bit)."""
        return {
            "schedule": [[step, list(values)] for step, values in self.schedule.items()],
            "plans": [
                {**dataclasses.asdict(plan), "block": list(plan.block), "grades": list(plan.grades)}
                for plan in self.plans.values()
            ],
            "cycle_seconds": list(self.cycle_seconds),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measured:
        """The inverse of `to_dict`."""
        plans = [PlanRecord.from_dict(plan) for plan in values["plans"]]
        return cls(
            {int(step): [float(v) for v in record] for step, record in values["schedule"]},
            {plan.block: plan for plan in plans},
            [float(v) for v in values["cycle_seconds"]],
        )
