"""Invented cells, sweeps and probe steps whose truth is planted, for the tests of the rules."""

from __future__ import annotations

import numpy as np

from reports.arms import NAMED_ARMS
from reports.cells import Cell, Result, Setting

START, FULL = 3.8, 3.0
SWEPT = (
    "full",
    "full-eta-over-sqrt-p",
    "full-eta-over-p",
    "exact-momentum",
    "exact-frozen",
    "identity-momentum",
)
GRID = tuple(3e-4 * 2**i for i in range(8))


def setting(model="m1", task="wikitext-2", steps=100, rate=1e-4, base="nf4", arithmetic="auto") -> Setting:
    return Setting(model, task, base, arithmetic, rate, steps, 4)


def result(final, seconds=100.0, start=START, status="done", curve=None) -> Result:
    points = ((seconds, final),) if curve is None and final is not None else tuple(curve or ())
    return Result(status, start, final, None, seconds, points)


def cell(losses, where=None, seconds=None) -> Cell:
    """losses: arm -> losses of its seeds (None: diverged); seconds: arm -> seconds of all steps."""
    where = where or setting()
    results = {
        (arm, seed): result(loss, (seconds or {}).get(arm, 100.0), status="done" if loss is not None else "diverged")
        for arm, finals in losses.items()
        for seed, loss in enumerate(finals)
    }  # fmt: skip
    return Cell(where, {arm: NAMED_ARMS[arm] for arm in losses}, results)


def gap_cells(generator, gap, spread, *, seeds=3, models=("m1", "m2"), exact_gap=0.0) -> list[Cell]:
    """Cells of several models whose identity arm is behind full by `gap` +- spread between seeds."""
    found = []
    for model in models:
        full = FULL + 0.05 * generator.normal(size=seeds)
        behind = {"identity-momentum": gap, "exact-momentum": exact_gap}
        losses = {
            name: full * (1 + mean + spread * generator.normal(size=seeds)) for name, mean in behind.items()
        }
        found.append(
            cell({"full": full.tolist(), **{k: v.tolist() for k, v in losses.items()}}, setting(model))
        )
    return found


def sweep_cells(limits, *, model="m1", base="nf4", arithmetic="auto", grid=GRID) -> list[Cell]:
    """One cell a rate. limits: arm -> seed -> the rate from which it diverges."""
    found = []
    for rate in grid:
        losses = {arm: [None if rate >= limit else 3.0 for limit in seeds] for arm, seeds in limits.items()}
        found.append(cell(losses, setting(model, rate=rate, base=base, arithmetic=arithmetic)))
    return found


def limits_of(generator, octaves, spread, seeds=3) -> dict[str, list[float]]:
    """Divergence rates: octaves above 3e-3 +- spread, which a seed's arms share half of."""
    shared = generator.normal(size=seeds) * spread
    return {
        arm: (3e-3 * 2 ** (mean + shared + spread * generator.normal(size=seeds))).tolist()
        for arm, mean in octaves.items()
    }


def rng(*words) -> np.random.Generator:
    return np.random.default_rng(words)
