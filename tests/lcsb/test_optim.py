"""Idle policies around torch's own AdamW, against the golden trajectories, and the refusal of wrong optimisers."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from pathlib import Path

import idle
import numpy as np
import pytest
import tiny
import torch

from bcd_theory.momentum import idle_step
from lcsb.config import LCSBConfig
from lcsb.optim import OPTIMIZERS, check_optimizer, idle_meaning, optimizer_table, set_idle_gradients
from lcsb.selective import selective_backward

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
    with pytest.raises(
        TypeError, match=r"found torch\.optim\.rprop\.Rprop, .*nearest .*: torch\.\w+ \(torch: SGD, Adam,"
    ):
        check_optimizer(torch.optim.Rprop(group.values()), group, "frozen")

    class Mine(torch.optim.AdamW):
        """A subclass may step otherwise."""

    with pytest.raises(TypeError, match=r"Mine, whose idle steps are not known"):
        check_optimizer(Mine(group.values()), group, "momentum")


# -- what zero and absent gradients do, optimiser by optimiser --------------------------------------------------------

RATE, STEPS, IDLE = 1e-2, 6, 3
SETTINGS = {
    "torch.SGD": {"momentum": 0.9},
    "transformers.Adafactor": {"relative_step": False, "scale_parameter": False},
}
SETTINGS |= {f"bitsandbytes.SGD{bits}": {"momentum": 0.9} for bits in ("", "8bit", "32bit")}
FOLLOW_ADAM = [name for name in OPTIMIZERS if name.split(".")[1].startswith("Adam") and "Adamax" not in name]
STAY = [name for name in OPTIMIZERS if name.split(".")[1].startswith(("Adagrad", "RMSprop", "Adafactor"))]
REFUSED = [name for name, meaning in OPTIMIZERS.items() if meaning.refused]


def class_of(name):
    library, kind = name.split(".")
    module = {
        "torch": "torch.optim",
        "bitsandbytes": "bitsandbytes.optim",
        "transformers": "transformers.optimization",
    }
    return getattr(importlib.import_module(module[library]), kind)


def build(name, params, **settings):
    return class_of(name)(params, **{"lr": RATE, "weight_decay": 0.0, **SETTINGS.get(name, {}), **settings})


class Trained:
    """An optimiser with a parameter selected in the first STEPS steps and one never selected, 4096 numbers or more."""

    def __init__(self, name, dtype=torch.float32, **settings):
        generator = torch.Generator().manual_seed(0)
        self.x, self.never = (
            torch.nn.Parameter(0.1 * torch.randn(96, 64, generator=generator).to(dtype)) for _ in range(2)
        )
        self.start = self.never.detach().clone()
        self.optimizer = build(name, [self.x, self.never], **settings)
        scale = torch.exp(torch.randn(96, 64, generator=generator))
        self.lengths = []
        for _ in range(STEPS):
            gradient = 1e-2 * scale * (1 + torch.randn(96, 64, generator=generator))
            self.lengths.append(self.step(gradient.to(dtype)))

    def step(self, gradient=None, policy="momentum"):
        """One step; returns the length of x's move. Without a gradient x is idle."""
        before = self.x.detach().clone()
        idle_now = [self.never] if gradient is not None else [self.x, self.never]
        self.x.grad = gradient
        set_idle_gradients(idle_now, policy)
        self.optimizer.step()
        return float((self.x.detach().double() - before.double()).norm())

    def content(self):
        tensors = {"x": self.x.detach(), "never": self.never.detach()}
        for name, parameter in (("x", self.x), ("never", self.never)):
            for key, value in self.optimizer.state[parameter].items():
                if value is not None and not isinstance(value, str):
                    tensors[f"{name}/{key}"] = torch.as_tensor(value)
        return {key: value.clone() for key, value in tensors.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_changes_nothing(name):
    """U01: parameter, moments and step count stay bit for bit; so does a parameter never selected."""
    trained = Trained(name)
    assert idle_meaning(trained.optimizer) is OPTIMIZERS[name]
    check_optimizer(trained.optimizer, {"x": trained.x, "never": trained.never}, "frozen")
    before = trained.content()
    for _ in range(IDLE):
        trained.step(policy="frozen")
    after = trained.content()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in REFUSED])
