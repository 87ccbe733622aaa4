"""Mode certified: the cheapest plan of each block that a measured backward pass has shown to keep the cosine (T7, T2).

A plan grades each idle layer above the lowest selected one: identity, mlp or exact. The first guess composes the
layers' own cosines on the recorded pass (`bcd_theory.plans`, an expectation and no guarantee). Then the rule: a plan is
accepted only after a backward pass in that very plan on the recorded micro-batch has shown the adapter cosine of every
selected layer to be at least `min_cosine`, and a margin above it since batches differ; else the idle layer nearest
above the failing one is raised one grade and it is tried again. Raising the nearest layer leaves the surrogate gradient
further up as it was, so a retry costs the layers from there down alone. At a refresh the plan in force is measured
first and, where it fails, raised by the same rule; so plans rise to what the batches seen so far need, and are made
cheaper again only after they have held for long.
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
#: Refreshes in a row on which a plan must hold before a cheaper one is looked for. Cosines differ by 0.1 to 0.3 between
#: batches, so a plan chosen anew on each batch is chosen on the lucky ones; this way at most a tenth of them are new.
HELD_BEFORE_CHEAPER = 9


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


class Planner:
    """Backward passes in any plan on one recorded pass, and the plans that they accept.

    The hidden gradients of the newest pass are kept, so that the next one begins where its plan first differs: a raise
    just above the block costs the layers from there down, and the blocks of a cycle share what they have in common.

    Args:
        recorded: the pass, with the true gradients.
        layers: the decoder layers.
        adapters: one dict a layer.
        min_cosine: target in (0, 1).
        margin: in [0, 1): on this pass a plan must show min_cosine + margin (1 - min_cosine), because it has to hold on
            other batches.
        agree: turns the cosines that one process measured into those that all processes go by; None for one process.

    Attributes:
        work: layers run again so far, forward and backward.
    """

    def __init__(
        self,
        recorded: RecordedPass,
        layers: Sequence[nn.Module],
        adapters: Sequence[Mapping[str, nn.Parameter]],
        min_cosine: float,
        margin: float = 0.0,
        agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.recorded, self.adapters, self._agree = recorded, adapters, agree
        self.min_cosine, self.margin = min_cosine, margin
        self.costs = layer_costs(layers)
        self.n = len(layers)
        self.work = 0
        self._chain: dict[str, list[float]] | None = None
        # What the newest pass went by, from the top down, and its gradients at the layers' outputs.
        self._path: list[str] = []
        self._above = [recorded.true_above(self.n - 1)]

    @property
    def accepted_from(self) -> float:
        """The cosine from which a plan is accepted on this pass."""
        return self.min_cosine + self.margin * (1 - self.min_cosine)

    def _agreed(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        agreed: list[float] = (tensor if self._agree is None else self._agree(tensor)).tolist()
        return agreed

    def _gradient_above(self, index: int, grades: Sequence[str | None]) -> torch.Tensor:
        """The surrogate gradient at a layer's output; selected layers pass it on as exact ones do."""
        path = [grades[i] or "exact" for i in range(self.n - 1, index, -1)]
        same = next((i for i, (a, b) in enumerate(zip(path, self._path, strict=False)) if a != b), None)
        same = min(len(path), len(self._path)) if same is None else same
        if path[: same + 1] == ["exact"] * (same + 1):
            # The truth itself, as far as everything is exact.
            same = next((i for i, grade in enumerate(path) if grade != "exact"), len(path))
            self._above = [self.recorded.true_above(i) for i in range(self.n - 1, self.n - 2 - same, -1)]
        del self._above[same + 1 :]
        for position in range(same, len(path)):
            self.work += path[position] != "identity"
            below, _ = self.recorded.calls[self.n - 1 - position].backward(self._above[-1], path[position])
            self._above.append(below)
        self._path = path
        return self._above[-1]

    def measure(self, block: Sequence[int], grades: Sequence[str | None]) -> dict[int, float]:
        """Adapter cosine of each of a block's layers, by a backward pass in a plan.

        A layer whose true gradient is zero has no direction to keep: 1.
        """
        found = {}
        for index in sorted(block, reverse=True):
            above, group = self._gradient_above(index, grades), self.adapters[index]
            below, own = self.recorded.calls[index].backward(above, "exact", list(group.values()))
            self.work += 1
            self._path.append("exact")
            self._above.append(below)
            cosine = adapter_cosine(dict(zip(group, own, strict=True)), self.recorded.truth[index])
            found[index] = 1.0 if cosine is None else cosine
        return dict(zip(found, self._agreed(list(found.values())), strict=True))

    def raised(self, grades: Grades, cosines: Mapping[int, float]) -> Grades | None:
        """The plan with the idle layer nearest above the uppermost failing layer raised (None: all exact there)."""
        failing = max(index for index, value in cosines.items() if not value >= self.accepted_from)
        for index in range(failing + 1, self.n):
            grade = grades[index]
            if grade in ("identity", "mlp"):
                return (*grades[:index], GRADES[GRADES.index(grade) + 1], *grades[index + 1 :])
        return None

    def chain_cosines(self, lowest: int) -> dict[str, list[float]]:
        """Each layer's own cosine of the hidden gradient, by grade, for layers above `lowest` (elsewhere 1)."""
        if self._chain is None:
            self._chain = {"identity": [1.0] * self.n, "mlp": [0.0] * self.n}
        identity, mlp = self._chain["identity"], self._chain["mlp"]
        for index in range(lowest + 1, self.n):
            if mlp[index]:
                continue
            above, below = self.recorded.true_above(index), self.recorded.true_above(index - 1)
            through_mlp, _ = self.recorded.calls[index].backward(above, "mlp")
            self.work += 1
            identity[index], mlp[index] = self._agreed(
                [hidden_cosine(above, below), hidden_cosine(through_mlp, below)]
            )
        return self._chain

    def guess(self, block: Sequence[int]) -> Grades:
        """The cheapest plan that the layers' own cosines, multiplied, let expect `min_cosine`."""
        chain = self.chain_cosines(min(block))
        return certified_plan(self.costs, sorted(block), dict(chain), self.min_cosine).grades

    def cost(self, block: Sequence[int], grades: Sequence[str | None]) -> float:
        """Backward cost of the idle layers, in layers."""
        return plan_seconds(self.costs, sorted(block), [grade or "exact" for grade in grades])

    def uniform(self, block: Sequence[int], grade: str) -> Grades:
        """The plan of one grade throughout."""
        chosen, lowest = set(block), min(block)
        return tuple(grade if i > lowest and i not in chosen else None for i in range(self.n))

    def plan(self, block: Sequence[int], t: int, old: PlanRecord | None = None) -> PlanRecord:
        """The cheapest accepted plan of a block.

        Args:
            block: the selected layers.
            t: the step, for the record.
            old: the plan in force. It is measured first, and raised if it fails; a cheaper one is looked for when it
                has held on `HELD_BEFORE_CHEAPER` refreshes in a row.
        """
        block, before_work = tuple(sorted(block)), self.work
        exact = self.uniform(block, "exact")
        exact_cost = self.cost(block, exact)
        if not any(exact):  # nothing above the block is idle
            return PlanRecord(block, exact, t, 1.0, 0.0, 0.0, 0, 0)
        measured: dict[Grades, dict[int, float]] = {}
        before = None
        if old is not None:
            measured[old.grades] = self.measure(block, old.grades)
            before = min(measured[old.grades].values())
        holds = before is not None and before >= self.accepted_from
        settled = old is not None and holds and old.held + 1 >= HELD_BEFORE_CHEAPER
        grades = self.guess(block) if old is None or settled else old.grades
        while True:
            if old is not None and holds and self.cost(block, grades) >= old.cost:
                grades = old.grades
                break
            if grades not in measured:
                measured[grades] = self.measure(block, grades)
            if min(measured[grades].values()) >= self.accepted_from:
                break
            raised = self.raised(grades, measured[grades])
            if raised is None:
                break  # every layer above is exact: what is left of the difference is rounding
            grades = raised
        return PlanRecord(
            block,
            grades,
            t,
            cosine=min(measured[grades].values()),
            cost=self.cost(block, grades),
            exact_cost=exact_cost,
            trials=len(measured),
            work=self.work - before_work,
            held=old.held + 1 if old is not None and grades == old.grades and not settled else 0,
            replaced_age=None if old is None else t - old.measured_at,
            replaced_cosine=before,
            replaced_cost=None if old is None else old.cost,
        )
