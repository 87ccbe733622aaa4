"""Fine-tuning by the memory engine inside Trainer: the curve of an ordinary `LCSBTrainer` on the same weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import tiny_packed
import torch
from trainers import adapters_of, arguments, assert_equal
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from lcsb import LCSBCallback, LCSBConfig, LCSBTrainer, selective_backward
from lcsb.engine.inside_trainer import refuse_engine_options
from lcsb.engine.module import EngineModel
from lcsb.selective import NonFiniteError
from lcsb.trainer import NothingTrainedError

pytestmark = pytest.mark.usefixtures("one_thread")

# Whole quantisation blocks a row, or bitsandbytes takes wrong scales.
WIDE = {"intermediate_size": 128}
HEADS = {"qwen3": {"head_dim": 32}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("packed")
    return {
        family: tiny_packed.write(place, family, **WIDE, **HEADS.get(family, {}))
        for family in tiny_packed.ENGINE_FAMILIES
    }


def both(folder, config):
    """(EngineModel, transformers model) on the same weights with the same adapters, A and B drawn."""
    model = tiny_packed.reference(folder)
    engine = EngineModel(folder, config, r=4)
    engine.engine.load_adapter_tensors(tiny_packed.adapters(model))
    return engine, model


def uneven(vocabulary=97, n=24):
    """Rows of 5 to 20 tokens, the first third of every other one without labels."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(n):
        length = 5 + (7 * index) % 16
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        masked = length // 3 * (index % 2)
        labels = [-100] * masked + ids[masked:]
        found.append({"input_ids": ids, "attention_mask": [1] * length, "labels": labels})
    return found


def trainer(model, folder, config=None, data=None, *, trainer_class=LCSBTrainer, **changes):
    changes = {
        "max_steps": 6, "gradient_accumulation_steps": 2, "logging_strategy": "steps", "logging_steps": 1,
        "learning_rate": 1e-3, "weight_decay": 0.1, "gradient_checkpointing": False, "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine", "warmup_steps": 2, **changes,
    }  # fmt: skip
    own = {name: changes.pop(name) for name in ("callbacks", "eval_dataset") if name in changes}
    return trainer_class(
        model=model,
        args=TrainingArguments(**arguments(folder, **changes)),
        train_dataset=uneven() if data is None else data,
        data_collator=DataCollatorForSeq2Seq(tiny.tokenizer()),
        **({} if config is None else {"lcsb": config}),
        **own,
    )


def logged(run, *keys):
    return [[row[key] for key in keys if key in row] for row in run.state.log_history if "loss" in row]


def relative(ours, theirs):
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def assert_same_run(ours, theirs):
    """Losses to 1e-5 relative and the selection exactly; norms and moves follow."""
    assert logged(ours, "step", "lcsb/block", "lcsb/selected", "lcsb/skipped", "learning_rate") == logged(
        theirs, "step", "lcsb/block", "lcsb/selected", "lcsb/skipped", "learning_rate"
    )
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("lcsb/displacement_idle", 1e-3)):
        found = [value for (value,) in logged(ours, key)]
        assert found == pytest.approx([value for (value,) in logged(theirs, key)], rel=tolerance), key
    mine, others = adapters_of(ours.model), adapters_of(theirs.model)
    assert list(mine) == list(others)
    # AdamW divides by sqrt(v), so rounding in a gradient near zero moves it by a share of the learning rate.
    assert max(relative(mine[name], others[name]) for name in mine) < 1e-3


@pytest.mark.parametrize("family", tiny_packed.ENGINE_FAMILIES)
def test_curve_of_each_family(folders, tmp_path, family):
    """U33: uneven rows, padded, accumulated by two; clipping, decay and a schedule are Trainer's own."""
    config = LCSBConfig("exact", layers_per_step=2)
    engine, model = both(folders[family], config)
    ours, theirs = trainer(engine, tmp_path / "engine"), trainer(model, tmp_path / "ordinary", config)
    ours.train()
    theirs.train()
    assert_same_run(ours, theirs)
    assert len({loss for (loss,) in logged(ours, "loss")}) == 6


