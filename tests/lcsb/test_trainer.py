"""LCSBCallback inside Trainer and SFTTrainer, and selective_backward after the k-bit helper.

Each of them switches the input-gradient hook on; the selection alone must decide the backward work all the same.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import tiny
import torch
from trainers import adapters_of, arguments, assert_clean, assert_equal, lcsb_trainer, rows
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler

from lcsb.callback import LCSBCallback
from lcsb.config import LCSBConfig
from lcsb.layers import named_decoder_layers
from lcsb.selective import selective_backward
from lcsb.trainer import LCSBTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


class Flow(TrainerCallback):
    """Records through which decoder layers a gradient flowed at each optimiser step, and the optimiser's size."""

    def __init__(self, model):
        self.steps, self.in_optimizer, self._now = [], None, set()
        self.hook_is_on = []
        layers = named_decoder_layers(model)
        layers[0][1].register_forward_pre_hook(self._look, with_kwargs=True)
        for index, (name, _) in enumerate(layers):
            for inner in ("self_attn.o_proj", "mlp.down_proj"):
                model.get_submodule(f"{name}.{inner}").register_forward_hook(self._watch(index))

    def _look(self, module, args, kwargs):
        """The input of layer 0 needs a gradient when the hook is on; -1 records that one was computed."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self.hook_is_on.append(hidden.requires_grad)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._now.add(-1))

    def _watch(self, index):
        def hook(module, args, output):
            if output.requires_grad:
                output.register_hook(lambda gradient: self._now.add(index))

        return hook

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.steps.append(sorted(self._now))
        self._now.clear()
        groups = kwargs["optimizer"].param_groups
        self.in_optimizer = sum(p.numel() for group in groups for p in group["params"])


# layers through which gradients flow in the first cycle and the step after it, k = 1 of 4 layers
REACHED = {
    "exact": [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3], [0, 1, 2, 3]],
    "mlp": [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3], [0, 1, 2, 3]],
    "identity": [[0], [1], [2], [3], [0]],
}


@pytest.mark.parametrize("backward", ["exact", "identity", "mlp"])
def test_trainer_with_recompute(tmp_path, backward):
    model = tiny.with_lora(tiny.llama())
    flow = Flow(model)
    callback = LCSBCallback(LCSBConfig(backward, "frozen", layers_per_step=1))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments(tmp_path)),
        train_dataset=rows(model),
        callbacks=[callback, flow],
    )
    trainer.train()
    assert all(flow.hook_is_on), "Trainer no longer switches the hook on: this test proves nothing"
    assert flow.steps == REACHED[backward]
    assert flow.in_optimizer == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert callback.lcsb is None
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("idle", ["momentum", "frozen"])
def test_idle_layers_in_trainer(tmp_path, idle):
    model = tiny.with_lora(tiny.llama())
    before, moved = {}, []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            before.update({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})

        def on_step_end(self, args, state, control, **kwargs):
            now = dict(model.named_parameters())
            changed = {n.split("layers.")[1][0] for n, x in before.items() if not torch.equal(x, now[n])}
            moved.append(sorted(map(int, changed)))

    callbacks = [LCSBCallback(LCSBConfig("exact", idle, layers_per_step=1)), Watch()]
    args = TrainingArguments(**arguments(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.5))
    Trainer(model=model, args=args, train_dataset=rows(model), callbacks=callbacks).train()
    frozen = [[0], [1], [2], [3], [0]]
    momentum = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert moved == (frozen if idle == "frozen" else momentum)


def test_model_is_clean_after_an_exception_in_training(tmp_path):
    model = tiny.with_lora(tiny.llama())

    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    callback = LCSBCallback(LCSBConfig("identity", layers_per_step=1))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments(tmp_path)),
        train_dataset=rows(model),
        callbacks=[callback, Fail()],
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    callback.close()
    assert not any("forward" in module.__dict__ for module in model.modules())
    model(**tiny.batch(model)).loss.backward()


def test_sft_trainer(tmp_path):
    trl = pytest.importorskip("trl")
    model = tiny.with_lora(tiny.llama())
    flow = Flow(model)
    ids = [row["input_ids"].tolist() for row in rows(model)]
    datasets = pytest.importorskip("datasets")
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments(tmp_path), max_length=32),
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}),
        processing_class=tiny.tokenizer(),
        callbacks=[LCSBCallback(LCSBConfig("exact", "frozen", layers_per_step=1)), flow],
    )
    trainer.train()
    assert flow.steps == REACHED["exact"]


def test_k_bit_helper():
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    base = tiny.llama()
    base.is_loaded_in_4bit = True  # the helper prepares only models that say so
    prepared = prepare_model_for_kbit_training(base, use_gradient_checkpointing=True)
    assert prepared.get_input_embeddings()._forward_hooks, (
        "the helper no longer hooks: this test proves nothing"
    )
    model = get_peft_model(prepared, LoraConfig(r=2, target_modules="all-linear"))
    flow = Flow(model)
    with selective_backward(model, LCSBConfig("exact", layers_per_step=1), t=2) as lcsb:
        lcsb.begin()
        model(**tiny.batch(model)).loss.backward()
    assert sorted(flow._now) == [2, 3]


# -- LCSBTrainer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config, recompute", [
    (LCSBConfig("exact", layers_per_step=2), True),
    (LCSBConfig("identity", "frozen", layers_per_step=1, schedule="shuffled"), False),
    (LCSBConfig("mlp", layers_per_step=3, schedule="importance", refresh_every=2), True),
], ids=["exact", "identity", "mlp"])  # fmt: skip
def test_lcsb_trainer_equals_the_hand_written_loop_bit_for_bit(tmp_path, config, recompute):
    """Accumulation of 2, clipping, weight decay, warm-up and a cosine schedule included."""
    first = tiny.with_lora(tiny.llama())
    second = copy.deepcopy(first)
    data = rows(first)
    trainer = lcsb_trainer(
        first, tmp_path, config, data, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        max_grad_norm=0.1, weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=2, max_steps=6,
        activation_checkpointing=recompute, gradient_checkpointing=None, logging_strategy="steps", logging_steps=1,
    )  # fmt: skip
    trainer.train()
    optimizer = torch.optim.AdamW(
        [p for p in second.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, fused=True
    )
    rates = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=6)
    if recompute:
        second.activation_checkpointing_enable({"use_reentrant": False})
    records = []
    with selective_backward(second.train(), config, seed=42) as lcsb:
        for step in range(6):
            lcsb.begin()
            pair = [{k: v[None] for k, v in row.items()} for row in data[2 * step : 2 * step + 2]]
            count = sum(batch["labels"][:, 1:].numel() for batch in pair)
            for batch in pair:
                second(**batch, num_items_in_batch=torch.tensor(count)).loss.backward()
            records.append(lcsb.step(optimizer, max_norm=0.1))
            rates.step()
    assert_equal(adapters_of(first), adapters_of(second))
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["lcsb/selected"] for row in logged] == [",".join(map(str, r.selected)) for r in records]
    assert [row["lcsb/grad_norm"] for row in logged] == [r.grad_norm for r in records]
    assert [row["grad_norm"] for row in logged] == [r.grad_norm for r in records]
    assert min(r.grad_norm for r in records) > 0.1, "nothing was clipped: this test proves too little"


@pytest.mark.parametrize("config, clip", [
    (LCSBConfig("full"), 0.05), (LCSBConfig("exact", "frozen"), 0.0), (LCSBConfig("identity", layers_per_step=4), 0.05),
], ids=["full", "exact", "identity"])  # fmt: skip
def test_all_layers_selected_is_plain_qlora_bit_for_bit(nf4, tmp_path, config, clip):
    """U02, U11: nothing is lost, with recompute, accumulation, clipping and dropout."""
    first = tiny.with_lora(nf4(), dropout=0.1)
    second = copy.deepcopy(first)
    options = {"activation_checkpointing": True, "gradient_checkpointing": None, "max_grad_norm": clip}
    options |= {"gradient_accumulation_steps": 2, "train_sampling_strategy": "random"}
    start = adapters_of(first)
    lcsb_trainer(first, tmp_path / "a", config, **options).train()
    lcsb_trainer(second, tmp_path / "b", None, trainer_class=Trainer, **options).train()
    assert_equal(adapters_of(first), adapters_of(second))
    assert all(not torch.equal(start[name], value) for name, value in adapters_of(first).items())


@pytest.mark.parametrize("make", [LCSBTrainer, Trainer], ids=["trainer", "callback"])
def test_accumulation_does_not_change_the_trajectory(tmp_path, make):
    """U33: rows of 3 to 12 tokens, 4 x 1, 2 x 2 and 1 x 4, and a last window of 2 rows: gradient norms and weights."""
    config = LCSBConfig("exact", layers_per_step=2)
    found = []
    for rows_at_once, accumulation in ((4, 1), (2, 2), (1, 4)):
        model = tiny.with_lora(tiny.llama(dtype=torch.float64))
        lengths = [3, 12, 5, 9, 12, 3, 7, 4, 11, 6]
        data = [
            {k: v[0] for k, v in tiny.batch(model, rows=1, seed=s, lengths=[n]).items()}
            for s, n in enumerate(lengths)
        ]
        options = {"per_device_train_batch_size": rows_at_once, "gradient_accumulation_steps": accumulation,
                   "max_steps": -1, "num_train_epochs": 1, "logging_strategy": "steps", "logging_steps": 1,
                   "max_grad_norm": 1e9}  # fmt: skip
        own = {"trainer_class": make}
        if make is Trainer:
            own["callbacks"] = [LCSBCallback(config)]
        trainer = lcsb_trainer(model, tmp_path, None if make is Trainer else config, data, **own, **options)
        trainer.train()
        norms = [row["lcsb/grad_norm"] for row in trainer.state.log_history if "loss" in row]
        found.append((norms, adapters_of(model)))
    assert len(found[0][0]) == 3
    for norms, weights in found[1:]:
        assert norms == pytest.approx(found[0][0], rel=1e-6)
        for name, value in weights.items():
            assert torch.allclose(value, found[0][1][name], rtol=1e-6, atol=1e-9), name


def test_clipping_and_logged_norm_are_of_the_selected_layers(tmp_path):
    """U07: one of four layers against all: the logged norm is the selected gradients', and the clip happens once."""
    norms = {}
    for k in (1, 4):
        model = tiny.with_lora(tiny.llama(dtype=torch.float64))
        reference = copy.deepcopy(model)
        data = rows(model)
        trainer = lcsb_trainer(
            model, tmp_path, LCSBConfig("exact", "frozen", layers_per_step=k), data, max_steps=1, optim="sgd",
            learning_rate=1.0, max_grad_norm=0.1, gradient_accumulation_steps=2, per_device_train_batch_size=1,
            logging_strategy="steps", logging_steps=1,
        )  # fmt: skip
        before = adapters_of(model)
        trainer.train()
        batch = {key: torch.stack([row[key] for row in data[:2]]) for key in data[0]}
        reference(**batch).loss.backward()
        gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        if k == 1:
            gradients = {n: g for n, g in gradients.items() if "layers.0." in n}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        row = trainer.state.log_history[0]
        assert row["lcsb/grad_norm"] == pytest.approx(float(norm), rel=1e-10) == row["grad_norm"]
        after = adapters_of(model)
        for name, gradient in gradients.items():
            moved = before[name] - after[name]
            assert torch.allclose(moved, gradient * (0.1 / (norm + 1e-6)), rtol=1e-9, atol=1e-13), name
        norms[k] = row["grad_norm"]
    assert norms[1] < norms[4]


