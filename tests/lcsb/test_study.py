"""The study: its parts as data, its cost, and a tiny one run, resumed and judged."""

from __future__ import annotations

import dataclasses

import pytest
import tiny_run

from lcsb import stages, study
from lcsb.study import Planned, cost_of, estimate, measurements_like, plan, run_study, write_manifest
from lcsb.train import train_arm
from reports.judge import judge
from reports.records import RunConfig, RunFolder, read_json, sha256_of
from reports.study import Manifest, judge_study, write_study


def test_standard_is_the_study_that_was_asked_for():
    runs = plan("standard")
    assert sorted({run.part for run in runs}) == list("abcdef")
    assert all(len(run.config.seeds) == 3 for run in runs)
    of = {part: [run.config for run in runs if run.part == part] for part in "abcdef"}
    assert [(len(c.arms), c.steps, c.data.tokens) for c in of["a"]] == [(8, 200, 128)]
    assert [(len(c.arms), c.steps) for c in of["b"]] == [(4, 800)]
    assert [(len(c.arms), c.steps, c.data.tokens) for c in of["c"]] == [(5, 150, 256)] * 2
    assert [(len(c.arms), c.steps) for c in of["d"]] == [(8, 200)]
    assert [(c.model, len(c.arms), c.steps) for c in of["e"]] == [("gemma3-270m", 5, 100)]
    sweeps = [(c.quantization, c.compute_dtype, len(c.arms), c.steps) for c in of["f"]]
    assert [sweeps.count(key) for key in ((None, "auto", 7, 60), ("nf4", "auto", 7, 60))] == [8, 8]
    assert sweeps.count(("nf4", "bfloat16", 3, 40)) == 4 and len(sweeps) == 20
    # b trains p times as long at a's setting, which is what equal updates per block means
    a, b = of["a"][0], of["b"][0]
    assert b.steps == a.cycle_length * a.steps and study._group(a) == study._group(b)


@pytest.mark.parametrize("size", ["quick", "standard", "full"])
def test_runs_share_measurements_only_within_a_group(size):
    runs = {run.name: run for run in plan(size)}
    assert len(runs) == len(plan(size))
    for run in runs.values():
        if run.donor is not None:
            donor = runs[run.donor]
            assert donor.donor is None and study._group(donor.config) == study._group(run.config)
    alone = plan(size, ["f"])
    assert alone[0].donor is None and all(run.donor in {None, *(r.name for r in alone)} for run in alone)


def test_unknown_sizes_and_parts_are_refused():
    with pytest.raises(ValueError, match="size is 'big'"):
        plan("big")
    with pytest.raises(ValueError, match="found 'g'"):
        plan("quick", ["g"])


def test_estimates_scale_with_the_multiplications():
    """Twice the tokens, twice the layers' seconds; the reference itself comes back as it is."""
    one, two = (estimate(RunConfig.build(overrides=[f"data.tokens={n}"])) for n in (128, 256))
    measured = study.reference()[0]
    assert one.costs.forward == pytest.approx(measured.costs.forward)
    assert two.costs.forward == pytest.approx(2 * one.costs.forward)
    assert two.costs.head == pytest.approx(2 * one.costs.head)
    gemma = estimate(RunConfig.build(overrides=["model=gemma3-270m"]))
    assert gemma.layers == 18 and gemma.costs.head > 4 * one.costs.head
    assert estimate(RunConfig.build(overrides=["model=somewhere/else"])) is None


ARMS = ("full", "full-eta-over-sqrt-p", "identity-momentum")


@pytest.fixture(scope="module")
def tiny_runs(tmp_path_factory, model_cache):
    """A sweep of four rates over a tiny model, two seeds; the first run measures for all."""
    place = tiny_run.write_model(tmp_path_factory.mktemp("model"))
    common = {"seeds": [0, 1], "steps": 3, "eval_every": 3, "checkpoint_every": 3, "arms": list(ARMS)}
    rates = (1e-3, 1e-2, 1e-1, 1.0)
    configs = [tiny_run.settings(place, name=f"f-{r:g}", optimizer__learning_rate=r, **common) for r in rates]
    names = [config.name for config in configs]
    return [
        Planned("f", name, config, stages.Needs(frozenset()), names[0] if i else None)
        for i, (name, config) in enumerate(zip(names, configs, strict=True))
    ]


@pytest.fixture
def here(monkeypatch):
    """Jobs in this process: starting others costs more than the work."""

    def together(title, jobs, workers, progress):
        for job in jobs:
            job.function(*job.arguments)

    monkeypatch.setattr(stages, "_run_part", together)