@pytest.mark.parametrize("idle", ["momentum", "frozen"])
@pytest.mark.parametrize("mode", ["full", "exact", "identity", "mlp"])
def test_curve_of_each_mode(folders, tmp_path, mode, idle):
    """U01: an idle layer moves under momentum and does not move at all when frozen."""
    config = LCSBConfig(mode, idle, layers_per_step=1)
    engine, model = both(folders["llama"], config)
    ours, theirs = trainer(engine, tmp_path / "engine"), trainer(model, tmp_path / "ordinary", config)
    ours.train()
    theirs.train()
    assert_same_run(ours, theirs)
    moves = [value for (value,) in logged(ours, "lcsb/displacement_idle")]
    assert all(move > 0 for move in moves[2:]) == (idle == "momentum" and mode != "full")


def test_without_num_items_losses_are_means_of_micro_batches(folders, tmp_path):
    config = LCSBConfig("exact", layers_per_step=2)
    engine, model = both(folders["llama"], config)
    ours, theirs = trainer(engine, tmp_path / "engine"), trainer(model, tmp_path / "ordinary", config)
    ours.model_accepts_loss_kwargs = theirs.model_accepts_loss_kwargs = False
    ours.train()
    theirs.train()
    assert_same_run(ours, theirs)


class Interrupt(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("idle", ["momentum", "frozen"])
def test_resumed_run_is_the_same_run(folders, tmp_path, idle):
    """U37: bit for bit, at a place in the cycle where a layer is idle."""
    config = LCSBConfig("exact", idle, layers_per_step=2, schedule="shuffled")
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear"}

    def model():
        return both(folders["qwen2"], config)[0]

    whole = trainer(model(), tmp_path / "whole", **settings)
    whole.train()
    broken = trainer(model(), tmp_path / "broken", callbacks=[Interrupt(5)], **settings)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    assert broken.model.selection is None
    # Another seed: what the checkpoint holds must replace it.
    again = trainer(EngineModel(folders["qwen2"], config, r=4, seed=9), tmp_path / "broken", **settings)
    again.train(resume_from_checkpoint=True)
    assert_equal(adapters_of(again.model), adapters_of(whole.model))
    assert logged(again, "loss", "lcsb/selected")[-3:] == logged(whole, "loss", "lcsb/selected")[-3:]
    files = {path.name for path in (tmp_path / "whole" / "checkpoint-6").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "trainer_state.json"} <= files
    assert "model.safetensors" not in files


def test_saved_adapter_is_pefts(folders, tmp_path):
    from peft import PeftModel

    from lcsb.models import load_quantized

    config = LCSBConfig("exact", layers_per_step=2)
    engine, _ = both(folders["gemma3"], config)
    run = trainer(engine, tmp_path / "run", data=uneven(300))
    run.train()
    run.save_model(tmp_path / "saved")
    loaded = PeftModel.from_pretrained(load_quantized(str(folders["gemma3"]))[0], tmp_path / "saved").eval()
    ids = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = loaded(input_ids=ids, labels=ids).loss.item()
        assert engine(input_ids=ids, labels=ids).loss.item() == pytest.approx(theirs, rel=1e-6)
    again = EngineModel(folders["gemma3"], config, r=4, seed=5)
    again.load_adapter(tmp_path / "saved")
    assert_equal(adapters_of(again), adapters_of(engine))
    assert json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["lora_alpha"] == 32


def test_adapter_of_another_scale_or_rank(folders, tmp_path):
    """U38."""
    EngineModel(folders["llama"], r=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"adapter of r, alpha = \(4, 32\.0\), expected \(4, 8\.0\)"):
        EngineModel(folders["llama"], r=4, alpha=8).load_adapter(tmp_path)
    with pytest.raises(ValueError, match=r"expected \(8, 32\.0\)"):
        EngineModel(folders["llama"], r=8).load_adapter(tmp_path)
    with pytest.raises(ValueError, match=r"adapter: .* belongs to no layer"):
        EngineModel(folders["llama"], r=4, target_modules="q_proj").load_adapter(tmp_path)


def test_evaluation_and_the_best_model(folders, tmp_path):
    """U35: evaluation loss equals the ordinary trainer's; the best checkpoint's adapters are put back.

    Best is said to be the highest loss, so that it is not the last.
    """
    config = LCSBConfig("exact", layers_per_step=2)
    settings = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6,
        "load_best_model_at_end": True, "greater_is_better": True, "lr_scheduler_type": "constant", "warmup_steps": 0,
        "eval_dataset": uneven()[:7], "per_device_eval_batch_size": 3,
    }  # fmt: skip
    engine, model = both(folders["llama"], config)
    run = trainer(engine, tmp_path / "engine", **settings)
    ordinary = trainer(model, tmp_path / "ordinary", config, **settings)
    assert run.evaluate()["eval_loss"] == pytest.approx(ordinary.evaluate()["eval_loss"], rel=1e-5)
    run.train()
    losses = {row["step"]: row["eval_loss"] for row in run.state.log_history if "eval_loss" in row}
    best = max(losses, key=losses.get)
    assert run.state.best_model_checkpoint.endswith(f"checkpoint-{best}") and best != 6
    assert run.evaluate()["eval_loss"] == losses[best]


