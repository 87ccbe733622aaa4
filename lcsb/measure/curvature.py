"""Curvature of the loss over adapter parameters: Hessian and Gauss-Newton products, their extreme eigenvalues (T4, T5).

    H v = d/dx (g(x) . v),  g the gradient on a graph that is kept: one double backward a product
    preconditioned: D^-1/2 H D^-1/2 with D = sqrt(v_hat) + eps of AdamW at its present state

Products pass through bitsandbytes' 4-bit layers, which other ways of differentiating twice do not. Fused attention has
no second derivative, so attention runs by its plain formula here. The field of modes identity and mlp is not a
gradient: its Jacobian is not symmetric, double backward through it is refused (`lcsb.branches`), and it is measured by
central differences and Arnoldi.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh
from torch import Tensor, nn

Array = NDArray[np.float64]
Loss = Callable[[], Tensor]
End = Literal["largest", "smallest"]


class NotDeterministicError(ValueError):
    """The loss, evaluated twice at the same point, gave two values: dropout is on, or the batch changes."""


class NotConvergedError(RuntimeError):
    """An eigenvalue did not settle within the products allowed; the message holds how many did."""


@dataclass(frozen=True)
class Eigenvalue:
    """One end of a spectrum.

    Attributes:
        value: the eigenvalue.
        residual: |H u - value u| for the unit vector u found with it: an eigenvalue lies within this distance.
        vector: u, [numbers].
        products: matrix-vector products used.
    """

    value: float
    residual: float
    vector: Array
    products: int


class Curvature:
    """Products with the Hessian of `loss` over `parameters`, at the point where it is entered.

    One gradient's graph is kept for as long as the context is open; a product then costs about one and a half
    gradients. Parameters must not change inside.

    Args:
        loss: evaluates the loss, with a graph; the same batch at every call.
        parameters: name -> parameter; their order is that of the flat vectors.
        preconditioner: name -> positive diagonal D of the parameter's shape, for D^-1/2 H D^-1/2 (see
            `adamw_diagonal`); None for H.

    Attributes:
        size: numbers in a flat vector.
        products: products made so far.

    Raises:
        NotDeterministicError: see there; raised on entering.
        ValueError: no parameter, or a preconditioner that is not positive.

    Example:
        >>> with Curvature(lambda: model(**batch).loss, parameters) as curvature:  # doctest: +SKIP
        ...     sharpness = curvature.eigenvalue("largest", seed=0).value
    """

    def __init__(
        self,
        loss: Loss,
        parameters: Mapping[str, nn.Parameter],
        preconditioner: Mapping[str, Tensor] | None = None,
    ) -> None:
        if not parameters:
            raise ValueError("curvature: no parameters, expected at least one")
        self._loss, self._parameters = loss, dict(parameters)
        self.size = sum(p.numel() for p in self._parameters.values())
        self.products = 0
        self._scale: Tensor | None = None
        if preconditioner is not None:
            for name in self._parameters:
                if not bool((preconditioner[name] > 0).all()):
                    raise ValueError(
                        f"preconditioner: {name} has an entry that is not positive; before the first steps v is zero "
                        "and the preconditioned curvature is not defined (T5): take it after probe steps"
                    )
            self._scale = self._flat([preconditioner[name] for name in self._parameters]).rsqrt()
        self._gradient: list[Tensor] | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Curvature:
        with contextlib.ExitStack() as stack:
            stack.enter_context(twice_differentiable())
            loss = self._loss()
            again = float(self._loss().detach())
            if float(loss.detach()) != again:
                raise NotDeterministicError(
                    f"the loss is {float(loss.detach())!r} and then {again!r} at the same point; switch dropout off "
                    "(model.eval()) and keep the batch"
                )
            leaves = list(self._parameters.values())
            self._gradient = list(torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=False))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._gradient = None
        self._stack.close()

    @staticmethod
    def _flat(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    def product(self, vector: Tensor) -> Tensor:
        """H v (or D^-1/2 H D^-1/2 v) for a flat vector [size].

        Raises:
            RuntimeError: outside the context; a mode whose field is not a gradient.
        """
        if self._gradient is None:
            raise RuntimeError("curvature: not inside `with Curvature(...)`")
        self.products += 1
        leaves = list(self._parameters.values())
        scaled = vector if self._scale is None else vector * self._scale
        pieces = scaled.to(leaves[0]).split([p.numel() for p in leaves])
        directions = [piece.view_as(p) for piece, p in zip(pieces, leaves, strict=True)]
        found = torch.autograd.grad(
            self._gradient, leaves, directions, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        result = self._flat(found)
        return result if self._scale is None else result * self._scale

    def eigenvalue(
        self, end: End = "largest", *, seed: int, tolerance: float = 1e-2, most_products: int = 100
    ) -> Eigenvalue:
        """The largest or smallest eigenvalue (by value, not by magnitude), by scipy's implicitly restarted Lanczos."""

        def apply(v: Array) -> Array:
            return self.product(torch.from_numpy(v)).double().cpu().numpy()

        return extreme_eigenvalue(
            apply, self.size, end, seed=seed, tolerance=tolerance, most_products=most_products
        )


