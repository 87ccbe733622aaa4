"""The command end to end on a tiny model, its exit codes, and its one-line errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import tiny_run

from lcsb import stages
from lcsb.cli import main
from lcsb.train import train_arm
from reports.records import read_json, read_metrics, sha256_of, write_config, write_json

COMMANDS = (
    "validate",
    "measure",
    "predict",
    "train",
    "run",
    "judge",
    "report",
    "doctor",
    "bounds",
    "prove",
    "simulate",
)


def lcsb(*arguments):
    command = [sys.executable, "-m", "lcsb.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def inside(capsys, monkeypatch):
    """The command within this process, for what needs no fresh one: the same result at a tenth of the time."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lcsb", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        output = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, stop.value.code or 0, output.out, output.err)

    return run


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, model_cache):
    return tiny_run.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config_file(model_folder):
    path = model_folder / "settings.yaml"
    path.write_text(tiny_run.settings(model_folder, seeds=[0], arms=["full", "exact-momentum"]).to_yaml())
    return path


@pytest.fixture(scope="module")
def validated(config_file, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "tiny"
    done = lcsb("validate", "--config", config_file, "--out", root, "--json")
    assert done.returncode == 0, done.stderr
    return root, done


def test_validate_end_to_end(validated):
    root, done = validated
    last = json.loads(done.stdout.splitlines()[-1])
    assert [row["claim"] for row in last["verdicts"]][:2] == ["C1", "C2"]
    assert "corpus corpus.txt (sha256" in done.stderr and "rows used" in done.stderr
    for name in ("config.yaml", "environment.json", "measurements.json", "predictions.json", "verdicts.json"):
        assert (root / name).exists()
    assert "<html" in (root / "report.html").read_text()
    registration = sha256_of(root / "predictions.json")
    for kind in ("fidelity", "timing", "memory"):
        assert read_json(root / "evidence" / f"{kind}.json")["predictions_sha256"] == registration
    for arm in ("full", "exact-momentum"):
        metrics = read_metrics(root / "arms" / arm / "seed-0" / "metrics.jsonl")
        assert metrics.header.predictions_sha256 == registration and metrics.finished
    facts = read_json(root / "environment.json")
    assert facts["corpus"]["counts"]["rows_used"] == 1 and len(facts["corpus"]["sha256"]) == 64
    assert len(read_json(root / "evidence" / "fidelity.json")["batches"]) == 4  # two before, two after


def test_a_finished_run_is_left_alone_and_can_be_judged_again(inside, validated, config_file):
    root, _ = validated
    before = {path: path.read_bytes() for path in root.rglob("*.jsonl")}
    evidence = (root / "evidence" / "timing.json").read_bytes()
    done = inside("validate", "--config", config_file, "--out", root)
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in root.rglob("*.jsonl")} == before
    assert (root / "evidence" / "timing.json").read_bytes() == evidence
    for command in ("predict", "judge", "report"):
        assert inside(command, root).returncode == 0


def test_predictions_are_never_written_anew(inside, validated, tmp_path):
    import shutil

    root, _ = validated
    shutil.copytree(root, tmp_path / "run")
    measurements = tmp_path / "run" / "measurements.json"
    measurements.write_text(
        measurements.read_text().replace('"learning_rate": 0.001', '"learning_rate": 0.002')
    )
    done = inside("predict", tmp_path / "run")
    assert done.returncode == 2 and "predictions are registered" in done.stderr


def one_line(done, code, *texts):
    assert done.returncode == code, (done.returncode, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("lcsb:")]
    assert len(lines) == 1 and "Traceback" not in done.stderr
    for text in texts:
        assert text in lines[0], lines[0]


def test_bad_input_is_one_line(inside, tmp_path, config_file, validated):
    root, _ = validated
    one_line(inside("judge", tmp_path / "nothing"), 2, "not a run folder")
    one_line(inside("validate", "--set", "stepps=3", "--dry-run"), 2, "stepps", "steps")
    one_line(inside("validate", "--size", "quik", "--dry-run"), 2, "quick")
    one_line(inside("train", root, "--arm", "exact-momentun"), 2, "exact-momentun", "full, exact-momentum")
    one_line(inside("judge", root, "--claims", "C99"), 2, "C99")
    settings = ("validate", "--config", config_file, "--out", root, "--set", "steps=7")
    one_line(inside(*settings), 2, "steps = 6", "asked for 7")


