"""Noise floor of layer-cyclic descent on a noisy quadratic (T10, tight).

f = x^T A x/2; the gradient read at each step is A x + xi, xi of zero mean and covariance Sigma, independent
from step to step. Step j of a cycle is the linear map s <- S_j s + B_j xi of the state s = x or (x, m)
(`bcd_theory.cycle`),

    B_j = -eta P_j without momentum,  [-eta c P_j; c P_j] with it,  c = 1 - beta (EMA form) or 1 (heavy ball).

Covariance at the cycle boundary: P = M P M^T + Q, M = S_p ... S_1; inside the cycle P_j = S_j P_{j-1} S_j^T +
B_j Sigma B_j^T. Random order: P = E[S P S^T] + E[B Sigma B^T] over the blocks, not the mean map. Shuffled order
(a new permutation each cycle): P_j is the mean over the sets C of j blocks already visited, whose last block is any
of C equally often, C_C = mean over j in C of S_j C_{C less j} S_j^T + B_j Sigma B_j^T; P is its fixed point. Along ker
A nothing pulls x back and its variance grows without end, at no loss: everything is computed on the range
of A.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse.linalg import LinearOperator, gmres

from bcd_theory.cycle import Array, CycleMap, block_rows, quotient_matrix
from bcd_theory.linear import Order, resolve_order
from bcd_theory.mean_square import general_radius
from bcd_theory.partition import Partition
from bcd_theory.quadratic import analyse

SHUFFLED_BLOCKS = 12


@dataclass(frozen=True)
class NoiseFloor:
    """Stationary second moments.

    covariance       of x (its part in the range of A) after each step of the cycle, shape (steps, n, n);
    the last
                     one is at the cycle boundary. Orders 'full' and 'random' have one step; of 'shuffled' it is the
                     mean over permutations.
    excess_by_phase  tr(A P_xx)/2 = E[f] - f* after each step of the cycle, shape (steps,)
    radius           of the cycle map (random and shuffled order: of the mean-square map), below 1
    """

    covariance: Array
    excess_by_phase: Array
    radius: float

    @property
    def boundary(self) -> Array:
        """Covariance of x at the cycle boundary."""
        return np.asarray(self.covariance[-1])

    @property
    def excess(self) -> float:
        """E[f] - f*, averaged over the phases of the cycle."""
        return float(self.excess_by_phase.mean())


def noise_floor(
    A: Any,
    blocks: Partition | Sequence[Iterable[int]] | None,
    learning_rate: float,
    noise_covariance: ArrayLike,
    *,
    order: Order | Literal["shuffled"] | Sequence[int] = "cyclic",
    momentum: float = 0.0,
    idle: Literal["momentum", "frozen"] = "momentum",
    normalisation: Literal["ema", "heavy-ball"] = "ema",
) -> NoiseFloor:
    """Stationary covariance and excess loss of block descent with noisy gradients (T10).

    A                 symmetric positive semidefinite, n x n
    noise_covariance  Sigma: n x n, its diagonal (n), or one variance for all coordinates
    blocks, order, momentum, idle, normalisation
                      as in `bcd_theory.linear.stability_limit`; order also 'shuffled' (up to 12 blocks)
    Work O(s^3) for each step of a cycle, s = n or 2n; O(2^p p s^3) for 'shuffled'. Raises ValueError where the
    learning rate is not stable.

    >>> floor = noise_floor(np.diag([1.0, 2.0]), [[0], [1]], 0.5, 1.0)
    >>> floor.boundary.diagonal().round(6).tolist()  # eta sigma^2/(lambda (2 - eta lambda))
    [0.333333, 0.25]
    """
    if not 0.0 < learning_rate < np.inf:
        raise ValueError(f"learning_rate is {learning_rate}, expected a positive number")
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum is {momentum}, expected a number in [0, 1)")
    if idle not in ("momentum", "frozen"):
        raise ValueError(f"idle is {idle!r}, expected 'momentum' or 'frozen'")
    if normalisation not in ("ema", "heavy-ball"):
        raise ValueError(f"normalisation is {normalisation!r}, expected 'ema' or 'heavy-ball'")
    problem = analyse(A, None, True)
    if problem.is_saddle:
        raise ValueError(f"A has the eigenvalue {problem.lowest:.6g}: a saddle has no stationary state")
    shuffled = isinstance(order, str) and order == "shuffled"
    # A shuffled cycle visits the blocks of a cyclic one.
    kind, partition, sequence = resolve_order("cyclic" if shuffled else order, blocks, problem.n)  # type: ignore[arg-type]
    if shuffled and len(partition) > SHUFFLED_BLOCKS:
        raise ValueError(f"order 'shuffled' has {len(partition)} blocks, expected at most {SHUFFLED_BLOCKS}")
    sigma = _covariance(noise_covariance, problem.n)
    gain = 1.0 if normalisation == "heavy-ball" else 1.0 - momentum
    cycle = CycleMap(partition, block_rows(problem.dense, partition), sequence, momentum, gain, idle)
    basis, image = problem.complement()
    r = basis.shape[1]
    steps, injected = {}, {}
    for j in set(sequence):
        change = quotient_matrix(cycle, np.array([learning_rate]), basis, image, [j])[0]
        steps[j] = change + np.eye(len(change))
        push = np.zeros((problem.n, problem.n))
        b = list(partition[j])
        push[b, b] = gain if momentum else 1.0
        into = -learning_rate * basis.T @ push
        if momentum:
            into = np.vstack([into, push])
        injected[j] = into @ sigma @ into.T
    if kind == "random":
        phases, radius = _random(list(steps.values()), list(injected.values()))
    elif shuffled:
        phases, radius = _shuffled(list(steps.values()), list(injected.values()))
    else:
        phases, radius = _cyclic([steps[j] for j in sequence], [injected[j] for j in sequence])
    if phases is None:
        raise ValueError(
            f"learning_rate {learning_rate} is not stable (radius {radius:.6g}), so there is no floor"
        )
    covariance = np.stack([basis @ p[:r, :r] @ basis.T for p in phases])
    weights = np.einsum("ir,ij,jr->r", basis, problem.dense, basis)
    excess = np.array([0.5 * float(np.sum(weights * np.diag(p)[:r])) for p in phases])
    return NoiseFloor(covariance, excess, radius)


def uncoupled_variance(
    curvature: ArrayLike,
    noise_variance: ArrayLike,
    learning_rate: ArrayLike,
    *,
    momentum: float = 0.0,
    cycle_length: int = 1,
    idle: Literal["full", "momentum", "frozen"] = "momentum",
    idle_steps: int | None = None,
) -> Array:
    """Stationary variance of one uncoupled coordinate of curvature lambda, EMA form (T10, closed form).

    V = eta sigma^2 (1 + q)/(lambda (2 (1 + q) - eta (1 - q) lambda)), q = beta^p for idle `momentum`, beta
    for `frozen` and `full`. Under idle `momentum` that is the variance just before the coordinate's own
    step (which is the cycle boundary for the first block only). k idle steps after its own step x lies
    between two such points, x = (1 - a) x_0 + a x_0', a = (1 - beta^(k+1))/(1 - beta^p), so that

        Var = V (1 - 2 a (1 - a) eta lambda (1 - q)/(1 + q)).

    idle_steps  k, from 0 to p - 1; None is p - 1
    """
    p = cycle_length
    if idle not in ("full", "momentum", "frozen"):
        raise ValueError(f"idle is {idle!r}, expected 'full', 'momentum' or 'frozen'")
    if not 0.0 <= momentum < 1.0 or p < 1:
        raise ValueError(f"momentum {momentum}, cycle_length {p}: expected [0, 1) and 1 or more")
    k = p - 1 if idle_steps is None else idle_steps
    if not 0 <= k < p:
        raise ValueError(f"idle_steps is {k}, expected 0 to {p - 1}")
    lam, eta = np.asarray(curvature, dtype=np.float64), np.asarray(learning_rate, dtype=np.float64)
    q = momentum**p if idle == "momentum" else momentum
    room = 2 * (1 + q) - eta * (1 - q) * lam
    if np.any(lam <= 0) or np.any(eta <= 0) or np.any(room <= 0):
        raise ValueError("expected positive curvature and a learning rate between 0 and the uncoupled limit")
    variance = eta * np.asarray(noise_variance) * (1 + q) / (lam * room)
    if idle == "momentum":
        a = (1 - momentum ** (k + 1)) / (1 - q)
        variance = variance * (1 - 2 * a * (1 - a) * eta * lam * (1 - q) / (1 + q))
    return np.asarray(variance, dtype=np.float64)


def _cyclic(steps: list[Array], injected: list[Array]) -> tuple[list[Array] | None, float]:
    cycle, noise = np.eye(len(steps[0])), np.zeros_like(steps[0])
    for s, q in zip(steps, injected, strict=True):
        cycle, noise = s @ cycle, s @ noise @ s.T + q
    radius = float(np.max(np.abs(np.linalg.eigvals(cycle)), initial=0.0))
    if radius >= 1.0:
        return None, radius
    current = _lyapunov(cycle, noise)
    phases = []
    for s, q in zip(steps, injected, strict=True):
        current = s @ current @ s.T + q
        phases.append(current)
    return phases, radius


def _lyapunov(m: Array, q: Array) -> Array:
    """P = M P M^T + Q = sum_k M^k Q M^kT by doubling: positive terms only, so no cancellation near the limit."""
    p = q
    for _ in range(64):
        more = m @ p @ m.T
        p = p + more
        if np.linalg.norm(more) <= 1e-16 * np.linalg.norm(p):
            return (p + p.T) / 2
        m = m @ m
    raise ArithmeticError("the stationary covariance did not settle: the learning rate is at its limit")


def _random(steps: list[Array], injected: list[Array]) -> tuple[list[Array] | None, float]:
    radius = general_radius(steps)
    if radius >= 1.0:
        return None, radius
    size, noise = len(steps[0]), np.mean(np.stack(injected), axis=0)

    def residual(flat: Array) -> Array:
        p = flat.reshape(size, size)
        return (p - sum(s @ p @ s.T for s in steps) / len(steps)).ravel()

    if size <= 24:
        dense = np.column_stack([residual(e) for e in np.eye(size * size)])
        flat = np.linalg.solve(dense, noise.ravel())
    else:
        operator = LinearOperator((size * size, size * size), matvec=residual, dtype=np.float64)
        flat, failed = gmres(operator, noise.ravel(), rtol=1e-12, restart=60, maxiter=100)
        if failed:
            raise ArithmeticError("the stationary covariance of the random order did not converge")
    p = flat.reshape(size, size)
    return [(p + p.T) / 2], radius


def _shuffled(steps: list[Array], injected: list[Array]) -> tuple[list[Array] | None, float]:
    p, size = len(steps), len(steps[0])
    sets = sorted(range(1 << p), key=int.bit_count)

    def visit(start: Array, noisy: bool) -> list[Array]:
        """Mean covariance after each number of steps of a cycle, from 0 to p, from `start`."""
        after = {0: start}
        for chosen in sets[1:]:
            members = [j for j in range(p) if chosen >> j & 1]
            came = [steps[j] @ after[chosen ^ (1 << j)] @ steps[j].T + noisy * injected[j] for j in members]
            after[chosen] = sum(came[1:], came[0]) / len(members)
        found = []
        for count in range(p + 1):
            of_size = [after[chosen] for chosen in sets if chosen.bit_count() == count]
            found.append(np.asarray(sum(of_size[1:], of_size[0]) / len(of_size)))
        return found

    # The cycle's map of covariances is positive, so powers of it from the identity grow at its radius.
    grown, radius = np.eye(size), 0.0
    for _ in range(10_000):
        grown = visit(grown, noisy=False)[-1]
        before, radius = radius, float(np.linalg.norm(grown, 2))
        if radius == 0.0 or abs(radius - before) <= 1e-12 * radius:
            break
        grown = grown / radius
    if radius >= 1.0:
        return None, radius
    # P = sum of the images of Q, which fall at the radius.
    term = visit(np.zeros((size, size)), noisy=True)[-1]
    p_boundary = term.copy()
    for _ in range(100_000):
        if np.linalg.norm(term) <= 1e-15 * np.linalg.norm(p_boundary):
            break
        term = visit(term, noisy=False)[-1]
        p_boundary += term
    else:
        raise ArithmeticError("the stationary covariance did not settle: the learning rate is at its limit")
    phases = visit((p_boundary + p_boundary.T) / 2, noisy=True)[1:]
    return phases, radius


def _covariance(noise: ArrayLike, n: int) -> Array:
    sigma = np.asarray(noise, dtype=np.float64)
    if sigma.ndim == 0:
        sigma = np.full(n, float(sigma))
    if sigma.ndim == 1:
        sigma = np.diag(sigma)
    if sigma.shape != (n, n) or not np.allclose(sigma, sigma.T):
        raise ValueError(
            f"noise_covariance has shape {np.shape(noise)}, expected a variance, {n} of them or a "
            f"symmetric {n} x {n} matrix"
        )
    if np.linalg.eigvalsh(sigma)[0] < -1e-10 * np.max(np.abs(sigma)):
        raise ValueError(
            "noise_covariance has a negative eigenvalue, expected a positive semidefinite matrix"
        )
    return sigma
