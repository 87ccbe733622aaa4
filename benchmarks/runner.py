"""Speed of the batched runner against a numpy loop over runs: `python -m benchmarks.runner [--json PATH]`.

One quadratic, n = 64, p = 8, cyclic descent, 1,000 runs x 1,000 steps, float64, one thread, one process. The loop does
every run and every step, with preallocated arrays and in-place updates.
The best of five batched passes and of two loops counts. Targets: 45x with the loss once a cycle, 25x
with the loss at every step; exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from simulations.problems import coupled
from simulations.runner import Arm, run

TARGETS = {8: 45.0, 1: 25.0}


def loop(
    a: np.ndarray, blocks: list[slice], start: np.ndarray, etas: np.ndarray, steps: int, every: int
) -> np.ndarray:
    """Losses (records, runs) of one run after another."""
    n, runs = start.shape
    p = len(blocks)
    losses = np.empty((steps // every, runs))
    x, full, g, rows = (
        np.empty(n),
        np.empty(n),
        np.empty(n // p),
        [np.ascontiguousarray(a[b]) for b in blocks],
    )
    for r in range(runs):
        x[:] = start[:, r]
        views = [x[b] for b in blocks]
        eta = etas[r]
        for t in range(steps):
            j = t % p
            np.dot(rows[j], x, out=g)
            np.multiply(g, eta, out=g)
            np.subtract(views[j], g, out=views[j])
            if (t + 1) % every == 0:
                np.dot(a, x, out=full)
                losses[(t + 1) // every - 1, r] = 0.5 * np.dot(x, full)
    return losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    problem = coupled(64, 8, 0.3, 100.0, rng)
    start = rng.normal(size=(64, chosen.runs))
    etas = rng.uniform(0.1, 1.0, size=chosen.runs) / problem.block_smoothness.max()
    blocks = [slice(8 * j, 8 * j + 8) for j in range(8)]
    rows = []
    for every, target in TARGETS.items():
        run(problem, Arm("warm-up"), start, etas, 16, record_every=every)
        batched = np.inf
        looped = np.inf
        for _ in range(5):
            began = time.perf_counter()
            found = run(problem, Arm("cyclic"), start, etas, chosen.steps, record_every=every)
            batched = min(batched, time.perf_counter() - began)
        for _ in range(2):
            began = time.perf_counter()
            slow = loop(problem.A, blocks, start, etas, chosen.steps, every)
            looped = min(looped, time.perf_counter() - began)
        gap = float(np.max(np.abs(found.losses[1:] - slow) / np.maximum(slow, 1e-300)))
        rows.append(
            {"runs": chosen.runs, "steps": chosen.steps, "loss_every": every, "batched_seconds": round(batched, 4),
             "loop_seconds": round(looped, 3), "factor": round(looped / batched, 1), "target": target,
             "largest_relative_gap": gap, "met": looped / batched >= target and gap < 1e-10}
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
