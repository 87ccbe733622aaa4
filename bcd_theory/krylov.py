"""Is a cycle map too large for dense eigenvalues stable? The eigenvalues that decide, by two Krylov spaces (T4).

Write mu = 1 + nu. |mu| < 1 iff 2 Re nu + |nu|^2 < 0, or, divided by 2 |nu|^2, iff Re(1/nu) < -1/2.

- Far from mu = 1 (|nu| > FAR) the eigenvalues at the rim of the unit disk are outermost in the spectrum of
M - I: a
  Krylov space of M - I finds them first.
- Near mu = 1 an ill-conditioned problem has a crowd of slow modes that no Krylov space of M resolves, and a
limit can
  hide in it (small angles with frozen momentum; mu = +1 itself where A is singular). (M - I)^-1 spreads
  that crowd out over a half plane, and the eigenvalues that decide are its rightmost ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg as sla
from numpy.typing import NDArray

from bcd_theory.cycle import Array, CycleMap, growth
from bcd_theory.inverse_cycle import InverseCycle

Complex = NDArray[np.complex128]

# The two searches overlap: M - I answers for |nu| > FAR, its inverse for |nu| < NEAR.
FAR, NEAR = 0.4, 1.0
# A Ritz value closer to the rim than this has to converge before a verdict.
RIM = {"far": 0.02, "near": 0.02, "slow": np.inf}


# (dimension, vectors kept at a restart, restarts) of the Krylov spaces tried in turn.
FIRST = 48
SPACES = ((FIRST, 16, 3), (96, 40, 3), (192, 90, 4), (384, 180, 6), (768, 360, 12))


@dataclass
class Found:
    """value: signed distance from the rim of the eigenvalue that exceeds it most (>= 0: unstable)."""

    value: float
    vector: NDArray[Any] | None
    clear: bool
    restarts: int


class KrylovSpectrum:
    """Sign and size of the excess over the unit disk of the cycle map on the quotient by ker A.

    solve       z -> A^+ z
    null_space  orthonormal basis of ker A (n x d)
    """

    def __init__(self, cycle: CycleMap, solve: Callable[[Array], Array], null_space: Array) -> None:
        self.cycle, self.solve, self.null_space = cycle, solve, null_space
        self._first = "far"
        self._level = {"far": 0, "near": 0, "slow": 0}
        self._warm: dict[str, Array | None] = {"far": None, "near": None, "slow": None}

    def excess(self, etas: Array) -> Array:
        """At each learning rate a number that is >= 0 iff the cycle is unstable, and goes through 0 at a limit."""
        return np.array([self._worst(float(eta), 1e-9, False).value for eta in etas])

    def signs(self, etas: Array) -> Array:
        """A number of the same sign, at less cost."""
        return np.array([self._worst(float(eta), 1e-4, True).value for eta in etas])

    def radius(self, eta: float) -> float:
        """Spectral radius; it has to converge wherever it lies, so it may cost more than a verdict."""
        slow = self._search("slow", eta, 1e-9, False)
        floor = slow.value if slow.vector is not None else -1.0
        found = (slow, self._search("far", eta, 1e-9, False, floor))
        vectors = [f.vector for f in found if f.vector is not None and f.value >= floor]
        nu = np.array([self._rayleigh(eta, vector) for vector in vectors])
        return float(np.sqrt(1 + np.max(growth(nu), initial=-1.0)))

    def critical(self, eta: float) -> tuple[complex, NDArray[Any]]:
        """The eigenvalue that decides at eta, and the x part of its eigenvector in unit norm."""
        found = max(
            (self._search(which, eta, 1e-10, False) for which in ("far", "near")), key=lambda f: f.value
        )
        if found.vector is None:
            raise ArithmeticError(f"no eigenvalue near the rim at learning rate {eta:.6g}")
        mode = found.vector[: self.cycle.n]
        return 1 + self._rayleigh(eta, found.vector), mode / np.linalg.norm(mode)

    def _worst(self, eta: float, tolerance: float, sign_only: bool) -> Found:
        first = self._search(self._first, eta, tolerance, sign_only)
        if first.value >= 0.0:
            return first  # unstable, whatever the other search would say
        other = "near" if self._first == "far" else "far"
        second = self._search(other, eta, tolerance, sign_only)
        if second.value >= 0.0:
            self._first = other
        return first if first.value >= second.value else second

    def _rayleigh(self, eta: float, vector: NDArray[Any]) -> complex:
        parts = np.column_stack([vector.real, vector.imag])
        image = self._project(self.cycle.difference(eta, parts)) @ np.array([1, 1j])
        return complex(np.vdot(vector, image) / np.vdot(vector, vector))

    def _project(self, w: Array) -> Array:
        if self.null_space.shape[1]:
            x = w[: self.cycle.n]
            x -= self.null_space @ (self.null_space.T @ x)
        return w

    def _search(
        self, which: str, eta: float, tolerance: float, sign_only: bool, floor: float | None = None
    ) -> Found:
        """Krylov-Schur on M - I ('far') or its inverse ('near': the rim; 'slow': the slowest mode).

        floor   a value that the answer has to be right above (default: -RIM)
        """
        floor = -RIM[which] if floor is None else floor

        def forward(v: Array) -> Array:
            return self._project(self.cycle.difference(eta, v))

        apply: Callable[[Array], Array] = forward
        if which != "far":
            apply = InverseCycle(self.cycle, eta, self.solve, self.null_space)
        free = self.cycle.size - self.null_space.shape[1]
        for level in range(self._level[which], len(SPACES)):
            m, keep, restarts = SPACES[level]
            m = min(m, free)
            keep = max(1, min(keep, m - 4))
            found = self._krylov_schur(apply, which, m, keep, restarts, tolerance, sign_only, floor)
            if found is not None:
                # The next learning rate starts with this space, or a smaller one where this was more than
                # enough.
                roomy = found.restarts == 0 and found.value < floor
                self._level[which] = max(0, level - 1) if roomy else level
                return found
            if m == free:
                break
        raise ArithmeticError(f"the spectrum at learning rate {eta:.6g} did not settle")

    def _krylov_schur(
        self,
        apply: Callable[[Array], Array],
        which: str,
        m: int,
        keep: int,
        restarts: int,
        tolerance: float,
        sign_only: bool,
        floor: float,
    ) -> Found | None:
        size = self.cycle.size
        start = np.random.default_rng(0).normal(size=(size, 1))
        warm = self._warm[which]
        if warm is not None:
            start = 1e-2 * start / np.linalg.norm(start) + warm[:, None]
        start = self._project(start)[:, 0]
        basis = np.zeros((size, m + 1))
        basis[:, 0] = start / np.linalg.norm(start)
        h = np.zeros((m + 1, m))
        have = quiet = restart = 0
        while restart < restarts:
            # The first space is looked at on the way: a clear instability shows early.
            upto = min(m, 2 * have if have >= FIRST else FIRST) if restart == 0 else m
            length = _expand(apply, basis, h, have, upto)
            ritz, y = np.linalg.eig(h[:length, :length])
            ritz = ritz.astype(complex)
            exact = length < upto or length == size - self.null_space.shape[1]
            residual = np.zeros(length) if exact else np.abs(h[length, :length] @ y)
            value, relevant = _rim(which, ritz)
            converged = residual <= tolerance * np.abs(ritz)
            best = float(np.max(value[converged & relevant], initial=-np.inf))
            # Only what may lie beyond the outermost converged eigenvalue is worth waiting for.
            waiting = relevant & ~converged & (value > max(floor, best))
            clear = sign_only and best > 10 * tolerance
            quiet = 0 if np.any(waiting) else quiet + 1
            # A stable answer is looked at twice: what decides may not have come up in the first space.
            if exact or clear or quiet >= (1 if best > 0 else 2):
                self._remember(which, basis[:, :length], y, value, relevant)
                if not np.any(relevant):
                    return Found(-1.0, None, False, restart)
                choice = np.flatnonzero(relevant & (converged | (best == -np.inf)))
                top = int(choice[np.argmax(value[choice])])
                if best > -np.inf and not converged[top]:
                    top = int(np.argmax(np.where(converged & relevant, value, -np.inf)))
                return Found(float(value[top]), basis[:, :length] @ y[:, top], bool(clear), restart)
            if length < m:
                have = length
                continue
            restart += 1
            try:
                have = _restart(basis, h, which, keep)
            except np.linalg.LinAlgError:
                return None  # Ritz values too ill-conditioned to be reordered: a larger space
        return None

    def _remember(
        self, which: str, basis: Array, y: NDArray[Any], value: Array, relevant: NDArray[np.bool_]
    ) -> None:
        """The next learning rate starts from the sum of the leading Ritz vectors."""
        order = np.argsort(np.where(relevant, value, value - 10.0))[::-1][:6]
        vectors = (basis @ y[:, order]).real
        total = np.sum(vectors / np.maximum(np.linalg.norm(vectors, axis=0), 1e-300), axis=1)
        length = np.linalg.norm(total)
        self._warm[which] = total / length if length > 0 else None


def _rim(which: str, ritz: Complex) -> tuple[Array, NDArray[np.bool_]]:
    """(signed distance over the rim, whether this search answers for it) of each Ritz value."""
    if which == "far":
        return growth(ritz), np.abs(ritz) > FAR
    size = np.maximum(np.abs(ritz), 1e-300)
    if which == "slow":
        # |mu|^2 - 1 itself, in units that keep the slowest modes apart.
        return 2 * ritz.real / size**2 + 1 / size**2, size > 1 / NEAR
    # Re(1/nu) + 1/2 as a sine: the angle by which 1/nu passes the line Re = -1/2.
    return (ritz.real + 0.5) / size, size > 1 / NEAR


def _expand(apply: Callable[[Array], Array], basis: Array, h: Array, have: int, upto: int) -> int:
    """Arnoldi steps from `have` columns to `upto`; returns the dimension reached."""
    for j in range(have, upto):
        w = apply(basis[:, j : j + 1])[:, 0]
        before = float(np.linalg.norm(w))
        for _ in range(2):  # twice is enough
            coefficients = basis[:, : j + 1].T @ w
            h[: j + 1, j] += coefficients
            w = w - basis[:, : j + 1] @ coefficients
        h[j + 1, j] = np.linalg.norm(w)
        if h[j + 1, j] <= 1e-14 * max(before, 1e-300):
            return j + 1
        basis[:, j + 1] = w / h[j + 1, j]
    return upto


def _restart(basis: Array, h: Array, which: str, keep: int) -> int:
    """Keep the Schur vectors of the Ritz values that are furthest over the rim; returns how many."""
    m = int(h.shape[1])

    def rank(ritz: Complex) -> Array:
        value, relevant = _rim(which, ritz)
        return np.where(relevant, value, value - 10.0)

    threshold = np.sort(rank(np.linalg.eigvals(h[:m, :m]).astype(complex)))[::-1][keep - 1]

    def wanted(real: float, imag: float) -> bool:
        return bool(rank(np.array([complex(real, imag)]))[0] >= threshold - 1e-9 * abs(threshold))

    t, z, kept = sla.schur(h[:m, :m], output="real", sort=wanted)
    kept = int(min(max(kept, 1), m - 4))
    if t[kept, kept - 1] != 0.0:
        kept -= 1  # never cut a conjugate pair
    last = h[m, :m] @ z
    basis[:, :kept] = basis[:, :m] @ z[:, :kept]
    basis[:, kept] = basis[:, m]
    h[:] = 0.0
    h[:kept, :kept] = t[:kept, :kept]
    h[kept, :kept] = last[:kept]
    return kept
