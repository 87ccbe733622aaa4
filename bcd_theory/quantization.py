"""Block-wise 4-bit quantisation: its error on Gaussian weights, exactly and by rule (T11).

A quantisation block of n weights is divided by its largest magnitude M and rounded to the nearest of 16 codes in
[-1, 1]; the largest weight itself is kept exactly. On Gaussian weights

    |E|^2 / |W|^2 = E_M[(n - 1) mse(M)] / n,

mse(M) the mean squared rounding error of a normal variable cut to [-M, M], and P(M <= m) = (2 Phi(m) - 1)^n. The
perturbation E is fixed: it changes the function that is trained, and is no noise.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from bcd_theory.cost import choose

Array = NDArray[np.float64]
QUANTIZATIONS: Final = ("nf4", "fp4", "int4")
NESTED_BLOCK: Final = 256
NODES: Final = 256


@cache
def codebook(quantization: str = "nf4") -> tuple[float, ...]:
    """The code values in [-1, 1], rising.

    nf4: normal quantiles, 7 below zero, zero and 8 above, scaled to end in -1 and 1 (QLoRA's data type). fp4: 0, 1/192,
    1/6, 1/4, 1/3, 1/2, 2/3, 1 and their negatives (bitsandbytes' 4-bit float). int4: -7 ... 7 over 7.

    >>> [round(code, 4) for code in codebook("nf4")[-3:]]
    [0.5626, 0.723, 1.0]
    """
    choose(quantization, QUANTIZATIONS, "quantization")
    if quantization == "nf4":
        # The outermost quantile: the mean of the centres of the last of 15 and of 16 equal shares.
        end = ((1 - 1 / 30) + (1 - 1 / 32)) / 2
        above = ndtri(np.linspace(end, 0.5, 9)[:-1])
        below = -ndtri(np.linspace(end, 0.5, 8)[:-1])
        codes = np.concatenate([below, [0.0], above[::-1]]) / above[0]
    elif quantization == "fp4":
        above = np.array([1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1])
        codes = np.concatenate([-above[::-1], [0.0], above])
    else:
        codes = np.arange(-7, 8) / 7
    return tuple(float(code) for code in codes)


@cache
def dynamic_codebook() -> tuple[float, ...]:
    """The 256 values of bitsandbytes' signed 8-bit dynamic map, in which double quantisation stores scales.

    Decade e = 0 ... 6 holds 2^e centres of equal parts of [0.1, 1], times 10^(e - 6), of either sign; 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        ends = np.linspace(0.1, 1, 2**decade + 1)
        centres = (ends[:-1] + ends[1:]) / 2 * 10.0 ** (decade - 6)
        values += [*centres, *-centres]
    return tuple(sorted(float(value) for value in values))


def rounding_mse(cut: ArrayLike, quantization: str = "nf4") -> Array:
    """mse(M): mean squared error of rounding a standard normal variable, given |w| <= M, with the block's scale M.

    In closed form: the second moments of a normal variable over the cells between codes. Shape of `cut`.
    """
    M = np.asarray(cut, dtype=np.float64)[..., None]
    if np.any(M <= 0):
        raise ValueError("the block's largest magnitude must be positive")
    codes = np.array(codebook(quantization))
    ends = np.concatenate([[-1.0], (codes[1:] + codes[:-1]) / 2, [1.0]]) * M
    density = np.exp(-(ends**2) / 2) / np.sqrt(2 * np.pi)
    mass = np.diff(ndtr(ends), axis=-1)
    first = -np.diff(density, axis=-1)
    second = mass - np.diff(ends * density, axis=-1)
    values = codes * M
    total = np.sum(second - 2 * values * first + values**2 * mass, axis=-1)
    return np.asarray(total / (2 * ndtr(M[..., 0]) - 1))


class _Maxima(NamedTuple):
    values: Array
    weights: Array


@cache
def _maxima(block_size: int, nodes: int = NODES) -> _Maxima:
    """Nodes and weights for an expectation over the law of the block maximum: Gauss-Legendre in its distribution."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    share = (points + 1) / 2
    return _Maxima(ndtri((1 + share ** (1 / block_size)) / 2), weights / 2)


def relative_error(
    quantization: str = "nf4", block_size: int = 64, double_quantisation: bool = False
) -> float:
    """|E| / |W| (Frobenius) expected on Gaussian weights (T11).

    Double quantisation adds the scales' own rounding error, uncorrelated with that of the weights: the mean square of
    the scale error times the mean square of the codes.

    >>> [round(relative_error("nf4", size), 4) for size in (16, 32, 64, 128, 256)]
    [0.0808, 0.0873, 0.092, 0.0956, 0.0986]
    """
    if block_size < 2:
        raise ValueError(f"block_size must be at least 2, got {block_size}")
    maxima = _maxima(block_size)
    square = float(maxima.weights @ rounding_mse(maxima.values, quantization)) * (block_size - 1) / block_size
    if double_quantisation:
        square += scale_error(block_size) ** 2 * _code_square(quantization, block_size)
    return float(np.sqrt(square))


def relative_error_from_scales(
    scales: ArrayLike, standard_deviation: float, quantization: str = "nf4", block_size: int = 64
) -> float:
    """|E| / |W| of one matrix from its blocks' scales and the root mean square of its weights (T11, a law).

    The mean over the given maxima M of (n - 1) mse(M / sigma) / n: as `relative_error`, with the maxima that the matrix
    has instead of those of Gaussian weights. Trained weights have larger ones: on SmolLM2's projections the Gaussian
    law is 2 % (nf4), 3 % (fp4) and 5 % (int4) low, this one within 0.7 %. Scales are stored in a quantised checkpoint.

    Raises:
        ValueError: a negative scale, or a standard deviation that is not positive.
    """
    maxima = np.asarray(scales, dtype=np.float64).ravel()
    if not standard_deviation > 0 or np.any(maxima < 0) or len(maxima) == 0:
        raise ValueError("scales must be at least 0, one a block, and the standard deviation positive")
    filled = maxima[maxima > 0] / standard_deviation  # a block of zeros has no error
    total = float(np.sum(rounding_mse(filled, quantization)))
    return float(np.sqrt(total / len(maxima) * (block_size - 1) / block_size))


def scale_error(block_size: int = 64) -> float:
    """Root mean square error of a block's scale under double quantisation, in standard deviations of the weights.

    Scales are shifted by their mean, divided by the largest magnitude among 256 and rounded to the dynamic map.
    """
    share = (np.arange(4096) + 0.5) / 4096
    scales = ndtri((1 + share ** (1 / block_size)) / 2)
    shifted = scales - scales.mean()
    magnitude = np.sort(np.abs(shifted))
    points, weights = np.polynomial.legendre.leggauss(64)
    largest = np.quantile(magnitude, ((points + 1) / 2) ** (1 / NESTED_BLOCK))
    codes = np.array(dynamic_codebook())
    errors = [
        np.mean((nearest(shifted / top, codes) * top - shifted)[np.abs(shifted) <= top] ** 2)
        for top in largest
    ]
    return float(np.sqrt(weights @ np.array(errors) / 2))


def _code_square(quantization: str, block_size: int) -> float:
    """Mean square of the codes that the weights of a block round to."""
    maxima = _maxima(block_size)
    codes = np.array(codebook(quantization))
    ends = np.concatenate([[-1.0], (codes[1:] + codes[:-1]) / 2, [1.0]]) * maxima.values[:, None]
    mass = np.diff(ndtr(ends), axis=-1) / (2 * ndtr(maxima.values) - 1)[:, None]
    others = float(maxima.weights @ (mass @ codes**2))
    return (others * (block_size - 1) + 1.0) / block_size


def nearest(values: Array, codes: Array) -> Array:
    """Each value rounded to the nearest of the rising codes."""
    return np.asarray(codes[np.searchsorted((codes[1:] + codes[:-1]) / 2, values)])


def round_trip(
    weights: ArrayLike, quantization: str = "nf4", block_size: int = 64, double_quantisation: bool = False
) -> Array:
    """Quantise and dequantise: what a quantised layer computes with. Blocks run over the flattened array.

    Shape of `weights`. A last block that is shorter keeps its own scale; a block of zeros stays zero.
    """
    array = np.asarray(weights, dtype=np.float64)
    flat = array.ravel()
    padded = np.pad(flat, (0, -len(flat) % block_size)).reshape(-1, block_size)
    scales = np.abs(padded).max(axis=1)
    codes = nearest(padded / np.where(scales > 0, scales, 1.0)[:, None], np.array(codebook(quantization)))
    if double_quantisation:
        scales = _nested(scales)
    return np.asarray((codes * scales[:, None]).ravel()[: len(flat)].reshape(array.shape))


def _nested(scales: Array) -> Array:
    shifted = scales - scales.mean()
    groups = np.pad(shifted, (0, -len(shifted) % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    tops = np.abs(groups).max(axis=1, keepdims=True)
    rounded = nearest(groups / np.where(tops > 0, tops, 1.0), np.array(dynamic_codebook())) * tops
    return np.asarray(rounded.ravel()[: len(scales)] + scales.mean())


def measured_relative_error(weights: ArrayLike, rounded: ArrayLike) -> float:
    """|W_q - W| / |W| (Frobenius) of a pair of arrays."""
    original = np.asarray(weights, dtype=np.float64)
    norm = float(np.linalg.norm(original))
    if norm == 0:
        raise ValueError("all weights are zero: a relative error needs a positive norm")
    return float(np.linalg.norm(np.asarray(rounded, dtype=np.float64) - original) / norm)


def perturbation_norm(shape: tuple[int, int], standard_deviation: float, relative: float) -> float:
    """Spectral norm expected of E = W_q - W for a matrix of independent weights: rms (sqrt(rows) + sqrt(columns)).

    A law for large matrices whose errors are uncorrelated (Bai and Yin); relative is |E|/|W| of `relative_error`.
    """
    rows, columns = shape
    return relative * standard_deviation * (float(np.sqrt(rows)) + float(np.sqrt(columns)))


class Interval(NamedTuple):
    """A closed interval."""

    low: float
    high: float


def weyl_interval(eigenvalue: float, difference_norm: float) -> Interval:
    """Where an eigenvalue of H_q lies when that of H is known: within |H_q - H| (spectral), by Weyl (T11, upper).

    Both Hessians at the same point. The k-th largest eigenvalues are compared.
    """
    if difference_norm < 0:
        raise ValueError(f"difference_norm must be at least 0, got {difference_norm}")
    return Interval(eigenvalue - difference_norm, eigenvalue + difference_norm)
