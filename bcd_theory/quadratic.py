"""What a stability analysis needs to know of the matrix before it starts: symmetry, scale, kernel, signs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.linalg as sla
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.linalg import LinearOperator, aslinearoperator, cg, eigsh, splu

Array = NDArray[np.float64]

# |lambda| up to this share of |A| counts as 0; below minus that, A is a saddle.
TOLERANCE = 1e-10
# Up to this size everything is read off a full eigendecomposition; above it a Cholesky test comes first.
EIGEN_SIZE = 128
# Up to this size a matrix that is only known by its products is written out (n products, n^2 numbers).
DENSE_SIZE = 5000


@dataclass(frozen=True)
class Quadratic:
    """The (preconditioned) matrix G of the gradient field G x, and its kernel.

    matrix      dense array, CSR matrix or LinearOperator
    symmetric   whether G is the Hessian A of f = x^T A x/2
    norm        |G| (spectral)
    lowest      lowest eigenvalue of a symmetric G, as far as it is known: 0 stands for 'no negative one'
    null_space  orthonormal basis of ker G, n x d
    """

    matrix: Any
    n: int
    symmetric: bool
    norm: float
    lowest: float
    null_space: Array

    @property
    def is_saddle(self) -> bool:
        return self.symmetric and self.lowest < -TOLERANCE * self.norm

    @cached_property
    def dense(self) -> Array:
        """G written out."""
        return written_out(self.matrix, self.n)

    @cached_property
    def spectrum(self) -> tuple[Array, Array]:
        """All eigenvalues and eigenvectors of a symmetric G."""
        values, vectors = np.linalg.eigh(self.dense)
        return values, vectors

    def complement(self) -> tuple[Array, Array]:
        """(V, G V): an orthonormal basis V of the complement of ker G, with G V to high relative accuracy."""
        if self.symmetric:
            values, vectors = self.spectrum
            keep = np.abs(values) > TOLERANCE * self.norm
            return vectors[:, keep], vectors[:, keep] * values[keep]
        u, s, vt = np.linalg.svd(self.dense)
        keep = s > TOLERANCE * self.norm
        return vt[keep].T, u[:, keep] * s[keep]

    def solver(self) -> Callable[[Array], Array]:
        """z -> x with G x = z, for columns z in the range of G; x in the complement of ker G (symmetric G)."""
        if self.null_space.shape[1]:
            if self.n > DENSE_SIZE:
                return self._conjugate_gradients
            values, vectors = self.spectrum
            keep = np.abs(values) > TOLERANCE * self.norm
            v, inverse = vectors[:, keep], 1 / values[keep]
            return lambda z: np.asarray(v @ (inverse[:, None] * (v.T @ z)))
        if is_sparse(self.matrix):
            factor = splu(self.matrix.tocsc())
            return lambda z: np.asarray(factor.solve(z))
        if not isinstance(self.matrix, np.ndarray):
            return self._conjugate_gradients
        if self.symmetric:
            cholesky = sla.cho_factor(self.matrix, check_finite=False)
            return lambda z: np.asarray(sla.cho_solve(cholesky, z, check_finite=False))
        lu = sla.lu_factor(self.matrix, check_finite=False)
        return lambda z: np.asarray(sla.lu_solve(lu, z, check_finite=False))

    def _conjugate_gradients(self, z: Array) -> Array:
        columns = []
        for column in z.T:
            x, failed = cg(self.matrix, column, rtol=1e-12, maxiter=20 * self.n)
            if failed:
                raise ArithmeticError(f"a solve with A did not converge in {20 * self.n} products")
            columns.append(x)
        return np.column_stack(columns)

    def positive_part(self) -> Array:
        """A with its negative eigenvalues put to 0."""
        values, vectors = self.spectrum
        keep = values > TOLERANCE * self.norm
        return np.asarray((vectors[:, keep] * values[keep]) @ vectors[:, keep].T)

    def block(self, index: NDArray[np.intp]) -> Array:
        """G's diagonal block on `index`."""
        if isinstance(self.matrix, np.ndarray):
            return self.matrix[np.ix_(index, index)]
        if is_sparse(self.matrix):
            return np.asarray(self.matrix[index][:, index].toarray())
        columns = np.zeros((self.n, len(index)))
        columns[index, np.arange(len(index))] = 1.0
        return np.asarray(self.matrix @ columns)[index]


def analyse(matrix: Any, preconditioner: ArrayLike | None, symmetric: bool) -> Quadratic:
    """Check and precondition `matrix`; find its norm, its kernel and (symmetric) whether it is a saddle."""
    prepared, n = _prepare(matrix)
    if preconditioner is not None:
        prepared = _preconditioned(prepared, n, preconditioner)
    if symmetric:
        _check_symmetric(prepared, n)
    if n > DENSE_SIZE and not isinstance(prepared, np.ndarray):
        if not symmetric:
            raise ValueError(
                f"a non-symmetric field of size {n} has to be a dense array, found {type(matrix)}"
            )
        return _analyse_by_products(prepared, n)
    dense = written_out(prepared, n)
    if isinstance(prepared, LinearOperator):
        prepared = dense
    if not symmetric:
        return _analyse_field(prepared, dense, n)
    if n > EIGEN_SIZE and np.any(dense):
        norm = float(np.abs(eigsh(dense, k=1, which="LM", return_eigenvectors=False, v0=_start(n))[0]))
        try:
            # A - 1e-10 |A| I positive definite: no kernel and no saddle, for the price of one factorisation.
            shifted = dense.copy()
            shifted[np.diag_indices(n)] -= TOLERANCE * norm
            sla.cholesky(shifted, overwrite_a=True, check_finite=False)
            return Quadratic(prepared, n, True, norm, 0.0, np.zeros((n, 0)))
        except sla.LinAlgError:
            pass
    values, vectors = np.linalg.eigh((dense + dense.T) / 2)
    norm = float(np.max(np.abs(values)))
    null = vectors[:, np.abs(values) <= TOLERANCE * norm]
    found = Quadratic(prepared, n, True, norm, min(float(values[0]), 0.0), null)
    found.__dict__["spectrum"] = (values, vectors)
    return found


