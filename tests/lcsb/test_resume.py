"""Resume is the same run: LCSBTrainer and LCSBCallback, every schedule and idle policy; what is refused."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from transformers import Trainer, TrainingArguments

from lcsb.callback import LCSBCallback
from lcsb.config import TRAINER_SCHEDULES, LCSBConfig
from lcsb.trainer import LCSBTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, SAVED = 13, 5
OPTIONS = {
    "fixed": {"fixed_layers": (1, 3)},
    "adaptive": {"backward": "identity"},
    "depth-weighted": {"depth_exponent": 2.0},
}


def config_of(schedule, idle="momentum", **changes):
    """k = 2 of 5 layers (p = 3); measurements are refreshed at steps 0, 4, 8 and 12."""
    settings = {"idle": idle, "schedule": schedule, "layers_per_step": 2, "refresh_every": 4}
    return LCSBConfig(**{**settings, **OPTIONS.get(schedule, {}), **changes})


def make(folder, config, *, callback=False, callbacks=(), trainer_class=None, evaluate=False, **changes):
    """A trainer over TINY-L of 5 layers: dropout, shuffling, warm-up, 10 steps an epoch, a checkpoint at step 5."""
    model = tiny.with_lora(tiny.llama(num_hidden_layers=5), dropout=0.1)
    rows = [{k: v[0] for k, v in tiny.batch(model, rows=1, tokens=8, seed=s).items()} for s in range(20)]
    options = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "report_to": [],
        "use_cpu": True, "save_strategy": "steps", "save_steps": SAVED, "logging_steps": 1, "disable_tqdm": True,
        "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2, **changes,
    }  # fmt: skip
    own = {} if callback or config is None else {"lcsb": config}
    added = [LCSBCallback(config)] if callback else []
    kind = trainer_class or (Trainer if callback or config is None else LCSBTrainer)
    return kind(
        model=model,
        args=TrainingArguments(**options),
        train_dataset=rows,
        eval_dataset=rows[:4] if evaluate else None,
        callbacks=[*added, *callbacks],
        **own,
    )


def outcome(trainer):
    """Weights, moments and what was selected at each step."""
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    state = trainer.optimizer.state_dict()["state"]
    moments = {f"{i}/{key}": torch.as_tensor(v) for i, entry in state.items() for key, v in entry.items()}
    keys = ("loss", "learning_rate", "lcsb/selected", "lcsb/grad_norm", "lcsb/displacement_idle")
    trace = [[row[key] for key in keys] for row in trainer.state.log_history if "loss" in row]
    return {**weights, **moments}, trace


def assert_same(first, second):
    (tensors, trace), (again, traced) = first, second
    assert len(trace) == STEPS
    assert trace == traced
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensors[key], again[key]) for key in tensors)


def cases():
    """Every schedule with both idle policies; one of the two is left to the slow tests."""
    for number, schedule in enumerate(TRAINER_SCHEDULES):
        for idle in ("momentum", "frozen"):
            quick = (idle == "momentum") == (number % 2 == 0)
            yield pytest.param(schedule, idle, marks=[] if quick else [pytest.mark.slow])


def interrupted(folder, config, **options):
    """A straight run, and a new trainer beside its checkpoint of step 5 (as after a kill there)."""
    straight = make(folder, config, **options)
    straight.train()
    for path in folder.glob("checkpoint-*"):
        if path.name != f"checkpoint-{SAVED}":
            shutil.rmtree(path)
    return straight, make(folder, config, **options)


@pytest.mark.parametrize("schedule, idle", list(cases()))
def test_thirteen_steps_are_five_and_eight(tmp_path, schedule, idle):
    """U37: the same layers, losses, weights and moments, bit for bit."""
    straight, resumed = interrupted(tmp_path, config_of(schedule, idle))
    resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step == SAVED
    assert_same(outcome(straight), outcome(resumed))


@pytest.mark.parametrize("restore", [False, True])
def test_the_callback_resumes_too(tmp_path, restore):
    """In plain Trainer, by Trainer's default and with its flag that builds the callbacks anew."""
    config = config_of("importance")
    straight, resumed = interrupted(
        tmp_path, config, callback=True, restore_callback_states_from_checkpoint=restore
    )
    resumed.train(resume_from_checkpoint=True)
    assert_same(outcome(straight), outcome(resumed))


