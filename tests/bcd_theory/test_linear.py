from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.sparse.linalg import aslinearoperator

import bcd_theory.linear as linear
import bcd_theory.quadratic as quadratic
from bcd_theory.cycle import CycleMap
from bcd_theory.inverse_cycle import InverseCycle
from bcd_theory.linear import stability_limit
from bcd_theory.momentum import uncoupled_limit
from bcd_theory.partition import equal_blocks
from bcd_theory.quadratic import analyse

GOLDEN = Path(__file__).parents[1] / "golden" / "cycle_limits.json"
PAIRS = [[0, 1], [2, 3], [4, 5]]
VARIANTS = [(0.0, "momentum"), (0.9, "momentum"), (0.9, "frozen"), (0.5, "frozen")]


def wishart(n, seed=0, rank=None):
    root = np.random.default_rng(seed).normal(size=(n, rank or n))
    return root @ root.T / (rank or n)


def cycle_matrix(a, blocks, order, eta, beta, idle, heavy=False):
    """The cycle map written out with dense matrices, from the definition of a step."""
    n, gain = len(a), 1.0 if heavy else 1 - beta
    cycle = np.eye(2 * n)
    for j in order:
        project = np.zeros((n, n))
        project[blocks[j], blocks[j]] = 1
        eye, zero = np.eye(n), np.zeros((n, n))
        if idle == "momentum":
            new_m = np.hstack([gain * project @ a, beta * eye])
            step = np.vstack([np.hstack([eye, zero]) - eta * new_m, new_m])
        else:
            new_m = np.hstack([gain * project @ a, eye - project + beta * project])
            step = np.vstack([np.hstack([eye, zero]) - eta * project @ new_m, new_m])
        cycle = step @ cycle
    return cycle


def written_out_radius(a, blocks, order, eta, beta, idle, heavy=False):
    """Radius on the quotient by ker A, projected the pedestrian way."""
    n = len(a)
    values, vectors = np.linalg.eigh(a)
    null = vectors[:, np.abs(values) < 1e-10 * np.abs(values).max()]
    project = np.eye(2 * n)
    project[:n, :n] -= null @ null.T
    return np.max(np.abs(np.linalg.eigvals(project @ cycle_matrix(a, blocks, order, eta, beta, idle, heavy))))


def is_the_limit(found, radius):
    assert found.success
    for share in (0.02, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1 - 1e-6):
        assert radius(share * found.learning_rate) < 1
    assert radius((1 + 1e-6) * found.learning_rate) > 1
    for start, end in found.intervals[1:]:
        middle = (start + end) / 2
        assert radius(middle) < 1 < radius((1 - 1e-6) * start)
        if end < found.scan_to:
            assert radius((1 + 1e-6) * end) > 1


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()))
def test_golden_limits(case):
    found = stability_limit(
        np.array(case["A"]),
        case["blocks"],
        order=case["order"],
        momentum=case["beta"],
        idle="momentum" if case["idle"] == "-" else case["idle"],
    )
    assert found.learning_rate == pytest.approx(case["eta_limit"], rel=1e-6)
    assert found.stable_again_later == case["stable_again_later"]
    assert found.smoothness == pytest.approx(case["L"], rel=1e-6)
    if case["order"] != "full":
        assert found.block_smoothness == pytest.approx(case["L_blocks"], rel=1e-6)


@pytest.mark.parametrize(("beta", "idle"), VARIANTS)
@pytest.mark.parametrize("rank", [6, 4, 2])
@pytest.mark.parametrize("normalisation", ["ema", "heavy-ball"])
def test_limits_against_the_written_out_map(beta, idle, rank, normalisation):
    for seed in range(4):
        a, order = wishart(6, seed, rank), [2, 0, 1]
        found = stability_limit(a, PAIRS, order=order, momentum=beta, idle=idle, normalisation=normalisation)
        assert found.null_dimension == 6 - rank

        def radius(eta, a=a, order=order):
            return written_out_radius(a, PAIRS, order, eta, beta, idle, normalisation == "heavy-ball")

        is_the_limit(found, radius)
        for share in (0.3, 0.9, 1.5):
            eta = share * found.learning_rate
            assert found.spectral_radius(eta) == pytest.approx(radius(eta), rel=1e-7)
        # The mode that stops contracting is an eigenvector on the unit circle.
        assert abs(found.critical_eigenvalue) == pytest.approx(1, abs=1e-6)


