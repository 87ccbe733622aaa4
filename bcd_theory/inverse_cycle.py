"""(M - I)^-1 of one cycle on the quotient by ker G, at the price of one product and one solve with G (T4, T5).

Given the change w = (x' - x, m' - m) over one cycle in which every block is stepped once, the gradients
read on the way are known without knowing x, for every idle policy:

    g = (-(1 - beta) w_x/eta + beta w_m)/c        (c = 1 - beta or 1; g = -w_x/eta without momentum)

and so is the way x moved before each step, u_j. What is left is G x = g - (G u_j on block j).
Eigenvalues near mu = 1, a crowd for every Krylov space of M, are the large and far ones of (M - I)^-1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.linalg as sla

from bcd_theory.cycle import Array, CycleMap


class InverseCycle:
    """w -> (M(eta) - I)^-1 w.

    solve       z -> x with G x = z, x in the complement of ker G
    null_space  orthonormal basis N of ker G (symmetric G); x is only known up to it, so w_x is too: the
    part of it
                in ker G is chosen such that G x = z can be solved
    """

    def __init__(
        self, cycle: CycleMap, eta: float, solve: Callable[[Array], Array], null_space: Array
    ) -> None:
        if sorted(cycle.sequence) != list(range(len(cycle.partition))):
            raise ValueError(f"the order {list(cycle.sequence)} does not step every block exactly once")
        self.cycle, self.eta, self.solve, self.null_space = cycle, eta, solve, null_space
        self._index = cycle.partition.arrays()
        if null_space.shape[1]:
            drift = np.zeros((cycle.size, null_space.shape[1]))
            drift[: cycle.n] = null_space
            self._drift = self._right_side(drift)
            self._factor = sla.lu_factor(null_space.T @ self._drift[0], check_finite=False)

    def __call__(self, w: Array) -> Array:
        """(M - I)^-1 w for columns w, x part in the complement of ker G."""
        z, m = self._right_side(w)
        null = self.null_space
        if null.shape[1]:
            kappa = -sla.lu_solve(self._factor, null.T @ z, check_finite=False)
            z = z + self._drift[0] @ kappa
            if m is not None and self._drift[1] is not None:
                m = m + self._drift[1] @ kappa
        x = self.solve(z)
        return x if m is None else np.concatenate([x, m])

    def _right_side(self, w: Array) -> tuple[Array, Array | None]:
        """(G x, m at the start of the cycle) from the changes over it."""
        c, eta, beta = self.cycle, self.eta, self.cycle.momentum
        wx = w[: c.n]
        moved = np.zeros_like(wx)
        if beta == 0.0:
            z = -wx / eta
            start = None
        else:
            wm = w[c.n :]
            g = (-(1 - beta) * wx / eta + beta * wm) / c.gain
            z = g.copy()
            if c.idle == "frozen":
                start = -wx / eta - wm
            else:
                p = len(c.sequence)
                start = np.empty_like(wm)
                for t, j in enumerate(c.sequence, start=1):
                    b = self._index[j]
                    start[b] = (c.gain * beta ** (p - t) * g[b] - wm[b]) / (1 - beta**p)
                m = start.copy()
        for j in c.sequence:
            b = self._index[j]
            z[b] -= c.rows[j] @ moved
            c.products += len(b) / c.n * wx.shape[1]
            if beta == 0.0 or c.idle == "frozen":
                moved[b] = wx[b]
            else:
                m *= beta
                m[b] += c.gain * g[b]
                moved -= eta * m
        return z, start
