"""Random problems with known constants, declared once: where bounds are tried (see `bcd_theory.audit`).

Quadratics (general, near-singular, singular, strongly coupled, badly scaled), l2-regularised logistic regression,
least squares in LoRA factors (non-convex), and a non-convex PL function. Each states its block smoothness, joint
smoothness, PL constant and infimum in closed form or as a safe bound, so that no constant is estimated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# The least value of h'(t)^2 / (2 h(t)) is 0.17553; beyond |t| = 20 the ratio exceeds (2|t| - 3)^2 / (2 t^2 + 6) > 1.
PL_OF_H = 0.1755


@dataclass(frozen=True, eq=False)
class Problem:
    """A function with its constants.

    Attributes:
        name, family: which problem it is.
        value, gradient: f(x) and its gradient, x of shape (n,).
        blocks: index arrays of the p blocks.
        start: x^0.
        infimum: of f, or a number not above it that is exact where `pl` is given.
        smoothness, block_smoothness: L and the L_i, shape (p,).
        pl: PL constant, None if there is none.
        strong: (mu, sigma) strong convexity in the Euclidean norm and in sqrt(sum L_i |x_i|^2); None if not.
        radii: (R, R1) largest distances to the minimiser on the level set of the start, in the two norms.
        inside: whether the constants hold at x (and on segments between two such points).
    """

    name: str
    family: str
    value: Callable[[Array], float]
    gradient: Callable[[Array], Array]
    blocks: tuple[NDArray[np.intp], ...]
    start: Array
    infimum: float
    smoothness: float
    block_smoothness: Array
    pl: float | None = None
    strong: tuple[float, float] | None = None
    radii: tuple[float, float] | None = None
    inside: Callable[[Array], bool] = lambda x: True

    @property
    def p(self) -> int:
        """Number of blocks."""
        return len(self.blocks)


def _blocks(sizes: NDArray[np.intp]) -> tuple[NDArray[np.intp], ...]:
    ends = np.cumsum(sizes)
    return tuple(np.arange(end - size, end, dtype=np.intp) for end, size in zip(ends, sizes, strict=True))


def _sizes(rng: np.random.Generator) -> NDArray[np.intp]:
    return np.asarray(rng.integers(1, 4, int(rng.choice([1, 2, 2, 3, 4, 4, 8]))), dtype=np.intp)


def quadratic(
    matrix: Array, blocks: tuple[NDArray[np.intp], ...], start: Array, name: str, family: str = "quadratic"
) -> Problem:
    """f = x^T A x / 2, A symmetric positive semidefinite."""
    eigenvalues = np.linalg.eigvalsh(matrix)
    largest = float(eigenvalues[-1])
    positive = eigenvalues[eigenvalues > 1e-12 * largest]
    local = np.array([np.linalg.eigvalsh(matrix[np.ix_(block, block)])[-1] for block in blocks])
    gap = float(0.5 * start @ matrix @ start)
    strong = radii = None
    if len(positive) == len(matrix):
        weights = np.empty(len(matrix))
        for block, constant in zip(blocks, local, strict=True):
            weights[block] = constant
        sigma = float(np.linalg.eigvalsh(matrix / np.sqrt(np.outer(weights, weights)))[0])
        strong = (float(positive[0]), sigma)
        radii = (float(np.sqrt(2 * gap / positive[0])), float(np.sqrt(2 * gap / sigma)))
    return Problem(
        name,
        family,
        value=lambda x: float(0.5 * x @ matrix @ x),
        gradient=lambda x: np.asarray(matrix @ x),
        blocks=blocks,
        start=start,
        infimum=0.0,
        smoothness=largest,
        block_smoothness=local,
        pl=float(positive[0]),
        strong=strong,
        radii=radii,
    )


def random_quadratic(seed: int) -> Problem:
    """One of five kinds, by seed: general, near-singular, singular, strongly coupled, badly scaled."""
    rng = np.random.default_rng([1, seed])
    sizes = _sizes(rng)
    n = int(sizes.sum())
    kind = ("general", "near-singular", "singular", "coupled", "scaled")[seed % 5]
    factor = rng.standard_normal((n, n))
    if kind == "near-singular":
        factor[-1] *= 1e-4
    elif kind == "singular":
        factor[-1] = 0.0 if n > 1 else factor[-1]
    elif kind == "coupled":
        angles = np.pi * np.arange(n) / n
        factor = np.vstack([np.cos(angles), np.sin(angles), 0.1 * np.eye(n)])
    elif kind == "scaled":
        factor = factor * 10.0 ** rng.uniform(-1, 1, n)
    matrix = factor.T @ factor
    start = rng.standard_normal(n)
    if rng.random() < 0.3:  # along the steepest direction, where one-step bounds are closest
        start = np.asarray(np.linalg.eigh(matrix)[1][:, -1])
    return quadratic(matrix, _blocks(sizes), start, f"quadratic-{kind}-{seed}")


def random_logistic(seed: int) -> Problem:
    """mean log(1 + exp(-y <a, x>)) + mu |x|^2 / 2."""
    rng = np.random.default_rng([2, seed])
    sizes = _sizes(rng)
    n, samples, mu = int(sizes.sum()), 20, float(10.0 ** rng.uniform(-2, 0))
    data = rng.standard_normal((samples, n)) * rng.choice([-1.0, 1.0], samples)[:, None]
    blocks = _blocks(sizes)

    def value(x: Array) -> float:
        return float(np.mean(np.logaddexp(0, -data @ x)) + mu / 2 * x @ x)

    def gradient(x: Array) -> Array:
        return np.asarray(-data.T @ (1 / (1 + np.exp(data @ x))) / samples + mu * x)

    minimiser = np.zeros(n)
    for _ in range(50):  # Newton's method, globally convergent here from 0 in practice; checked below
        chance = 1 / (1 + np.exp(data @ minimiser))
        hessian = (data.T * (chance * (1 - chance))) @ data / samples + mu * np.eye(n)
        minimiser = minimiser - np.linalg.solve(hessian, gradient(minimiser))
    if np.linalg.norm(gradient(minimiser)) > 1e-10:
        raise AssertionError(f"Newton's method did not converge on logistic problem {seed}")
    start = 2 * rng.standard_normal(n)
    local = np.array([np.linalg.norm(data[:, block], 2) ** 2 / (4 * samples) + mu for block in blocks])
    sigma = mu / float(local.max())
    gap = value(start) - value(minimiser)
    return Problem(
        f"logistic-{seed}",
        "logistic",
        value,
        gradient,
        blocks,
        start,
        infimum=value(minimiser),
        smoothness=float(np.linalg.norm(data, 2) ** 2 / (4 * samples) + mu),
        block_smoothness=local,
        pl=mu,
        strong=(mu, sigma),
        radii=(float(np.sqrt(2 * gap / mu)), float(np.sqrt(2 * gap / sigma))),
    )


@dataclass(frozen=True, eq=False)
class LoraLeastSquares:
    """f(W) = tr((W - W*) C (W - W*)^T)/2 at W = s sum_j B_j A_j, with spectral norms |A_j| <= a, |B_j| <= b.

    x holds A_1 (rank x inputs), B_1 (outputs x rank), A_2 ... in row-major order.
    """

    target: Array
    covariance: Array
    rank: int
    adapters: int
    scale: float
    a: float
    b: float

    @property
    def adapter_size(self) -> int:
        """Entries of one pair of factors."""
        return self.rank * sum(self.target.shape)

    def factors(self, x: Array) -> list[tuple[Array, Array]]:
        """The pairs (A_j, B_j) in x."""
        outputs, inputs = self.target.shape
        cut = self.rank * inputs
        pieces = np.split(x, self.adapters)
        return [(q[:cut].reshape(self.rank, inputs), q[cut:].reshape(outputs, self.rank)) for q in pieces]

    def residual(self, x: Array) -> Array:
        """W - W*."""
        return np.asarray(self.scale * sum(B @ A for A, B in self.factors(x)) - self.target)

    def value(self, x: Array) -> float:
        """f at the factors in x."""
        residual = self.residual(x)
        return float(0.5 * np.sum((residual @ self.covariance) * residual))

    def gradient(self, x: Array) -> Array:
        """Gradient by x."""
        G = self.residual(x) @ self.covariance
        parts = [part for A, B in self.factors(x) for part in (self.scale * B.T @ G, self.scale * G @ A.T)]
        return np.concatenate([part.ravel() for part in parts])

    def hessian(self, x: Array) -> Array:
        """Dense Hessian by x, from the derivative of `gradient` along each axis."""
        G, pairs = self.residual(x) @ self.covariance, self.factors(x)
        columns = []
        for axis in np.eye(len(x)):
            moves = self.factors(axis)
            dW = self.scale * sum(B @ dA + dB @ A for (A, B), (dA, dB) in zip(pairs, moves, strict=True))
            dG = dW @ self.covariance
            for (A, B), (dA, dB) in zip(pairs, moves, strict=True):
                columns.append((self.scale * (dB.T @ G + B.T @ dG)).ravel())
                columns.append((self.scale * (dG @ A.T + G @ dA.T)).ravel())
        return np.concatenate(columns).reshape(len(x), len(x))

    def inside(self, x: Array) -> bool:
        """Whether every factor's spectral norm is within a or b."""
        return all(
            np.linalg.norm(A, 2) <= self.a and np.linalg.norm(B, 2) <= self.b for A, B in self.factors(x)
        )

    @property
    def weight_smoothness(self) -> float:
        """L_W, the largest eigenvalue of C."""
        return float(np.linalg.eigvalsh(self.covariance)[-1])

    def gradient_bound(self) -> float:
        """Spectral norm of grad_W f over the region: at most |W* C| + L_W s (adapters) a b."""
        reach = self.scale * self.adapters * self.a * self.b
        return float(np.linalg.norm(self.target @ self.covariance, 2) + self.weight_smoothness * reach)

    def infimum(self) -> float:
        """Least value over all W of rank (adapters x rank): the tail of the singular values of W* C^(1/2)."""
        values, vectors = np.linalg.eigh(self.covariance)
        root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
        return float(
            0.5
            * np.sum(np.linalg.svd(self.target @ root, compute_uv=False)[self.rank * self.adapters :] ** 2)
        )