def test_figures_of_two_scalar_blocks():
    found = stability_limit([[1, 0.9], [0.9, 1]], [[0], [1]])
    assert found.learning_rate == pytest.approx(2, rel=1e-12)
    assert found.spectral_radius(1.5) == pytest.approx(0.5, rel=1e-12)
    full = stability_limit([[1, 0.9], [0.9, 1]], order="full")
    assert full.learning_rate == pytest.approx(2 / 1.9, rel=1e-14)
    assert full.spectral_radius(2 / 1.9) == pytest.approx(1, rel=1e-12)


def test_singular_matrix_is_judged_on_the_quotient():
    found = stability_limit([[1, 1], [1, 1]], [[0], [1]])
    assert found.learning_rate == pytest.approx(2, rel=1e-12)
    assert found.null_dimension == 1
    assert np.abs(found.null_space[:, 0]) == pytest.approx([0.5**0.5, 0.5**0.5])
    assert found.spectral_radius(1.999) < 1 < found.spectral_radius(2.001)


def test_stable_set_of_several_intervals():
    found = stability_limit([[1, 0.3], [0.3, 0.16]], [[0], [1]])
    # The second one ends where the determinant (1 - eta)(1 - 0.16 eta) is 1: at 7.25 exactly.
    assert np.ravel(found.intervals) == pytest.approx([0, 2.28848985, 6.99151015, 7.25], rel=1e-8, abs=1e-12)
    assert found.stable_again_later
    assert not stability_limit([[1, 0.3], [0.3, 0.16]], [[0], [1]], scan_to=5.0).stable_again_later


@pytest.mark.parametrize(("p", "beta", "figure"), [(4, 0.5, 1.453), (8, 0.9, 1.558)])
def test_idle_momentum_loses_what_frozen_keeps(p, beta, figure):
    angle = np.arange(p) * np.pi / p
    a = np.cos(angle[:, None] - angle) + 0.01 * np.eye(p)
    blocks = [[i] for i in range(p)]
    moving = stability_limit(a, blocks, momentum=beta)
    frozen = stability_limit(a, blocks, momentum=beta, idle="frozen")
    assert moving.learning_rate * 1.01 == pytest.approx(figure, abs=5e-4)
    assert frozen.learning_rate * 1.01 >= 2


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("idle", ["momentum", "frozen"])
@pytest.mark.parametrize("normalisation", ["ema", "heavy-ball"])
def test_uncoupled_blocks_give_the_closed_form(p, idle, normalisation):
    a = np.diag(np.linspace(0.3, 1, 2 * p))
    for beta in (0.0, 0.5, 0.9, 0.99):
        found = stability_limit(
            a, equal_blocks(2 * p, p), momentum=beta, idle=idle, normalisation=normalisation
        )
        units = "sgd-ema" if normalisation == "ema" else normalisation
        closed = uncoupled_limit(1.0, momentum=beta, cycle_length=p, idle=idle, units=units)
        assert found.learning_rate == pytest.approx(closed, rel=1e-9)
        assert not found.stable_again_later


@pytest.mark.parametrize(("beta", "idle"), VARIANTS)
def test_rotation_and_reversal_leave_the_limit_order_does_not(beta, idle):
    a = wishart(8, 3)
    blocks = equal_blocks(8, 4)
    limits = {
        order: stability_limit(a, blocks, order=order, momentum=beta, idle=idle).learning_rate
        for order in permutations(range(4))
    }
    for order, limit in limits.items():
        rotated = (*order[1:], order[0])
        assert limits[rotated] == pytest.approx(limit, rel=1e-9)
        assert limits[order[::-1]] == pytest.approx(limit, rel=1e-9)
    assert max(limits.values()) > 1.001 * min(limits.values())


