"""Where the time of one engine step goes: every moment of it belongs to exactly one row of one phase.

torch's profiler records the tensor operations; the engine's own functions are wrapped in named ranges that say which
row or phase they are. An operation belongs to the innermost named row around it, else to the row of its own name (that
of the outermost operation, where one calls others); what no operation and no row covers is Python and the rest. So
rows sum to the step by construction. What measuring costs is known only by comparison with a step that is not
measured, and is given beside the table. Times are wall seconds; on a quiet machine and one thread they are CPU seconds.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

PRODUCTS = "matrix products"
DEQUANTISATION = "dequantisation"
LORA = "LoRA products"
ATTENTION = "attention"
ELEMENTWISE = "norms, activations, rotary, sums, copies"
HEAD = "embedding, head and loss"
OPTIMISER = "optimiser"
PAGES = "giving pages back"
REST = "Python and the rest"
ROWS = (PRODUCTS, DEQUANTISATION, LORA, ATTENTION, ELEMENTWISE, HEAD, OPTIMISER, PAGES, REST)
PHASES = ("forward", "head", "backward", "optimiser")

_ROW, _PHASE, _STEP = "lcsb row: ", "lcsb phase: ", "lcsb step"
_MATRIX = ("mm", "addmm", "addmm_", "mv", "addmv", "matmul", "linear")
_BATCHED = ("bmm", "baddbmm", "softmax", "_softmax", "_softmax_backward_data")
# They touch no number: what they take is the interpreter's and the dispatcher's.
_VIEWS = (
    "view", "t", "transpose", "slice", "select", "as_strided", "expand", "detach", "unsqueeze", "squeeze", "permute",
    "narrow", "split", "split_with_sizes", "unbind", "chunk", "alias", "numpy_T", "result_type", "is_nonzero", "item",
)  # fmt: skip


def row_of(operation: str) -> str:
    """The row of an operation that lies in no named one.

    >>> row_of("aten::addmm"), row_of("aten::scaled_dot_product_attention"), row_of("aten::silu"), row_of("aten::t")
    ('LoRA products', 'attention', 'norms, activations, rotary, sums, copies', 'Python and the rest')
    """
    package, _, name = operation.partition("::")
    if package != "aten" or name in _VIEWS:
        return REST  # autograd's own bookkeeping
    if name in _MATRIX:
        return LORA
    return ATTENTION if "attention" in name or name in _BATCHED else ELEMENTWISE


@dataclass(frozen=True)
class Span:
    """An operation or a named range: [start, end) in nanoseconds."""

    name: str
    start: int
    end: int


def charge(spans: Sequence[Span]) -> dict[tuple[str, str], float]:
    """(phase, row) -> seconds of the spans inside the step's own, each moment counted once; nested spans nest.

    >>> step = [Span("lcsb step", 0, 10), Span("aten::silu", 2, 5), Span("aten::empty", 3, 4)]
    >>> {row: round(1e9 * seconds) for (_, row), seconds in charge(step).items()}
    {'Python and the rest': 7, 'norms, activations, rotary, sums, copies': 3}
    """
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    # (end, phase, row, whether the row is settled for everything inside)
    stack: list[tuple[int, str, str, bool]] = []
    now = 0

    def advance(until: int) -> None:
        nonlocal now
        while stack:
            end, phase, row, _ = stack[-1]
            upto = min(end, until)
            seconds[phase, row] += max(0, upto - now) / 1e9
            now = max(now, upto)
            if end > until:
                return
            stack.pop()
        now = until

    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        advance(span.start)
        if not stack:
            if span.name == _STEP:
                stack.append((span.end, PHASES[-1], REST, False))
            continue
        _, phase, row, settled = stack[-1]
        if span.name.startswith(_PHASE):
            phase = span.name.removeprefix(_PHASE)
        elif span.name.startswith(_ROW):
            row, settled = span.name.removeprefix(_ROW), True
        elif not settled:
            row = row_of(span.name)
            settled = row != REST
        stack.append((min(span.end, stack[-1][0]), phase, row, settled))
    advance(max((span.end for span in spans), default=0))
    return dict(seconds)


@dataclass
class Ledger:
    """What one profiled step left.

    Attributes:
        seconds: (phase, row) -> seconds.
        operations: phase -> floating-point operations of the model's own products (a multiplication and an addition
            are two).
    """

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))

    def table(self) -> dict[str, dict[str, float]]:
        """row -> phase -> seconds, rows and phases in their order, absent ones 0."""
        return {row: {phase: self.seconds.get((phase, row), 0.0) for phase in PHASES} for row in ROWS}


@contextlib.contextmanager
def profiled(engine: Any) -> Iterator[Ledger]:
    """Inside, one step of `engine` is recorded; the ledger is filled at the end.

    Raises:
        AttributeError: the engine has no function of a name that a row rests on.
    """
    from lcsb.engine import packed

    ledger = Ledger()
    phase = [PHASES[-1]]

    def count(x: torch.Tensor, matrix: Any, *rest: Any) -> None:
        ledger.operations[phase[-1]] += 2 * x.shape[0] * matrix.rows * matrix.columns

    with contextlib.ExitStack() as stack:
        put = _Patches(stack)
        for name, of in (("_forward", "forward"), ("_loss", "head"), ("_backward", "backward")):
            put(engine, name, _PHASE + of, around=_remember(phase, of))
        for name in ("_embed", "_loss"):
            put(engine, name, _ROW + HEAD)
        for name in ("step", "idle_steps"):
            put(engine.states, name, _ROW + OPTIMISER)
        for owner in (engine.states, engine.folder):
            put(owner, "release", _ROW + PAGES)
        put.made_by(packed, "kernel", _ROW + DEQUANTISATION)
        for name in ("packed_product", "packed_transposed_product"):
            for module in _importers(packed, name):
                put(module, name, _ROW + PRODUCTS, before=count)
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with profiler, torch.profiler.record_function(_STEP):
            yield ledger
    # The raw events: torch's own table of 50,000 of them takes longer than the step.
    recorded: Any = profiler.profiler
    events = recorded.kineto_results.events()
    ledger.seconds = charge([Span(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events])


def _remember(phases: list[str], phase: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        phases.append(phase)
        try:
            yield
        finally:
            phases.pop()

    return inside


class _Patches:
    """Puts functions into named ranges until the stack closes."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def __call__(
        self,
        owner: Any,
        name: str,
        label: str,
        before: Callable[..., None] | None = None,
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        original = getattr(owner, name)

        def labelled(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            with torch.profiler.record_function(label), around():
                return original(*args, **kwargs)

        self._put(owner, name, labelled)

    def made_by(self, owner: Any, name: str, label: str) -> None:
        """The same for the functions that `owner.name` returns."""
        original = getattr(owner, name)

        def maker(*args: Any) -> Callable[..., Any]:
            made = original(*args)

            def labelled(*inner: Any) -> Any:
                with torch.profiler.record_function(label):
                    return made(*inner)

            return labelled

        self._put(owner, name, maker)

    def _put(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, replacement)
        if before is None:
            self._stack.callback(delattr, owner, name)
        else:
            self._stack.callback(setattr, owner, name, before)


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
