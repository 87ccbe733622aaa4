"""Certified plans against exhaustive search."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from bcd_theory.cost import StepCosts, grade_seconds, plan_seconds, step_seconds
from bcd_theory.identity import compose_cosines, cosine_bound
from bcd_theory.plans import certified_plan


def problem(layers: int, seed: int) -> tuple[StepCosts, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    recompute, passing = rng.uniform(0.01, 0.1, (2, layers))
    costs = StepCosts(
        layers=layers,
        forward=1.0,
        head=0.4,
        optimizer=0.02,
        recompute=tuple(recompute),
        input_gradient=tuple(passing),
        adapter_gradient=0.5,
        attention_recompute=tuple(rng.uniform(0.1, 0.6) * recompute),
        attention_input_gradient=tuple(rng.uniform(0.1, 0.6) * passing),
    )
    identity = rng.uniform(0.3, 0.95, layers)
    mlp = np.minimum(identity + rng.uniform(-0.05, 0.6, layers), 0.999)
    return costs, {"identity": identity, "mlp": mlp}


def cosine_of(plan, block, cosines, law, kappas) -> float:
    """Predicted cosine of a complete plan, straight from the two laws."""
    values, conditions = [], []
    for layer in range(min(block) + 1, len(plan)):
        grade = "exact" if layer in block else plan[layer]
        values.append(1.0 if grade == "exact" else cosines[grade][layer])
        conditions.append(kappas.get(grade, 1.0))
    if law == "product":
        return compose_cosines(values) if values else 1.0
    return cosine_bound(values, conditions) if values else 1.0


def exhaustive(costs, block, cosines, target, law, kappas) -> float:
    """Least seconds over all plans that reach the target."""
    idle = [layer for layer in range(min(block), costs.layers) if layer not in block]
    best = np.inf
    for grades in itertools.product(["identity", "mlp", "exact"], repeat=len(idle)):
        plan = [None] * costs.layers
        for layer, grade in zip(idle, grades, strict=True):
            plan[layer] = grade
        if cosine_of(plan, block, cosines, law, kappas) >= target - 1e-12:
            best = min(best, plan_seconds(costs, block, plan))
    return best


@pytest.mark.parametrize("law", ["product", "angle"])
@pytest.mark.parametrize("target", [0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("block", [[0, 1], [1, 4, 6], [5, 6], [2]])
def test_plan_is_the_cheapest_one(block: list[int], target: float, law: str) -> None:
    for seed in range(3):
        costs, cosines = problem(7, seed)
        kappas = {"mlp": 1.3, "exact": 1.6} if law == "angle" and seed else {}
        plan = certified_plan(
            costs,
            block,
            cosines,
            target,
            law=law,
            condition_numbers=kappas or None,
        )
        found = cosine_of(plan.grades, block, cosines, law, kappas)
        assert found == pytest.approx(plan.cosine, abs=1e-9) and found >= target - 1e-9
        assert plan.seconds == pytest.approx(plan_seconds(costs, block, plan.grades), abs=1e-12)
        assert plan.seconds == pytest.approx(
            exhaustive(costs, block, cosines, target, law, kappas), abs=1e-12
        )


def test_limiting_plans() -> None:
    costs, cosines = problem(10, 4)
    block = [2, 3]
    sure = certified_plan(costs, block, cosines, 1.0)
    assert sure.grades == (None,) * 4 + ("exact",) * 6 and sure.cosine == 1.0
    assert sure.seconds == pytest.approx(grade_seconds(costs)["exact"][4:].sum())
    loose = certified_plan(costs, block, cosines, 1e-9)
    assert loose.grades[4:] == ("identity",) * 6 and loose.seconds == 0.0
    top = certified_plan(costs, [8, 9], cosines, 0.5)
    assert top.grades == (None,) * 10 and top.seconds == 0.0 and top.cosine == 1.0


def test_a_useless_grade_is_not_used() -> None:
    costs, cosines = problem(6, 1)
    cosines["identity"] = np.full(6, -0.2)
    plan = certified_plan(costs, [0], cosines, 0.05)
    assert "identity" not in plan.grades
    only_exact = certified_plan(costs, [0], {}, 0.5)
    assert only_exact.grades[1:] == ("exact",) * 5


def test_cheaper_target_never_costs_more_and_plans_feed_the_cost_model() -> None:
    costs, cosines = problem(12, 9)
    blocks = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    last = 0.0
    for target in (0.05, 0.3, 0.5, 0.7, 0.9, 1.0):
        plans = [certified_plan(costs, block, cosines, target).grades for block in blocks]
        seconds = step_seconds(costs, "certified", blocks=blocks, plans=plans)
        assert seconds >= last
        last = seconds
    assert last == pytest.approx(step_seconds(costs, "exact", blocks=blocks))


@pytest.mark.parametrize("law", ["product", "angle"])
def test_thirty_uneven_layers_take_well_under_a_second(law: str) -> None:
    costs, cosines = problem(30, 12)
    start = time.process_time()
    plan = certified_plan(costs, [0], cosines, 0.5, law=law)
    assert time.process_time() - start < 5
    assert plan.cosine >= 0.5 - 1e-12
    # No single change of grade improves it.
    for layer in range(1, 30):
        for grade in ("identity", "mlp", "exact"):
            other = [*plan.grades[:layer], grade, *plan.grades[layer + 1 :]]
            if cosine_of(other, [0], cosines, law, {}) >= 0.5:
                assert plan_seconds(costs, [0], other) >= plan.seconds - 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_cosine": 0.0}, "min_cosine"),
        ({"law": "angel"}, "did you mean 'angle'"),
        ({"cosines": {"mlp": [0.5]}}, r"shape \(4,\)"),
        ({"cosines": {"exact": [1.0] * 4}}, "exact has cosine 1"),
        ({"cosines": {"mpl": [0.5] * 4}}, "did you mean 'mlp'"),
        ({"condition_numbers": {"mlp": 2.0}}, "law 'angle'"),
        ({"block": []}, "non-empty"),
    ],
)
def test_bad_input_is_refused(options: dict[str, object], message: str) -> None:
    costs, cosines = problem(4, 0)
    with pytest.raises(ValueError, match=message):
        certified_plan(**{"costs": costs, "block": [0], "cosines": cosines, **options})