def is_sparse(matrix: Any) -> bool:
    # Not issparse itself: as a type guard it narrows Any to a base class without the methods used here.
    return bool(sp.issparse(matrix))


def written_out(matrix: Any, n: int) -> Array:
    if isinstance(matrix, np.ndarray):
        return matrix
    if is_sparse(matrix):
        return np.asarray(matrix.toarray(), dtype=np.float64)
    return np.asarray(matrix @ np.eye(n), dtype=np.float64)


def _prepare(matrix: Any) -> tuple[Any, int]:
    if is_sparse(matrix):
        prepared: Any = matrix.tocsr().astype(np.float64)
        numbers = prepared.data
    elif isinstance(matrix, LinearOperator):
        prepared, numbers = matrix, np.zeros(0)
    else:
        array = np.asarray(matrix)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"the matrix holds {array.dtype}, expected real numbers")
        prepared = np.ascontiguousarray(array, dtype=np.float64)
        numbers = prepared
    shape = prepared.shape
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(f"the matrix has shape {shape}, expected n x n with n >= 1")
    if not np.all(np.isfinite(numbers)):
        raise ValueError("the matrix has a non-finite entry, expected finite numbers")
    return prepared, int(shape[0])


def _preconditioned(matrix: Any, n: int, preconditioner: ArrayLike) -> Any:
    d = np.asarray(preconditioner, dtype=np.float64)
    if d.shape != (n,) or not np.all(np.isfinite(d)) or np.any(d <= 0):
        raise ValueError(f"preconditioner has shape {d.shape}, expected {n} positive finite numbers")
    root = 1 / np.sqrt(d)
    if isinstance(matrix, np.ndarray):
        return matrix * root * root[:, None]
    scaling = sp.diags_array(root)
    if is_sparse(matrix):
        return (scaling @ matrix @ scaling).tocsr()
    return aslinearoperator(scaling) @ matrix @ aslinearoperator(scaling)


def _check_symmetric(matrix: Any, n: int) -> None:
    if isinstance(matrix, LinearOperator):
        rng = np.random.default_rng(0)
        u, v = rng.normal(size=(2, n))
        left, right = float(u @ (matrix @ v)), float(v @ (matrix @ u))
        scale = float(np.linalg.norm(matrix @ v) * np.linalg.norm(u))
        difference = abs(left - right)
    else:
        difference = float(np.max(np.abs(matrix - matrix.T)))
        scale = float(np.max(np.abs(matrix)))
    if difference > TOLERANCE * scale:
        raise ValueError(
            f"A is not symmetric (a difference of {difference:.3g} at scale {scale:.3g}); pass a non-symmetric "
            "gradient field as `field`"
        )


def _analyse_field(prepared: Any, dense: Array, n: int) -> Quadratic:
    if n > EIGEN_SIZE:
        # Pivoted QR shows the rank at a fifth of the cost of singular values.
        r, _ = sla.qr(dense, mode="r", pivoting=True)
        scale = np.abs(np.diag(r))
        if scale[-1] > TOLERANCE * scale[0]:
            return Quadratic(prepared, n, False, _spectral_norm(dense), 0.0, np.zeros((n, 0)))
    _, s, vt = np.linalg.svd(dense)
    norm = float(s[0])
    return Quadratic(prepared, n, False, norm, 0.0, vt[s <= TOLERANCE * norm].T)


def _analyse_by_products(matrix: Any, n: int) -> Quadratic:
    norm = float(np.abs(eigsh(matrix, k=1, which="LM", return_eigenvectors=False, v0=_start(n))[0]))
    if norm == 0.0:
        return Quadratic(matrix, n, True, 0.0, 0.0, np.eye(n))
    count = 16
    values, vectors = eigsh(matrix, k=count, which="SA", v0=_start(n), ncv=8 * count, maxiter=20 * n)
    null = vectors[:, np.abs(values) <= TOLERANCE * norm]
    if null.shape[1] == count:
        raise ValueError(
            f"A of size {n} has a kernel of {count} dimensions or more, too large to find by products alone; pass "
            "its restriction to the range"
        )
    return Quadratic(matrix, n, True, norm, min(float(values.min()), 0.0), null)


def top_eigenpair(matrix: Any, n: int) -> tuple[float, Array]:
    """Eigenvalue of largest modulus of a symmetric matrix, and its unit eigenvector."""
    if n <= EIGEN_SIZE:
        values, vectors = np.linalg.eigh(written_out(matrix, n))
        i = int(np.argmax(np.abs(values)))
        return float(values[i]), vectors[:, i]
    values, vectors = eigsh(matrix, k=1, which="LM", v0=_start(n))
    return float(values[0]), vectors[:, 0]


def _spectral_norm(dense: Array) -> float:
    n = len(dense)
    square = LinearOperator((n, n), matvec=lambda x: dense.T @ (dense @ x), dtype=np.float64)
    return float(np.sqrt(eigsh(square, k=1, which="LA", return_eigenvectors=False, v0=_start(n))[0]))


def _start(n: int) -> Array:
    return np.random.default_rng(0).normal(size=n)
