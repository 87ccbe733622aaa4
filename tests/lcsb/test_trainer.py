"""LCSBCallback inside Trainer and SFTTrainer, and selective_backward after the k-bit helper.

Each of them switches the input-gradient hook on; the selection alone must decide the backward work all the same.
"""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from lcsb.config import LCSBConfig
from lcsb.layers import named_decoder_layers
from lcsb.selective import selective_backward
from lcsb.trainer import LCSBCallback


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


def test_trainer_equals_the_hand_written_loop(tmp_path):
    first = tiny.with_lora(tiny.llama())
    second = copy.deepcopy(first)
    config = LCSBConfig("exact", layers_per_step=2)
    data = rows(first)
    args = arguments(tmp_path, max_grad_norm=0.0, per_device_train_batch_size=1, gradient_checkpointing=False)
    trainer = Trainer(
        model=first,
        args=TrainingArguments(**args, train_sampling_strategy="sequential", weight_decay=0.0),
        train_dataset=data,
        callbacks=[LCSBCallback(config)],
    )
    trainer.train()
    optimizer = torch.optim.AdamW(
        [p for p in second.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    with selective_backward(second, config) as lcsb:
        for row in data[:5]:
            lcsb.begin()
            second(**{k: v[None] for k, v in row.items()}).loss.backward()
            lcsb.step(optimizer)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=5e-6)  # Trainer uses the fused AdamW; a step moves 1e-2


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
