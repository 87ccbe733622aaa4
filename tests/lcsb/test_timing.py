"""Seconds by part: consistent with each other, and read off the right steps."""

from __future__ import annotations

import tiny
import torch

from bcd_theory.cost import step_seconds
from lcsb.config import LCSBConfig
from lcsb.measure import timing
from lcsb.selective import selective_backward


def setup(recompute):
    model = tiny.with_lora(tiny.llama())
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    return model, tiny.batch(model), optimizer


class Ticks:
    """A clock that counts the layers' forward runs and backward visits instead of time: one tick each."""

    def __init__(self, model):
        self.now = 0.0
        for name, module in model.named_modules():
            if name.endswith(
                "self_attn.o_proj"
            ):  # recompute stops once it has what backward needs: late in the MLP
                module.register_forward_hook(self._tick)

    def _tick(self, module, args, output):
        self.now += 1.0
        if output.requires_grad:
            output.register_hook(self._back)

    def _back(self, gradient):
        self.now += 100.0

    def __call__(self):
        return self.now


def test_parts_of_a_step(monkeypatch):
    model, batch, optimizer = setup(recompute=True)
    monkeypatch.setattr(timing, "clock", Ticks(model))
    with selective_backward(model, LCSBConfig("exact", layers_per_step=1), t=2) as lcsb:
        found = timing.time_step(lcsb, model, batch, optimizer)
    # forward: 4 layers; backward: layers 2 and 3 recomputed (1 each) and differentiated (100 each)
    assert (found.forward, found.backward) == (4.0, 202.0)
    assert found.head == found.optimizer == 0.0


def test_costs_are_consistent():
    for recompute in (False, True):
        model, batch, optimizer = setup(recompute)
        costs, spread = timing.measure_costs(model, batch, optimizer, recompute, repeats=1)
        assert costs.layers == 4 and spread >= 0
        assert (costs.total("recompute") > 0) == recompute
        assert costs.total("attention_recompute") <= costs.total("recompute")
        assert costs.dequantisation == 0.0  # nothing is quantised
        assert step_seconds(costs, "identity", layers_per_step=1) < step_seconds(costs, "full")
        assert all(getattr(m, "gradient_checkpointing", recompute) == recompute for m in model.modules())


def test_speedups():
    model, batch, optimizer = setup(recompute=True)
    rows, backward = timing.measure_speedups(model, batch, optimizer, {1: 4, 2: 2, 4: 1}, repeats=2)
    assert [(row["mode"], row["cycle_length"]) for row in rows] == [("full", 1)] + [
        (mode, p) for mode in ("exact", "identity", "mlp") for p in (1, 2, 4)
    ]
    for row in rows:
        p = row["cycle_length"]
        assert len(row["seconds"]) == p
        if row["mode"] != "full":
            assert len(row["repeats"]) == len(row["speedups"]) == 2
            assert min(row["speedups"]) <= row["speedup"] <= max(row["speedups"])
    assert 0 < backward < rows[0]["mean_seconds"]
