"""What momentum does to idle blocks: the change of variable (T6), the energy (T6b), the movement under AdamW (T9)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes

from bcd_theory.linear import stability_limit
from bcd_theory.momentum import (
    adamw_trajectory,
    block_energy,
    equivalent_learning_rate,
    first_pulse_displacement,
    idle_displacement,
    shifted_iterate,
    steady_movement,
)
from bcd_theory.partition import equal_blocks
from bcd_theory.predictions import Prediction
from reports.decisions import decide_share
from reports.numbers import percent, significant
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations.experiment import Experiment, Write, legend_below, main
from simulations.problems import coupled, ring
from simulations.problems.base import block_rows
from simulations.problems.linear_loss import LinearLoss
from simulations.records import Record, Registered, Size, prediction
from simulations.runner import Arm, run

BETAS = (0.9, 0.999)
CYCLES = (2, 4, 8)
EPSILONS = (1e-12, 0.5)
RING, RING_BETA, RING_SHARE = 8, 0.9, 1.8  # T5's matrix, run at RING_SHARE/L_max
DRIFT, NOISY_P, GROUPS = 0.1, 4, 8
COUNTS = {"quick": (4, 1000), "standard": (40, 6400), "full": (200, 25600)}  # problems, noisy runs
Policy = Literal["full", "momentum", "frozen"]
POLICIES: tuple[Policy, ...] = ("full", "momentum", "frozen")
IDLE: tuple[Literal["momentum", "frozen"], ...] = ("momentum", "frozen")
ORDERS = ("cyclic", "reversed", "shuffled", "random")


def adamw(policy: Policy, eps: float = 1e-8) -> Arm:
    idle: Literal["momentum", "frozen"] = "momentum" if policy == "full" else policy
    return Arm(policy, "adamw", idle, "full" if policy == "full" else "cyclic", betas=BETAS, eps=eps)


def measure(size: Size, seed: int) -> dict[str, Any]:
    """T5's matrix, from the gradients of the unit vectors, and the constants of the random problems."""
    unit = torch.eye(RING, dtype=torch.float64)
    problems = [
        coupled(12, 4, 1.0, 10.0, np.random.default_rng([seed, 66, i])) for i in range(COUNTS[size][0])
    ]
    return {
        "ring": ring(RING).gradient(unit, slice(0, RING)).numpy(),
        "block_smoothness": [problem.block_smoothness for problem in problems],
    }


def predict(measured: Mapping[str, Any]) -> Sequence[Prediction]:
    matrix = np.array(measured["ring"])
    blocks, l_max = equal_blocks(RING, RING), float(np.diag(matrix).max())
    found = [prediction("largest-gap", 0.0, "T6", assumes="exact arithmetic")]
    found.append(prediction("largest-excess", 0.0, "T6b", assumes=("exact arithmetic", "eta < 2/L_max")))
    for idle in IDLE:
        limit = stability_limit(matrix, blocks, momentum=RING_BETA, idle=idle)
        growth = float(np.log(limit.spectral_radius(RING_SHARE / l_max)))
        found.append(prediction(f"ring/{idle}/limit", limit.learning_rate * l_max, "T5", unit="1/L_max"))
        found.append(prediction(f"ring/{idle}/growth", growth, "T4", unit="log norm a cycle"))
    for p in CYCLES:
        for policy in POLICIES:
            for eps in EPSILONS:
                value = steady_movement(policy, p, BETAS, eps)
                assumes = ("constant gradient 1", f"eps {eps:g}", "bias corrections worn off")
                found.append(
                    prediction(f"movement/{policy}/{p}/{eps:g}", value, "T9", assumes=assumes, unit="eta")
                )
    first = first_pulse_displacement(np.arange(1, CYCLES[-1] + 1), BETAS)
    found.append(prediction("first-pulse", first.tolist(), "T6", assumes="gradient 1, eps 0", unit="eta"))
    late = [_late_cycles(first_step) for first_step in range(1, CYCLES[-1] + 1)]
    found.append(prediction("late-start", late, "T6", assumes="gradient 1 every 8 steps, eps 0", unit="eta"))
    for idle in IDLE:
        for kind in ("drift", "diffusion"):
            value = equivalent_learning_rate(1.0, idle, NOISY_P, BETAS, kind)  # type: ignore[arg-type]
            found.append(
                prediction(f"noisy/{idle}/{kind}", value, "T9", assumes="noise much larger than the drift")
            )
    return found


