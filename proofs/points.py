"""Coq confirms the reader: a .v file in which Coq proves Python's value of each formula at exact points.

A slip of precedence or grammar in :mod:`proofs.formulas` cannot hide: Coq would refuse the value.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy as sp

from proofs.formulas import Formula

_POOL = [sp.Rational(1, 3), sp.Rational(3, 5), sp.Rational(2, 7), sp.Rational(5, 4), sp.Rational(1, 9)]

_SQUARES: dict[str, tuple[int, int]] = {
    "cycle_factor": (4, 9),
    "cycle_bound": (4, 9),
    "pl_cycle_rate": (4, 9),
    "frozen_cycle_bound": (4, 9),
    "idle_cycle_bound": (2, 9),
}
"""Natural arguments at which the square roots of these formulas are rational."""


def _q(*values: str) -> tuple[sp.Rational, ...]:
    return tuple(sp.Rational(value) for value in values)


_POINTS: dict[str, list[tuple[sp.Rational, ...]]] = {
    "adamw_idle_step": [
        _q("1/3", "15", "9/10", "3/5", "1/7", "1", "1"),
        _q("-2", "4", "1/2", "3/5", "1/4", "0", "2"),
    ],
    "cyclic_bracket": [_q("2", "3", "1/7", "3/4", "2"), _q("1", "5/2", "1/3", "5/12", "2")],
    "cyclic_idle_bound": [
        _q("5", "1", "2", "3", "1/7", "3/4", "2"),
        _q("3", "2", "1", "5/2", "1/3", "5/12", "2"),
    ],
    "cyclic_idle_cycle_bound": [
        _q("5", "1", "2", "3", "1/7", "3/4", "2"),
        _q("3", "2", "1", "5/2", "1/3", "5/12", "2"),
    ],
    "adamw_drift_per_cycle": [_q("1/3", "9/16", "2"), _q("1/4", "25/144", "2")],
    "lora_curvature": [_q("1", "3", "1", "9/2"), _q("2", "1", "2", "16/5")],
}
"""Whole points for formulas whose roots are rational only at some of them (Pythagorean triples)."""

_HEADER = """From Coq Require Import Reals Lra.
From LCSB Require Import Formulas.
Open Scope R_scope.
(* every sqrt of the goal is one of the given rational roots; every Rmin is decided *)
Ltac decide_min := repeat match goal with |- context [Rmin ?a ?b] =>
  first [rewrite (Rmin_left a b) by lra | rewrite (Rmin_right a b) by lra] end.
"""


def points_of(formula: Formula) -> list[tuple[object, ...]]:
    """Two exact points at which the formula's value is rational."""
    if formula.name in _POINTS:
        return [tuple(point) for point in _POINTS[formula.name]]
    naturals = _SQUARES.get(formula.name, (2, 3))
    return [
        tuple(
            naturals[k] if a.is_integer else _POOL[(i + k) % len(_POOL)]
            for i, a in enumerate(formula.arguments)
        )
        for k in range(2)
    ]


def _rational(value: sp.Expr) -> str:
    value = sp.nsimplify(value)
    if not isinstance(value, sp.Rational):
        raise ValueError(f"{value} is not rational: give this formula points at which it is")
    return f"({value.p} / {value.q})" if value.p >= 0 else f"(- {-value.p} / {value.q})"


def source(formulas: Mapping[str, Formula]) -> str:
    """The text of the .v file: one Goal per formula and point."""
    lines = [_HEADER]
    for name, formula in formulas.items():
        for values in points_of(formula):
            arguments = " ".join(
                f"{v}%nat" if a.is_integer else _rational(sp.sympify(v))
                for a, v in zip(formula.arguments, values, strict=True)
            )
            roots = [_rational(sp.sqrt(formula.put(root, values))) for root in formula.roots]
            step = "replace (sqrt e) with {} by (symmetry; apply sqrt_lem_1; lra)"
            tries = " | ".join(step.format(root) for root in roots)
            take = f"repeat match goal with |- context [sqrt ?e] => first [{tries}] end; " if roots else ""
            lines.append(
                f"Goal {name} {arguments} = {_rational(formula(*values))}. "
                f"Proof. cbv delta [LIST]; cbv beta; simpl; {take}decide_min; (lra || (field; lra)). Qed."
            )
    return "\n".join(lines).replace("LIST", " ".join(formulas)) + "\n"
