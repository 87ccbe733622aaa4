"""Momentum and idle layers: displacement (T6), steady movement (T9), uncoupled limits (T5), energy (T6b).

One step of the four optimisers, learning rate eta, gradient g, decoupled weight decay lam:

    sgd-ema      m <- beta m + (1 - beta) g,  x <- (1 - eta lam) x - eta m
    heavy-ball   m <- beta m + g,             x <- (1 - eta lam) x - eta m
    adamw        m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2,
                 x <- (1 - eta lam) x - eta [m/(1 - beta1^t)] / [sqrt(v/(1 - beta2^t)) + eps]
    adam         adamw with lam = 0

Idle policy `momentum`: g = 0 and the step is taken (m still moves x, everything decays, the step count runs).
Idle policy `frozen`: nothing changes, the step count included. beta = momentum, (beta1, beta2) = betas.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

Array = NDArray[np.float64]
Optimizer = Literal["sgd-ema", "heavy-ball", "adam", "adamw"]
Idle = Literal["momentum", "frozen"]

OPTIMIZERS = ("sgd-ema", "heavy-ball", "adam", "adamw")


def idle_displacement(
    optimizer: Optimizer = "adamw",
    *,
    steps: int | ArrayLike,
    first_moment: ArrayLike,
    second_moment: ArrayLike | None = None,
    parameter: ArrayLike | None = None,
    step_count: int | None = None,
    learning_rate: ArrayLike,
    momentum: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    idle: Idle = "momentum",
) -> Array:
    """Displacement x_{s+k} - x_s of idle parameters after k idle steps (T6, law).

    adamw, idle `momentum`:
        x_{s+k} - x_s = ((1 - eta lam)^k - 1) x_s - eta sum_{j=1..k} (1 - eta lam)^(k-j) u_j,
        u_j = [beta1^j m_s/(1 - beta1^(s+j))] / [sqrt(beta2^j v_s/(1 - beta2^(s+j))) + eps]
    sgd-ema and heavy-ball: u_j = beta^j m_s, hence -eta m_s beta (1 - beta^k)/(1 - beta) without decay.
    idle `frozen`: 0.

    steps           k, an integer >= 0 or an array of them (e.g. 1..K)
    first_moment, second_moment, parameter
                    m_s, v_s, x_s after step s, arrays of any common shape; v_s for Adam and AdamW only, x_s
                    only where weight_decay is not 0
    step_count      s, steps that the optimiser has counted (Adam and AdamW)
    learning_rate   eta: a number, or one for each idle step j = 1..max(steps)
    Returns an array of shape (shape of `steps`) + (shape of the moments).

    With eps = 0 an element whose m and v are 0 gives NaN, as in the optimiser itself.

    >>> round(float(idle_displacement(steps=1, first_moment=0.1, second_moment=0.001, step_count=1,
    ...                               learning_rate=1.0, betas=(0.9, 0.999), eps=0.0)), 3)
    -0.67
    """
    _check_optimizer(optimizer, weight_decay)
    k = np.asarray(steps)
    if k.dtype.kind not in "iu" or (k.size and k.min() < 0):
        raise ValueError(f"steps is {steps!r}, expected non-negative integers")
    m = np.asarray(first_moment, dtype=np.float64)
    flat = k.reshape(-1)
    last = int(flat.max()) if flat.size else 0
    out = np.zeros((flat.size, *m.shape))
    if not _moves(idle) or last == 0:
        return out.reshape(k.shape + m.shape)
    rates = _rates(learning_rate, last)
    running = np.zeros(m.shape)
    for j in range(1, last + 1):
        # x_{s+j} - x_s from x_{s+j-1} - x_s: no difference of large numbers, one pass and two temporaries a
        # step.
        step = idle_step(
            optimizer,
            k=j,
            first_moment=m,
            second_moment=second_moment,
            parameter=parameter,
            step_count=step_count,
            learning_rate=float(rates[j - 1]),
            momentum=momentum,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
        running *= 1.0 - float(rates[j - 1]) * weight_decay
        running += step
        out[flat == j] = running
    return out.reshape(k.shape + m.shape)


def idle_step(
    optimizer: Optimizer = "adamw",
    *,
    k: int,
    first_moment: ArrayLike,
    second_moment: ArrayLike | None = None,
    parameter: ArrayLike | None = None,
    step_count: int | None = None,
    learning_rate: float,
    momentum: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    idle: Idle = "momentum",
    out: Array | None = None,
) -> Array:
    """Displacement x_{s+k} - x_{s+k-1} of the k-th idle step alone, k >= 1 (T6, law): -eta lam x - eta u_k.

    Arguments as in `idle_displacement`, but `parameter` is x_{s+k-1}, the value just before this step
    (needed only with weight decay). Costs one square root and one division an element, no loop over j, and
    one temporary (none with `out`, an array of the moments' shape; a second one with decay).
    """
    _check_optimizer(optimizer, weight_decay)
    if k < 1:
        raise ValueError(f"k is {k}, expected an idle step number of at least 1")
    m = np.asarray(first_moment, dtype=np.float64)
    if out is None:
        out = np.empty(m.shape)
    if not _moves(idle):
        out[...] = 0.0
        return out
    if optimizer in ("adam", "adamw"):
        if second_moment is None or step_count is None or betas is None:
            raise ValueError(f"optimizer {optimizer!r} needs second_moment, step_count and betas")
        if step_count < 0:
            raise ValueError(f"step_count is {step_count}, expected 0 or more")
        beta1, beta2 = _check_betas(betas)
        n = step_count + k
        with np.errstate(divide="ignore", invalid="ignore"):
            np.sqrt(np.asarray(second_moment, dtype=np.float64), out=out)
            out *= float(np.sqrt(beta2**k / (1.0 - beta2**n)))
            out += eps
            np.divide(m, out, out=out)
            out *= -learning_rate * beta1**k / (1.0 - beta1**n)
    else:
        if momentum is None:
            raise ValueError(f"optimizer {optimizer!r} needs momentum")
        np.multiply(m, -learning_rate * _check_momentum(momentum) ** k, out=out)
    if weight_decay != 0.0:
        if parameter is None:
            raise ValueError(f"weight_decay is {weight_decay}, so the parameter is needed and was not given")
        out -= (learning_rate * weight_decay) * np.asarray(parameter, dtype=np.float64)
    return out


def adamw_trajectory(
    start: ArrayLike,
    gradients: Sequence[ArrayLike | None],
    *,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Array:
    """AdamW in plain float64, the reference for the laws above.

    A gradient of None is an idle step under `frozen`, one of 0.0 an idle step under `momentum`.
    Returns x after each step, shape (number of gradients,) + (shape of start).
    """
    beta1, beta2 = _check_betas(betas)
    x = np.asarray(start, dtype=np.float64)
    m, v, t = np.zeros(x.shape), np.zeros(x.shape), 0
    trajectory = []
    for gradient in gradients:
        if gradient is not None:
            g = np.asarray(gradient, dtype=np.float64)
            t += 1
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
            m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
            x = x * (1 - learning_rate * weight_decay) - learning_rate * m_hat / (np.sqrt(v_hat) + eps)
        trajectory.append(x)
    return np.stack(trajectory) if trajectory else np.zeros((0, *x.shape))


def first_pulse_displacement(step: ArrayLike, betas: tuple[float, float] = (0.9, 0.999)) -> Array:
    """AdamW's first step, in units of eta, on a block whose first gradient comes at step t >= 1 (T6, law).

    (1 - beta1)/(1 - beta1^t) sqrt((1 - beta2^t)/(1 - beta2)) under idle `momentum`, eps = 0, decay 0; under
    idle `frozen` it is 1 whenever it comes, since the step count waits.

    >>> first_pulse_displacement([1, 2, 4, 8]).round(3).tolist()
    [1.0, 0.744, 0.581, 0.496]
    """
    beta1, beta2 = _check_betas(betas)
    t = np.asarray(step, dtype=np.float64)
    if t.size and t.min() < 1:
        raise ValueError(f"step is {step!r}, expected 1 or more")
    return np.asarray((1 - beta1) / (1 - beta1**t) * np.sqrt((1 - beta2**t) / (1 - beta2)), dtype=np.float64)


def steady_movement(
    idle: Literal["full", "momentum", "frozen"],
    cycle_length: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps_over_gradient: float = 0.0,
) -> float:
    """AdamW's steady movement of a block per cycle of p steps, in units of eta, constant gradient g (T9).

    A law. With e = eps/|g|, decay 0 and all transients gone: p/(1 + e) when every step is selected (`full`),
    1/(1 + e) for idle `frozen`, and for idle `momentum` exactly
        sum_{j=0..p-1} beta1^j m/(beta2^(j/2) s + e),
        m = (1 - beta1)/(1 - beta1^p),  s^2 = (1 - beta2)/(1 - beta2^p),
    at e = 0: m/s (1 - rho^p)/(1 - rho), rho = beta1/sqrt(beta2), for every beta1 and beta2 (p m/s at
    rho = 1); it tends to sqrt(p) as (1 - beta2) p -> 0.

    >>> [round(steady_movement("momentum", p), 4) for p in (1, 2, 4, 8)]
    [1.0, 1.4142, 1.9999, 2.8277]
    """
    beta1, beta2 = _check_betas(betas)
    p, e = _check_cycle(cycle_length), eps_over_gradient
    if not e >= 0.0:
        raise ValueError(f"eps_over_gradient is {e}, expected 0 or more")
    if idle == "full":
        return p / (1 + e)
    if idle == "frozen":
        return 1 / (1 + e)
    _moves(idle)
    j = np.arange(p)
    m = (1 - beta1) / (1 - beta1**p)
    s = np.sqrt((1 - beta2) / (1 - beta2**p))
    # The finite sum is the closed form; it also covers rho = 1 and e > 0.
    return float(np.sum(beta1**j * m / (beta2 ** (j / 2) * s + e)))


def equivalent_learning_rate(
    learning_rate: float,
    idle: Literal["full", "momentum", "frozen"],
    cycle_length: int,
    betas: tuple[float, float] = (0.9, 0.999),
    kind: Literal["drift", "diffusion"] = "drift",
) -> float:
    """Learning rate at which full backpropagation moves a block as LCSB does at `learning_rate` (T9).

    One gradient pulse moves x by F eta in all, F = `steady_movement` (idle `momentum` or `frozen`), and
    there is one pulse per cycle; full backpropagation makes p pulses of 1 eta. A constant gradient adds
    pulses up (drift: eta F/p), independent ones add their squares (diffusion: eta F/sqrt(p)). As beta2 -> 1:
    eta/sqrt(p) and eta for `momentum`, eta/p and eta/sqrt(p) for `frozen`.
    """
    p = _check_cycle(cycle_length)
    if kind not in ("drift", "diffusion"):
        raise ValueError(f"kind is {kind!r}, expected 'drift' or 'diffusion'")
    if idle == "full":
        return learning_rate
    factor = steady_movement(idle, p, betas)
    return learning_rate * factor / (p if kind == "drift" else float(np.sqrt(p)))


def uncoupled_limit(
    smoothness: float,
    *,
    momentum: float = 0.0,
    cycle_length: int = 1,
    idle: Literal["full", "momentum", "frozen"] = "momentum",
    weight_decay: float = 0.0,
    units: Literal["sgd-ema", "heavy-ball", "adamw"] = "sgd-ema",
) -> float:
    """Largest stable learning rate for uncoupled blocks of curvature up to L = `smoothness` (T5, tight).

    EMA form, q = beta^p for idle `momentum`, beta for `full` and `frozen`: 2 (1 + q)/((1 - q) L). Heavy
    ball: L/(1 - beta) in the place of L. `full` and `frozen` with decoupled decay:
    2 (1 + beta)/((1 - beta) L + (1 + beta) lam).
    Idle `momentum` with decay, d = 1 - eta lam, s = sum_{j<p} d^(p-1-j) beta^j: the first eta at which
        (1 + beta^p)(1 + d^p) = eta (1 - beta) L s,   or   (1 - beta^p)(1 - d^p) + eta (1 - beta) L s = 0,
    the two Jury conditions of the cycle map, whose determinant is (beta d)^p; for block curvatures below L
    the limit is higher. Units `adamw` (beta = beta1): L is the preconditioned sharpness of the *full* run
    and, v being g^2/p under idle `momentum`, the limit is divided by sqrt(p) there (beta2 -> 1; no decay).

    >>> [round(uncoupled_limit(1.0, momentum=0.9, cycle_length=p), 3) for p in (1, 2, 4, 8)]
    [38.0, 19.053, 9.631, 5.023]
    """
    beta, p = _check_momentum(momentum), _check_cycle(cycle_length)
    if not (smoothness > 0 and weight_decay >= 0):
        raise ValueError(f"smoothness {smoothness}, weight_decay {weight_decay}: expected > 0 and >= 0")
    if units not in ("sgd-ema", "heavy-ball", "adamw"):
        raise ValueError(f"units is {units!r}, expected 'sgd-ema', 'heavy-ball' or 'adamw'")
    if idle != "full" and idle != "frozen":
        _moves(idle)
    if idle != "momentum":
        p = 1
    scale = smoothness
    if units == "adamw":
        if weight_decay:
            raise ValueError("units 'adamw' has no closed form with weight_decay, expected 0")
        scale = smoothness * float(np.sqrt(p))
    elif units == "heavy-ball":
        scale = smoothness / (1 - beta)
    if p > 1 and weight_decay > 0:
        return _decayed_limit(scale, beta, p, weight_decay)
    q = beta**p
    return 2 * (1 + q) / ((1 - q) * scale + (1 + q) * weight_decay)


def _decayed_limit(scale: float, beta: float, p: int, weight_decay: float) -> float:
    powers = np.arange(p)

    def margin(eta: float, sign: int) -> float:
        d = 1 - eta * weight_decay
        s = float(np.sum(d ** (p - 1 - powers) * beta**powers))
        drive = eta * (1 - beta) * scale * s
        if sign > 0:
            return (1 + beta**p) * (1 + d**p) - drive
        return (1 - beta**p) * (1 - d**p) + drive

    # Beyond 2/lam the decay alone diverges, and at it one of the two margins is not positive.
    grid = np.linspace(0.0, 2 / weight_decay, 4097)[1:]
    first = 2 / weight_decay
    for sign in (1, -1):
        negative = np.flatnonzero([margin(float(eta), sign) < 0 for eta in grid])
        if negative.size:
            i = int(negative[0])
            left = float(grid[i - 1]) if i else float(grid[0]) * 1e-12
            first = min(first, float(brentq(margin, left, float(grid[i]), args=(sign,), xtol=1e-15)))
    return first


def shifted_iterate(parameter: ArrayLike, moment: ArrayLike, learning_rate: float, momentum: float) -> Array:
    """z = x - eta beta/(1 - beta) m, in which EMA momentum is plain descent, z^{t+1} = z^t - eta g^t (T6)."""
    shift = learning_rate * _check_momentum(momentum) / (1 - momentum)
    return np.asarray(np.asarray(parameter, dtype=np.float64) - shift * np.asarray(moment, dtype=np.float64))


def block_energy(loss: float, moments: Iterable[ArrayLike], learning_rate: float, momentum: float) -> float:
    """E = f + eta beta/(2(1 - beta)) sum_i |m_i|^2, EMA form (T6b).

    Under idle `frozen`, exact gradients and eta < 2/L_max it falls by at least eta (1 - eta L_i/2)
    |m_i^+|^2 a step. For heavy-ball moments pass m (1 - beta) and eta/(1 - beta). `moments`: one array for
    each block (or tensor).
    """
    squares = sum(float(np.sum(np.square(np.asarray(m, dtype=np.float64)))) for m in moments)
    return loss + learning_rate * _check_momentum(momentum) / (2 * (1 - momentum)) * squares


def _check_optimizer(optimizer: str, weight_decay: float) -> None:
    if optimizer not in OPTIMIZERS:
        near = difflib.get_close_matches(str(optimizer).lower(), OPTIMIZERS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown optimizer {optimizer!r}; did you mean {near!r}? (one of {', '.join(OPTIMIZERS)})"
        )
    if optimizer == "adam" and weight_decay != 0.0:
        raise ValueError(
            f"optimizer 'adam' with weight_decay {weight_decay} has no closed form (its decay enters the "
            "moments); expected 0, or 'adamw'"
        )


def _moves(idle: Any) -> bool:
    if idle not in ("momentum", "frozen"):
        raise ValueError(f"idle is {idle!r}, expected 'momentum' or 'frozen'")
    return bool(idle == "momentum")


def _rates(learning_rate: ArrayLike, last: int) -> Array:
    rates = np.asarray(learning_rate, dtype=np.float64)
    if rates.ndim == 0:
        return np.full(last, float(rates))
    if rates.shape != (last,):
        raise ValueError(
            f"learning_rate has shape {rates.shape}, expected a number or {last} of them, one a step"
        )
    return rates


def _check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    beta1, beta2 = betas
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"betas is {betas}, expected two numbers in [0, 1)")
    return float(beta1), float(beta2)


def _check_momentum(momentum: float) -> float:
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum is {momentum}, expected a number in [0, 1)")
    return float(momentum)


def _check_cycle(cycle_length: int) -> int:
    if isinstance(cycle_length, bool) or int(cycle_length) != cycle_length or cycle_length < 1:
        raise ValueError(f"cycle_length is {cycle_length!r}, expected an integer of at least 1")
    return int(cycle_length)
