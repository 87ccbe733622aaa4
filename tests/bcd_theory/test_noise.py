from __future__ import annotations

import itertools

import numpy as np
import pytest

from bcd_theory.linear import stability_limit
from bcd_theory.noise import noise_floor, uncoupled_variance

N, BLOCKS = 6, [[0, 1], [2, 3], [4, 5]]


def coupled(seed=0, rank=N):
    root = np.random.default_rng(seed).normal(size=(N, rank))
    return root @ root.T / rank


def noise(seed=1):
    root = np.random.default_rng(seed).normal(size=(N, N))
    return root @ root.T / N


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("idle", ["momentum", "frozen"])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_uncoupled_closed_form_at_every_phase(momentum, idle, p):
    curvature = np.linspace(0.5, 1.5, p)
    floor = noise_floor(np.diag(curvature), [[i] for i in range(p)], 0.7, 2.0, momentum=momentum, idle=idle)
    for j in range(p):
        for i in range(p):
            expected = uncoupled_variance(
                curvature[i],
                2.0,
                0.7,
                momentum=momentum,
                cycle_length=p,
                idle=idle,
                idle_steps=(j - i) % p,
            )
            assert floor.covariance[j, i, i] == pytest.approx(expected, rel=1e-12)
    assert floor.boundary[0, 0] == pytest.approx(
        uncoupled_variance(curvature[0], 2.0, 0.7, momentum=momentum, cycle_length=p, idle=idle), rel=1e-12
    )
    excess = 0.5 * np.einsum("jii,i->j", floor.covariance, curvature)
    assert floor.excess_by_phase == pytest.approx(excess, rel=1e-12)
    assert floor.excess == pytest.approx(excess.mean(), rel=1e-12)


def test_the_boundary_form_is_not_the_variance_of_a_block_stepped_later():
    # Under idle `momentum` the closed form with q = beta^p holds just before a block's own step.
    floor = noise_floor(np.eye(2), [[0], [1]], 1.0, 1.0, momentum=0.9)
    closed = uncoupled_variance(1.0, 1.0, 1.0, momentum=0.9, cycle_length=2)
    assert floor.boundary[0, 0] == pytest.approx(closed, rel=1e-12)
    assert floor.boundary[1, 1] < 0.96 * closed


def test_no_noise_free_lunch_in_the_limits():
    # No momentum: eta sigma^2/(lambda (2 - eta lambda)); the variance blows up at the limit 2/lambda.
    assert uncoupled_variance(2.0, 3.0, 0.5) == pytest.approx(0.5 * 3 / (2 * (2 - 1)))
    assert uncoupled_variance(1.0, 1.0, 2 - 1e-9) > 1e8
    with pytest.raises(ValueError, match="uncoupled limit"):
        uncoupled_variance(1.0, 1.0, 2.0)


def reference(a, sigma, eta, beta, idle, order, heavy=False):
    """The stationary second moment by vectorised equations of the written-out step, per phase."""
    n, gain = len(a), 1.0 if heavy else 1 - beta
    maps, pushes = [], []
    for block in BLOCKS if order != "full" else [list(range(n))]:
        project = np.zeros((n, n))
        project[block, block] = 1
        eye, zero = np.eye(n), np.zeros((n, n))
        keep = beta * (eye if idle == "momentum" else project) + (
            zero if idle == "momentum" else eye - project
        )
        move = eye if idle == "momentum" else project
        new_m = np.hstack([gain * project @ a, keep])
        maps.append(np.vstack([np.hstack([eye, zero]) - eta * move @ new_m, new_m]))
        pushes.append(np.vstack([-eta * gain * move @ project, gain * project]))
    noises = [b @ sigma @ b.T for b in pushes]
    size = 2 * n
    if order == "random":
        mean = sum(np.kron(s, s) for s in maps) / len(maps)
        flat = np.linalg.solve(np.eye(size**2) - mean, (sum(noises) / len(noises)).ravel())
        return [flat.reshape(size, size)[:n, :n]]
    cycle, noise_ = np.eye(size), np.zeros((size, size))
    for s, q in zip(maps, noises, strict=True):
        cycle, noise_ = s @ cycle, s @ noise_ @ s.T + q
    p = np.linalg.solve(np.eye(size**2) - np.kron(cycle, cycle), noise_.ravel()).reshape(size, size)
    phases = []
    for s, q in zip(maps, noises, strict=True):
        p = s @ p @ s.T + q
        phases.append(p[:n, :n])
    return phases


