"""A quantised base as a fixed perturbation, rounding as noise, and C6's window of stability (T1, T4, T9, T11)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

from bcd_theory.linear import stability_limit
from bcd_theory.momentum import equivalent_learning_rate
from bcd_theory.partition import equal_blocks
from bcd_theory.predictions import Prediction
from bcd_theory.quantization import weyl_interval
from reports.decisions import SEEDS_NEEDED, Decision, Verdict, combine, decide
from reports.numbers import fixed, percent, significant
from reports.svg import LIGHT, legend
from reports.verdicts import Part
from simulations.experiment import Experiment, Write, main
from simulations.problems.least_squares import LeastSquares, random_least_squares
from simulations.problems.residual import ResidualNet, stack, swiglu_net, tanh_net
from simulations.records import Record, Registered, Size, prediction
from simulations.runner import Arm, run
from simulations.windows import FINE, Instances, first_failure

Array = NDArray[np.float64]
P = 4
BETA2 = 0.999
MARGIN = float(np.log2(FINE))  # octaves: one step of the grid
EXPLAINED = 0.5  # octaves within which T9's factor must hit the window to be its explanation
N = 12
LAWS = {"quick": 8, "standard": 40, "full": 150}
SEEDS = {"quick": 5, "standard": 6, "full": 12}
STEPS = {"quick": 48, "standard": 200, "full": 400}


@dataclass(frozen=True)
class Selective:
    """An LCSB arm, and the first beta of AdamW in it and in the full run that it is compared with."""

    name: str
    mode: str
    idle: Literal["momentum", "frozen"]
    beta1: float = 0.9

    def arm(self, full: bool) -> Arm:
        order, idle = ("full", "momentum") if full else ("cyclic", self.idle)
        return Arm(self.name, "adamw", idle, order, betas=(self.beta1, BETA2))  # type: ignore[arg-type]


PAPER = "identity, idle momentum"
ARMS = (
    Selective(PAPER, "identity", "momentum"),
    Selective("mlp, idle momentum", "mlp", "momentum"),
    Selective("exact, idle momentum", "exact", "momentum"),
    Selective("exact, idle frozen", "exact", "frozen"),
    Selective("exact, idle frozen, beta1 = 0", "exact", "frozen", 0.0),
)
QUICK = (PAPER, "exact, idle momentum", "exact, idle frozen")
PROBLEMS = ("least squares", "tanh net", "SwiGLU net")
MODES = {
    "least squares": ("exact",),
    "tanh net": ("exact", "identity"),
    "SwiGLU net": ("exact", "identity", "mlp"),
}


def arms_on(size: Size, problem: str | None = None) -> list[Selective]:
    """The arms of a size; those that a problem knows (least squares has no layers)."""
    arms = [arm for arm in ARMS if size != "quick" or arm.name in QUICK]
    return [arm for arm in arms if problem is None or arm.mode in MODES[problem]]


Variant = tuple[str, str]  # base, arithmetic
EXACT, NF4, ROUNDED = ("exact", "float64"), ("nf4", "float64"), ("nf4", "bfloat16")
VARIANTS: tuple[Variant, ...] = (EXACT, NF4, ROUNDED)


# --- measure and predict ----------------------------------------------------------------------------------------


def law_problems(size: Size, seed: int) -> tuple[LeastSquares, LeastSquares]:
    """The same least squares on exact weights and on NF4 weights."""
    exact = random_least_squares([np.random.default_rng([seed, 11, i]) for i in range(LAWS[size])], N, P)
    return exact, exact.quantised()


def measure(size: Size, seed: int) -> dict[str, Any]:
    """Hessian W^T W/rows and linear term W^T y/rows of each least squares problem, on exact and on NF4 weights."""
    found: dict[str, Any] = {}
    for base, problem in zip(("exact", "nf4"), law_problems(size, seed), strict=True):
        found[f"hessian/{base}"] = problem.hessians
        found[f"linear/{base}"] = np.einsum("irn,ir->in", problem.W, problem.y) / problem.W.shape[1]
    return found


def predict(measured: Mapping[str, Any]) -> Sequence[Prediction]:
    blocks, said = equal_blocks(N, P), []
    minimisers: dict[str, list[Array]] = {}
    for base in ("exact", "nf4"):
        hessians = [np.array(h) for h in measured[f"hessian/{base}"]]
        linear = [np.array(b) for b in measured[f"linear/{base}"]]
        minimisers[base] = [np.linalg.solve(h, b) for h, b in zip(hessians, linear, strict=True)]
        for order in ("full", "cyclic"):
            limits = [stability_limit(h, blocks, order=order).learning_rate for h in hessians]  # type: ignore[arg-type]
            said.append(
                prediction(f"limit/{base}/{order}", limits, "T4", assumes="plain descent on a quadratic")
            )
    pairs = [
        (np.array(e), np.array(q))
        for e, q in zip(measured["hessian/exact"], measured["hessian/nf4"], strict=True)
    ]
    intervals = [
        weyl_interval(float(np.linalg.norm(e, 2)), float(np.linalg.norm(q - e, 2))) for e, q in pairs
    ]
    moved = zip(minimisers["exact"], minimisers["nf4"], strict=True)
    said += [
        prediction("smoothness/nf4/low", [bound.low for bound in intervals], "T11"),
        prediction("smoothness/nf4/high", [bound.high for bound in intervals], "T11"),
        prediction(
            "minimiser-shift", [float(np.linalg.norm(q - e)) for e, q in moved], "T11", assumes="closed form"
        ),
    ]
    for arm in ARMS:
        said.append(
            prediction(
                f"movement/{arm.name}",
                -np.log2(equivalent_learning_rate(1.0, arm.idle, P, (arm.beta1, BETA2))),
                "T9",
                assumes="constant gradient, no transient",
                unit="octaves",
            )
        )
    return said


# --- run --------------------------------------------------------------------------------------------------------


def perform(registered: Registered, write: Write) -> None:
    for row in _laws(registered):
        write(row)
    for name in PROBLEMS:
        for row in _edges(registered, name):
            write(row)


def _laws(registered: Registered) -> list[dict[str, Any]]:
    """Plain descent: between both limits of T4 on three variants, and where it settles."""
    exact, nf4 = law_problems(registered.size, registered.seed)
    count, cycles = exact.instances, 300 if registered.size == "quick" else 600
    flags = np.ones(count, dtype=np.bool_)
    rounded = LeastSquares(nf4.W, nf4.y, nf4.partition, flags)
    quiet = LeastSquares(exact.W, exact.y, exact.partition, flags)
    rows: list[dict[str, Any]] = []
    for (base, arithmetic), problem in (
        (EXACT, exact),
        (NF4, nf4),
        (("exact", "bfloat16"), quiet),
        (ROUNDED, rounded),
    ):
        limits = {
            order: np.array(registered.predicted_values(f"limit/{base}/{order}"), float)
            for order in ("full", "cyclic")
        }
        between = np.sqrt(limits["full"] * limits["cyclic"])
        minimisers, lowest = (
            torch.from_numpy(problem.minimisers),
            problem.value(torch.from_numpy(problem.minimisers)),
        )
        ends = {}
        for order in ("full", "cyclic"):
            found = run(
                problem, Arm(order, order=order), np.zeros((N, count)), between, cycles * P, record_every=P
            )
            ends[order] = (found.losses[-1] - lowest.numpy()) / (found.losses[0] - lowest.numpy())
        settled = run(
            problem,
            Arm("cyclic"),
            np.zeros((N, count)),
            0.5 * limits["cyclic"],
            cycles * P,
            record_every=cycles * P,
        ).x
        truth = torch.from_numpy(exact.minimisers)
        for i in range(count):
            rows.append(
                {
                    "kind": "law",
                    "base": base,
                    "arithmetic": arithmetic,
                    "problem": i,
                    "smoothness": float(np.linalg.norm(problem.hessians[i], 2)),
                    "full_grows": bool(not ends["full"][i] < 1e3),
                    "cyclic_falls": bool(ends["cyclic"][i] < 1e-2),
                    "from_own_minimiser": float((settled - minimisers)[:, i].norm()),
                    "from_exact_minimiser": float((settled - truth)[:, i].norm()),
                }
            )
    return rows


def net_problem(name: str, seed: int, seeds: int) -> tuple[LeastSquares | ResidualNet, Array]:
    """(instances: every seed on each variant, their starts). A seed fixes weights, data, teacher and adapter start."""
    rngs = [np.random.default_rng([seed, PROBLEMS.index(name), i]) for i in range(seeds)]
    flags = [arithmetic == "bfloat16" for _, arithmetic in VARIANTS]
    if name == "least squares":
        plain = random_least_squares(rngs, N, P)
        parts = [plain if base == "exact" else plain.quantised() for base, _ in VARIANTS]
        joined = LeastSquares(
            np.concatenate([part.W for part in parts]),
            np.concatenate([part.y for part in parts]),
            plain.partition,
            np.repeat(flags, seeds),
        )
        return joined, np.zeros((N, joined.instances))
    net = (
        tanh_net(rngs, layers=8, width=8, inner=8, positions=16, layers_per_step=2)
        if name == "tanh net"
        else swiglu_net(
            rngs, layers=4, layers_per_step=1, width=6, inner=8, windows=3, tokens=4, rank=1, classes=6
        )
    )
    nets = [net if base == "exact" else net.quantised() for base, _ in VARIANTS]
    return stack(nets, flags), np.tile(net.start([seed * 1000 + i for i in range(seeds)]), len(VARIANTS))


def _edges(registered: Registered, name: str) -> list[dict[str, Any]]:
    seeds, steps = SEEDS[registered.size], STEPS[registered.size]
    problem, starts = net_problem(name, registered.seed, seeds)
    rows: list[dict[str, Any]] = []

    def keep(arm: Selective, full: bool) -> None:
        chosen: Instances = problem
        if isinstance(problem, ResidualNet):
            chosen = problem.with_mode("full" if full else arm.mode)
        edges = first_failure(chosen, arm.arm(full), starts, steps, needs_progress=not full)
        for number, edge in enumerate(edges):
            base, arithmetic = VARIANTS[number // seeds]
            rows.append(
                {
                    "kind": "edge",
                    "problem": name,
                    "arm": f"full, beta1 = {arm.beta1:g}" if full else arm.name,
                    "base": base,
                    "arithmetic": arithmetic,
                    "seed": number % seeds,
                    "limit": edge.limit,
                    "stable": edge.stable,
                    "failed": edge.failed,
                    "drop": edge.drop,
                }
            )

    arms = arms_on(registered.size, name)
    for beta1 in sorted({arm.beta1 for arm in arms}):
        keep(next(arm for arm in arms if arm.beta1 == beta1), True)
    for arm in arms:
        keep(arm, False)
    return rows


# --- judge ------------------------------------------------------------------------------------------------------


def windows(record: Record, problem: str, arm: Selective, variant: Variant) -> list[float]:
    """log2 of the rate at which LCSB first diverges or makes no progress over that at which full diverges, one a seed.

    Seeds without a limit in the grid's range are left out.
    """
    rows = [r for r in record.of("edge") if (r["problem"], r["base"], r["arithmetic"]) == (problem, *variant)]
    full = {r["seed"]: r for r in rows if r["arm"] == f"full, beta1 = {arm.beta1:g}"}
    found = []
    for row in rows:
        if row["arm"] == arm.name and row["limit"] and full[row["seed"]]["limit"]:
            found.append(float(np.log2(row["limit"] / full[row["seed"]]["limit"])))
    return found


def judge(record: Record) -> list[Part]:
    parts = [_weyl(record), _shift(record), _plain(record)]
    parts += [_claim(record, arm) for arm in arms_on(record.size)]
    parts += [_does_not_matter(record, "quantisation does not make the window", EXACT, NF4)]
    parts += [_does_not_matter(record, "bfloat16 gradients do not make the window", NF4, ROUNDED)]
    return parts + [_explained(record, arm) for arm in arms_on(record.size)]


def _laws_of(record: Record, *variant: str) -> list[dict[str, Any]]:
    return [r for r in record.of("law") if (r["base"], r["arithmetic"]) == variant]


def _weyl(record: Record) -> Part:
    rows, start = _laws_of(record, *NF4), _laws_of(record, *EXACT)
    low, high = (record.predicted_values(f"smoothness/nf4/{end}") for end in ("low", "high"))
    inside = sum(
        lo - 1e-12 <= row["smoothness"] <= hi + 1e-12
        for row, lo, hi in zip(rows, low, high, strict=True)
        if lo is not None and hi is not None
    )
    moved = max(abs(q["smoothness"] / e["smoothness"] - 1) for q, e in zip(rows, start, strict=True))
    return Part(
        name="NF4 moves L within Weyl's bound (T11)",
        verdict="supported" if inside == len(rows) else "refuted",
        reason=f"{inside} of {len(rows)} inside; L moves by at most {percent(moved)}.",
        effect=moved,
        unit="relative change of L",
        n=len(rows),
    )


def _shift(record: Record) -> Part:
    said = [value for value in record.predicted_values("minimiser-shift") if value]
    nf4, quiet = _laws_of(record, *NF4), _laws_of(record, "exact", "bfloat16")
    off = max(abs(row["from_exact_minimiser"] / shift - 1) for row, shift in zip(nf4, said, strict=True))
    left = max(row["from_exact_minimiser"] / shift for row, shift in zip(quiet, said, strict=True))
    return Part(
        name="NF4 is a fixed perturbation, rounded gradients are not (T11)",
        verdict="supported" if off < 1e-2 and left < 1e-2 else "refuted",
        reason=f"On NF4 plain descent settles where the closed form says, within {percent(off, 3)} of the shift "
        f"(median {significant(float(np.median(said)))}); with gradients rounded to bfloat16 it settles at the exact "
        f"weights' minimiser, within {percent(left, 3)} of that shift.",
        effect=off,
        unit="relative error of the shift",
        margin=1e-2,
        n=len(said),
    )


def _plain(record: Record) -> Part:
    counts = {v: sum(r["full_grows"] and r["cyclic_falls"] for r in _laws_of(record, *v)) for v in VARIANTS}
    n = len(_laws_of(record, *NF4))
    return Part(
        name="plain descent has the window that T4 predicts",
        verdict="supported" if counts[NF4] == n else "refuted",
        reason="Without momentum, at the geometric mean of both predicted limits, full diverges and cyclic converges "
        f"on {counts[NF4]} of {n} NF4 problems, {counts[EXACT]} with exact weights, {counts[ROUNDED]} with NF4 and "
        "bfloat16.",
        effect=counts[NF4] / n,
        unit="share of problems",
        n=n,
    )


def _both(record: Record, problem: str, arm: Selective) -> tuple[Decision, Decision]:
    """Window at equal learning rate, and at equal movement: full then runs at the rate that T9 gives."""
    found = windows(record, problem, arm, NF4)
    wide = record.predicted(f"movement/{arm.name}")
    return decide(found, "above", MARGIN), decide([value - wide for value in found], "above", MARGIN)


def _claim(record: Record, arm: Selective) -> Part:
    """C6's rule: supported if both windows exist on a problem, refuted if on none."""
    each: list[Verdict] = []
    said = []
    effects = []
    for problem in PROBLEMS:
        if arm.mode not in MODES[problem]:
            continue
        rate, movement = _both(record, problem, arm)
        each.append(combine([rate.verdict, movement.verdict]))
        effects.append(movement.effect if movement.effect is not None else float("nan"))
        said.append(f"{problem} {_octaves(rate)} at equal rate, {_octaves(movement)} at equal movement")
    verdict: Verdict = "inconclusive"
    if "supported" in each:
        verdict = "supported"
    elif all(one == "refuted" for one in each):
        verdict = "refuted"
    known = [value for value in effects if np.isfinite(value)]
    return Part(
        name=f"C6: full diverges where LCSB does not ({arm.name})",
        verdict=verdict,
        reason="Limit over full's on NF4, in octaves: "
        + "; ".join(said)
        + f". A window is at least {MARGIN:g}.",
        effect=max(known) if known else None,
        unit="octaves at equal movement, best problem",
        margin=MARGIN,
        n=SEEDS[record.size],
        counts=arm.name == PAPER,
    )


