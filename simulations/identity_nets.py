"""The identity shortcut and certified plans on residual nets: bias, ascent, cost, training (T7, T2, T12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bcd_theory.identity import bias_bound, gradient_flow_bound
from bcd_theory.partition import Partition, contiguous_blocks
from bcd_theory.predictions import Prediction
from reports.decisions import decide
from reports.numbers import fixed, interval, percent, significant
from reports.verdicts import Part
from simulations.experiment import Write
from simulations.problems.certify import certified, cheapest, plan_cosines, uniform
from simulations.problems.residual import ResidualNet, cosines, stack, swiglu_net, tanh_net
from simulations.records import Record, Registered, Size, prediction
from simulations.runner import Arm, run

Array = NDArray[np.float64]
MIN_COSINE = 0.5
FRESH = 8  # batches that a plan was not made from
TINY = 1e-9  # learning rate of a step whose sign the gradient alone decides
VISIBLE = 1e-13  # relative change of the loss
CLEAR = 0.02  # cosines nearer to 0 than this predict no sign
RATE = 2.0**-7
NETS = {"quick": 4, "standard": 12, "full": 40}
STEPS = {"quick": 60, "standard": 240, "full": 600}
REFRESH = 30
# Matrix elements of SwiGLU's three maps over those of a whole layer with attention's four square ones.
MLP_COST = 3 * 12 * 8 / (3 * 12 * 8 + 4 * 8 * 8)
SHAPE: dict[str, Any] = {"layers": 6, "width": 8, "inner": 12, "windows": 4, "tokens": 6, "weight_norm": 2.5}


def _generator(seed: int, *path: int) -> np.random.Generator:
    return np.random.default_rng([seed, 31, *path])


def contracting_net(seed: int, i: int) -> tuple[ResidualNet, Tensor]:
    """A tanh net, and adapters away from their start, one run."""
    net = tanh_net([_generator(seed, i)], branch_norm=float(_generator(seed, i, 1).uniform(0.05, 0.6)))
    x = 0.15 * _generator(seed, i, 2).normal(size=(net.partition.n, 1))
    return net, torch.from_numpy(x)


def steep_nets(seed: int, count: int) -> tuple[ResidualNet, Tensor]:
    """SwiGLU nets with branches that are no contractions, one layer a block, and adapters away from their start."""
    rngs = [_generator(seed, 200 + i) for i in range(count)]
    net = swiglu_net(
        rngs, layers=8, width=8, inner=12, windows=1, tokens=4, weight_norm=4.0, layers_per_step=1
    )
    x = 0.3 * _generator(seed, 3).normal(size=(net.partition.n, count))
    return net, torch.from_numpy(x)


def transformer_nets(seed: int, count: int, batch: int = 0) -> ResidualNet:
    """SwiGLU nets on a batch; nets of one number differ in their batch alone."""
    rngs = [_generator(seed, 100 + i) for i in range(count)]
    return swiglu_net(rngs, **SHAPE, data=[_generator(seed, 100 + i, 1 + batch) for i in range(count)])


def starts(net: ResidualNet, seed: int) -> Array:
    return net.start([seed * 100 + i for i in range(net.instances)])


def trained(net: ResidualNet, seed: int, steps: int = 30) -> Tensor:
    """Adapters after a few steps of full backpropagation: at the start half of the gradients are zero."""
    return run(net, Arm("full", "adamw", order="full"), starts(net, seed), RATE, steps, record_every=steps).x


def alone(net: ResidualNet, j: int) -> ResidualNet:
    """The same net with block j first, so that one cyclic step is a step on it."""
    found = replace(net)
    blocks = list(net.partition)
    found.partition = Partition([*blocks[j:], *blocks[:j]])
    return found


# --- measure and predict ----------------------------------------------------------------------------------------


def measure(size: Size, seed: int) -> dict[str, Any]:
    """Lipschitz constants of the branches of tanh nets; cosines of each block's gradient on SwiGLU nets, by mode."""
    lipschitz, found = [], []
    for i in range(NETS[size]):
        net, x = contracting_net(seed, i)
        maps = [net.merged(x, layer) for layer in range(net.layers)]
        # |tanh'| <= 1, so the product of both maps' norms bounds the branch's Jacobian everywhere.
        lipschitz.append([float(np.prod([np.linalg.norm(w[0].numpy(), 2) for w in layer])) for layer in maps])
    net, x = steep_nets(seed, 2 * NETS[size])
    for mode in ("identity", "mlp"):
        for j in range(len(net.partition)):
            g, true = (_block(net.with_mode(m), x, j) for m in (mode, "exact"))
            # Cross-entropy is a difference of logits: its rounding is absolute.
            slope = ((g * true).sum(0) / (1 + net.value(x))).numpy()
            step = {"mode": mode, "block": j, "cosines": cosines(g, true, 1)[0][0].numpy()}
            found.append({**step, "slope": slope})
    return {"lipschitz": lipschitz, "steps": found}


