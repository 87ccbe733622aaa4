"""Is a cycle map too large for dense eigenvalues stable? Its dangerous eigenvalues by a restarted Krylov space (T4).

M(eta) is only applied. Eigenvalues mu = 1 + nu of M - I at the rim of the unit disk decide, and a Krylov
space finds those first, but for the slow modes: near mu = 1 the spectrum of an ill-conditioned problem is a
crowd that no Krylov space resolves. They need no resolving, because a cycle has the eigenvalue 1 on ker A
only: they are left out of the restart (|nu| < SLOW), unless they converge by themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg as sla
from numpy.typing import NDArray

from bcd_theory.cycle import Array, CycleMap, growth

# Ritz values within this distance of 1 are slow modes.
SLOW = 0.05
# A Ritz value with |mu|^2 - 1 above -RIM is dangerous: it has to converge before a verdict.
RIM = 0.05


class KrylovSpectrum:
    """Largest |mu|^2 - 1 of the cycle map on the quotient by ker A, by Krylov-Schur restarts.

    null_space  orthonormal basis of ker A (n x d), projected out of x
    power       cycles taken as one step of the Krylov space; raised where the rim is crowded
    """

    def __init__(self, cycle: CycleMap, null_space: Array) -> None:
        self.cycle, self.null_space = cycle, null_space
        self.power, self.max_restarts = 1, 8
        self._warm: Array | None = None

    def excess(self, etas: Array) -> Array:
        """Largest |mu|^2 - 1 at each learning rate."""
        return np.array([self._decide(float(eta), 1e-9, False)[0] for eta in etas])

    def signs(self, etas: Array) -> Array:
        """A number of the same sign, at less cost."""
        return np.array([self._decide(float(eta), 1e-3, True)[0] for eta in etas])

    def critical(self, eta: float) -> tuple[complex, NDArray[Any]]:
        """The dangerous eigenvalue of largest modulus and the x part of its eigenvector, in unit norm."""
        _, vector = self._decide(eta, 1e-9, False)
        # Its eigenvalue of one cycle, not of `power` of them, as a Rayleigh quotient.
        parts = np.column_stack([vector.real, vector.imag])
        image = self.cycle.difference(eta, parts) @ np.array([1, 1j])
        mu = 1 + np.vdot(vector, self._project(image)) / np.vdot(vector, vector)
        mode = vector[: self.cycle.n]
        return complex(mu), mode / np.linalg.norm(mode)

    def _apply(self, eta: float, v: Array) -> Array:
        """(M^power - I) v."""
        change = self._project(self.cycle.difference(eta, v[:, None])[:, 0])
        for _ in range(self.power - 1):
            change += self._project(self.cycle.difference(eta, (v + change)[:, None])[:, 0])
        return change

    def _project(self, w: NDArray[Any]) -> NDArray[Any]:
        if self.null_space.shape[1]:
            x = w[: self.cycle.n]
            x -= self.null_space @ (self.null_space.T @ x)
        return w

    def _decide(self, eta: float, tolerance: float, sign_only: bool) -> tuple[float, NDArray[Any]]:
        """(largest |mu|^2 - 1, its eigenvector)."""
        while True:
            found = self._attempt(eta, tolerance, sign_only)
            if found is not None:
                self.power = max(1, self.power // 2) if found[2] == 0 else self.power
                return found[:2]
            if self.power >= 256:
                raise ArithmeticError(f"the spectrum at learning rate {eta:.6g} did not settle")
            # A crowd at the rim: several cycles at a time spread it out, by angle and by modulus.
            self.power *= 2 if self.power > 1 else 4

    def _attempt(
        self, eta: float, tolerance: float, sign_only: bool
    ) -> tuple[float, NDArray[Any], int] | None:
        """The same and the number of restarts, or None where too many are needed."""
        # A crowd needs a larger space, the usual few rim eigenvalues do not.
        size = self.cycle.size
        m, self.keep = (64, 20) if self.power == 1 else (96, 40)
        m = min(m, size - self.null_space.shape[1])
        self.keep = max(1, min(self.keep, m - 4))
        rng = np.random.default_rng(0)
        start = rng.normal(size=size)
        if self._warm is not None:
            start = start / np.linalg.norm(start) * 1e-2 + self._warm
        start = self._project(start)
        basis = np.zeros((size, m + 1))
        basis[:, 0] = start / np.linalg.norm(start)
        h = np.zeros((m + 1, m))
        have, quiet = 0, 0
        for restart in range(self.max_restarts):
            length = self._expand(eta, basis, h, have)
            square = h[:length, :length]
            nu, y = np.linalg.eig(square)
            nu = nu.astype(complex)
            residual = np.abs(h[length, :length] @ y) if length == m else np.zeros(length)
            rise = growth(nu)
            converged = residual <= tolerance * np.maximum(np.abs(nu), 1e-3)
            slow = np.abs(nu) < SLOW
            dangerous = (rise > -RIM) & ~slow
            # Only what may exceed the largest converged eigenvalue is worth waiting for.
            best_so_far = np.max(rise[converged & ~slow], initial=-np.inf)
            pending = dangerous & ~converged & (rise > best_so_far)
            if sign_only and best_so_far > 10 * tolerance:
                pending[:] = False
            counted = converged | ~slow
            quiet = 0 if np.any(pending) else quiet + 1
            # Nothing dangerous in the first space may mean that it has not come up yet: look once more.
            enough = quiet >= (1 if best_so_far > 0 else 2)
            if enough or length < m:
                choice = np.flatnonzero(counted) if np.any(counted) else np.arange(length)
                best = int(choice[np.argmax(rise[choice])])
                vector = basis[:, :length] @ y[:, best]
                self._remember(basis[:, :length], y, rise, slow)
                return float(np.expm1(np.log1p(rise[best]) / self.power)), vector, restart
            have = self._restart(basis, h, rise, slow)
        return None

    def _expand(self, eta: float, basis: Array, h: Array, have: int) -> int:
        """Arnoldi steps from `have` columns up to the full dimension; returns the dimension reached."""
        m = int(h.shape[1])
        for j in range(have, m):
            w = self._apply(eta, basis[:, j])
            before = float(np.linalg.norm(w))
            for _ in range(2):  # twice is enough
                coefficients = basis[:, : j + 1].T @ w
                h[: j + 1, j] += coefficients
                w -= basis[:, : j + 1] @ coefficients
            h[j + 1, j] = np.linalg.norm(w)
            if h[j + 1, j] <= 1e-14 * max(before, 1e-300):
                return j + 1
            basis[:, j + 1] = w / h[j + 1, j]
        return m

    def _restart(self, basis: Array, h: Array, rise: Array, slow: NDArray[np.bool_]) -> int:
        """Keep the Schur vectors of the Ritz values that grow most, slow ones last."""
        m = int(h.shape[1])
        rank = np.where(slow, rise - 10.0, rise)
        threshold = np.sort(rank)[::-1][self.keep - 1]

        def wanted(real: float, imag: float) -> bool:
            value = complex(real, imag)
            own = growth(np.array([value]))[0] - (10.0 if abs(value) < SLOW else 0.0)
            return bool(own >= threshold - 1e-9)

        t, z, kept = sla.schur(h[:m, :m], output="real", sort=wanted)
        kept = min(kept, m - 4)
        if kept < m and t[kept, kept - 1] != 0.0:
            kept -= 1  # never cut a conjugate pair
        last = h[m, :m] @ z
        basis[:, :kept] = basis[:, :m] @ z[:, :kept]
        basis[:, kept] = basis[:, m]
        h[:] = 0.0
        h[:kept, :kept] = t[:kept, :kept]
        h[kept, :kept] = last[:kept]
        return int(kept)

    def _remember(self, basis: Array, y: NDArray[Any], rise: Array, slow: NDArray[np.bool_]) -> None:
        """Start the next learning rate from the sum of the leading Ritz vectors."""
        order = np.argsort(np.where(slow, rise - 10.0, rise))[::-1][:6]
        vectors = basis @ y[:, order]
        total = np.sum(vectors.real / np.maximum(np.linalg.norm(vectors.real, axis=0), 1e-300), axis=1)
        length = np.linalg.norm(total)
        self._warm = total / length if length > 0 else None
