"""Identity mode on linear residual chains: bias, ascent, limits of its field, and where it settles (T7, T4)."""

from __future__ import annotations

import sys

import numpy as np
from matplotlib.axes import Axes

from bcd_theory.identity import bias_bound, scalar_counterexample
from bcd_theory.linear import stability_limit
from reports.numbers import percent, significant
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations.experiment import Experiment, Result, Size, main
from simulations.problems.chain import Chain, random_chain
from simulations.runner import Arm, run


def bias(count: int, seed: int) -> tuple[Part, list[dict[str, float]]]:
    """|prod J - I| of the layers above the first against T7, by depth and branch norm."""
    rows, broken = [], 0
    for depth in (1, 2, 4, 8, 16):
        for norm in (0.05, 0.2, 0.5, 1.0):
            values = []
            for i in range(count):
                rng = np.random.default_rng([seed, depth, int(1000 * norm), i])
                chain = random_chain(depth + 1, 8, 8, norm, "identity", rng)
                block = slice(0, 8)
                # B_0 is orthogonal, so this is the norm of the skipped layers' product less the identity.
                measured = float(np.linalg.norm(chain.true[:, block] - chain.surrogate[:, block], 2))
                broken += measured > bias_bound(np.full(depth, norm)) * (1 + 1e-12)
                values.append(measured)
            bound = bias_bound(np.full(depth, norm))
            rows.append({"depth": depth, "norm": norm, "measured": float(np.mean(values)), "bound": bound})
    n = len(rows) * count
    tight = max(row["measured"] / row["bound"] for row in rows)
    part = Part(
        name="bias below T7's bound",
        verdict="refuted" if broken else "supported",
        reason=f"{broken} of {n} chains above the bound; the mean bias reaches {percent(tight)} of it at most.",
        effect=float(broken),
        unit="chains above",
        n=n,
    )
    return part, rows


def ascent() -> tuple[Part, list[dict[str, float]]]:
    """loss = (1 + b)(1 + a) x: run one identity step on a for many b; it ascends exactly where b < -1."""
    rows, wrong = [], 0
    for b in np.linspace(-3.0, 2.0, 51):
        if abs(b + 1) < 1e-9:
            continue
        x, a, eta = 2.0, 0.3, 0.01
        step = scalar_counterexample(a, float(b), x).surrogate
        change = (1 + b) * (1 + a - eta * step) * x - (1 + b) * (1 + a) * x
        wrong += (change > 0) != (b < -1)
        rows.append({"b": float(b), "change": float(change)})
    part = Part(
        name="scalar counterexample ascends for b < -1",
        verdict="refuted" if wrong else "supported",
        reason=f"{wrong} of {len(rows)} values of b on the wrong side.",
        effect=float(wrong),
        unit="values",
        n=len(rows),
    )
    return part, rows


