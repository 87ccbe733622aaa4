from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bcd_theory.momentum import (
    adamw_trajectory,
    block_energy,
    equivalent_learning_rate,
    first_pulse_displacement,
    idle_displacement,
    idle_step,
    shifted_iterate,
    steady_movement,
    uncoupled_limit,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "adamw_idle.json"


def idle_gradients(case):
    period, remainder = map(int, re.match(r"t % (\d+) == (\d+)", case["selected_when"]).groups())
    idle = None if case["idle"] == "frozen" else 0.0
    return [g if t % period == remainder else idle for t, g in enumerate(case["gradients"])]


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()))
def test_golden_adamw_trajectories(case):
    options = {key: case[key] for key in ("learning_rate", "betas", "eps", "weight_decay")}
    found = adamw_trajectory(case["start"], idle_gradients(case), **options)
    assert np.max(np.abs(found - case["trajectory"])) < 1e-12


def simulate_adamw(x, m, v, s, gradients, *, learning_rate, betas, eps, weight_decay):
    """Independent of the module: one element at a time, torch's order of operations."""
    path = []
    for g in gradients:
        s += 1
        x -= learning_rate * weight_decay * x
        m += (1 - betas[0]) * (g - m)
        v = betas[1] * v + (1 - betas[1]) * g * g
        denominator = v**0.5 / (1 - betas[1] ** s) ** 0.5 + eps
        x -= learning_rate / (1 - betas[0] ** s) * m / denominator
        path.append(x)
    return np.array(path)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.99), (0.0, 0.5), (0.95, 0.9)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_adamw_law_against_a_simulation(betas, weight_decay, eps):
    rng = np.random.default_rng(4)
    m, v, x = rng.normal(size=(2, 3)), rng.uniform(0.01, 2, (2, 3)), rng.normal(size=(2, 3))
    options = {"learning_rate": 0.03, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    k = np.arange(0, 13)
    found = idle_displacement(
        "adamw", steps=k, first_moment=m, second_moment=v, parameter=x, step_count=5, **options
    )
    assert found.shape == (13, 2, 3)
    assert np.all(found[0] == 0)
    for i in np.ndindex(2, 3):
        path = simulate_adamw(x[i], m[i], v[i], 5, np.zeros(12), **options)
        assert np.max(np.abs(found[(slice(1, None), *i)] - (path - x[i]))) < 1e-14
    # The one-step form is the difference of two neighbours.
    step = idle_step(k=4, first_moment=m, second_moment=v, parameter=x + found[3], step_count=5, **options)
    assert np.allclose(step, found[4] - found[3], rtol=0, atol=1e-15)


@pytest.mark.parametrize("optimizer", ["sgd-ema", "heavy-ball"])
def test_sgd_laws(optimizer):
    beta, eta, k = 0.9, 0.2, np.arange(1, 30)
    m = np.array([1.0, -2.0])
    options = {"first_moment": m, "learning_rate": eta, "momentum": beta}
    found = idle_displacement(optimizer, steps=k, **options)
    closed = -eta * beta * (1 - beta**k)[:, None] / (1 - beta) * m
    assert np.allclose(found, closed, rtol=1e-14)
    x, moment, path = np.array([3.0, 4.0]), m.copy(), []
    for _ in k:
        moment = beta * moment
        x = (1 - eta * 0.3) * x - eta * moment
        path.append(x)
    found = idle_displacement(optimizer, steps=k, parameter=[3.0, 4.0], weight_decay=0.3, **options)
    assert np.allclose(found, np.array(path) - [3.0, 4.0], rtol=1e-13)


def test_adam_is_adamw_without_decay_and_refuses_decay():
    options = {
        "steps": 3,
        "first_moment": 1.0,
        "second_moment": 0.3,
        "step_count": 2,
        "learning_rate": 0.1,
        "betas": (0.9, 0.99),
    }
    assert idle_displacement("adam", **options) == idle_displacement("adamw", **options)
    with pytest.raises(ValueError, match=r"'adam' with weight_decay 0\.1"):
        idle_displacement("adam", parameter=1.0, weight_decay=0.1, **options)


def test_frozen_is_exactly_zero():
    options = {"first_moment": np.ones(3), "second_moment": np.ones(3), "step_count": 1, "betas": (0.9, 0.99)}
    found = idle_displacement(
        steps=[1, 5], parameter=np.ones(3), weight_decay=0.1, learning_rate=1.0, idle="frozen", **options
    )
    assert found.shape == (2, 3) and np.all(found == 0)
    assert np.all(idle_step(k=2, learning_rate=1.0, idle="frozen", **options) == 0)


def test_figures_of_the_law():
    one = idle_displacement(
        steps=1,
        first_moment=0.1,
        second_moment=1e-3,
        step_count=1,
        learning_rate=1.0,
        betas=(0.9, 0.999),
        eps=0.0,
    )
    assert float(one) == pytest.approx(-0.670, abs=5e-4)
    assert np.round(first_pulse_displacement([1, 2, 4, 8]), 3).tolist() == [1.0, 0.744, 0.581, 0.496]
    for t in (1, 2, 4, 8):
        path = adamw_trajectory(0.0, [0.0] * (t - 1) + [0.7], learning_rate=1.0, eps=1e-300)
        assert -path[-1] == pytest.approx(float(first_pulse_displacement(t)), rel=1e-12)


def test_learning_rate_may_change_by_step():
    rates = np.array([0.1, 0.2, 0.05])
    options = {"first_moment": 1.0, "second_moment": 0.3, "step_count": 2, "betas": (0.9, 0.99)}
    found = idle_displacement(
        steps=[1, 2, 3], learning_rate=rates, parameter=2.0, weight_decay=0.5, **options
    )
    x = 2.0
    for k, rate in enumerate(rates, start=1):
        x += float(idle_step(k=k, learning_rate=float(rate), parameter=x, weight_decay=0.5, **options))
        assert found[k - 1] == pytest.approx(x - 2.0, rel=1e-13)
    with pytest.raises(ValueError, match="expected a number or 3 of them"):
        idle_displacement(steps=3, learning_rate=rates[:2], **options)


def test_one_step_form_uses_few_temporaries():
    n = 200_000
    m, v, out = np.ones(n), np.ones(n), np.empty(n)
    tracemalloc.start()
    idle_step(
        k=500, first_moment=m, second_moment=v, step_count=9, learning_rate=0.1, betas=(0.9, 0.99), out=out
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < m.nbytes / 10


def test_eps_zero_gives_the_optimisers_nan():
    options = {"steps": 1, "step_count": 1, "learning_rate": 1.0, "betas": (0.9, 0.99), "eps": 0.0}
    assert np.isnan(idle_displacement(first_moment=0.0, second_moment=0.0, **options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "adamW"}, "did you mean 'adamw'"),
        ({"steps": -1}, "steps is -1"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"idle": "frosen"}, "idle is 'frosen', expected 'momentum' or 'frozen'"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
        ({"second_moment": None}, "needs second_moment, step_count and betas"),
        ({"weight_decay": 0.1}, "the parameter is needed"),
        ({"optimizer": "sgd-ema"}, "needs momentum"),
        ({"step_count": -1}, "step_count is -1"),
    ],
)
def test_bad_input_is_named(change, message):
    options = {
        "optimizer": "adamw",
        "steps": 1,
        "first_moment": 1.0,
        "second_moment": 1.0,
        "step_count": 1,
        "learning_rate": 1.0,
        "betas": (0.9, 0.999),
    }
    with pytest.raises(ValueError, match=message):
        idle_displacement(**{**options, **change})


