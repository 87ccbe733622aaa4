"""`lcsb train` in a fresh process that says which large packages it imported, and kills itself where it is told to.

python budgeted_child.py POINT RUN ARM RAM [--in-file] [--small-chunk]

POINT: none, or PLACE:N, at the N-th time that PLACE is passed
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import lcsb.engine.planner as planner
import lcsb.engine.saving as saving
import lcsb.engine.training as training
from reports.records import RunFolder

LARGE = ("transformers", "peft", "bitsandbytes", "scipy", "sympy", "pandas", "accelerate", "sklearn", "matplotlib",
         "joblib", "huggingface_hub", "datasets")  # fmt: skip


def killed_at(point):
    place, count = point.split(":")
    seen = [0]

    def hooked(owner, name):
        function = getattr(owner, name)

        def hook(*args, **kwargs):
            seen[0] += 1
            if seen[0] == int(count):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        setattr(owner, name, hook)

    owners = {
        "layer": (training.LayerStates, "step"),  # between two layers of a step
        "idle": (training.LayerStates, "idle_steps"),
        "tensor": (saving.ShardFile, "put"),  # in the middle of a checkpoint's file
        "facts": (saving, "write_json"),
        "rename": (Path, "rename"),
        "remove": (training.ArmLoop, "_evaluate"),
        "adapter": (training, "save_adapter"),
    }
    hooked(*owners[place])


def main():
    point, run, arm, ram = sys.argv[1:5]
    if "--in-file" in sys.argv:
        planned = training.planned

        def all_in_files(*args):
            found = planned(*args)
            kept = dataclasses.replace(
                found.residency, weights=False, head=False, states=False, inputs="file", chunk_logits=1 << 16
            )
            return dataclasses.replace(found, residency=kept)

        training.planned = all_in_files
    if "--small-chunk" in sys.argv:
        planner.CHUNKS = (1 << 16,)
    if point != "none":
        killed_at(point)
    trained = training.train_within(RunFolder(Path(run)), arm, 0, int(ram))
    there = [name for name in LARGE if name in sys.modules]
    said = {"status": trained.status, "peak": trained.peak_bytes, "large": there}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
