"""Random block selection: mean-square stability, the radius of X -> E[M X M^T] < 1 (T4), never formed as n^2 x n^2.

Symmetric A without momentum. On the quotient by ker A, A = F F^T with F of full column rank, and in the coordinates
z = F^T x a step on block i is the symmetric map S_i = I - eta F_i^T F_i (F_i: rows of F in block i, chosen with
probability 1/p). So E is self-adjoint:

    E(Z) = Z - eta T1(Z) + eta^2 T2(Z),  T1(Z) = (Lam Z + Z Lam)/p,  T2(Z) = (1/p) sum_i F_i^T (F_i Z F_i^T) F_i,

with Lam = F^T F diagonal. E is a positive map, hence its radius is its largest eigenvalue, and that is < 1 iff
eta T2 - T1 is negative definite: the stable set is **one interval**, (0, 1/lambda_max(T1^-1/2 T2 T1^-1/2)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh

Array = NDArray[np.float64]


@dataclass
class SymmetricMeanSquare:
    """The operators T1 and T2 above.

    eigenvalues, vectors   positive eigenvalues of A and their eigenvectors (n x r)
    blocks                 index arrays
    applications           how often T2 was applied so far
    """

    eigenvalues: Array
    vectors: Array
    blocks: Sequence[NDArray[np.intp]]
    applications: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        factor = self.vectors * np.sqrt(self.eigenvalues)
        self._rows = [factor[b] for b in self.blocks]
        self._t1 = (self.eigenvalues[:, None] + self.eigenvalues) / len(self.blocks)

    def t2(self, z: Array) -> Array:
        self.applications += 1
        out = np.zeros_like(z)
        for rows in self._rows:
            out += rows.T @ (rows @ z @ rows.T) @ rows
        return out / len(self._rows)

    def limit(self) -> tuple[float, Array]:
        """(largest stable eta, the covariance Z that stops contracting there)."""
        scale = 1 / np.sqrt(self._t1)
        top, z = _top_symmetric(lambda z: scale * self.t2(scale * z), len(self.eigenvalues))
        return 1 / top, scale * z

    def radius(self, eta: float) -> float:
        return _top_symmetric(lambda z: z - eta * self._t1 * z + eta**2 * self.t2(z), len(self.eigenvalues))[
            0
        ]


def general_radius(steps: Sequence[Array]) -> float:
    """Radius of X -> mean of S X S^T over the given step matrices (any square matrices of one size).

    The map is positive, so its radius is an eigenvalue with a positive semidefinite eigenvector, which an Arnoldi
    start at X = I always sees.
    """
    size = steps[0].shape[0]

    def apply(flat: Array) -> Array:
        x = flat.reshape(size, size)
        out = np.zeros_like(x)
        for s in steps:
            out += s @ x @ s.T
        return (out / len(steps)).ravel()

    if size <= 8:
        eye = np.eye(size * size)
        return float(np.max(np.abs(np.linalg.eigvals(np.column_stack([apply(e) for e in eye])))))
    operator = LinearOperator((size * size, size * size), matvec=apply, dtype=np.float64)
    try:
        top = eigs(operator, k=1, which="LM", v0=np.eye(size).ravel(), return_eigenvectors=False, tol=1e-12)
    except ArpackNoConvergence as error:
        raise ArithmeticError(f"the mean-square radius did not converge ({error})") from None
    return float(np.abs(top[0]))


def _top_symmetric(apply: Callable[[Array], Array], r: int) -> tuple[float, Array]:
    """Largest eigenvalue of a self-adjoint positive map on r x r matrices, and its eigenvector."""
    if r * r <= 36:
        eye = np.eye(r * r)
        dense = np.column_stack([apply(e.reshape(r, r)).ravel() for e in eye])
        values, vectors = np.linalg.eigh((dense + dense.T) / 2)
        return float(values[-1]), vectors[:, -1].reshape(r, r)
    operator = LinearOperator(
        (r * r, r * r), matvec=lambda flat: apply(flat.reshape(r, r)).ravel(), dtype=np.float64
    )
    value, vector = eigsh(operator, k=1, which="LA", v0=np.eye(r).ravel(), tol=1e-12, ncv=min(r * r, 20))
    return float(value[0]), vector[:, 0].reshape(r, r)