def settled_movement(idle, p, betas, eps, cycles):
    gradients = []
    for _ in range(cycles):
        gradients += [1.0, *[{"momentum": 0.0, "frozen": None, "full": 1.0}[idle]] * (p - 1)]
    path = adamw_trajectory(0.0, gradients, learning_rate=1.0, betas=betas, eps=eps)
    return path[-1 - p] - path[-1]


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.8, 0.64), (0.0, 0.9), (0.95, 0.8)])
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_steady_movement_is_the_limit_of_the_optimiser(betas, eps):
    # Exact for every beta2, (1 - beta2) p << 1 or not, and at rho = beta1/sqrt(beta2) = 1 and above it.
    for p in (1, 2, 4, 8):
        for idle in ("full", "momentum", "frozen"):
            found = steady_movement(idle, p, betas, eps)
            assert found == pytest.approx(settled_movement(idle, p, betas, eps, 4000 // p), rel=1e-9)


def test_steady_movement_figures():
    assert [round(steady_movement("momentum", p), 4) for p in (2, 4, 8)] == [1.4142, 1.9999, 2.8277]
    assert steady_movement("momentum", 8, (0.9, 0.95)) == pytest.approx(2.803, abs=5e-4)
    for p in (1, 2, 4, 8):
        b1, b2 = 0.9, 0.999
        rho = b1 / b2**0.5
        closed = (1 - b1) / (1 - b1**p) * ((1 - b2**p) / (1 - b2)) ** 0.5 * (1 - rho**p) / (1 - rho)
        assert steady_movement("momentum", p) == pytest.approx(closed, rel=1e-12)
        assert steady_movement("momentum", p, (0.9, 1 - 1e-9)) == pytest.approx(p**0.5, rel=1e-7)
        # With eps: 1/(1/sqrt(p) + e) in the same limit.
        assert steady_movement("momentum", p, (0.9, 1 - 1e-9), 0.5) == pytest.approx(
            1 / (p**-0.5 + 0.5), rel=1e-7
        )


def test_equivalent_learning_rates():
    for p in (1, 2, 4, 8):
        near = (0.9, 1 - 1e-9)
        expected = {
            ("momentum", "drift"): p**-0.5,
            ("momentum", "diffusion"): 1.0,
            ("frozen", "drift"): 1 / p,
            ("frozen", "diffusion"): p**-0.5,
            ("full", "drift"): 1.0,
            ("full", "diffusion"): 1.0,
        }
        for (idle, kind), value in expected.items():
            assert equivalent_learning_rate(2.0, idle, p, near, kind) == pytest.approx(2 * value, rel=1e-6)
    with pytest.raises(ValueError, match="kind is 'noise'"):
        equivalent_learning_rate(1.0, "frozen", 2, kind="noise")


def test_diffusion_against_a_random_walk():
    # Gradients +-1 keep v deterministic, so x is a random walk of independent pulses of size F.
    rng = np.random.default_rng(0)
    p, cycles, walkers = 4, 300, 1500
    signs = rng.choice([-1.0, 1.0], size=(cycles, walkers))
    for idle, zero in (("momentum", np.zeros(walkers)), ("frozen", None)):
        gradients = [g for sign in signs for g in (sign, *[zero] * (p - 1))]
        path = adamw_trajectory(np.zeros(walkers), gradients, learning_rate=1.0, betas=(0.9, 0.99))
        half = cycles // 2
        found = np.var(path[-1] - path[p * half - 1]) / (cycles - half)
        full = equivalent_learning_rate(1.0, idle, p, (0.9, 0.99), "diffusion") ** 2 * p
        # Standard deviation of a variance over 1500 walkers: sqrt(2/1500) = 3.7 %; memory of m: < 1 %.
        assert found == pytest.approx(full, rel=0.12)


def radius_uncoupled(eta, beta, p, idle, decay=0.0):
    d = 1 - eta * decay
    gradient = np.array([[d - eta * (1 - beta), -eta * beta], [1 - beta, beta]])
    rest = np.array([[d, -eta * beta], [0, beta]])
    cycle = gradient
    for _ in range(p - 1):
        cycle = {"full": gradient, "momentum": rest, "frozen": np.eye(2)}[idle] @ cycle
    return np.max(np.abs(np.linalg.eigvals(cycle)))


@pytest.mark.parametrize("idle", ["full", "momentum", "frozen"])
@pytest.mark.parametrize("decay", [0.0, 0.05, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_uncoupled_limit_is_where_the_radius_reaches_one(idle, decay, beta, p):
    limit = uncoupled_limit(1.0, momentum=beta, cycle_length=p, idle=idle, weight_decay=decay)
    for share in np.linspace(0.02, 0.9999, 40):
        assert radius_uncoupled(share * limit, beta, p, idle, decay) < 1
    assert radius_uncoupled(1.0001 * limit, beta, p, idle, decay) > 1


def test_uncoupled_figures():
    assert [round(uncoupled_limit(1.0, momentum=0.9, cycle_length=p), 3) for p in (1, 2, 4, 8)] == [
        38.0,
        19.053,
        9.631,
        5.023,
    ]
    adamw = [uncoupled_limit(1.0, momentum=0.9, cycle_length=p, units="adamw") for p in (1, 2, 4, 8)]
    assert np.round(adamw, 3).tolist() == [38.0, 13.472, 4.816, 1.776]
    assert uncoupled_limit(1.0, momentum=0.9, cycle_length=8, idle="frozen", units="adamw") == pytest.approx(
        38
    )
    assert uncoupled_limit(1.0, momentum=0.9, units="heavy-ball") == pytest.approx(2 * 1.9)
    assert uncoupled_limit(4.0, momentum=0.0, cycle_length=3) == pytest.approx(0.5)


def test_change_of_variable_and_energy_along_a_run():
    rng = np.random.default_rng(1)
    root = rng.normal(size=(6, 6))
    a = root @ root.T / 6
    blocks = [[0, 1], [2, 3], [4, 5]]
    largest = max(np.linalg.eigvalsh(a[np.ix_(b, b)])[-1] for b in blocks)
    beta, eta = 0.9, 1.99 / largest
    x, m = rng.normal(size=6), np.zeros(6)
    energy = block_energy(0.5 * x @ a @ x, [m], eta, beta)
    for t in range(200):
        block = blocks[t % 3]
        g = np.zeros(6)
        g[block] = (a @ x)[block]
        z = shifted_iterate(x, m, eta, beta)
        new = m.copy()
        new[block] = beta * m[block] + (1 - beta) * g[block]
        step = np.zeros(6)
        step[block] = new[block]
        x, m = x - eta * step, new
        if t < 3:
            # In the block's own variable the frozen step is plain descent too.
            assert np.allclose(shifted_iterate(x, m, eta, beta)[block], (z - eta * g)[block], atol=1e-13)
        after = block_energy(0.5 * x @ a @ x, [m[b] for b in blocks], eta, beta)
        promised = eta * (1 - eta * largest / 2) * np.sum(m[block] ** 2)
        assert after <= energy - promised + 1e-12 * energy
        energy = after
    assert energy < 1e-3 * block_energy(0.5 * 36, [np.zeros(6)], eta, beta)
