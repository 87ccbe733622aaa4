"""The experiments by name. Modules are loaded when asked for, so that the list costs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module

from simulations.experiment import Experiment

NAMES = ("limits", "implicit_update", "rates", "identity", "noise_floor", "quantised", "planted")


class _Registry(Mapping[str, Experiment]):
    def __getitem__(self, name: str) -> Experiment:
        return get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


def get(name: str) -> Experiment:
    """The experiment of that name. Raises ValueError that names the nearest."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)
        raise ValueError(
            f"unknown experiment {name!r}; did you mean {near[0]!r}? (one of {', '.join(NAMES)})"
        )
    experiment: Experiment = import_module(f"simulations.{name}").EXPERIMENT
    return experiment


EXPERIMENTS = _Registry()
