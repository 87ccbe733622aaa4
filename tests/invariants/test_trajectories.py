"""Settings that must not matter: classes of runs whose trajectories coincide, each run through the command line.

In a class every run is compared with the first: each step's loss (point-wise), and the mean signed difference over the
run, which a small systematic error would move long before it shows at one step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from lcsb.cli import app

sys.path.insert(0, str(Path(__file__).parents[1] / "lcsb"))
import tiny_run

ARMS = [
    "full",
    "exact-momentum",
    "exact-frozen",
    {"name": "mlp-shuffled", "backward": "mlp", "idle": "frozen", "schedule": "shuffled"},
]

# class: (arm, settings) of each run. `bits`: the trajectories are equal to the last bit, else to rounding.
CLASSES = {
    "recompute on or off": {
        "bits": True,
        "runs": [("exact-momentum", {}), ("exact-momentum", {"recompute_arms": True})],
    },
    "recompute on or off, mlp": {
        "bits": True,
        "runs": [("mlp-shuffled", {}), ("mlp-shuffled", {"recompute_arms": True})],
    },
    "accumulation 1 x 4 or 4 x 1": {
        "bits": False,
        "runs": [
            ("exact-momentum", {"batch_size": 4}),
            ("exact-momentum", {"accumulation": 4}),
            ("exact-momentum", {"batch_size": 2, "accumulation": 2}),
        ],
    },
    "one block is full backpropagation, whatever the idle policy": {
        "bits": True,
        "runs": [
            ("full", {"cycle_length": 1}),
            ("exact-momentum", {"cycle_length": 1}),
            ("exact-frozen", {"cycle_length": 1}),
            ("mlp-shuffled", {"cycle_length": 1}),
        ],
    },
    "two processes or one": {
        "bits": False,
        "runs": [("exact-frozen", {"batch_size": 2}), ("exact-frozen", {"batch_size": 2, "processes": 2})],
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tiny_run.write_model(tmp_path_factory.mktemp("invariants"))


def lcsb(*arguments, processes=1):
    """`lcsb ARGUMENTS`; in processes of their own under torchrun if there are to be several."""
    if processes == 1:
        result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
    command = [sys.executable, *launcher, "-m", "lcsb.cli", *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def trajectory(place, root, arm, settings):
    """Losses by step, held-out losses and final adapters of one arm."""
    settings = dict(settings)
    processes = settings.pop("processes", 1)
    config = tiny_run.settings(place, steps=6, eval_every=3, seeds=[0], arms=ARMS, **settings)
    tiny_run.start(root, config)
    lcsb("train", root, "--arm", arm, processes=processes)
    folder = root / "arms" / arm / "seed-0"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return (
        [row["loss"] for row in rows if row["kind"] == "step"],
        [row["held_out_loss"] for row in rows if row["kind"] == "eval"],
        load_file(folder / "adapter" / "adapter_model.safetensors"),
    )


@pytest.mark.parametrize("name", CLASSES)
def test_class(place, tmp_path, name):
    """U02 (d), U11, U33."""
    chosen = CLASSES[name]
    runs = [
        trajectory(place, tmp_path / str(index), arm, settings)
        for index, (arm, settings) in enumerate(chosen["runs"])
    ]
    losses, held_out, adapters = runs[0]
    assert len(losses) == 6 and len(set(losses)) == 6
    for other_losses, other_held_out, other_adapters in runs[1:]:
        if chosen["bits"]:
            assert other_losses == losses and other_held_out == held_out
            assert all((other_adapters[key] == value).all() for key, value in adapters.items())
            continue
        assert other_losses == pytest.approx(losses, rel=2e-6)
        residuals = [a - b for a, b in zip(other_losses, losses, strict=True)]
        assert abs(sum(residuals) / len(residuals)) < 1e-6 * losses[0]
        for key, value in adapters.items():
            # B started at zero, so this is relative to its whole movement; AdamW magnifies rounding near g = 0.
            assert float((other_adapters[key] - value).norm() / value.norm()) < 5e-4, key


def test_what_does_matter_shows(place, tmp_path):
    """The comparison sees a real difference: another idle policy, another batch size."""
    runs = [
        trajectory(place, tmp_path / str(index), arm, settings)[0]
        for index, (arm, settings) in enumerate(
            [("exact-momentum", {}), ("exact-frozen", {}), ("exact-momentum", {"batch_size": 2})]
        )
    ]
    assert (
        runs[0][:2] == runs[1][:2]
    )  # the second step is taken from the same adapters but for idle motion of step 1
    assert max(abs(a - b) for a, b in zip(runs[0], runs[1], strict=True)) > 1e-5
    assert abs(runs[0][0] - runs[2][0]) > 1e-5
