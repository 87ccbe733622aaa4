"""What `lcsb bounds` shows: the theorems of `bcd_theory` as plain dictionaries and as text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from bcd_theory.bounds import Bound
from bcd_theory.stepsize import BOUNDS


def bound_named(bound_id: str) -> Bound:
    """The bound with that id. Raises ValueError naming the nearest one."""
    if bound_id in BOUNDS:
        return BOUNDS[bound_id]
    near = difflib.get_close_matches(bound_id, BOUNDS, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"bound {bound_id!r}: not known{hint} (lcsb bounds lists all)")


def numbers(settings: Iterable[str]) -> dict[str, float]:
    """`name=value` pairs as numbers. Raises ValueError naming the pair that is not one."""
    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ValueError(f"--set {setting}: expected NAME=NUMBER")
    return values


def describe(bound: Bound, values: dict[str, float]) -> dict[str, Any]:
    """Everything about one bound, JSON-ready; with `values` also its value and its largest learning rate there.

    Raises:
        ValueError: a variable is missing, unknown or out of its range.
    """
    limit = bound.largest_step()
    found: dict[str, Any] = {
        "id": bound.id,
        "name": bound.name,
        "kind": bound.kind,
        "quantity": bound.quantity,
        "sense": bound.sense,
        "expression": str(bound.expression),
        "latex": bound.latex(),
        "largest_step": None if limit is None else str(limit),
        "variables": list(bound.variables),
        "assumptions": list(bound.assumptions),
        "source": bound.source,
        "attained": bound.attained,
        "derivation": [
            {"words": step.words, "left": str(step.left), "right": str(step.right), "checked": step.check()}
            for step in bound.derivation()
        ],
    }
    if values:
        try:
            value = float(bound.evaluate(**values))
            found["value"] = value if value != float("inf") else None
            if limit is not None:
                needed = {str(free) for free in limit.free_symbols}
                found["largest_step_value"] = float(
                    bound.largest_step_at(**{name: v for name, v in values.items() if name in needed})
                )
        except TypeError as error:
            raise ValueError(str(error)) from None
    return found


def tightness_rows() -> list[dict[str, Any]]:
    """Stored tightness of every bound: the largest observed / bound over the declared problems, and where."""
    from bcd_theory.audit import stored_tightness

    return [
        {
            "id": bound_id,
            "tightness": row.ratio,
            "coupled": row.ratio_coupled,
            "cases": row.cases,
            "problem": row.problem,
            "testable": row.testable,
        }
        for bound_id, row in stored_tightness().items()
    ]