def test_a_study_runs_resumes_and_is_judged(tiny_runs, tmp_path, here, monkeypatch):
    root = tmp_path / "study"
    trained = []

    def counting(folder, arm, seed):
        trained.append((folder.root.name, arm, seed))
        return train_arm(folder, arm, seed)

    monkeypatch.setattr("lcsb.train.train_arm", counting)
    said = []
    assert run_study(root, "quick", tiny_runs[:2], None, said.append) == []
    assert len(trained) == 2 * len(ARMS) * 2
    # The second run took over the measurements of the first, but for its own learning rate.
    first, second = (RunFolder(root / "runs" / run.name) for run in tiny_runs[:2])
    a, b = read_json(first.measurements), read_json(second.measurements)
    assert a.pop("learning_rate") == 1e-3 and b.pop("learning_rate") == 1e-2 and a == b
    assert read_json(second.environment)["measured_in"] == first.root.name
    assert sha256_of(first.predictions) != sha256_of(second.predictions)
    # An arm that was lost is trained again, and nothing else.
    second.arm("full", 1).metrics.unlink()
    trained.clear()
    assert cost_of(root, tiny_runs[0]).finished and not cost_of(root, tiny_runs[1]).finished
    run_study(root, "quick", tiny_runs, None, said.append)
    assert trained[0] == (second.root.name, "full", 1)
    assert len(trained) == 1 + 2 * len(ARMS) * 2
    assert cost_of(root, tiny_runs[3]).source == "finished"
    verdicts = judge_study(root)
    assert [row.claim for row in verdicts.table] == [f"C{i}" for i in range(1, 9)]
    six = next(entry for entry in verdicts.verdicts if entry.claim == "C6")
    assert six.paper.verdict != "not testable here" and six.paper.n in (0, 2)
    assert six.command == "lcsb study study --size quick --part f"
    assert verdicts.contrasts == ()  # no exact arm, so no explanation has both of its cells
    assert "2 of 200 wrong" in verdicts.planted and verdicts.missing == ()
    # A sweep is no evidence of quality.
    assert next(row for row in verdicts.table if row.claim == "C5").paper == "not testable here"
    page = write_study(root, verdicts).read_text(encoding="utf-8")
    for row in verdicts.table:
        assert row.command in page and row.change[1:40] in page
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org", "")
    assert write_study(root, verdicts).read_text(encoding="utf-8") == page
    # The folders of a study are ordinary ones: each can be judged alone.
    alone = judge(first).verdicts
    assert alone[5].paper.verdict == "not testable here" and alone[4].paper.n == 2


def test_one_failing_run_does_not_cost_the_others(tiny_runs, tmp_path, here):
    small = ["seeds=[0]", 'arms=["full"]']
    there = dataclasses.replace(tiny_runs[0], config=tiny_runs[0].config.override(small))
    missing = dataclasses.replace(
        tiny_runs[1],
        donor=None,
        config=tiny_runs[1].config.override([*small, "model=/nowhere/at/all"]),
    )
    failed = run_study(tmp_path, "quick", [missing, there])
    assert len(failed) == 1 and failed[0].startswith(missing.name)
    assert cost_of(tmp_path, there).finished
    assert any(missing.name in line for line in judge_study(tmp_path).missing)


def test_sizes_do_not_mix_and_parts_add_up(tmp_path):
    runs = plan("quick")
    write_manifest(tmp_path, "quick", [run for run in runs if run.part == "f"])
    write_manifest(tmp_path, "quick", [run for run in runs if run.part in "ab"])
    parts = [run["part"] for run in read_json(tmp_path / "study.json")["runs"]]
    assert parts == sorted(parts) and set(parts) == {"a", "b", "f"}
    with pytest.raises(ValueError, match="of size quick"):
        write_manifest(tmp_path, "standard", [])
    with pytest.raises(ValueError, match="not a study"):
        judge_study(tmp_path / "none")
    with pytest.raises(ValueError, match="no run of this study has begun"):
        judge_study(tmp_path)
    assert Manifest.model_validate(read_json(tmp_path / "study.json")).size == "quick"


def test_measurements_like_keeps_what_was_measured(tiny_runs, tmp_path):
    donor = tiny_run.start(tmp_path / "donor", tiny_runs[0].config)
    other = stages.open_run(tmp_path / "other", tiny_runs[2].config)
    measurements_like(other, donor, tiny_runs[2].config)
    stages.predict(other)
    assert read_json(other.measurements)["held_out_loss"] == read_json(donor.measurements)["held_out_loss"]
