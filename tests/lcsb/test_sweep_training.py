"""`lcsb sweep` of kind `train`: arms of a run folder, found finished again, other arms unharmed by a failed one."""

from __future__ import annotations

import json

import pytest
import tiny_run
from typer.testing import CliRunner

from lcsb.cli import app
from lcsb.sweep_training import expand, train
from reports.records import read_json, read_metrics


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_cache):
    folder = tiny_run.write_model(tmp_path_factory.mktemp("model"))
    return tiny_run.start(tmp_path_factory.mktemp("run"), tiny_run.settings(folder, steps=2, eval_every=1))


def command(*words):
    found = CliRunner().invoke(app, ["sweep", *map(str, words), "--json"])
    return found.exit_code, json.loads(found.stdout.splitlines()[-1])


def test_arms_and_seeds_of_a_run_are_trained_once(run, tmp_path):
    file = tmp_path / "arms.yaml"
    file.write_text(f"kind: train\nrun: {run.root}\narms: [full, exact-frozen]\nseeds: [1]\n")
    code, line = command(file, "--out", tmp_path / "out")
    assert code == 0 and (line["done"], line["reused"]) == (2, 0)
    results = read_json(tmp_path / "out" / "results.json")["runs"].values()
    for found in results:
        metrics = read_metrics(run.arm(found["configuration"]["arm"], 1).metrics)
        assert found["result"]["status"] == metrics.end.status == "done"
        assert found["result"]["final_held_out_loss"] == metrics.evals[-1].held_out_loss
        assert found["configuration"]["predictions_sha256"] == metrics.header.predictions_sha256
    assert command(file, "--out", tmp_path / "out")[1]["reused"] == 2


def test_a_failed_arm_loses_no_other(run, tmp_path):
    file = tmp_path / "arms.yaml"
    file.write_text(f"kind: train\nrun: {run.root}\narms: [full, mlp-momentum]\nseeds: [0]\n")
    place = run.arm("full", 0).metrics
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps({"kind": "header"}) + "\n")
    code, line = command(file, "--out", tmp_path / "out")
    assert code == 1 and line["done"] == 1 and len(line["failed"]) == 1
    assert str(place) in next(iter(line["failed"].values()))
    place.unlink()
    code, line = command(file, "--out", tmp_path / "out")
    assert code == 0 and (line["done"], line["reused"]) == (2, 1)


def test_the_default_is_every_arm_and_seed(run):
    found = expand({"kind": "train", "run": str(run.root)})
    assert len(found) == 5 * 2 and {c["seed"] for c in found} == {0, 1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arm": "full"}, "unknown setting arm"),
        ({"arms": ["fulll"]}, "fulll"),
        ({"arms": "full"}, "arms is 'full', expected a list"),
        ({"seeds": [7]}, "seed 7: not in this run"),
        ({"run": None}, "run is None"),
    ],
)
def test_wrong_settings_are_named(run, changed, message):
    with pytest.raises(ValueError, match=message):
        expand({"kind": "train", "run": str(run.root), **changed})


def test_other_predictions_are_not_trained_against(run, tmp_path):
    (configuration,) = expand({"kind": "train", "run": str(run.root), "arms": ["full"], "seeds": [1]})
    with pytest.raises(ValueError, match="predictions"):
        train([{**configuration, "predictions_sha256": "0" * 64}])
