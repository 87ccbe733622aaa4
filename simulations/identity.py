"""The identity shortcut: bias, ascent, limits of its field, where it settles, and certified plans (T7, T4, T2)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

from bcd_theory.identity import bias_bound, plan_bias_bound, scalar_counterexample
from bcd_theory.linear import stability_limit
from bcd_theory.predictions import Prediction
from reports.decisions import decide
from reports.numbers import interval, percent, significant
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations import identity_nets as nets
from simulations.experiment import Experiment, Write, main
from simulations.problems.chain import Chain, ChainStack, random_chain
from simulations.problems.scalar import ScalarChain
from simulations.records import Record, Registered, Size, prediction
from simulations.runner import Arm, run

Array = NDArray[np.float64]
DEPTHS, NORMS, WIDTH = (1, 2, 4, 8, 16), (0.05, 0.2, 0.5), 8
LAYERS = 4  # of the linear chains, one adapter of rank 1 a layer
GRID = [float(b) for b in np.linspace(-3.0, 2.0, 51) if abs(b + 1) > 1e-9]
CHAINS = {"quick": 40, "standard": 200, "full": 1000}
FIELDS = {"quick": 8, "standard": 60, "full": 300}
CYCLES = {"quick": 2000, "standard": 6000, "full": 12000}
FACTORS = (0.5, 0.98, 1.02)


def chain(seed: int, i: int, mode: str) -> Chain:
    """Chain i, branch norms from 0.1 to 1.5."""
    rng = np.random.default_rng([seed, 4, i])
    return random_chain(LAYERS, 6, 1, float(rng.uniform(0.1, 1.5)), mode, rng)


# --- measure and predict ----------------------------------------------------------------------------------------


def measure(size: Size, seed: int) -> dict[str, Any]:
    """Of each linear chain dh_N/dx, what the shortcut takes for it, and the target; of the nets see `identity_nets`."""
    chains = [chain(seed, i, "identity") for i in range(FIELDS[size])]
    linear = [{"true": c.true, "surrogate": c.surrogate, "target": c.target} for c in chains]
    return {"depths": DEPTHS, "norms": NORMS, "chains": linear, **nets.measure(size, seed)}


def predict(measured: Mapping[str, Any]) -> Sequence[Prediction]:
    bounds: dict[str, list[float]] = {"identity": [], "mlp": []}
    for depth in measured["depths"]:
        for norm in measured["norms"]:
            both = np.full(depth, norm)
            bounds["identity"].append(bias_bound(np.concatenate([both, both])))
            bounds["mlp"].append(plan_bias_bound(both, both, ["mlp"] * depth))
    limits, exact, left, lost = [], [], [], []
    for entry in measured["chains"]:
        r, s, y = (np.array(entry[name]) for name in ("true", "surrogate", "target"))
        blocks = [[layer] for layer in range(r.shape[1])]
        limits.append(stability_limit(r.T @ r, blocks, field=s.T @ r).learning_rate)
        exact.append(stability_limit(r.T @ r, blocks).learning_rate)
        x = np.linalg.solve(s.T @ r, s.T @ y)
        best = np.linalg.lstsq(r, y, rcond=None)[0]
        f, lowest = (float(0.5 * np.sum((r @ z - y) ** 2)) for z in (x, best))
        left.append(float(np.linalg.norm(r.T @ (r @ x - y)) / np.linalg.norm(r.T @ y)))
        lost.append((f - lowest) / (float(0.5 * np.sum(y**2)) - lowest))
    ascends = [scalar_counterexample(0.3, b, 1.0) for b in GRID]
    affine = "additive adapters, squared loss: the field is S^T (R x - y)"
    return [
        *(prediction(f"bias/{mode}", values, "T7", unit="top gradients") for mode, values in bounds.items()),
        prediction("scalar-sign", [float(np.sign(g.true * g.surrogate)) for g in ascends], "T7"),
        prediction("field-limit", limits, "T4", assumes=affine),
        prediction("exact-limit", exact, "T4", assumes="the same chains in mode exact"),
        prediction("gradient-left", left, "T4", "T7", assumes=affine, unit="first true gradient"),
        prediction("loss-left", lost, "T4", "T7", assumes=affine, unit="share of the first excess loss"),
        *nets.predict(measured),
    ]


# --- run --------------------------------------------------------------------------------------------------------


def perform(registered: Registered, write: Write) -> None:
    for row in _bias(CHAINS[registered.size], registered.seed):
        write(row)
    for layers in (2, 4):
        write({"kind": "scalar", "layers": layers, **_scalar(layers, registered.seed)})
    for row in _fields(registered):
        write(row)
    nets.perform(registered, write)


def _bias(count: int, seed: int) -> list[dict[str, Any]]:
    """Product of `depth` layers (I + M)(I + A), against the identity and against the product of the I + M."""
    rows = []
    eye = np.eye(WIDTH)
    for depth in DEPTHS:
        for norm in NORMS:
            rng = np.random.default_rng([seed, depth, int(1000 * norm)])
            draws = rng.normal(size=(2, depth, count, WIDTH, WIDTH))
            draws *= norm / np.linalg.norm(draws, 2, axis=(-2, -1), keepdims=True)
            whole = mlp = np.broadcast_to(eye, (count, WIDTH, WIDTH))
            for attention, dense in zip(*draws, strict=True):
                whole, mlp = (eye + dense) @ (eye + attention) @ whole, (eye + dense) @ mlp
            measured = {"identity": whole - eye, "mlp": whole - mlp}
            for mode, difference in measured.items():
                norms = np.linalg.norm(difference, 2, axis=(-2, -1))
                row = {"kind": "bias", "mode": mode, "depth": depth, "norm": norm, "chains": count}
                rows.append({**row, "mean": float(norms.mean()), "largest": float(norms.max())})
    return rows


def _scalar(layers: int, seed: int) -> dict[str, Any]:
    """Identity steps on T7's scalar chain from many starts; each step's change of loss against the sign of the product
    of the skipped layers at that moment. `first`: changes of the very first step, along GRID for two layers."""
    rng = np.random.default_rng([seed, 6, layers])
    start = rng.uniform(-3.0, 2.0, size=(layers, len(GRID)))
    if layers == 2:
        start = np.stack([np.full(len(GRID), 0.3), np.array(GRID)])
    problem = ScalarChain(layers, x=2.0)
    states = [torch.from_numpy(start)]
    losses = run(
        problem, Arm("identity"), start, 0.01, 5 * layers, observe=lambda t, x, m: states.append(x.clone())
    ).losses
    wrong = steps = ascents = 0
    for t in range(5 * layers):
        above = torch.prod(1 + states[t][t % layers + 1 :], 0).numpy()
        change = losses[t + 1] - losses[t]
        seen = np.abs(change) > 1e-12 * (1 + np.abs(losses[t]))
        steps += int(seen.sum())
        ascents += int((seen & (change > 0)).sum())
        wrong += int((seen & ((change > 0) != (above < 0))).sum())
    return {
        "steps": steps,
        "ascents": ascents,
        "wrong": wrong,
        "first": [float(c) for c in losses[1] - losses[0]],
    }


def _fields(registered: Registered) -> list[dict[str, Any]]:
    """Identity runs at 0.5, 0.98 and 1.02 of each chain's predicted limit (at small rates where it is 0), and an exact
    one at half its own limit."""
    count, cycles = FIELDS[registered.size], CYCLES[registered.size]
    limits, halves = (
        np.array([value or 0.0 for value in registered.predicted_values(name)])
        for name in ("field-limit", "exact-limit")
    )
    rates = np.where(limits > 0, limits, 0.05)[:, None] * np.array(FACTORS)
    marks = {LAYERS * (cycles // 2): 0, LAYERS * cycles: 1}
    last = [torch.zeros(LAYERS, rates.size, dtype=torch.float64)]
    moves = np.zeros((2, rates.size))

    def observe(t: int, x: torch.Tensor, m: torch.Tensor | None) -> None:
        if t + 1 + LAYERS in marks:
            last[0] = x.clone()
        elif t + 1 in marks:  # movement over one cycle
            moves[marks[t + 1]] = (x - last[0]).norm(dim=0).numpy()

    steps = LAYERS * cycles
    surrogate, control = (
        [chain(registered.seed, i, mode) for i in range(count)] for mode in ("identity", "exact")
    )
    start = np.random.default_rng([registered.seed, 5]).normal(size=(LAYERS, count))
    x = run(
        ChainStack(surrogate),
        Arm("identity"),
        np.repeat(start, len(FACTORS), 1),
        rates.ravel(),
        steps,
        record_every=steps,
        observe=observe,
    ).x
    exact = run(ChainStack(control), Arm("exact"), start, 0.5 * halves, steps, record_every=steps).x
    middle, end = moves.reshape(2, count, len(FACTORS))
    falls = np.isfinite(end) & ((end < middle) | (end < 1e-10))
    origin, rows = torch.zeros(LAYERS, 1, dtype=torch.float64), []
    for i, (problem, other) in enumerate(zip(surrogate, control, strict=True)):
        at, first = x[:, len(FACTORS) * i, None], problem.true_gradient(origin).norm()
        lowest = other.value(
            torch.from_numpy(np.linalg.lstsq(other.true, other.target, rcond=None)[0])[:, None]
        )
        left = float(problem.block_gradients(at).norm() / first)
        settled = bool(falls[i, 0]) and left < 1e-9
        rows.append(
            {
                "kind": "field",
                "chain": i,
                "falls": falls[i].tolist(),
                "settled": settled,
                "gradient_left": float(problem.true_gradient(at).norm() / first) if settled else None,
                "loss_left": float((problem.value(at) - lowest) / (problem.value(origin) - lowest))
                if settled
                else None,
                "exact_left": float(other.true_gradient(exact[:, i, None]).norm() / first),
            }
        )
    return rows


# --- judge ------------------------------------------------------------------------------------------------------


def judge(record: Record) -> list[Part]:
    return [
        *(_below(record, mode) for mode in ("identity", "mlp")),
        _sign(record),
        _limit(record),
        _where(record),
        _far(record),
        _control(record),
        *nets.judge(record),
    ]


def _below(record: Record, mode: str) -> Part:
    rows = [row for row in record.of("bias") if row["mode"] == mode]
    pairs = [
        (row, bound)
        for row, bound in zip(rows, record.predicted_values(f"bias/{mode}"), strict=True)
        if bound
    ]
    broken = sum(row["largest"] > bound * (1 + 1e-12) for row, bound in pairs)
    tight = max(row["largest"] / bound for row, bound in pairs)
    n = sum(row["chains"] for row in rows)
    return Part(
        name=f"bias of mode {mode} below T7's bound",
        verdict="refuted" if broken else "supported",
        reason=f"{broken} of {len(pairs)} pairs of depth and branch norm have a chain above the bound, of {n} chains; "
        f"the largest bias reaches {percent(tight)} of it.",
        effect=float(broken),
        unit="pairs above",
        n=n,
    )


def _sign(record: Record) -> Part:
    rows = record.of("scalar")
    wrong, steps = sum(row["wrong"] for row in rows), sum(row["steps"] for row in rows)
    signs = record.predicted_values("scalar-sign")
    first = sum(
        (change > 0) != (sign is not None and sign < 0)
        for change, sign in zip(rows[0]["first"], signs, strict=True)
    )
    return Part(
        name="identity ascends where the skipped layers turn the sign",
        verdict="refuted" if wrong or first else "supported",
        reason=f"{wrong} of {steps} steps on chains of two and four scalar layers on the wrong side, "
        f"{sum(row['ascents'] for row in rows)} of them ascents; of the first steps, b < -1 predicted beforehand, "
        f"{first} of {len(signs)}.",
        effect=float(wrong + first),
        unit="steps",
        n=steps,
    )


def _limit(record: Record) -> Part:
    limits = record.predicted_values("field-limit")
    right = checked = unstable = 0
    for row, limit in zip(record.of("field"), limits, strict=True):
        unstable += not limit
        for factor, falls in zip(FACTORS, row["falls"], strict=True):
            checked += 1
            right += falls == (factor < 1 and bool(limit))
    return Part(
        name="limit of the identity field (T4)",
        verdict="supported" if right == checked else "refuted",
        reason=f"{right} of {checked} runs at 0.5, 0.98 and 1.02 of the limit settle or grow as predicted; {unstable} "
        f"of {len(limits)} chains have the limit 0 and grow at every rate tried.",
        effect=right / checked,
        unit="share of runs",
        n=len(limits),
    )


def _settled(record: Record) -> list[tuple[dict[str, Any], float, float]]:
    said = zip(record.predicted_values("gradient-left"), record.predicted_values("loss-left"), strict=True)
    return [
        (row, float(g or 0.0), float(f or 0.0))
        for row, (g, f) in zip(record.of("field"), said, strict=True)
        if row["settled"]
    ]


def _where(record: Record) -> Part:
    found = _settled(record)
    worst = max((abs(row["gradient_left"] / said - 1) for row, said, _ in found), default=None)
    return Part(
        name="identity settles where its affine field vanishes (T4)",
        verdict="inconclusive" if worst is None else "supported" if worst < 1e-3 else "refuted",
        reason=f"On {len(found)} of {len(record.of('field'))} chains that settled, the true gradient left there is the "
        f"predicted one within {percent(worst, 4)}.",
        effect=worst,
        unit="relative error",
        margin=1e-3,
        n=len(found),
    )


def _far(record: Record) -> Part:
    found = _settled(record)
    shares = [row["gradient_left"] for row, _, _ in found]
    # Shares scatter over orders of magnitude: the mean of their logarithms is the typical one.
    decision = decide([float(np.log10(max(share, 1e-12))) for share in shares], "above", -2.0, unit="chain")
    typical = None if decision.effect is None else 10**decision.effect
    bounds = None if decision.interval is None else tuple(10**end for end in decision.interval)
    lost = float(np.median([row["loss_left"] for row, _, _ in found])) if found else None
    return Part.decided(
        name="where identity settles the true gradient is not zero",
        decision=decision,
        reason=f"{percent(typical)} of the first true gradient (geometric mean), 95 % interval "
        f"{interval(bounds)}; {percent(lost)} of the reducible loss is left (median of {len(found)} chains).",  # type: ignore[arg-type]
        margin=-2.0,
        unit="log10 of the share of the first gradient",
    )


def _control(record: Record) -> Part:
    worst = max(row["exact_left"] for row in record.of("field"))
    return Part(
        name="exact mode reaches a stationary point",
        verdict="supported" if worst < 1e-6 else "refuted",
        reason=f"The largest true gradient left is {significant(worst)} of the first, on "
        f"{len(record.of('field'))} chains.",
        effect=worst,
        margin=1e-6,
        unit="share of the first gradient",
        n=len(record.of("field")),
    )


# --- draw -------------------------------------------------------------------------------------------------------


def draw(record: Record, axes: Sequence[Axes]) -> None:
    bounds = record.predicted_values("bias/identity")
    rows = [row for row in record.of("bias") if row["mode"] == "identity"]
    for norm, colour in zip(NORMS, ("exact", "frozen", "identity"), strict=True):
        mine = [(row, bound) for row, bound in zip(rows, bounds, strict=True) if row["norm"] == norm]
        depths = [row["depth"] for row, _ in mine]
        axes[0].loglog(
            depths, [row["mean"] for row, _ in mine], "o-", color=LIGHT[colour], label=f"branch norm {norm:g}"
        )
        axes[0].loglog(depths, [bound for _, bound in mine], "--", color=LIGHT[colour], linewidth=1)
    axes[0].set_xticks(DEPTHS, [str(depth) for depth in DEPTHS])
    axes[0].minorticks_off()
    axes[0].set_xlabel("layers skipped")
    axes[0].set_ylabel("bias, in top gradients (dashed: bound)")
    axes[0].set_title("Bias of identity mode")
    axes[0].legend(loc="upper left")
    plans = record.of("plan")
    # All layers identity costs nothing, all exact costs 1.
    axes[1].plot(
        [0.0] * len(plans), [row["identity"] for row in plans], "o", color=LIGHT["identity"], label="identity"
    )
    axes[1].plot(
        [nets.MLP_COST] * len(plans), [row["mlp"] for row in plans], "s", color=LIGHT["mlp"], label="mlp"
    )
    axes[1].plot(
        [row["cost"] for row in plans],
        [row["cosine"] for row in plans],
        "D",
        color=LIGHT["certified"],
        label="certified",
    )
    axes[1].plot([1.0], [1.0], "^", color=LIGHT["exact"], label="exact")
    axes[1].axhline(nets.MIN_COSINE, color=LIGHT["muted"], linewidth=1, linestyle="--")
    axes[1].set_xlabel("backward cost of idle layers, of exact's")
    axes[1].set_ylabel("least adapter cosine of the block")
    axes[1].set_title("Plans on SwiGLU nets")
    axes[1].legend(loc="lower right")


EXPERIMENT = Experiment(
    "identity",
    "The identity shortcut and certified plans",
    "The shortcut's bias grows with depth and branch norm, within its bound. It ascends where the skipped layers turn "
    "the sign of a block's gradient, on scalar chains and on transformer nets alike. Its field has its own limit of "
    "stability, which may be zero, and where it settles the true gradient is not zero, by as much as the affine field "
    "says. Certified plans keep every block's cosine above one half at a part of mode exact's cost; on other batches "
    "nothing guarantees that, and training shows what each mode misses.",
    ("T2", "T4", "T7", "T12"),
    measure,
    predict,
    perform,
    judge,
    draw,
    panels=2,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
