"""Strict atomic JSON, metrics files, the divergence rules, the run folder and the machine's description."""

from __future__ import annotations

import getpass
import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from reports import records
from reports.metrics import Header, Step, update_jumps
from reports.records import (
    MetricsWriter,
    RunConfig,
    RunFolder,
    diverged_at,
    no_progress,
    norm_diverged_at,
    read_json,
    read_metrics,
    read_record,
    sha256_of,
    should_stop,
    write_json,
)  # fmt: skip

SHA = "a" * 64


def header(**changes):
    arm = RunConfig().arms[1].model_dump()
    row = {
        "kind": "header", "schema": 1, "predictions_sha256": SHA, "arm": arm, "seed": 0,
        "learning_rate": 1e-4, "cycle_length": 2, "blocks": [[0, 1], [2]], "n_layers": 3, "steps": 4,
        "loss_at_start": 3.0,
    }  # fmt: skip
    return row | changes


def step(t, **changes):
    row = {
        "kind": "step", "t": t, "loss": 3.0 - t / 10, "lcsb/block": t % 2, "lcsb/selected": [2],
        "lcsb/grad_norm": 0.5, "lcsb/displacement_idle": 1e-5, "displacement": [0.0, 1e-5, 2e-5],
        "seconds": 0.1,
    }  # fmt: skip
    return row | changes


def write_metrics(path, *rows):
    with MetricsWriter(path) as writer:
        for row in rows:
            writer.write(row)


# --- JSON ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thing:
    seconds: float
    ratios: dict[str, dict[int, float]]
    shape: tuple[int, ...] = ()


def test_json_round_trip_of_a_dataclass(tmp_path):
    thing = Thing(0.25, {"exact": {4: 1.5}}, (3, 4))
    write_json(tmp_path / "deep" / "thing.json", thing)
    assert read_record(tmp_path / "deep" / "thing.json", Thing) == thing
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["thing.json"]


def test_json_unfolds_numpy(tmp_path):
    write_json(tmp_path / "a.json", {"x": np.float32(0.5), "y": np.arange(3), "z": (np.int64(4), True)})
    assert read_json(tmp_path / "a.json") == {"x": 0.5, "y": [0, 1, 2], "z": [4, True]}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_json_refuses_nonfinite_and_keeps_the_old_file(tmp_path, bad):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError, match=r"a\.json\.rows\.1\.x is"):
        write_json(path, {"rows": [{"x": 1.0}, {"x": bad}]})
    assert read_json(path) == {"old": 1}
    with pytest.raises(TypeError, match=r"a\.json\.rows is a PosixPath"):
        write_json(path, {"rows": tmp_path})


