from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from bcd_theory.identity import bias_bound
from bcd_theory.linear import stability_limit
from simulations import EXPERIMENTS, get
from simulations.experiment import main
from simulations.limits import measured_limit
from simulations.problems import Quadratic, ring
from simulations.problems.chain import random_chain
from simulations.runner import Arm, run


def test_a_known_limit_is_measured():
    problem = Quadratic(np.array([[1, 0.9], [0.9, 1]]), ring(2).partition)
    rng = np.random.default_rng(0)
    assert measured_limit(problem, Arm("cyclic"), (200, 400), rng) == pytest.approx(2.0, rel=0.001)
    assert measured_limit(problem, Arm("full", order="full"), (200, 400), rng) == pytest.approx(
        2 / 1.9, rel=0.001
    )


def test_the_chain_has_the_gradient_that_autograd_finds():
    rng = np.random.default_rng(1)
    chain = random_chain(3, 5, 2, 0.4, "exact", rng)
    x = torch.from_numpy(rng.normal(size=6)).requires_grad_()
    h = torch.zeros(5, dtype=torch.float64)
    for layer in range(3):
        h = (
            h
            + torch.from_numpy(chain.W[layer]) @ h
            + torch.from_numpy(chain.B[layer]) @ x[2 * layer : 2 * layer + 2]
        )
    (0.5 * (h - torch.from_numpy(chain.target)).square().sum()).backward()
    found = chain.gradient(x.detach()[:, None], slice(0, 6))[:, 0]
    np.testing.assert_allclose(found.numpy(), x.grad.numpy(), atol=1e-12)


def test_identity_equals_exact_where_the_branches_vanish():
    chain = random_chain(3, 5, 2, 1e-300, "identity", np.random.default_rng(2))
    np.testing.assert_allclose(chain.true, chain.surrogate)
    assert bias_bound([0.0, 0.0]) == 0.0


def test_the_ring_separates_the_idle_policies():
    problem = ring(8)
    limit = stability_limit(problem.A, problem.partition, momentum=0.9).learning_rate
    assert limit * problem.block_smoothness.max() == pytest.approx(1.558, abs=2e-3)
    for idle, grows in (("momentum", True), ("frozen", False)):
        losses = run(
            problem, Arm(idle, "sgd-ema", idle, momentum=0.9), np.arange(1.0, 9.0), 1.1 * limit, 800
        ).losses
        assert (losses[-1] > losses[0]).item() == grows


def test_planted_gives_the_figures_asked_for(tmp_path, capsys):
    assert main(get("planted"), ["--out", str(tmp_path), "--json"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["verdict"] == "supported" and line["wrong"] <= 3 and line["total"] == 200
    assert line["decided_rate"] >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_quick_experiment_runs_within_a_minute(name):
    record, _ = get(name).run("quick")
    assert record.seconds < 60


def test_unknown_names_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'planted'"):
        get("plantd")
