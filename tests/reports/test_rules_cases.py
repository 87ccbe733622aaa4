"""The rules of C3 and C5 to C8 at their corners: what each refuses to conclude, and why."""

from __future__ import annotations

import pytest
from planted_cells import GRID, START, cell, gap_cells, rng, setting, sweep_cells
from synthetic import Truth, build

from reports.cells import Result, cells_of, result_of
from reports.claims import BY_ID, PROBES_NEEDED
from reports.evidence import BenchMemory, ProbeStep
from reports.records import sha256_of, write_json
from reports.rules import Material, judgements
from reports.rules.bytes import judge_bytes
from reports.rules.descent import holds, share_verdict
from reports.rules.order import judge_order
from reports.rules.quality import TIME, UPDATES, gaps, judge_quality
from reports.rules.stability import contrast_table, judge_stability, ladders_of
from reports.run import load_run


def quality(cells):
    return judge_quality(cells, BY_ID["C5"])


# -- C5 --------------------------------------------------------------------------------------------------------------


def test_the_gap_and_the_missed_share_of_the_drop():
    one = cell({"full": [3.0], "identity-momentum": [3.3]})
    found = gaps(one, "identity-momentum")
    assert found.values[0] == pytest.approx(0.1)
    assert found.missed[0] == pytest.approx(0.3 / (START - 3.0))


def test_one_model_alone_cannot_support_it():
    paper = quality(gap_cells(rng(1), 0.005, 0.001, models=("m1",)))[0]
    assert paper.verdict == "inconclusive" and "one model alone" in paper.reason
    assert quality(gap_cells(rng(1), 0.005, 0.001))[0].verdict == "supported"


def test_one_bad_task_is_not_averaged_away():
    """Gaps of 3.5 % and -3 %: the mean is below 2 %, one task is wholly above."""
    cells = [
        *gap_cells(rng(2), 0.035, 0.001, models=("m1",)),
        *gap_cells(rng(3), -0.03, 0.001, models=("m2",)),
    ]
    paper = quality(cells)[0]
    assert paper.effect < 0.02 and paper.verdict == "inconclusive" and "wholly above" in paper.reason


def test_a_diverged_arm_is_never_left_out_of_the_gap():
    good = {"full": [3.0, 3.01, 2.99], "exact-momentum": [3.0] * 3}
    others = gap_cells(rng(4), 0.0, 0.001, models=("m2",))
    one = cell({**good, "identity-momentum": [3.0, None, 3.0]})
    paper = quality([one, *others])[0]
    assert paper.verdict == "inconclusive" and "without a finite final loss" in paper.reason
    every = cell({**good, "identity-momentum": [None, None, None]})
    assert quality([every, *others])[0].verdict == "refuted"


def test_full_that_diverged_gives_no_gap():
    one = cell({"full": [None, 3.0, 3.0], "identity-momentum": [3.1, 3.1, 3.1]})
    assert sorted(gaps(one, "identity-momentum").values) == [1, 2]


def test_equal_updates_reads_the_run_of_p_times_the_steps():
    short = cell({"full": [3.0], "identity-momentum": [3.3]})
    long = cell({"identity-momentum": [3.06]}, setting(steps=400))
    assert gaps(short, "identity-momentum", UPDATES, long).values[0] == pytest.approx(0.02)
    paper = quality([short, long, cell({"identity-momentum": [9.0]}, setting(steps=104))])[0]
    names = {part.name: part for part in paper.parts}
    assert names["m1 on wikitext-2, nf4, 100 steps, identity-momentum, equal updates per block"].effect == (
        pytest.approx(0.02)
    )
    assert paper.n == 1  # the companion is no cell of its own


def test_equal_time_reads_the_loss_at_the_seconds_of_full():
    """Full takes 100 s. The arm's log: 3.4 after 60 s, 3.2 after 140 s, so 3.3 after 100 s."""
    one = cell({"full": [3.0], "identity-momentum": [3.2]})
    results = dict(one.results)
    results["identity-momentum", 0] = Result("done", START, 3.2, None, 140.0, ((60.0, 3.4), (140.0, 3.2)))
    timed = type(one)(one.setting, one.arms, results)
    assert gaps(timed, "identity-momentum", TIME).values[0] == pytest.approx(0.1)
    results["identity-momentum", 0] = Result("done", START, 3.2, None, 70.0, ((70.0, 3.2),))
    assert gaps(type(one)(one.setting, one.arms, results), "identity-momentum", TIME).seeds == 0


# -- C6 --------------------------------------------------------------------------------------------------------------


