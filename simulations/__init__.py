"""Vectorised experiments on problems small enough to check the theory exactly; one file per experiment."""

from __future__ import annotations

from simulations.registry import EXPERIMENTS as EXPERIMENTS
from simulations.registry import get as get