def test_bounds_without_momentum_and_the_critical_mode():
    for seed in range(10):
        a = wishart(6, seed)
        found = stability_limit(a, PAIRS)
        largest = max(found.block_smoothness)
        assert found.learning_rate >= 2 / largest * (1 - 1e-12)
        determinant = np.prod(
            [np.prod(np.abs(1 - found.learning_rate * np.linalg.eigvalsh(a[np.ix_(b, b)]))) for b in PAIRS]
        )
        assert determinant <= 1 + 1e-9
        # Sharper than 2/L_max: an eigenvector x of the cycle is stable iff eta x*Dx < 2 x*x, D the block
        # diagonal.
        x = found.slowest_mode
        d = sum(np.vdot(x[b], a[np.ix_(b, b)] @ x[b]).real for b in PAIRS) / np.vdot(x, x).real
        assert found.learning_rate * d == pytest.approx(2, rel=1e-6)
        # With frozen momentum a mode leaves the disk at the angle theta only where
        # eta x*Dx = 2 (1 - beta cos theta)/(1 - beta) x*x, which is at least 2: the linear form of T6b.
        for beta in (0.5, 0.9):
            frozen = stability_limit(a, PAIRS, momentum=beta, idle="frozen")
            assert frozen.learning_rate >= 2 / largest * (1 - 1e-12)
            x, cosine = frozen.slowest_mode, frozen.critical_eigenvalue.real
            d = sum(np.vdot(x[b], a[np.ix_(b, b)] @ x[b]).real for b in PAIRS) / np.vdot(x, x).real
            assert frozen.learning_rate * d == pytest.approx(2 * (1 - beta * cosine) / (1 - beta), rel=1e-5)


