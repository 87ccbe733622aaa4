"""C1: the direction of the surrogate gradient, by layer, on held-out batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bcd_theory.predictions import FIDELITY_TOLERANCE, Prediction
from reports.claims import COSINE_MARGIN, COSINE_SHARE, FIDELITY_SHARE, MODELS_NEEDED, Claim
from reports.decisions import SEEDS_NEEDED, Verdict, count, decide, decide_share
from reports.numbers import fixed
from reports.rules.common import from_part
from reports.run import Run
from reports.verdicts import Judgement, Part

BATCH = "held-out batch"
PAPER_MODE = "identity"


def cosines(run: Run, mode: str, layout: str, stage: str) -> list[list[float]]:
    """For each layer its cosine on each held-out batch, averaged over adapter seeds; [] without evidence.

    A layer whose true gradient is zero on some batch has no direction there, and that batch is left out.
    """
    by_batch: dict[int, list[Sequence[float | None]]] = {}
    for batch in run.fidelity.batches if run.fidelity else ():
        for row in batch.rows:
            if (row.mode, row.layout, batch.stage) == (mode, layout, stage):
                by_batch.setdefault(batch.batch, []).append(row.cosine)
    if not by_batch:
        return []
    layers = max(len(row) for rows in by_batch.values() for row in rows)
    found: list[list[float]] = [[] for _ in range(layers)]
    for rows in by_batch.values():
        for layer in range(layers):
            values = [row[layer] for row in rows]
            known = [value for value in values if value is not None]
            if known and len(known) == len(values):
                found[layer].append(float(np.mean(known)))
    return found


@dataclass(frozen=True)
class _Direction:
    """Layers at one stage: with their 95 % interval below the margin, at or above it, and undecided."""

    stage: str
    layers: int
    below: int
    above: int
    mean_below: int
    batches: int

    @property
    def open(self) -> int:
        return self.layers - self.below - self.above


def _direction(run: Run, stage: str) -> _Direction | None:
    by_layer = [values for values in cosines(run, PAPER_MODE, "cyclic", stage) if values]
    if not by_layer:
        return None
    decisions = [decide(values, "above", COSINE_MARGIN, unit=BATCH) for values in by_layer]
    return _Direction(
        stage,
        len(decisions),
        sum(decision.verdict == "refuted" for decision in decisions),
        sum(decision.verdict == "supported" for decision in decisions),
        sum(decision.effect is not None and decision.effect < COSINE_MARGIN for decision in decisions),
        min(decision.n for decision in decisions),
    )


_STAGES = {"start": "before fine-tuning", "after": "after fine-tuning"}


def judge_direction(run: Run, claim: Claim) -> tuple[Judgement, Judgement]:
    found = [stage for stage in (_direction(run, name) for name in _STAGES) if stage is not None]
    parts = tuple(
        Part(
            name=f"{PAPER_MODE}, {_STAGES[stage.stage]}",
            verdict=_stage(stage),
            reason=f"{stage.below} of {stage.layers} layers below {COSINE_MARGIN}, {stage.above} at or above, "
            f"{stage.open} undecided at 95 % ({stage.mean_below} means below), {count(stage.batches, BATCH)}.",
            effect=stage.below / stage.layers,
            unit="share of layers below",
            margin=COSINE_SHARE,
            n=stage.batches,
        )
        for stage in found
    )
    make = partial(Judgement, rule=claim.paper.text, margin=COSINE_SHARE, n_of=BATCH, parts=parts)
    if not found:
        paper = make(verdict="inconclusive", reason="No fidelity was measured in identity mode.")
    else:
        n = min(stage.batches for stage in found)
        refuted = all(part.verdict == "refuted" for part in parts)
        counts = "; ".join(
            f"{stage.below} of {stage.layers} layers {_STAGES[stage.stage]}" for stage in found
        )
        if n < SEEDS_NEEDED:
            tail = f", but {count(n, BATCH)} decide nothing ({SEEDS_NEEDED} needed)"
        elif refuted:
            tail = ", more than half of them" if len(found) == 2 else ", more than half (one stage measured)"
        else:
            tail = f"; one model cannot support the claim ({MODELS_NEEDED} needed)"
        paper = make(
            verdict="refuted" if refuted and n >= SEEDS_NEEDED else "inconclusive",
            reason=f"The cosine of the identity surrogate is below {COSINE_MARGIN} with its 95 % interval for "
            f"{counts}{tail}.",
            effect=max(stage.below / stage.layers for stage in found),
            unit="share of layers below",
            n=n,
        )
    return paper, _ours(run, claim)


def _stage(stage: _Direction) -> Verdict:
    if stage.batches >= SEEDS_NEEDED and stage.below > COSINE_SHARE * stage.layers:
        return "refuted"
    if stage.batches >= SEEDS_NEEDED and stage.above == stage.layers:
        return "supported"
    return "inconclusive"


def _fidelity_predictions(run: Run, kind: str) -> list[tuple[str, Prediction]]:
    found = [item for item in run.predictions.items if item.id.startswith("fidelity/")]
    return [(item.id.split("/")[1], item) for item in found if item.id.endswith(f"/{kind}")]


def _fidelity_part(run: Run, name: str, kind: str, layout: str, stage: str, counts: bool) -> Part:
    groups: list[tuple[Sequence[float], float, float]] = []
    worst: tuple[float, str] | None = None
    by_mode: dict[str, tuple[int, int]] = {}
    for mode, prediction in _fidelity_predictions(run, kind):
        predicted = prediction.value if isinstance(prediction.value, tuple) else ()
        for layer, (value, measured) in enumerate(
            zip(predicted, cosines(run, mode, layout, stage), strict=False)
        ):
            if value is None or not measured:
                continue
            groups.append((measured, value - FIDELITY_TOLERANCE, value + FIDELITY_TOLERANCE))
            gap = abs(float(np.mean(measured)) - value)
            inside, total = by_mode.get(mode, (0, 0))
            by_mode[mode] = inside + (gap <= FIDELITY_TOLERANCE), total + 1
            if worst is None or gap > worst[0]:
                worst = gap, f"{mode} layer {layer}"
    if worst is None:
        return Part(name=name, verdict="inconclusive", reason="No fidelity was measured.", counts=counts)
    decision = decide_share(groups, FIDELITY_SHARE)
    n = min(len(values) for values, _, _ in groups)
    each = ", ".join(f"{mode} {inside} of {total}" for mode, (inside, total) in by_mode.items())
    few = f"; {count(n, BATCH)}, {SEEDS_NEEDED} needed" if n < SEEDS_NEEDED else ""
    return Part(
        name=name,
        verdict=decision.verdict,
        reason=f"{decision.inside} of {decision.n} pairs of mode and layer within {FIDELITY_TOLERANCE} of the mean "
        f"over {count(n, BATCH)} ({each}), {decision.outside} surely outside, largest gap "
        f"{fixed(worst[0])} ({worst[1]}){few}.",
        effect=decision.share,
        unit="share of pairs within",
        margin=FIDELITY_SHARE,
        n=n,
        counts=counts,
    )


def _ours(run: Run, claim: Claim) -> Judgement:
    start = _fidelity_part(run, "cyclic layout, before fine-tuning", "cyclic", "cyclic", "start", True)
    beside = [
        _fidelity_part(run, "the same, after fine-tuning", "cyclic", "cyclic", "after", False),
        _fidelity_part(run, "all layers above skipped, before", "all-above", "all-above", "start", False),
        _fidelity_part(run, "composed from one-layer cosines, before", "composed", "cyclic", "start", False),
    ]
    measured = [part for part in beside if part.n]
    reason = f"Predicted beforehand: {start.reason[0].lower()}{start.reason[1:]}"
    return from_part(claim.ours.text, start, BATCH, (start, *measured), reason)
