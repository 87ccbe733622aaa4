"""What momentum does to idle blocks: the change of variable (T6), the energy (T6b), the movement under AdamW (T9)."""

from __future__ import annotations

import sys

import numpy as np
import torch
from matplotlib.axes import Axes

from bcd_theory.momentum import equivalent_learning_rate, first_pulse_displacement, steady_movement
from bcd_theory.partition import equal_blocks
from reports.decisions import decide_share
from reports.numbers import percent, significant
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations.experiment import Experiment, Result, Size, main
from simulations.problems import coupled, ring
from simulations.problems.base import block_rows
from simulations.problems.linear_loss import LinearLoss
from simulations.runner import Arm, run

BETAS = (0.9, 0.999)


def _yes(name: str, holds: bool, reason: str, effect: float, margin: float, n: int, unit: str) -> Part:
    return Part(
        name=name,
        verdict="supported" if holds else "refuted",
        reason=reason,
        effect=effect if np.isfinite(effect) else None,
        margin=margin,
        n=n,
        unit=unit,
    )


def change_of_variable(count: int, seed: int) -> Part:
    """z = x - eta beta/(1 - beta) m obeys z^{t+1} = z^t - eta U g^t; judged to rounding."""
    worst = 0.0
    for i in range(count):
        rng = np.random.default_rng([seed, 6, i])
        problem, beta = coupled(12, 4, 0.6, 10.0, rng), float(rng.uniform(0.3, 0.99))
        eta = 0.5 / problem.smoothness
        rows = block_rows(problem.partition)
        before = [torch.from_numpy(rng.normal(size=(12, 1))), torch.zeros((12, 1), dtype=torch.float64)]
        start = before[0].numpy().copy()
        gaps: list[float] = []

        def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
            assert m is not None
            shift = eta * beta / (1 - beta)  # noqa: B023
            old, new = before[0] - shift * before[1], x - shift * m  # noqa: B023
            j = rows[t % 4]  # noqa: B023
            expected = old.clone()
            expected[j] -= eta * (problem.matrix @ before[0])[j]  # noqa: B023
            gaps.append(float((new - expected).norm() / (old.norm() + shift * m.norm())))  # noqa: B023
            before[0], before[1] = x.clone(), m.clone()  # noqa: B023

        run(problem, Arm("t6", "sgd-ema", "momentum", momentum=beta), start, eta, 200, observe=observe)
        worst = max(worst, max(gaps))
    return _yes(
        "change of variable (T6)",
        worst < 1e-12,
        f"Largest relative gap {significant(worst)} over {count} problems of 200 steps.",
        worst,
        1e-12,
        count,
        "relative gap",
    )


def energy(count: int, seed: int) -> Part:
    """T6b: E falls by at least eta (1 - eta L_i/2) |m_i^+|^2 at each step, eta up to 1.99/L_max, idle frozen."""
    worst = -np.inf
    for i in range(count):
        rng = np.random.default_rng([seed, 66, i])
        problem = coupled(12, 4, 1.0, 10.0, rng)
        constants = problem.block_smoothness
        beta, eta = float(rng.uniform(0.3, 0.95)), float(rng.uniform(1.0, 1.99)) / float(constants.max())
        rows = block_rows(problem.partition)
        start = rng.normal(size=12)
        last = [float(problem.value(torch.from_numpy(start)[:, None]))]
        first = last[0]
        excess: list[float] = []

        def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
            assert m is not None
            weight = eta * beta / (2 * (1 - beta))  # noqa: B023
            now = float(problem.value(x)) + weight * float((m * m).sum())  # noqa: B023
            owed = eta * (1 - eta * constants[t % 4] / 2) * float((m[rows[t % 4]] ** 2).sum())  # noqa: B023
            excess.append((now - last[0] + owed) / first)  # noqa: B023
            last[0] = now  # noqa: B023

        run(problem, Arm("t6b", "sgd-ema", "frozen", momentum=beta), start, eta, 400, observe=observe)
        worst = max(worst, max(excess))
    return _yes(
        "energy falls at every step (T6b)",
        worst <= 1e-12,
        f"Largest excess over the promised fall {significant(worst)} of f(x^0), {count} problems of 400 steps.",
        worst,
        1e-12,
        count,
        "share of f(x^0)",
    )


