"""Problems small enough to be understood completely, each declared with the facts that hold exactly."""

from __future__ import annotations

from simulations.problems.base import Problem as Problem
from simulations.problems.quadratic import Quadratic as Quadratic
from simulations.problems.quadratic import coupled as coupled
from simulations.problems.quadratic import ring as ring
