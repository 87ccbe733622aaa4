"""Seconds until `lcsb --help` and `import bcd_theory` are done: python -m benchmarks.startup [--json]

Whole processes, medians of nine after one warm-up. Targets: lcsb --help under 0.6 s, import bcd_theory under 1 s.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

CASES = {
    "lcsb --help": ([sys.executable, "-m", "lcsb.cli", "--help"], 0.6),
    "import bcd_theory": ([sys.executable, "-c", "import bcd_theory"], 1.0),
}
RUNS = 9


def seconds(command: list[str]) -> list[float]:
    """Wall seconds of each run of a command, after one warm-up."""
    found = []
    for run in range(RUNS + 1):
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if run:
            found.append(time.perf_counter() - begin)
    return found


def main() -> int:
    rows = []
    for name, (command, target) in CASES.items():
        times = seconds(command)
        rows.append(
            {"case": name, "median_s": statistics.median(times), "max_s": max(times), "target_s": target}
        )
    if "--json" in sys.argv[1:]:
        print(json.dumps(rows))
    else:
        for row in rows:
            figures = (
                f"median {row['median_s']:.3f} s, largest {row['max_s']:.3f} s (target {row['target_s']} s)"
            )
            print(f"{row['case']:20} {figures}")
    return 0 if all(row["median_s"] < row["target_s"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