def test_the_usual_collators_and_datasets(folders, tmp_path):
    """U35: the same loss as transformers', whatever pads and whatever holds the rows."""
    datasets = pytest.importorskip("datasets")
    engine, model = both(folders["llama"], LCSBConfig())
    tokenizer = tiny.tokenizer()
    plain = [{"input_ids": row["input_ids"]} for row in uneven()[:5]]
    for collator, rows in (
        (DataCollatorForLanguageModeling(tokenizer, mlm=False), plain),
        (DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8), plain),
        (DataCollatorForSeq2Seq(tokenizer), datasets.Dataset.from_list(uneven()[:5])),
        (default_data_collator, [{k: v[:5] for k, v in row.items()} for row in uneven()[:5]]),
    ):
        losses = []
        for net in (engine, model):
            args = TrainingArguments(**arguments(tmp_path, per_device_eval_batch_size=2))
            run = LCSBTrainer(
                model=net, args=args, data_collator=collator, eval_dataset=rows, lcsb=LCSBConfig()
            )
            losses.append(run.evaluate()["eval_loss"])
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_trainer_does_beside_training(folders, tmp_path):
    """Predictions are the loss alone; the model card names the folder; recompute may be asked for."""
    engine = EngineModel(folders["llama"], LCSBConfig(), r=4)
    run = trainer(engine, tmp_path, gradient_checkpointing=True, max_steps=1)
    run.train()
    found = run.predict(uneven()[:4])
    assert found.predictions == () and found.metrics["test_loss"] > 0
    run.create_model_card()
    assert f"base_model: {folders['llama']}" in (tmp_path / "README.md").read_text()


