"""Calibration of the judge: experiments whose truth was planted, decided by `reports.decisions.decide`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

from reports.decisions import Verdict, decide
from reports.svg import LIGHT
from reports.verdicts import Part
from simulations.experiment import Experiment, Result, Size, main
from simulations.problems import coupled
from simulations.runner import Arm, run

Array = NDArray[np.float64]
Judge = Callable[[Sequence[float]], Verdict]

# kind: planted effect in standard deviations of the paired difference between seeds
EFFECTS = {"present": 3.0, "absent": 0.0, "opposite": -3.0, "tiny": 0.2}
SEEDS = 5
WRONG_ALLOWED = 3
DECIDED_NEEDED = 0.8


def the_judge(values: Sequence[float]) -> Verdict:
    """The judge under test at margin 0, where its error rate is largest."""
    return decide(values, "effect", 0.0).verdict


def always_inconclusive(values: Sequence[float]) -> Verdict:
    return "inconclusive"


def sign_only(values: Sequence[float]) -> Verdict:
    return "supported" if np.mean(values) > 0 else "refuted"


def paired_differences(count: int, seed: int) -> Array:
    """Standardised differences of final loss, shape (count, SEEDS): two equal arms, independent noise, so truth 0.

    Noisy quadratic, n = 16, p = 4, sgd-ema; outcome: mean loss of the last 40 of 120 steps. The scale is the standard
    deviation over 4,000 other pairs.
    """
    rng = np.random.default_rng([seed, 17])
    problem = coupled(16, 4, 0.5, 10.0, rng)
    pairs = count * SEEDS + 4000
    start = np.repeat(rng.normal(size=(16, pairs)), 2, axis=1)
    generator = torch.Generator().manual_seed(seed)

    def noise(t: int) -> torch.Tensor:
        return torch.randn((16, 2 * pairs), generator=generator, dtype=torch.float64)

    rate = 0.3 / problem.block_smoothness.max()
    found = run(
        problem, Arm("planted", "sgd-ema", momentum=0.9), start, rate, 120, noise=noise, record_every=4
    )
    outcome = found.losses[-10:].mean(0)
    differences = outcome[0::2] - outcome[1::2]
    scale = differences[count * SEEDS :].std(ddof=1)
    return np.asarray(differences[: count * SEEDS].reshape(count, SEEDS) / scale)


def calibrate(judge: Judge, differences: Array) -> dict[str, float]:
    """wrong, total, decided_rate (of planted effects of 3 standard deviations) and passed."""
    kinds = list(EFFECTS)
    wrong = decided = large = 0
    for i, values in enumerate(differences):
        kind = kinds[i % len(kinds)]
        verdict = judge((values + EFFECTS[kind]).tolist())
        wrong += verdict == "supported" and kind in ("absent", "opposite")
        wrong += verdict == "refuted" and kind == "present"
        if abs(EFFECTS[kind]) >= 3.0:
            large += 1
            decided += verdict in ("supported", "refuted")
    rate = decided / large
    passed = wrong <= WRONG_ALLOWED * len(differences) / 200 and rate >= DECIDED_NEEDED
    return {"wrong": int(wrong), "total": len(differences), "decided_rate": rate, "passed": bool(passed)}


def body(size: Size, seed: int) -> Result:
    count = {"quick": 200, "standard": 200, "full": 2000}[size]
    differences = paired_differences(count, seed)
    judges: dict[str, Judge] = {
        "the judge": the_judge,
        "mutant: always inconclusive": always_inconclusive,
        "mutant: sign only": sign_only,
    }
    found = {name: calibrate(judge, differences) for name, judge in judges.items()}
    parts = []
    for name, row in found.items():
        should_pass = name == "the judge"
        parts.append(
            Part(
                name=name,
                verdict="supported" if row["passed"] == should_pass else "refuted",
                reason=f"{row['wrong']} of {row['total']} wrong, {100 * row['decided_rate']:.0f} % of the effects of 3 "
                f"standard deviations decided at {SEEDS} seeds: {'passes' if row['passed'] else 'fails'}, and should "
                f"{'pass' if should_pass else 'fail'}.",
                effect=float(row["wrong"]),
                unit="wrong verdicts",
                margin=WRONG_ALLOWED * count / 200,
                n=count,
            )
        )

    def draw(axis: Axes) -> None:
        names = list(found)
        axis.barh(names, [found[n]["wrong"] for n in names], color=LIGHT["exact"])
        axis.axvline(WRONG_ALLOWED * count / 200, color=LIGHT["identity"], linestyle="--")
        axis.set_xlabel(f"wrong verdicts of {count} (dashed: allowed)")
        axis.set_title("Planted truths")

    judge = found["the judge"]
    summary = {key: judge[key] for key in ("wrong", "total", "decided_rate")}
    return Result(parts, {"judges": found, "effects": EFFECTS, "differences": differences}, draw, summary)


EXPERIMENT = Experiment(
    "planted",
    "Calibration of the judge on planted truths",
    "Pairs of equal arms on a noisy quadratic get an effect planted: present, absent, opposite or tiny. The judge must "
    "be wrong at most 3 times in 200 and decide 80 % of the large effects; two mutant judges must fail the same test.",
    (),
    body,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
