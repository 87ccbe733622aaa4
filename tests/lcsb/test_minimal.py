"""`lcsb/minimal.py` tells what the engine does: the same trajectory, in every mode and under both idle policies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lcsb import LCSBConfig, minimal, selective_backward

STEPS, CYCLE, LEARNING_RATE = 9, 4, 3e-3


def engine_run(mode, idle, cycle):
    """The engine on the page's model and data, with torch's AdamW."""
    model = minimal.Model(seed=0)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=(minimal.BETA1, minimal.BETA2),
        eps=minimal.EPS,
        weight_decay=0,
    )
    config = LCSBConfig(mode, idle, layers_per_step=len(model.layers) // cycle, layers="layers")
    data = torch.Generator().manual_seed(0)
    losses = []
    with selective_backward(model, config) as lcsb:
        for _ in range(STEPS):
            start = torch.randint(32, (4, 1), generator=data)
            lcsb.begin()
            loss = model((start + torch.arange(17) * 3) % 32)
            loss.backward()
            lcsb.step(optimizer)
            losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("idle", ["momentum", "frozen"])
@pytest.mark.parametrize("mode", ["exact", "identity", "mlp"])
def test_the_engine_takes_the_same_path(mode, idle):
    model, losses = engine_run(mode, idle, CYCLE)
    page = minimal.train(mode, idle, CYCLE, STEPS, LEARNING_RATE)
    assert losses == pytest.approx(page["losses"], rel=1e-12)
    for ours, theirs in zip(page["model"].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


def test_one_block_is_full_backpropagation():
    losses = engine_run("full", "momentum", 1)[1]
    page = minimal.train("exact", "momentum", 1, STEPS, LEARNING_RATE)
    assert losses == pytest.approx(page["losses"], rel=1e-12)


def test_modes_and_policies_differ():
    """Without this, the comparison above could be of one algorithm with itself."""
    last = {
        (mode, idle): minimal.train(mode, idle, CYCLE, STEPS, LEARNING_RATE)["losses"][-1]
        for mode in ("exact", "identity", "mlp")
        for idle in ("momentum", "frozen")
    }
    assert len({round(value, 6) for value in last.values()}) == 6


def test_the_law_of_idle_motion_is_watched(monkeypatch):
    """T6 to rounding; and an optimiser that skips idle layers is caught by it."""
    assert minimal.train("exact", "momentum", CYCLE, STEPS)["law error"] < 1e-15
    honest = minimal.AdamW.step

    def skips(self, gradients):
        self.idle, before = "frozen", self.idle
        honest(self, gradients)
        self.idle = before

    monkeypatch.setattr(minimal.AdamW, "step", skips)
    assert minimal.train("exact", "momentum", CYCLE, STEPS)["law error"] > 1e-4


def test_unknown_mode():
    with pytest.raises(ValueError, match="mode is 'exakt', expected exact, identity or mlp"):
        minimal.train("exakt", "momentum", CYCLE, 1)


def test_a_page_of_plain_code(capsys, monkeypatch):
    source = Path(minimal.__file__).read_text()
    assert len(source.splitlines()) < 200
    assert not any(name in source for name in ("import lcsb", "from lcsb", "bcd_theory", "transformers"))
    whole = minimal.train
    monkeypatch.setattr(minimal, "train", lambda *arm, steps: whole(*arm, steps=steps // 20))
    minimal.main()
    assert len(capsys.readouterr().out.splitlines()) == 6
