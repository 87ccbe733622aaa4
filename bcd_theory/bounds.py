"""The Bound type: a theorem's formula as an object that can be evaluated, solved, printed and re-derived.

sympy is imported on first use of a formula and not before, so that reading the list of bounds costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import sympy

Kind = Literal["tight", "upper", "law"]
Sense = Literal["upper", "lower", "equal"]
ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Variable:
    """A symbol of the formulas: its meaning and the interval it lives in.

    Attributes:
        name: as written in formulas (eta, L, delta ...), and the keyword of `Bound.evaluate`.
        meaning: in words.
        low, high: ends of the interval. low_open, high_open: whether the end itself is excluded.
        integer: whether only whole numbers are meant.
    """

    name: str
    meaning: str
    low: float = 0.0
    high: float = math.inf
    low_open: bool = True
    high_open: bool = True
    integer: bool = False

    @property
    def unit_interval(self) -> bool:
        """Whether the variable lives in [0, 1)."""
        return self.low == 0.0 and self.high == 1.0 and not self.low_open and self.high_open

    def checked(self, value: ArrayLike) -> NDArray[np.float64]:
        """`value` as an array; ValueError if any entry lies outside the interval."""
        array = np.asarray(value, dtype=np.float64)
        low = array > self.low if self.low_open else array >= self.low
        high = array < self.high if self.high_open else array <= self.high
        whole = array == np.floor(array) if self.integer else np.ones_like(low)
        if not np.all(low & high & whole):
            ends = (
                f"{'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"
            )
            kind = "whole numbers" if self.integer else "numbers"
            raise ValueError(f"{self.name} ({self.meaning}) takes {kind} in {ends}, got {value!r}")
        return array


def _nonnegative(name: str, meaning: str) -> Variable:
    return Variable(name, meaning, low_open=False)


def _unit(name: str, meaning: str) -> Variable:
    return Variable(name, meaning, high=1.0, low_open=False)


def _count(name: str, meaning: str) -> Variable:
    return Variable(name, meaning, low=1.0, low_open=False, integer=True)


VARIABLES: Final[dict[str, Variable]] = {
    variable.name: variable
    for variable in (
        Variable("eta", "learning rate"),
        Variable("L", "Lipschitz constant of the gradient"),
        Variable("L_i", "Lipschitz constant of the updated block's gradient along the block"),
        Variable("L_max", "largest L_i"),
        Variable("mu", "PL constant"),
        _count("p", "number of blocks"),
        _count("K", "number of cycles"),
        _count("T", "number of steps"),
        _count("m", "number of skipped layers"),
        _unit("delta", "relative error of the surrogate gradient"),
        Variable("cosine", "cosine between surrogate and true gradient", low=-1.0, high=1.0, high_open=False,
                 low_open=False),
        Variable("rho", "norm of the surrogate over norm of the true gradient"),
        _unit("beta", "momentum (EMA form)"),
        Variable("f0", "loss at the start", low=-math.inf),
        Variable("fstar", "infimum of the loss", low=-math.inf),
        _nonnegative("g2", "squared norm of the true gradient of the updated block"),
        _nonnegative("m2", "squared norm of the updated block's momentum after the step"),
        _nonnegative("S", "sum over a cycle of the squared block gradients, each where its block is updated"),
        _nonnegative("R", "largest distance to a minimiser on the level set of the start"),
        _nonnegative("R1", "the same distance in the norm sqrt(sum L_i |x_i|^2)"),
        Variable("sigma", "strong convexity in the norm sqrt(sum L_i |x_i|^2)", high=1.0, high_open=False),
        _nonnegative("lipschitz", "Lipschitz constant of every skipped residual branch"),
        _unit("contraction", "Lipschitz constant below 1 of every residual branch"),
        _nonnegative("a", "bound on the spectral norm of A"),
        _nonnegative("b", "bound on the spectral norm of B"),
        Variable("s", "LoRA scale: alpha/r, or alpha/sqrt(r) for rsLoRA"),
        Variable("L_W", "bound on the Hessian by the adapted weights"),
        _nonnegative("G", "bound on the spectral norm of the gradient by the adapted weights"),
    )
}  # fmt: skip


@cache
def symbol(name: str) -> sympy.Symbol:
    """The sympy symbol of a variable, with the assumptions that follow from its interval."""
    import sympy

    variable = VARIABLES[name]
    assumptions: dict[str, bool] = {"real": True}
    if variable.low >= 0:
        assumptions["positive" if variable.low_open or variable.low > 0 else "nonnegative"] = True
    if variable.integer:
        assumptions["integer"] = True
    return sympy.Symbol(name, **assumptions)


def symbols(names: str) -> tuple[sympy.Symbol, ...]:
    """Several of `symbol`, names separated by blanks."""
    return tuple(symbol(name) for name in names.split())


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a derivation: two expressions that are equal, and why the line is there.

    An inequality is written as an identity, left = right, whose right side is nonnegative as it stands
    (`nonnegative`): then left >= 0 is checked too, and not only said.
    """

    words: str
    left: sympy.Expr
    right: sympy.Expr
    nonnegative: bool = False

    def check(self) -> bool:
        """Whether sympy finds left - right = 0 and, for an inequality, right >= 0."""
        import sympy

        if sympy.simplify(self.left - self.right) != 0:
            return False
        return not self.nonnegative or _is_nonnegative(self.right)


