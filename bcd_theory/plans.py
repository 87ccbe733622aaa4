"""Certified plans: the cheapest grades of idle layers that keep a target cosine (mode certified, T7, T12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bcd_theory.cost import GRADES, StepCosts, choose, grade_seconds
from bcd_theory.identity import as_cosines, opened_angle

Array = NDArray[np.float64]
LAWS: Final = ("product", "angle")
# Slack for comparing sums of floats, in nats or radians.
SLACK: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Plan:
    """The cheapest plan of one block.

    Attributes:
        grades: identity, mlp or exact for each idle layer above the lowest selected one, None elsewhere.
        seconds: backward seconds that the idle layers cost under it.
        cosine: predicted cosine at the lowest selected layer, by the law that was used.
    """

    grades: tuple[str | None, ...]
    seconds: float
    cosine: float


def certified_plan(
    costs: StepCosts,
    block: Sequence[int],
    cosines: dict[str, ArrayLike],
    min_cosine: float = 0.5,
    *,
    law: str = "product",
    condition_numbers: dict[str, ArrayLike] | None = None,
    recompute: bool = True,
) -> Plan:
    """Cheapest grades of the idle layers that keep the predicted cosine at min_cosine or above (mode
    certified).

    Backward goes from the top layer down; after each layer a partial plan is known by its seconds and its
    loss (-log cosine, or angle), and only plans that no other beats in both are kept (exact, because both
    laws are monotone in the loss). Plans whose relaxation to divisible layers cannot beat the best known
    one are cut.

    Args:
        costs: seconds by part.
        block: the selected layers.
        cosines: for grades identity and mlp the layers' own cosines, each of shape (layers,); exact has 1.
            A grade that is left out, or whose cosine is not positive under law product, is not used.
        min_cosine: target in (0, 1], required at every selected layer; the lowest one decides.
        law: product, `compose_cosines`'s expectation; or angle, `cosine_bound`'s guarantee.
        condition_numbers: law angle only: by grade, shape (layers,) or a number; missing grades have 1
            (then the result is the plain sum of angles, a guarantee only if nothing is kept below a skipped
            layer).
        recompute: as in `bcd_theory.cost.step_seconds`.

    Raises:
        ValueError: unknown grades or law, a target outside (0, 1], shapes that do not match.
    """
    choose(law, LAWS, "composition law")
    if not 0 < min_cosine <= 1:
        raise ValueError(f"min_cosine must lie in (0, 1], got {min_cosine}")
    if law == "product" and condition_numbers is not None:
        raise ValueError("condition_numbers belong to law 'angle'")
    lowest, options = _options(costs, block, cosines, law, condition_numbers or {}, recompute)
    budget = (-np.log(min_cosine) if law == "product" else np.arccos(min_cosine)) + SLACK
    relaxed, best = _relaxations(options, budget)

    time, loss = np.zeros(1), np.zeros(1)
    history: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
    for index, choices in enumerate(options):
        new_time = np.concatenate([time + choice.seconds for choice in choices])
        new_loss = np.concatenate([opened_angle(loss, choice.kappa) + choice.loss for choice in choices])
        parent = np.tile(np.arange(len(time)), len(choices))
        chosen = np.repeat(np.arange(len(choices)), len(time))
        rest_loss, rest_time = relaxed[index + 1]
        least = new_time + np.interp(budget - new_loss, rest_loss, rest_time)
        kept = np.flatnonzero((new_loss <= budget) & (least <= best * (1 + SLACK) + SLACK))
        order = kept[np.lexsort((new_loss[kept], new_time[kept]))]
        lowest_so_far = np.minimum.accumulate(new_loss[order])
        front = order[np.concatenate([[True], new_loss[order][1:] < lowest_so_far[:-1]])]
        time, loss = new_time[front], new_loss[front]
        history.append((parent[front], chosen[front]))

    winner = int(np.argmin(time))
    seconds, final = float(time[winner]), float(loss[winner])
    grades: list[str | None] = [None] * costs.layers
    for layer, choices, (parent, chosen) in zip(
        range(lowest + 1, costs.layers), reversed(options), reversed(history), strict=True
    ):
        grades[layer] = choices[chosen[winner]].grade
        winner = int(parent[winner])
    cosine = float(np.exp(-final)) if law == "product" else float(np.cos(min(final, np.pi)))
    return Plan(grades=tuple(grades), seconds=seconds, cosine=cosine)


class _Choice(NamedTuple):
    grade: str | None  # None: the layer is selected
    seconds: float
    loss: float
    kappa: float


def _options(
    costs: StepCosts,
    block: Sequence[int],
    cosines: dict[str, ArrayLike],
    law: str,
    condition_numbers: dict[str, ArrayLike],
    recompute: bool,
) -> tuple[int, list[list[_Choice]]]:
    """Lowest selected layer, and the choices of each layer above it, top layer first."""
    n = costs.layers
    if not block or any(not 0 <= layer < n for layer in block):
        raise ValueError(f"block {list(block)} is not a non-empty set of layers between 0 and {n - 1}")
    for grade in [*cosines, *condition_numbers]:
        choose(grade, GRADES, "grade")
    if "exact" in cosines:
        raise ValueError("exact has cosine 1; give cosines for identity and mlp only")
    seconds = grade_seconds(costs, recompute)
    values = {grade: as_cosines(cosine, f"cosines of {grade}") for grade, cosine in cosines.items()}
    for grade, array in values.items():
        if array.shape != (n,):
            raise ValueError(f"cosines of {grade} need shape ({n},), got {array.shape}")
    values["exact"] = np.ones(n)
    kappas = {
        grade: np.broadcast_to(np.asarray(condition_numbers.get(grade, 1.0), dtype=np.float64), (n,))
        for grade in GRADES
    }
    options = []
    for layer in range(n - 1, min(block), -1):
        if layer in block:
            options.append([_Choice(None, 0.0, 0.0, float(kappas["exact"][layer]))])
            continue
        choices = []
        for grade, array in values.items():
            cosine = float(array[layer])
            if law == "product" and cosine <= 0:
                continue
            loss = float(-np.log(cosine) if law == "product" else np.arccos(cosine))
            choices.append(_Choice(grade, float(seconds[grade][layer]), loss, float(kappas[grade][layer])))
        options.append(choices)
    return min(block), options


def _relaxations(options: list[list[_Choice]], budget: float) -> tuple[list[tuple[Array, Array]], float]:
    """For each depth the least time of the remaining layers against the loss they may spend, and a feasible
    time.

    A layer's choices are replaced by the lower convex hull of (loss, seconds), mixtures allowed; the sum over
    layers is then convex and piecewise linear. Condition numbers only add loss, so ignoring them keeps it a
    lower bound. The feasible time is that of every idle layer exact.
    """
    curves: list[tuple[Array, Array]] = [(np.zeros(1), np.zeros(1))]
    segments: list[tuple[float, float, float]] = []  # slope, loss, seconds
    start = 0.0
    for choices in reversed(options):
        points = sorted((choice.loss, choice.seconds) for choice in choices)
        hull: list[tuple[float, float]] = []
        for loss, time in points:
            if hull and time >= hull[-1][1]:
                continue
            while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (loss - hull[-2][0]) >= (
                time - hull[-2][1]
            ) * (hull[-1][0] - hull[-2][0]):
                hull.pop()
            hull.append((loss, time))
        start += hull[0][1]
        for (loss0, time0), (loss1, time1) in pairwise(hull):
            segments.append(((time1 - time0) / (loss1 - loss0), loss1 - loss0, time1 - time0))
        segments.sort()
        steps = np.array([segment[1:] for segment in segments]).reshape(-1, 2)
        spent = np.concatenate([[0.0], np.cumsum(steps[:, 0])])
        curves.append((spent, start + np.concatenate([[0.0], np.cumsum(steps[:, 1])])))
    exact = sum(choice.seconds for choices in options for choice in choices if choice.grade == "exact")
    return curves[::-1], exact
