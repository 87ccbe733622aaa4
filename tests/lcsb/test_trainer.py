"""LCSBCallback inside Trainer and SFTTrainer, and selective_backward after the k-bit helper.

Each of them switches the input-gradient hook on; the selection alone must decide the backward work all the same.
"""

from __future__ import annotations

import contextlib
import copy
import math

import idle
import pytest
import tiny
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler

from lcsb.callback import LCSBCallback, NothingTrainedError
from lcsb.config import LCSBConfig
from lcsb.layers import named_decoder_layers
from lcsb.models import load_quantized
from lcsb.selective import NonFiniteError, selective_backward
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


def arguments(folder, **changes):
    return {
        "output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": 2, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "gradient_checkpointing": True, **changes,
    }  # fmt: skip


def rows(model, n=20):
    return [{k: v[0] for k, v in tiny.batch(model, rows=1, seed=s).items()} for s in range(n)]


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


@pytest.fixture(scope="module")
def nf4(tmp_path_factory, model_cache):
    """A function that loads TINY-L with an NF4 base."""
    folder = tmp_path_factory.mktemp("nf4")
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return lambda: load_quantized(str(folder), quantization="nf4")[0]


# -- LCSBTrainer -----------------------------------------------------------------------------------------------------


def lcsb_trainer(model, folder, config, data=None, *, callbacks=None, trainer_class=LCSBTrainer, **changes):
    changes = {"gradient_checkpointing": False, "train_sampling_strategy": "sequential", **changes}
    return trainer_class(
        model=model,
        args=TrainingArguments(**arguments(folder, **changes)),
        train_dataset=data if data is not None else rows(model),
        callbacks=callbacks,
        **({} if config is None else {"lcsb": config}),
    )


def adapters_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    unequal = [name for name in first if not torch.equal(first[name], second[name])]
    assert not unequal, unequal[0]


def assert_clean(model):
    assert not any(hasattr(module.__dict__.get("forward"), "_lcsb") for module in model.modules())
    assert not model._forward_pre_hooks
    assert all(p.grad is None for p in model.parameters())
    ids = tiny.batch(model, rows=1)["input_ids"]
    generated = model.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert generated.shape[1] == ids.shape[1] + 3
    twin = copy.deepcopy(model)
    assert torch.equal(twin(input_ids=ids).logits, model(input_ids=ids).logits)
    model.train()(
        **tiny.batch(model)
    ).loss.backward()  # an ordinary backward pass reaches every adapter again
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.zero_grad()


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


# -- bad batches -----------------------------------------------------------------------------------------------------


def masked(row):
    return {**row, "labels": torch.full_like(row["labels"], -100)}


@pytest.mark.parametrize("make", ["trainer", "callback"])
def test_batches_without_labels_change_nothing(tmp_path, make):
    """U30: all-masked windows 0, 2 and 5 are counted; moments, schedules and weights as without them."""
    config = LCSBConfig("exact", layers_per_step=1)
    options = {"per_device_train_batch_size": 1, "lr_scheduler_type": "linear", "logging_strategy": "steps",
               "logging_steps": 1}  # fmt: skip
    results = []
    for without in (False, True):
        model = tiny.with_lora(tiny.llama())
        good = rows(model, 5)
        data = (
            good
            if without
            else [masked(good[0]), good[0], masked(good[1]), good[1], good[2], masked(good[0]), *good[3:]]
        )
        own = {"callbacks": [LCSBCallback(config)], "trainer_class": Trainer} if make == "callback" else {}
        trainer = lcsb_trainer(
            model, tmp_path, None if make == "callback" else config, data, **own, max_steps=len(data), **options,
            # the same learning rates with and without: the schedule does not advance either
            lr_scheduler_kwargs={}, warmup_steps=0,
        )  # fmt: skip
        trainer.create_optimizer()
        trainer.lr_scheduler = get_scheduler(
            "linear", trainer.optimizer, num_warmup_steps=0, num_training_steps=5
        )
        with (
            contextlib.nullcontext()
            if without
            else pytest.warns(UserWarning, match="3 steps were not taken: 3 without")
        ):
            trainer.train()
        state = trainer.optimizer.state_dict()["state"]
        results.append((adapters_of(model), state, [r for r in trainer.state.log_history if "loss" in r]))
    assert_equal(results[0][0], results[1][0])
    for index, entry in results[1][1].items():
        assert_equal(entry, results[0][1][index])
    assert [row["lcsb/skipped"] for row in results[0][2]] == [1, 1, 2, 2, 2, 3, 3, 3]
    assert [row["lcsb/selected"] for row in results[0][2]] == ["0", "0", "1", "1", "2", "3", "3", "0"]


