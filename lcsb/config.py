"""How a run selects layers and what happens in the others: `LCSBConfig`, the one object that users set."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bcd_theory.schedule import SCHEDULES, Schedule

BackwardMode = Literal["full", "exact", "identity", "mlp", "certified"]
IdlePolicy = Literal["momentum", "frozen"]
OnNonFinite = Literal["stop", "skip"]
Outer = Literal["train", "freeze"]

BACKWARD_MODES: tuple[str, ...] = get_args(BackwardMode)
IDLE_POLICIES: tuple[str, ...] = get_args(IdlePolicy)
#: schedules of the trainer; `greedy` measures all blocks at every step and is for simulations only
TRAINER_SCHEDULES: tuple[str, ...] = tuple(name for name in SCHEDULES if name != "greedy")
#: schedules that draw single layers; they have no blocks, so no block has a plan
DRAWN_SCHEDULES = ("importance", "depth-weighted")


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
            idle layers; `certified` gives each idle layer the cheapest of identity, mlp and exact that keeps the
            measured cosine of the selected layers' adapter gradients at `min_cosine` or above (T7, T2).
        idle: what AdamW does with layers that are not selected. `momentum`: their gradient is zero, so m still
            moves them (T6). `frozen`: their gradient is None and nothing of them changes (T6b).
        schedule: which layers are selected at step t; a name that `bcd_theory.schedule.Schedule` knows, `greedy`
            excepted (simulations only). Mode `full` selects all layers whatever the schedule.
        layers_per_step: k; None selects all layers at every step.
        seed: seed of schedules that draw; None takes the run's seed.
        min_cosine: target in (0, 1) of mode `certified`, and of the schedule `adaptive` when it goes by fidelity.
        cosine_margin: in [0, 1): on the batch of a refresh a plan of mode `certified` must show min_cosine +
            cosine_margin (1 - min_cosine), so that it keeps min_cosine on batches that it was not measured on.
        refresh_every: R >= 1: at every R-th step, from step 0, the backward pass of the first micro-batch is exact
            and measures what `certified`, `importance` and `adaptive` (by fidelity) go by.
        fixed_layers: the decoder layers of the schedule `fixed`.
        depth_exponent: a of the schedule `depth-weighted`, probability proportional to (l + 1)^a.
        seconds_per_step: time budget of the schedule `adaptive`; None lets it go by fidelity.
        on_nonfinite: `stop` raises `NonFiniteError`, `skip` does not take the step (neither t nor any moment
            advances).
        layers: dotted path of the layer list, or the modules themselves; wins over discovery.
        outer: whether trainable parameters outside the decoder layers are trained at every step or frozen.
        ram_budget: memory of the whole process, as text ("1GB" = 10^9 bytes, "1GiB" = 2^30) or in bytes: the memory
            engine trains (`LCSBTrainer`, `EngineModel`). None: the model is in memory, as transformers loads it.

    Raises:
        ValueError: a value that is not among those allowed, with the nearest allowed one; options that do not
            belong together (a plan a block with a schedule that has none, a fidelity of modes that are exact); with
            `ram_budget`, what the memory engine does not compute.
    """

    backward: BackwardMode = "exact"
    idle: IdlePolicy = "momentum"
    schedule: str = "cyclic"
    layers_per_step: int | None = None
    seed: int | None = None
    min_cosine: float = 0.5
    cosine_margin: float = 0.2
    refresh_every: int = 50
    fixed_layers: tuple[int, ...] | None = None
    depth_exponent: float = 1.0
    seconds_per_step: float | None = None
    on_nonfinite: OnNonFinite = "stop"
    layers: str | Sequence[Any] | None = None
    outer: Outer = "train"
    ram_budget: str | int | None = None

    def __post_init__(self) -> None:
        _one_of("backward", self.backward, BACKWARD_MODES)
        _one_of("idle", self.idle, IDLE_POLICIES)
        _one_of("on_nonfinite", self.on_nonfinite, get_args(OnNonFinite))
        _one_of("outer", self.outer, get_args(Outer))
        if self.schedule == "greedy":
            raise ValueError(
                "schedule: 'greedy' is for simulations only (it measures the gradient of every block at every step); "
                f"expected one of {', '.join(TRAINER_SCHEDULES)}"
            )
        _one_of("schedule", self.schedule, TRAINER_SCHEDULES)
        if not 0.0 <= self.cosine_margin < 1.0:
            raise ValueError(f"cosine_margin is {self.cosine_margin}, expected a number from 0 to below 1")
        if self.layers_per_step is not None and self.layers_per_step < 1:
            raise ValueError(
                f"layers_per_step: found {self.layers_per_step}, expected at least 1 (or None: all)"
            )
        if self.fixed_layers is not None:
            object.__setattr__(self, "fixed_layers", tuple(self.fixed_layers))
            if any(layer < 0 for layer in self.fixed_layers):
                raise ValueError(
                    f"fixed_layers: found {list(self.fixed_layers)}, expected layers from 0 upward"
                )
        # The schedule checks its own options. The number of layers is not known yet: the least that fits stands in.
        self._schedule(
            max(self.layers_per_step or 1, 1 + max(self.fixed_layers or (0,))), 0, self.fixed_layers
        )
        if self.backward == "certified" and self.schedule in DRAWN_SCHEDULES:
            raise ValueError(
                f"backward: 'certified' keeps one plan a block, and schedule {self.schedule!r} draws single layers; "
                "expected a schedule with blocks, or another backward mode"
            )
        by_fidelity = self.schedule == "adaptive" and self.seconds_per_step is None
        if by_fidelity and self.backward not in ("identity", "mlp"):
            raise ValueError(
                f"schedule: 'adaptive' goes by the measured fidelity of identity or mlp, found backward "
                f"{self.backward!r}; give seconds_per_step to adapt to a time budget"
            )
        if self.ram_budget is not None:
            self._check_budget(self.ram_budget)

    def _check_budget(self, budget: str | int) -> None:
        from lcsb.engine.ram import parse_ram

        try:
            parse_ram(budget)
        except (ValueError, TypeError) as error:
            raise type(error)(f"ram_budget: {error}") from None
        refused = {
            "backward": self.backward == "certified",
            "schedule": self.schedule in ("importance", "adaptive"),
            "layers": self.layers is not None,
            "outer": self.outer != "train",
        }
        for field, is_refused in refused.items():
            if is_refused:
                value = getattr(self, field)
                found = repr(value) if isinstance(value, str) else f"{len(value)} modules"
                raise ValueError(
                    f"{field}: found {found} with ram_budget {budget!r}: the memory engine measures nothing while it "
                    "trains (certified, importance, adaptive), finds the layers by itself and has no trained "
                    f"parameters outside them; leave {field} or ram_budget out"
                )

    def make_schedule(
        self, n_layers: int, run_seed: int = 0, trainable_layers: Sequence[int] | None = None
    ) -> Schedule:
        """The schedule over `n_layers` layers; in mode `full` every step selects all of them.

        Args:
            n_layers: number of layers that can be selected.
            run_seed: used if the configuration has no seed of its own.
            trainable_layers: their positions among all decoder layers (`fixed_layers` names decoder layers); None if
                every decoder layer can be selected.

        Raises:
            ValueError: k or a fixed layer does not fit the layers that there are.
        """
        fixed = self.fixed_layers
        if fixed is not None and trainable_layers is not None:
            without = [layer for layer in fixed if layer not in trainable_layers]
            if without:
                raise ValueError(
                    f"fixed_layers: layer {without[0]} has no adapter to train; expected layers among "
                    f"{list(trainable_layers)}"
                )
            fixed = tuple(list(trainable_layers).index(layer) for layer in fixed)
        return self._schedule(n_layers, run_seed if self.seed is None else self.seed, fixed)

    def _schedule(self, n_layers: int, seed: int, fixed_layers: tuple[int, ...] | None) -> Schedule:
        full = self.backward == "full"
        return Schedule(
            "cyclic" if full else self.schedule,
            n_layers=n_layers,
            layers_per_step=None if full else self.layers_per_step,
            seed=seed,
            refresh_every=self.refresh_every,
            fixed_layers=None if full else fixed_layers,
            depth_exponent=self.depth_exponent,
            min_cosine=self.min_cosine,
            seconds_per_step=self.seconds_per_step,
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict. Modules given as `layers` cannot be written and raise `TypeError`."""
        if self.layers is not None and not isinstance(self.layers, str):
            raise TypeError("layers: modules cannot be saved; give the dotted path of the layer list instead")
        values = dataclasses.asdict(self)
        if self.fixed_layers is not None:
            values["fixed_layers"] = list(self.fixed_layers)
        return values

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
