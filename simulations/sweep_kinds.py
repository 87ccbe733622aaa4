"""What `lcsb sweep` can run without a model: `simulation` (runs of the batched runner) and `experiment`."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reports.metrics import DIVERGED_NORM
from reports.strict import first_problem, plain
from simulations.sweep import Configuration, Kind

PositiveInt = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ProblemSettings(_Settings):
    """`coupled`: n coordinates, p blocks, coupling in [0, 1], condition number, seed. `ring`: T5's matrix, p blocks."""

    name: Literal["coupled", "ring"] = "coupled"
    n: PositiveInt = 64
    p: PositiveInt = 8
    coupling: Annotated[float, Field(ge=0, le=1)] = 0.3
    condition: Annotated[float, Field(ge=1)] = 100.0
    ridge: Annotated[float, Field(ge=0)] = 0.01
    seed: Seed = 0


class SimulationSettings(_Settings):
    """kind: simulation. Every problem x arm x learning rate x seed is one run.

    learning_rates are multiplied by `unit`: 1 (absolute), 1/L_max (the largest block smoothness) or 1/L.
    noise: standard deviation of each coordinate's gradient. record_every: steps between recorded losses, default p.
    """

    kind: Literal["simulation"] = "simulation"
    problems: Annotated[list[ProblemSettings], Field(min_length=1)] = [ProblemSettings()]
    arms: Annotated[list[dict[str, Any]], Field(min_length=1)]
    learning_rates: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]
    unit: Literal["absolute", "1/L_max", "1/L"] = "absolute"
    seeds: Annotated[list[Seed], Field(min_length=1)] = [0]
    steps: PositiveInt = 400
    record_every: PositiveInt | None = None
    noise: Annotated[float, Field(ge=0)] = 0.0


class ExperimentSettings(_Settings):
    """kind: experiment. Every experiment x size x seed is one run."""

    kind: Literal["experiment"]
    experiments: Annotated[list[str], Field(min_length=1)]
    sizes: Annotated[list[Literal["quick", "standard", "full"]], Field(min_length=1)] = ["quick"]
    seeds: Annotated[list[Seed], Field(min_length=1)] = [0]


def _checked(kind: type[Any], settings: Mapping[str, Any]) -> Any:
    try:
        return kind.model_validate(dict(settings))
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] != "extra_forbidden":
            raise ValueError(first_problem(error)) from None
        found = str(problem["loc"][-1])
        inside = ProblemSettings if problem["loc"][0] == "problems" else kind
        near = difflib.get_close_matches(found, list(inside.model_fields), n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown setting {'.'.join(map(str, problem['loc']))}; did you mean {near!r}?"
        ) from None


