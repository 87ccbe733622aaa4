"""Calibration of the judge: experiments whose truth was planted, decided by `reports.decisions.decide`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray
from scipy import stats

from bcd_theory.predictions import Prediction
from reports.decisions import CONFIDENCE, Verdict, decide
from reports.numbers import percent
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations.experiment import Experiment, Write, main
from simulations.problems import coupled
from simulations.records import Record, Registered, Size, prediction
from simulations.runner import Arm, run

Array = NDArray[np.float64]
Judge = Callable[[Sequence[float]], Verdict]

# Truth: planted effect in standard deviations of the paired difference between seeds.
EFFECTS = {"present": 3.0, "absent": 0.0, "opposite": -3.0, "tiny": 0.2}
# Wrong: supported where the effect is absent or opposite, refuted where it is present. A tiny effect is true but not
# to be seen at five seeds: no verdict on it counts as wrong, and all are listed.
WRONG = {("supported", "absent"), ("supported", "opposite"), ("refuted", "present")}
SEEDS = 5
CALIBRATION_PAIRS = 4000
WRONG_ALLOWED, OF = 3, 200
DECIDED_NEEDED = 0.8
COUNTS: Mapping[Size, int] = {"quick": 200, "standard": 200, "full": 2000}


def the_judge(values: Sequence[float]) -> Verdict:
    """The decision that the claims' rules take, at margin 0, where its error rate is largest."""
    return decide(values, "effect", 0.0).verdict


def always_inconclusive(values: Sequence[float]) -> Verdict:
    return "inconclusive"


def sign_only(values: Sequence[float]) -> Verdict:
    return "supported" if np.mean(values) > 0 else "refuted"


JUDGES: Mapping[str, Judge] = {
    "the judge": the_judge,
    "mutant: always inconclusive": always_inconclusive,
    "mutant: sign only": sign_only,
}


def paired_differences(pairs: int, seed: int, stream: int) -> Array:
    """Differences of final loss of `pairs` pairs of equal arms with independent noise, so that the truth is 0.

    Noisy quadratic, n = 16, p = 4, sgd-ema; outcome: mean loss at every fourth of the last 40 of 120 steps. The
    problem depends on the seed, starts and noise on (seed, stream).
    """
    problem = coupled(16, 4, 0.5, 10.0, np.random.default_rng([seed, 17]))
    rng = np.random.default_rng([seed, 17, stream])
    start = np.repeat(rng.normal(size=(16, pairs)), 2, axis=1)
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))

    def noise(t: int) -> torch.Tensor:
        return torch.randn((16, 2 * pairs), generator=generator, dtype=torch.float64)

    rate = 0.3 / problem.block_smoothness.max()
    found = run(
        problem, Arm("planted", "sgd-ema", momentum=0.9), start, rate, 120, noise=noise, record_every=4
    )
    outcome = found.losses[-10:].mean(0)
    return np.asarray(outcome[0::2] - outcome[1::2])


def planted(count: int, seed: int, scale: float) -> list[dict[str, Any]]:
    """`count` experiments of SEEDS standardised differences, the truths taking turns; each with its truth."""
    differences = paired_differences(count * SEEDS, seed, 1).reshape(count, SEEDS) / scale
    truths = [list(EFFECTS)[i % len(EFFECTS)] for i in range(count)]
    return [
        {"truth": truth, "values": (row + EFFECTS[truth]).tolist()}
        for truth, row in zip(truths, differences, strict=True)
    ]


