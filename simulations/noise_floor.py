"""Stationary excess loss on a noisy quadratic against T10, arm by arm."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from bcd_theory.noise import noise_floor
from reports.decisions import decide_share
from reports.numbers import percent, significant
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations.experiment import Experiment, Result, Size, main
from simulations.problems import coupled
from simulations.runner import Arm, run

TOLERANCE = 0.02
GROUPS = 8
ARMS = (
    Arm("full", order="full"),
    Arm("cyclic"),
    Arm("reversed", order="reversed"),
    Arm("random", order="random"),
    Arm("full, momentum", "sgd-ema", order="full", momentum=0.8),
    Arm("cyclic, idle momentum", "sgd-ema", "momentum", momentum=0.8),
    Arm("cyclic, idle frozen", "sgd-ema", "frozen", momentum=0.8),
    Arm("cyclic, heavy ball", "heavy-ball", "momentum", momentum=0.5),
    Arm("random, idle momentum", "sgd-ema", "momentum", order="random", momentum=0.8),
)


def body(size: Size, seed: int) -> Result:
    runs, cycles = {"quick": (1600, 200), "standard": (3200, 800), "full": (6400, 2000)}[size]
    rng = np.random.default_rng([seed, 10])
    p, n = 4, 8
    problem = coupled(n, p, 0.5, 3.0, rng)
    sigma = rng.uniform(0.5, 1.5, size=n)
    rate = 0.4 / problem.smoothness
    rows, parts = [], []
    for i, arm in enumerate(ARMS):
        order: Any = {"reversed": list(range(p))[::-1]}.get(arm.order, arm.order)
        predicted = noise_floor(
            problem.A,
            problem.partition,
            rate,
            sigma**2,
            order=order,
            momentum=arm.momentum,
            idle=arm.idle,
            normalisation="heavy-ball" if arm.optimizer == "heavy-ball" else "ema",
        ).excess
        generator = torch.Generator().manual_seed(1000 * seed + i)
        scale = torch.from_numpy(sigma)[:, None]

        def noise(t: int, g: torch.Generator = generator, s: torch.Tensor = scale) -> torch.Tensor:
            return s * torch.randn((n, runs), generator=g, dtype=torch.float64)

        # Every step is recorded: the floor is the mean over the phases of the cycle.
        found = run(
            problem, arm, np.zeros((n, runs)), rate, cycles * p, noise=noise, seeds=seed + np.arange(runs)
        )
        late = found.losses[1 + cycles * p // 2 :].mean(0)
        values = late.reshape(GROUPS, -1).mean(1)
        decision = decide_share(
            [(values.tolist(), predicted * (1 - TOLERANCE), predicted * (1 + TOLERANCE))], 1.0
        )
        error = float(values.mean() / predicted - 1)
        rows.append({"arm": arm.name, "predicted": predicted, "groups": values, "relative_error": error})
        parts.append(
            Part(
                name=arm.name,
                verdict=decision.verdict,
                reason=f"Excess loss {significant(float(values.mean()))}, predicted {significant(predicted)}: "
                f"{percent(error, 2)} off, {GROUPS} groups of {runs // GROUPS} runs.",
                effect=error,
                unit="relative error",
                margin=TOLERANCE,
                n=GROUPS,
            )
        )

    def draw(axis: Axes) -> None:
        names = [row["arm"] for row in rows]
        axis.errorbar(
            [100 * row["relative_error"] for row in rows],
            names,
            xerr=[
                100 * 2.36 * row["groups"].std(ddof=1) / np.sqrt(GROUPS) / row["predicted"] for row in rows
            ],
            fmt="o",
            color=LIGHT["exact"],
        )
        axis.axvspan(-2, 2, color=LIGHT["grid"])
        axis.set_xlabel("measured against predicted excess loss, per cent (95 % interval)")
        axis.set_title("Noise floor")

    return Result(parts, {"rows": rows, "learning_rate": rate}, draw)


EXPERIMENT = Experiment(
    "noise_floor",
    "Noise floor of every arm on a noisy quadratic",
    "The stationary excess loss, averaged over the phases of the cycle, is measured over many runs and compared with "
    "the exact covariance of T10, for every order and idle policy.",
    ("T10",),
    body,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