@pytest.mark.parametrize("way", ["returns", "ctrl-c"])
def test_the_model_is_clean_afterwards(tmp_path, way):
    class Fail(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if way != "returns" and state.global_step == 2:
                raise KeyboardInterrupt

    model = tiny.with_lora(tiny.llama())
    config = LCSBConfig("identity", layers_per_step=1)
    trainer = lcsb_trainer(model, tmp_path / "a", config, callbacks=[Fail()], neftune_noise_alpha=1.0)
    with contextlib.nullcontext() if way == "returns" else pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.lcsb.lcsb is None
    model.zero_grad()
    assert_clean(model)
    assert not model.get_input_embeddings()._forward_hooks  # NEFTune
    assert trainer.predict(rows(model)[:2]).predictions.shape[0] == 2
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()
    second = lcsb_trainer(model, tmp_path / "b", LCSBConfig("exact", layers_per_step=2))
    second.train()
    assert second.state.global_step == 5
    model.zero_grad()
    assert_clean(model)


def test_bf16_autocast(tmp_path):
    """Mixed precision: adapters stay float32, layers are selected as ever, and the first gradient is autocast's own."""
    found = {}
    for name, backward in (("lcsb", "exact"), ("plain", None)):
        model = tiny.with_lora(tiny.llama())
        config = LCSBConfig(backward, layers_per_step=2) if backward else None
        trainer = lcsb_trainer(
            model, tmp_path, config, trainer_class=LCSBTrainer if config else Trainer, bf16=True, max_steps=1,
            optim="sgd", learning_rate=1.0, max_grad_norm=0.0, activation_checkpointing=name == "lcsb",
            gradient_checkpointing=None,
        )  # fmt: skip
        before = adapters_of(model)
        trainer.train()
        found[name] = {n: before[n] - p for n, p in adapters_of(model).items()}
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    for n, move in found["lcsb"].items():
        if "layers.0." in n or "layers.1." in n:
            assert torch.equal(move, found["plain"][n]), n
            assert move.any()
        else:
            assert not move.any()
    fp32 = tiny.with_lora(tiny.llama())
    loss = fp32(**{k: torch.stack([r[k] for r in rows(fp32)[:2]]) for k in rows(fp32)[0]}).loss
    loss.backward()
    name, parameter = next((n, p) for n, p in fp32.named_parameters() if "layers.1" in n and "lora_B" in n)
    assert not torch.equal(found["plain"][name], parameter.grad), (
        "autocast had no effect: this test proves nothing"
    )


def test_recompute_and_its_deprecated_name_give_the_same_weights(tmp_path):
    weights = []
    for options in ({"activation_checkpointing": True, "gradient_checkpointing": None},
                    {"gradient_checkpointing": True}, {"gradient_checkpointing": False}):  # fmt: skip
        model = tiny.with_lora(tiny.llama(), dropout=0.1)
        trainer = lcsb_trainer(model, tmp_path, LCSBConfig("mlp", layers_per_step=1), **options)
        trainer.train()
        weights.append(adapters_of(model))
    assert_equal(weights[0], weights[1])
    assert_equal(weights[0], weights[2])


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"every_n_layers": 2}, {"offload": True}],
                         ids=lambda options: next(iter(options)))  # fmt: skip
