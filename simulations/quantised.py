"""A quantised base as a fixed perturbation against low-precision arithmetic as noise, and C6's window (T11, T4, T9)."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from bcd_theory.linear import stability_limit
from bcd_theory.partition import equal_blocks
from bcd_theory.quantization import round_trip, weyl_interval
from reports.decisions import decide
from reports.numbers import fixed, percent, significant
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations.experiment import Experiment, Result, Size, main
from simulations.problems import Quadratic
from simulations.runner import Arm, run

FULL, CYCLIC = Arm("full", order="full"), Arm("cyclic")


@dataclass
class Rounded(Quadratic):
    """The same quadratic with its gradient rounded to bfloat16: arithmetic noise, not another function."""

    def gradient(self, x: Tensor, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(self.matrix[rows], x).to(torch.bfloat16).to(torch.float64)

    change = None  # type: ignore[assignment]


def adapter_problem(n: int, p: int, share: float, rng: np.random.Generator) -> tuple[Quadratic, Quadratic]:
    """Least squares through frozen weights W (4n x n, columns share one direction): A = W^T W/(4n), and with NF4(W)."""
    w = rng.normal(size=(4 * n, n)) * np.sqrt(1 - share) + rng.normal(size=(4 * n, 1)) * np.sqrt(share)
    found = []
    for weights in (w, round_trip(w)):
        a = weights.T @ weights / (4 * n)
        found.append(Quadratic(a + 0.01 * np.eye(n), equal_blocks(n, p)))
    return found[0], found[1]


def _converges(problem: Quadratic, arm: Arm, rate: float, start: np.ndarray, cycles: int) -> bool:
    p = len(problem.partition)
    losses = run(problem, arm, start, rate, cycles * p, record_every=p).losses[:, 0]
    return bool(np.isfinite(losses[-1]) and losses[-1] < 1e-2 * losses[0])


def body(size: Size, seed: int) -> Result:
    count, cycles = {"quick": (12, 200), "standard": (60, 600), "full": (300, 2000)}[size]
    p, rows = 4, []
    for i in range(count):
        rng = np.random.default_rng([seed, 11, i])
        exact, nf4 = adapter_problem(16, p, float(rng.uniform(0.2, 0.8)), rng)
        start = rng.normal(size=16)
        gap = float(np.linalg.norm(nf4.A - exact.A, 2))
        bounds = weyl_interval(exact.smoothness, gap)
        row: dict[str, float | bool] = {
            "L": exact.smoothness,
            "L_nf4": nf4.smoothness,
            "weyl": bool(bounds.low - 1e-12 <= nf4.smoothness <= bounds.high + 1e-12),
        }
        for name, problem in (
            ("exact", exact),
            ("nf4", nf4),
            ("bfloat16", Rounded(exact.A, exact.partition)),
        ):
            full = stability_limit(problem.A, problem.partition, order="full").learning_rate
            cyclic = stability_limit(problem.A, problem.partition).learning_rate
            row[f"{name}_full_limit"], row[f"{name}_cyclic_limit"] = full, cyclic
            rate = float(np.sqrt(full * cyclic))
            # The window at equal eta, then at equal movement: full takes p steps where a block takes one.
            row[f"{name}_window"] = not _converges(problem, FULL, rate, start, cycles) and _converges(
                problem, CYCLIC, rate, start, cycles
            )
            near = 0.95 * cyclic
            row[f"{name}_window_at_equal_movement"] = not _converges(
                problem, FULL, near / p, start, cycles
            ) and _converges(problem, CYCLIC, near, start, cycles)
        rows.append(row)
    parts = [_weyl(rows), _window(rows), _same_window(rows), _movement(rows)]

    def draw(axis: Axes) -> None:
        for name, colour in (("exact", "exact"), ("nf4", "identity")):
            axis.plot(
                [r["L"] for r in rows],
                [float(r[f"{name}_cyclic_limit"]) / float(r[f"{name}_full_limit"]) for r in rows],
                "o",
                color=LIGHT[colour],
                label={"exact": "float64 weights", "nf4": "NF4 weights"}[name],
            )
        axis.axhline(1.0, color=LIGHT["muted"], linestyle="--")
        axis.set_xlabel("L")
        axis.set_ylabel("limit of cyclic over limit of full")
        axis.set_title("The window between both limits")
        axis.legend()

    return Result(parts, {"rows": rows}, draw)


def _count(rows: list[dict[str, float | bool]], key: str) -> int:
    return sum(bool(row[key]) for row in rows)


def _weyl(rows: list[dict[str, float | bool]]) -> Part:
    n, inside = len(rows), _count(rows, "weyl")
    moved = max(abs(float(r["L_nf4"]) / float(r["L"]) - 1) for r in rows)
    return Part(
        name="NF4 is a fixed perturbation within Weyl's bound (T11)",
        verdict="supported" if inside == n else "refuted",
        reason=f"{inside} of {n} inside; L moves by at most {percent(moved)}.",
        effect=moved,
        unit="relative change of L",
        n=n,
    )


def _window(rows: list[dict[str, float | bool]]) -> Part:
    n = len(rows)
    found = {name: _count(rows, f"{name}_window") for name in ("exact", "nf4", "bfloat16")}
    return Part(
        name="a window exists at equal learning rate (C6)",
        verdict="supported" if found["nf4"] == n else "refuted",
        reason=f"Full diverges and cyclic converges at the geometric mean of both limits on {found['nf4']} of {n} NF4 "
        f"problems, {found['exact']} with exact weights, {found['bfloat16']} with bfloat16 gradients.",
        effect=found["nf4"] / n,
        unit="share of problems",
        n=n,
    )


def _same_window(rows: list[dict[str, float | bool]]) -> Part:
    ratios = [
        np.log(float(r["nf4_cyclic_limit"]) / float(r["nf4_full_limit"]))
        - np.log(float(r["exact_cyclic_limit"]) / float(r["exact_full_limit"]))
        for r in rows
    ]
    decision = decide(ratios, "inside", 0.05, unit="problem")
    bounds = (
        f"[{fixed(decision.interval[0], 4)}, {fixed(decision.interval[1], 4)}]"
        if decision.interval
        else "none"
    )
    return Part(
        name="quantisation does not make the window",
        verdict=decision.verdict,
        reason=f"Its log width changes by {significant(decision.effect)} with NF4, 95 % interval {bounds}, "
        "against a margin of 0.05.",
        effect=decision.effect,
        interval=decision.interval,
        margin=0.05,
        n=decision.n,
        unit="change of log width",
    )


def _movement(rows: list[dict[str, float | bool]]) -> Part:
    n = len(rows)
    found = {name: _count(rows, f"{name}_window_at_equal_movement") for name in ("exact", "nf4", "bfloat16")}
    return Part(
        name="the window closes at equal movement",
        verdict="supported" if not any(found.values()) else "refuted",
        reason=f"At full's eta/p against cyclic's eta, 0.95 of cyclic's limit, full diverges where cyclic converges on "
        f"{found['nf4']} of {n} NF4 problems, {found['exact']} exact ones, {found['bfloat16']} with bfloat16.",
        effect=found["nf4"] / n,
        unit="share of problems",
        n=n,
    )


EXPERIMENT = Experiment(
    "quantised",
    "Quantised weights, arithmetic noise and the window of stability",
    "Is there a learning rate at which full backpropagation diverges and cyclic descent converges, is it made by "
    "quantisation, and does it survive when both move their parameters equally far?",
    ("T1", "T4", "T11"),
    body,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