def test_json_write_is_atomic_when_the_disk_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"a\.json: cannot be written \(No space left on device\)"):
        write_json(path, {"new": 2})
    with (
        MetricsWriter(tmp_path / "metrics.jsonl") as writer,
        pytest.raises(OSError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"),
    ):
        writer.sync()
    (tmp_path / "metrics.jsonl").unlink()
    assert read_json(path) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "found the token NaN"),
        ('{"a": -Infinity}', "found the token -Infinity"),
        ('{"a": 1, "a": 2}', "found the key 'a' twice"),
        ('{"a": 1', "not JSON"),
        ("", "not JSON"),
    ],
)
def test_json_reading_is_strict(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:
        read_json(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_record_errors_name_file_and_field(tmp_path):
    path = tmp_path / "thing.json"
    write_json(path, {"seconds": "soon", "ratios": {}})
    with pytest.raises(ValueError, match=r"thing\.json: field seconds: found 'soon'"):
        read_record(path, Thing)
    write_json(path, {"ratios": {}})
    with pytest.raises(ValueError, match=r"thing\.json: field seconds is missing"):
        read_record(path, Thing)
    with pytest.raises(ValueError, match="cannot be read"):
        read_json(tmp_path / "none.json")


def test_sha256(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert sha256_of(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# --- metrics ------------------------------------------------------------------------------------------------


def test_metrics_round_trip(tmp_path):
    path = tmp_path / "m" / "metrics.jsonl"
    write_metrics(
        path, header(), step(0),
        {"kind": "law", "t": 0, "checked": 10, "worst": 1e-6, "worst_tensor": "x", "violations": 0},
        step(1), {"kind": "eval", "t": 2, "held_out_loss": 2.9, "tokens": 100},
        {"kind": "event", "t": 2, "event": "resumed", "from": "checkpoint-2"},
        {"kind": "movement", "t": 2, "layer_rms": [1e-4, 2e-4, 3e-4], "layer_path": [1e-3, 1e-3, 1e-3]},
        {"kind": "end", "t": 2, "status": "done", "diverged_at": None, "seconds": 0.2},
    )  # fmt: skip
    metrics = read_metrics(path)
    assert metrics.header is not None and metrics.header.arm.name == "exact-momentum"
    assert metrics.losses == [3.0, 2.9] and metrics.steps[1].block == 1 and metrics.steps[0].selected == [2]
    assert metrics.laws[0].worst == 1e-6 and metrics.evals[0].held_out_loss == 2.9
    assert metrics.events[0].model_extra == {"from": "checkpoint-2"}
    assert metrics.finished and metrics.torn is None


def test_typed_rows_write_the_names_of_the_schema(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, Header.model_validate(header()), Step.model_validate(step(0)))
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first == header() and second == step(0)


def test_each_line_is_on_disk_before_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for t in range(3):
        writer.write(step(t))
        assert len(path.read_text(encoding="utf-8").splitlines()) == t + 1 == writer.lines
    writer.close()


def test_nonfinite_numbers_become_null_with_a_flag(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(
        path, header(), step(0, loss=math.nan, displacement=[0.0, math.inf, 1.0]), step(1)
    )  # fmt: skip
    row = json.loads(path.read_text(encoding="utf-8").splitlines()[1])
    assert row["loss"] is None and row["displacement"] == [0.0, None, 1.0] and row["nonfinite"] is True
    metrics = read_metrics(path)
    assert metrics.steps[0].nonfinite and not metrics.steps[1].nonfinite and metrics.losses[0] is None
    assert diverged_at(metrics.losses, 3.0) == 0


def test_null_without_the_flag_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, header(), step(0, loss=None))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: .*loss is null without nonfinite"):
        read_metrics(path)


def test_a_torn_last_line_is_dropped_and_said(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, header(), step(0), step(1))
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in (last + 1, last + 30, len(whole) - 2):
        path.write_bytes(whole[:cut])
        metrics = read_metrics(path)
        assert len(metrics.steps) == 1
        assert metrics.torn is not None and "line 3" in metrics.torn
    path.write_bytes(whole[:-1])  # only the newline is missing: the row is whole and counts
    assert len(read_metrics(path).steps) == 2


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (2, '{"kind": "step"', "line 2: not JSON"),
        (2, '{"kind": "stepp", "t": 0}', "line 2: field"),
        (2, '{"kind": "eval", "t": 0, "tokens": 4}', "line 2: field eval.held_out_loss is missing"),
        (2, "[1]", "line 2: found list, expected an object"),
        (2, json.dumps(header()), "line 2: found a header"),
        (2, json.dumps(step(1)), "line 2: found step t = 1, expected t = 0"),
        (1, json.dumps(header(schema=2)), "line 1: field header.schema: found 2"),
        (1, json.dumps(header(predictions_sha256="x")), "line 1: field header.predictions_sha256"),
    ],
)
def test_any_other_bad_line_is_an_error_with_file_and_line(tmp_path, number, line, message):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(header()), json.dumps(step(0)), json.dumps(step(1))]
    lines[number - 1] = line
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ValueError) as error:
        read_metrics(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_a_bad_last_line_with_newline_is_no_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(header()) + '\n{"kind":\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        read_metrics(path)


def test_resume_cuts_to_the_stored_line_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, header(), step(0), step(1), step(2))
    with path.open("ab") as file:
        file.write(b'{"kind":"step","t":3,"lo')
    with MetricsWriter(path, resume_at=2) as writer:
        writer.write(step(1, loss=9.0))
        assert writer.lines == 3
    metrics = read_metrics(path)
    assert metrics.losses == [3.0, 9.0] and metrics.torn is None
    with pytest.raises(ValueError, match="found 3 complete lines, expected at least 5"):
        MetricsWriter(path, resume_at=5)
    with pytest.raises(ValueError, match="exists, expected a new file"):
        MetricsWriter(path)


# --- divergence ---------------------------------------------------------------------------------------------


def test_divergence_begins_with_the_first_window_above_the_factor():
    assert diverged_at([3.0] * 40, 2.5) is None  # a mean exactly at 1.2 * 2.5 = 3.0 is not above it
    assert diverged_at([3.6] * 19 + [3.7], 3.0) == 0
    assert diverged_at([9.0] * 19, 3.0) is None
    assert diverged_at([2.5] * 30 + [4.5] * 20, 2.5) == 16  # 14 steps at 2.5 and 6 at 4.5 average 3.1
    assert diverged_at([3.0] * 100, 3.0) is None
    assert diverged_at([3.0, None, 3.0], 3.0) == 1 == diverged_at([3.0, math.inf], 3.0)
    assert diverged_at([], 3.0) is None


def test_divergence_agrees_with_a_plain_moving_mean():
    generator = np.random.default_rng(0)
    found = []
    for _ in range(50):
        losses = (3 + generator.normal(0.3, 0.5) + generator.normal(0, 1.5, 60)).tolist()
        means = np.convolve(losses, np.ones(20) / 20, "valid")
        above = np.flatnonzero(means > 3.6)
        assert diverged_at(losses, 3.0) == (int(above[0]) if above.size else None)
        found.append(above.size > 0)
    assert 5 < sum(found) < 45


