"""The theory of layer-cyclic selective backpropagation: block coordinate descent with momentum, symbolic and numeric.

Pure mathematics on numpy, scipy and sympy: no torch, no model, no file. Results carry ids, T1 to T12; each public
docstring names the result that it implements. The names below are loaded on first use: schedules and geometries need
neither scipy nor sympy, and a process inside a memory budget imports neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bcd_theory.bounds import Bound as Bound
    from bcd_theory.linear import StabilityLimit as StabilityLimit
    from bcd_theory.linear import stability_limit as stability_limit
    from bcd_theory.momentum import idle_displacement as idle_displacement
    from bcd_theory.momentum import steady_movement as steady_movement
    from bcd_theory.predictions import Measurements as Measurements
    from bcd_theory.predictions import Predictions as Predictions
    from bcd_theory.predictions import predict as predict
    from bcd_theory.schedule import Schedule as Schedule
    from bcd_theory.stepsize import BOUNDS as BOUNDS

_HOME = {
    "BOUNDS": "stepsize",
    "Bound": "bounds",
    "Measurements": "predictions",
    "Predictions": "predictions",
    "Schedule": "schedule",
    "StabilityLimit": "linear",
    "idle_displacement": "momentum",
    "predict": "predictions",
    "stability_limit": "linear",
    "steady_movement": "momentum",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bcd_theory' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bcd_theory.{_HOME[name]}"), name)