def limits(**octaves):
    """Three seeds, all alike, `octaves` above 3e-3."""
    return {arm.replace("_", "-"): [3e-3 * 2.0**value] * 3 for arm, value in octaves.items()}


BASE = {
    "full": 0.0,
    "full_eta_over_sqrt_p": 1.0,
    "full_eta_over_p": 2.0,
    "exact_momentum": 1.0,
    "exact_frozen": 2.0,
}


def stability(*cells):
    return judge_stability([one for group in cells for one in group], BY_ID["C6"])


def test_equal_movement_decides_and_not_equal_rate():
    """Above full at equal rate, but where T9's slower full is: movement explains it and the claim falls."""
    paper, ours = stability(sweep_cells(limits(**BASE, identity_momentum=1.0)))
    assert paper.verdict == "refuted" and ours.verdict == "supported"
    assert [part.verdict for part in paper.parts] == ["supported", "refuted"]
    assert stability(sweep_cells(limits(**BASE, identity_momentum=2.0)))[0].verdict == "supported"


def test_a_tie_supports_nothing():
    """All differences exactly 0: the interval is a point, and the claim asks for more than 0."""
    flat = dict.fromkeys(BASE, 0.0)
    assert stability(sweep_cells(limits(**flat, identity_momentum=0.0)))[0].verdict == "refuted"


def test_one_base_where_it_holds_is_enough():
    holds_here = sweep_cells(limits(**BASE, identity_momentum=3.0), base="nf4")
    fails_here = sweep_cells(limits(**BASE, identity_momentum=-1.0), base="none")
    assert stability(holds_here, fails_here)[0].verdict == "supported"
    assert stability(fails_here)[0].verdict == "refuted"


def test_an_arm_that_outlives_the_grid_may_support_and_never_refute():
    never = {**limits(**BASE), "identity-momentum": [10.0] * 3}
    paper = stability(sweep_cells(never))[0]
    assert paper.verdict == "supported" and "at least" in paper.reason
    # Full outlives it as well: nothing is known of the difference.
    both = {**never, "full": [10.0] * 3, "full-eta-over-sqrt-p": [10.0] * 3}
    assert stability(sweep_cells(both))[0].verdict == "inconclusive"
    # Full at the reduced rate outlives it, the arm does not: the difference is at most what is seen.
    high = {**limits(**BASE), "identity-momentum": [3e-3] * 3, "full-eta-over-sqrt-p": [10.0] * 3}
    assert stability(sweep_cells(high))[0].verdict == "refuted"
    # The arm diverges everywhere, full too but one step later: a bound from above may not support.
    low = {
        **limits(**BASE),
        "identity-momentum": [10.0] * 3,
        "full": [1e-9] * 3,
        "full-eta-over-sqrt-p": [1e-9] * 3,
    }
    assert stability(sweep_cells(low))[0].verdict == "supported"
    late = {**limits(**BASE), "identity-momentum": [1e-9] * 3}
    assert stability(sweep_cells(late))[0].verdict == "refuted"


def test_a_rate_must_separate_all_seeds():
    """Differences of one octave in every seed, at rates so far apart that no single rate separates them."""
    spread = {
        "full": [GRID[0], GRID[2], GRID[4]],
        "full-eta-over-sqrt-p": [GRID[0], GRID[2], GRID[4]],
        "identity-momentum": [GRID[1], GRID[3], GRID[5]],
    }
    shifted = {name: [rate * 2 for rate in rates] for name, rates in spread.items()}
    paper = stability(sweep_cells(shifted))[0]
    assert paper.verdict == "inconclusive" and "no rate at which" in paper.parts[0].reason


def test_every_explanation_has_its_contrast():
    nf4 = sweep_cells(limits(**BASE, identity_momentum=-1.0))
    plain = sweep_cells(limits(**{**BASE, "full": 1.0}, identity_momentum=-1.0), base="none")
    low = sweep_cells(limits(full=-1.0), arithmetic="bfloat16")
    rows = contrast_table(ladders_of([*nf4, *plain, *low]))
    outcome = {(row.explanation, "none" in row.compared): row.survives for row in rows}
    assert outcome["a", False] == "survives" and outcome["c", False] == "falls"
    assert outcome["b", False] == "falls"  # exact frozen stands where its equal movement is
    assert outcome["d", True] == "survives"  # full diverges an octave earlier in 4-bit
    assert outcome["e", False] == "survives"
    curved = sweep_cells(limits(**{**BASE, "exact_frozen": 3.0}, identity_momentum=3.0))
    outcome = {row.explanation: row.survives for row in contrast_table(ladders_of(curved))}
    assert outcome["b"] == "survives" and outcome["a, frozen"] == "falls" and outcome["c"] == "survives"


