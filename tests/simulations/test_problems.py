"""Every problem: its gradient against autograd, its constants against curvature, its blocks against the runner."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bcd_theory.identity import scalar_counterexample
from bcd_theory.quantization import measured_relative_error, relative_error
from simulations.problems.chain import random_chain
from simulations.problems.pl import NonConvexPL, random_pl
from simulations.problems.residual import cosines, swiglu_net, tanh_net
from simulations.problems.scalar import ScalarChain
from simulations.problems.softmax import Softmax, random_softmax
from simulations.runner import Arm, run


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def by_autograd(value, x):
    x = x.clone().requires_grad_()
    value(x).sum().backward()
    return x.grad


def curvature(problem, x):
    """Dense Hessian at x (n,) by central differences of the gradient."""
    n, step = len(x), 1e-5
    columns = torch.from_numpy(
        np.concatenate([x[:, None] + step * np.eye(n), x[:, None] - step * np.eye(n)], 1)
    )
    g = problem.gradient(columns, slice(0, n)).numpy()
    h = (g[:, :n] - g[:, n:]) / (2 * step)
    return (h + h.T) / 2


# --- residual nets ----------------------------------------------------------------------------------------------


def ref_back(net, x, roles):
    """REF-BACK: one run in plain autograd; a branch through which no gradient shall pass is added as a value."""
    x = x.clone().requires_grad_()
    repeats, at = x.shape[1] // net.instances, 0
    total = 0.0
    hidden = []
    for r in range(x.shape[1]):
        i, at = r // repeats, 0
        h = net.inputs[i].clone().requires_grad_()
        states = [h]
        for layer in range(net.layers):
            maps = []
            for number, (outputs, inputs) in enumerate(net.shapes):
                a = x[at : at + net.rank * inputs, r].reshape(net.rank, inputs)
                at += net.rank * inputs
                b = x[at : at + net.rank * outputs, r].reshape(outputs, net.rank)
                at += net.rank * outputs
                if roles[layer] != "selected":
                    a, b = a.detach(), b.detach()
                maps.append(net.weights[layer][number][i] + net.scale * b @ a)
            branches = [tanh] if net.readout is None else [attention, swiglu]
            used, counts = 0, [2] if net.readout is None else [4, 3]
            for number, (branch, count) in enumerate(zip(branches, counts, strict=True)):
                change = branch(h, maps[used : used + count], net)
                used += count
                last = number == len(branches) - 1
                if roles[layer] in ("identity", "below") or (roles[layer] == "mlp" and not last):
                    change = change.detach()
                h = h + change
            states.append(h)
            h.retain_grad()
        if net.readout is None:
            loss = 0.5 * ((h - net.targets[i]) ** 2).sum() / len(h)
        else:
            loss = torch.nn.functional.cross_entropy(h @ net.readout[i].T, net.targets[i])
        total = total + loss
        hidden.append(states)
    total.backward()
    return float(total.detach()), x.grad, [[state.grad for state in states] for states in hidden]


def tanh(h, maps, net):
    return torch.tanh(h @ maps[0].T) @ maps[1].T


def normed(h):
    return h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-6)


def attention(h, maps, net):
    n = normed(h).reshape(-1, net.branches[0].tokens, h.shape[-1])
    q, k, v = n @ maps[0].T, n @ maps[1].T, n @ maps[2].T
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(h.shape) @ maps[3].T


def swiglu(h, maps, net):
    n = normed(h)
    return (torch.nn.functional.silu(n @ maps[0].T) * (n @ maps[1].T)) @ maps[2].T


@pytest.fixture(scope="module")
def nets():
    generators = [rng(1), rng(2)]
    return {
        "tanh": tanh_net(generators, layers=5, width=4, inner=5, positions=6),
        "swiglu": swiglu_net(generators, layers=5, width=4, inner=5, windows=2, tokens=3, classes=5),
    }


def points(net, columns=4, seed=3):
    return torch.from_numpy(0.4 * rng(seed).normal(size=(net.partition.n, columns)))


@pytest.mark.parametrize("mode", ["full", "exact", "identity", "mlp"])
@pytest.mark.parametrize("name", ["tanh", "swiglu"])
@pytest.mark.parametrize("quantised", [False, True])
def test_gradients_equal_those_of_detached_branches(nets, name, mode, quantised):
    """REF-BACK: each block in each mode, on exact and on NF4 weights, against plain autograd."""
    net = nets[name].quantised() if quantised else nets[name]
    if name == "tanh" and mode == "mlp":
        with pytest.raises(ValueError, match="two branches"):
            net.with_mode(mode)
        return
    net = net.with_mode(mode)
    x = points(net)
    for block, layers in zip(net.partition, ([0, 1], [2, 3], [4]), strict=True):
        roles = net.roles(layers)
        assert roles[4] == {"full": "exact"}.get(mode, mode) or 4 in layers
        value, gradient, _ = ref_back(net, x, roles)
        rows = slice(block[0], block[-1] + 1)
        found = net.gradient(x, rows)
        assert float(net.value(x).sum()) == pytest.approx(value, rel=1e-12)
        np.testing.assert_allclose(found.numpy(), gradient[rows].numpy(), rtol=1e-10, atol=1e-12)
        assert float(gradient.abs().sum()) == pytest.approx(float(gradient[rows].abs().sum()))
        assert float(found.abs().min(0).values.max()) > 0  # every entry is alive
        shuffled = torch.tensor(block)[torch.from_numpy(rng(5).permutation(len(block)))[:7]]
        if len({int(i) // net.layer_size for i in shuffled}) == len(layers):
            np.testing.assert_array_equal(
                net.gradient(x, shuffled).numpy(), net.gradient(x, rows)[shuffled - block[0]]
            )


@pytest.mark.parametrize("name", ["tanh", "swiglu"])
def test_all_layers_selected_is_full_backpropagation_in_every_mode(nets, name):
    net = nets[name]
    x = points(net)
    expected = by_autograd(net.value, x)
    for mode in ("full", "exact", "identity"):
        found = net.with_mode(mode).gradient(x, slice(0, net.partition.n))
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-10, atol=1e-13)


def test_mixed_plans_pass_through_the_branches_they_keep(nets):
    net = nets["swiglu"]
    x = points(net)
    roles = ("below", "selected", "mlp", "identity", "exact")
    _, gradient, hidden = ref_back(net, x, roles)
    found = net.backward(x, roles)
    rows = slice(net.layer_size, 2 * net.layer_size)
    np.testing.assert_allclose(found.adapters.numpy(), gradient[rows].numpy(), rtol=1e-10, atol=1e-13)
    for layer in range(1, 6):
        for run_number in range(4):
            expected = hidden[run_number][layer]
            np.testing.assert_allclose(found.hidden[layer][run_number].numpy(), expected.numpy(), atol=1e-12)
    certified = net.with_mode("certified", {(1,): (None, None, *roles[2:])})
    np.testing.assert_array_equal(certified.gradient(x, rows).numpy(), found.adapters.numpy())
    with pytest.raises(ValueError, match=r"no plan for the layers \[2\]"):
        certified.gradient(x, slice(2 * net.layer_size, 3 * net.layer_size))


def test_block_gradients_are_what_each_step_reads(nets):
    net = nets["swiglu"].with_mode("identity")
    x = points(net)
    together = net.block_gradients(x)
    for block in net.partition:
        rows = slice(block[0], block[-1] + 1)
        np.testing.assert_array_equal(together[rows].numpy(), net.gradient(x, rows).numpy())
    assert not np.allclose(together.numpy(), net.gradient(x, slice(0, net.partition.n)).numpy())


def test_random_orders_read_the_surrogate_of_the_block_alone(nets):
    """A step under a drawn order equals the same step under a fixed one: no mode falls back to the true gradient."""
    net = nets["swiglu"].with_mode("identity")
    x = points(net, 2).numpy()
    found = run(net, Arm("r", order="shuffled"), x, 0.1, 1, seeds=[0, 1]).x
    moved = (found.numpy() != x).reshape(net.layers, -1, 2).any(1)
    for r in range(2):
        layers = np.flatnonzero(moved[:, r])
        rows = slice(layers[0] * net.layer_size, (layers[-1] + 1) * net.layer_size)
        step = x[rows, r] - 0.1 * net.gradient(torch.from_numpy(x), rows)[:, r].numpy()
        np.testing.assert_allclose(found[rows, r].numpy(), step, rtol=1e-13, atol=1e-15)


def test_full_and_identity_arms_run_side_by_side(nets):
    """One program of arms with different orders: full reads the true gradient, the others their block's surrogate."""
    net = nets["swiglu"].with_mode("identity")
    x = points(net, 2).numpy()
    arms = [Arm("f", order="full"), Arm("c", order="cyclic")]
    together = run(net, arms, x, 0.1, 3).x
    for i, arm in enumerate(arms):
        single = run(net, arm, x, 0.1, 3).x
        np.testing.assert_allclose(together[:, i], single[:, i], rtol=1e-12, atol=1e-14)
    assert not np.allclose(together[:, 0], run(net.with_mode("exact"), arms[1], x, 0.1, 3).x[:, 0])
    with pytest.raises(ValueError, match="own blocks"):
        run(net, [Arm("i", order="interleaved"), Arm("c")], x, 0.1, 3)


