"""Mode certified: the cheapest plan of each block that a measured backward pass has shown to keep the cosine (T7, T2).

A plan grades each idle layer above the lowest selected one: identity, mlp or exact. The first guess composes the
layers' own cosines on the recorded pass (`bcd_theory.plans`, an expectation and no guarantee). Then the rule: a plan is
accepted only after a backward pass in that very plan on the recorded micro-batch has shown the adapter cosine of every
selected layer to be at least `min_cosine`; else the idle layer nearest above the failing one is raised one grade and
it is tried again. Raising the nearest layer leaves the surrogate gradient further up as it was, so a retry costs the
layers from there down alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from bcd_theory.cost import GRADES, StepCosts, plan_seconds
from bcd_theory.plans import certified_plan
from lcsb.layers import attention_module
from lcsb.local import RecordedPass, adapter_cosine, hidden_cosine
from lcsb.measured import PlanRecord

Grades = tuple[str | None, ...]
#: turns the cosines that one process measured into those that all processes go by
Agree = Callable[[torch.Tensor], torch.Tensor]
Adapters = Sequence[Mapping[str, nn.Parameter]]


def layer_costs(layers: Sequence[nn.Module]) -> StepCosts:
    """Backward cost of idle layers in units of the mean layer, by counting matrix elements (T12).

    An exact layer costs its share of all layers' matrix elements, of which attention's part falls away in grade mlp.
    Attention's scores are not counted, so a plan's saving is larger than this says for long rows. Recompute scales
    both alike.
    """

    def elements(module: nn.Module) -> float:
        return float(sum(p.numel() for p in module.parameters() if p.dim() >= 2))

    whole = [elements(layer) for layer in layers]
    unit = sum(whole) / len(whole)
    return StepCosts(
        layers=len(layers),
        forward=0.0,
        head=0.0,
        optimizer=0.0,
        recompute=0.0,
        input_gradient=[value / unit for value in whole],
        adapter_gradient=0.0,
        attention_input_gradient=[elements(attention_module(layer)) / unit for layer in layers],
    )


class Trial:
    """Backward passes of one block in a plan that can be raised, on a recorded pass."""

    def __init__(
        self,
        recorded: RecordedPass,
        adapters: Adapters,
        block: Sequence[int],
        grades: Sequence[str | None],
        agree: Agree | None = None,
    ) -> None:
        self.recorded, self.adapters, self.block = recorded, adapters, frozenset(block)
        self.grades = list(grades)
        self._agree = agree
        self._above = {len(recorded.above) - 1: recorded.true_above(len(recorded.above) - 1)}
        self._cosines: dict[int, float | None] = {}
        self.cosines: dict[int, float] = {}
        self.passes = 0

    def run(self, start: int | None = None) -> float:
        """Backward from layer `start` (None: the top) down to the block's lowest; returns the lowest cosine.

        A layer whose true gradient is zero has no direction to keep and does not count; with none left the cosine
        is 1.
        """
        start = len(self.recorded.above) - 1 if start is None else start
        lowest = min(self.block)
        for index in range(start, lowest - 1, -1):
            call, above = self.recorded.calls[index], self._above[index]
            if index in self.block:
                group = self.adapters[index]
                below, own = call.backward(above, "exact", list(group.values()))
                surrogate = dict(zip(group, own, strict=True))
                self._cosines[index] = adapter_cosine(surrogate, self.recorded.truth[index])
            elif index > lowest:
                below, _ = call.backward(above, self.grades[index] or "exact")
            self._above[index - 1] = below
        self.passes += 1
        layers = sorted(self.block)
        found = [self._cosines[index] for index in layers]
        values = torch.tensor([1.0 if value is None else value for value in found], dtype=torch.float64)
        agreed = values if self._agree is None else self._agree(values)
        self.cosines = dict(zip(layers, agreed.tolist(), strict=True))
        return min(self.cosines.values())

    def raise_nearest(self, min_cosine: float) -> int | None:
        """Raise the idle layer nearest above the uppermost failing selected layer; returns it (None: all exact)."""
        failing = max(index for index, value in self.cosines.items() if not value >= min_cosine)
        for index in range(failing + 1, len(self.grades)):
            grade = self.grades[index]
            if index not in self.block and grade in ("identity", "mlp"):
                self.grades[index] = GRADES[GRADES.index(grade) + 1]
                return index
        return None


class Planner:
    """Makes the plans of all blocks on one recorded pass.

    Args:
        recorded: the pass, with the true gradients.
        layers: the decoder layers.
        adapters: one dict a layer.
        min_cosine: target in (0, 1).
        agree: see `Agree`; None for one process.
    """

    def __init__(
        self,
        recorded: RecordedPass,
        layers: Sequence[nn.Module],
        adapters: Adapters,
        min_cosine: float,
        agree: Agree | None = None,
    ) -> None:
        self.recorded, self.adapters, self.min_cosine, self._agree = recorded, adapters, min_cosine, agree
        self.costs = layer_costs(layers)
        self._chain: dict[str, list[float]] | None = None

    def measure(self, block: Sequence[int], grades: Sequence[str | None]) -> float:
        """Lowest adapter cosine of the block's layers under a plan."""
        return self._trial(block, grades).run()

    def _trial(self, block: Sequence[int], grades: Sequence[str | None]) -> Trial:
        return Trial(self.recorded, self.adapters, block, grades, self._agree)

    def chain_cosines(self, lowest: int) -> dict[str, list[float]]:
        """Each layer's own cosine of the hidden gradient, by grade, for layers above `lowest` (elsewhere 1)."""
        n = len(self.recorded.above)
        if self._chain is None:
            self._chain = {"identity": [1.0] * n, "mlp": [0.0] * n}
        identity, mlp = self._chain["identity"], self._chain["mlp"]
        for index in range(lowest + 1, n):
            if mlp[index]:
                continue
            above, below = self.recorded.true_above(index), self.recorded.true_above(index - 1)
            through_mlp, _ = self.recorded.calls[index].backward(above, "mlp")
            pair = torch.tensor([hidden_cosine(above, below), hidden_cosine(through_mlp, below)]).double()
            agreed = pair if self._agree is None else self._agree(pair)
            identity[index], mlp[index] = agreed.tolist()
        return self._chain

    def guess(self, block: Sequence[int], min_cosine: float) -> Grades:
        """The cheapest plan that the layers' own cosines, multiplied, let expect `min_cosine`."""
        chain = self.chain_cosines(min(block))
        return certified_plan(self.costs, sorted(block), dict(chain), min_cosine).grades

    def cost(self, block: Sequence[int], grades: Sequence[str | None]) -> float:
        """Backward cost of the idle layers, in layers."""
        filled = [grade or "exact" for grade in grades]
        return plan_seconds(self.costs, sorted(block), filled)

    def exact(self, block: Sequence[int]) -> Grades:
        """The plan of grade exact throughout."""
        chosen, lowest = set(block), min(block)
        n = len(self.recorded.above)
        return tuple("exact" if i > lowest and i not in chosen else None for i in range(n))

    def plan(self, block: Sequence[int], t: int, old: PlanRecord | None = None) -> PlanRecord:
        """The cheapest accepted plan of a block.

        Args:
            block: the selected layers.
            t: the step, for the record.
            old: the plan in force; it is measured first, for the log, and stays if no cheaper one is accepted.
        """
        block = tuple(sorted(block))
        trials = [] if old is None else [self._trial(block, old.grades)]
        before = trials[0].run() if trials else None
        guess = self.guess(block, self.min_cosine)
        if old is None or guess != old.grades:
            trials.append(self._trial(block, guess))
            trials[-1].run()
        trial = trials[-1]
        cosine = min(trial.cosines.values())
        keep = old is not None and before is not None and before >= self.min_cosine
        while True:
            cost = self.cost(block, trial.grades)
            if keep and old is not None and before is not None and cost >= old.cost:
                grades, cosine, cost = old.grades, before, old.cost
                break
            if cosine >= self.min_cosine:
                grades = tuple(trial.grades)
                break
            raised = trial.raise_nearest(self.min_cosine)
            if raised is None:
                # every layer above is exact: what is left of the difference is rounding
                grades = tuple(trial.grades)
                break
            cosine = trial.run(raised)
        return PlanRecord(
            block,
            grades,
            t,
            cosine,
            cost,
            self.cost(block, self.exact(block)),
            sum(trial.passes for trial in trials),
            None if old is None else t - old.measured_at,
            before,
            None if old is None else old.cost,
        )
