"""IdleLaw passes on torch's real AdamW and catches an optimiser that does something else."""

from __future__ import annotations

import pytest
import tiny
import torch

from lcsb.config import LCSBConfig
from lcsb.idle_law import IdleLaw
from lcsb.selective import selective_backward


def law_rows(
    dtype=torch.float64, idle="momentum", steps=11, weight_decay=0.1, spoil=lambda optimizer, t: None
):
    model = tiny.with_lora(tiny.llama(dtype=dtype))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=weight_decay
    )
    rows = []
    with selective_backward(model, LCSBConfig("exact", idle, layers_per_step=1)) as lcsb:
        law = IdleLaw(lcsb.adapters, optimizer, idle)
        for t in range(steps):
            selected = lcsb.begin()
            model(**tiny.batch(model, seed=t)).loss.backward()
            law.before_step(selected)
            spoil(optimizer, t)
            lcsb.step(optimizer)
            rows.append(law.after_step(t))
    return rows


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_real_optimizer_obeys(dtype, tolerance, weight_decay):
    rows = law_rows(dtype, weight_decay=weight_decay)
    assert all(row["checked"] == 3 * 14 and row["violations"] == 0 for row in rows)
    assert all(row["worst"] < tolerance for row in rows)
    assert all(row["within_rounding"] == 0 for row in rows[4:])  # every block has been selected
    if dtype == torch.float32 and weight_decay:
        # decay alone moves a block by so little that the roundings of its own multiplication show
        assert rows[0]["within_rounding"] > 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda optimizer, t: [s["exp_avg"].mul_(1.01) for s in optimizer.state.values()],
        lambda optimizer, t: [s["exp_avg_sq"].mul_(1.01) for s in optimizer.state.values()],
        lambda optimizer, t: [s["step"].add_(1) for s in optimizer.state.values()],
    ],
    ids=["first moment", "second moment", "step count"],
)
def test_an_optimizer_of_other_state_is_caught(spoil):
    rows = law_rows(spoil=lambda optimizer, t: spoil(optimizer, t) if t == 6 else None)
    assert sum(row["violations"] for row in rows[:6]) == 0
    assert rows[6]["violations"] > 0


def test_missing_decay_is_caught(monkeypatch):
    import lcsb.idle_law

    real = lcsb.idle_law.idle_step
    monkeypatch.setattr(lcsb.idle_law, "idle_step", lambda *a, **k: real(*a, **{**k, "weight_decay": 0.0}))
    assert law_rows()[-1]["violations"] > 0


def test_frozen_layers_do_not_move_and_a_move_is_counted():
    assert all(row["moved"] == 0 and row["checked"] == 42 for row in law_rows(idle="frozen"))

    def nudge(optimizer, t):
        if t == 6:  # layer 2 is selected; move one tensor of layer 0
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1e-12)

    rows = law_rows(idle="frozen", spoil=nudge)
    assert [row["moved"] for row in rows[5:8]] == [0, 1, 1]


def test_no_idle_layer_no_row():
    model = tiny.with_lora(tiny.llama())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with selective_backward(model, LCSBConfig("full")) as lcsb:
        law = IdleLaw(lcsb.adapters, optimizer, "momentum")
        law.before_step(lcsb.begin())
        assert law.after_step(0) is None
