"""Speed of the batched runner against a numpy loop over runs: `python -m benchmarks.runner [--json PATH]`.

Cyclic descent on a quadratic, n = 64, p = 8, 1,000 runs x 1,000 steps, float64, side by side in one process. The loop
does every run and every step: preallocated arrays, in-place updates, contiguous rows, the next block from a list, the
learning rate as an array (a Python number costs numpy 0.1 us more), at the loss of every step the gradient out of the
product A x that the loss needs anyway.

Protocol: the loop's 1,000 runs are cut into 40 slices of about one batched pass's duration. Each of 40 rounds times one
batched pass over all runs and one slice, so that whatever else the machine does meets both sides alike, and both have
the same number of timings. Time is the process's CPU time, all threads counted: equal to wall time on a quiet machine,
and fair on a busy one. `factor`: 40 times the median slice over the median pass; `factor_of_best` and `factor_of_sums`
(the whole loop over the mean pass) stand beside it. The losses of all runs must agree to 1e-10. Exits with 1 where a
factor misses its target: 45x with the loss once a cycle, 25x with the loss at every step. With a problem of its own for
each run the factor is reported, against the loop over those problems.

The targets are for plain descent, where a quadratic lets the batched side know its loss from the step
(`simulations.descent`). `idle momentum` is the runner's general program against a loop as careful: reported, no target.

`specialised`: the loop for a cyclic order known beforehand with the learning rate folded into the rows: what one gains
by giving up the general loop; reported, no target. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reports.records import environment
from reports.strict import write_json
from simulations.problems import coupled
from simulations.problems.own import OwnQuadratics
from simulations.runner import Arm, run

N, P = 64, 8
TARGETS = {P: 45.0, 1: 25.0}
Array = np.ndarray


def loop(matrices: Array, sequence: list[int], start: Array, etas: Array, every: int) -> Array:
    """Losses (records, runs) of one run after another; matrices: (1 or runs, n, n), sequence: block of each step."""
    runs = start.shape[1]
    losses = np.empty((len(sequence) // every, runs))
    x, full, g = np.empty(N), np.empty(N), np.empty(N // P)
    blocks = [slice(N // P * j, N // P * (j + 1)) for j in range(P)]
    views, parts = [x[b] for b in blocks], [full[b] for b in blocks]
    dot, multiply = np.dot, np.multiply
    for r in range(runs):
        a = matrices[r % len(matrices)]
        rows = [a[b] for b in blocks]
        x[:] = start[:, r]
        eta, record = etas[r : r + 1].reshape(()), 0
        if every == 1:
            dot(a, x, out=full)
            for j in sequence:
                multiply(parts[j], eta, out=g)
                view = views[j]
                view -= g
                dot(a, x, out=full)
                losses[record, r] = 0.5 * dot(x, full)
                record += 1
            continue
        left = every
        for j in sequence:
            dot(rows[j], x, out=g)
            g *= eta
            view = views[j]
            view -= g
            left -= 1
            if not left:
                dot(a, x, out=full)
                losses[record, r] = 0.5 * dot(x, full)
                record += 1
                left = every
    return losses


def specialised(a: Array, steps: int, start: Array, etas: Array, every: int) -> Array:
    """The loop for cyclic order alone, `every` being 1 or p."""
    runs = start.shape[1]
    losses = np.empty((steps // every, runs))
    x, full, g = np.empty(N), np.empty(N), np.empty(N // P)
    blocks = [slice(N // P * j, N // P * (j + 1)) for j in range(P)]
    dot, subtract = np.dot, np.subtract
    for r in range(runs):
        x[:] = start[:, r]
        scaled = etas[r] * a
        pairs, record = [(scaled[b], x[b]) for b in blocks], 0
        for _ in range(steps // P):
            for rows, view in pairs:
                dot(rows, x, g)
                subtract(view, g, view)
                if every == 1:
                    dot(a, x, full)
                    losses[record, r] = 0.5 * dot(x, full)
                    record += 1
            if every != 1:
                dot(a, x, full)
                losses[record, r] = 0.5 * dot(x, full)
                record += 1
    return losses


BETA = 0.9


def momentum_loop(matrices: Array, sequence: list[int], start: Array, etas: Array, every: int) -> Array:
    """The loop for EMA momentum with moving idle blocks: m *= beta, m_b += (1 - beta) g_b, x -= eta m."""
    runs = start.shape[1]
    losses = np.empty((len(sequence) // every, runs))
    x, m, full, step, g = np.empty(N), np.empty(N), np.empty(N), np.empty(N), np.empty(N // P)
    blocks = [slice(N // P * j, N // P * (j + 1)) for j in range(P)]
    moments = [m[b] for b in blocks]
    dot, multiply, beta, gain = np.dot, np.multiply, np.array(BETA), np.array(1 - BETA)
    a = matrices[0]
    rows = [a[b] for b in blocks]
    for r in range(runs):
        x[:], m[:] = start[:, r], 0.0
        eta, record, left = etas[r : r + 1].reshape(()), 0, every
        for j in sequence:
            dot(rows[j], x, out=g)
            g *= gain
            m *= beta
            moment = moments[j]
            moment += g
            multiply(m, eta, out=step)
            x -= step
            left -= 1
            if not left:
                dot(a, x, out=full)
                losses[record, r] = 0.5 * dot(x, full)
                record, left = record + 1, every
    return losses


def timed(function: Callable[[], Array]) -> tuple[float, Array]:
    """CPU seconds and the result."""
    began = time.process_time()
    found = function()
    return time.process_time() - began, found


def compare(
    name: str,
    every: int,
    target: float | None,
    rounds: int,
    problem: Any,
    start: Array,
    etas: Array,
    steps: int,
) -> dict[str, Any]:
    """One row: both sides timed alternately, `rounds` times each."""
    sequence = [t % P for t in range(steps)]
    own, moving = problem.A.ndim == 3, name == "idle momentum"
    arm = Arm("cyclic", optimizer="sgd-ema", momentum=BETA) if moving else Arm("cyclic")
    slow_side = momentum_loop if moving else loop
    run(problem, arm, start, etas, 16, record_every=every)  # warm-up
    seconds: list[list[float]] = [[], [], []]
    slow = np.empty((steps // every, start.shape[1]))
    for runs in np.array_split(np.arange(start.shape[1]), rounds):
        batched = timed(lambda: run(problem, arm, start, etas, steps, record_every=every).losses[1:])
        part = slice(runs[0], runs[-1] + 1)
        matrices = problem.A[part] if own else problem.A[None]
        looped = timed(partial(slow_side, matrices, sequence, start[:, part], etas[part], every))
        seconds[0].append(batched[0])
        seconds[1].append(looped[0] * start.shape[1] / len(runs))
        slow[:, part] = looped[1]
        if not own and not moving:
            used = timed(partial(specialised, problem.A, steps, start[:, part], etas[part], every))
            seconds[2].append(used[0] * start.shape[1] / len(runs))
    gap = float(np.max(np.abs(batched[1] - slow) / slow))
    middle, best = [[float(f(s)) if s else 0.0 for s in seconds] for f in (np.median, min)]
    row = {
        "case": name,
        "loss_every": every,
        "runs": start.shape[1],
        "steps": steps,
        "factor": round(middle[1] / middle[0], 1),
        "factor_of_best": round(best[1] / best[0], 1),
        "factor_of_sums": round(float(np.mean(seconds[1]) / np.mean(seconds[0])), 1),
        "target": target,
        "batched_seconds": round(middle[0], 4),
        "loop_seconds": round(middle[1], 3),
        "factor_specialised": None if own or moving else round(middle[2] / middle[0], 1),
        "rounds": rounds,
        "largest_relative_gap": gap,
        "met": gap < 1e-10 and (target is None or middle[1] / middle[0] >= target),
    }
    print(json.dumps(row), flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the last line to this file")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    chosen = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    problem = coupled(N, P, 0.3, 100.0, rng)
    start = rng.normal(size=(N, chosen.runs))
    etas = rng.uniform(0.1, 1.0, size=chosen.runs) / problem.block_smoothness.max()
    threads = sorted({1, torch.get_num_threads()})
    rows = []
    for count in threads:
        # `run` itself takes one thread; the setting is that of the process around it.
        torch.set_num_threads(count)
        for every, target in TARGETS.items():
            row = compare("one problem", every, target, chosen.rounds, problem, start, etas, chosen.steps)
            rows.append({**row, "torch_threads": count})
    for every in TARGETS:
        row = compare("idle momentum", every, None, 10, problem, start, etas, chosen.steps)
        rows.append({**row, "torch_threads": torch.get_num_threads()})
    own = OwnQuadratics(
        np.stack([coupled(N, P, 0.3, 100.0, rng).A for _ in range(chosen.runs)]), problem.partition
    )
    top = max(np.linalg.eigvalsh(own.A[r])[-1] for r in range(chosen.runs))
    for every in TARGETS:
        row = compare("own problem", every, None, 3, own, start, etas / etas.max() / top, chosen.steps)
        rows.append({**row, "torch_threads": torch.get_num_threads()})
    result = {
        "benchmark": "runner",
        "rows": rows,
        "met": all(row["met"] for row in rows),
        "environment": environment(),
    }
    if chosen.json:
        write_json(chosen.json, result)
    print(json.dumps(result))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
