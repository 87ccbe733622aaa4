"""Stationary excess loss on a noisy quadratic against T10, arm by arm, averaged over the cycle and phase by phase."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

from bcd_theory.noise import NoiseFloor, noise_floor
from bcd_theory.partition import Partition, equal_blocks, interleaved_blocks
from bcd_theory.predictions import Prediction
from reports.decisions import decide_share
from reports.numbers import percent, significant
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations.experiment import Experiment, Write, legend_below, main
from simulations.problems import Quadratic, coupled
from simulations.records import Record, Registered, Size, prediction
from simulations.runner import Arm, run

TOLERANCE = 0.02
PHASE_TOLERANCE = 0.001
GROUPS = 8
N, P, BETA, BETAS = 8, 4, 0.8, (0.8, 0.999)
RUNS = {"quick": (1600, 100), "standard": (3200, 800), "full": (6400, 2000)}  # runs, cycles


@dataclass(frozen=True)
class Setting:
    """An arm, its blocks, and whether a law is known for it."""

    arm: Arm
    interleaved: bool = False
    law: bool = True


SETTINGS = (
    Setting(Arm("full", order="full")),
    *(Setting(Arm(order, order=order)) for order in ("cyclic", "reversed", "shuffled", "random")),
    Setting(Arm("interleaved"), interleaved=True),
    Setting(Arm("full, momentum", "sgd-ema", order="full", momentum=BETA)),
    Setting(Arm("cyclic, idle momentum", "sgd-ema", "momentum", momentum=BETA)),
    Setting(Arm("cyclic, idle frozen", "sgd-ema", "frozen", momentum=BETA)),
    Setting(Arm("reversed, idle momentum", "sgd-ema", "momentum", "reversed", BETA)),
    Setting(Arm("shuffled, idle momentum", "sgd-ema", "momentum", "shuffled", BETA)),
    Setting(Arm("shuffled, idle frozen", "sgd-ema", "frozen", "shuffled", BETA)),
    Setting(Arm("random, idle momentum", "sgd-ema", "momentum", "random", BETA)),
    Setting(Arm("random, idle frozen", "sgd-ema", "frozen", "random", BETA)),
    Setting(Arm("interleaved, idle momentum", "sgd-ema", "momentum", momentum=BETA), interleaved=True),
    Setting(Arm("heavy ball, idle momentum", "heavy-ball", "momentum", momentum=0.5)),
    Setting(Arm("heavy ball, idle frozen", "heavy-ball", "frozen", momentum=0.5)),
    Setting(Arm("AdamW, full", "adamw", order="full", betas=BETAS)),
    Setting(Arm("AdamW, idle momentum", "adamw", "momentum", betas=BETAS)),
    Setting(Arm("AdamW, idle frozen", "adamw", "frozen", betas=BETAS)),
    Setting(Arm("importance", order="importance"), law=False),
    Setting(Arm("greedy", order="greedy"), law=False),
)
PHASES = ("cyclic", "cyclic, idle momentum", "cyclic, idle frozen")


def blocks(interleaved: bool) -> Partition:
    return Partition(interleaved_blocks(N, N // P)) if interleaved else equal_blocks(N, P)


def draw_problem(seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A, and the standard deviation of the noise by coordinate."""
    rng = np.random.default_rng([seed, 10])
    return coupled(N, P, 0.5, 3.0, rng).A, rng.uniform(0.5, 1.5, size=N)


def measure(size: Size, seed: int) -> dict[str, Any]:
    """The Hessian, column by column from the gradient; the noise is put in, so its variance is known."""
    a, sigma = draw_problem(seed)
    problem = Quadratic(a, blocks(False))
    return {
        "hessian": problem.gradient(torch.eye(N, dtype=torch.float64), slice(0, N)).numpy(),
        "noise_variance": sigma**2,
    }


def rate_of(arm: Arm, hessian: NDArray[np.float64], variance: NDArray[np.float64]) -> float:
    """0.4/L; for AdamW, whose step is g over about sigma, a fifth of that times the mean sigma."""
    rate = 0.4 / float(np.linalg.eigvalsh(hessian)[-1])
    return 0.2 * rate * float(np.sqrt(variance).mean()) if arm.optimizer == "adamw" else rate