def test_one_masked_row_among_the_accumulated_is_left_out(tmp_path):
    """U30: alone in its micro-batch; a model that takes the mean of each micro-batch would give NaN there."""
    weights = []
    for with_masked in (True, False):
        model = tiny.with_lora(tiny.llama())
        good = rows(model, 4)
        data = [good[0], masked(good[1]), good[2], masked(good[3])] if with_masked else [good[0], good[2]]
        trainer = lcsb_trainer(
            model, tmp_path, LCSBConfig("exact", layers_per_step=1), data, per_device_train_batch_size=1,
            gradient_accumulation_steps=2 if with_masked else 1, max_steps=2,
        )  # fmt: skip
        trainer.train()
        weights.append(adapters_of(model))
        assert trainer.lcsb.skipped == {"empty": 0, "nonfinite": 0}
    assert_equal(*weights)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nothing_but_masked_batches_is_an_error(tmp_path, smoothing):
    """U30: also under label smoothing, where the model is called without labels."""
    model = tiny.with_lora(tiny.llama())
    before = adapters_of(model)
    data = [masked(row) for row in rows(model)]
    trainer = lcsb_trainer(model, tmp_path, LCSBConfig(), data, label_smoothing_factor=smoothing)
    with pytest.raises(
        NothingTrainedError, match="all 5 steps were skipped: every label of every batch is masked"
    ):
        trainer.train()
    assert_equal(before, adapters_of(model))
    assert_clean(model)
    callback = lcsb_trainer(
        model, tmp_path, None, data, trainer_class=Trainer, callbacks=[LCSBCallback(LCSBConfig())]
    )
    with pytest.raises(NothingTrainedError):
        callback.train()
    assert_clean(model)


def test_empty_and_one_token_rows(tmp_path):
    """U32: rows with no token to predict (0 or 1 tokens) are left out, not run."""
    model = tiny.with_lora(tiny.llama())
    short = [{k: v[:n] for k, v in row.items()} for row, n in zip(rows(model, 3), (1, 0, 12), strict=True)]
    trainer = lcsb_trainer(
        model, tmp_path, LCSBConfig(layers_per_step=1), short, per_device_train_batch_size=1, max_steps=3
    )
    with pytest.warns(UserWarning, match="2 steps were not taken"):
        trainer.train()
    assert trainer.lcsb.skipped == {"empty": 2, "nonfinite": 0}


class Overflow:
    """A trainer mixin whose third step's loss overflows float32."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * 1e38 * 1e38 if self.state.global_step == 2 else loss


@pytest.mark.parametrize("make, clip", [(LCSBTrainer, 1.0), (LCSBTrainer, 0.0), (Trainer, 1.0)],
                         ids=["trainer", "unclipped", "callback"])  # fmt: skip
def test_a_step_that_is_not_finite(tmp_path, make, clip):
    """U09: the step is skipped or stops the run, and poisons no moment."""
    trainer_class = type("Overflowing", (Overflow, make), {})
    for on_nonfinite in ("skip", "stop"):
        model = tiny.with_lora(tiny.llama())
        config = LCSBConfig("exact", layers_per_step=1, on_nonfinite=on_nonfinite)
        own = {"callbacks": [LCSBCallback(config)]} if make is Trainer else {}
        trainer = lcsb_trainer(
            model, tmp_path, None if make is Trainer else config, trainer_class=trainer_class, max_grad_norm=clip,
            logging_strategy="steps", logging_steps=1, **own,
        )  # fmt: skip
        if on_nonfinite == "skip":
            with pytest.warns(UserWarning, match="1 steps were not taken: 0 without .*, 1 with a gradient"):
                trainer.train()
            history = [row for row in trainer.state.log_history if "loss" in row]
            assert [row["lcsb/selected"] for row in history] == ["0", "1", "2", "2", "3"]
            assert all(math.isfinite(row["loss"]) for row in history)
        else:
            with pytest.raises(
                NonFiniteError, match=r"step 2, batch of global step 2: .* first in .*layers\.2\."
            ):
                trainer.train()
            for callback in own.get("callbacks", []):
                callback.close()
        assert all(p.isfinite().all() for p in model.parameters())
        for entry in trainer.optimizer.state_dict()["state"].values():
            assert all(torch.as_tensor(value).isfinite().all() for value in entry.values())
        assert_clean(model)


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


# -- the idle layers' law in the trainer's real parameters -----------------------------------------------------------


def train_under_the_law(model, folder, **changes):
    """Two cycles and a half of k = 1 of 4 layers: (error, predicted, start) norms of each step's idle layers."""
    law = idle.Law(lambda: trainer.lcsb.lcsb)
    trainer = lcsb_trainer(
        model, folder, LCSBConfig("exact", layers_per_step=1), callbacks=[law], max_steps=10,
        lr_scheduler_type="cosine", warmup_steps=2, **changes,
    )  # fmt: skip
    trainer.train()
    assert len(law.found) == 9
    return law