def test_certified_resumes(tmp_path):
    straight, resumed = interrupted(tmp_path, config_of("cyclic", backward="certified", min_cosine=0.9))
    resumed.train(resume_from_checkpoint=True)
    assert_same(outcome(straight), outcome(resumed))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a cyclic run that has checkpoints 5, 10 and 13."""
    folder = tmp_path_factory.mktemp("run")
    make(folder, config_of("cyclic")).train()
    assert {path.name for path in folder.iterdir()} == {"checkpoint-5", "checkpoint-10", "checkpoint-13"}
    return folder


def test_a_resume_at_the_end_takes_no_step(checkpoint, tmp_path):
    """U37: 13 of 13 steps in the middle of an epoch."""
    trainer = make(tmp_path, config_of("cyclic"))
    with pytest.warns(UserWarning, match="step 13 of 13: 0 steps to train"):
        result = trainer.train(resume_from_checkpoint=str(checkpoint / "checkpoint-13"))
    assert result.global_step == 13
    saved = make(tmp_path, config_of("cyclic"))
    saved._load_from_checkpoint(str(checkpoint / "checkpoint-13"))
    for (name, a), (_, b) in zip(
        trainer.model.named_parameters(), saved.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("changes, message", [
    ({"schedule": "reversed"}, "name was 'cyclic' and is 'reversed'; schedule was 'cyclic' and is 'reversed'"),
    ({"layers_per_step": 3}, "layers_per_step was 2 and is 3"),
    ({"idle": "frozen"}, "idle was 'momentum' and is 'frozen'"),
    ({"backward": "mlp"}, "backward was 'exact' and is 'mlp'"),
    ({"seed": 3}, "seed was 42 and is 3"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_a_checkpoint_of_other_settings_is_refused(checkpoint, tmp_path, changes, message):
    """U37: in one line that names what differs; the model is left clean."""
    trainer = make(tmp_path, config_of(**{"schedule": "cyclic", **changes}))
    with pytest.raises(ValueError, match=f"^checkpoint of another run: .*{message}") as refusal:
        trainer.train(resume_from_checkpoint=str(checkpoint / "checkpoint-5"))
    assert "\n" not in str(refusal.value)
    assert not any("forward" in module.__dict__ for module in trainer.model.modules())


def test_a_checkpoint_with_other_layers_is_refused(checkpoint, tmp_path):
    """U37: layer count, by what the checkpoint says of itself (its weights would not even fit)."""
    folder = tmp_path / "checkpoint-5"
    shutil.copytree(checkpoint / "checkpoint-5", folder)
    state = json.loads((folder / "trainer_state.json").read_text())
    state["stateful_callbacks"]["LCSBCallback"]["attributes"]["saved"]["lcsb"]["n_layers"] = 6
    (folder / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="checkpoint of another run: n_layers was 6 and is 5"):
        make(tmp_path, config_of("cyclic")).train(resume_from_checkpoint=str(folder))


def test_what_a_resume_may_change(checkpoint, tmp_path):
    """After a stop at a step that is not finite one may want to go on by skipping."""
    trainer = make(tmp_path, config_of("cyclic", on_nonfinite="skip"), max_steps=6)
    trainer.train(resume_from_checkpoint=str(checkpoint / "checkpoint-5"))
    assert trainer.lcsb.skipped == {"empty": 0, "nonfinite": 0}


def test_a_checkpoint_of_a_run_without_the_callback_is_refused(tmp_path):
    make(tmp_path, None, max_steps=2, save_steps=2).train()
    for callback in (False, True):
        trainer = make(tmp_path / "other", config_of("cyclic"), callback=callback)
        with pytest.raises(ValueError, match="checkpoint at step 2: it is of a run without LCSBCallback"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_folders_without_state(checkpoint, tmp_path):
    """U37: a model-only checkpoint warns, an adapter folder and an empty one are refused."""
    shutil.copytree(checkpoint / "checkpoint-5", tmp_path / "checkpoint-5")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (tmp_path / "checkpoint-5" / name).unlink()  # what save_only_model leaves out
    trainer = make(tmp_path, config_of("cyclic"), max_steps=6)
    with pytest.warns(
        UserWarning, match="it holds no optimizer state .* will not be the one that was interrupted"
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    with pytest.raises(
        ValueError, match=r"checkpoint-5: no trainer_state\.json in it, so it is not a checkpoint"
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    for path in tmp_path.glob("checkpoint-*"):
        if path.name != "checkpoint-5":
            shutil.rmtree(path)
    with (
        pytest.warns(UserWarning, match=r"checkpoint-5: no trainer_state\.json .* passed over"),
        pytest.raises(ValueError, match="no complete checkpoint in it to resume from"),
    ):
        trainer.train(resume_from_checkpoint=True)


# -- saving ----------------------------------------------------------------------------------------------------------


def test_what_a_save_leaves(tmp_path):
    """Best checkpoint, limit and log survive the renaming; no temporary folder stays."""
    trainer = make(
        tmp_path, config_of("cyclic"), max_steps=8, save_steps=2, save_total_limit=2, eval_strategy="steps",
        eval_steps=2, load_best_model_at_end=True, evaluate=True,
    )  # fmt: skip
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best == str(tmp_path / f"checkpoint-{trainer.state.best_global_step}")
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"checkpoint-8", f"checkpoint-{trainer.state.best_global_step}"} | (
        kept if best.endswith("-8") else set()
    )
    assert len(kept) == 2 and all(name.startswith("checkpoint-") for name in kept)
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == best


def test_push_to_hub_gets_the_final_folder(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, token=None: None)
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append((folder, Path(folder).is_dir()))
    )
    monkeypatch.setattr(Trainer, "_finish_current_push", lambda self: None)
    make(tmp_path, config_of("cyclic"), max_steps=2, save_steps=1, push_to_hub=True).train()
    assert pushed == [(str(tmp_path / f"checkpoint-{n}"), True) for n in (1, 2)]


class FullDisk(LCSBTrainer):
    """No file grows beyond 4096 bytes while checkpoint 10 is written, as on a full disk."""

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.state.global_step == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        super()._save_optimizer_and_scheduler(output_dir)


def test_a_full_disk_is_one_line_and_the_last_checkpoint_resumes(tmp_path):
    straight = make(tmp_path / "straight", config_of("cyclic"))
    straight.train()
    broken = make(tmp_path / "broken", config_of("cyclic"), trainer_class=FullDisk)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(
            OSError, match=r"checkpoint-10: the checkpoint cannot be written .* checkpoints are whole"
        ) as end:
            broken.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(end.value)
    assert [path.name for path in (tmp_path / "broken").iterdir()] == ["checkpoint-5"]
    resumed = make(tmp_path / "broken", config_of("cyclic"))
    resumed.train(resume_from_checkpoint=True)
    assert_same(outcome(straight), outcome(resumed))


def test_a_read_only_disk_is_one_line(tmp_path):
    trainer = make(tmp_path, config_of("cyclic"), max_steps=2, save_steps=1)
    trainer.args.output_dir = "/proc/lcsb"  # nobody may make a folder there, not even root
    with pytest.raises(OSError, match=r"^/proc/lcsb/checkpoint-1: the checkpoint cannot be written \("):
        trainer.train()
