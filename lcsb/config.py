"""How a run selects layers and what happens in the others: `LCSBConfig`, the one object that users set."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bcd_theory.schedule import Schedule

BackwardMode = Literal["full", "exact", "identity", "mlp"]
IdlePolicy = Literal["momentum", "frozen"]
OnNonFinite = Literal["stop", "skip"]
Outer = Literal["train", "freeze"]

BACKWARD_MODES: tuple[str, ...] = get_args(BackwardMode)
IDLE_POLICIES: tuple[str, ...] = get_args(IdlePolicy)


def _one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"; nearest: {near[0]!r}" if near else ""
    raise ValueError(f"{field}: found {value!r}, expected one of {', '.join(allowed)}{hint}")


@dataclass(frozen=True)
class LCSBConfig:
    """Layer-Cyclic Selective Backpropagation, as data.

    Attributes:
        backward: backward mode (theory "What one LCSB step is"). `full` selects every layer; `exact` is block
            coordinate descent; `identity` is the paper's shortcut; `mlp` detaches only the attention branch of
            idle layers.
        idle: what AdamW does with layers that are not selected. `momentum`: their gradient is zero, so m still
            moves them (T6). `frozen`: their gradient is None and nothing of them changes (T6b).
        schedule: which block is selected at step t; a name that `bcd_theory.schedule.Schedule` knows.
        layers_per_step: k; None selects all layers at every step.
        seed: seed of schedules that draw; None takes the run's seed.
        on_nonfinite: `stop` raises `NonFiniteError`, `skip` does not take the step (neither t nor any moment
            advances).
        layers: dotted path of the layer list, or the modules themselves; wins over discovery.
        outer: whether trainable parameters outside the decoder layers are trained at every step or frozen.

    Raises:
        ValueError: a value that is not among those allowed, with the nearest allowed one.
    """

    backward: BackwardMode = "exact"
    idle: IdlePolicy = "momentum"
    schedule: str = "cyclic"
    layers_per_step: int | None = None
    seed: int | None = None
    on_nonfinite: OnNonFinite = "stop"
    layers: str | Sequence[Any] | None = None
    outer: Outer = "train"

    def __post_init__(self) -> None:
        _one_of("backward", self.backward, BACKWARD_MODES)
        _one_of("idle", self.idle, IDLE_POLICIES)
        _one_of("on_nonfinite", self.on_nonfinite, get_args(OnNonFinite))
        _one_of("outer", self.outer, get_args(Outer))

    def make_schedule(self, n_layers: int, run_seed: int = 0) -> Schedule:
        """The schedule over `n_layers` layers; in mode `full` every step selects all of them."""
        return Schedule(
            "cyclic" if self.backward == "full" else self.schedule,
            n_layers=n_layers,
            layers_per_step=None if self.backward == "full" else self.layers_per_step,
            seed=run_seed if self.seed is None else self.seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict. Modules given as `layers` cannot be written and raise `TypeError`."""
        if self.layers is not None and not isinstance(self.layers, str):
            raise TypeError("layers: modules cannot be saved; give the dotted path of the layer list instead")
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LCSBConfig:
        """The inverse of `to_dict`; an unknown key raises `ValueError` that names the nearest known one."""
        known = tuple(field.name for field in dataclasses.fields(cls))
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
                raise ValueError(f"LCSBConfig: unknown key {key!r}{hint}")
        return cls(**values)