def test_plain_trainer_with_the_callback(folders, tmp_path):
    config = LCSBConfig("identity", layers_per_step=2)
    ours = trainer(both(folders["llama"], config)[0], tmp_path / "ours")
    settings = {"save_strategy": "steps", "save_steps": 4, "callbacks": [LCSBCallback(config)]}
    plain = trainer(both(folders["llama"], config)[0], tmp_path / "plain", trainer_class=Trainer, **settings)
    ours.train()
    plain.train()
    assert_equal(adapters_of(plain.model), adapters_of(ours.model))
    settings["callbacks"] = [LCSBCallback(config)]
    again = EngineModel(folders["llama"], config, r=4, seed=9)
    resumed = trainer(again, tmp_path / "plain", trainer_class=Trainer, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_equal(adapters_of(again), adapters_of(ours.model))


def test_plain_trainer_without_the_callback_is_refused(folders, tmp_path):
    engine = EngineModel(folders["llama"], LCSBConfig("exact", layers_per_step=1))
    with pytest.raises(RuntimeError, match="in mode 'exact' outside selective_backward; use LCSBTrainer"):
        trainer(engine, tmp_path, trainer_class=Trainer).train()


def test_sft_trainer_is_refused(folders, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    with pytest.raises(AttributeError, match="TRL's trainers need logits"):
        trl.SFTTrainer(
            model=EngineModel(folders["llama"]),
            args=trl.SFTConfig(**arguments(tmp_path)),
            train_dataset=datasets.Dataset.from_list(uneven()),
            processing_class=tiny.tokenizer(),
            callbacks=[LCSBCallback()],
        )


def test_a_loop_by_hand(folders):
    """selective_backward takes an EngineModel; two forwards before one backward, and a scaled loss."""
    config = LCSBConfig("exact", layers_per_step=2)
    engine, model = both(folders["mistral"], config)
    records = []
    for net in (engine, model):
        parameters = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        with selective_backward(net, config) as lcsb:
            for t in range(4):
                lcsb.begin()
                first, second = (tiny.batch(model, seed=seed) for seed in (2 * t, 2 * t + 1))
                loss = 0.25 * net(**first).loss + 3 * net(**second).loss
                loss.backward()
                assert all(p.grad is None for p in lcsb.idle_parameters())
                records.append((loss.item(), lcsb.step(optimizer, max_norm=1.0)))
    for (loss, record), (other, reference) in zip(records[:4], records[4:], strict=True):
        assert loss == pytest.approx(other, rel=1e-5)
        assert record.selected == reference.selected and record.block == reference.block
        assert record.grad_norm == pytest.approx(reference.grad_norm, rel=1e-4)


def test_gradients_are_given_once(folders):
    """U10, U16."""
    engine = EngineModel(folders["llama"], LCSBConfig("full"))
    ids = torch.arange(3, 13)[None]
    loss = engine(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time through the same forward pass"):
        loss.backward()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(
            engine(input_ids=ids, labels=ids).loss, list(engine.parameters()), create_graph=True
        )


def test_micro_batches_without_labels(folders, tmp_path):
    """U30: a batch without a target is no step, and a run of nothing else is an error."""
    config = LCSBConfig("exact", layers_per_step=2)
    data = uneven()
    for row in data[:6]:
        row["labels"] = [-100] * len(row["labels"])
    settings = {"data": data, "train_sampling_strategy": "sequential", "gradient_accumulation_steps": 1}
    engine, model = both(folders["llama"], config)
    ours = trainer(engine, tmp_path / "engine", **settings)
    theirs = trainer(model, tmp_path / "ordinary", config, **settings)
    with pytest.warns(UserWarning, match="3 steps were not taken"):
        ours.train()
    with pytest.warns(UserWarning, match="3 steps were not taken"):
        theirs.train()
    assert logged(ours, "lcsb/skipped") == logged(theirs, "lcsb/skipped") == [[1], [2], [3], [3], [3], [3]]
    mine, others = adapters_of(ours.model), adapters_of(theirs.model)
    assert max(relative(mine[name], others[name]) for name in mine) < 1e-3
    empty = trainer(both(folders["llama"], config)[0], tmp_path / "empty", **{**settings, "data": data[:6]})
    with pytest.raises(NothingTrainedError):
        empty.train()


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_nonfinite_gradient(folders, tmp_path, on_nonfinite):
    """U09: nothing of the adapters changes."""
    engine = EngineModel(
        folders["llama"], LCSBConfig("exact", layers_per_step=1, on_nonfinite=on_nonfinite), r=4
    )
    before = adapters_of(engine)
    engine.engine.final_norm.fill_(float("nan"))
    run = trainer(engine, tmp_path, max_steps=2)
    if on_nonfinite == "stop":
        with pytest.raises(NonFiniteError, match="the gradient is not finite in 14 of 14 parameters"):
            run.train()
    else:
        with pytest.warns(UserWarning, match="2 with a gradient that is not finite"):
            run.train()
    assert_equal(adapters_of(engine), before)
    assert all(p.grad is None for p in engine.parameters())


IDS = torch.arange(3, 13)[None].repeat(2, 1)
MASK = torch.ones_like(IDS)
LEFT, HOLE, SHORT = MASK.clone(), MASK.clone(), MASK.clone()
LEFT[0, :2], HOLE[1, 4], SHORT[1, 8:] = 0, 0, 0


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"attention_mask": LEFT}, "padding on the left or inside a row"),
        ({"attention_mask": HOLE}, "padding on the left or inside a row"),
        ({"attention_mask": SHORT}, "labels in the padding are not -100"),
        ({"attention_mask": MASK[:1]}, r"attention_mask \(1, 10\), expected \(2, 10\)"),
        ({"labels": None}, "no labels; the memory engine gives a loss and no logits"),
        ({"labels": IDS[:1]}, "expected two equal shapes"),
        ({"position_ids": torch.arange(10)[None] % 5}, "packed rows are not computed"),
        ({"inputs_embeds": torch.zeros(2, 10, 64)}, "'inputs_embeds' is not computed"),
        ({"input_ids": IDS + 90}, "token ids 93 to 102, expected 0 to 96"),
    ],
)
def test_batches_that_the_engine_does_not_compute(folders, batch, message):
    engine = EngineModel(folders["llama"], LCSBConfig("full"))
    good = {"input_ids": IDS, "labels": IDS, "position_ids": torch.arange(10)[None], "use_cache": False}
    assert torch.isfinite(engine(**good).loss)
    with pytest.raises(ValueError, match=message):
        engine(**{**good, **batch})
    with torch.autocast("cpu"), pytest.raises(ValueError, match="inside autocast"):
        engine(**good)


