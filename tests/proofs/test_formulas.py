"""The reader of Formulas.v: what it reads, what it refuses, and Coq's own word on the values it gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy as sp

from proofs import check, points
from proofs.formulas import FormulaError, load_formulas, read_formulas


def one(body: str, arguments: str = "(x y : R) (n : nat)") -> sp.Expr:
    return read_formulas(f"Definition f {arguments} : R := {body}.")["f"].body


X, Y = sp.symbols("x y", real=True)
N = sp.Symbol("n", integer=True, nonnegative=True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x - y - 1", X - Y - 1),
        ("x / y / 2", X / Y / 2),
        ("x / y * 2", 2 * X / Y),
        ("- x ^ 2", -(X**2)),
        ("x ^ 2 ^ n", X ** (2**N)),
        ("2 * x ^ (2 * n)", 2 * X ** (2 * N)),
        ("INR n * x", N * X),
        ("sqrt (1 + x ^ 2) * y", sp.sqrt(1 + X**2) * Y),
        ("Rmin x (2 * y)", sp.Min(X, 2 * Y)),
        ("exp (- x)", sp.exp(-X)),
        ("(* not this: 7 *) x (* (* nested *) *)", X),
    ],
)
def test_reads_as_coq_does(body: str, expected: sp.Expr) -> None:
    assert sp.simplify(one(body) - expected) == 0


@pytest.mark.parametrize(
    "body",
    [
        "z",
        "x y",
        "sin x",
        "x ^ (n - 1)",
        "x ^ y",
        "n * x",
        "INR x",
        "x +",
        "(x",
        "__import__",
        "x; y",
        "1.5",
    ],
)
def test_refuses_what_it_does_not_know(body: str) -> None:
    with pytest.raises(FormulaError):
        one(body)


def test_refuses_other_sentences_and_types() -> None:
    with pytest.raises(FormulaError, match="Axiom"):
        read_formulas("Axiom a : R.")
    with pytest.raises(FormulaError, match="bool"):
        one("1", "(x : bool)")
    with pytest.raises(FormulaError, match="twice"):
        read_formulas("Definition f (x : R) : R := x.\nDefinition f (x : R) : R := x.")


def test_uses_earlier_definitions() -> None:
    text = "Definition f (x : R) (n : nat) : R := x ^ n.\nDefinition g (y : R) : R := f (y + 1) 3 - f y 2."
    assert sp.expand(read_formulas(text)["g"].body - ((Y + 1) ** 3 - Y**2)) == 0


def test_a_formula_counts_its_arguments() -> None:
    formula = read_formulas("Definition f (x y : R) : R := x / y.")["f"]
    assert formula(1, 3) == sp.Rational(1, 3)
    with pytest.raises(TypeError, match="2 arguments"):
        formula(1)


def test_coq_confirms_the_reader(built: Path) -> None:
    formulas = load_formulas()
    check.compile_text(built, "Points", points.source(formulas))


def test_coq_refuses_a_wrong_value(built: Path) -> None:
    formulas = load_formulas()
    text = points.source({"descent_coeff": formulas["descent_coeff"]})
    wrong = text.replace("= (", "= 1 + (", 1)
    assert wrong != text
    with pytest.raises(check.ProofError):
        check.compile_text(built, "Wrong", wrong)