def test_equal_block_curvatures_attain_the_lower_bound():
    rng = np.random.default_rng(0)
    a = 0.1 * rng.normal(size=(6, 6))
    a = a + a.T
    for b in PAIRS:
        a[np.ix_(b, b)] = np.eye(2)
    assert np.linalg.eigvalsh(a)[0] > 0
    assert stability_limit(a, PAIRS).learning_rate == pytest.approx(2, rel=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_one_block_is_full(beta):
    a = wishart(5)
    closed = 2 * (1 + beta) / ((1 - beta) * np.linalg.eigvalsh(a)[-1])
    for idle in ("momentum", "frozen"):
        assert stability_limit(a, [range(5)], momentum=beta, idle=idle).learning_rate == pytest.approx(closed)
    full = stability_limit(a, equal_blocks(5, 5), order="full", momentum=beta)
    assert full.learning_rate == pytest.approx(closed, rel=1e-12)
    assert full.method == "closed form"
    for share in (0.2, 0.999, 1.2):
        eta = share * closed
        assert full.spectral_radius(eta) == pytest.approx(
            written_out_radius(a, [list(range(5))], [0], eta, beta, "momentum"), rel=1e-7
        )


def test_saddle():
    a = np.array([[1.0, 2.0], [2.0, 1.0]])
    found = stability_limit(a, [[0], [1]], momentum=0.5)
    assert (found.learning_rate, found.diagnosis, found.success) == (0.0, "saddle", False)
    positive = np.full((2, 2), 1.5)  # the eigenvalue 3 along (1, 1)
    expected = stability_limit(positive, [[0], [1]], momentum=0.5).learning_rate
    assert found.positive_part_limit == pytest.approx(expected, rel=1e-12)
    assert "-1" in found.message
    assert found.spectral_radius(0.1) == pytest.approx(
        written_out_radius(a, [[0], [1]], [0, 1], 0.1, 0.5, "momentum"), rel=1e-9
    )
    assert found.spectral_radius(0.1) > 1
    with pytest.raises(ValueError, match="learning_rate is -1"):
        found.spectral_radius(-1.0)
    nearly = stability_limit(np.diag([1.0, -1e-12]), [[0], [1]])
    assert nearly.success and nearly.null_dimension == 1


def test_no_curvature():
    found = stability_limit(np.zeros((2, 2)), [[0], [1]])
    assert found.learning_rate == np.inf and found.diagnosis == "no curvature"
    assert found.spectral_radius(1.0) == 0.0


def test_preconditioner_heavy_ball_and_scaling():
    a, d = wishart(6), np.linspace(0.5, 2, 6)
    scaled = a / np.sqrt(d[:, None] * d)
    one = stability_limit(a, PAIRS, momentum=0.9, preconditioner=d).learning_rate
    assert one == pytest.approx(stability_limit(scaled, PAIRS, momentum=0.9).learning_rate, rel=1e-9)
    # The same map without the symmetric form: the field D^-1 A.
    field = stability_limit(a, PAIRS, momentum=0.9, field=a / d[:, None]).learning_rate
    assert one == pytest.approx(field, rel=1e-8)
    ema = stability_limit(a, PAIRS, momentum=0.9).learning_rate
    heavy = stability_limit(a, PAIRS, momentum=0.9, normalisation="heavy-ball").learning_rate
    assert heavy == pytest.approx(0.1 * ema, rel=1e-9)
    assert stability_limit(7 * a, PAIRS).learning_rate == pytest.approx(
        stability_limit(a, PAIRS).learning_rate / 7, rel=1e-10
    )


def mean_square_matrix(a, blocks, eta, beta, idle):
    steps = [cycle_matrix(a, blocks, [j], eta, beta, idle) for j in range(len(blocks))]
    if beta == 0.0:
        steps = [s[: len(a), : len(a)] for s in steps]
    return sum(np.kron(s, s) for s in steps) / len(steps)


@pytest.mark.parametrize(("beta", "idle"), [(0.0, "momentum"), (0.8, "momentum"), (0.8, "frozen")])
def test_random_order_against_the_kronecker_matrix(beta, idle):
    a, blocks = wishart(4, 1), [[0, 1], [2, 3]]
    found = stability_limit(a, blocks, order="random", momentum=beta, idle=idle)

    def radius(eta):
        return np.max(np.abs(np.linalg.eigvals(mean_square_matrix(a, blocks, eta, beta, idle))))

    is_the_limit(found, radius)
    for share in (0.4, 1.3):
        eta = share * found.learning_rate
        assert found.spectral_radius(eta) == pytest.approx(radius(eta), rel=1e-9)


def test_random_order_of_the_symmetric_problem_needs_no_scan():
    a = wishart(40, 2, rank=30)
    found = stability_limit(a, equal_blocks(40, 5), order="random")
    assert found.method == "mean-square" and found.null_dimension == 10
    assert found.spectral_radius(0.999 * found.learning_rate) < 1
    assert found.spectral_radius(1.001 * found.learning_rate) > 1
    # Through the general, not self-adjoint code: the same number.
    small = wishart(6, 2, rank=4)
    one = stability_limit(small, PAIRS, order="random").learning_rate
    two = stability_limit(small, PAIRS, order="random", field=small).learning_rate
    assert one == pytest.approx(two, rel=1e-8)


def test_random_order_can_be_far_below_cyclic():
    ratios = []
    for seed in range(40):
        a = wishart(4, seed, rank=2) + 0.01 * np.eye(4)
        blocks = [[0], [1], [2], [3]]
        random = stability_limit(a, blocks, order="random").learning_rate
        ratios.append(random / stability_limit(a, blocks).learning_rate)
    assert min(ratios) < 0.5


def test_fields_that_are_not_gradients():
    rng = np.random.default_rng(3)
    a = wishart(6)
    assert stability_limit(a, PAIRS, field=a).learning_rate == pytest.approx(
        stability_limit(a, PAIRS).learning_rate, rel=1e-8
    )
    # Full order, complex eigenvalues: eta < 2 Re lambda/|lambda|^2.
    g = np.eye(6) + 0.4 * rng.normal(size=(6, 6))
    values = np.linalg.eigvals(g)
    assert np.min(values.real) > 0 and np.max(np.abs(values.imag)) > 0.1
    found = stability_limit(a, order="full", field=g)
    assert found.learning_rate == pytest.approx(np.min(2 * values.real / np.abs(values) ** 2), rel=1e-8)
    cyclic = stability_limit(a, PAIRS, field=g, momentum=0.7)

    def radius(eta):
        return np.max(np.abs(np.linalg.eigvals(cycle_matrix(g, PAIRS, [0, 1, 2], eta, 0.7, "momentum"))))

    is_the_limit(cyclic, radius)
    unstable = stability_limit(a, PAIRS, field=np.diag([1.0, 1, 1, 1, 1, -0.2]))
    assert (unstable.learning_rate, unstable.diagnosis) == (0.0, "unstable field")
    rotation = np.kron(np.eye(3), [[0.0, 1.0], [-1.0, 0.0]])
    assert stability_limit(a, PAIRS, field=rotation).learning_rate == 0.0


@pytest.mark.parametrize(("beta", "idle"), VARIANTS)
def test_sparse_and_operator_input(beta, idle):
    a = np.where(np.abs(np.subtract.outer(np.arange(12), np.arange(12))) <= 2, wishart(12), 0) + np.eye(12)
    blocks = [list(range(j, 12, 3)) for j in range(3)]
    dense = stability_limit(a, blocks, momentum=beta, idle=idle).learning_rate
    for matrix in (sp.csr_array(a), sp.coo_matrix(a), aslinearoperator(a)):
        found = stability_limit(matrix, blocks, momentum=beta, idle=idle).learning_rate
        assert found == pytest.approx(dense, rel=1e-9)


@pytest.mark.parametrize(("beta", "idle"), VARIANTS)
@pytest.mark.parametrize("rank", [9, 5])
def test_inverse_of_the_cycle(beta, idle, rank):
    problem = analyse(wishart(9, 0, rank), None, True)
    partition = equal_blocks(9, 3)
    rows = [problem.matrix[list(b)] for b in partition]
    cycle = CycleMap(partition, rows, (2, 0, 1), beta, 1 - beta, idle)
    inverse = InverseCycle(cycle, 0.3, problem.solver(), problem.null_space)
    w = np.random.default_rng(1).normal(size=(cycle.size, 3))
    w[:9] -= problem.null_space @ (problem.null_space.T @ w[:9])
    forward = cycle.difference(0.3, inverse(w))
    forward[:9] -= problem.null_space @ (problem.null_space.T @ forward[:9])
    assert forward == pytest.approx(w, abs=1e-10)


@pytest.fixture
def krylov(monkeypatch):
    """Large-problem code on a problem that dense eigenvalues can check; records the columns of each product."""
    monkeypatch.setattr(linear, "DENSE_SIZE", 8)
    columns = []
    original = CycleMap.steps

    def recorded(self, eta, state, *rest):
        columns.append(state.shape[-1])
        return original(self, eta, state, *rest)

    monkeypatch.setattr(CycleMap, "steps", recorded)
    return columns


def angles(n):
    angle = np.arange(n) * np.pi / n
    return np.cos(angle[:, None] - angle)


def decaying(n, power):
    q = np.linalg.qr(np.random.default_rng(4).normal(size=(n, n)))[0]
    a = q @ np.diag(np.arange(1.0, n + 1) ** -power) @ q.T
    return (a + a.T) / 2


MATRICES = {
    "decaying spectrum": decaying(60, 2),
    "square": wishart(60, 1),
    "well conditioned": wishart(60, 1, rank=240),
    "low rank, limit at the eigenvalue +1": wishart(60, 1, rank=15),
    "strongly coupled": angles(60) + 1e-2 * np.eye(60),
    "strongly coupled, nearly singular": angles(60) + 1e-6 * np.eye(60),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("beta", "idle"), VARIANTS)
def test_krylov_verdicts_equal_dense_ones(name, beta, idle, krylov, monkeypatch):
    a, blocks = MATRICES[name], equal_blocks(60, 6 if name != "low rank, limit at the eigenvalue +1" else 2)
    found = stability_limit(a, blocks, momentum=beta, idle=idle)
    assert found.method == "krylov"
    # Vectors go through A, never a matrix of the problem's size (the kernel's basis once a learning rate).
    assert max(krylov) <= 2
    etas = np.array([0.5, 1 - 1e-5, 1 + 1e-5, 1.3]) * found.learning_rate
    radii = [found.spectral_radius(eta) for eta in etas]
    monkeypatch.setattr(linear, "DENSE_SIZE", 1000)
    dense = stability_limit(a, blocks, momentum=beta, idle=idle, scan_points=24)
    assert dense.method == "dense"
    assert found.learning_rate == pytest.approx(dense.learning_rate, rel=1e-7)
    assert len(found.intervals) == len(dense.intervals)
    assert radii == pytest.approx([dense.spectral_radius(eta) for eta in etas], rel=1e-6)
    assert abs(found.critical_eigenvalue) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("make", [sp.csr_array, aslinearoperator])
def test_matrices_too_large_to_write_out(make, krylov, monkeypatch):
    monkeypatch.setattr(quadratic, "DENSE_SIZE", 10)
    monkeypatch.setattr(quadratic, "EIGEN_SIZE", 10)
    a, blocks = wishart(60, 1, rank=240), equal_blocks(60, 6)
    expected = stability_limit(a, blocks).learning_rate
    written_out = []
    monkeypatch.setattr(quadratic, "written_out", lambda *_: written_out.append(1))
    found = stability_limit(make(a), blocks)
    assert found.learning_rate == pytest.approx(expected, rel=1e-7)
    full = stability_limit(make(a), order="full").learning_rate
    assert full == pytest.approx(2 / np.linalg.eigvalsh(a)[-1], rel=1e-9)
    # One direction of the kernel is found and projected out; a large kernel is refused by name.
    values, vectors = np.linalg.eigh(a)
    singular = (vectors[:, 1:] * values[1:]) @ vectors[:, 1:].T
    assert stability_limit(make(singular), blocks).null_dimension == 1
    with pytest.raises(ValueError, match="a kernel of 16 dimensions or more"):
        stability_limit(make(wishart(60, 1, rank=15)), blocks)
    assert not written_out


def test_krylov_on_a_field_that_is_no_gradient(krylov, monkeypatch):
    rng = np.random.default_rng(0)
    g = wishart(40, 5) + 0.2 * np.eye(40) + 0.02 * rng.normal(size=(40, 40))
    options = {"A": g, "blocks": equal_blocks(40, 4), "field": g, "momentum": 0.8, "scan_points": 48}
    found = stability_limit(**options)
    monkeypatch.setattr(linear, "DENSE_SIZE", 1000)
    dense = stability_limit(**options)
    assert (found.method, dense.method) == ("krylov", "dense")
    assert found.learning_rate == pytest.approx(dense.learning_rate, rel=1e-7)


def test_large_problem_costs_few_products(krylov):
    n = 256
    a = wishart(n, 0, rank=2 * n)
    found = stability_limit(a, equal_blocks(n, 8))
    assert found.method == "krylov" and found.success
    # Writing the cycle out would take n products at each of some 30 learning rates.
    assert found.products < 16 * n
    assert 12 <= found.evaluations < 40
    assert max(krylov) <= 2
    assert stability_limit(a, order="full").products == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A": [[1, 2], [0, 1]]}, "A is not symmetric"),
        ({"A": [[1, 2, 3]]}, r"shape \(1, 3\), expected n x n"),
        ({"A": [[1, np.nan], [np.nan, 1]]}, "non-finite"),
        ({"blocks": [[0]]}, "index 1 is in no block"),
        ({"blocks": None}, "needs blocks"),
        ({"order": "cylic"}, "order is 'cylic'"),
        ({"order": [0]}, "every block number from 0 to 1"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"idle": "none"}, "idle is 'none'"),
        ({"normalisation": "nesterov"}, "normalisation is 'nesterov'"),
        ({"preconditioner": [1, -1]}, "expected 2 positive finite numbers"),
        ({"field": "surrogate"}, "field is 'surrogate'"),
        ({"field": np.eye(3)}, "field is 3 x 3"),
        ({"scan_to": -1.0}, "scan_to is -1.0"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        stability_limit(**{"A": [[1, 0.5], [0.5, 1]], "blocks": [[0], [1]], **change})