def test_an_empty_corpus_is_bad_input(inside, tmp_path, config_file):
    path = tmp_path / "text.txt"
    path.write_text("")
    done = inside("measure", tmp_path / "run", "--config", config_file, "--set", f"data.source={path}")
    one_line(done, 2, "text.txt holds no text")


def test_train_exits_3_on_divergence(inside, tmp_path, model_folder):
    config = tiny_run.settings(model_folder, seeds=[0], arms=["full"], optimizer__learning_rate=1e30)
    folder = tiny_run.start(tmp_path / "run", config)
    done = inside("train", folder.root, "--arm", "full")
    assert done.returncode == 3, done.stderr
    assert "diverged" in done.stdout


def test_a_diverging_run_is_measured_and_a_killed_arm_taken_up(inside, tmp_path, model_folder):
    """A hopeless learning rate stops neither the measurements nor the other arms."""
    arms = [{"name": "full", "backward": "full"}, {"name": "other", "backward": "exact"}]
    config = tiny_run.settings(model_folder, seeds=[0], arms=arms, fidelity_batches=1)
    folder = tiny_run.start(tmp_path / "run", config.override(["optimizer.learning_rate=1e30"]))
    stages._measure_timing(folder.root)
    registration = sha256_of(folder.predictions)
    write_json(folder.evidence("memory"), {"kind": "memory", "predictions_sha256": registration, "rows": []})
    assert train_arm(folder, "full", 0) == "diverged"
    before = folder.arm("full", 0).metrics.read_bytes()
    write_config(folder, config)
    torn = folder.arm("other", 0).metrics
    torn.parent.mkdir(parents=True)
    torn.write_text('{"kind":"hea')  # killed in its first line
    done = inside("run", folder.root)
    assert done.returncode == 0, done.stderr
    assert folder.arm("full", 0).metrics.read_bytes() == before
    assert read_metrics(torn).end.status == "done"
    measured_on = [batch["stage"] for batch in read_json(folder.evidence("fidelity"))["batches"]]
    assert measured_on == ["start"]


def test_dry_run_writes_nothing(inside, tmp_path, config_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = inside("validate", "--config", config_file, "--dry-run")
    assert done.returncode == 0 and "12 training steps" in re.sub(r"\s+", " ", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_open_run_takes_up_and_refuses(tmp_path, model_folder):
    config = tiny_run.settings(model_folder)
    folder = stages.open_run(tmp_path, config)
    assert stages.open_run(tmp_path, config) == folder
    write_config(folder, config.override(["batch_size=2"]))
    with pytest.raises(ValueError, match="this run has batch_size = 2, asked for 1"):
        stages.open_run(tmp_path, config)


def test_run_needs_predictions(tmp_path, model_folder):
    folder = stages.open_run(tmp_path, tiny_run.settings(model_folder))
    with pytest.raises(ValueError, match="predictions must be registered before a run"):
        stages.run(folder)


@pytest.mark.parametrize("arguments", [("--help",), *((command, "--help") for command in COMMANDS)])
def test_help_imports_no_torch(arguments):
    code = (
        "import sys\n"
        f"sys.argv = ['lcsb', *{list(arguments)!r}]\n"
        "from lcsb.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    code = stop.code\n"
        "heavy = {'torch', 'transformers', 'sympy', 'numpy', 'lcsb.stages'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_doctor_and_bounds(inside):
    found = json.loads(inside("doctor", "--json").stdout.splitlines()[-1])
    assert {"name", "status", "found", "expected", "mend"} == set(found["checks"][0])
    values = ("--set", "eta=0.5", "--set", "L_i=2", "--set", "g2=4")
    assert json.loads(inside("bounds", "T1", *values, "--json").stdout.splitlines()[-1])["value"] == 1.0
    assert json.loads(inside("bounds", "T1", "--json").stdout.splitlines()[-1])["largest_step"] == "2/L_i"
    assert all(row["checked"] for row in json.loads(inside("bounds", "T6b", "--json").stdout)["derivation"])
    one_line(inside("bounds", "T22"), 2, "did you mean T2?")
    one_line(inside("bounds", "T1", "--set", "eta=x"), 2, "expected NAME=NUMBER")
    one_line(inside("bounds", "T1", "--set", "eta=1"), 2, "needs L_i, g2")