def test_no_logits_and_no_other_type(folders):
    engine = EngineModel(folders["llama"])
    with torch.no_grad():
        output = engine(input_ids=IDS, labels=IDS)
    with pytest.raises(AttributeError, match="EngineOutput has no 'logits': the memory engine computes the"):
        _ = output.logits
    with pytest.raises(ValueError, match=r"asked to become torch\.float16 on cpu"):
        engine.half()
    assert engine.to("cpu") is engine
    with pytest.raises(AttributeError, match="EngineModel has no 'generate'"):
        engine.generate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute_metrics": len}, "compute_metrics: not with the memory engine"),
        ({"preprocess_logits_for_metrics": len}, "preprocess_logits_for_metrics: not with"),
        ({"compute_loss_func": len}, "compute_loss_func: not with the memory engine"),
        ({"bf16": True}, r"bf16 is True: .* leave it out \(EngineModel\(compute_dtype='bfloat16'\)"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor is 0\.1: the memory"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha is 5\.0: the memory engine"),
    ],
)
def test_options_that_the_engine_does_not_compute(folders, tmp_path, changes, message):
    own = {k: v for k, v in changes.items() if k.startswith(("comp", "pre"))}
    args = TrainingArguments(**arguments(tmp_path, **{k: v for k, v in changes.items() if k not in own}))
    with pytest.raises(ValueError, match=message):
        LCSBTrainer(model=EngineModel(folders["llama"]), args=args, train_dataset=uneven(), **own)


def test_launches_that_the_engine_does_not_compute(folders, tmp_path):
    args = TrainingArguments(**arguments(tmp_path))
    with pytest.raises(
        ValueError, match="model: found 'smollm2-135m' without ram_budget; expected a model in"
    ):
        LCSBTrainer(model="smollm2-135m", args=args)
    for changes, message in (
        ({"device": torch.device("cuda", 0)}, "device cuda:0: .* set use_cpu=True"),
        ({"world_size": 2}, "2 processes: the memory engine trains in one"),
    ):
        asked = {name: getattr(args, name) for name in dir(args) if not name.startswith("_")} | changes
        with pytest.raises(ValueError, match=message):
            refuse_engine_options(SimpleNamespace(**asked))


