"""Judging parts and judging logs from the command line: only what is needed runs, and errors are one line."""

from __future__ import annotations

import json
import sys

import pytest
import tiny_run

from lcsb import stages
from lcsb.cli import main
from reports.records import read_json


@pytest.fixture
def lcsb(capsys, monkeypatch):
    """The command within this process, its jobs too: (exit code, output, errors)."""

    def together(title, jobs, workers, progress):
        for job in jobs:
            job.function(*job.arguments)

    monkeypatch.setattr(stages, "_run_part", together)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lcsb", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        output = capsys.readouterr()
        return stop.value.code or 0, output.out, output.err

    return run


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, model_cache):
    folder = tiny_run.write_model(tmp_path_factory.mktemp("model"))
    path = folder / "settings.yaml"
    arms = ["full", "exact-momentum", "identity-momentum"]
    path.write_text(tiny_run.settings(folder, seeds=[0], steps=3, eval_every=3, arms=arms).to_yaml())
    return path


def test_validate_runs_only_what_the_claims_need(lcsb, config_file, tmp_path):
    root = tmp_path / "run"
    code, out, err = lcsb("validate", "--config", config_file, "--out", root, "--claims", "c1,C6", "--json")
    assert code == 0, err
    assert [row["claim"] for row in json.loads(out.splitlines()[-1])["verdicts"]] == ["C1", "C6"]
    assert "what C1, C6 needs" in err
    assert {path.name for path in (root / "evidence").glob("*.json")} == {"fidelity.json"}
    assert {path.name for path in (root / "arms").iterdir()} == {"full"}
    # More claims later: what is there stays, what is missing is added.
    before = (root / "evidence" / "fidelity.json").read_bytes()
    code, _, err = lcsb("validate", "--config", config_file, "--out", root, "--claims", "C5")
    assert code == 0, err
    assert {path.name for path in (root / "arms").iterdir()} == {
        "full",
        "exact-momentum",
        "identity-momentum",
    }
    assert (root / "evidence" / "fidelity.json").read_bytes() == before
    assert [row["claim"] for row in read_json(root / "verdicts.json")["verdicts"]] == ["C5"]
    logs = [root / "arms" / arm / "seed-0" / "metrics.jsonl" for arm in ("full", "identity-momentum")]
    code, out, err = lcsb("judge", "--against", logs[0], "--against", logs[1], "--json")
    assert code == 0, err
    last = json.loads(out.splitlines()[-1])
    assert [log["status"] for log in last["logs"]] == ["done"] * 2 or "no progress" in str(last["logs"])
    five = next(row for row in last["verdicts"] if row["claim"] == "C5")
    assert five["paper"] == "inconclusive" and "1 seed, 3 needed" in five["paper_reason"]
    code, out, _ = lcsb("validate", "--against", logs[0], "--claims", "C1")
    assert code == 0 and "C1 Gradient flow" in out and "validate --claims C1" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["judge"], "give a run folder"),
        (["judge", "--against", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["judge", "--against", "ful/0=state.json"], "expected 'full'"),
        (["validate", "--claims", "C9", "--dry-run"], "found 'C9'"),
        (["study", "nowhere", "--judge"], "not a study"),
        (["study", "nowhere", "--size", "big", "--dry-run"], "size is 'big'"),
        (["study", "nowhere", "--part", "x", "--dry-run"], "found 'x'"),
    ],
)
def test_mistakes_are_one_line(lcsb, arguments, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = lcsb(*arguments)
    assert code == 2 and said in err and err.count("\n") == 1


def test_dry_runs_say_what_and_how_much(lcsb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = lcsb("validate", "--claims", "C3", "--dry-run")
    assert code == 0 and "fidelity, probes; arms: full, exact-momentum" in out
    code, out, _ = lcsb("study", "s", "--size", "standard", "--dry-run", "--json")
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and len(found["runs"]) == 26 and found["unknown"] == []
    assert found["core_hours"] == pytest.approx(sum(run["core_hours"] for run in found["runs"]))
    assert 5 < found["core_hours"] <= 18
    assert not (tmp_path / "s").exists()