def _late_cycles(first_step: int) -> float:
    """Movement of a block in the first ten cycles of 8 when its first step is `first_step`."""
    steps = 10 * CYCLES[-1]
    gradients = [1.0 if (t + 1 - first_step) % CYCLES[-1] == 0 else 0.0 for t in range(steps)]
    return float(-adamw_trajectory(0.0, gradients, learning_rate=1.0, betas=BETAS, eps=1e-12)[-1])


def perform(registered: Registered, write: Write) -> None:
    count, runs = COUNTS[registered.size]
    _change_of_variable(count, registered.seed, write)
    _idle_decay(count, registered.seed, write)
    _energy(count, registered.seed, write)
    _ring(write)
    for eps in EPSILONS:
        _movement(eps, write)
    _late_start(write)
    _noisy(runs, registered.seed, write)


def _change_of_variable(count: int, seed: int, write: Write) -> None:
    """z = x - eta beta/(1 - beta) m obeys z^{t+1} = z^t - eta U g^t at each of 200 steps, in every order."""
    for i in range(count):
        rng = np.random.default_rng([seed, 6, i])
        problem, beta = coupled(12, 4, 0.6, 10.0, rng), float(rng.uniform(0.3, 0.99))
        eta = 0.5 / problem.smoothness
        order = ORDERS[i % len(ORDERS)]
        before = [rng.normal(size=12), np.zeros(12)]
        gaps: list[float] = []

        def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
            assert m is not None
            now, moment = x[:, 0].numpy(), m[:, 0].numpy()
            old = shifted_iterate(before[0], before[1], eta, beta)  # noqa: B023
            new = shifted_iterate(now, moment, eta, beta)  # noqa: B023
            # The block is the one whose moment is not the decayed one.
            moved = ~np.isclose(moment, beta * before[1], rtol=1e-9, atol=0)  # noqa: B023
            expected = old - eta * np.where(moved, problem.A @ before[0], 0.0)  # noqa: B023
            size = np.linalg.norm(old) + np.linalg.norm(old - before[0])  # noqa: B023
            gaps.append(float(np.linalg.norm(new - expected) / size))  # noqa: B023
            before[0], before[1] = now.copy(), moment.copy()  # noqa: B023

        arm = Arm("t6", "sgd-ema", "momentum", order, beta)
        run(problem, arm, before[0].copy(), eta, 200, observe=observe)
        write({"kind": "gap", "problem": i, "order": order, "worst": max(gaps)})


def _idle_decay(count: int, seed: int, write: Write) -> None:
    """K idle steps of AdamW move each block as the closed form says: p = 4, decay 0.1, every block, every cycle."""
    for i in range(count):
        rng = np.random.default_rng([seed, 61, i])
        problem, eta, decay = coupled(12, 4, 0.6, 10.0, rng), 0.01, 0.1
        rows = [np.asarray(block) for block in problem.partition.arrays()]
        arm = Arm("idle", "adamw", "momentum", betas=BETAS, eps=1e-8, weight_decay=decay)
        kept: dict[int, tuple[Any, ...]] = {}
        v = np.zeros(12)
        last = [rng.normal(size=12)]
        worst = [0.0]

        def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
            assert m is not None
            now, block = x[:, 0].numpy().copy(), rows[t % 4]  # noqa: B023
            gradient = problem.A[block] @ last[0]  # noqa: B023
            v[:] = BETAS[1] * v  # noqa: B023
            v[block] += (1 - BETAS[1]) * gradient**2  # noqa: B023
            if t >= 3:
                # Three idle steps end here for the block that is next.
                j = (t + 1) % 4
                if j in kept:  # noqa: B023
                    x0, m0, v0, step = kept[j]  # noqa: B023
                    moved = idle_displacement(
                        "adamw", steps=3, first_moment=m0, second_moment=v0, parameter=x0, step_count=step,
                        learning_rate=eta, betas=BETAS, eps=1e-8, weight_decay=decay,  # noqa: B023
                    )  # fmt: skip
                    gap = np.max(np.abs(now[rows[j]] - x0 - moved) / (np.abs(x0) + np.abs(moved)))  # noqa: B023
                    worst[0] = max(worst[0], float(gap))  # noqa: B023
            kept[t % 4] = (now[block], m[:, 0].numpy()[block].copy(), v[block].copy(), t + 1)  # noqa: B023
            last[0] = now  # noqa: B023

        run(problem, arm, last[0].copy(), eta, 80, observe=observe)
        write({"kind": "idle", "problem": i, "worst": worst[0]})