@pytest.mark.parametrize("order", ["cyclic", "full", "random"])
@pytest.mark.parametrize("idle", ["momentum", "frozen"])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("heavy", [False, True])
def test_against_the_written_out_equations(order, idle, momentum, heavy):
    a, sigma = coupled(), noise()
    eta = (0.1 if heavy else 0.5) / np.linalg.eigvalsh(a)[-1]
    floor = noise_floor(
        a,
        BLOCKS,
        eta,
        sigma,
        order=order,
        momentum=momentum,
        idle=idle,
        normalisation="heavy-ball" if heavy else "ema",
    )
    expected = reference(a, sigma, eta, momentum, idle, order, heavy)
    assert floor.covariance == pytest.approx(np.array(expected), rel=1e-8, abs=1e-10)
    assert floor.excess_by_phase == pytest.approx([np.trace(a @ p) / 2 for p in expected], rel=1e-8)


def test_full_order_does_not_depend_on_the_blocks():
    a = coupled()
    one = noise_floor(a, None, 0.2, noise(), order="full", momentum=0.9)
    two = noise_floor(a, BLOCKS, 0.2, noise(), order="full", momentum=0.9)
    p_is_one = noise_floor(a, [range(N)], 0.2, noise(), momentum=0.9, idle="frozen")
    assert np.array_equal(one.covariance, two.covariance)
    assert np.array_equal(one.covariance, p_is_one.covariance)


@pytest.mark.parametrize(
    ("order", "momentum", "idle"),
    [
        ("cyclic", 0.0, "momentum"),
        ("cyclic", 0.8, "momentum"),
        ("cyclic", 0.8, "frozen"),
        ("random", 0.8, "momentum"),
        ("full", 0.8, "momentum"),
    ],
)
def test_against_a_long_simulation(order, momentum, idle):
    rng = np.random.default_rng(7)
    a, sigma, walkers = coupled(3) + 0.3 * np.eye(N), noise(), 4000
    eta = 0.5 / np.linalg.eigvalsh(a)[-1]
    root = np.linalg.cholesky(sigma)
    x, m = np.zeros((N, walkers)), np.zeros((N, walkers))
    samples = []
    for t in range(600):
        block = (
            slice(None) if order == "full" else BLOCKS[t % 3 if order == "cyclic" else int(rng.integers(3))]
        )
        g = a @ x + root @ rng.normal(size=(N, walkers))
        if idle == "momentum":
            m *= momentum
            m[block] += (1 - momentum) * g[block]
            x = x - eta * m
        else:
            m[block] = momentum * m[block] + (1 - momentum) * g[block]
            x[block] -= eta * m[block]
        if t >= 300:
            samples.append(0.5 * np.mean(np.sum(x * (a @ x), axis=0)))
    floor = noise_floor(a, BLOCKS, eta, sigma, order=order, momentum=momentum, idle=idle)
    steps = len(floor.excess_by_phase)
    found = np.array(samples).reshape(-1, steps).mean(axis=0)
    # A walker's loss is a quadratic form in N Gaussians: its standard deviation is at most sqrt(2) of its
    # mean, over 4000 walkers 2.2 %; averaged over 300 steps of a few correlation times each about 0.7 %.
    # Random order shares its blocks among walkers, so its mean keeps the scatter of 300 block choices: a
    # few per cent more.
    assert found == pytest.approx(floor.excess_by_phase, rel=0.08 if order == "random" else 0.025)


