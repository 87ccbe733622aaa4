"""Measure, predict, run, judge, draw: the order of the files, and what judging refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import pytest

from reports.decisions import decide
from reports.records import RunFolder
from reports.strict import read_json, sha256_of
from reports.verdicts import Part
from simulations.experiment import Experiment, main
from simulations.gallery import entry
from simulations.records import SimulationVerdict, load_record, prediction
from simulations.registry import EXPERIMENTS, NAMES


def _measure(size, seed):
    return {"curvature": [1.0, 2.0], "seed": seed}


def _predict(measured):
    return [prediction("sum", sum(measured["curvature"]), "T1", assumes="arithmetic")]


def _perform(registered, write):
    for k in range(5):
        write({"kind": "sum", "value": registered.predicted("sum") + 1e-3 * k})
    write({"kind": "other", "value": float("inf")})


def _judge(record):
    off = [row["value"] - record.predicted("sum") for row in record.of("sum")]
    return [
        Part(name="sum", verdict=decide(off, "inside", 0.1).verdict, reason="By addition."),
        Part(name="beside", verdict="refuted", reason="Decides nothing.", counts=False),
    ]


def _draw(record, axes):
    axes[0].plot(range(5), [row["value"] for row in record.of("sum")], "o", label="sum")
    axes[0].bar([0], [1.0])


TOY = Experiment(
    "limits",
    "A toy",
    "Adds.",
    ("T1",),
    _measure,
    _predict,
    _perform,
    _judge,
    _draw,
    summary=lambda record: {"rows": 5},
)


@pytest.fixture
def place(tmp_path):
    TOY.run("quick", 3, tmp_path)
    return RunFolder(tmp_path / "limits")


def test_the_records_are_those_of_a_run(place):
    names = {path.name for path in place.root.iterdir()}
    assert names == {
        "environment.json", "measurements.json", "predictions.json", "metrics.jsonl", "verdicts.json", "figure.json",
        "figure.svg",
    }  # fmt: skip
    first = json.loads((place.root / "metrics.jsonl").read_text().splitlines()[0])
    assert first["kind"] == "header" and first["predictions_sha256"] == sha256_of(place.predictions)
    verdict = SimulationVerdict.model_validate(read_json(place.verdicts))
    assert (verdict.verdict, verdict.seed, verdict.summary) == ("supported", 3, {"rows": 5})
    assert verdict.command == "lcsb simulate limits --size quick --seed 3"
    assert load_record(place, "limits").of("other") == [{"kind": "other", "value": None, "nonfinite": True}]


def test_predictions_are_on_disk_before_the_first_step_and_do_not_change(tmp_path):
    seen = []

    def perform(registered, write):
        folder = RunFolder(tmp_path / "limits")
        seen.append(sha256_of(folder.predictions) == registered.predictions_sha256)
        seen.append(
            folder.measurements.exists() and (folder.root / "metrics.jsonl").read_text().count("\n") == 1
        )
        _perform(registered, write)

    dataclasses.replace(TOY, perform=perform).run("quick", 0, tmp_path)
    assert seen == [True, True]


def test_the_same_files_give_the_same_bytes(place):
    names = ("verdicts.json", "figure.json", "figure.svg")
    before = [(place.root / name).read_bytes() for name in names]
    TOY.conclude(place)
    assert before == [(place.root / name).read_bytes() for name in names]


def test_a_changed_prediction_is_refused(place):
    text = place.predictions.read_text()
    assert "3.0" in text
    place.predictions.write_text(text.replace("3.0", "3.1"))
    with pytest.raises(ValueError, match=r"metrics\.jsonl: found predictions_sha256 .* expected"):
        TOY.conclude(place)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda lines: lines[1:], "no predictions_sha256"),
        (lambda lines: [], "no predictions_sha256"),
        (lambda lines: lines[:-1], "no end row"),
        (lambda lines: [lines[0], lines[0], *lines[1:]], "line 2: found a header row"),
        (
            lambda lines: [lines[0].replace('"seed":3', '"seed":4'), *lines[1:]],
            "expected limits, quick, seed 3",
        ),
        (lambda lines: [lines[0], "[1]", *lines[1:]], "line 2: found no object with a kind"),
        (lambda lines: [lines[0], '{"kind":"sum","value":NaN}', *lines[1:]], "found the token NaN"),
    ],
)
def test_a_record_that_is_not_whole_is_refused(place, change, message):
    path = place.root / "metrics.jsonl"
    lines = change(path.read_text().splitlines())
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(ValueError, match=re.escape(message)):
        TOY.conclude(place)


def test_a_record_of_another_experiment_is_refused(place):
    shutil.copytree(place.root, place.root.parent / "rates")
    with pytest.raises(ValueError, match="found experiment 'limits', expected 'rates'"):
        load_record(RunFolder(place.root.parent / "rates"), "rates")


def test_a_new_run_replaces_the_old_record(place):
    TOY.run("quick", 4, place.root.parent)
    assert load_record(place, "limits").seed == 4


def test_a_measurement_that_is_not_finite_is_refused(tmp_path):

    wrong = dataclasses.replace(TOY, measure=lambda size, seed: {"L": float("nan")})
    with pytest.raises(ValueError, match=r"measurements\.L is nan"):
        wrong.run("quick", 0, tmp_path)
    assert not (tmp_path / "limits" / "predictions.json").exists()


def test_the_numbers_of_the_figure_are_beside_it(place):
    panel = read_json(place.root / "figure.json")["panels"][0]
    line = next(series for series in panel["series"] if series["label"] == "sum")
    assert line["x"] == [0, 1, 2, 3, 4] and line["y"][0] == 3.0
    assert any(series.get("bar", [0, 0, 0, 0])[3] == 1.0 for series in panel["series"])


def test_the_gallery_shows_figure_verdicts_and_command(place):
    from reports.gallery import gallery_page

    shown = entry(TOY, place)
    text = gallery_page([shown], "lcsb simulate --all")
    assert text.count('role="img"') == 2 and 'id="limits"' in text and "<script" not in text
    assert "lcsb simulate limits --size quick --seed 3" in text and "1 supported, 1 for information" in text
    assert not re.search(r'(?:src|href)="(?:https?:|//|/)', text)  # self-contained
    with pytest.raises(ValueError, match="no experiment"):
        gallery_page([], "x")


def test_every_registered_experiment_declares_its_stages():
    assert len(EXPERIMENTS) == len(NAMES) == 7
    for name in NAMES:
        experiment = EXPERIMENTS[name]
        assert experiment.name == name and experiment.paragraph.endswith(".")
        assert callable(experiment.perform) and callable(experiment.judge), name


def test_an_unknown_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match="size is 'huge', expected one of quick, standard, full"):
        TOY.run("huge", 0, tmp_path)


def test_json_is_the_last_line(tmp_path, capsys):
    assert main(TOY, ["--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_runs_alone(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", f"simulations.{name}", "--out", str(tmp_path), "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    line = json.loads(done.stdout.splitlines()[-1])
    assert (
        line["experiment"] == name
        and line["verdict"] == read_json(tmp_path / name / "verdicts.json")["verdict"]
    )