def _block(net: ResidualNet, x: Tensor, j: int) -> Tensor:
    block = net.partition.blocks[j]
    return net.gradient(x, slice(block[0], block[-1] + 1))


def predict(measured: Mapping[str, Any]) -> list[Prediction]:
    said = []
    for i, constants in enumerate(measured["lipschitz"]):
        below = range(len(constants))
        said += [
            prediction(
                f"hidden-bias/{i}", [bias_bound(constants[j:]) for j in below], "T7", unit="top gradients"
            ),
            prediction(
                f"flow/{i}", [gradient_flow_bound(constants[j:]) for j in below], "T7", unit="top gradients"
            ),
        ]
    steps = [pair for step in measured["steps"] for pair in zip(step["cosines"], step["slope"], strict=True)]
    # A net that is fitted already has no slope that the loss's last digits could show.
    clear = [abs(cosine) > CLEAR and TINY * abs(slope) > VISIBLE for cosine, slope in steps]
    signs = [float(np.sign(cosine)) if seen else None for (cosine, _), seen in zip(steps, clear, strict=True)]
    descent = "an infinitesimal step; 1 falls, -1 rises, none where the cosine is too near 0"
    return [*said, prediction("step-sign", tuple(signs), "T2", "T7", assumes=descent)]


# --- run --------------------------------------------------------------------------------------------------------


def perform(registered: Registered, write: Write) -> None:
    seed, count = registered.seed, NETS[registered.size]
    for i in range(count):
        write({"kind": "hidden", "net": i, **_hidden(*contracting_net(seed, i))})
    net, x = steep_nets(seed, 2 * count)
    for mode in ("identity", "mlp"):
        for j in range(len(net.partition)):
            losses = run(alone(net.with_mode(mode), j), Arm("step"), x.numpy(), TINY, 1).losses
            write({"kind": "step", "mode": mode, "block": j, "changes": (losses[1] - losses[0]).tolist()})
    net = transformer_nets(seed, count)
    x = trained(net, seed)
    batches = [transformer_nets(seed, count, batch) for batch in range(1, FRESH + 1)]
    for i in range(count):
        fresh = stack([batch.instance(i) for batch in batches])
        for row in _plans(net.instance(i), fresh, x[:, i, None]):
            write({"kind": "plan", "net": i, **row})
    for row in _training(registered, net):
        write(row)


def _hidden(net: ResidualNet, x: Tensor) -> dict[str, Any]:
    """Largest bias and least truth over the positions, by layer, in units of the top gradient."""
    true = net.backward(x, ["exact"] * net.layers).hidden
    skipped = net.backward(x, ["identity"] * net.layers).hidden
    top = true[net.layers].norm(dim=-1)
    layers = range(net.layers)
    return {
        "bias": [float(((skipped[j] - true[j]).norm(dim=-1) / top).max()) for j in layers],
        "truth": [float((true[j].norm(dim=-1) / top).min()) for j in layers],
    }