def _energy(count: int, seed: int, write: Write) -> None:
    """E falls by at least eta (1 - eta L_i/2) |m_i^+|^2 at each of 400 steps, eta in [1, 1.999]/L_max, idle frozen."""
    for i in range(count):
        rng = np.random.default_rng([seed, 66, i])
        problem = coupled(12, 4, 1.0, 10.0, rng)
        constants, rows = problem.block_smoothness, block_rows(problem.partition)
        share = 1.999 if i == 0 else float(rng.uniform(1.0, 1.99))
        beta, eta = float(rng.uniform(0.3, 0.95)), share / float(constants.max())
        start = rng.normal(size=12)
        first = float(problem.value(torch.from_numpy(start)[:, None]))
        last, excess = [first], []

        def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
            assert m is not None
            now = block_energy(float(problem.value(x)), [m.numpy()], eta, beta)  # noqa: B023
            owed = eta * (1 - eta * constants[t % 4] / 2) * float((m[rows[t % 4]] ** 2).sum())  # noqa: B023
            excess.append((now - last[0] + owed) / first)  # noqa: B023
            last[0] = now  # noqa: B023

        run(problem, Arm("t6b", "sgd-ema", "frozen", momentum=beta), start, eta, 400, observe=observe)
        write(
            {
                "kind": "energy",
                "problem": i,
                "rate_x_L_max": share,
                "excess": max(excess),
                "left": last[0] / first,
            }
        )


def _ring(write: Write) -> None:
    """T5's matrix at RING_SHARE/L_max: loss by cycle under both policies."""
    problem = ring(RING)
    eta = RING_SHARE / float(problem.block_smoothness.max())
    for idle in IDLE:
        arm = Arm(idle, "sgd-ema", idle, momentum=RING_BETA)
        found = run(problem, arm, np.arange(1.0, RING + 1), eta, 400 * RING, record_every=RING)
        write({"kind": "ring", "idle": idle, "losses": found.losses[:, 0]})


def _movement(eps: float, write: Write) -> None:
    """Constant gradient 1: movement of the last of many cycles, in units of the learning rate."""
    for p in CYCLES:
        problem, cycles = LinearLoss(torch.ones(p, dtype=torch.float64), equal_blocks(p, p)), 6000 // p
        for policy in POLICIES:
            places: list[float] = []

            def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
                if (t + 1) % p == 0:  # noqa: B023
                    places.append(float(x[-1, 0]))  # noqa: B023

            run(
                problem,
                adamw(policy, eps),
                np.zeros(p),
                1.0,
                cycles * p,
                record_every=cycles * p,
                observe=observe,
            )
            row = {"kind": "movement", "p": p, "idle": policy, "eps": eps}
            write({**row, "measured": places[-2] - places[-1]})


def _late_start(write: Write) -> None:
    """The first step of block j comes at step j + 1: its own movement then, and over ten cycles."""
    p = CYCLES[-1]
    problem = LinearLoss(torch.ones(p, dtype=torch.float64), equal_blocks(p, p))
    moved: list[float] = []
    last = [torch.zeros((p, 1), dtype=torch.float64)]

    def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
        if t < p:
            moved.append(float(last[0][t, 0] - x[t, 0]))
        last[0] = x.clone()

    run(problem, adamw("momentum", 1e-12), np.zeros(p), 1.0, 10 * p, observe=observe)
    write({"kind": "late", "first": moved, "ten_cycles": (-last[0][:, 0]).numpy()})


def _noisy(runs: int, seed: int, write: Write) -> None:
    """Gradient DRIFT + unit noise: mean and spread of the movement over 200 cycles, by block and group of runs."""
    p = NOISY_P
    problem = LinearLoss(torch.full((p,), DRIFT, dtype=torch.float64), equal_blocks(p, p))
    for i, policy in enumerate(POLICIES):
        generator = torch.Generator().manual_seed(10 * seed + i)

        def noise(t: int, g: torch.Generator = generator) -> torch.Tensor:
            return torch.randn((p, runs), generator=g, dtype=torch.float64)

        warm, steps = 3000, 800
        kept: dict[int, torch.Tensor] = {}

        def observe(
            t: int, x: torch.Tensor, m: torch.Tensor | None, into: dict[int, torch.Tensor] = kept
        ) -> None:
            if t + 1 in (warm, warm + steps):  # noqa: B023
                into[t + 1] = x.clone()

        run(
            problem, adamw(policy), np.zeros((p, runs)), 1.0, warm + steps, noise=noise, record_every=warm + steps,
            observe=observe,
        )  # fmt: skip
        moved = (kept[warm] - kept[warm + steps]).numpy().reshape(p, GROUPS, -1)
        write(
            {
                "kind": "noisy",
                "idle": policy,
                "drift": moved.mean(2).mean(0),
                "diffusion": moved.std(2).mean(0),
            }
        )