def random_lora_model(seed: int) -> tuple[LoraLeastSquares, Array]:
    """A LoRA least squares problem and a start inside its region."""
    rng = np.random.default_rng([3, seed])
    outputs, inputs = (int(size) for size in rng.integers(2, 5, 2))
    rank, adapters = 1, int(rng.integers(1, 4))
    samples = rng.standard_normal((inputs + 2, inputs))
    target = rng.standard_normal((outputs, inputs))
    start = rng.standard_normal(adapters * rank * (outputs + inputs))
    if seed % 3 == 0:  # the usual LoRA start
        for pair in range(adapters):
            start.reshape(adapters, -1)[pair, rank * inputs :] = 0.0
    free = LoraLeastSquares(
        target, samples.T @ samples / len(samples), rank, adapters, float(rng.uniform(0.5, 2)), 1, 1
    )
    a = 1.5 * max(float(np.linalg.norm(A, 2)) for A, _ in free.factors(start))
    b = max(1.5 * max(float(np.linalg.norm(B, 2)) for _, B in free.factors(start)), 1.0)
    return LoraLeastSquares(target, free.covariance, rank, adapters, free.scale, a, b), start


def lora_constant(model: LoraLeastSquares, adapters: int) -> float:
    """Smoothness of `adapters` pairs together, by the eigenvalue of the 2 x 2 form that T8 rests on.

    The first-order move of W is a sum over adapters, which multiplies the C term by their number.
    """
    c = model.scale**2 * model.weight_smoothness * adapters
    corner = c * model.a * model.b + model.scale * model.gradient_bound()
    form = np.array([[c * model.b**2, corner], [corner, c * model.a**2]])
    return float(np.linalg.eigvalsh(form)[-1])