def law(setting: Setting, a: NDArray[np.float64], variance: NDArray[np.float64]) -> NoiseFloor:
    """T10. AdamW: for z = D^(1/2) x, D = sqrt(E g^2) at the floor that T10 gives for that D, found by iteration."""
    arm = setting.arm
    order: Any = {"reversed": list(range(P))[::-1]}.get(arm.order, arm.order)

    def floor(d: NDArray[np.float64]) -> NoiseFloor:
        scale = np.sqrt(d)
        return noise_floor(
            a / np.outer(scale, scale),
            blocks(setting.interleaved),
            rate_of(arm, a, variance),
            variance / d,
            order=order,
            momentum=arm.betas[0] if arm.optimizer == "adamw" else arm.momentum,
            idle=arm.idle,
            normalisation=arm.normalisation,
        )

    if arm.optimizer != "adamw":
        return floor(np.ones(N))
    # Under idle momentum v falls to g^2/p (T9).
    share = P if arm.order == "cyclic" and arm.idle == "momentum" else 1
    d = np.sqrt(variance / share)
    for _ in range(100):
        found = floor(d)
        # Block j reads its gradient at the end of the step before its own.
        covariance = np.roll(found.covariance, 1, axis=0) / np.sqrt(np.outer(d, d))
        owner = np.arange(N) // (N // P) if len(covariance) > 1 else np.zeros(N, dtype=int)
        second = variance + np.array([a[i] @ covariance[owner[i]] @ a[i] for i in range(N)])
        before, d = d, np.sqrt(second / share)
        if np.max(np.abs(d / before - 1)) < 1e-12:
            return found
    raise ArithmeticError("the stationary second moment did not settle")


def predict(measured: Mapping[str, Any]) -> Sequence[Prediction]:
    a, variance = np.array(measured["hessian"]), np.array(measured["noise_variance"])
    found = []
    for setting in SETTINGS:
        if not setting.law:
            continue
        floor, adamw = law(setting, a, variance), setting.arm.optimizer == "adamw"
        assumes = "quadratic, independent noise of known variance" + (
            ", second moment at its stationary mean" if adamw else ""
        )
        name = setting.arm.name
        found.append(prediction(f"excess/{name}", floor.excess, "T10", assumes=assumes, unit="loss"))
        if name in PHASES:
            phases = floor.excess_by_phase.tolist()
            found.append(prediction(f"phases/{name}", phases, "T10", assumes=assumes, unit="loss"))
    return found