def test_instances_are_independent_and_instance_major(nets):
    both = nets["tanh"]
    x = points(both)
    alone = tanh_net([rng(2)], layers=5, width=4, inner=5, positions=6)
    np.testing.assert_allclose(both.value(x)[2:].numpy(), alone.value(x[:, 2:]).numpy(), rtol=1e-13)
    with pytest.raises(ValueError, match="multiple of the 2 instances"):
        both.value(x[:, :3])


def test_a_start_leaves_the_frozen_net_and_a_gradient_for_B_alone(nets):
    net = nets["tanh"]
    x = torch.from_numpy(net.start([0, 1]))
    np.testing.assert_allclose(net.value(x), net.value(torch.zeros_like(x)), rtol=1e-13)
    for layer in range(net.layers):
        pairs = net.factors(net.gradient(x, slice(0, net.partition.n)), layer)
        assert all(float(a.abs().max()) == 0 and float(b.abs().max()) > 0 for a, b in pairs)


def test_nf4_weights_have_the_error_of_the_law():
    """T11: the frozen matrices are rounded, nothing else."""
    net = tanh_net([rng(4)], layers=2, width=64, inner=64, positions=3)
    rounded = net.quantised()
    error = measured_relative_error(net.weights[0][0][0].numpy(), rounded.weights[0][0][0].numpy())
    assert error == pytest.approx(relative_error("nf4", 64), rel=0.05)
    assert rounded.targets is net.targets and rounded.inputs is net.inputs