def test_arithmetic_is_compared_at_an_equal_horizon():
    """Full shows its divergence only after 50 steps; a sweep of 40 steps cannot have seen it."""
    long, short = sweep_cells(limits(full=0.0)), sweep_cells(limits(full=5.0), arithmetic="bfloat16")
    slow = []
    for one in long:
        results = {
            key: Result("diverged", START, None, 30, 100.0, (), 50) if found.status == "diverged" else found
            for key, found in one.results.items()
        }
        slow.append(type(one)(one.setting, one.arms, results))
    cut = [type(one)(setting(steps=40, rate=one.setting.learning_rate, arithmetic="bfloat16"), one.arms, one.results)
           for one in short]  # fmt: skip
    row = next(row for row in contrast_table(ladders_of([*slow, *cut])) if row.explanation == "e")
    assert row.survives == "open" and "40 steps" in row.compared


def test_divergence_is_established_by_its_window(tmp_path):
    folder = build(tmp_path, Truth(diverged=(("exact-momentum", 1),)))
    run = load_run(folder)
    found = result_of(run.outcome("exact-momentum", 1), run.arms["exact-momentum", 1])
    assert found.established == found.began + 20
    assert result_of(run.outcome("full", 1), run.arms["full", 1]).established is None


def test_few_rates_are_no_sweep():
    assert stability(sweep_cells(limits(**BASE, identity_momentum=1.0), grid=GRID[:3]))[0].verdict == (
        "not testable here"
    )


# -- C7 --------------------------------------------------------------------------------------------------------------


def bench(peaks, weights="random weights", **more):
    names = ("qwen2.5-0.5b", "gemma3-1b", "qwen2.5-1.5b", "qwen2.5-3b", "gemma3-4b")
    arms = [{"name": name, "peak_bytes": int(peak * 1e9), **more} for name, peak in peaks.items()]
    cases = {name: {"weights": weights, "arms": arms} for name in names}
    return BenchMemory.model_validate({"benchmark": "memory", "cases": cases})


def test_a_real_model_is_needed_and_one_mode_below_keeps_it_open():
    random = judge_bytes(bench({"full": 0.9}), BY_ID["C7"])[0]
    assert random.verdict == "inconclusive" and "trained weights" in random.reason
    assert judge_bytes(bench({"full": 0.9}, "real"), BY_ID["C7"])[0].verdict == "supported"
    mixed = judge_bytes(bench({"full": 1.1, "identity": 0.9}, "real"), BY_ID["C7"])[0]
    assert mixed.verdict == "inconclusive"
    assert judge_bytes(bench({"full": 1.1, "identity": 1.0}, "real"), BY_ID["C7"])[0].verdict == "refuted"


def test_peers_are_shown_and_decide_nothing():
    paper = judge_bytes(bench({"full": 0.9, "qlora": 5.0}, "real"), BY_ID["C7"])[0]
    assert paper.verdict == "supported" and "qlora 5,000 MB" in paper.parts[0].reason
    assert judge_bytes(bench({"qlora": 0.5}, "real"), BY_ID["C7"])[0].verdict == "not testable here"


# -- C8 --------------------------------------------------------------------------------------------------------------


def order(losses, seconds=None):
    return judge_order([cell(losses, seconds=seconds)], BY_ID["C8"])


def test_a_method_without_a_finite_loss_is_the_worse_one():
    rest = {"exact-momentum": [3.0, 3.01, 2.99]}
    part = order({**rest, "cached": [None] * 3})[0].parts[0]
    assert part.verdict == "supported" and "in 3 of 3" in part.reason
    part = order({"exact-momentum": [None] * 3, "cached": [3.0] * 3})[0].parts[0]
    assert part.verdict == "refuted"
    assert order({**rest, "cached": [None, 3.1, 3.1]})[0].parts[0].verdict == "inconclusive"
    assert order({"exact-momentum": [3.0, 3.0], "cached": [None] * 2})[0].parts[0].verdict == "inconclusive"


def test_seconds_of_an_arm_that_stopped_early_are_not_compared():
    losses = {"exact-momentum": [3.0] * 3, "importance": [None] * 3}
    paper = order(losses, {"exact-momentum": 100.0, "importance": 10.0})[0]
    assert paper.parts[0].verdict == "inconclusive"


def test_pairs_that_were_not_trained_keep_the_order_open():
    paper = order({"lisa": [2.9, 2.91, 2.92], "identity-momentum": [3.0, 3.01, 3.02]})[0]
    assert paper.parts[0].verdict == "supported" and paper.verdict == "inconclusive"
    assert "exact-momentum against importance" in paper.reason