def counterexample() -> tuple[Part, dict[str, list[float]]]:
    """T5's matrix, p = 8, beta = 0.9, eta = 1.8/L_max: idle momentum diverges, frozen does not."""
    problem = ring(8)
    eta = 1.8 / float(problem.block_smoothness.max())
    curves = {}
    for idle in ("momentum", "frozen"):
        found = run(
            problem, Arm(idle, "sgd-ema", idle, momentum=0.9), np.arange(1.0, 9.0), eta, 1600, record_every=8
        )  # type: ignore[arg-type]
        curves[idle] = found.losses[:, 0].tolist()
    grown = {idle: curve[-1] / curve[0] for idle, curve in curves.items()}
    holds = grown["momentum"] > 1e3 and grown["frozen"] < 1
    part = _yes(
        "idle momentum loses 2/L_max, frozen keeps it (T5, T6b)",
        holds,
        f"After 200 cycles at 1.8/L_max the loss is {significant(grown['momentum'])} of the start under idle momentum, "
        f"{significant(grown['frozen'])} under frozen.",
        grown["momentum"],
        1e3,
        1,
        "final over first loss",
    )
    return part, curves


def movement(eps: float) -> tuple[Part, list[dict[str, float | str | int]]]:
    """Constant gradient: the last of many cycles against `steady_movement`, both policies and full, p = 2, 4, 8."""
    rows: list[dict[str, float | str | int]] = []
    for p in (2, 4, 8):
        problem = LinearLoss(torch.ones(p, dtype=torch.float64), equal_blocks(p, p))
        cycles = 12000 // p
        for idle, arm in {
            "full": Arm("full", "adamw", order="full", betas=BETAS, eps=eps),
            "momentum": Arm("m", "adamw", "momentum", betas=BETAS, eps=eps),
            "frozen": Arm("f", "adamw", "frozen", betas=BETAS, eps=eps),
        }.items():
            places: list[float] = []

            def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
                if (t + 1) % p == 0:  # noqa: B023
                    places.append(float(x[-1, 0]))  # noqa: B023

            run(problem, arm, np.zeros(p), 1.0, cycles * p, record_every=cycles * p, observe=observe)
            predicted = steady_movement(idle, p, BETAS, eps)  # type: ignore[arg-type]
            measured = places[-2] - places[-1]
            rows.append({"p": p, "idle": idle, "predicted": predicted, "measured": measured})
    worst = max(abs(float(r["measured"]) / float(r["predicted"]) - 1) for r in rows)
    # Bias corrections at 12,000 steps still differ from 1 by beta2^12000, 6e-6.
    name = f"steady movement (T9), eps/|g| = {eps:g}"
    reason = f"Largest relative error {significant(worst)} over p = 2, 4, 8 and three policies."
    return _yes(name, worst < 1e-4, reason, worst, 1e-4, len(rows), "relative error"), rows


def late_start() -> Part:
    """Idle momentum: the first step of block j comes at step j + 1 and moves `first_pulse_displacement`."""
    p = 8
    problem = LinearLoss(torch.ones(p, dtype=torch.float64), equal_blocks(p, p))
    moved: list[float] = []
    last = [torch.zeros((p, 1), dtype=torch.float64)]

    def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
        moved.append(float(last[0][t, 0] - x[t, 0]))
        last[0] = x.clone()

    run(problem, Arm("late", "adamw", betas=BETAS, eps=1e-12), np.zeros(p), 1.0, p, observe=observe)
    expected = first_pulse_displacement(np.arange(1, p + 1), BETAS)
    worst = float(np.max(np.abs(np.array(moved) / expected - 1)))
    steps = ", ".join(f"{v:.3f}" for v in moved)
    reason = f"First steps of blocks 1 to 8 are {steps} eta; largest error {significant(worst)}."
    return _yes("late start (T6)", worst < 1e-8, reason, worst, 1e-8, p, "relative error")


