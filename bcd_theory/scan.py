"""Stable intervals of a one-parameter family: scan, look at near misses, bracket, refine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar

Array = NDArray[np.float64]


def scan(
    rough: Callable[[Array], Array],
    excess: Callable[[Array], Array],
    start: float,
    stop: float,
    points: int,
    extend: bool,
    exact: bool,
) -> tuple[tuple[tuple[float, float], ...], float]:
    """Stable intervals in (0, stop] of excess < 0: a geometric grid, its near misses, bracketed roots.

    rough    the sign of the excess, and its size where that is cheap: for the grid
    extend   whether to double stop until something is unstable
    exact    whether the excess is cheap and accurate enough for near misses and the last digits
    Returns (intervals, stop).
    """
    accuracy = 1e-12 if exact else 1e-10
    grid = np.geomspace(start, stop, points)
    values = rough(grid)
    while extend and np.all(values < 0) and stop < 1e12 * start:
        more = np.geomspace(stop, 2 * stop, max(points // 4, 8))[1:]
        grid, values, stop = np.concatenate([grid, more]), np.concatenate([values, rough(more)]), 2 * stop
    if exact:
        grid, values = _near_misses(excess, grid, values)

    def scalar(eta: float) -> float:
        return float(excess(np.array([eta]))[0])

    edges = [0.0] if values[0] < 0 else []
    for i in range(len(grid) - 1):
        if (values[i] < 0) != (values[i + 1] < 0):
            edges.append(float(brentq(scalar, grid[i], grid[i + 1], xtol=accuracy * grid[i], rtol=accuracy)))
    if len(edges) % 2:
        edges.append(float(stop))
    return tuple(zip(edges[::2], edges[1::2], strict=True)), float(stop)


def _near_misses(excess: Callable[[Array], Array], grid: Array, values: Array) -> tuple[Array, Array]:
    """Add the extrema between grid points that come close to 0 from either side: a window may hide there."""
    rising = np.sign(np.diff(values))
    candidates = [
        i
        for i in range(1, len(grid) - 1)
        if rising[i - 1] != rising[i] and (rising[i - 1] > 0) == (values[i] < 0) and values[i] > -0.5
    ]
    candidates.sort(key=lambda i: abs(values[i]))
    extra, found = [], []
    for i in candidates[:24]:
        sign = -1.0 if values[i] < 0 else 1.0
        best = minimize_scalar(
            lambda eta, sign=sign: sign * float(excess(np.array([eta]))[0]),
            bounds=(grid[i - 1], grid[i + 1]),
            method="bounded",
            options={"xatol": 1e-6 * grid[i], "maxiter": 30},
        )
        extra.append(float(best.x))
        found.append(sign * float(best.fun))
    order = np.argsort(np.concatenate([grid, extra]), kind="stable")
    return np.concatenate([grid, extra])[order], np.concatenate([values, found])[order]
