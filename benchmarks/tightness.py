"""How close each bound comes on the declared problems: python -m benchmarks.tightness [--check]

Writes bcd_theory/tightness.json, which `lcsb bounds --tightness` prints; with --check it writes nothing and fails if
the file is out of date.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

import bcd_theory
from bcd_theory.audit import stored_tightness, tightness
from bcd_theory.stepsize import BOUNDS


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tightness", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the stored table, write nothing")
    options = parser.parse_args(arguments)
    start = time.process_time()
    found = {bound_id: tightness(bound_id) for bound_id in BOUNDS}
    print(f"{'bound':26s} {'ratio':>9s} {'p > 1':>9s} {'cases':>6s}  problem")
    for bound_id, row in found.items():
        mark = "" if row.testable else "  (not testable by sampling)"
        print(f"{bound_id:26s} {row.ratio:9.4f} {row.ratio_coupled:9.4f} {row.cases:6d}  {row.problem}{mark}")
    print(f"{time.process_time() - start:.1f} CPU-seconds")
    if options.check:
        stored = stored_tightness()
        stale = [
            name
            for name in {*found, *stored}
            if name not in stored
            or name not in found
            or not math.isclose(found[name].ratio, stored[name].ratio)
        ]
        print(f"out of date: {', '.join(sorted(stale))}" if stale else "the stored table is up to date")
        return int(bool(stale))
    table = {
        "command": "python -m benchmarks.tightness",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "bounds": {name: asdict(row) for name, row in found.items()},
    }
    path = Path(bcd_theory.__file__).with_name("tightness.json")
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
