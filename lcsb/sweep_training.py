"""`lcsb sweep` of kind `train`: arms and seeds of one run folder, each trained as `lcsb train` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports.records import RunConfig, RunFolder, read_metrics, sha256_of


def expand(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{"run": folder, "arms": names, "seeds": numbers} to one configuration an arm and seed; default: all of the run's.

    The sha256 of the predictions belongs to the configuration, so that other predictions are other runs. Raises
    ValueError for an unknown setting, arm or seed, or a run that was not predicted.
    """
    from lcsb.train import arm_named

    if unknown := sorted(set(settings) - {"kind", "run", "arms", "seeds"}):
        raise ValueError(f"unknown setting {unknown[0]}, expected kind, run, arms, seeds")
    if not isinstance(settings.get("run"), str):
        raise ValueError(f"run is {settings.get('run')!r}, expected the path of a run folder")
    folder = RunFolder(Path(settings["run"]))
    if not folder.predictions.exists():
        raise ValueError(f"run: {folder.predictions} is not there (lcsb measure and lcsb predict write it)")
    config = RunConfig.read(folder.config)
    names = settings.get("arms", [arm.name for arm in config.arms])
    seeds = settings.get("seeds", list(config.seeds))
    for field, values in (("arms", names), ("seeds", seeds)):
        if not isinstance(values, list):
            raise ValueError(f"{field} is {values!r}, expected a list")
    for name in names:
        arm_named(config, name)
    for seed in seeds:
        if seed not in config.seeds:
            raise ValueError(f"seed {seed}: not in this run; its seeds are {config.seeds}")
    registration = sha256_of(folder.predictions)
    return [
        {
            "kind": "train",
            "run": str(folder.root),
            "arm": name,
            "seed": seed,
            "predictions_sha256": registration,
        }
        for name in names
        for seed in seeds
    ]


def train(configurations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Train each; the run folder holds the record, the result its end. A diverged arm is a result."""
    from lcsb.train import train_arm

    found = []
    for configuration in configurations:
        folder = RunFolder(Path(configuration["run"]))
        registration = sha256_of(folder.predictions)
        if registration != configuration["predictions_sha256"]:
            raise ValueError(
                f"{folder.predictions}: found {registration[:12]}, expected the predictions "
                f"{configuration['predictions_sha256'][:12]} that this sweep was made for"
            )
        status = train_arm(folder, configuration["arm"], configuration["seed"])
        metrics = read_metrics(folder.arm(configuration["arm"], configuration["seed"]).metrics)
        found.append(
            {
                "status": status,
                "final_held_out_loss": metrics.evals[-1].held_out_loss if metrics.evals else None,
                "diverged_at": metrics.end.diverged_at if metrics.end else None,
            }
        )
    return found