def _plans(net: ResidualNet, fresh: ResidualNet, x: Tensor) -> list[dict[str, Any]]:
    """Each block's accepted plan, the uniform ones, and their cosines on the plan's batch and on fresh ones."""
    many = x.expand(-1, FRESH).contiguous()
    planned, accepted = certified(net, x, MIN_COSINE)
    rows = []
    for j, block in enumerate(
        contiguous_blocks(net.layers, net.layers_per_step)[:-1]
    ):  # above the last none is idle
        plan = accepted[block]
        found, true = (_block(n, x, j) for n in (planned, net.with_mode("exact")))
        by_layer = cosines(found, true, len(block))[0]
        row: dict[str, Any] = {
            "block": j,
            "grades": [grade or "-" for grade in plan.grades],
            "cosine": float(torch.nan_to_num(by_layer, nan=1.0).min()),
            "accepted": plan.cosine,
            "guess": plan.guess,
            "raises": plan.raises,
            "cost": plan.cost,
            "cheapest": cheapest(net, x, block, MIN_COSINE),
            "fresh": min(plan_cosines(fresh, many, block, plan.grades).values()),
            "fresh_mean": _mean_cosine(fresh, many, block, plan.grades),
        }
        for mode in ("identity", "mlp"):
            row[mode] = min(plan_cosines(net, x, block, uniform(net, block, mode)).values())
        rows.append(row)
    return rows


def _mean_cosine(
    net: ResidualNet, x: Tensor, block: tuple[int, ...], grades: tuple[str | None, ...]
) -> float:
    """Mean over the batches of the least cosine of the selected layers."""
    true = net.backward(x, net.with_mode("exact").roles(block)).adapters
    found = net.backward(x, net.with_mode("certified", {block: grades}).roles(block)).adapters
    return float(torch.nan_to_num(cosines(found, true, len(block))[0], nan=1.0).amin(0).mean())


def _training(registered: Registered, net: ResidualNet) -> list[dict[str, Any]]:
    """First and last loss of AdamW with idle momentum, by net and mode; certified plans anew every REFRESH steps."""
    steps, start, rows = STEPS[registered.size], starts(net, registered.seed), []

    def keep(mode: str, numbers: Sequence[int], losses: Array) -> None:
        for column, i in enumerate(numbers):
            ends = {"first": float(losses[0, column]), "last": float(losses[-1, column])}
            rows.append({"kind": "training", "net": i, "mode": mode, **ends})

    for mode in ("exact", "identity", "mlp"):
        found = run(net.with_mode(mode), Arm(mode, "adamw"), start, RATE, steps, record_every=steps)
        keep(mode, range(net.instances), found.losses)
    for i in range(net.instances):
        problem = certified(net.instance(i), torch.from_numpy(start[:, i, None]), MIN_COSINE)[0]

        def again(t: int, x: Tensor, m: Tensor | None, problem: ResidualNet = problem) -> None:
            if (t + 1) % REFRESH == 0 and t + 1 < steps:
                problem.plans = certified(problem, x, MIN_COSINE)[0].plans

        arm = Arm("certified", "adamw")
        losses = run(problem, arm, start[:, i], RATE, steps, record_every=steps, observe=again).losses
        keep("certified", [i], losses)
    return rows


# --- judge ------------------------------------------------------------------------------------------------------


def judge(record: Record) -> list[Part]:
    return [
        _bound(record),
        _ascent(record),
        _accepted(record),
        _cost(record),
        _fresh(record),
        *_reached(record),
    ]


def _bound(record: Record) -> Part:
    above = low = n = 0
    tightest = 0.0
    for row in record.of("hidden"):
        bounds, flows = (record.predicted_values(f"{name}/{row['net']}") for name in ("hidden-bias", "flow"))
        for bias, truth, bound, flow in zip(row["bias"], row["truth"], bounds, flows, strict=True):
            assert bound is not None and flow is not None
            n += 1
            above += bias > bound * (1 + 1e-9)
            low += truth < flow * (1 - 1e-9)
            tightest = max(tightest, bias / bound)
    return Part(
        name="hidden gradients of tanh nets within T7's bounds",
        verdict="refuted" if above or low else "supported",
        reason=f"Of {n} layers {above} have a bias above the bound and {low} a gradient below what contractions "
        f"guarantee; the bias reaches {percent(tightest)} of its bound at most.",
        effect=float(above + low),
        unit="layers outside",
        n=n,
    )