def extreme_eigenvalue(
    apply: Callable[[Array], Array],
    size: int,
    end: End = "largest",
    *,
    seed: int,
    tolerance: float = 1e-2,
    most_products: int = 100,
) -> Eigenvalue:
    """An end of the spectrum of a symmetric operator on R^size (pitfall U46).

    Args:
        apply: the product.
        seed: of the start vector.
        tolerance: relative accuracy asked of ARPACK.
        most_products: products after which it gives up.

    Raises:
        NotConvergedError: gave up.
    """
    count = 0

    def counted(v: Array) -> Array:
        nonlocal count
        count += 1
        return np.asarray(apply(np.asarray(v, dtype=np.float64).reshape(-1)), dtype=np.float64)

    start = np.random.default_rng(seed).standard_normal(size)
    start /= np.linalg.norm(start)
    if size <= 3:  # ARPACK needs more dimensions than this
        matrix = np.stack([counted(row) for row in np.eye(size)], axis=1)
        values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
        index = -1 if end == "largest" else 0
        value, vector = float(values[index]), vectors[:, index]
    else:
        first = counted(start)
        if not np.any(first):
            # A zero product of a random vector means the zero operator, on which ARPACK breaks down.
            return Eigenvalue(0.0, 0.0, start, count)
        krylov = min(size - 1, 20)
        try:
            values, vectors = eigsh(
                LinearOperator((size, size), matvec=counted, dtype=np.float64),  # type: ignore[call-arg]
                k=1, which="LA" if end == "largest" else "SA", v0=start, tol=tolerance, ncv=max(krylov, 3),
                maxiter=max(1, most_products // max(krylov - 1, 1)),
            )  # fmt: skip
        except ArpackNoConvergence as error:
            raise NotConvergedError(
                f"the {end} eigenvalue did not settle to {tolerance:g} within {count} products"
            ) from error
        value, vector = float(values[0]), vectors[:, 0]
    residual = float(np.linalg.norm(counted(vector) - value * vector))
    return Eigenvalue(value, residual, vector, count)


@dataclass(frozen=True)
class FieldJacobian:
    """Products with the Jacobian of a gradient field by central differences: J v = (g(x + h v) - g(x - h v)) / 2h.

    The way for modes identity and mlp, whose field is no gradient (T7).

    Attributes:
        field: evaluates the field at the parameters' present values; returns one tensor a parameter.
        parameters: name -> parameter.
        step: h, relative to |x| / |v|.
    """

    field: Callable[[], Sequence[Tensor]]
    parameters: Mapping[str, nn.Parameter]
    step: float = 1e-3

    @property
    def size(self) -> int:
        """Numbers in a flat vector."""
        return sum(p.numel() for p in self.parameters.values())

    @torch.no_grad()
    def product(self, vector: Tensor) -> Tensor:
        """J v for a flat vector [size]; the parameters are as before afterwards."""
        leaves = list(self.parameters.values())
        before = [p.detach().clone() for p in leaves]
        norm = float(vector.norm())
        if norm == 0.0:
            return torch.zeros_like(vector)
        scale = max(1.0, float(torch.cat([b.reshape(-1) for b in before]).norm()))
        h = self.step * scale / norm
        pieces = vector.to(leaves[0]).split([p.numel() for p in leaves])
        sides = []
        try:
            for sign in (1.0, -1.0):
                for p, old, piece in zip(leaves, before, pieces, strict=True):
                    p.copy_(old + sign * h * piece.view_as(p))
                with torch.enable_grad():
                    found = self.field()
                sides.append(torch.cat([g.detach().reshape(-1).double() for g in found]))
        finally:
            for p, old in zip(leaves, before, strict=True):
                p.copy_(old)
        return (sides[0] - sides[1]) / (2 * h)

    def eigenvalues(self, count: int, *, seed: int, tolerance: float = 1e-2) -> NDArray[np.complex128]:
        """The eigenvalues of largest magnitude, by Arnoldi (the Jacobian is not symmetric).

        Raises:
            NotConvergedError: some did not settle.
        """
        start = np.random.default_rng(seed).standard_normal(self.size)
        operator = LinearOperator(  # type: ignore[call-arg]
            (self.size, self.size),
            matvec=lambda v: self.product(torch.from_numpy(np.asarray(v).reshape(-1))).numpy(),
            dtype=np.float64,
        )
        try:
            values = eigs(operator, k=count, v0=start, tol=tolerance, return_eigenvectors=False)
        except ArpackNoConvergence as error:
            raise NotConvergedError(
                f"{len(error.eigenvalues)} of {count} eigenvalues settled to {tolerance:g}"
            ) from error
        return np.asarray(values)


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Inside, scaled dot-product attention uses the formula that has a second derivative."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


def adamw_diagonal(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """D = sqrt(v_hat) + eps of each parameter at AdamW's present state (T5's preconditioner).

    Raises:
        ValueError: a parameter that has taken no step, so that its v is not there.
    """
    by_id = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    diagonal: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state, group = optimizer.state.get(parameter), by_id.get(id(parameter))
        if not state or group is None or "exp_avg_sq" not in state:
            raise ValueError(f"preconditioner: {name} has no second moment yet; take probe steps first")
        correction = 1 - group["betas"][1] ** float(state["step"])
        diagonal[name] = (state["exp_avg_sq"] / correction).sqrt() + group["eps"]
    return diagonal