def noisy_movement(runs: int, seed: int) -> list[Part]:
    """Gradient 0.1 + unit noise, p = 4: drift and diffusion over 100 cycles relative to full, within 5 %."""
    p, groups = 4, 8
    problem = LinearLoss(torch.full((p,), 0.1, dtype=torch.float64), equal_blocks(p, p))
    moved: dict[str, np.ndarray] = {}
    for i, (idle, arm) in enumerate(
        {
            "full": Arm("full", "adamw", order="full"),
            "momentum": Arm("m", "adamw", "momentum"),
            "frozen": Arm("f", "adamw", "frozen"),
        }.items()
    ):
        generator = torch.Generator().manual_seed(10 * seed + i)

        def noise(t: int, g: torch.Generator = generator) -> torch.Tensor:
            return torch.randn((p, runs), generator=g, dtype=torch.float64)

        warm, steps = 4000, 800
        kept: dict[int, torch.Tensor] = {}

        def observe(
            t: int, x: torch.Tensor, m: torch.Tensor | None, into: dict[int, torch.Tensor] = kept
        ) -> None:
            if t + 1 in (warm, warm + steps):  # noqa: B023
                into[t + 1] = x.clone()

        run(
            problem,
            arm,
            np.zeros((p, runs)),
            1.0,
            warm + steps,
            noise=noise,
            record_every=warm + steps,
            observe=observe,
        )
        moved[idle] = (kept[warm] - kept[warm + steps]).numpy().reshape(p, groups, -1)
    parts = []
    for idle in ("momentum", "frozen"):
        for kind, statistic in (("drift", np.mean), ("diffusion", np.std)):
            predicted = equivalent_learning_rate(1.0, idle, p, BETAS, kind)  # type: ignore[arg-type]
            by_group = [
                float(np.mean([statistic(moved[idle][j, g]) for j in range(p)]))
                / float(np.mean([statistic(moved["full"][j, g]) for j in range(p)]))
                for g in range(groups)
            ]
            decision = decide_share([(by_group, 0.95 * predicted, 1.05 * predicted)], 1.0)
            mean = float(np.mean(by_group))
            parts.append(
                Part(
                    name=f"{kind} of idle {idle} under noise (T9)",
                    verdict=decision.verdict,
                    reason=f"{mean:.3f} of full's, predicted {predicted:.3f} ({percent(mean / predicted - 1)}), "
                    f"{groups} groups of {runs // groups} runs.",
                    effect=mean / predicted - 1,
                    unit="relative error",
                    margin=0.05,
                    n=groups,
                )
            )
    return parts


def body(size: Size, seed: int) -> Result:
    count, runs = {"quick": (5, 1600), "standard": (40, 6400), "full": (200, 25600)}[size]
    broken, curves = counterexample()
    moves, rows = movement(1e-12)
    with_eps, eps_rows = movement(0.5)
    parts = [change_of_variable(count, seed), energy(count, seed), broken, moves, with_eps, late_start()]
    parts += noisy_movement(runs, seed)

    def draw(axis: Axes) -> None:
        for idle, colour in (("momentum", "exact"), ("frozen", "frozen")):
            curve = np.array(curves[idle])
            axis.semilogy(np.maximum(curve / curve[0], 1e-16), color=LIGHT[colour], label=f"idle {idle}")
        axis.set_xlabel("cycle")
        axis.set_ylabel("loss over first loss")
        axis.set_title("T5's matrix at 1.8/L_max")
        axis.legend()

    return Result(parts, {"curves": curves, "movement": rows, "movement_with_eps": eps_rows}, draw)


EXPERIMENT = Experiment(
    "implicit_update",
    "What momentum does to idle blocks",
    "The change of variable and the fall of the energy are checked at every step; T5's matrix separates the two idle "
    "policies; AdamW's movement per cycle is compared with its law with and without noise, late starts and eps.",
    ("T5", "T6", "T6b", "T9"),
    body,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