def calibrate(judge: Judge, experiments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """wrong, total, decided_rate (of the effects of 3 standard deviations), passed, and all verdicts by truth."""
    verdicts: dict[str, Counter[str]] = {truth: Counter() for truth in EFFECTS}
    for experiment in experiments:
        verdicts[experiment["truth"]][judge(experiment["values"])] += 1
    total = len(experiments)
    wrong = sum(verdicts[truth][verdict] for verdict, truth in WRONG)
    large = [verdicts[truth] for truth, effect in EFFECTS.items() if abs(effect) >= 3.0]
    decided = sum(found["supported"] + found["refuted"] for found in large)
    rate = decided / sum(found.total() for found in large)
    return {
        "wrong": wrong,
        "total": total,
        "decided_rate": rate,
        "passed": wrong * OF <= WRONG_ALLOWED * total and rate >= DECIDED_NEEDED,
        "verdicts": {truth: dict(sorted(found.items())) for truth, found in verdicts.items()},
    }


def measure(size: Size, seed: int) -> dict[str, Any]:
    """Standard deviation of the paired difference, over pairs that no experiment uses, and its mean in that unit."""
    differences = paired_differences(CALIBRATION_PAIRS, seed, 0)
    scale = float(differences.std(ddof=1))
    return {
        "scale": scale,
        "mean": float(differences.mean() / scale),
        "pairs": CALIBRATION_PAIRS,
        "excess_kurtosis": float(stats.kurtosis(differences)),
    }


def shares(effect: float) -> tuple[float, float]:
    """Chance of `supported` and of `refuted` for normal differences, by the non-central t with n - 1 degrees."""
    critical = float(stats.t.ppf((1 + CONFIDENCE) / 2, SEEDS - 1))
    shift = effect * np.sqrt(SEEDS)
    return float(stats.nct.sf(critical, SEEDS - 1, shift)), float(stats.nct.cdf(-critical, SEEDS - 1, shift))


def predict(measured: Mapping[str, Any]) -> Sequence[Prediction]:
    assumes = f"normal differences, {SEEDS} seeds, margin 0"
    found = [
        prediction(f"shares/{truth}", list(shares(effect)), assumes=assumes)
        for truth, effect in EFFECTS.items()
    ]
    per_wrong = sum(shares(EFFECTS[truth])[verdict == "refuted"] for verdict, truth in WRONG) / len(EFFECTS)
    found.append(prediction("wrong-share", per_wrong, assumes=assumes))
    found.append(prediction("decided-rate", sum(shares(3.0)), assumes=assumes))
    return found


def perform(registered: Registered, write: Write) -> None:
    for row in planted(COUNTS[registered.size], registered.seed, registered.measured["scale"]):
        write({"kind": "experiment", **row})


def judge(record: Record) -> list[Part]:
    experiments = record.of("experiment")
    return [_part(name, calibrate(judge, experiments)) for name, judge in JUDGES.items()] + [
        _as_said(record, calibrate(the_judge, experiments))
    ]


def _part(name: str, found: Mapping[str, Any]) -> Part:
    should_pass = name == "the judge"
    said = f"{found['wrong']} of {found['total']} wrong, {percent(found['decided_rate'], 0)} of the effects of 3 "
    said += f"standard deviations decided at {SEEDS} seeds: {'passes' if found['passed'] else 'fails'}, and should "
    tiny = ", ".join(f"{count} {verdict}" for verdict, count in found["verdicts"]["tiny"].items())
    return Part(
        name=name,
        verdict="supported" if found["passed"] == should_pass else "refuted",
        reason=f"{said}{'pass' if should_pass else 'fail'}. Tiny effects, which count neither way: {tiny}.",
        effect=float(found["wrong"]),
        unit="wrong verdicts",
        margin=WRONG_ALLOWED * found["total"] / OF,
        n=found["total"],
    )


def _as_said(record: Record, found: Mapping[str, Any]) -> Part:
    """Counts of both verdicts by truth against the non-central t, at the 99.9 % level of each binomial."""
    worst, words = 1.0, []
    for truth, counts in found["verdicts"].items():
        n = sum(counts.values())
        for verdict, share in zip(
            ("supported", "refuted"), record.predicted_values(f"shares/{truth}"), strict=True
        ):
            assert share is not None
            k = counts.get(verdict, 0)
            worst = min(worst, float(stats.binomtest(k, n, min(max(share, 0.0), 1.0)).pvalue))
            if truth in ("absent", "tiny"):
                words.append(f"{truth} {verdict} {k} of {n} (expected {share * n:.1f})")
    return Part(
        name="shares of the verdicts",
        verdict="supported" if worst > 0.001 else "refuted",
        reason=f"{'; '.join(words)}. The least likely count of all has p = {worst:.2g} under the non-central t.",
        effect=worst,
        unit="p-value",
        margin=0.001,
        n=found["total"],
        counts=False,
    )


def draw(record: Record, axes: Sequence[Axes]) -> None:
    experiments = record.of("experiment")
    axis, colours = (
        axes[0],
        {"supported": "exact", "refuted": "identity", "no difference": "mlp", "inconclusive": "grid"},
    )
    names = [f"{name}, {truth}" for name in JUDGES for truth in EFFECTS]
    left = np.zeros(len(names))
    found = [calibrate(judge, experiments)["verdicts"] for judge in JUDGES.values()]
    for verdict in get_args(Verdict):
        if verdict not in colours:
            continue
        widths = np.array(
            [verdicts[truth].get(verdict, 0) for verdicts in found for truth in EFFECTS], dtype=float
        )
        axis.barh(names, widths, left=left, color=LIGHT[colours[verdict]], label=verdict)
        left += widths
    axis.invert_yaxis()
    axis.set_xlabel("experiments")
    axis.set_title("Verdicts by planted truth")
    axis.legend()


def summary(record: Record) -> dict[str, Any]:
    found = calibrate(the_judge, record.of("experiment"))
    mutants = {
        name.removeprefix("mutant: "): calibrate(judge, record.of("experiment"))["passed"]
        for name, judge in JUDGES.items()
        if name != "the judge"
    }
    return {
        **{k: found[k] for k in ("wrong", "total", "decided_rate", "verdicts")},
        "mutants_passed": mutants,
    }


EXPERIMENT = Experiment(
    "planted",
    "Calibration of the judge on planted truths",
    "Pairs of equal arms on a noisy quadratic get an effect planted: present (3 standard deviations between seeds), "
    "absent, opposite or tiny (0.2). The decision that judges real runs must be wrong (supported where absent or "
    "opposite, refuted where present) at most 3 times in 200 and decide 80 % of the large effects at 5 seeds. A tiny "
    "effect is there but not to be seen at 5 seeds, so no verdict on it counts; all are shown. Two mutant judges must "
    "fail the same test.",
    (),
    measure,
    predict,
    perform,
    judge,
    draw,
    summary=summary,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