def _is_nonnegative(expression: sympy.Expr) -> bool:
    """Nonnegative by the assumptions on its symbols; x in [0, 1) is written w/(1 + w), and x >= 1 as 1 + w."""
    import sympy

    if expression.is_nonnegative:
        return True
    changes = {}
    for free in expression.free_symbols:
        variable = VARIABLES.get(free.name)
        if variable is None:
            continue
        w = sympy.Symbol(f"w_{free.name}", nonnegative=True, integer=variable.integer or None)
        if variable.unit_interval:
            changes[free] = w / (1 + w)
        elif variable.low == 1:
            changes[free] = 1 + w
    return bool(sympy.factor(sympy.together(expression.subs(changes))).is_nonnegative)


def contraction_step(rate: sympy.Expr, count: sympy.Symbol) -> Step:
    """The line from one contraction by 1 - rate to `count` of them, for f - fstar."""
    f0, fstar = symbols("f0 fstar")
    factor = 1 - rate
    return Step(
        "one more of them after the first n - 1",
        factor * (factor ** (count - 1) * (f0 - fstar)),
        factor**count * (f0 - fstar),
    )


@dataclass(frozen=True, slots=True)
class Formula:
    """What a theorem says, in sympy.

    Attributes:
        expression: the bound.
        condition: the bound holds where this is positive; None: everywhere.
        closed: it also holds where the condition is zero.
        step_limit: explicit largest learning rate, where it is not the root of `condition`.
        steps: the derivation.
    """

    expression: sympy.Expr
    condition: sympy.Expr | None = None
    closed: bool = False
    step_limit: sympy.Expr | None = None
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, eq=False)
class Bound:
    """One theorem.

    Attributes:
        id, name: T1 ... as in the list of results, and in words.
        kind: tight (attained), upper (one-sided), law (identity).
        sense: quantity <= expression (upper), >= (lower), = (equal).
        quantity: what is bounded, in words.
        assumptions: what must hold.
        source: where it comes from, with theorem number.
        variables: names of the formula's variables, see VARIABLES.
        attained: a problem on which it holds with equality, if one is known.
    """

    id: str
    name: str
    kind: Kind
    sense: Sense
    quantity: str
    assumptions: tuple[str, ...]
    source: str
    variables: tuple[str, ...]
    build: Callable[[], Formula] = field(repr=False)
    attained: str | None = None

    @cached_property
    def formula(self) -> Formula:
        """Expression, condition and derivation (imports sympy)."""
        formula = self.build()
        used = formula.expression.free_symbols
        for extra in (formula.condition, formula.step_limit):
            used = used | (extra.free_symbols if extra is not None else set())
        names = {free.name for free in used}
        if names != set(self.variables):
            raise AssertionError(f"{self.id} declares {sorted(self.variables)} and uses {sorted(names)}")
        return formula

    @property
    def expression(self) -> sympy.Expr:
        """The bound as a sympy expression."""
        return self.formula.expression

    def latex(self) -> str:
        """The bound as LaTeX."""
        import sympy

        return str(sympy.latex(self.expression, symbol_names=_latex_names()))

    def evaluate(self, **values: ArrayLike) -> NDArray[np.float64]:
        """Value of the bound; arguments broadcast.

        An upper bound is inf, and a lower bound on a decrease or a norm keeps its formula's value, where the
        learning rate is beyond `largest_step`: nothing is guaranteed there.

        Raises:
            TypeError: a variable is missing or unknown. ValueError: a value outside its interval.
        """
        arrays = self._arguments(values, self.variables)
        expression, condition = self._functions
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            result = np.asarray(expression(*arrays), dtype=np.float64)
            if self.sense == "upper" and condition is not None:
                value = np.asarray(condition(*arrays))
                result = np.where(value >= -ROUNDING if self.formula.closed else value > 0, result, np.inf)
        return np.broadcast_to(result, np.broadcast_shapes(*(array.shape for array in arrays))).copy()

    def largest_step(self) -> sympy.Expr | None:
        """Supremum of the learning rates for which the bound guarantees something; None: not about a rate."""
        return self._largest_step

    def largest_step_at(self, **values: ArrayLike) -> NDArray[np.float64]:
        """`largest_step` in numbers; takes the variables that it depends on."""
        if self._largest_step is None:
            raise ValueError(f"bound {self.id} sets no limit on the learning rate")
        names = tuple(sorted(free.name for free in self._largest_step.free_symbols))
        arrays = self._arguments(values, names)
        with np.errstate(divide="ignore"):
            return np.asarray(self._largest_step_function(*arrays), dtype=np.float64)

    @cached_property
    def _largest_step(self) -> sympy.Expr | None:
        import sympy

        if self.formula.step_limit is not None:
            return self.formula.step_limit
        eta = symbol("eta")
        if self.formula.condition is None or eta not in self.formula.condition.free_symbols:
            return None
        roots = sympy.solve(self.formula.condition, eta)
        if len(roots) != 1:
            raise AssertionError(
                f"{self.id}: the condition on eta has {len(roots)} positive roots, expected 1"
            )
        return sympy.simplify(roots[0])

    @cached_property
    def _largest_step_function(self) -> Callable[..., Any]:
        limit = self._largest_step
        assert limit is not None
        return _lambdified(limit, tuple(sorted(free.name for free in limit.free_symbols)))

    def derivation(self) -> tuple[Step, ...]:
        """The steps from the assumptions to the expression; each has `check()`."""
        return self.formula.steps

    @cached_property
    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        condition = self.formula.condition
        return _lambdified(self.expression, self.variables), (
            None if condition is None else _lambdified(condition, self.variables)
        )

    def _arguments(self, values: dict[str, ArrayLike], names: tuple[str, ...]) -> list[NDArray[np.float64]]:
        for name in values:
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"bound {self.id} takes {', '.join(names)}, not {name!r}{hint}")
        missing = [name for name in names if name not in values]
        if missing:
            raise TypeError(f"bound {self.id} needs {', '.join(missing)} as well")
        return list(np.broadcast_arrays(*(VARIABLES[name].checked(values[name]) for name in names)))


def _lambdified(expression: sympy.Expr, names: tuple[str, ...]) -> Callable[..., Any]:
    import sympy

    function: Callable[..., Any] = sympy.lambdify(list(symbols(" ".join(names))), expression, modules="numpy")
    return function


@cache
def _latex_names() -> dict[Any, str]:
    names = {
        "fstar": "f^*",
        "f0": "f_0",
        "g2": r"\|g\|^2",
        "m2": r"\|m^+\|^2",
        "cosine": r"\cos\theta",
        "lipschitz": r"\ell",
        "contraction": r"\ell",
        "R1": "R_1",
    }
    return {symbol(name): text for name, text in names.items()}