# -- C3 --------------------------------------------------------------------------------------------------------------


def step(loss_after, **changes):
    base = {"point": "start", "seed": 0, "block": 0, "multiple": 1.0, "mode": "exact", "loss_before": 3.0,
            "loss_after": loss_after, "gradient_squared": 0.2, "smoothness": 10.0}  # fmt: skip
    return ProbeStep.model_validate({**base, **changes})


def test_the_inequality_at_its_edge():
    """|g|^2/(2 L) = 0.01."""
    assert holds(step(2.99)) and not holds(step(2.991)) and not holds(step(None))
    # A surrogate of cosine 0.5 and ratio 0.5 is promised 0.5 (1 - 0.5) = a quarter of it; one uphill may rise.
    surrogate = {"mode": "identity", "cosine": 0.5, "norm_ratio": 0.5}
    assert holds(step(2.9975, **surrogate)) and not holds(step(2.998, **surrogate))
    uphill = surrogate | {"cosine": -0.5}
    assert holds(step(3.007, **uphill)) and not holds(step(3.008, **uphill))


def test_the_share_needs_seeds_and_steps():
    assert share_verdict(100, 100, 3) == "supported" and share_verdict(100, 100, 2) == "inconclusive"
    n = PROBES_NEEDED
    assert share_verdict(n, n, 3) == "supported" and share_verdict(n - 1, n - 1, 3) == "inconclusive"
    assert share_verdict(98, 100, 3) == "inconclusive"  # its upper 95 % limit is above 99 %
    assert share_verdict(90, 100, 3) == "refuted"


def with_probes(root, **truth):
    folder = build(root, Truth(**truth))
    steps = [step(2.98, seed=seed, block=i).model_dump(mode="json") for seed in range(3) for i in range(20)]
    evidence = {"kind": "probes", "predictions_sha256": sha256_of(folder.predictions), "steps": steps}
    write_json(folder.evidence("probes"), evidence)
    return load_run(folder)


def test_the_surrogate_must_point_downhill_in_every_layer(tmp_path):
    paper, ours = judgements(with_probes(tmp_path / "a", high_cosine=True), "C3")
    assert (paper.verdict, ours.verdict) == ("supported", "supported")
    assert "guarantees cos^2" in paper.reason
    paper, ours = judgements(with_probes(tmp_path / "b", cosine_shift=-0.3), "C3")
    assert (paper.verdict, ours.verdict) == ("refuted", "supported")


def test_probes_of_other_predictions_are_refused(tmp_path):
    run = with_probes(tmp_path)
    evidence = {"kind": "probes", "predictions_sha256": "0" * 64, "steps": []}
    write_json(run.folder.evidence("probes"), evidence)
    with pytest.raises(ValueError, match=r"probes\.json"):
        load_run(run.folder)


# -- several runs ------------------------------------------------------------------------------------------------------


def test_runs_of_two_models_are_judged_together(tmp_path):
    """C1 is supported by two models whose every layer is above; C4 by one that reaches it."""
    high, low, slow = (
        load_run(build(tmp_path / name, Truth(**truth, overrides=(f"name={name}", f"model={name}"))))
        for name, truth in (
            ("high", {"high_cosine": True}), ("low", {}), ("slow", {"speed_error": -0.6}),
        )
    )  # fmt: skip
    other = load_run(
        build(tmp_path / "other", Truth(high_cosine=True, overrides=("name=other", "model=other")))
    )
    assert judgements(Material((high,)), "C1")[0].verdict == "inconclusive"
    assert judgements(Material((high, other)), "C1")[0].verdict == "supported"
    assert judgements(Material((high, low)), "C1")[0].verdict == "refuted"
    same = load_run(build(tmp_path / "same", Truth(high_cosine=True, overrides=("name=same", "model=high"))))
    assert judgements(Material((high, same)), "C1")[0].verdict == "inconclusive"
    assert judgements(Material((slow,)), "C4")[0].verdict == "inconclusive"
    paper, ours = judgements(Material((slow, high)), "C4")
    assert paper.verdict == "supported" and ours.verdict == "refuted"
    assert paper.reason.startswith("slow: inconclusive, high: supported.")


def test_one_arm_that_ended_in_two_ways_is_refused(tmp_path):
    one, two = (
        load_run(build(tmp_path / str(i), Truth(gap=gap))) for i, gap in enumerate((0.0, 0.1))
    )  # fmt: skip
    with pytest.raises(ValueError, match="expected the same"):
        cells_of([one, two])
    assert len(cells_of([one, one])) == 1