def test_configurations_must_be_the_models(folders, tmp_path):
    engine = EngineModel(folders["llama"], LCSBConfig("exact", layers_per_step=2))
    with pytest.raises(ValueError, match="layers_per_step is 1 here and 2 there"):
        trainer(engine, tmp_path, LCSBConfig("exact", layers_per_step=1)).train()
    with pytest.raises(ValueError, match=r"target_modules: found 'q_projj', .*; nearest: 'q_proj'"):
        EngineModel(folders["llama"], target_modules=["q_projj"])
    with pytest.raises(ValueError, match="no such folder, and no built-in name"):
        EngineModel("smollm")
    with (
        selective_backward(engine, engine.lcsb_config),
        pytest.raises(RuntimeError, match="already inside a selective_backward context"),
        selective_backward(engine, engine.lcsb_config),
    ):
        pass
    with (
        selective_backward(engine, engine.lcsb_config),
        pytest.raises(RuntimeError, match=r"call begin\(\) first"),
    ):
        engine(input_ids=IDS, labels=IDS)


def test_budget_in_the_configuration():
    for budget in ("1GB", "900MiB", 10**9):
        config = LCSBConfig(ram_budget=budget)
        assert config.to_dict()["ram_budget"] == budget
        assert LCSBConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match=r"^ram_budget: .*1 GBB"):
        LCSBConfig(ram_budget="1 GBB")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"backward": "certified", "layers_per_step": 1},
            "backward: found 'certified' with ram_budget '1GB'",
        ),
        ({"schedule": "importance", "layers_per_step": 1}, "schedule: found 'importance' with ram_budget"),
        ({"schedule": "adaptive", "backward": "mlp"}, "schedule: found 'adaptive' with ram_budget '1GB'"),
        ({"layers": "model.layers"}, "layers: found 'model.layers' with ram_budget"),
        ({"layers": [torch.nn.Identity()]}, "layers: found 1 modules with ram_budget"),
        ({"outer": "freeze"}, "outer: found 'freeze' with ram_budget"),
    ],
)
def test_what_has_no_budgeted_form(changes, message):
    with pytest.raises(ValueError, match=message):
        LCSBConfig(**changes, ram_budget="1GB")


def test_budget_for_a_model_in_memory(folders, tmp_path):
    model = tiny_packed.reference(folders["llama"])
    config = LCSBConfig(ram_budget="64GB")
    with pytest.raises(ValueError, match="found '64GB' for a PeftModelForCausalLM that is in memory already"):
        selective_backward(model, config)
    with pytest.raises(ValueError, match="found '64GB' for a PeftModelForCausalLM that is in memory already"):
        trainer(model, tmp_path, config)
    run = trainer(model, tmp_path, trainer_class=Trainer, callbacks=[LCSBCallback(config)])
    with pytest.raises(ValueError, match="that is in memory already"):
        run.train()


