"""What is measured and what it is held against: models, arms and targets, as data."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bcd_theory.geometry import GEOMETRIES, MIB, Geometry

#: blocks of a cycle in the arms that select: k = ceil(N / 4)
BLOCKS = 4

OURS = ("full", "exact", "identity", "mlp")
PEERS = ("qlora", "badam", "lisa")
ARMS = (*OURS, *PEERS)
COMPUTE_TYPES = ("float32", "bfloat16")

#: what each arm is, for tables and readers of the JSON
DESCRIPTIONS: Mapping[str, str] = {
    "full": "engine, all layers",
    "exact": "engine, exact, p = 4",
    "identity": "engine, identity, p = 4",
    "mlp": "engine, mlp, p = 4",
    "qlora": "QLoRA: Trainer + peft + bitsandbytes NF4, recompute",
    "badam": "BAdam over adapters, 4 blocks, in the same Trainer",
    "lisa": "LISA callback, 2 random layers a step, in the same Trainer",
}


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: built-in model, or geometry.
        real: whether the weights are a trained model's; else they are random and peers are not run.
        memory_limit: bytes that the peak (VmHWM) of each arm of ours must stay below.
        step_ratios: arm -> largest ratio of its seconds per step to those of QLoRA.
        layer_ratios: the same for the layers alone (no embedding, head, loss, optimiser).
        forward_share: least ratio of the matrix products' seconds to the forward pass's.
        shapes: of a model that is no geometry of the theory's list.
        folder: its packed folder; None: the cache's, or random weights that are written when they are needed.
    """

    name: str
    real: bool
    memory_limit: int
    step_ratios: Mapping[str, float] = field(default_factory=dict)
    layer_ratios: Mapping[str, float] = field(default_factory=dict)
    forward_share: float | None = None
    shapes: Geometry | None = None
    folder: Path | None = None

    @property
    def geometry(self) -> Geometry:
        """The model's shapes."""
        return self.shapes or GEOMETRIES[self.name]

    @property
    def weights(self) -> str:
        """What the weights are, for tables."""
        return "real" if self.real else "random weights"


_GIGABYTE = 10**9
_LAYERS_ALONE = {"exact": 0.75, "identity": 0.50}

CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(
            "smollm2-135m", True, 650 * MIB, {"full": 0.9, "exact": 0.75, "identity": 0.52}, _LAYERS_ALONE, 0.70
        ),
        Case(
            "gemma3-270m", True, 900 * MIB, {"full": 0.9, "exact": 0.85, "identity": 0.72},
            _LAYERS_ALONE, 0.70,
        ),
        Case("qwen2.5-0.5b", False, _GIGABYTE),
        Case("qwen2.5-1.5b", False, _GIGABYTE),
        Case("gemma3-1b", False, _GIGABYTE),
        Case("qwen2.5-3b", False, _GIGABYTE),
        Case("gemma3-4b", False, _GIGABYTE),
    )
}  # fmt: skip


def chosen(names: Sequence[str] | None, allowed: Sequence[str], what: str) -> tuple[str, ...]:
    """The names in the order of `allowed`; all of them if none is given.

    Raises:
        ValueError: a name that is not allowed, with the nearest one.
    """
    for name in names or ():
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"; nearest: {near[0]!r}" if near else ""
            raise ValueError(f"{what}: found {name!r}, expected one of {', '.join(allowed)}{hint}")
    return tuple(name for name in allowed if not names or name in names)


def verdict(value: float | None, limit: float | None, at_most: bool = True) -> dict[str, Any]:
    """{value, limit, met}: `met` is None where there is no target, and False where the value is missing."""
    if limit is None:
        return {"value": value, "limit": None, "met": None}
    if value is None:
        return {"value": None, "limit": limit, "met": False}
    return {"value": value, "limit": limit, "met": value <= limit if at_most else value >= limit}