def judge(record: Record) -> list[Part]:
    parts = [_rounding(record, *each) for each in (
        ("gap", "worst", "change of variable (T6)", "200 steps in four orders"),
        ("idle", "worst", "idle displacement under AdamW (T6)", "80 steps with decay 0.1"),
        ("energy", "excess", "energy falls as promised at every step, idle frozen, up to 2/L_max (T6b)", "400 steps"),
    )]  # fmt: skip
    parts += [_ring_part(record, idle) for idle in IDLE]
    parts += [_movement_part(record, eps) for eps in EPSILONS]
    row = record.of("late")[0]
    for key, said, name in (
        ("first", "first-pulse", "first step of each block (T6)"),
        ("ten_cycles", "late-start", "late start over ten cycles (T6)"),
    ):
        parts.append(_late_part(row[key], record.predicted_values(said), name))
    return parts + [_noisy_part(record, idle, kind) for idle in IDLE for kind in ("drift", "diffusion")]


def _holds(name: str, holds: bool, reason: str, effect: float, margin: float, n: int, unit: str) -> Part:
    verdict: Literal["supported", "refuted"] = "supported" if holds else "refuted"
    return Part(name=name, verdict=verdict, reason=reason, effect=effect, margin=margin, n=n, unit=unit)


def _rounding(record: Record, kind: str, key: str, name: str, steps: str) -> Part:
    values = [row[key] for row in record.of(kind)]
    worst = max(float("inf") if value is None else value for value in values)
    margin = 1e-11
    what = "excess" if key == "excess" else "relative gap"
    reason = f"Largest {what} {significant(worst)}, {len(values)} problems of {steps}."
    return _holds(name, worst < margin, reason, worst, margin, len(values), "relative")


def _ring_part(record: Record, idle: str) -> Part:
    """The growth of the norm a cycle, from the second half of the losses, against the cycle's radius."""
    losses = np.array(next(row for row in record.of("ring") if row["idle"] == idle)["losses"])
    said, limit = record.predicted(f"ring/{idle}/growth"), record.predicted(f"ring/{idle}/limit")
    half = len(losses) // 2
    slope = float(np.polyfit(np.arange(half, len(losses)), np.log(losses[half:]) / 2, 1)[0])
    grows = slope > 0
    # A growing mode soon stands alone and has the cycle's radius; falling ones keep one another company for long.
    as_said = grows == (said > 0) and (said < 0 or abs(slope / said - 1) < 0.02)
    return _holds(
        f"idle {idle} at {RING_SHARE:g}/L_max on T5's matrix {'diverges' if said > 0 else 'converges'} (T5, T6b)",
        as_said,
        f"The norm {'grows' if grows else 'falls'} by a factor {np.exp(slope):.4f} a cycle, predicted "
        f"{np.exp(said):.4f}{'' if said > 0 else ' in the end'}; the limit is {significant(limit, 4)}/L_max, and the "
        f"loss ends at {significant(float(losses[-1] / losses[0]))} of its start after {len(losses) - 1} cycles.",
        slope,
        0.0,
        1,
        "log norm a cycle",
    )


def _movement_part(record: Record, eps: float) -> Part:
    rows = [row for row in record.of("movement") if row["eps"] == eps]
    errors = [
        row["measured"] / record.predicted(f"movement/{row['idle']}/{row['p']}/{eps:g}") - 1 for row in rows
    ]
    worst = max(map(abs, errors))
    shown = ", ".join(f"{row['measured']:.4f}" for row in rows if row["idle"] == "momentum")
    return _holds(
        f"steady movement (T9), eps/|g| = {eps:g}",
        worst
        < 1e-4,  # bias corrections after 6,000 steps still differ from 1 by beta2^6000, 2e-3, times 1 - beta2
        f"Idle momentum moves {shown} eta a cycle for p = 2, 4, 8; largest relative error of all policies "
        f"{significant(worst)}.",
        worst,
        1e-4,
        len(rows),
        "relative error",
    )


