"""The judge on invented runs whose truth is known: each rule decides each way, for the right reason."""

from __future__ import annotations

import json

import pytest
from synthetic import Truth, build

from bcd_theory.predictions import LAW_TOLERANCE, Predictions
from reports.claims import CLAIMS
from reports.config import RunConfig
from reports.judge import judge, reproduce_command, write_verdicts
from reports.records import RunFolder, read_record, sha256_of, write_json
from reports.run import load_run
from reports.verdicts import read_verdicts


def verdict(folder, claim):
    return judge(folder, [claim]).verdicts[0]


def part(judgement, name):
    return next(entry for entry in judgement.parts if entry.name.startswith(name))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return build(tmp_path_factory.mktemp("good"))


def test_the_default_truth(good):
    verdicts = judge(good)
    found = {entry.claim: (entry.paper.verdict, entry.ours.verdict) for entry in verdicts.verdicts}
    assert found == {
        "C1": ("refuted", "supported"), "C2": ("supported", "supported"), "C4": ("supported", "supported"),
        "C5": ("refuted", "supported"), "C8": ("not testable here", "inconclusive"),
        **dict.fromkeys(("C3", "C6", "C7"), ("not testable here",) * 2),
    }  # fmt: skip
    assert verdicts.missing == ()
    assert verdicts.predictions_sha256 == sha256_of(good.predictions)


def test_verdicts_file_round_trip(good, tmp_path):
    verdicts = judge(good)
    write_verdicts(RunFolder(tmp_path), verdicts)
    assert read_verdicts(tmp_path / "verdicts.json") == verdicts
    raw = json.loads((tmp_path / "verdicts.json").read_text(encoding="utf-8"))
    assert raw["schema"] == 1 and raw["run"] == "validate"
    first = raw["verdicts"][0]
    assert {"claim", "title", "statement", "theorems", "paper", "ours", "command"} <= first.keys()
    assert {"verdict", "rule", "margin", "effect", "interval", "n", "reason"} <= first["paper"].keys()


def test_every_claim_is_in_the_table_with_rules_and_a_reason(good):
    verdicts = judge(good)
    assert [entry.claim for entry in verdicts.verdicts] == [f"C{i}" for i in range(1, 9)]
    for entry, claim in zip(verdicts.verdicts, CLAIMS, strict=True):
        assert entry.paper.rule and entry.ours.rule and entry.change
        for judgement in (entry.paper, entry.ours):
            assert judgement.reason.endswith(".")
            if judgement.verdict == "not testable here":
                assert judgement.reason.startswith("Not tested: ") and judgement.n == 0
        assert claim.assumptions and claim.prediction and claim.needed >= 1


def test_judge_is_deterministic(good):
    assert judge(good) == judge(good)


def test_one_seed_never_decides(tmp_path):
    """U44."""
    folder = build(tmp_path, size="quick")
    for entry in judge(folder).verdicts:
        for judgement in (entry.paper, entry.ours):
            assert judgement.verdict in ("inconclusive", "not testable here"), judgement.reason
            for piece in judgement.parts:
                assert piece.verdict == "inconclusive", piece.reason
    assert "1 seed" in verdict(folder, "C2").ours.reason
    assert "1 seed, 3 needed" in part(verdict(folder, "C2").ours, "law").reason
    assert "2 held-out batches" in verdict(folder, "C1").paper.reason
    assert "1 repeat" in verdict(folder, "C4").paper.reason


# --- registration -------------------------------------------------------------------------------------------


def rewrite_first_line(path, change):
    lines = path.read_text(encoding="utf-8").splitlines()
    header = json.loads(lines[0])
    change(header)
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n", encoding="utf-8")


def test_a_record_registered_against_other_predictions_is_refused(tmp_path):
    folder = build(tmp_path, Truth(overrides=("steps=8", "eval_every=8")))
    path = folder.arm("exact-frozen", 1).metrics
    expected = sha256_of(folder.predictions)
    rewrite_first_line(path, lambda header: header.update(predictions_sha256="b" * 64))
    with pytest.raises(ValueError) as error:
        judge(folder)
    message = str(error.value)
    assert "\n" not in message and str(path) in message and "b" * 64 in message and expected in message