def test_a_budget_changes_no_bit_and_may_change_on_resuming(folders, tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    free = trainer(
        EngineModel(folders["gemma3"], LCSBConfig(layers_per_step=2)), tmp_path / "free", **settings
    )
    free.model.save_pretrained(tmp_path / "start")
    free.train()

    def run(budget, callbacks=()):
        config = LCSBConfig(layers_per_step=2, ram_budget=budget)
        name = str(folders["gemma3"])
        run = trainer(name, tmp_path / "run", config, callbacks=list(callbacks), **settings)
        assert run.model._planned == (2, 20)
        return run

    broken = run("64GB", [Interrupt(4)])
    broken.model.load_adapter(tmp_path / "start")
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    again = run("32GB")
    again.train(resume_from_checkpoint=True)
    assert_equal(adapters_of(again.model), adapters_of(free.model))


def test_a_budget_planned_before_trainer_was_imported(folders, tmp_path):
    engine = EngineModel(folders["llama"], LCSBConfig(ram_budget="64GB"))
    engine.refuse_early_floor()
    engine._knows_trainer = False
    with pytest.raises(ValueError, match="made before transformers' Trainer was imported"):
        trainer(engine, tmp_path, trainer_class=Trainer, callbacks=[LCSBCallback(engine.lcsb_config)]).train()


def test_a_longer_batch_is_planned_when_it_comes(folders):
    from lcsb.engine.planner import BudgetError

    config = LCSBConfig("full", ram_budget="64GB")
    engine = EngineModel(folders["llama"], config, rows=2, tokens=8)
    assert engine._planned == (2, 8)
    engine(input_ids=IDS, labels=IDS)
    assert engine._planned == (2, 10)
    with torch.no_grad():
        whole = engine(input_ids=IDS.repeat(3, 2), labels=IDS.repeat(3, 2)).loss
    assert engine._planned == (2, 20)
    assert whole.item() == pytest.approx(
        engine(input_ids=IDS.repeat(1, 2), labels=IDS.repeat(1, 2)).loss.item()
    )
    with pytest.raises(BudgetError, match=r"the least budget that can is \d+ bytes"):
        EngineModel(folders["llama"], LCSBConfig(ram_budget="1MB"))


PROBE = """
import json, sys
import torch
torch.set_num_threads(1)
from transformers import TrainingArguments
from lcsb import LCSBConfig, LCSBTrainer
from lcsb.engine.ram import peak_bytes

settings, folder = json.loads(sys.argv[1]), sys.argv[2]
generator = torch.Generator().manual_seed(0)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 49000, (12, 128), generator=generator)]
args = TrainingArguments(
    folder, max_steps=10, per_device_train_batch_size=1, report_to=[], use_cpu=True, save_strategy="steps",
    save_steps=5, logging_steps=1, disable_tqdm=True, learning_rate=1e-3,
)
trainer = LCSBTrainer(model="smollm2-135m", args=args, train_dataset=rows, lcsb=LCSBConfig(**settings))
trainer.model.save_pretrained(f"{folder}/start")
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
found = {"losses": losses, "peak": peak_bytes(), "predicted": trainer.model.plan.peak.total}
json.dump(found, open(f"{folder}/result.json", "w"))
"""


def in_budget(folder, **settings):
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(settings), str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("demo_cache")
@pytest.mark.parametrize(
    ("backward", "idle"),
    [("exact", "momentum"), ("identity", "momentum"), ("mlp", "momentum"), ("exact", "frozen")],
)
def test_smollm2_in_a_budget(tmp_path, backward, idle):
    """The whole process, Trainer and all, stays below its budget; the curve is the ordinary trainer's."""
    from lcsb.adapter_files import load_adapter
    from lcsb.models import load_quantized

    settings = {"backward": backward, "idle": idle, "layers_per_step": 8}
    found = in_budget(tmp_path, ram_budget="800MB", **settings)
    assert found["peak"] < 800e6
    model = load_adapter(load_quantized("smollm2-135m")[0], tmp_path / "start").train()
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": ids, "labels": ids} for ids in torch.randint(3, 49000, (12, 128), generator=generator)
    ]
    run = LCSBTrainer(
        model=model,
        args=TrainingArguments(
            str(tmp_path / "ordinary"),
            max_steps=10,
            per_device_train_batch_size=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            learning_rate=1e-3,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        lcsb=LCSBConfig(**settings),
    )
    run.train()
    assert len(found["losses"]) == 10
    assert found["losses"] == pytest.approx([loss for (loss,) in logged(run, "loss")], rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("demo_cache")
def test_a_budget_that_cannot_be_met(tmp_path):
    """U40: the least that could is named, and is enough."""
    with pytest.raises(AssertionError, match="BudgetError") as caught:
        in_budget(tmp_path, ram_budget="500MB", layers_per_step=8)
    (least,) = re.findall(r"BudgetError: .* the least budget that can is (\d+) bytes", str(caught.value))
    assert 500e6 < int(least) < 900e6
    enough = int(int(least) * 1.005)  # the floor is measured anew in each process
    assert in_budget(tmp_path, ram_budget=enough, layers_per_step=8)["peak"] < enough


# What the README shows.
@pytest.mark.slow
@pytest.mark.usefixtures("demo_cache")
def test_the_readmes_example(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    marker = re.escape("<!-- executed by tests/lcsb/test_engine_trainer.py -->")
    code = re.search(marker + r"\n```python\n(.*?)```", readme, re.S).group(1)
    code += "\nfrom lcsb.engine.ram import peak_bytes\nprint(peak_bytes(), trainer.state.global_step)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, steps = map(int, done.stdout.split()[-2:])
    assert peak < 10**9 and steps == 4
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