def test_the_law_to_rounding(tmp_path):
    """T6 with a learning-rate schedule, weight decay, accumulation and clipping."""
    law = train_under_the_law(
        tiny.with_lora(tiny.llama()),
        tmp_path,
        weight_decay=0.1,
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
    )
    assert law.types == {torch.float32}
    for error, predicted, start in law.found:
        assert error <= 1e-5 * predicted + 2 * 2.0**-24 * start
        assert predicted > 1e-3 * start


def test_the_law_under_8_bit_adamw(tmp_path):
    """T6 to 1 % norm-wise under bitsandbytes' 8-bit AdamW, p = 4 (the smallest tensors keep 32 bits)."""
    law = train_under_the_law(tiny.with_lora(tiny.llama(), r=64), tmp_path, optim="adamw_bnb_8bit")
    assert law.types == {torch.uint8, torch.float32}
    assert max(error / predicted for error, predicted, _ in law.found) <= 1e-2


def test_sft_trainer_on_a_4_bit_base_says_that_the_adapters_are_bf16(nf4, tmp_path):
    """T6 to the rounding of bfloat16; float32's tolerance would not hold, so the callback says so."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model = tiny.with_lora(nf4())
    ids = [row["input_ids"].tolist() for row in rows(model)]
    callback = LCSBCallback(LCSBConfig("exact", layers_per_step=1))
    law = idle.Law(lambda: callback.lcsb)
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments(tmp_path, max_steps=8), max_length=32),
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}),
        processing_class=tiny.tokenizer(),
        callbacks=[callback, law],
    )
    with pytest.warns(
        UserWarning, match="the adapters are bfloat16 .* holds to the rounding of that type only"
    ):
        trainer.train()
    assert law.types == {torch.bfloat16}
    for k, (error, predicted, start) in enumerate(law.found, 1):
        assert 1e-4 * predicted < error <= 2.0**-8 * (start + min(k, 3) * predicted)


@pytest.mark.parametrize("base", ["nf4", "float32"])
def test_every_adapter_learns_within_a_cycle(nf4, tmp_path, base):
    """U11: from PEFT's zero start, with recompute and one layer a step, no lora_B is zero after one cycle."""
    model = tiny.with_lora(nf4() if base == "nf4" else tiny.llama(), random_b=False)
    seconds = {n: p for n, p in model.named_parameters() if "lora_B" in n}
    assert seconds and not any(p.any() for p in seconds.values())
    config = LCSBConfig("exact", "frozen", layers_per_step=1)
    lcsb_trainer(
        model, tmp_path, config, max_steps=4, activation_checkpointing=True, gradient_checkpointing=None
    ).train()
    assert [name for name, p in seconds.items() if not p.any()] == []


def test_the_seed_decides_data_and_layer_order(tmp_path):
    """U43: the same seed gives the same run; another one other batches and other layers."""
    runs = []
    for seed in (1, 1, 2):
        model = tiny.with_lora(tiny.llama())
        trainer = lcsb_trainer(
            model, tmp_path, LCSBConfig("identity", schedule="random", layers_per_step=1), seed=seed, max_steps=6,
            train_sampling_strategy="random", logging_strategy="steps", logging_steps=1,
        )  # fmt: skip
        trainer.train()
        history = [row for row in trainer.state.log_history if "loss" in row]
        runs.append([[row[key] for row in history] for key in ("loss", "lcsb/selected", "grad_norm")])
    assert runs[0] == runs[1]
    assert all(first != other for first, other in zip(runs[0], runs[2], strict=True))
    assert runs[0][0][0] != runs[2][0][0]  # the first batch already


def test_fp16_on_the_cpu_is_refused(tmp_path):
    """U29: Trainer itself would quietly compute in float32."""
    with pytest.raises(ValueError, match="fp16 on the CPU"):
        lcsb_trainer(tiny.with_lora(tiny.llama()), tmp_path, LCSBConfig(), fp16=True)
