"""One arm: resumable bit for bit, honest about divergence, bound to its predictions."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny_run
from safetensors.torch import load_file

import lcsb.train
from lcsb.prepare import prepare
from lcsb.train import train_arm
from reports.records import RunConfig, read_metrics


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, model_cache):
    return tiny_run.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder):
    """A measured and predicted run with dropout, so that the random state matters too."""
    config = tiny_run.settings(model_folder, lora__dropout=0.0)
    return tiny_run.start(tmp_path_factory.mktemp("run"), config)


def copy_of(run, tmp_path):
    shutil.copytree(run.root, tmp_path / "copy")
    return type(run)(tmp_path / "copy")


def with_dropout(run, tmp_path):
    """The same run with dropout in the arms; settings are changed after measuring, which refuses dropout."""
    copied = copy_of(run, tmp_path)
    copied.config.write_text(copied.config.read_text().replace("dropout: 0.0", "dropout: 0.2"))
    return copied


def content(place):
    rows = [json.loads(line) for line in place.metrics.read_text().splitlines()]
    for row in rows:
        row.pop("seconds", None)
    rows = [row for row in rows if row.get("event") != "resumed"]
    return rows, load_file(place.adapter / "adapter_model.safetensors")


class Interrupted(BaseException):
    pass


def interrupt_after(monkeypatch, t):
    """Stop an arm, as a kill would, after step t has been logged."""
    real = lcsb.train._Arm._step

    def step(self, writer):
        real(self, writer)
        if self.progress.t == t:
            raise Interrupted

    monkeypatch.setattr(lcsb.train._Arm, "_step", step)


@pytest.mark.parametrize("stop_at", [1, 3, 5])
@pytest.mark.parametrize("arm", ["exact-momentum", "exact-frozen"])
def test_resume_is_the_same_run_bit_for_bit(run, tmp_path, monkeypatch, arm, stop_at):
    straight = with_dropout(run, tmp_path / "a")
    broken = with_dropout(run, tmp_path / "b")
    assert train_arm(straight, arm, 0) == "done"
    with monkeypatch.context() as patch:
        interrupt_after(patch, stop_at)
        with pytest.raises(Interrupted):
            train_arm(broken, arm, 0)
    kept = [t for t, _ in broken.arm(arm, 0).checkpoints()]
    assert kept == ([] if stop_at == 1 else [stop_at - 1])  # 1: killed before the first checkpoint
    assert train_arm(broken, arm, 0) == "done"
    rows, adapter = content(straight.arm(arm, 0))
    again, adapter_again = content(broken.arm(arm, 0))
    assert rows == again
    assert adapter.keys() == adapter_again.keys()
    assert all((adapter[name] == adapter_again[name]).all() for name in adapter)
    assert broken.arm(arm, 0).checkpoints() == []


def test_recompute_does_not_change_the_trajectory(run, tmp_path):
    plain, recomputed = with_dropout(run, tmp_path / "a"), with_dropout(run, tmp_path / "b")
    text = recomputed.config.read_text()
    recomputed.config.write_text(text.replace("recompute_arms: false", "recompute_arms: true"))
    assert recomputed.config.read_text() != text
    for arm in ("full", "mlp-momentum"):
        assert train_arm(plain, arm, 0) == train_arm(recomputed, arm, 0) == "done"
        rows, adapter = content(plain.arm(arm, 0))
        again, adapter_again = content(recomputed.arm(arm, 0))
        assert rows == again
        assert all((adapter[name] == adapter_again[name]).all() for name in adapter)


def test_what_an_arm_writes(run, tmp_path):
    run = copy_of(run, tmp_path)
    assert train_arm(run, "exact-momentum", 1) == "done"
    metrics = read_metrics(run.arm("exact-momentum", 1).metrics)
    assert [step.selected for step in metrics.steps] == [[0, 1], [2, 3]] * 3
    assert [row.t for row in metrics.evals] == [3, 6]
    assert metrics.header.loss_at_start == json.loads(run.measurements.read_text())["held_out_loss"]
    assert len(metrics.laws) == 6 and all(row.violations == 0 for row in metrics.laws)
    assert metrics.movements[0].layer_rms and all(value > 0 for value in metrics.movements[0].layer_rms)
    moved = metrics.steps[0].displacement
    assert min(moved[:2]) > 0 and max(moved[2:]) == 0  # layers 2 and 3 have no momentum yet
    assert metrics.steps[1].displacement_idle > 0
    assert metrics.evals[-1].held_out_loss < metrics.header.loss_at_start
    before = run.arm("exact-momentum", 1).metrics.read_bytes()
    assert train_arm(run, "exact-momentum", 1) == "done"  # finished: left alone
    assert run.arm("exact-momentum", 1).metrics.read_bytes() == before


def test_arms_see_the_same_batches_and_start_and_seeds_differ(run, tmp_path):
    run = copy_of(run, tmp_path)
    for arm, seed in (("full", 0), ("identity-momentum", 0), ("full", 1)):
        train_arm(run, arm, seed)
    first = [read_metrics(run.arm(arm, seed).metrics).steps[0].loss for arm, seed in
             (("full", 0), ("identity-momentum", 0), ("full", 1))]  # fmt: skip
    assert first[0] == first[1] != first[2]


def test_divergence_is_recorded(run, tmp_path, monkeypatch):
    run = copy_of(run, tmp_path)
    real = lcsb.train.make_optimizer
    monkeypatch.setattr(lcsb.train, "make_optimizer", lambda model, config, rate: real(model, config, 1e30))
    assert train_arm(run, "full", 0) == "diverged"
    metrics = read_metrics(run.arm("full", 0).metrics)
    assert metrics.end.status == "diverged" and metrics.end.diverged_at is not None
    assert any(event.event == "diverged" for event in metrics.events)
    assert train_arm(run, "full", 0) == "diverged"


def test_refusals_are_one_line(run, tmp_path):
    run = copy_of(run, tmp_path)
    with pytest.raises(ValueError, match="arm 'fool': not in this run; its arms are full,"):
        train_arm(run, "fool", 0)
    with pytest.raises(ValueError, match="seed 9: not in this run"):
        train_arm(run, "full", 9)
    with pytest.raises(ValueError, match=r"data\.tokens: found 500, expected at most 128, the longest of"):
        prepare(
            tiny_run.settings(tmp_path.parent, model=RunConfig.read(run.config).model, data__tokens=500),
            0,
            False,
        )
    train_arm(run, "full", 0)
    run.predictions.write_text(run.predictions.read_text() + "\n")
    with pytest.raises(ValueError, match="registered against predictions"):
        train_arm(run, "full", 0)


def test_damaged_and_foreign_checkpoints(run, tmp_path, monkeypatch):
    run = copy_of(run, tmp_path)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(Interrupted):
            train_arm(run, "full", 0)
    ((_, folder),) = run.arm("full", 0).checkpoints()
    state = folder / "state.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:-1000])
    with pytest.raises(ValueError, match=r"state\.safetensors: cannot be read"):
        train_arm(run, "full", 0)
    state.write_bytes(whole)
    run.config.write_text(run.config.read_text().replace("r: 2", "r: 3"))
    with pytest.raises(ValueError, match=r"has shape \[2, 64\], expected \[3, 64\]"):
        train_arm(run, "full", 0)