def perform(registered: Registered, write: Write) -> None:
    runs, cycles = RUNS[registered.size]
    a, sigma = draw_problem(registered.seed)
    scale = torch.from_numpy(sigma)[:, None]
    for i, setting in enumerate(SETTINGS):
        arm = setting.arm
        generator = torch.Generator().manual_seed(1000 * registered.seed + i)
        # AdamW starts with no second moment and at a fifth of the rate: it is given four times as long.
        steps = cycles * P * (4 if arm.optimizer == "adamw" else 1)

        def noise(t: int, g: torch.Generator = generator) -> torch.Tensor:
            return scale * torch.randn((N, runs), generator=g, dtype=torch.float64)

        problem = Quadratic(a, blocks(setting.interleaved))
        rate = rate_of(arm, a, sigma**2)
        seeds = registered.seed + np.arange(runs)
        found = run(problem, arm, np.zeros((N, runs)), rate, steps, noise=noise, seeds=seeds)
        # Every step is recorded: the floor is the mean over the phases of the cycle.
        late = found.losses[1 + steps // 2 :].reshape(-1, P, GROUPS, runs // GROUPS).mean((0, 3))
        write({"kind": "floor", "arm": arm.name, "groups": late.mean(0), "phases": late})


def judge(record: Record) -> list[Part]:
    rows = {row["arm"]: row for row in record.of("floor")}
    parts = [_part(record, rows[setting.arm.name], setting) for setting in SETTINGS]
    return [*parts, *(_by_phase(record, rows[name]) for name in PHASES)]


def _part(record: Record, row: Mapping[str, Any], setting: Setting) -> Part:
    values = row["groups"]
    mean = float(np.mean(values))
    name, each = setting.arm.name, f"{len(values)} groups of runs"
    if not setting.law:
        return Part(
            name=name,
            verdict="not testable here",
            reason=f"Excess loss {significant(mean)} ({each}). The choice reads the iterate's true "
            "gradient, so no linear map describes it and T10 says nothing.",
            effect=mean,
            unit="loss",
            n=len(values),
            counts=False,
        )
    said = record.predicted(f"excess/{name}")
    decision = decide_share([(values, said * (1 - TOLERANCE), said * (1 + TOLERANCE))], 1.0)
    error = mean / said - 1
    return Part(
        name=name,
        verdict=decision.verdict,
        reason=f"Excess loss {significant(mean)}, predicted {significant(said)}: {percent(error, 2)} off, {each}.",
        effect=error,
        unit="relative error",
        margin=TOLERANCE,
        n=len(values),
    )


def _by_phase(record: Record, row: Mapping[str, Any]) -> Part:
    """Each phase against the mean over the cycle, within the same runs, so that most of the scatter cancels."""
    name, measured = row["arm"], np.array(row["phases"])
    said = np.array(record.predicted_values(f"phases/{name}"), dtype=float)
    measured, said = measured / measured.mean(0) - 1, said / said.mean() - 1
    groups = [
        (m.tolist(), s - PHASE_TOLERANCE, s + PHASE_TOLERANCE) for m, s in zip(measured, said, strict=True)
    ]
    worst = float(np.max(np.abs(measured.mean(1) - said)))
    return Part(
        name=f"{name}, phase by phase",
        verdict=decide_share(groups, 1.0).verdict,
        reason=f"The excess loss of the phases lies {percent(said.min(), 2)} to {percent(said.max(), 2)} off their "
        f"mean; measured within {percent(worst, 2)} of that.",
        effect=worst,
        unit="relative error",
        margin=PHASE_TOLERANCE,
        n=measured.shape[1],
    )


def draw(record: Record, axes: Sequence[Axes]) -> None:
    rows = [row for row in record.of("floor") if f"excess/{row['arm']}" in record.predictions]
    said = [record.predicted(f"excess/{row['arm']}") for row in rows]
    half = [100 * 2.36 * np.std(row["groups"], ddof=1) / np.sqrt(GROUPS) for row in rows]
    axes[0].errorbar(
        [100 * (float(np.mean(row["groups"])) / value - 1) for row, value in zip(rows, said, strict=True)],
        [row["arm"] for row in rows],
        xerr=[value / expected for value, expected in zip(half, said, strict=True)],
        fmt="o",
        color=LIGHT["exact"],
    )
    axes[0].axvspan(-100 * TOLERANCE, 100 * TOLERANCE, color=LIGHT["grid"])
    axes[0].invert_yaxis()
    axes[0].tick_params(axis="y", labelsize=7)
    axes[0].set_xlabel("measured less predicted, %")
    axes[0].set_title("Mean excess loss")
    for name, colour in zip(PHASES, ("exact", "identity", "frozen"), strict=True):
        row = next(row for row in record.of("floor") if row["arm"] == name)
        steps, said_ = range(1, P + 1), np.array(record.predicted_values(f"phases/{name}"), dtype=float)
        found = np.array(row["phases"]).mean(1)
        axes[1].plot(steps, 100 * (said_ / said_.mean() - 1), "-", color=LIGHT[colour], label=name)
        axes[1].plot(steps, 100 * (found / found.mean() - 1), "o", color=LIGHT[colour])
    axes[1].set_xticks(range(1, P + 1))
    axes[1].set_xlabel("after step (line: predicted)")
    axes[1].set_ylabel("excess loss off the cycle's mean, %")
    axes[1].set_title("Within the cycle")
    legend_below(axes[1])


EXPERIMENT = Experiment(
    "noise_floor",
    "Noise floor of every arm on a noisy quadratic",
    "With noisy gradients the loss settles above the minimum. That excess is measured over many runs and compared with "
    "the exact covariance of T10, for every order that does not look at the iterate, both idle policies, plain "
    "descent, momentum, heavy ball, and AdamW (whose second moment is taken at its stationary mean). Importance "
    "sampling and the greedy choice are measured only: they depend on the iterate, and no linear map describes them.",
    ("T10",),
    measure,
    predict,
    perform,
    judge,
    draw,
    panels=2,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