def test_momentum_leaves_a_parameter_that_was_never_selected(name):
    """U01: its moments are zero, so it does not move at all, and nothing becomes 0/0."""
    trained = Trained(name)
    check_optimizer(trained.optimizer, {"x": trained.x, "never": trained.never}, "momentum")
    for _ in range(IDLE):
        trained.step()
    assert torch.equal(trained.never.detach(), trained.start)
    assert all(value.isfinite().all() for value in trained.content().values() if value.is_floating_point())


@pytest.mark.parametrize("name", FOLLOW_ADAM)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_momentum_under_adam_follows_the_law(name, decay):
    """T6 after a block was selected, p = 4: to rounding; 1 % norm-wise with moments of 8 bits (measured: 0.5 %)."""
    if (decay and OPTIMIZERS[name].coupled_decay) or OPTIMIZERS[name].refused:
        return
    trained = Trained(name, weight_decay=decay)
    start = trained.x.detach().double().numpy().copy()
    (m, v), displacement = idle.moments(trained.optimizer.state[trained.x]), 0.0
    for k in range(1, IDLE + 1):
        trained.step()
        displacement = displacement + idle_step(
            "adamw", k=k, first_moment=m, second_moment=v, step_count=STEPS, parameter=start + displacement,
            learning_rate=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay,
        )  # fmt: skip
        error = np.linalg.norm(trained.x.detach().double().numpy() - start - displacement)
        assert error <= (1e-2 if "8bit" in name else 2e-4 if decay else 2e-5) * np.linalg.norm(displacement)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if ".SGD" in name])
def test_momentum_under_sgd_follows_the_law(name):
    trained = Trained(name)
    lengths = [trained.step() for _ in range(IDLE)]
    state = trained.optimizer.state[trained.x]
    if "momentum_buffer" in state:
        lengths.insert(0, RATE * float(state["momentum_buffer"].norm()) / 0.9**IDLE)
    for before, after in itertools.pairwise(lengths):
        assert after == pytest.approx(0.9 * before, rel=1e-2 if "8bit" in name else 1e-5)
    assert lengths[0] > 0


@pytest.mark.parametrize("name", STAY)
def test_momentum_without_a_first_moment_stays(name):
    trained = Trained(name)
    assert [trained.step() for _ in range(IDLE)] == [0.0] * IDLE
    assert trained.lengths[-1] > 0


def test_nadam_radam_and_adamax_against_their_equations():
    """The idle steps by the papers' recurrences in float64, from the optimiser's own moments."""
    b1, b2 = 0.9, 0.999
    for name in ("NAdam", "RAdam", "Adamax"):
        trained = Trained(f"torch.{name}", dtype=torch.float64)
        state = {key: value.clone() for key, value in trained.optimizer.state[trained.x].items()}
        m, x = state["exp_avg"], trained.x.detach().clone()
        v, product = state.get("exp_avg_sq", state.get("exp_inf")), state.get("mu_product")
        for t in range(STEPS + 1, STEPS + IDLE + 1):
            trained.step()
            m = b1 * m
            v = torch.maximum(b2 * v, torch.full_like(v, 1e-8)) if name == "Adamax" else b2 * v
            if name == "Adamax":
                x = x - RATE / (1 - b1**t) * m / v
            elif name == "NAdam":
                now, following = (b1 * (1 - 0.5 * 0.96 ** (0.004 * s)) for s in (t, t + 1))
                product = product * now
                x = x - RATE * following / (1 - product * following) * m / ((v / (1 - b2**t)).sqrt() + 1e-8)
            else:
                limit = 2 / (1 - b2) - 1
                rho = limit - 2 * t * b2**t / (1 - b2**t)
                assert rho > 5
                root = ((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)) ** 0.5
                x = x - RATE * root * (m / (1 - b1**t)) * (1 - b2**t) ** 0.5 / (v.sqrt() + 1e-8)
            # torch keeps NAdam's product in float32
            assert torch.allclose(
                trained.x.detach(), x, rtol=1e-11, atol=1e-7 * RATE if name == "NAdam" else 0.0
            ), name


