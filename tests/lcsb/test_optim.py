"""Idle policies around torch's own AdamW, against the golden trajectories, and the refusal of wrong optimisers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from lcsb.optim import check_optimizer, set_idle_gradients

CASES = json.loads((Path(__file__).parents[1] / "golden" / "adamw_idle.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=[f"{c['idle']}-{i}" for i, c in enumerate(CASES)])
def test_golden_trajectory(case):
    offset = int(re.fullmatch(r"t % \d+ == (\d+) \(t from 0\)", case["selected_when"])[1])
    x = torch.nn.Parameter(torch.tensor([case["start"]], dtype=torch.float64))
    optimizer = torch.optim.AdamW(
        [x],
        lr=case["learning_rate"],
        betas=tuple(case["betas"]),
        eps=case["eps"],
        weight_decay=case["weight_decay"],
    )
    found = []
    for t, gradient in enumerate(case["gradients"]):
        if t % case["period"] == offset:
            x.grad = torch.tensor([gradient], dtype=torch.float64)
        else:
            x.grad = torch.full_like(x, 7.0)  # stale: the policy must overwrite it
            set_idle_gradients([x], case["idle"])
        optimizer.step()
        found.append(float(x.detach()))
    assert found == pytest.approx(case["trajectory"], rel=1e-12, abs=0)


def parameters():
    return {name: torch.nn.Parameter(torch.zeros(2)) for name in ("first", "second")}


def test_a_good_optimizer_passes():
    group = parameters()
    check_optimizer(torch.optim.AdamW(group.values()), group, "momentum")


def test_a_parameter_outside_the_optimizer_is_named():
    group = parameters()
    with pytest.raises(ValueError, match=r"1 of 2 .*'second' \(0 times\)"):
        check_optimizer(torch.optim.AdamW([group["first"]]), group, "momentum")


def test_eps_zero_is_refused_for_idle_momentum_only():
    group = parameters()
    optimizer = torch.optim.AdamW(group.values(), eps=0.0)
    check_optimizer(optimizer, group, "frozen")
    with pytest.raises(ValueError, match="eps is 0"):
        check_optimizer(optimizer, group, "momentum")


def test_other_optimizers_are_refused_by_name():
    group = parameters()
    with pytest.raises(TypeError, match=r"found Adagrad, expected one of torch\.optim\.AdamW"):
        check_optimizer(torch.optim.Adagrad(group.values()), group, "momentum")