def test_options_of_recompute_that_would_have_no_effect_are_refused(tmp_path, options):
    """U11: reentrant recompute loses the adapters' gradients below a frozen input."""
    model = tiny.with_lora(tiny.llama())
    recompute = {"activation_checkpointing": True, "gradient_checkpointing": None}
    refusal = pytest.raises(ValueError, match=f"activation_checkpointing_kwargs: '?{next(iter(options))}")
    with refusal:
        lcsb_trainer(model, tmp_path, LCSBConfig(), **recompute, activation_checkpointing_kwargs=options)
    trainer = lcsb_trainer(
        model, tmp_path, None, trainer_class=Trainer, callbacks=[LCSBCallback()], **recompute,
        activation_checkpointing_kwargs=options,
    )  # fmt: skip
    with refusal:
        trainer.train()
    assert not any("forward" in module.__dict__ for module in model.modules())


class Tracker(TrainerCallback):
    """What a tracking integration sees: it stands before the user's callbacks."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append(dict(logs))


LOGGED = {"lcsb/block", "lcsb/selected", "lcsb/grad_norm", "lcsb/displacement_idle", "lcsb/skipped"}


@pytest.mark.parametrize("make", ["trainer", "callback", "callback-first"])
def test_trackers_see_the_values(tmp_path, make):
    tracker, config = Tracker(), LCSBConfig("exact", layers_per_step=1)
    model = tiny.with_lora(tiny.llama())
    options = {
        "logging_strategy": "steps",
        "logging_steps": 2,
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    callback = LCSBCallback(config)
    trainer = (LCSBTrainer if make == "trainer" else Trainer)(
        model=model,
        args=TrainingArguments(**arguments(tmp_path, **options)),
        train_dataset=rows(model),
        eval_dataset=rows(model)[:3],
        callbacks=[tracker] if make == "trainer" else [tracker, callback],
        **({"lcsb": config} if make == "trainer" else {}),
    )
    if make == "callback-first":
        callback.put_first(trainer)
    trainer.train()
    history = [row for row in trainer.state.log_history if "loss" in row]
    assert len(history) == 3 and all(row.keys() >= LOGGED for row in history)
    assert [row["lcsb/selected"] for row in history] == ["1", "3", "1"]
    assert [row["lcsb/block"] for row in history] == [1, 3, 1]
    assert all(row["lcsb/displacement_idle"] > 0 for row in history)
    assert all(row["lcsb/grad_norm"] == row["grad_norm"] for row in history)
    seen = [row for row in tracker.rows if "loss" in row]
    assert all((row.keys() >= LOGGED) == (make != "callback") for row in seen)
    assert not any(LOGGED & row.keys() for row in tracker.rows if "loss" not in row)  # evaluation rows
    assert sum("eval_loss" in row for row in tracker.rows) == 2


def test_frozen_idle_layers_are_logged_as_not_moving(tmp_path):
    model = tiny.with_lora(tiny.llama())
    config = LCSBConfig("exact", "frozen", layers_per_step=1)
    trainer = lcsb_trainer(model, tmp_path, config, logging_strategy="steps", logging_steps=1)
    trainer.train()
    assert [row["lcsb/displacement_idle"] for row in trainer.state.log_history if "loss" in row] == [0.0] * 5


def test_two_callbacks_are_refused(tmp_path):
    model = tiny.with_lora(tiny.llama())
    with pytest.raises(ValueError, match="LCSBTrainer brings its own LCSBCallback"):
        lcsb_trainer(model, tmp_path, LCSBConfig(), callbacks=[LCSBCallback()])
    two = lcsb_trainer(
        model, tmp_path, None, trainer_class=Trainer, callbacks=[LCSBCallback(), LCSBCallback()]
    )
    with pytest.raises(ValueError, match="2 LCSBCallback in one trainer"):
        two.train()
    assert_clean(model)


@pytest.mark.parametrize("outer", ["train", "freeze"])
def test_outer_parameters(tmp_path, outer):
    """U02: a trained head is in the optimiser once, and moves at every step or never."""
    model = tiny.with_lora(tiny.llama())
    head = model.get_output_embeddings().weight.requires_grad_(True)
    before, moved = [head.detach().clone()], []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            moved.append(not torch.equal(head, before[-1]))
            before.append(head.detach().clone())

    config = LCSBConfig("exact", layers_per_step=1, outer=outer)
    lcsb_trainer(model, tmp_path, config, callbacks=[Watch()]).train()
    assert moved == [outer == "train"] * 5
    assert head.requires_grad


def test_not_wrapped_for_distributed_training(tmp_path):
    model = tiny.with_lora(tiny.llama())
    seen = []

    class Watch(LCSBTrainer):
        def training_step(self, model, *args, **kwargs):
            seen.append(model)
            return super().training_step(model, *args, **kwargs)

    trainer = lcsb_trainer(model, tmp_path, LCSBConfig(), trainer_class=Watch)
    asked = []
    prepare = trainer.accelerator.prepare_model
    trainer.accelerator.prepare_model = lambda *a, **k: (
        asked.append(k.get("evaluation_mode")) or prepare(*a, **k)
    )
    trainer.train()
    assert seen and all(m is model for m in seen)
    assert asked == [True]
