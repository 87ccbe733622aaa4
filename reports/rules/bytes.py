"""C7: the peak of the whole process, for real models and for geometries of random weights, and what was predicted."""

from __future__ import annotations

from functools import partial

from reports.claims import MEMORY_GEOMETRIES, MEMORY_TOLERANCE, ONE_GIGABYTE, Claim
from reports.decisions import Verdict, combine
from reports.evidence import BenchMemory, BenchMemoryArm, BenchMemoryCase
from reports.numbers import percent
from reports.verdicts import Judgement, Part

OURS = ("full", "exact", "identity", "mlp")


def judge_bytes(bench: BenchMemory | None, claim: Claim) -> tuple[Judgement, Judgement]:
    """Both verdicts from the JSON of `lcsb bench memory`."""
    make = partial(Judgement, n_of="model")
    cases = {name: case for name, case in (bench.cases if bench else {}).items() if _ours_of(case)}
    if not cases:
        reason = "Not tested: no peak of the memory engine (lcsb bench memory writes it)."
        return (make(verdict="not testable here", rule=claim.paper.text, reason=reason),
                make(verdict="not testable here", rule=claim.ours.text, reason=reason))  # fmt: skip
    return _paper(cases, claim, make), _predicted(cases, claim, make)


def _ours_of(case: BenchMemoryCase) -> list[BenchMemoryArm]:
    return [arm for arm in case.arms if arm.name in OURS]


def _paper(cases: dict[str, BenchMemoryCase], claim: Claim, make: partial[Judgement]) -> Judgement:
    parts, largest = [], (0, "")
    for name, case in cases.items():
        peaks = {
            arm.name: max(a.peak_bytes for a in case.arms if a.name == arm.name) for arm in _ours_of(case)
        }
        worst = max(peaks.values())
        largest = max(largest, (worst, name))
        verdict: Verdict = "supported" if worst < ONE_GIGABYTE else "inconclusive"
        if min(peaks.values()) >= ONE_GIGABYTE:
            verdict = "refuted"
        said = ", ".join(f"{arm} {peak / 1e6:,.0f} MB" for arm, peak in peaks.items())
        beside = [arm for arm in case.arms if arm.name not in OURS]
        others = "; beside them " + ", ".join(f"{arm.name} {arm.peak_bytes / 1e6:,.0f} MB" for arm in beside)
        parts.append(
            Part(name=f"{name} ({case.weights})", verdict=verdict, effect=worst, unit="bytes", margin=ONE_GIGABYTE,
                 n=1, reason=f"{said}{others if beside else ''} (1 MB = 1e6 bytes).")
        )  # fmt: skip
    missing = [name for name in MEMORY_GEOMETRIES if name not in cases]
    real = [name for name, case in cases.items() if case.weights == "real"]
    verdict = combine([part.verdict for part in parts])
    tail = ""
    if verdict == "supported" and (missing or not real):
        verdict = "inconclusive"
        lacks = ", ".join(missing + ([] if real else ["a model of trained weights"]))
        tail = f"; not measured: {lacks}"
    return make(
        verdict=verdict,
        rule=claim.paper.text,
        reason=f"{sum(part.verdict == 'supported' for part in parts)} of {len(parts)} models stay below 1e9 bytes in "
        f"every mode ({len(real)} with trained weights, the others random); largest peak {largest[0] / 1e6:,.0f} MB "
        f"({largest[1]}){tail}.",
        effect=float(largest[0]), unit="bytes", margin=ONE_GIGABYTE, n=len(cases), parts=tuple(parts),
    )  # fmt: skip


def _predicted(cases: dict[str, BenchMemoryCase], claim: Claim, make: partial[Judgement]) -> Judgement:
    errors = {
        f"{name} {arm.name}{' cold' if arm.page_cache == 'cold' else ''}": arm.predicted_bytes
        / arm.peak_bytes
        - 1
        for name, case in cases.items()
        for arm in _ours_of(case)
        if arm.predicted_bytes is not None
    }
    if not errors:
        return make(verdict="inconclusive", rule=claim.ours.text, reason="No peak was predicted.")
    inside = sum(abs(error) <= MEMORY_TOLERANCE for error in errors.values())
    worst = max(errors, key=lambda name: abs(errors[name]))
    return make(
        verdict="supported" if inside == len(errors) else "refuted",
        rule=claim.ours.text,
        reason=f"{inside} of {len(errors)} predicted peaks within {percent(MEMORY_TOLERANCE, 0)} of the measured ones; "
        f"worst: {worst} ({percent(errors[worst])}).",
        effect=errors[worst], unit="relative error", margin=MEMORY_TOLERANCE, n=len(cases),
    )  # fmt: skip
