"""The idle layers' law (T6) in the trainer's real parameters, by optimiser and type of the adapters."""

from __future__ import annotations

import idle
import pytest
import tiny
import torch
from trainers import arguments, lcsb_trainer, rows

from lcsb.callback import LCSBCallback
from lcsb.config import LCSBConfig

pytestmark = pytest.mark.usefixtures("one_thread")


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
