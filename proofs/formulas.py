"""Read the closed forms of ``coq/Formulas.v`` into sympy, without evaluating any text as code.

Formulas.v is the single source of every closed form: Coq proves theorems about these very definitions
(Statements.v), and Python compares its own formulas with what this reader returns. The grammar is small on
purpose (plain arithmetic, ``^`` with natural exponents, ``sqrt``, ``exp``, ``Rmin``, ``INR``, earlier
definitions); anything else raises :class:`FormulaError`, so that no formula is read by guesswork.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sympy as sp

COQ_FOLDER = Path(__file__).resolve().parent / "coq"

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_][A-Za-z_0-9']*)|(:=|[-+*/^():.]))")


class FormulaError(ValueError):
    """Formulas.v holds something that this reader does not know."""


@dataclass(frozen=True)
class Formula:
    """One ``Definition``: its name, its arguments in Coq's order, and its body as a sympy expression.

    Symbols are real; those of Coq's type ``nat`` are nonnegative integers. ``roots`` holds what stands under a
    square root, as written (sympy may split the root in the body).
    """

    name: str
    arguments: tuple[sp.Symbol, ...]
    body: sp.Expr
    roots: tuple[sp.Expr, ...] = ()

    def __call__(self, *values: object) -> sp.Expr:
        """The body with ``values`` put in for the arguments (exact where the values are exact)."""
        if len(values) != len(self.arguments):
            raise TypeError(f"{self.name} takes {len(self.arguments)} arguments, got {len(values)}")
        return self.put(self.body, values)

    def put(self, expression: sp.Expr, values: Sequence[object]) -> sp.Expr:
        """Any expression in the formula's arguments, with ``values`` put in."""
        pairs = [(a, sp.sympify(v)) for a, v in zip(self.arguments, values, strict=True)]
        return expression.subs(pairs, simultaneous=True)


def strip_comments(text: str) -> str:
    """Coq source without its comments, which may be nested."""
    kept: list[str] = []
    depth = position = 0
    while position < len(text):
        pair = text[position : position + 2]
        if pair == "(*":
            depth += 1
            position += 2
        elif pair == "*)" and depth:
            depth -= 1
            position += 2
        else:
            if not depth:
                kept.append(text[position])
            position += 1
    return "".join(kept)


def _tokens(text: str) -> list[str]:
    found: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise FormulaError(f"cannot read {text[position : position + 30]!r}")
        found.append(match.group(0).strip())
        position = match.end()
    return found


class _Reader:
    """A recursive-descent parser over the tokens of one ``Definition``."""

    def __init__(self, tokens: list[str], known: Mapping[str, Formula]) -> None:
        self.tokens = tokens
        self.position = 0
        self.known = known
        self.scope: dict[str, sp.Symbol] = {}
        self.kinds: dict[str, str] = {}
        self.roots: list[sp.Expr] = []

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise FormulaError(f"found {token or 'the end'!r}, expected {expected or 'more'!r}")
        self.position += 1
        return token

    def definition(self) -> Formula:
        self.take("Definition")
        name = self.take()
        arguments: list[sp.Symbol] = []
        while self.peek() == "(":
            self.take("(")
            names: list[str] = []
            while self.peek() != ":":
                names.append(self.take())
            self.take(":")
            kind = self.take()
            self.take(")")
            for argument in names:
                if kind == "R":
                    symbol = sp.Symbol(argument, real=True)
                elif kind == "nat":
                    symbol = sp.Symbol(argument, integer=True, nonnegative=True)
                else:
                    raise FormulaError(f"{name}: argument type {kind!r}, expected R or nat")
                self.scope[argument] = symbol
                self.kinds[argument] = kind
                arguments.append(symbol)
        for token in (":", "R", ":="):
            self.take(token)
        body = self.sum("R")
        if self.peek():
            raise FormulaError(f"{name}: found {self.peek()!r} after the formula")
        return Formula(name, tuple(arguments), body, tuple(self.roots))

    def sum(self, kind: str) -> sp.Expr:
        value = self.product(kind)
        while self.peek() in ("+", "-"):
            operator = self.take()
            self.refuse_natural(operator, kind)
            right = self.product(kind)
            value = value + right if operator == "+" else value - right
        return value

    def product(self, kind: str) -> sp.Expr:
        value = self.signed(kind)
        while self.peek() in ("*", "/"):
            operator = self.take()
            self.refuse_natural(operator, kind)
            right = self.signed(kind)
            value = value * right if operator == "*" else value / right
        return value

    def refuse_natural(self, operator: str, kind: str) -> None:
        # Coq's subtraction and division of naturals are truncated: sympy's are not
        if kind == "nat" and operator in ("-", "/"):
            raise FormulaError(f"{operator!r} on natural numbers is truncated in Coq; use INR outside")

    def signed(self, kind: str) -> sp.Expr:
        if self.peek() == "-":
            self.refuse_natural(self.take(), kind)
            return -self.signed(kind)
        return self.power(kind)

    def power(self, kind: str) -> sp.Expr:
        base = self.application(kind)
        if self.peek() == "^":
            self.take()
            return base ** self.power("nat")
        return base

    def application(self, kind: str) -> sp.Expr:
        token = self.peek()
        if kind == "R" and token in ("sqrt", "exp"):
            self.take()
            inner = self.atom("R")
            if token == "sqrt":
                self.roots.append(inner)
            return sp.sqrt(inner) if token == "sqrt" else sp.exp(inner)
        if kind == "R" and token == "Rmin":
            self.take()
            return sp.Min(self.atom("R"), self.atom("R"))
        if kind == "R" and token == "INR":
            self.take()
            return self.atom("nat")
        if kind == "R" and token in self.known:
            formula = self.known[self.take()]
            values = [self.atom("nat" if a.is_integer else "R") for a in formula.arguments]
            self.roots += [formula.put(root, values) for root in formula.roots]
            return formula(*values)
        return self.atom(kind)

    def atom(self, kind: str) -> sp.Expr:
        token = self.take()
        if token == "(":
            inner = self.sum(kind)
            self.take(")")
            return inner
        if token.isdigit():
            return sp.Integer(int(token))
        if token in self.scope:
            if self.kinds[token] != kind:
                raise FormulaError(f"{token!r} is of type {self.kinds[token]} where {kind} is expected")
            return self.scope[token]
        raise FormulaError(f"unknown word {token!r}")


def read_formulas(text: str) -> dict[str, Formula]:
    """Every ``Definition`` of a Coq source text, in order; raises :class:`FormulaError` on anything else."""
    formulas: dict[str, Formula] = {}
    for sentence in re.split(r"\.(?=\s|\Z)", strip_comments(text)):
        words = sentence.split()
        if not words or words[0] in ("From", "Require", "Open"):
            continue
        if words[0] != "Definition":
            raise FormulaError(f"found {words[0]!r}, expected only Definition")
        try:
            formula = _Reader(_tokens(sentence), formulas).definition()
        except FormulaError as error:
            raise FormulaError(f"{' '.join(words[:2])}: {error}") from None
        if formula.name in formulas:
            raise FormulaError(f"{formula.name} is defined twice")
        formulas[formula.name] = formula
    return formulas


def load_formulas(path: Path | None = None) -> dict[str, Formula]:
    """The formulas of ``coq/Formulas.v`` (or of ``path``) by name. Needs no Coq."""
    return read_formulas((path or COQ_FOLDER / "Formulas.v").read_text(encoding="utf-8"))
