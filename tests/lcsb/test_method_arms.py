"""Baselines as arms of a run: recorded with their options, resumed bit for bit, judged only where a law holds."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny_run
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import lcsb.train
from bcd_theory.predictions import Measurements
from lcsb import stages
from lcsb.prepare import language_batch, make_optimizer, prepare
from lcsb.train import train_arm
from reports.arms import NAMED_ARMS
from reports.records import RunConfig, RunFolder, read_metrics, read_record

STEPS = 13
BASELINES = sorted(name for name, arm in NAMED_ARMS.items() if arm.method != "lcsb")
SCHEDULES = ["importance", "certified", "adaptive", "random"]


def short_refresh(name):
    """The named arm, with its measurements refreshed often enough to happen on both sides of step 5."""
    arm = NAMED_ARMS[name].model_dump()
    for option, value in (("refresh_every", 4), ("period", 3)):
        if option in arm["options"]:
            arm["options"][option] = value
    return arm


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_cache):
    """A measured and predicted run over 5 layers, p = 3, with dropout in the arms so that the random state matters."""
    folder = tiny_run.write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=5)
    config = tiny_run.settings(
        folder,
        steps=STEPS,
        cycle_length=3,
        eval_every=13,
        eval_windows=2,
        checkpoint_every=5,
        timing_cycle_lengths=[1],
        seeds=[0],
        lora={"r": 2, "alpha": 4, "target_modules": ["q_proj", "down_proj"]},
        arms=[NAMED_ARMS["full"].model_dump(), *map(short_refresh, BASELINES + SCHEDULES)],
    )
    root = tiny_run.start(tmp_path_factory.mktemp("run"), config)
    text = root.config.read_text()
    root.config.write_text(text.replace("dropout: 0.0", "dropout: 0.2"))  # measuring refuses dropout
    assert root.config.read_text() != text
    return root


def copied(run, tmp_path):
    shutil.copytree(run.root, tmp_path)
    return RunFolder(tmp_path)


class Killed(BaseException):
    pass


def kill_after(monkeypatch, t):
    real = lcsb.train._Arm._step

    def step(self, writer):
        real(self, writer)
        if self.progress.t == t:
            raise Killed

    monkeypatch.setattr(lcsb.train._Arm, "_step", step)


def content(place):
    """Rows without seconds, and the trained weights.

    Law rows are left out: after a resume the law is checked from where the run was taken up.
    """
    rows = [json.loads(line) for line in place.metrics.read_text().splitlines()]
    rows = [row for row in rows if row["kind"] != "law" and row.get("event") != "resumed"]
    for row in rows:
        row.pop("seconds", None)
    file = place.adapter / "adapter_model.safetensors"
    return rows, load_file(file if file.exists() else place.root / "model" / "model.safetensors")


@pytest.mark.parametrize("arm", [*BASELINES, *(pytest.param(s, marks=pytest.mark.slow) for s in SCHEDULES)])
def test_thirteen_steps_are_five_and_eight(run, tmp_path, monkeypatch, arm):
    """U37: killed after step 7, taken up from the checkpoint of step 5."""
    straight, broken = copied(run, tmp_path / "a"), copied(run, tmp_path / "b")
    assert train_arm(straight, arm, 0) == "done"
    with monkeypatch.context() as patch:
        kill_after(patch, 7)
        with pytest.raises(Killed):
            train_arm(broken, arm, 0)
    assert [t for t, _ in broken.arm(arm, 0).checkpoints()] == [5]
    assert train_arm(broken, arm, 0) == "done"
    (rows, weights), (again, weights_again) = content(straight.arm(arm, 0)), content(broken.arm(arm, 0))
    assert rows == again
    assert weights.keys() == weights_again.keys()
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    metrics = read_metrics(straight.arm(arm, 0).metrics)
    assert len(metrics.steps) == STEPS and metrics.header.arm.model_dump() == short_refresh(arm)
    _check_law(metrics, arm)


def _check_law(metrics, arm):
    law = metrics.header.model_extra["idle_law"]
    if arm in ("cached", "mezo"):
        assert law.startswith("none: ") and arm in law and metrics.laws == []
    elif law == "T6b":
        assert metrics.header.arm.idle == "frozen"
        assert metrics.laws and all(row.moved == 0 for row in metrics.laws)
    else:
        assert law == "T6" and metrics.laws and all(row.violations == 0 for row in metrics.laws)


def test_whole_layer_lisa_saves_the_model(run, tmp_path):
    run = copied(run, tmp_path / "a")
    train_arm(run, "lisa-layers", 0)
    place = run.arm("lisa-layers", 0)
    assert not place.adapter.exists()
    model = AutoModelForCausalLM.from_pretrained(place.root / "model", local_files_only=True)
    base = AutoModelForCausalLM.from_pretrained(RunConfig.read(run.config).model, local_files_only=True)
    assert (model.lm_head.weight != base.lm_head.weight).any()
    trained = {i for step in read_metrics(place.metrics).steps for i in step.selected}
    for i, (new, old) in enumerate(zip(model.model.layers, base.model.layers, strict=True)):
        assert bool((new.mlp.up_proj.weight != old.mlp.up_proj.weight).any()) == (i in trained)


@pytest.mark.parametrize("quantization", ["null", "nf4"])
def test_full_arm_is_plain_qlora_training_by_trainer(run, tmp_path, quantization):
    """The baseline "plain QLoRA by Trainer" needs no arm of its own: `full` has its weights."""
    run = copied(run, tmp_path / "a")
    config = RunConfig.read(run.config)
    config = config.override(["arms=full", f"quantization={quantization}", "lora.dropout=0"])
    run.config.write_text(config.to_yaml())
    train_arm(run, "full", 0)
    model, corpus = prepare(config, 0, recompute=False)
    rows = []
    for t in range(STEPS):
        batch = language_batch(corpus.batch(0, t, 1), model)
        rows.append({key: value[0] for key, value in batch.items()})
    args = TrainingArguments(
        output_dir=str(tmp_path / "trainer"), max_steps=STEPS, per_device_train_batch_size=1, report_to=[],
        use_cpu=True, save_strategy="no", lr_scheduler_type="constant", max_grad_norm=0.0, disable_tqdm=True,
        learning_rate=config.optimizer.learning_rate, weight_decay=0.0, optim="adamw_torch",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        optimizers=(make_optimizer(model, config, config.optimizer.learning_rate), None),
    )
    trainer.train()
    mine = load_file(run.arm("full", 0).adapter / "adapter_model.safetensors")
    theirs = {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if p.requires_grad}
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.allclose(mine[name], theirs[name], rtol=0, atol=1e-6), name


def test_expected_seconds_of_every_named_arm(run):
    """The time left is shown for each arm; a method without a measured cost of its own has that of a mode."""
    expected = stages._Expected(RunConfig.read(run.config), read_record(run.measurements, Measurements))
    seconds = {name: expected.arm(arm) for name, arm in NAMED_ARMS.items()}
    assert all(value > 0 for value in seconds.values())
    assert seconds["certified"] == seconds["exact-momentum"]
    assert seconds["mezo"] - seconds["exact-momentum"] == pytest.approx(
        STEPS * (2 * expected.window - expected.trained["exact"])
    )