def _late_part(measured: Sequence[float], said: Sequence[float | None], name: str) -> Part:
    worst = max(abs(found / float(value or np.nan) - 1) for found, value in zip(measured, said, strict=True))
    shown = ", ".join(f"{value:.3f}" for value in measured)
    reason = f"Blocks 1 to {len(measured)} move {shown} eta; largest relative error {significant(worst)}."
    return _holds(name, worst < 1e-8, reason, worst, 1e-8, len(measured), "relative error")


def _noisy_part(record: Record, idle: str, kind: str) -> Part:
    said = record.predicted(f"noisy/{idle}/{kind}")
    rows = {row["idle"]: row[kind] for row in record.of("noisy")}
    ratios = (np.array(rows[idle]) / np.array(rows["full"])).tolist()
    decision, mean = decide_share([(ratios, 0.95 * said, 1.05 * said)], 1.0), float(np.mean(ratios))
    return Part(
        name=f"{kind} of idle {idle} under noise (T9)",
        verdict=decision.verdict,
        reason=f"{mean:.3f} of full's, predicted {said:.3f} ({percent(mean / said - 1)}), "
        f"{len(ratios)} groups of runs.",
        effect=mean / said - 1,
        unit="relative error",
        margin=0.05,
        n=len(ratios),
    )


def draw(record: Record, axes: Sequence[Axes]) -> None:
    for idle, colour in (("momentum", "identity"), ("frozen", "frozen")):
        curve = np.array(next(row for row in record.of("ring") if row["idle"] == idle)["losses"])
        axes[0].semilogy(np.maximum(curve / curve[0], 1e-16), color=LIGHT[colour], label=f"idle {idle}")
        growth = 2 * record.predicted(f"ring/{idle}/growth")
        half = len(curve) // 2
        ahead = np.arange(half, len(curve))
        line = curve[half] / curve[0] * np.exp(growth * (ahead - half))
        if idle == "momentum":  # its slope is met from the first cycles on, before the panel ends
            ahead, line = ahead - half + 5, curve[5] / curve[0] * np.exp(growth * (ahead - half))
        axes[0].semilogy(ahead, line, ":", color=LIGHT["ink"], linewidth=2.4)
    axes[0].set_ylim(1e-5, 1e20)
    axes[0].set_xlabel("cycle (dotted: predicted slope)")
    axes[0].set_ylabel("loss over first loss")
    axes[0].set_title(f"T5's matrix at {RING_SHARE:g}/L_max")
    legend_below(axes[0])
    for policy, colour in (("full", "full"), ("momentum", "identity"), ("frozen", "frozen")):
        for eps, mark, line_ in ((EPSILONS[0], "o", "-"), (EPSILONS[1], "s", "--")):
            said = [record.predicted(f"movement/{policy}/{p}/{eps:g}") for p in CYCLES]
            found = [
                row["measured"]
                for row in record.of("movement")
                if row["idle"] == policy and row["eps"] == eps
            ]
            label = {"full": "full", "momentum": "idle momentum", "frozen": "idle frozen"}[policy]
            axes[1].plot(CYCLES, said, line_, color=LIGHT[colour], label=label if mark == "o" else None)
            axes[1].plot(CYCLES, found, mark, color=LIGHT[colour])
    axes[1].set_xticks(CYCLES)
    axes[1].set_xlabel("p (dashed and squares: eps = |g|/2)")
    axes[1].set_ylabel("movement a cycle over learning rate")
    axes[1].set_title("AdamW, constant gradient (line: T9)")
    legend_below(axes[1])


EXPERIMENT = Experiment(
    "implicit_update",
    "What momentum does to idle blocks",
    "Idle momentum keeps moving layers that are not selected. The change of variable that turns it into plain block "
    "descent, AdamW's idle displacement and the energy that falls when idle layers are frozen are checked at every "
    "step; T5's matrix separates the two policies below 2/L_max; AdamW's movement a cycle is compared with its law, "
    "with and without noise, for late starts and for large eps.",
    ("T4", "T5", "T6", "T6b", "T9"),
    measure,
    predict,
    perform,
    judge,
    draw,
    panels=2,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
