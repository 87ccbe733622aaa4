"""C8: the order of the alternatives, as a set of pairwise claims with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from reports.cells import Cell, Result
from reports.claims import ORDERS_OURS, ORDERS_PAPER, Claim, Order
from reports.decisions import SEEDS_NEEDED, Decision, Verdict, combine, count, decide
from reports.numbers import interval, percent
from reports.verdicts import Judgement, Part


@dataclass(frozen=True)
class Pair:
    """A pairwise claim on one cell. lost: seeds in which the second, or the first, has no finite final loss."""

    order: Order
    decision: Decision
    lost_second: int = 0
    lost_first: int = 0


def compare(cell: Cell, order: Order) -> Pair | None:
    """Verdict on "first is better than second", seed by seed; None where the cell has not both.

    quality: (loss of second - loss of first) / loss of full, or of first without full; time: log of the ratio of
    seconds. A method without a finite final loss is worse than one that has it: supported when that is so in every
    seed, three or more; otherwise one such seed leaves the pair open.
    """
    first, second = cell.of(order.first), cell.of(order.second)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    if order.by == "time":
        times = [
            (first[seed].seconds, second[seed].seconds)
            for seed in seeds
            if _same_work(first[seed], second[seed])
        ]
        return Pair(order, decide([math.log(b / a) for a, b in times if a and b], "effect", 0.0))
    full_name = cell.like("full")
    full = cell.of(full_name) if full_name else {}
    values, lost_first, lost_second = [], 0, 0
    for seed in seeds:
        a, b = first[seed].final, second[seed].final
        lost_first += a is None and b is not None
        lost_second += b is None and a is not None
        if a is not None and b is not None:
            reference = full[seed].final if seed in full else None
            values.append((b - a) / (reference if reference is not None else a))
    decision = decide(values, "effect", 0.0)
    verdict: Verdict = decision.verdict
    if lost_second or lost_first:
        whole = len(seeds) >= SEEDS_NEEDED
        verdict = "inconclusive"
        if whole and lost_second == len(seeds):
            verdict = "supported"
        elif whole and lost_first == len(seeds):
            verdict = "refuted"
    return Pair(order, replace(decision, verdict=verdict, n=len(seeds)), lost_second, lost_first)


def _same_work(a: Result, b: Result) -> bool:
    """Seconds compare only where both took all their steps: an arm stopped early did less."""
    return bool(a.final is not None and b.final is not None and a.seconds and b.seconds)


def judge_order(cells: Sequence[Cell], claim: Claim) -> tuple[Judgement, Judgement]:
    """Both verdicts: the paper's pairs, and ours."""
    paper, ours = (
        _judge(cells, orders, rule.text)
        for orders, rule in ((ORDERS_PAPER, claim.paper), (ORDERS_OURS, claim.ours))
    )
    return paper, ours


def _judge(cells: Sequence[Cell], orders: Sequence[Order], rule: str) -> Judgement:
    make = partial(Judgement, rule=rule, margin=0.0)
    # The cell that knows most of the pairs; a second one (another model or rate) is shown and decides nothing.
    known = [(cell, [pair for order in orders if (pair := compare(cell, order))]) for cell in cells]
    known = sorted((entry for entry in known if entry[1]), key=lambda entry: -len(entry[1]))
    if not known:
        return make(
            verdict="not testable here",
            reason="Not tested: no two of the alternatives were trained at one setting.",
        )
    parts = [_part(cell, pair, counts=i == 0) for i, (cell, pairs) in enumerate(known) for pair in pairs]
    cell, pairs = known[0]
    missing = [f"{o.first} against {o.second}" for o in orders if o not in [pair.order for pair in pairs]]
    verdict = combine([part.verdict for part in parts if part.counts])
    if verdict == "supported" and missing:
        verdict = "inconclusive"
    said = ", ".join(
        f"{sum(part.verdict == name for part in parts if part.counts)} {name}"
        for name in ("supported", "refuted", "no difference", "inconclusive")
        if any(part.verdict == name for part in parts if part.counts)
    )
    lacks = f"; not trained: {', '.join(missing)}" if missing else ""
    return make(
        verdict=verdict,
        reason=f"{count(len(pairs), 'pair')} on {cell.setting.words}: {said}{lacks}.",
        effect=sum(part.verdict == "supported" for part in parts if part.counts) / len(pairs),
        unit="share of pairs",
        n=min(pair.decision.n for pair in pairs),
        parts=tuple(parts),
    )


def _part(cell: Cell, pair: Pair, counts: bool) -> Part:
    order, decision = pair.order, pair.decision
    unit = "share of the loss" if order.by == "quality" else "log of the ratio of seconds"
    said = f"no finite pair of seeds ({decision.why})"
    if decision.effect is not None:
        bounds = decision.interval
        if order.by == "time":
            # Shown as a change of seconds: exp(log ratio) - 1.
            shown, bounds = (
                math.expm1(decision.effect),
                bounds and (math.expm1(bounds[0]), math.expm1(bounds[1])),
            )
        else:
            shown = decision.effect
        said = f"{order.second} is {percent(abs(shown))} {_worse(order, shown)}"
        said += f", 95 % interval {interval(bounds, 1, scale=100)} %" if bounds else ""
    said += f", {count(decision.n, 'seed')}"
    if decision.n < SEEDS_NEEDED:
        said += f", {SEEDS_NEEDED} needed"
    for lost, name in ((pair.lost_second, order.second), (pair.lost_first, order.first)):
        said += f"; {name} without a finite final loss in {lost} of {decision.n}" if lost else ""
    return Part.decided(
        f"{order.first} before {order.second} by {order.by} ({cell.setting.words})", decision,
        f"{said[0].upper()}{said[1:]}.", unit=unit, margin=0.0, counts=counts,
    )  # fmt: skip


def _worse(order: Order, value: float) -> str:
    if order.by == "time":
        return "slower" if value >= 0 else "faster"
    return "of full's loss worse" if value >= 0 else "of full's loss better"
