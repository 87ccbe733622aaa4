"""The theory of layer-cyclic selective backpropagation: block coordinate descent with momentum, symbolic and numeric.

Pure mathematics on numpy, scipy and sympy: no torch, no model, no file. Results carry ids, T1 to T12; each public
docstring names the result that it implements.
"""

from __future__ import annotations

from bcd_theory.bounds import Bound as Bound
from bcd_theory.linear import StabilityLimit as StabilityLimit
from bcd_theory.linear import stability_limit as stability_limit
from bcd_theory.momentum import idle_displacement as idle_displacement
from bcd_theory.momentum import steady_movement as steady_movement
from bcd_theory.predict import Measurements as Measurements
from bcd_theory.predict import Predictions as Predictions
from bcd_theory.predict import predict as predict
from bcd_theory.schedule import Schedule as Schedule
from bcd_theory.stepsize import BOUNDS as BOUNDS