def test_changed_predictions_are_refused(tmp_path):
    folder = build(tmp_path, Truth(overrides=("steps=8",)))
    with folder.predictions.open("ab") as file:
        file.write(b" ")  # the same predictions, other bytes: not what was registered
    with pytest.raises(ValueError, match="predictions_sha256"):
        judge(folder)


def test_a_record_without_registration_is_refused(tmp_path):
    folder = build(tmp_path, Truth(overrides=("steps=8",)))
    path = folder.arm("full", 0).metrics
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[1:]) + "\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl: found no predictions_sha256, expected [0-9a-f]{64}"
    ):
        judge(folder)


@pytest.mark.parametrize("kind", ["fidelity", "timing", "memory"])
def test_evidence_without_registration_is_refused(tmp_path, kind):
    folder = build(tmp_path, Truth(overrides=("steps=8",)))
    record = json.loads(folder.evidence(kind).read_text(encoding="utf-8"))
    record["predictions_sha256"] = "d" * 64
    write_json(folder.evidence(kind), record)
    with pytest.raises(ValueError, match=rf"{kind}\.json: found predictions_sha256 d+, expected"):
        judge(folder)


def test_a_record_of_another_arm_or_other_settings_is_refused(tmp_path):
    folder = build(tmp_path, Truth(overrides=("steps=8",)))
    path = folder.arm("full", 0).metrics
    rewrite_first_line(path, lambda header: header.update(seed=1))
    with pytest.raises(ValueError, match="header of arm full, seed 1, expected arm full, seed 0"):
        judge(folder)
    rewrite_first_line(path, lambda header: header.update(seed=0))
    rewrite_first_line(path, lambda header: header["arm"].update(idle="frozen"))
    with pytest.raises(ValueError, match="other settings of arm full"):
        judge(folder)


# --- C1 -----------------------------------------------------------------------------------------------------


def test_c1_one_good_model_cannot_support_the_paper(tmp_path):
    paper = verdict(build(tmp_path, Truth(high_cosine=True)), "C1").paper
    assert paper.verdict == "inconclusive"
    assert "0 of 30 layers before" in paper.reason and "one model cannot support" in paper.reason


def test_c1_half_of_the_layers_is_not_more_than_half(tmp_path):
    folder = build(tmp_path, Truth(overrides=("steps=8",)))
    record = json.loads(folder.evidence("fidelity").read_text(encoding="utf-8"))

    def below(n):
        for batch in record["batches"]:
            for row in batch["rows"]:
                if (row["mode"], row["layout"]) == ("identity", "cyclic"):
                    row["cosine"] = [0.3] * n + [0.8] * (30 - n)
        write_json(folder.evidence("fidelity"), record)
        return verdict(folder, "C1").paper

    assert below(15).verdict == "inconclusive"
    assert below(16).verdict == "refuted"
    assert "16 of 30 layers before fine-tuning; 16 of 30 layers after" in below(16).reason
    # All below before fine-tuning, none after: the two stages disagree.
    for batch in record["batches"]:
        if batch["stage"] == "after":
            for row in batch["rows"]:
                row["cosine"] = [0.9] * 30
    assert below(0).verdict == "inconclusive"
    for batch in record["batches"]:
        for row in batch["rows"]:
            row["cosine"] = [0.3 if batch["stage"] == "start" else 0.9] * 30
    write_json(folder.evidence("fidelity"), record)
    assert verdict(folder, "C1").paper.verdict == "inconclusive"


def test_c1_scatter_over_batches_leaves_layers_undecided(tmp_path):
    paper = verdict(build(tmp_path, Truth(batch_noise=0.6)), "C1").paper
    assert paper.verdict == "inconclusive"
    start = part(paper, "identity, before")
    assert "undecided" in start.reason and start.effect < 0.5


@pytest.mark.parametrize(("shift", "expected"), [(0.0, "supported"), (0.07, "supported"), (0.2, "refuted")])
def test_c1_our_prediction(tmp_path, shift, expected):
    ours = verdict(build(tmp_path, Truth(cosine_shift=shift)), "C1").ours
    assert ours.verdict == expected
    # The top block's cosines are exactly 1 whatever the shift: 7 layers of each mode always agree.
    assert ours.effect == pytest.approx(1.0 if expected == "supported" else 14 / 60)
    assert not part(ours, "composed").counts and part(ours, "cyclic").counts