def test_early_stop_needs_twice_the_start():
    assert not should_stop([5.9] * 40, 3.0) and diverged_at([5.9] * 40, 3.0) == 0
    assert should_stop([6.1] * 20, 3.0) and not should_stop([6.1] * 19, 3.0)
    assert should_stop([3.0, math.nan], 3.0)
    with pytest.raises(ValueError, match="loss_at_start is nan"):
        should_stop([1.0], math.nan)


def test_no_progress():
    assert no_progress(3.0, 3.0) and no_progress(3.1, 3.0) and no_progress(None, 3.0)
    assert no_progress(math.nan, 3.0) and not no_progress(2.99, 3.0)


def test_norm_rule_of_quadratics():
    assert norm_diverged_at([2.0, 2e6, 2.1e6], factor=1e6) == 2
    assert norm_diverged_at([2.0, math.inf]) == 1 and norm_diverged_at([2.0, 0.0]) is None
    with pytest.raises(ValueError, match="expected a finite positive norm"):
        norm_diverged_at([0.0])


# --- folder and machine -------------------------------------------------------------------------------------


def test_run_folder_lists_arms_and_checkpoints(tmp_path):
    folder = RunFolder(tmp_path)
    for arm, seed in (("full", 10), ("full", 2), ("exact-frozen", 0)):
        write_metrics(folder.arm(arm, seed).metrics, header(seed=seed))
    (tmp_path / "arms" / "full" / "seed-x").mkdir()
    assert [(a.arm, a.seed) for a in folder.arms()] == [("exact-frozen", 0), ("full", 2), ("full", 10)]
    arm = folder.arm("full", 2)
    for name in ("checkpoint-20", "checkpoint-3", "checkpoint-40.tmp", "adapter"):
        (arm.root / name).mkdir()
    assert [t for t, _ in arm.checkpoints()] == [3, 20]
    assert arm.checkpoint(20) == arm.checkpoints()[1][1]
    assert folder.evidence("timing") == tmp_path / "evidence" / "timing.json"


def test_environment_names_the_machine_but_nobody(tmp_path):
    found = records.environment(threads=1)
    write_json(tmp_path / "environment.json", found)
    text = (tmp_path / "environment.json").read_text(encoding="utf-8")
    assert found["threads"] == 1 and found["cores"] >= 1 and found["cpu_model"]
    assert found["versions"]["numpy"] == np.__version__
    for private in (socket.gethostname(), os.fspath(os.getcwd())):  # noqa: PTH109
        assert private not in text
    if getpass.getuser() not in ("root", "user"):
        assert getpass.getuser() not in text


def test_cpu_description_from_text():
    x86 = "processor : 0\nmodel name : A CPU\nflags : fpu avx2 avx fma\n\nprocessor : 1\nmodel name : B\n"
    assert records._cpu(x86) == ("A CPU", ["avx", "avx2", "fma"])
    assert records._cpu("CPU implementer : 0x41\nCPU part : 0xd0c\nFeatures : fp asimd bf16\n") == (
        "Arm part 0xd0c", ["asimd", "bf16"],
    )  # fmt: skip
    assert records._cpu("")[1] == []


def test_commit_and_dirty_flag_need_a_tracked_checkout(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    package = tmp_path / "reports"
    package.mkdir()
    (package / "records.py").write_text("1", encoding="utf-8")
    assert records._source_state(package) == (None, None)
    git("init", "-q")
    assert records._source_state(package) == (None, None)  # inside a repository, but not part of it
    git("add", "-f", "reports/records.py")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x")
    commit, dirty = records._source_state(package)
    assert commit is not None and len(commit) == 40 and dirty is False
    (package / "records.py").write_text("2", encoding="utf-8")
    assert records._source_state(package) == (commit, True)


def test_importing_records_brings_no_torch():
    heavy = ("torch", "matplotlib", "scipy")
    code = f"import sys, reports.records; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_jumps_of_the_updates():
    """U05: a jump is flagged, at the step; steady, falling and slowly growing updates are not."""
    steady = [1.0 + 0.3 * (t % 4) for t in range(30)]
    assert update_jumps(steady) == []
    assert update_jumps([0.9**t for t in range(30)]) == []
    assert update_jumps([1.02**t for t in range(60)]) == []
    assert update_jumps([*steady, 4.0, *steady]) == [30]
    assert update_jumps([*steady, None]) == [30]
    assert update_jumps([1.0, 50.0, 1.0]) == []  # nothing before it to compare with


def test_updates_jump_before_the_loss_does():
    """U05: movements that grow by a third a step, and a loss that follows five steps later."""
    growth = [1.0] * 20 + [1.33**k for k in range(1, 41)]
    losses = [3.0] * 25 + [3.0 + 0.05 * 1.33**k for k in range(35)]
    assert update_jumps(growth)[0] == 22
    assert next(t for t, loss in enumerate(losses) if loss > 1.2 * 3.0) == 34