def stability(count: int, seed: int) -> Part:
    """T4 on G = S^T R: runs at 0.98 of the predicted limit settle, at 1.02 grow; limit 0: grows at a small rate."""
    checked = right = unstable = 0
    for i in range(count):
        rng = np.random.default_rng([seed, 4, i])
        chain = random_chain(4, 6, 1, float(rng.uniform(0.3, 1.5)), "identity", rng)
        limit = stability_limit(chain.true.T @ chain.true, chain.partition, field=chain.field).learning_rate
        unstable += limit == 0
        for factor, stable in ((0.98, True), (1.02, False)):
            rate = factor * limit if limit > 0 else 0.05
            expected = stable and limit > 0
            start = rng.normal(size=4)
            steps = 4 * 6000
            moves: list[float] = []
            last = [np.zeros(4)]

            def observe(t: int, x, m) -> None:  # type: ignore[no-untyped-def]
                if t + 1 in (steps // 2 - 4, steps // 2, steps - 4, steps):  # noqa: B023
                    now = x[:, 0].numpy().copy()
                    with np.errstate(over="ignore", invalid="ignore"):
                        moves.append(float(np.linalg.norm(now - last[0])))  # noqa: B023
                    last[0] = now  # noqa: B023

            run(chain, Arm("identity"), start, rate, steps, record_every=steps, observe=observe)
            # Movement over a cycle in the middle and at the end.
            settles = bool(np.isfinite(moves[3])) and (moves[3] < moves[1] or moves[3] < 1e-10)
            checked += 1
            right += settles == expected
    return Part(
        name="limit of the identity field (T4)",
        verdict="supported" if right == checked else "refuted",
        reason=f"{right} of {checked} runs at 0.98 and 1.02 of the limit behave as predicted; {unstable} of {count} "
        "chains have the limit 0.",
        effect=right / checked,
        unit="share of runs",
        n=count,
    )


def stationary(count: int, seed: int) -> tuple[Part, list[float]]:
    """Where identity mode converges, how large is the true gradient there, against the start?"""
    shares = []
    for i in range(count):
        rng = np.random.default_rng([seed, 7, i])
        chain = random_chain(4, 6, 1, 0.3, "identity", rng)
        limit = stability_limit(chain.true.T @ chain.true, chain.partition, field=chain.field).learning_rate
        if limit == 0:
            continue
        start = np.zeros(4)
        found = run(chain, Arm("identity"), start, 0.5 * limit, 4 * 4000, record_every=16000)
        surrogate = float(chain.gradient(found.x, slice(0, 4)).norm())
        if surrogate > 1e-8:
            continue
        first = chain.true_gradient(found.x * 0)
        shares.append(float(chain.true_gradient(found.x).norm() / first.norm()))
    away = sum(share > 1e-3 for share in shares)
    middle = float(np.median(shares)) if shares else None
    part = Part(
        name="identity settles where the true gradient is not zero",
        verdict="supported"
        if shares and away == len(shares)
        else "inconclusive"
        if not shares or away
        else "refuted",
        reason=f"{len(shares)} of {count} chains settled, {away} of them with a true gradient over 0.1 % of the first; "
        f"median {percent(middle)}.",
        effect=middle,
        unit="share of the first gradient",
        n=len(shares),
    )
    return part, shares


def exact_reaches(count: int, seed: int) -> Part:
    """The control: exact mode on the same chains reaches a zero gradient."""
    worst = 0.0
    for i in range(count):
        rng = np.random.default_rng([seed, 7, i])
        chain: Chain = random_chain(4, 6, 1, 0.3, "exact", rng)
        limit = stability_limit(chain.true.T @ chain.true, chain.partition).learning_rate
        found = run(chain, Arm("exact"), np.zeros(4), 0.5 * limit, 4 * 4000, record_every=16000)
        worst = max(
            worst, float(chain.true_gradient(found.x).norm() / chain.true_gradient(found.x * 0).norm())
        )
    return Part(
        name="exact mode reaches a stationary point",
        verdict="supported" if worst < 1e-6 else "refuted",
        reason=f"The largest true gradient left is {significant(worst)} of the start's on {count} chains.",
        effect=worst,
        margin=1e-6,
        unit="share of the first gradient",
        n=count,
    )


def body(size: Size, seed: int) -> Result:
    count = {"quick": 4, "standard": 40, "full": 200}[size]
    first, rows = bias(10 * count, seed)
    second, scalar = ascent()
    third = stability(count, seed)
    fourth, shares = stationary(2 * count, seed)
    parts = [first, second, third, fourth, exact_reaches(2 * count, seed)]

    def draw(axis: Axes) -> None:
        for norm, colour in ((0.05, "exact"), (0.2, "frozen"), (0.5, "identity"), (1.0, "certified")):
            mine = [row for row in rows if row["norm"] == norm]
            axis.loglog(
                [r["depth"] for r in mine],
                [r["measured"] for r in mine],
                "o-",
                color=LIGHT[colour],
                label=f"branch norm {norm}",
            )
            axis.loglog([r["depth"] for r in mine], [r["bound"] for r in mine], "--", color=LIGHT[colour])
        axis.set_xlabel("layers skipped")
        axis.set_ylabel("bias (dashed: bound)")
        axis.set_title("Bias of identity mode")
        axis.legend()

    return Result(parts, {"bias": rows, "ascent": scalar, "left_gradient_share": shares}, draw)


EXPERIMENT = Experiment(
    "identity",
    "Identity mode on linear residual chains",
    "The shortcut's bias grows with depth and branch norm within its bound; it ascends where a skipped layer turns the "
    "sign; its field has its own limit of stability; and where it settles the true gradient need not be zero.",
    ("T4", "T7"),
    body,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