def test_c1_without_evidence(tmp_path):
    entry = verdict(build(tmp_path, Truth(evidence=("timing",))), "C1")
    assert entry.paper.verdict == entry.ours.verdict == "inconclusive"
    assert "No fidelity was measured" in entry.paper.reason


def test_c1_a_layer_without_gradient_is_left_out(tmp_path):
    folder = build(tmp_path, Truth(overrides=("steps=8",)))
    record = json.loads(folder.evidence("fidelity").read_text(encoding="utf-8"))
    for batch in record["batches"]:
        for row in batch["rows"]:
            row["cosine"][0] = None
    write_json(folder.evidence("fidelity"), record)
    entry = verdict(folder, "C1")
    assert "of 29 layers" in entry.paper.reason and "58 of 58 pairs" in entry.ours.reason


# --- C2 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truth", "law"),
    [
        (Truth(law_worst=0.99 * LAW_TOLERANCE), "supported"),
        (Truth(law_worst=LAW_TOLERANCE), "refuted"),
        (Truth(violations=1), "refuted"),
        (Truth(moved=1), "refuted"),
    ],
)
def test_c2_law(tmp_path, truth, law):
    entry = verdict(build(tmp_path, truth), "C2")
    assert part(entry.ours, "law").verdict == law
    assert entry.ours.verdict == law
    # A broken law does not prove that idle layers stand still.
    assert entry.paper.verdict == ("supported" if law == "supported" else "inconclusive")


def test_c2_law_needs_both_policies(tmp_path):
    arms = "arms=[full, exact-momentum, full-eta-over-sqrt-p]"
    law = part(verdict(build(tmp_path, Truth(overrides=(arms,))), "C2").ours, "law")
    assert law.verdict == "inconclusive" and "the frozen policy was not checked" in law.reason


@pytest.mark.parametrize(
    ("gap", "noise", "expected"),
    [(0.0, 0.005, "supported"), (0.2, 0.005, "refuted"), (-0.2, 0.005, "refuted"), (0.0, 0.2, "inconclusive"),
     (0.05, 0.005, "inconclusive")],
)  # fmt: skip
def test_c2_equivalence(tmp_path, gap, noise, expected):
    ours = verdict(build(tmp_path, Truth(gap=gap, seed_noise=noise)), "C2").ours
    for name in ("momentum equivalence", "frozen equivalence"):
        piece = part(ours, name)
        assert piece.verdict == expected, piece.reason
        assert piece.n == 3 and piece.interval is not None
    assert ours.verdict == expected
    if abs(gap) == 0.2:
        assert part(ours, "momentum equivalence").effect == pytest.approx(gap, abs=0.03)
        assert (" less than that of" in part(ours, "momentum equivalence").reason) == (gap < 0)


def test_c2_equivalence_is_paired_by_seed(tmp_path):
    """Seeds differ by much more than the margin, the pairs do not: still decided."""
    folder = build(tmp_path)
    run = load_run(folder)
    drops = [run.outcome("exact-momentum", seed).drop for seed in (0, 1, 2)]
    piece = part(judge(run, ["C2"]).verdicts[0].ours, "momentum equivalence")
    assert max(drops) - min(drops) > 0.02
    assert piece.interval[1] - piece.interval[0] < 0.04 and piece.verdict == "supported"


@pytest.mark.parametrize(
    ("ratio", "momentum", "frozen"),
    [(0.75, "supported", "refuted"), (0.35, "refuted", "supported"), (1.1, "refuted", "refuted"),
     (0.5, "inconclusive", None)],
)  # fmt: skip
def test_c2_movement(tmp_path, ratio, momentum, frozen):
    ours = verdict(build(tmp_path, Truth(movement=ratio)), "C2").ours
    found = part(ours, "momentum movement")
    # At the predicted bound itself scatter decides which means fall inside; it is never a refutation.
    assert found.verdict == momentum or (ratio == 0.5 and found.verdict == "supported")
    if frozen:
        assert part(ours, "frozen movement").verdict == frozen
    assert found.effect == pytest.approx(ratio, rel=0.05)