def _octaves(decision: Decision) -> str:
    if decision.effect is None or decision.interval is None:
        return "none"
    low, high = decision.interval
    return f"{fixed(decision.effect)} [{fixed(low)}, {fixed(high)}]"


def _does_not_matter(record: Record, name: str, without: Variant, having: Variant) -> Part:
    differences = []
    for problem in PROBLEMS:
        pairs = [
            (windows(record, problem, arm, without), windows(record, problem, arm, having))
            for arm in arms_on(record.size, problem)
        ]
        whole = [(a, b) for a, b in pairs if len(a) == len(b) == SEEDS[record.size]]
        if whole:
            differences += list(np.mean([np.subtract(b, a) for a, b in whole], axis=0))
    decision = decide([float(d) for d in differences], "inside", MARGIN, needed=SEEDS_NEEDED)
    return Part.decided(
        name=name,
        decision=decision,
        reason=f"The width of the window, averaged over the arms, changes by {_octaves(decision)} octaves, against one "
        f"step of the grid ({MARGIN:g}).",
        margin=MARGIN,
        unit="octaves",
    )


def _explained(record: Record, arm: Selective) -> Part:
    """Rival explanation (a): if movement alone decided, the limits would stand in T9's ratio."""
    wide = record.predicted(f"movement/{arm.name}")
    found = [
        v - wide for name in PROBLEMS if arm.mode in MODES[name] for v in windows(record, name, arm, NF4)
    ]
    decision = decide(found, "inside", EXPLAINED)
    return Part.decided(
        name=f"movement alone sets the limit ({arm.name})",
        decision=decision,
        reason=f"Then LCSB's limit would lie {fixed(wide)} octaves above full's (T9); it lies "
        f"{_octaves(decision)} octaves from there.",
        margin=EXPLAINED,
        unit="octaves",
        counts=False,
    )