def _ascent(record: Record) -> Part:
    rows = [(row["mode"], change) for row in record.of("step") for change in row["changes"]]
    signs = record.predicted_values("step-sign")
    pairs = [(change, sign) for (_, change), sign in zip(rows, signs, strict=True) if sign is not None]
    wrong = sum((change > 0) != (sign < 0) for change, sign in pairs)
    rising = {m: sum(change > 0 for mode, change in rows if mode == m) for m in ("identity", "mlp")}
    each = len(rows) // 2
    return Part(
        name="a small step ascends where the block's cosine is negative",
        verdict="refuted" if wrong else "supported" if pairs else "inconclusive",
        reason=f"{wrong} of {len(pairs)} steps on SwiGLU nets against the sign; {rising['identity']} of {each} "
        f"identity steps and {rising['mlp']} of {each} mlp steps raise the loss.",
        effect=float(wrong),
        unit="steps",
        n=len(pairs),
    )


def _accepted(record: Record) -> Part:
    rows = record.of("plan")
    below = sum(row["cosine"] < MIN_COSINE for row in rows)
    others = {m: sum(row[m] < MIN_COSINE for row in rows) for m in ("identity", "mlp")}
    least = min(row["cosine"] for row in rows)
    return Part(
        name=f"certified plans keep a cosine of {MIN_COSINE:g} on their own batch",
        verdict="refuted" if below else "supported",
        reason=f"{below} of {len(rows)} blocks below, the least {fixed(least)}; with identity throughout "
        f"{others['identity']} are below, with mlp {others['mlp']}. The first guess was raised "
        f"{fixed(float(np.mean([row['raises'] for row in rows])), 1)} times on average.",
        effect=least,
        unit="cosine",
        margin=MIN_COSINE,
        n=len(rows),
    )


def _by_net(record: Record, key: str) -> list[float]:
    nets = sorted({row["net"] for row in record.of("plan")})
    return [float(np.mean([row[key] for row in record.of("plan") if row["net"] == net])) for net in nets]


def _cost(record: Record) -> Part:
    decision = decide(_by_net(record, "cost"), "below", 1.0, unit="net")
    least = float(np.mean(_by_net(record, "cheapest")))
    return Part.decided(
        name="certified plans cost less than exact (T12)",
        decision=decision,
        reason=f"Backward of the idle layers costs {fixed(decision.effect)} of mode exact's, 95 % interval "
        f"{interval(decision.interval)}; the cheapest of all plans that pass costs {fixed(least)}.",
        margin=1.0,
        unit="share of exact's cost",
    )


def _fresh(record: Record) -> Part:
    decision = decide(_by_net(record, "fresh_mean"), "above", MIN_COSINE, unit="net")
    below = sum(row["fresh"] < MIN_COSINE for row in record.of("plan"))
    return Part.decided(
        name="certified plans hold on batches they were not made from",
        decision=decision,
        reason=f"Mean over {FRESH} fresh batches {fixed(decision.effect)}, 95 % interval "
        f"{interval(decision.interval)}; {below} of {len(record.of('plan'))} blocks have a batch below "
        f"{MIN_COSINE:g}. Nothing guarantees it.",
        margin=MIN_COSINE,
        unit="cosine",
        counts=False,
    )


def _reached(record: Record) -> list[Part]:
    """Share of exact's drop of log loss that a mode misses, after equal steps."""
    losses = {(row["net"], row["mode"]): row for row in record.of("training")}
    nets = sorted({net for net, _ in losses})
    parts = []
    for mode in ("identity", "mlp", "certified"):
        missing = []
        for net in nets:
            drops = {m: np.log(losses[net, m]["first"] / losses[net, m]["last"]) for m in (mode, "exact")}
            missing.append(float(1 - drops[mode] / drops["exact"]))
        decision = decide(missing, "inside", 0.05, unit="net")
        parts.append(
            Part.decided(
                name=f"training in mode {mode} reaches exact's loss",
                decision=decision,
                reason=f"It misses {percent(decision.effect)} of exact's drop in log loss, 95 % interval "
                f"{interval(decision.interval)}, after {STEPS[record.size]} steps of AdamW at {significant(RATE)}.",
                margin=0.05,
                unit="share of exact's drop",
                counts=False,
            )
        )
    return parts