def test_bfloat16_rounds_gradients_of_the_flagged_instances_only(nets):
    from dataclasses import replace

    net = nets["swiglu"]
    x = points(net)
    noisy = replace(net, bfloat16=torch.tensor([False, True]))
    everything = slice(0, net.partition.n)
    found, true = noisy.gradient(x, everything), net.gradient(x, everything)
    np.testing.assert_array_equal(found[:, :2].numpy(), true[:, :2].numpy())
    np.testing.assert_array_equal(found[:, 2:].numpy(), found[:, 2:].to(torch.bfloat16).double().numpy())
    off = float((found - true)[:, 2:].norm() / true[:, 2:].norm())
    assert 2**-11 < off < 2**-6
    np.testing.assert_array_equal(noisy.value(x).numpy(), net.value(x).numpy())


def test_cosines_by_layer():
    true = torch.tensor([[1.0], [0.0], [0.0], [2.0]])
    found = torch.tensor([[1.0], [1.0], [0.0], [-1.0]])
    cosine, rho = cosines(found, true, 2)
    np.testing.assert_allclose(cosine[:, 0], [0.5**0.5, -1.0])
    np.testing.assert_allclose(rho[:, 0], [2**0.5, 0.5])


# --- softmax regression and PL ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_softmax_constants_bound_the_curvature_and_the_minimum_is_one(seed):
    problem = random_softmax(30, 4, 3, 2, rng(seed), ridge=0.05)
    x = rng(seed, 1).normal(size=(problem.partition.n, 3))
    columns = torch.from_numpy(x)
    expected = by_autograd(problem.value, columns)
    for block in (*problem.partition, range(problem.partition.n)):
        rows = slice(block[0], block[-1] + 1)
        np.testing.assert_allclose(problem.gradient(columns, rows), expected[rows], atol=1e-12)
    some = torch.tensor([1, 5, 7])
    np.testing.assert_allclose(problem.gradient(columns, some), expected[some], atol=1e-12)
    labels = torch.from_numpy(problem.labels)
    weights = columns[:, 0].reshape(4, 3)
    entropy = torch.nn.functional.cross_entropy(torch.from_numpy(problem.data) @ weights, labels)
    assert float(problem.value(columns)[0]) == pytest.approx(float(entropy + 0.025 * weights.square().sum()))
    largest = 0.0
    for point in (np.zeros(problem.partition.n), *x.T):
        h = curvature(problem, point)
        values = np.linalg.eigvalsh(h)
        assert problem.pl_constant - 1e-6 <= values[0] and values[-1] <= problem.smoothness + 1e-6
        largest = max(largest, values[-1])
        for block, bound in zip(problem.partition.arrays(), problem.block_smoothness, strict=True):
            assert np.linalg.eigvalsh(h[np.ix_(block, block)])[-1] <= bound + 1e-6
    assert largest > 0.4 * problem.smoothness  # the bound is of the right size
    assert problem.minimum is not None and problem.minimum < problem.value(columns).min()
    assert (
        np.abs(by_autograd(problem.value, torch.from_numpy(problem.minimiser[:, None])).numpy()).max() < 1e-12
    )