# --- draw -------------------------------------------------------------------------------------------------------


def draw(record: Record, axes: Sequence[Axes]) -> None:
    labels, at = [], 0
    for problem in PROBLEMS:
        for arm in arms_on(record.size, problem):
            wide = record.predicted(f"movement/{arm.name}")
            colour = LIGHT["frozen" if arm.idle == "frozen" else arm.mode]
            for axis, shift in ((axes[0], 0.0), (axes[1], wide)):
                for variant, mark, offset in ((EXACT, "o", -0.2), (NF4, "s", 0.0), (ROUNDED, "^", 0.2)):
                    values = [value - shift for value in windows(record, problem, arm, variant)]
                    face = colour if variant == NF4 else "none"
                    axis.plot(
                        values,
                        [at + offset] * len(values),
                        mark,
                        color=colour,
                        markerfacecolor=face,
                        markersize=4,
                    )
            short = arm.name.replace(", idle", "").replace("beta1 = 0", "β1=0")
            labels.append(f"{problem.removesuffix(' net')}: {short}")
            at += 1
    for axis, title in ((axes[0], "Equal learning rate"), (axes[1], "Equal movement (T9)")):
        axis.axvline(0.0, color=LIGHT["muted"], linewidth=1)
        axis.axvspan(-MARGIN, MARGIN, color=LIGHT["grid"], zorder=0)
        axis.set_xlabel("limit over full's, octaves")
        axis.set_title(title)
        axis.set_ylim(at - 0.5, -0.5)
    axes[0].set_yticks(range(at), labels)
    beside = axes[0].get_position().y0 == axes[1].get_position().y0
    axes[1].set_yticks(range(at), [""] * at if beside else labels)
    for (mark, face), label in zip(
        (("o", "none"), ("s", LIGHT["muted"]), ("^", "none")),
        ("exact weights", "NF4 weights", "NF4, gradients in bfloat16"),
        strict=True,
    ):
        axes[0].plot([], [], mark, color=LIGHT["muted"], markerfacecolor=face, markersize=4, label=label)
    legend(axes[0].figure, axes[0], 3, not beside)  # type: ignore[arg-type]


EXPERIMENT = Experiment(
    "quantised",
    "Quantised weights, rounded gradients and the window of stability",
    "Is there a learning rate at which full backpropagation diverges and layer-cyclic training does not, on 4-bit "
    "weights (C6)? Limits under AdamW are measured on least squares, tanh nets and SwiGLU transformer nets with "
    "adapters, by the rule for divergence of real runs, and compared at equal learning rate and at equal movement "
    "(T9). One point a seed; a point right of the band is a window. The verdict is the claim's for the paper's arm, "
    "together with the laws beside it.",
    ("T1", "T4", "T9", "T11"),
    measure,
    predict,
    perform,
    judge,
    draw,
    panels=2,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
