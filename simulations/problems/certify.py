"""Mode certified on residual nets: a cheap plan of each block, accepted only after a backward pass in it (T7, T2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import torch
from torch import Tensor

from bcd_theory.cost import GRADES, StepCosts, plan_seconds
from bcd_theory.partition import contiguous_blocks
from bcd_theory.plans import certified_plan
from simulations.problems.residual import ResidualNet, cosines

# A layer whose true gradient is zero has no direction to keep.
NO_DIRECTION: Final = 1.0


@dataclass(frozen=True)
class Accepted:
    """grades: one a layer, None where not read. cosine: measured, the least over the selected layers and the runs.

    guess: the cosine that `certified_plan` expected of its first plan. cost: matrix elements of the idle layers'
    backward, of those of mode exact. raises: how often the first guess was raised.
    """

    grades: tuple[str | None, ...]
    cosine: float
    guess: float
    cost: float
    raises: int


def layer_costs(net: ResidualNet) -> StepCosts:
    """Backward cost of a layer by the matrix elements it multiplies with; attention is every branch but the last."""
    sizes = [[float(a * b) for a, b in branch.shapes] for branch in net.branches]
    attention = sum(sum(size) for size in sizes[:-1])
    whole = attention + sum(sizes[-1])
    return StepCosts(
        layers=net.layers,
        forward=0.0,
        head=0.0,
        optimizer=0.0,
        recompute=0.0,
        input_gradient=[whole] * net.layers,
        adapter_gradient=0.0,
        attention_input_gradient=[attention] * net.layers,
    )


def roles_of(net: ResidualNet, block: Sequence[int], grades: Sequence[str | None]) -> tuple[str, ...]:
    """Roles of a plan: selected, a grade above the lowest selected layer, below."""
    return net.with_mode("certified", {tuple(sorted(block)): grades}).roles(block)


def uniform(net: ResidualNet, block: Sequence[int], grade: str) -> tuple[str | None, ...]:
    """The plan of one grade throughout."""
    return tuple(grade if i > min(block) and i not in block else None for i in range(net.layers))


def plan_cosines(
    net: ResidualNet, x: Tensor, block: Sequence[int], grades: Sequence[str | None]
) -> dict[int, float]:
    """Adapter cosine of each selected layer in a plan, the least over the runs."""
    true = net.backward(x, roles_of(net, block, uniform(net, block, "exact"))).adapters
    found = net.backward(x, roles_of(net, block, grades)).adapters
    values = torch.nan_to_num(cosines(found, true, len(block))[0], nan=NO_DIRECTION).amin(1)
    return dict(zip(sorted(block), values.tolist(), strict=True))


def own_cosines(net: ResidualNet, x: Tensor) -> dict[str, list[float]]:
    """By grade, each layer's cosine of the true hidden gradient that leaves it and what the grade makes of the true
    gradient that enters it, over all runs at once. mlp only where a layer has two branches."""
    everything = ["exact"] * net.layers
    true = net.backward(x, everything).hidden
    grades = ("identity", "mlp") if len(net.branches) > 1 else ("identity",)
    found: dict[str, list[float]] = {grade: [] for grade in grades}
    for layer in range(net.layers):
        for grade in grades:
            roles = [grade if i == layer else role for i, role in enumerate(everything)]
            made = net.backward(x, ["below"] * layer + roles[layer:]).hidden[layer]
            norm = float(made.norm() * true[layer].norm())
            found[grade].append(min(1.0, float((made * true[layer]).sum()) / norm) if norm else 1.0)
    return found


def certify(net: ResidualNet, x: Tensor, block: Sequence[int], min_cosine: float) -> Accepted:
    """A plan for the block whose measured cosine at x is at least `min_cosine` at every selected layer and run.

    The first guess is `certified_plan`'s by the product law. A plan that fails has the idle layer nearest above the
    uppermost failing layer raised one grade (identity, mlp, exact), and is tried again.
    """
    costs, own = layer_costs(net), own_cosines(net, x)
    grades = tuple(GRADES) if len(net.branches) > 1 else ("identity", "exact")
    plan = certified_plan(costs, list(block), dict(own), min_cosine)
    current, raises = list(plan.grades), 0
    exact = plan_seconds(costs, block, [g or "exact" for g in uniform(net, block, "exact")])
    while True:
        measured = plan_cosines(net, x, block, current)
        if min(measured.values()) >= min_cosine:
            break
        failing = max(layer for layer, value in measured.items() if not value >= min_cosine)
        for layer in range(failing + 1, net.layers):
            grade = current[layer]
            if grade is not None and grade != "exact":
                current[layer] = grades[grades.index(grade) + 1]
                break
        else:
            raise RuntimeError(
                f"block {list(block)}: cosine {min(measured.values())} with every layer above exact"
            )
        raises += 1
    cost = plan_seconds(costs, block, [g or "exact" for g in current])
    return Accepted(
        tuple(current), min(measured.values()), plan.cosine, cost / exact if exact else 0.0, raises
    )


def certified(
    net: ResidualNet, x: Tensor, min_cosine: float
) -> tuple[ResidualNet, dict[tuple[int, ...], Accepted]]:
    """The net in mode certified with a plan for each block, made at x."""
    blocks = contiguous_blocks(net.layers, net.layers_per_step)
    plans = {block: certify(net, x, block, min_cosine) for block in blocks}
    return net.with_mode("certified", {block: plan.grades for block, plan in plans.items()}), plans


def cheapest(net: ResidualNet, x: Tensor, block: Sequence[int], min_cosine: float) -> float:
    """Cost, of mode exact's, of the cheapest of all plans whose measured cosine suffices; by trying every one."""
    costs = layer_costs(net)
    idle = [i for i in range(min(block) + 1, net.layers) if i not in block]
    exact = plan_seconds(costs, block, [g or "exact" for g in uniform(net, block, "exact")])
    grades = tuple(GRADES) if len(net.branches) > 1 else ("identity", "exact")
    tried = []
    for choice in product(grades, repeat=len(idle)):
        chosen = dict(zip(idle, choice, strict=True))
        plan = [chosen.get(i) for i in range(net.layers)]
        tried.append((plan_seconds(costs, block, [g or "exact" for g in plan]), plan))
    for cost, plan in sorted(tried, key=lambda entry: entry[0]):
        if min(plan_cosines(net, x, block, plan).values()) >= min_cosine:
            return cost / exact if exact else 0.0
    raise RuntimeError(f"block {list(block)}: no plan reaches {min_cosine}, mode exact included")