@pytest.mark.parametrize("name", REFUSED)
def test_why_momentum_is_refused(name):
    """Lion and Muon: an idle step is as long as a selected one. AdEMAMix: its slow average has not faded at all."""
    trained = Trained(name)
    with pytest.raises(
        ValueError, match=rf"{type(trained.optimizer).__name__} with idle='momentum': .* use idle='frozen'"
    ):
        check_optimizer(trained.optimizer, {"x": trained.x, "never": trained.never}, "momentum")
    lengths = [trained.step() for _ in range(60)]
    if "AdEMAMix" in name:
        assert lengths[-1] > 3 * lengths[0] * 0.9**59 / 0.999**29.5  # what T6 leaves of the first idle step
    else:
        assert lengths[5] == pytest.approx(trained.lengths[-1], rel=0.05)


@pytest.mark.parametrize("name", [name for name, meaning in OPTIMIZERS.items() if meaning.coupled_decay])
def test_weight_decay_that_would_be_normalised_is_refused(name):
    """U01: a layer that was never selected would otherwise walk towards zero as fast as a selected one walks."""
    trained = Trained(name, weight_decay=1e-2)
    pair = {"x": trained.x, "never": trained.never}
    check_optimizer(trained.optimizer, pair, "frozen")
    with pytest.raises(
        ValueError, match=r"weight_decay 0\.01 and idle='momentum': the decay enters the gradient"
    ):
        check_optimizer(trained.optimizer, pair, "momentum")
    for _ in range(IDLE):
        trained.step()
    walked = (trained.start - trained.never.detach()).abs().median()
    decoupled = 1e-2 * RATE * (STEPS + IDLE) * trained.start.abs().median()
    assert walked > 3 * decoupled


@pytest.mark.parametrize("name", ["PagedAdamW", "PagedAdamW8bit", "PagedLion8bit"])
def test_paged_optimizers_are_refused_on_the_cpu(name):
    bnb = pytest.importorskip("bitsandbytes")
    group = {"x": torch.nn.Parameter(torch.zeros(2))}
    optimizer = getattr(bnb.optim, name)(group.values())
    with pytest.raises(ValueError, match=f"{name} is paged, which needs a GPU .*; use {name[5:]}"):
        check_optimizer(optimizer, group, "frozen")


def test_in_bfloat16_the_law_holds_to_the_rounding_of_that_type():
    """TRL's adapters on a 4-bit base: float32's tolerance fails by far, the roundings of x, m and v explain it."""
    trained = Trained("torch.AdamW", dtype=torch.bfloat16)
    start = trained.x.detach().double().numpy().copy()
    (m, v), displacement = idle.moments(trained.optimizer.state[trained.x]), 0.0
    half_ulp = 2.0**-8
    for k in range(1, IDLE + 1):
        trained.step()
        displacement = displacement + idle_step(
            "adamw", k=k, first_moment=m, second_moment=v, step_count=STEPS,
            learning_rate=RATE, betas=(0.9, 0.999), eps=1e-8,
        )  # fmt: skip
        error = np.linalg.norm(trained.x.detach().double().numpy() - start - displacement)
        limit = half_ulp * k * (np.linalg.norm(start) + np.linalg.norm(displacement))
        assert 1e-3 * np.linalg.norm(displacement) < error < limit


def test_the_table_names_every_optimizer():
    rows = optimizer_table().splitlines()
    assert len(rows) == len(OPTIMIZERS) + 2
    assert all(name in row for name, row in zip(OPTIMIZERS, rows[2:], strict=True))
    assert sum("| refused:" in row for row in rows) == len(REFUSED)


@pytest.mark.parametrize("idle_policy", ["momentum", "frozen"])
def test_bytes_of_optimizer_state(idle_policy):
    """U04: under momentum all layers have moments from the first step; under frozen from their selection on."""
    model = tiny.with_lora(tiny.llama())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    held = []
    with selective_backward(model, LCSBConfig("exact", idle_policy, layers_per_step=1)) as lcsb:
        layer = sum(p.nbytes for p in lcsb.adapters[0].values())
        assert all(sum(p.nbytes for p in group.values()) == layer for group in lcsb.adapters)
        for _ in range(8):
            lcsb.begin()
            model(**tiny.batch(model)).loss.backward()
            lcsb.step(optimizer)
            tensors = [v for entry in optimizer.state.values() for k, v in entry.items() if k != "step"]
            held.append(sum(tensor.nbytes for tensor in tensors) / (2 * layer))
    assert held == ([4.0] * 8 if idle_policy == "momentum" else [1.0, 2.0, 3.0, 4.0] + [4.0] * 4)
