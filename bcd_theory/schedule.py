"""Schedules: which layers are selected at step t, as a pure function of (seed, t, recorded measurements).

t counts optimiser steps taken, from 0. Nothing here keeps state: a resumed run asks for step t and gets the
answer that the uninterrupted run got, given the same recorded measurements.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bcd_theory.partition import _integer, contiguous_blocks, interleaved_blocks, n_blocks

SCHEDULES: Final[tuple[str, ...]] = (
    "cyclic",
    "reversed",
    "interleaved",
    "shuffled",
    "random",
    "importance",
    "greedy",
    "fixed",
    "depth-weighted",
    "adaptive",
)

Measurements = Mapping[int, ArrayLike]
"""{step at which a measurement was taken: its values}. Step t reads the newest record of a step <= t."""


@dataclass(frozen=True)
class Schedule:
    """Layers selected at each step.

    N = n_layers, k = layers_per_step (None: all), p = ceil(N / k).

    name             selected at step t
    cyclic           block t mod p of the contiguous blocks
    reversed         block p - 1 - (t mod p) of them
    interleaved      block t mod p of the blocks {l : l mod p = j}
    shuffled         contiguous blocks, a new permutation each cycle
    random           one contiguous block, uniform, with replacement
    importance       k layers without replacement, probability proportional to the measured gradient norm
    greedy           the contiguous block of largest measured norm (root of the sum of squares)
    fixed            `fixed_layers`
    depth-weighted   k layers without replacement, probability proportional to (l + 1)^depth_exponent
    adaptive         cyclic; k changes at cycle ends only (see `layers_per_step_at`)

    `measurements` maps the step at which a measurement was taken to its values: N non-negative layer gradient
    norms for `importance` and `greedy`, which refuse a step for which nothing has been recorded; for
    `adaptive` see `layers_per_step_at`. The other schedules read none.

    Raises ValueError for an unknown name (naming the nearest), k < 1, k > N, a negative seed, or an option
    that the schedule needs and was not given.

    >>> schedule = Schedule("cyclic", n_layers=5, layers_per_step=2)
    >>> [schedule.selected(t) for t in range(4)]
    [(0, 1), (2, 3), (4,), (0, 1)]
    """

    name: str = "cyclic"
    _: KW_ONLY
    n_layers: int
    layers_per_step: int | None = None
    seed: int = 0
    refresh_every: int = 50
    fixed_layers: tuple[int, ...] | None = None
    depth_exponent: float = 1.0
    min_cosine: float = 0.5
    seconds_per_step: float | None = None

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            near = difflib.get_close_matches(str(self.name).lower(), SCHEDULES, n=1, cutoff=0.0)
            known = ", ".join(SCHEDULES)
            raise ValueError(f"unknown schedule {self.name!r}; did you mean {near[0]!r}? (one of {known})")
        n_blocks(self.n_layers, self.k)
        if _integer(self.seed, "seed") < 0:
            raise ValueError(f"seed is {self.seed}, expected a non-negative integer")
        if _integer(self.refresh_every, "refresh_every") < 1:
            raise ValueError(f"refresh_every is {self.refresh_every}, expected at least 1")
        if not np.isfinite(self.depth_exponent):
            raise ValueError(f"depth_exponent is {self.depth_exponent}, expected a finite number")
        if not 0.0 < self.min_cosine < 1.0:
            raise ValueError(f"min_cosine is {self.min_cosine}, expected a number between 0 and 1")
        if self.seconds_per_step is not None and not 0.0 < self.seconds_per_step < np.inf:
            raise ValueError(f"seconds_per_step is {self.seconds_per_step}, expected a positive number")
        self._check_fixed()

    def _check_fixed(self) -> None:
        if self.name != "fixed":
            if self.fixed_layers is not None:
                raise ValueError(f"fixed_layers is for the schedule 'fixed', found schedule {self.name!r}")
            return
        if self.fixed_layers is None or len(self.fixed_layers) == 0:
            raise ValueError("schedule 'fixed' needs fixed_layers with at least one layer, found none")
        layers = sorted(_integer(layer, "fixed layer") for layer in self.fixed_layers)
        if len(set(layers)) < len(layers) or layers[0] < 0 or layers[-1] >= self.n_layers:
            top = self.n_layers - 1
            raise ValueError(f"fixed_layers is {layers}, expected distinct layers between 0 and {top}")
        object.__setattr__(self, "fixed_layers", tuple(layers))

    @property
    def k(self) -> int:
        """Layers per step (of `adaptive`: at step 0)."""
        return self.n_layers if self.layers_per_step is None else self.layers_per_step

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The blocks, in their own numbering. Of `adaptive`: the blocks at step 0.

        Empty for `importance` and `depth-weighted`, which draw single layers.
        """
        if self.name == "fixed":
            return (self.fixed_layers or (),)
        if self.name in ("importance", "depth-weighted"):
            return ()
        if self.name == "interleaved":
            return interleaved_blocks(self.n_layers, self.k)
        return contiguous_blocks(self.n_layers, self.k)

    @property
    def cycle_length(self) -> int:
        """Steps in a cycle, p = ceil(N / k); 1 for `fixed`. Of `adaptive`: at step 0."""
        return 1 if self.name == "fixed" else n_blocks(self.n_layers, self.k)

    @property
    def needs_measurements(self) -> bool:
        """Whether `selected` depends on recorded measurements."""
        return self.name in ("importance", "greedy", "adaptive")

    def refresh_due(self, step: int) -> bool:
        """Whether to take a measurement before step `step`: every `refresh_every` steps, from step 0."""
        return self.needs_measurements and self._step(step) % self.refresh_every == 0

    def selected(self, step: int, measurements: Measurements | None = None) -> tuple[int, ...]:
        """Selected layers at `step`, sorted."""
        t = self._step(step)
        if self.name == "importance":
            return self._draw_layers(t, self._norms(t, measurements))
        if self.name == "depth-weighted":
            depth = np.arange(1, self.n_layers + 1, dtype=float) / self.n_layers
            return self._draw_layers(t, depth**self.depth_exponent)
        if self.name == "adaptive":
            k, start = self._adaptive(t, measurements)
            return contiguous_blocks(self.n_layers, k)[t - start]
        j = self.block_index(t, measurements)
        assert j is not None
        return self.blocks[j]

    def block_index(self, step: int, measurements: Measurements | None = None) -> int | None:
        """Number of the block that is selected at `step`; None for schedules that draw single layers.

        Of `adaptive`: its number among the contiguous blocks of the k in force.
        """
        t = self._step(step)
        if self.name in ("importance", "depth-weighted"):
            return None
        if self.name == "adaptive":
            return t - self._adaptive(t, measurements)[1]
        p = self.cycle_length
        if self.name == "reversed":
            return p - 1 - t % p
        if self.name == "shuffled":
            return int(self._generator(t // p).permutation(p)[t % p])
        if self.name == "random":
            return int(self._generator(t).integers(p))
        if self.name == "greedy":
            squares = self._norms(t, measurements) ** 2
            return int(np.argmax([squares[list(block)].sum() for block in self.blocks]))
        return t % p

    def layers_per_step_at(self, step: int, measurements: Measurements | None = None) -> int:
        """k in force at `step`; constant but for `adaptive` and `fixed`.

        `adaptive` starts at k = layers_per_step. At each cycle end it reads the newest record taken since the
        last change of k (an older one says nothing about the k in force; without a record k stays):
        - without `seconds_per_step` a record is a sequence of layer fidelities (cosines). Lowest below
          min_cosine: k doubles (fewer layers are skipped); above (1 + min_cosine)/2: k halves; else k stays.
        - with `seconds_per_step` a record is the measured seconds of one or more steps. Largest above it: k
          halves; largest below half of it: k doubles.
        k stays between 1 and N.
        """
        t = self._step(step)
        if self.name == "fixed":
            return len(self.blocks[0])
        return self._adaptive(t, measurements)[0] if self.name == "adaptive" else self.k

    def _adaptive(self, t: int, measurements: Measurements | None) -> tuple[int, int]:
        """(k, first step of the cycle that contains t)."""
        k, start, changed = self.k, 0, 0
        if not measurements:
            p = n_blocks(self.n_layers, k)
            return k, t - t % p
        while True:
            end = start + n_blocks(self.n_layers, k)
            if t < end:
                return k, start
            record = _newest(measurements, end, since=changed)
            start = end
            if record is not None:
                new = self._adapted(k, record)
                if new != k:
                    k, changed = new, end + 1

    def _adapted(self, k: int, record: NDArray[np.float64]) -> int:
        if record.size == 0 or not np.all(np.isfinite(record)):
            raise ValueError(f"measurement is {record.tolist()}, expected finite numbers")
        if self.seconds_per_step is not None:
            seconds = float(record.max())
            down, up = seconds > self.seconds_per_step, seconds < self.seconds_per_step / 2
        else:
            if np.max(np.abs(record)) > 1 + 1e-6:
                raise ValueError(f"measurement is {record.tolist()}, expected cosines between -1 and 1")
            lowest = float(record.min())
            down, up = lowest > (1 + self.min_cosine) / 2, lowest < self.min_cosine
        return max(1, k // 2) if down else min(self.n_layers, 2 * k) if up else k

    def _norms(self, t: int, measurements: Measurements | None) -> NDArray[np.float64]:
        record = _newest(measurements or {}, t)
        if record is None:
            raise ValueError(
                f"schedule {self.name!r} needs gradient norms recorded at or before step {t}, found none"
            )
        if record.shape != (self.n_layers,) or not np.all(np.isfinite(record)) or np.any(record < 0):
            raise ValueError(
                f"schedule {self.name!r} needs {self.n_layers} finite non-negative gradient norms, found "
                f"{record.tolist()}"
            )
        return record

    def _draw_layers(self, t: int, weights: NDArray[np.float64]) -> tuple[int, ...]:
        # Exponential race: the k smallest E_i / w_i are draws without replacement, with probability
        # proportional to w. Layers of weight 0 come last, in the random order of their E_i.
        race = self._generator(t).standard_exponential(self.n_layers)
        with np.errstate(divide="ignore"):
            keys = np.where(weights > 0, race / weights, np.inf)
        order = np.lexsort((race, keys))
        return tuple(sorted(int(i) for i in order[: self.k]))

    def _generator(self, index: int) -> np.random.Generator:
        # One independent stream per (seed, schedule, index): no draw depends on how many were made before it.
        return np.random.default_rng([self.seed, SCHEDULES.index(self.name), index])

    @staticmethod
    def _step(step: int) -> int:
        t = _integer(step, "step")
        if t < 0:
            raise ValueError(f"step is {t}, expected 0 or more")
        return t


def _newest(measurements: Measurements, step: int, since: int = 0) -> NDArray[np.float64] | None:
    """The newest record taken at a step in [since, step]."""
    steps = [s for s in measurements if since <= s <= step]
    return np.asarray(measurements[max(steps)], dtype=np.float64) if steps else None