def random_lora(seed: int) -> Problem:
    """The same as a Problem; one block for each adapter. Constants hold inside the region only."""
    model, start = random_lora_model(seed)
    sizes = np.full(model.adapters, model.adapter_size, dtype=np.intp)
    return Problem(
        f"lora-{seed}",
        "lora",
        model.value,
        model.gradient,
        _blocks(sizes),
        start,
        infimum=model.infimum(),
        smoothness=lora_constant(model, model.adapters),
        block_smoothness=np.full(model.adapters, lora_constant(model, 1)),
        inside=model.inside,
    )


def random_pl(seed: int) -> Problem:
    """sum h((M x)_i), h(t) = t^2 + 3 sin(t)^2: not convex, smoothness 8, h'^2 >= 2 PL_OF_H h (1/32 is often quoted)."""
    rng = np.random.default_rng([4, seed])
    sizes = _sizes(rng)
    n = int(sizes.sum())
    mixing = np.eye(n) + 0.3 * rng.standard_normal((n, n)) / np.sqrt(n)
    blocks = _blocks(sizes)
    gram = np.linalg.eigvalsh(mixing.T @ mixing)

    def value(x: Array) -> float:
        t = mixing @ x
        return float(np.sum(t**2 + 3 * np.sin(t) ** 2))

    def gradient(x: Array) -> Array:
        t = mixing @ x
        return np.asarray(mixing.T @ (2 * t + 3 * np.sin(2 * t)))

    return Problem(
        f"pl-{seed}",
        "pl",
        value,
        gradient,
        blocks,
        start=3 * rng.standard_normal(n),
        infimum=0.0,
        smoothness=float(8 * gram[-1]),
        block_smoothness=np.array([8 * np.linalg.norm(mixing[:, block], 2) ** 2 for block in blocks]),
        pl=PL_OF_H * float(gram[0]),
    )


@cache
def declared_problems() -> tuple[Problem, ...]:
    """All declared problems: 200 random quadratics, the quadratic that attains one-step bounds, 30 of each other."""
    half_square = quadratic(np.eye(1), _blocks(np.ones(1, dtype=np.intp)), np.ones(1), "half-square")
    return (
        half_square,
        *(random_quadratic(seed) for seed in range(200)),
        *(random_logistic(seed) for seed in range(30)),
        *(random_lora(seed) for seed in range(30)),
        *(random_pl(seed) for seed in range(30)),
    )