def test_softmax_refuses_what_has_no_minimum():
    with pytest.raises(ValueError, match="ridge is 0"):
        Softmax(np.ones((2, 2)), np.array([0, 1]), 2, 1, 0.0)
    with pytest.raises(ValueError, match="labels"):
        Softmax(np.ones((2, 2)), np.array([0, 2]), 2, 1, 0.1)


@pytest.mark.parametrize("shape", [(6, 6), (4, 6)])
def test_pl_constants(shape):
    """T3's premises: PL with mu at 4,000 points, L and L_i attained at M x = 0, and not convex."""
    problem = random_pl(*shape, 3, 0.4, rng(*shape))
    x = torch.from_numpy(rng(7).normal(size=(6, 4000)) * np.geomspace(0.01, 30, 4000))
    expected = by_autograd(problem.value, x)
    for block in (*problem.partition, range(6)):
        rows = slice(block[0], block[-1] + 1)
        np.testing.assert_allclose(problem.gradient(x, rows), expected[rows], atol=1e-10)
    ratio = expected.square().sum(0) / (2 * problem.value(x))
    assert problem.pl_constant <= float(ratio.min()) < 40 * problem.pl_constant
    origin = curvature(problem, np.zeros(6))
    assert np.linalg.eigvalsh(origin)[-1] == pytest.approx(problem.smoothness, rel=1e-6)
    for block, constant in zip(problem.partition.arrays(), problem.block_smoothness, strict=True):
        assert np.linalg.eigvalsh(origin[np.ix_(block, block)])[-1] == pytest.approx(constant, rel=1e-6)
    away = [np.linalg.eigvalsh(curvature(problem, point)) for point in x[:, ::400].numpy().T]
    assert min(values[0] for values in away) < -0.1
    assert max(values[-1] for values in away) <= problem.smoothness * (1 + 1e-6)


def test_pl_needs_full_row_rank():
    with pytest.raises(ValueError, match="full row rank"):
        NonConvexPL(np.ones((2, 3)), random_pl(3, 3, 1, 0.1, rng(0)).partition)


# --- T7's chains ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["linear", "squared"])
def test_the_scalar_chain_is_the_counterexample(loss):
    """T7: the gradient that a step on a reads is x, the true one (1 + b) x; b is read exactly."""
    problem = ScalarChain(2, x=2.0, loss=loss, target=0.7)
    points_ = torch.from_numpy(rng(1).normal(size=(2, 9)) * 2)
    exact = by_autograd(problem.value, points_)
    a, b = (problem.gradient(points_, slice(i, i + 1))[0] for i in range(2))
    np.testing.assert_allclose(b, exact[1], rtol=1e-12)
    np.testing.assert_allclose(a * (1 + points_[1]), exact[0], rtol=1e-12)
    np.testing.assert_allclose(problem.gradient(points_, slice(0, 2)), exact, rtol=1e-12)
    np.testing.assert_allclose(problem.block_gradients(points_), torch.stack([a, b]), rtol=1e-12)
    if loss == "linear":
        law = scalar_counterexample(float(points_[0, 0]), float(points_[1, 0]), 2.0)
        assert float(a[0]) == law.surrogate and float(exact[0, 0]) == pytest.approx(law.true)
    np.testing.assert_allclose(
        ScalarChain(2, 2.0, "exact", loss, 0.7).block_gradients(points_), exact, rtol=1e-12
    )


def test_a_chain_that_selects_every_layer_reads_the_true_gradient():
    """Order `full` in mode identity is full backpropagation, not the surrogate of every block."""
    chain = random_chain(3, 4, 2, 0.5, "identity", rng(3))
    x = torch.from_numpy(rng(4).normal(size=(6, 2)))
    np.testing.assert_allclose(chain.gradient(x, slice(0, 6)), by_autograd(chain.value, x), rtol=1e-11)
    together = chain.block_gradients(x)
    np.testing.assert_array_equal(together[2:4], chain.gradient(x, slice(2, 4)))
    np.testing.assert_allclose(together, chain.surrogate.T @ (chain.true @ x.numpy() - chain.target[:, None]))