def expand_simulation(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One configuration a run. Raises ValueError that names the setting."""
    chosen: SimulationSettings = _checked(SimulationSettings, settings)
    arms = [asdict(_arm(arm, f"arms.{i}")) for i, arm in enumerate(chosen.arms)]
    names = [arm["name"] for arm in arms]
    if len(set(names)) < len(names):
        raise ValueError(
            f"arms: found the name {next(n for n in names if names.count(n) > 1)!r} twice, expected once"
        )
    found = []
    for problem, arm, rate, seed in product(chosen.problems, arms, chosen.learning_rates, chosen.seeds):
        if problem.name == "coupled" and problem.p > problem.n:
            raise ValueError(f"problems: p is {problem.p}, expected at most n, {problem.n}")
        configuration = {
            "kind": "simulation",
            "problem": problem.model_dump(),
            "arm": arm,
            "learning_rate": rate,
            "unit": chosen.unit,
            "seed": seed,
            "steps": chosen.steps,
            "record_every": chosen.record_every or min(problem.p, chosen.steps),
            "noise": chosen.noise,
        }
        found.append(plain(configuration, "configuration"))
    return found


def _arm(settings: Mapping[str, Any], field: str) -> Any:
    from simulations.arms import Arm

    known = list(Arm.__dataclass_fields__)
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown setting {field}.{name}; did you mean {near!r}?")
    if "name" not in settings:
        raise ValueError(f"field {field}.name is missing")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    try:
        return Arm(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{field}: {error}") from None


def alike(configuration: Configuration) -> Hashable:
    """Runs that differ in learning rate and seed alone go into one tensor program."""
    rest = {k: v for k, v in configuration.items() if k not in ("learning_rate", "seed")}
    return repr(sorted(rest.items()))


def run_simulations(configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
    """Runs that are `alike`, in one program. A start and all draws depend on the run's own seed alone.

    status: `done`, or `diverged` where |x| exceeds 1e6 times its start or is not finite, from step `diverged_at` on. A
    loss that is not finite is null.
    """
    import torch

    from simulations.problems import coupled, ring
    from simulations.runner import run

    first = configurations[0]
    of = ProblemSettings(**first["problem"])
    problem = (
        ring(of.p, of.ridge)
        if of.name == "ring"
        else coupled(of.n, of.p, of.coupling, of.condition, np.random.default_rng(of.seed))
    )
    n, steps = problem.partition.n, int(first["steps"])
    unit = {"absolute": 1.0, "1/L_max": 1 / problem.block_smoothness.max(), "1/L": 1 / problem.smoothness}[
        first["unit"]
    ]
    rates = [unit * configuration["learning_rate"] for configuration in configurations]
    seeds = [int(configuration["seed"]) for configuration in configurations]
    start = np.stack([np.random.default_rng([seed, 1]).normal(size=n) for seed in seeds], axis=1)
    noise = None
    if first["noise"]:
        drawn = torch.from_numpy(
            np.stack([np.random.default_rng([seed, 2]).normal(size=(steps, n)) for seed in seeds], axis=2)
        ).mul_(first["noise"])
        noise = drawn.__getitem__
    limit = torch.from_numpy(DIVERGED_NORM * np.linalg.norm(start, axis=0))
    began = torch.full((len(seeds),), -1)

    def watch(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
        began[(began < 0) & ~(x.norm(dim=0) <= limit)] = t + 1

    arm = _arm(first["arm"], "arm")
    found = run(
        problem, arm, start, rates, steps, seeds=seeds, record_every=int(first["record_every"]), noise=noise,
        observe=watch,
    )  # fmt: skip
    results = []
    for r in range(len(seeds)):
        losses = plain(found.losses[:, r], "losses", lambda field: None)
        at = int(began[r])
        results.append(
            {
                "status": "done" if at < 0 else "diverged",
                "diverged_at": None if at < 0 else at,
                "loss_at_start": losses[0],
                "final_loss": losses[-1],
                "learning_rate": rates[r],
                "at": found.at.tolist(),
                "losses": losses,
            }
        )
    return results


def expand_experiment(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One configuration an experiment, size and seed."""
    from simulations.registry import get

    chosen: ExperimentSettings = _checked(ExperimentSettings, settings)
    for name in chosen.experiments:
        get(name)
    return [
        {"kind": "experiment", "experiment": name, "size": size, "seed": seed}
        for name, size, seed in product(chosen.experiments, chosen.sizes, chosen.seeds)
    ]


def run_experiments(configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
    """The verdicts of each experiment."""
    from simulations.registry import get

    found = []
    for configuration in configurations:
        verdict, _ = get(configuration["experiment"]).run(configuration["size"], configuration["seed"])
        found.append(plain(verdict, "verdict"))
    return found


SIMULATION = Kind("simulation", expand_simulation, run_simulations, alike)
EXPERIMENT = Kind("experiment", expand_experiment, run_experiments)


def expand(settings: Mapping[str, Any], kinds: Sequence[Kind]) -> tuple[Kind, list[dict[str, Any]]]:
    """The kind that the settings name (default: simulation) and its configurations."""
    by_name = {kind.name: kind for kind in kinds}
    name = settings.get("kind", "simulation")
    if name not in by_name:
        near = difflib.get_close_matches(str(name), by_name, n=1, cutoff=0.0)[0]
        raise ValueError(f"kind is {name!r}; did you mean {near!r}? (one of {', '.join(by_name)})")
    return by_name[name], by_name[name].expand(settings)
