"""Exact linear stability limits of layer-cyclic descent on a quadratic (T4, T5).

f = x^T A x/2. One cycle is a linear map M(eta); the iterates converge to a minimiser from every start iff the
radius of M is below 1 on the quotient by ker A. The limit is the end of the first stable interval (0, eta*).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bcd_theory.cycle import Array, CycleMap, block_rows, growth, quotient_matrix
from bcd_theory.krylov import KrylovSpectrum
from bcd_theory.mean_square import SymmetricMeanSquare, general_radius
from bcd_theory.partition import Partition, as_partition
from bcd_theory.quadratic import TOLERANCE, Quadratic, analyse, top_eigenpair
from bcd_theory.scan import scan

Order = Literal["cyclic", "full", "random"]

# State sizes up to this are scanned with dense eigenvalues, larger ones with Krylov spaces.
DENSE_SIZE = 96


@dataclass(frozen=True)
class StabilityLimit:
    """Result of `stability_limit`.

    learning_rate        eta*, the end of the first stable interval; 0 where no (0, eta) is stable
    intervals            every stable interval found in (0, scan_to]
    scan_to              where the scan ended
    critical_eigenvalue  of the cycle map at eta*, on the unit circle (NaN where eta* is 0 or unknown)
    slowest_mode         its eigenvector's x part, unit norm (random order: the leading direction of the
    critical
                         covariance); None where there is none
    diagnosis            'limit', 'saddle', 'unstable field', 'no curvature' or 'not bracketed'
    positive_part_limit  for a saddle: the limit for the positive part of A
    null_dimension       dim ker A; the radius is taken on the quotient by it
    null_space           orthonormal basis of ker A, n x null_dimension
    smoothness           L = |A|
    block_smoothness     L_i = |A_ii|
    method               'closed form', 'dense', 'krylov' or 'mean-square'
    evaluations          learning rates at which the spectrum was computed
    products             matrix-vector products with A spent on them
    success, message     whether eta* was bracketed, and in words what was found
    """

    learning_rate: float
    intervals: tuple[tuple[float, float], ...]
    scan_to: float
    critical_eigenvalue: complex
    slowest_mode: NDArray[Any] | None
    diagnosis: str
    positive_part_limit: float | None
    null_dimension: int
    null_space: Array
    smoothness: float
    block_smoothness: tuple[float, ...]
    method: str
    evaluations: int
    products: float
    success: bool
    message: str
    _radius: Callable[[float], float] = field(repr=False, compare=False)

    @property
    def stable_again_later(self) -> bool:
        """Whether a second stable interval was found beyond eta*, up to `scan_to`."""
        return any(start > self.learning_rate for start, _ in self.intervals)

    def spectral_radius(self, learning_rate: float) -> float:
        """Radius of one cycle on the quotient by ker A; for random order, of X -> E[M X M^T]."""
        if not learning_rate >= 0:
            raise ValueError(f"learning_rate is {learning_rate}, expected 0 or more")
        return self._radius(float(learning_rate))


def stability_limit(
    A: Any,
    blocks: Partition | Sequence[Iterable[int]] | None = None,
    order: Order | Sequence[int] = "cyclic",
    momentum: float = 0.0,
    idle: Literal["momentum", "frozen"] = "momentum",
    normalisation: Literal["ema", "heavy-ball"] = "ema",
    preconditioner: ArrayLike | None = None,
    field: Literal["exact"] | Any = "exact",
    scan_to: float | None = None,
    scan_points: int | None = None,
) -> StabilityLimit:
    """Largest stable learning rate of block descent on f = x^T A x/2 (T4, T5; tight).

    A               symmetric n x n: array, scipy sparse matrix or LinearOperator
    blocks          the partition of the n coordinates; may be left out for order 'full'
    order           'cyclic' (blocks as given), a sequence of block numbers that names each at least once,
    'full'
                    (all blocks at every step), 'random' (one block a step, uniform: mean-square stability)
    momentum, idle  beta in [0, 1) and what idle blocks do (see `bcd_theory.cycle`)
    normalisation   'ema': m <- beta m + (1 - beta) g; 'heavy-ball': m <- beta m + g
    preconditioner  positive vector D: the step uses g/D, and everything below is said of D^-1/2 A D^-1/2
    field           'exact' (the gradient A x) or a square matrix G, not necessarily symmetric: the step
    uses G x
    scan_to         how far to look for stable intervals. Default without momentum: as far as one can exist
    (the
                    determinant of the cycle, prod |1 - eta lambda(A_ii)|, must be below 1); with momentum:
                    3 times the uncoupled limit of the least curved block
    scan_points     learning rates in the scan, by default 100 to 1000, and 12 to 24 for states of more than
                    DENSE_SIZE numbers: a window narrower than their distance can be missed

    An eigenvalue of A below -1e-10 |A| is a saddle: learning_rate 0, `positive_part_limit` beside it. One
    between -1e-10 |A| and 1e-10 |A| counts as 0. Raises ValueError for an asymmetric A and for inconsistent
    input.

    >>> result = stability_limit(np.array([[1, 0.9], [0.9, 1]]), [[0], [1]])
    >>> round(result.learning_rate, 9), round(result.spectral_radius(1.5), 9), result.stable_again_later
    (2.0, 0.5, False)
    """
    problem = analyse(A if isinstance(field, str) else field, preconditioner, isinstance(field, str))
    if isinstance(field, str) and field != "exact":
        raise ValueError(f"field is {field!r}, expected 'exact' or a matrix")
    if not isinstance(field, str) and np.shape(A)[:1] != (problem.n,):
        raise ValueError(f"field is {problem.n} x {problem.n}, but A has shape {np.shape(A)}")
    return _Solver(problem, blocks, order, momentum, idle, normalisation, scan_to, scan_points).solve()


class _Solver:
    """One call of `stability_limit`: checks, picks the method, scans, brackets, refines."""

    def __init__(
        self,
        problem: Quadratic,
        blocks: Partition | Sequence[Iterable[int]] | None,
        order: Order | Sequence[int],
        momentum: float,
        idle: str,
        normalisation: str,
        scan_to: float | None,
        scan_points: int | None,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum is {momentum}, expected a number in [0, 1)")
        if idle not in ("momentum", "frozen"):
            raise ValueError(f"idle is {idle!r}, expected 'momentum' or 'frozen'")
        if normalisation not in ("ema", "heavy-ball"):
            raise ValueError(f"normalisation is {normalisation!r}, expected 'ema' or 'heavy-ball'")
        if scan_to is not None and not 0.0 < scan_to < np.inf:
            raise ValueError(f"scan_to is {scan_to}, expected a positive number")
        if scan_points is not None and scan_points < 8:
            raise ValueError(f"scan_points is {scan_points}, expected at least 8")
        self.problem, self.momentum, self.idle = problem, float(momentum), idle
        self.scan_to, self.scan_points = scan_to, scan_points
        self.gain = 1.0 if normalisation == "heavy-ball" else 1.0 - self.momentum
        self.order, self.partition, sequence = resolve_order(order, blocks, problem.n)
        self.block_smoothness: tuple[float, ...] = (problem.norm,)
        self.block_spectra: list[NDArray[np.complex128]] = []
        if len(self.partition) > 1:
            parts = [problem.block(b) for b in self.partition.arrays()]
            if problem.symmetric:
                spectra: list[NDArray[Any]] = [np.linalg.eigvalsh((b + b.T) / 2) for b in parts]
                self.block_smoothness = tuple(float(np.max(np.abs(s))) for s in spectra)
            else:
                spectra = [np.linalg.eigvals(b) for b in parts]
                self.block_smoothness = tuple(float(np.linalg.norm(b, 2)) for b in parts)
            self.block_spectra = [s.astype(complex) for s in spectra]
        free = problem.n * (1 if self.momentum == 0.0 else 2) - problem.null_space.shape[1]
        # (M - I)^-1 is written for cycles that step each block once, and not for a singular non-symmetric field,
        # whose two kernels differ.
        invertible = len(sequence) == len(self.partition) and (
            problem.symmetric or problem.null_space.shape[1] == 0
        )
        self.dense = free <= DENSE_SIZE or not invertible or self.order == "random"
        self.cycle = CycleMap(
            self.partition,
            block_rows(problem.dense if self.dense else problem.matrix, self.partition),
            sequence,
            self.momentum,
            self.gain,
            "frozen" if idle == "frozen" else "momentum",
        )
        self.evaluations = 0

    def solve(self) -> StabilityLimit:
        problem = self.problem
        if problem.norm == 0.0:
            return self._result(
                np.inf, ((0.0, np.inf),), "no curvature", "A = 0: every start is a minimiser", "none"
            )
        if problem.is_saddle:
            return self._saddle()
        if not problem.symmetric:
            values = np.linalg.eigvals(problem.dense)
            values = values[np.abs(values) > TOLERANCE * problem.norm]
            if values.size and values.real.min() < -TOLERANCE * problem.norm:
                text = f"the field has an eigenvalue with negative real part ({values.real.min():.6g}): unstable at 0"
                return self._result(0.0, (), "unstable field", text, "closed form")
        if self.order == "full" and problem.symmetric:
            return self._full()
        if self.order == "random":
            return self._random()
        if self.dense:
            dense = DenseSpectrum(self.cycle, *self.problem.complement())
            return self._scan(dense.excess, dense.excess, dense.critical, "dense")
        krylov = KrylovSpectrum(self.cycle, problem.solver(), problem.null_space)
        return self._scan(krylov.signs, krylov.excess, krylov.critical, "krylov", krylov.radius)

    def _dense_radius(self, eta: float) -> float:
        excess = DenseSpectrum(self.cycle, *self.problem.complement()).excess(np.array([eta]))
        return float(np.sqrt(1 + excess[0]))

    def _full(self) -> StabilityLimit:
        q, largest = self.momentum, self.problem.norm
        limit = 2 * (1 + q) / (self.gain * largest)
        _, vector = top_eigenpair(self.problem.matrix, self.problem.n)
        return self._result(
            limit,
            ((0.0, limit),),
            "limit",
            "2 (1 + beta)/(c L), the only limit",
            "closed form",
            critical=complex(-1.0),
            mode=vector,
            radius=self._full_radius,
        )

    def _full_radius(self, eta: float) -> float:
        # nu^2 + nu (1 - beta + c eta lambda) + c eta lambda = 0 for each lambda, nu = mu - 1.
        values = self.problem.spectrum[0]
        drive = self.gain * eta * values[values > TOLERANCE * self.problem.norm].astype(complex)
        b = 1 - self.momentum + drive
        large = -(b + np.sqrt(b * b - 4 * drive)) / 2
        roots = np.concatenate([large, drive / large])
        return float(np.max(np.sqrt(1 + growth(roots)), initial=0.0))

    def _saddle(self) -> StabilityLimit:
        lowest = self.problem.lowest
        positive = self.problem.positive_part()
        part = 0.0
        if np.any(positive):
            again = analyse(positive, None, True)
            normalisation = "ema" if self.gain == 1 - self.momentum else "heavy-ball"
            order = self.order if isinstance(self.order, str) else list(self.cycle.sequence)
            part = (
                _Solver(
                    again,
                    self.partition,
                    order,
                    self.momentum,
                    self.idle,
                    normalisation,
                    self.scan_to,
                    self.scan_points,
                )
                .solve()
                .learning_rate
            )
        text = f"A has the eigenvalue {lowest:.6g}: a saddle, unstable at every learning rate"
        return self._result(0.0, (), "saddle", text, "dense", positive_part=part)

    def _random(self) -> StabilityLimit:
        if self.problem.symmetric and self.momentum == 0.0:
            values, vectors = self.problem.spectrum
            keep = values > TOLERANCE * self.problem.norm
            operator = SymmetricMeanSquare(values[keep], vectors[:, keep], self.partition.arrays())
            limit, covariance = operator.limit()
            leading = np.linalg.eigh(covariance)[1]
            mode = vectors[:, keep] @ leading[:, np.argmax(np.abs(np.linalg.eigvalsh(covariance)))]
            self.evaluations = 1
            return self._result(
                limit,
                ((0.0, limit),),
                "limit",
                "mean-square limit; the stable set of random order is one interval",
                "mean-square",
                critical=complex(1.0),
                mode=mode / np.linalg.norm(mode),
                radius=operator.radius,
            )
        basis, image = self.problem.complement()

        def radius(eta: float) -> float:
            steps = [
                quotient_matrix(self.cycle, np.array([eta]), basis, image, [j])[0]
                for j in range(len(self.partition))
            ]
            eye = np.eye(steps[0].shape[0])
            return general_radius([s + eye for s in steps])

        def excess(etas: Array) -> Array:
            return np.array([radius(float(eta)) ** 2 - 1 for eta in etas])

        return self._scan(excess, excess, None, "mean-square", radius)

    def _scan(
        self,
        rough: Callable[[Array], Array],
        excess: Callable[[Array], Array],
        critical: Callable[[float], tuple[complex, NDArray[Any]]] | None,
        method: str,
        radius: Callable[[float], float] | None = None,
    ) -> StabilityLimit:
        start, stop = self._range()
        if self.scan_to is not None:
            start = min(start, self.scan_to / 2)
        points = self.scan_points or _default_points(method, self.cycle.size, stop / start)

        def counted(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
            def call(etas: Array) -> Array:
                self.evaluations += len(etas)
                return function(etas)

            return call

        intervals, stop = scan(
            counted(rough),
            counted(excess),
            start,
            stop,
            points,
            self.scan_to is None,
            exact=method == "dense",
        )
        if not intervals or intervals[0][0] > 0.0:
            text = f"unstable at the smallest learning rate tried ({start:.3g})"
            return self._result(0.0, intervals, "not bracketed", text, method, radius=radius, stop=stop)
        limit = intervals[0][1]
        if limit >= stop:
            text = f"stable up to the end of the scan ({stop:.6g})"
            return self._result(limit, intervals, "not bracketed", text, method, radius=radius, stop=stop)
        # Just beyond the limit: at an eigenvalue +1 (singular A only) (M - I)^-1 does not exist.
        mu, mode = critical(limit * (1 + 1e-9)) if critical else (complex(1.0), None)
        text = f"stable on (0, {limit:.10g})"
        if len(intervals) > 1:
            text += " and again on " + ", ".join(f"({a:.6g}, {b:.6g})" for a, b in intervals[1:])
        return self._result(
            limit, intervals, "limit", text, method, critical=mu, mode=mode, radius=radius, stop=stop
        )

    def _range(self) -> tuple[float, float]:
        """(a learning rate known to be stable for symmetric A, where the scan ends by default)."""
        beta, unit = self.momentum, (1 - self.momentum) / self.gain
        largest = max(self.block_smoothness)
        if not self.problem.symmetric or self.order == "random":
            start = 1e-4 / self.problem.norm
        elif beta == 0.0 or self.idle == "frozen":
            start = 2 / largest  # T1, T6b
        else:
            # T6: kappa = 1 for any order, less when every block is stepped once a cycle.
            kappa, p = 1.0, len(self.cycle.sequence)
            if p == len(self.partition):
                kappa = float(np.sqrt((1 - beta) * (1 + beta**p) / ((1 + beta) * (1 - beta**p))))
            start = 1 / (largest / 2 + kappa * beta * self.problem.norm / (1 - beta))
        start *= 1 - 1e-3
        if self.scan_to is not None:
            return start * unit, self.scan_to
        positive = [s for s in self.block_smoothness if s > TOLERANCE * self.problem.norm]
        if self.order == "full":
            stop = 4 * (1 + beta) / ((1 - beta) * self.problem.norm)
        elif beta == 0.0 and self.order != "random":
            stop = self._determinant_limit(start)
        else:
            p = len(self.cycle.sequence) if self.idle == "momentum" and self.order != "random" else 1
            q = beta**p
            stop = 3 * 2 * (1 + q) / ((1 - q) * min(positive))
        return start * unit, max(stop, 1.5 * start) * unit

    def _determinant_limit(self, start: float) -> float:
        """The last eta at which the cycle's determinant, prod |1 - eta lambda(A_ii)|, is below 1."""
        values = np.concatenate([self.block_spectra[j] for j in self.cycle.sequence])
        values = values[np.abs(values) > TOLERANCE * self.problem.norm]
        # Beyond 2 Re lambda/|lambda|^2 a factor is above 1.
        last = float(np.max(2 * values.real / np.abs(values) ** 2, initial=start))
        if last <= start:
            return start * 1.01
        etas = np.geomspace(start, last * 1.01, 4096)
        below = np.zeros(len(etas), dtype=bool)
        with np.errstate(divide="ignore"):
            for part in np.array_split(np.arange(len(etas)), 1 + len(etas) * len(values) // 4_000_000):
                below[part] = np.sum(np.log(np.abs(1 - etas[part, None] * values)), axis=1) < 0
        return float(etas[min(int(np.max(np.flatnonzero(below), initial=0)) + 2, len(etas) - 1)])

    def _result(
        self,
        limit: float,
        intervals: tuple[tuple[float, float], ...],
        diagnosis: str,
        message: str,
        method: str,
        critical: complex = complex(np.nan, np.nan),
        mode: NDArray[Any] | None = None,
        radius: Callable[[float], float] | None = None,
        positive_part: float | None = None,
        stop: float | None = None,
    ) -> StabilityLimit:
        return StabilityLimit(
            learning_rate=limit,
            intervals=intervals,
            scan_to=limit if stop is None else stop,
            critical_eigenvalue=critical,
            slowest_mode=mode,
            diagnosis=diagnosis,
            positive_part_limit=positive_part,
            null_dimension=self.problem.null_space.shape[1],
            null_space=self.problem.null_space,
            smoothness=self.problem.norm,
            block_smoothness=self.block_smoothness,
            method=method,
            evaluations=self.evaluations,
            products=self.cycle.products,
            success=diagnosis in ("limit", "no curvature"),
            message=message,
            _radius=self._dense_radius if radius is None else radius,
        )


class DenseSpectrum:
    """Eigenvalues of the cycle map on the quotient, many learning rates at a time."""

    def __init__(self, cycle: CycleMap, basis: Array, image: Array) -> None:
        self.cycle, self.basis, self.image = cycle, basis, image

    def excess(self, etas: Array) -> Array:
        """Largest |mu|^2 - 1 at each learning rate."""
        nu = np.linalg.eigvals(self._matrix(etas)).astype(complex)
        return np.asarray(np.max(growth(nu), axis=-1, initial=-1.0))

    def critical(self, eta: float) -> tuple[complex, NDArray[Any]]:
        """The eigenvalue of largest modulus and the x part of its eigenvector, in unit norm."""
        nu, vectors = np.linalg.eig(self._matrix(np.array([eta]))[0])
        worst = int(np.argmax(growth(nu.astype(complex))))
        mode = self.basis @ vectors[: self.basis.shape[1], worst]
        return complex(1 + nu[worst]), mode / np.linalg.norm(mode)

    def _matrix(self, etas: Array) -> Array:
        return quotient_matrix(self.cycle, np.asarray(etas), self.basis, self.image)


def _default_points(method: str, size: int, ratio: float) -> int:
    if method == "dense":
        return 1000 if size <= 24 else 200 if size <= 48 else 100
    # Large problems: steps of a tenth, of more over a range of more than tenfold.
    return int(np.clip(np.log(ratio) / np.log(1.1), 12, 24))


def resolve_order(
    order: Order | Sequence[int], blocks: Partition | Sequence[Iterable[int]] | None, n: int
) -> tuple[Order | tuple[int, ...], Partition, tuple[int, ...]]:
    """(the order, the partition stepped over, block numbers of one cycle)."""
    if isinstance(order, str) and order not in ("cyclic", "full", "random"):
        raise ValueError(
            f"order is {order!r}, expected 'cyclic', 'full', 'random' or a sequence of block numbers"
        )
    if blocks is None and order != "full":
        raise ValueError(f"order {order!r} needs blocks, found none")
    partition = Partition([range(n)]) if blocks is None else as_partition(blocks, n)
    if order == "full" or len(partition) == 1:
        return "full", Partition([range(n)]), (0,)
    if isinstance(order, str):
        return order, partition, tuple(range(len(partition)))
    sequence = tuple(int(j) for j in order)
    if set(sequence) != set(range(len(partition))):
        raise ValueError(
            f"order is {list(sequence)}, expected every block number from 0 to {len(partition) - 1}"
        )
    return sequence, partition, sequence
