"""Time and products of exact stability limits (T4, T5): `python -m benchmarks.limits [--json PATH]`.

Wishart matrices A = B B^T/n (square B: nearly singular), contiguous equal blocks, cyclic order. A product is one
matrix-vector product with A; a cycle costs one, and its inverse one more and a solve. Budgets: n = 256 in 2 s and
n = 2000 in 60 s on one core (set OMP_NUM_THREADS=1). Exits with 1 where a budget is missed in CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from bcd_theory.linear import stability_limit
from bcd_theory.partition import equal_blocks

# (n, blocks, budget in CPU seconds)
SIZES = ((256, 8, 2.0), (2000, 20, 60.0))
VARIANTS = (
    (0.0, "momentum", "no momentum"),
    (0.9, "momentum", "0.9 momentum"),
    (0.9, "frozen", "0.9 frozen"),
)


def measure(n: int, p: int, budget: float, beta: float, idle: Any, name: str) -> dict[str, Any]:
    root = np.random.default_rng(0).normal(size=(n, n))
    a = root @ root.T / n
    blocks = equal_blocks(n, p)
    cpu = wall = np.inf
    for _ in range(3 if n < 1000 else 1):  # best of three where a run is short
        started = time.perf_counter(), time.process_time()
        found = stability_limit(a, blocks, momentum=beta, idle=idle)
        wall, cpu = min(wall, time.perf_counter() - started[0]), min(cpu, time.process_time() - started[1])
    return {
        "n": n,
        "blocks": p,
        "variant": name,
        "learning_rate": found.learning_rate,
        "method": found.method,
        "products": round(found.products),
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(wall, 2),
        "budget_seconds": budget,
        "within_budget": cpu <= budget,
        "success": found.success,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows with provenance to this file")
    parser.add_argument("--only", type=int, help="only this n")
    options = parser.parse_args(arguments)
    stability_limit(np.eye(2), [[0], [1]])  # imports and warm-up are not what is measured
    rows = []
    print(
        f"{'n':>5} {'blocks':>6}  {'variant':<14} {'limit':>10} {'products':>9} {'cpu s':>7} {'wall s':>7} "
        f"{'budget':>7}"
    )
    for n, p, budget in SIZES:
        if options.only not in (None, n):
            continue
        for beta, idle, name in VARIANTS:
            row = measure(n, p, budget, beta, idle, name)
            rows.append(row)
            print(
                f"{n:>5} {p:>6}  {name:<14} {row['learning_rate']:>10.6f} {row['products']:>9} "
                f"{row['cpu_seconds']:>7.2f} {row['wall_seconds']:>7.2f} {budget:>7.0f}",
                flush=True,
            )
    record = {
        "benchmark": "limits",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "rows": rows,
    }
    text = json.dumps(record, allow_nan=False, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0 if rows and all(row["within_budget"] and row["success"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