def test_c2_paper_is_refuted_when_idle_layers_stand_still(tmp_path):
    paper = verdict(build(tmp_path, Truth(idle_moves=False)), "C2").paper
    assert paper.verdict == "refuted" and paper.effect == 0.0


def test_c2_diverged_and_missing_arms_are_named(tmp_path):
    truth = Truth(
        without=(("full-eta-over-p", 2),), diverged=(("exact-momentum", 0),), unfinished=(("full", 1),)
    )
    folder = build(tmp_path, truth)
    run = load_run(folder)
    assert run.outcome("exact-momentum", 0).status == "diverged"
    assert run.outcome("full-eta-over-p", 2).status == "missing"
    assert run.outcome("full", 1).status == "unfinished" and run.outcome("full", 0).status == "done"
    ours = judge(run, ["C2"]).verdicts[0].ours
    frozen = part(ours, "frozen equivalence")
    assert frozen.verdict == "inconclusive" and frozen.n == 1
    assert "seed 1: full unfinished" in frozen.reason and "seed 2: full-eta-over-p missing" in frozen.reason
    assert "arm full-eta-over-p, seed 2: missing" in judge(run).missing


# --- C4 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "noise", "ours", "paper"),
    [(0.0, 0.003, "supported", "supported"), (0.08, 0.003, "supported", "supported"),
     (0.25, 0.003, "refuted", "supported"), (-0.4, 0.003, "refuted", "inconclusive"),
     (0.14, 0.2, "inconclusive", "supported")],
)  # fmt: skip
def test_c4(tmp_path, error, noise, ours, paper):
    entry = verdict(build(tmp_path, Truth(speed_error=error, repeat_noise=noise)), "C4")
    assert entry.ours.verdict == ours, entry.ours.reason
    assert entry.paper.verdict == paper, entry.paper.reason
    assert "of 12 predicted speed-ups" in entry.ours.reason and "worst:" in entry.ours.reason
    assert "27.0 %" in entry.paper.reason


def test_c4_without_listed_repeats_is_not_decided(tmp_path):
    folder = build(tmp_path, Truth(overrides=("steps=8",)))
    record = json.loads(folder.evidence("timing").read_text(encoding="utf-8"))
    for row in record["rows"]:
        del row["repeats"]
    write_json(folder.evidence("timing"), record)
    entry = verdict(folder, "C4")
    assert entry.paper.verdict == entry.ours.verdict == "inconclusive"
    assert "3 needed" in entry.ours.reason


# --- the rest -----------------------------------------------------------------------------------------------


def test_unknown_claim(good):
    with pytest.raises(ValueError, match="claim is 'C9'"):
        judge(good, ["C9"])


def test_reproduce_command_gives_the_same_settings():
    import shlex

    for size, overrides in (
        ("standard", []), ("quick", []), ("full", ["optimizer.learning_rate=3e-4"]),
        ("standard", ["arms=[full, exact-frozen]", "seeds=[0, 1, 2, 3]", "quantization=null", "name=x"]),
    ):  # fmt: skip
        config = RunConfig.preset(size).override(overrides)
        words = shlex.split(reproduce_command(config))
        assert words[:2] == ["lcsb", "validate"]
        chosen = words[words.index("--size") + 1] if "--size" in words else "standard"
        given = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        assert RunConfig.build(chosen, None, given) == config
        assert chosen == size


def test_predictions_round_trip(good):
    predictions = read_record(good.predictions, Predictions)
    assert predictions.number("law/tolerance") == LAW_TOLERANCE


def test_partial_folder_is_judged(tmp_path):
    truth = Truth(evidence=(), overrides=("steps=8", "arms=[full, exact-momentum]"), without=(("full", 0),))
    verdicts = judge(build(tmp_path, truth))
    assert {entry.paper.verdict for entry in verdicts.verdicts} <= {
        "inconclusive",
        "not testable here",
        "supported",
    }
    assert "evidence/fidelity.json is not there" in verdicts.missing
