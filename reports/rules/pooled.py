"""C1 to C4 over several run folders: each is judged alone, and this says what all of them decide."""

from __future__ import annotations

from collections.abc import Sequence

from reports.claims import MODELS_NEEDED, Claim
from reports.decisions import Verdict, combine
from reports.rules.common import from_part
from reports.run import Run
from reports.verdicts import Judgement, Part


def pooled(claim: Claim, judged: Sequence[tuple[Run, Judgement, Judgement]]) -> tuple[Judgement, Judgement]:
    """Both verdicts from each run's. One run: its own. Runs that could not test the claim say nothing.

    C4's paper claim is of some model, so one run that supports it is enough; every other is refuted by one run and
    supported by all. C1 is supported by every layer of MODELS_NEEDED models.
    """
    if len(judged) == 1:
        return judged[0][1:]
    return (
        _over(claim, claim.paper.text, [(run, paper) for run, paper, _ in judged], paper=True),
        _over(claim, claim.ours.text, [(run, ours) for run, _, ours in judged], paper=False),
    )


def _over(claim: Claim, rule: str, judged: Sequence[tuple[Run, Judgement]], paper: bool) -> Judgement:
    tested = [(run, one) for run, one in judged if one.verdict != "not testable here" and one.n > 0]
    if not tested:
        return judged[0][1]
    if len(tested) == 1:
        return tested[0][1]
    parts = [
        Part(name=run.config.name, verdict=one.verdict, reason=one.reason, effect=one.effect, unit=one.unit,
             margin=one.margin, interval=one.interval, n=one.n)
        for run, one in tested
    ]  # fmt: skip
    verdicts = [part.verdict for part in parts]
    verdict: Verdict = combine(verdicts)
    if paper and claim.id == "C4" and "supported" in verdicts:
        verdict = "supported"
    if paper and claim.id == "C1" and verdict == "inconclusive":
        models = {
            run.config.model
            for run, one in tested
            if one.parts and all(p.verdict == "supported" for p in one.parts)
        }
        every = len(models) == len({run.config.model for run, _ in tested})
        verdict = "supported" if every and len(models) >= MODELS_NEEDED else verdict
    # The number shown is that of the run which carries the verdict.
    speaks = next((part for part in parts if part.verdict == verdict), parts[0])
    counts = ", ".join(f"{part.name}: {part.verdict}" for part in parts)
    judgement = from_part(rule, speaks, tested[0][1].n_of, parts, f"{counts}. {speaks.reason}")
    return judgement.model_copy(update={"verdict": verdict})
