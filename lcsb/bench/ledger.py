"""Where the time of one engine step goes: every moment of it belongs to exactly one row of one phase.

Two means. Functions of the engine are wrapped, each with the row that its time belongs to; inside a layer, where the
backward pass is autograd's, every tensor operation is seen by a `TorchDispatchMode` and filed by its name. Whatever is
neither is Python and the rest, so rows sum to the step by construction; what measuring itself costs is known only by
comparison with a step that is not measured, and is given beside the table.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = "matrix products"
DEQUANTISATION = "dequantisation"
LORA = "LoRA products"
ATTENTION = "attention"
ELEMENTWISE = "norms, activations, rotary, sums"
HEAD = "embedding, head and loss"
OPTIMISER = "optimiser"
PAGES = "giving pages back"
REST = "Python and the rest"
ROWS = (PRODUCTS, DEQUANTISATION, LORA, ATTENTION, ELEMENTWISE, HEAD, OPTIMISER, PAGES, REST)
PHASES = ("forward", "head", "backward", "optimiser")

_MATRIX = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::mv", "aten::addmv")
_BATCHED = ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_softmax_backward_data")


def row_of(operation: str) -> str:
    """The row of a tensor operation inside a layer but outside the packed products.

    >>> row_of("aten::addmm"), row_of("aten::_scaled_dot_product_flash_attention_for_cpu"), row_of("aten::silu")
    ('LoRA products', 'attention', 'norms, activations, rotary, sums')
    """
    if operation in _MATRIX:
        return LORA
    if "attention" in operation or operation in _BATCHED:
        return ATTENTION
    return ELEMENTWISE


class Ledger:
    """Seconds by (phase, row). One clock, read at each change of row; time is never counted twice.

    Attributes:
        seconds: (phase, row) -> seconds of the clock.
        operations: (phase, row) -> floating-point operations of the matrix products seen there.
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.operations: dict[tuple[str, str], int] = defaultdict(int)
        self._clock = clock
        self._stack: list[tuple[str, str, bool]] = [(PHASES[-1], REST, False)]
        self._since = clock()

    def _charge(self) -> None:
        now = self._clock()
        phase, row, _ = self._stack[-1]
        self.seconds[phase, row] += now - self._since
        self._since = now

    @property
    def whole(self) -> bool:
        """Whether the current row takes everything inside it, whatever operations it is made of."""
        return self._stack[-1][2]

    @contextlib.contextmanager
    def row(self, row: str, phase: str | None = None, whole: bool = True) -> Iterator[None]:
        """Inside, time belongs to `row` (and `phase`, if given)."""
        self._charge()
        self._stack.append((phase or self._stack[-1][0], row, whole))
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def count(self, operations: int) -> None:
        """Floating-point operations of a product that runs now."""
        self.operations[self._stack[-1][:2]] += operations

    def close(self) -> None:
        """Charge what has passed until now."""
        self._charge()

    def table(self) -> dict[str, dict[str, float]]:
        """row -> phase -> seconds, rows and phases in their order, absent ones 0."""
        return {row: {phase: self.seconds.get((phase, row), 0.0) for phase in PHASES} for row in ROWS}


class _Operations(TorchDispatchMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, ledger, name = kwargs or {}, self._ledger, func._schema.name
        if name in _MATRIX[:3]:
            a, b = args[-2:]
            ledger.count(2 * a.shape[0] * a.shape[1] * b.shape[1])
        if ledger.whole or func.is_view:
            return func(*args, **kwargs)
        with ledger.row(row_of(name)):
            return func(*args, **kwargs)


@contextlib.contextmanager
def profiled(engine: Any, clock: Callable[[], float] = time.process_time) -> Iterator[Ledger]:
    """Inside, steps of `engine` are charged to the ledger.

    Raises:
        AttributeError: the engine has no function of a name that a row rests on.
    """
    from lcsb.engine import packed

    ledger = Ledger(clock)
    with contextlib.ExitStack() as stack:
        charge = _Patches(ledger, stack)
        charge(engine, "_forward", REST, "forward", whole=False)
        charge(engine, "_embed", HEAD)
        charge(engine, "_loss", HEAD, "head")
        charge(engine, "_backward", REST, "backward", whole=False)
        for name in ("step", "idle_steps"):
            charge(engine.states, name, OPTIMISER)
        for owner in (engine.states, engine.folder):
            charge(owner, "release", PAGES)
        charge.made_by(packed, "kernel", DEQUANTISATION)
        for name in ("packed_product", "packed_transposed_product"):
            for module in _importers(packed, name):
                charge(module, name, PRODUCTS)
        stack.enter_context(_Operations(ledger))
        ledger._since = clock()  # what the patching took is no part of the step
        yield ledger
        ledger.close()


class _Patches:
    """Puts a function in a row until the stack closes."""

    def __init__(self, ledger: Ledger, stack: contextlib.ExitStack) -> None:
        self._ledger, self._stack = ledger, stack

    def __call__(self, owner: Any, name: str, row: str, phase: str | None = None, whole: bool = True) -> None:
        self._put(owner, name, self._charged(getattr(owner, name), row, phase, whole))

    def made_by(self, owner: Any, name: str, row: str) -> None:
        """The same for the functions that `owner.name` returns."""
        original = getattr(owner, name)
        self._put(owner, name, lambda *args: self._charged(original(*args), row))

    def _charged(
        self, original: Callable[..., Any], row: str, phase: str | None = None, whole: bool = True
    ) -> Callable[..., Any]:
        ledger = self._ledger

        def charged(*args: Any, **kwargs: Any) -> Any:
            with ledger.row(row, phase, whole):
                return original(*args, **kwargs)

        return charged

    def _put(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        on_instance = not isinstance(owner, type | ModuleType)
        setattr(owner, name, replacement)
        self._stack.callback(delattr, owner, name) if on_instance else self._stack.callback(
            setattr, owner, name, original
        )


def _importers(home: ModuleType, name: str) -> list[ModuleType]:
    """The engine's modules that hold the function `home.name` under that name."""
    function = getattr(home, name)
    package = home.__name__.rpartition(".")[0]
    return [
        module
        for key, module in list(sys.modules.items())
        if key.startswith(package) and getattr(module, name, None) is function
    ]


def no_gradient_seconds(engine: Any, ids: torch.Tensor, watch: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of a forward pass for evaluation: {layers, head}, head with embedding and loss.

    Args:
        watch: makes a stopwatch with a method `read`.
    """
    parts: dict[str, Any] = {}
    original = engine._forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        inner = watch()
        result = original(*args, **kwargs)
        parts["layers"] = inner.read()
        return result

    engine._forward = forward
    try:
        outer = watch()
        engine.evaluate(ids)
        parts["whole"] = outer.read()
    finally:
        del engine._forward
    return parts