def test_singular_matrix_has_a_floor_on_its_range():
    a = coupled(2, rank=3)
    eta = 0.001
    floor = noise_floor(a, BLOCKS, eta, 1.0)
    kernel = np.linalg.eigh(a)[1][:, :3]
    assert np.max(np.abs(floor.boundary @ kernel)) < 1e-12
    # With a curvature lambda -> 0 there the variance grows as eta sigma^2/(2 lambda), and that costs eta
    # sigma^2/4 of loss a direction however small lambda is (after 1/(eta lambda) cycles): the floor on the
    # range is without it.
    shifted = noise_floor(a + 1e-6 * np.eye(N), BLOCKS, eta, 1.0)
    assert shifted.excess - floor.excess == pytest.approx(3 * eta / 4, rel=1e-3)


def test_refusals():
    a = coupled()
    limit = stability_limit(a, BLOCKS, momentum=0.9).learning_rate
    assert noise_floor(a, BLOCKS, 0.999 * limit, 1.0, momentum=0.9).radius < 1
    with pytest.raises(ValueError, match=r"is not stable \(radius 1\.0"):
        noise_floor(a, BLOCKS, 1.001 * limit, 1.0, momentum=0.9)
    with pytest.raises(ValueError, match="a saddle has no stationary state"):
        noise_floor(np.diag([1.0, -1.0]), [[0], [1]], 0.1, 1.0)
    with pytest.raises(ValueError, match="noise_covariance has shape"):
        noise_floor(a, BLOCKS, 0.1, np.ones(3))
    with pytest.raises(ValueError, match="negative eigenvalue"):
        noise_floor(a, BLOCKS, 0.1, -1.0)
    with pytest.raises(ValueError, match="learning_rate is 0"):
        noise_floor(a, BLOCKS, 0.0, 1.0)


@pytest.mark.parametrize("momentum, idle", [(0.0, "momentum"), (0.7, "momentum"), (0.7, "frozen")])
def test_shuffled_against_every_permutation_written_out(momentum, idle):
    a, sigma, eta = coupled(), noise(), 0.3
    n, gain = N, 1 - momentum
    maps = []
    for block in BLOCKS:
        chosen = np.zeros((n, n))
        chosen[block, block] = 1.0
        if momentum:
            keep = momentum * np.eye(n) if idle == "momentum" else np.eye(n) - (1 - momentum) * chosen
            to_m = np.hstack([gain * chosen @ a, keep])
            moves = np.eye(n) if idle == "momentum" else chosen
            s = np.vstack([np.hstack([np.eye(n), np.zeros((n, n))]) - eta * moves @ to_m, to_m])
            b = np.vstack([-eta * gain * chosen, gain * chosen])
        else:
            s, b = np.eye(n) - eta * chosen @ a, -eta * chosen
        maps.append((s, b @ sigma @ b.T))
    orders = list(itertools.permutations(range(len(BLOCKS))))

    def cycle(p):
        phases = np.zeros((len(BLOCKS), *p.shape))
        for order in orders:
            now = p
            for k, j in enumerate(order):
                now = maps[j][0] @ now @ maps[j][0].T + maps[j][1]
                phases[k] += now / len(orders)
        return phases

    p = np.zeros_like(maps[0][1])
    for _ in range(3000):
        phases = cycle(p)
        p = phases[-1]
    found = noise_floor(a, BLOCKS, eta, sigma, order="shuffled", momentum=momentum, idle=idle)
    np.testing.assert_allclose(found.covariance, phases[:, :n, :n], rtol=1e-8, atol=1e-12)
    cyclic = noise_floor(a, BLOCKS, eta, sigma, momentum=momentum, idle=idle)
    assert abs(found.excess / cyclic.excess - 1) > 1e-4  # the order is felt


def test_a_shuffled_order_that_is_not_stable_is_refused():
    with pytest.raises(ValueError, match="not stable"):
        noise_floor(coupled(), BLOCKS, 50.0, 1.0, order="shuffled")
