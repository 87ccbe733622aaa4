"""T11 against golden figures, bitsandbytes on the CPU, brute-force integration, and attained cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, stats

from bcd_theory.quantization import (
    codebook,
    dynamic_codebook,
    measured_relative_error,
    perturbation_norm,
    relative_error,
    relative_error_from_scales,
    round_trip,
    rounding_mse,
    scale_error,
    weyl_interval,
)

GOLDEN = {16: 0.0808, 32: 0.0873, 64: 0.0920, 128: 0.0956, 256: 0.0986}


@pytest.mark.parametrize("block_size", GOLDEN)
def test_golden_relative_errors(block_size: int) -> None:
    assert relative_error("nf4", block_size) == pytest.approx(GOLDEN[block_size], abs=5e-5)


@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int4"])
@pytest.mark.parametrize("cut", [0.7, 2.4, 5.0])
def test_closed_form_mse_equals_the_integral(quantization: str, cut: float) -> None:
    codes = np.array(codebook(quantization)) * cut
    square = lambda w: np.min((w - codes) ** 2) * stats.norm.pdf(w)  # noqa: E731
    breaks = (codes[1:] + codes[:-1]) / 2
    total = integrate.quad(square, -cut, cut, points=breaks, limit=200)[0]
    assert rounding_mse(cut, quantization) == pytest.approx(total / (2 * stats.norm.cdf(cut) - 1), rel=1e-8)


@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int4"])
def test_expectation_equals_a_draw_of_gaussian_weights(quantization: str) -> None:
    weights = np.random.default_rng(1).standard_normal(2**21)
    found = measured_relative_error(weights, round_trip(weights, quantization, 64))
    assert relative_error(quantization, 64) == pytest.approx(found, rel=0.003)


def test_error_from_scales_on_gaussian_weights_is_the_law() -> None:
    weights = np.random.default_rng(7).standard_normal((4096, 64))
    scales = np.abs(weights).max(axis=1)
    assert relative_error_from_scales(scales, 1.0) == pytest.approx(relative_error(), rel=0.005)
    # Units cancel, and a block of zeros has no error.
    assert relative_error_from_scales(3 * scales, 3.0) == pytest.approx(
        relative_error_from_scales(scales, 1.0)
    )
    half = relative_error_from_scales(np.concatenate([scales, 0 * scales]), 1.0)
    assert half == pytest.approx(relative_error_from_scales(scales, 1.0) / np.sqrt(2))
    with pytest.raises(ValueError, match="standard deviation"):
        relative_error_from_scales(scales, 0.0)


def test_predicted_error_on_trained_weights_within_two_percent(demo_model: Path) -> None:
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(demo_model).tensors}
    names = [f"blk.{layer}.{part}.weight" for layer in (0, 15, 29) for part in ("attn_q", "ffn_down")]
    matrices = [
        np.asarray(gguf.dequantize(tensors[n].data, tensors[n].tensor_type), np.float64) for n in names
    ]
    for quantization in ("nf4", "fp4", "int4"):
        real, predicted = 0.0, 0.0
        for weights in matrices:
            real += np.sum((round_trip(weights, quantization) - weights) ** 2)
            scales = np.abs(weights.reshape(-1, 64)).max(axis=1)
            law = relative_error_from_scales(scales, float(np.sqrt(np.mean(weights**2))), quantization)
            predicted += law**2 * np.sum(weights**2)
        assert np.sqrt(predicted) == pytest.approx(np.sqrt(real), rel=0.02)


def test_double_quantisation_adds_the_scales_error() -> None:
    weights = np.random.default_rng(2).standard_normal(2**20)
    plain, double = round_trip(weights), round_trip(weights, double_quantisation=True)
    added = np.mean((double - weights) ** 2) - np.mean((plain - weights) ** 2)
    predicted = relative_error(double_quantisation=True) ** 2 - relative_error() ** 2
    assert predicted > 0
    assert added == pytest.approx(predicted, rel=0.25)
    scales = np.abs(weights.reshape(-1, 64)).max(axis=1)
    rms = np.sqrt(np.mean((scales - np.abs(double.reshape(-1, 64)).max(axis=1)) ** 2))
    assert scale_error(64) == pytest.approx(rms, rel=0.1)


def test_code_values() -> None:
    for quantization in ("nf4", "fp4", "int4"):
        codes = codebook(quantization)
        assert codes == tuple(sorted(codes)) and codes[0] == -1.0 and codes[-1] == 1.0 and 0.0 in codes
    assert len(codebook("nf4")) == 16 and len(codebook("fp4")) == len(codebook("int4")) == 15
    with pytest.raises(ValueError, match="did you mean 'nf4'"):
        codebook("nf5")


def test_round_trip_keeps_the_largest_weight_and_short_blocks() -> None:
    weights = np.random.default_rng(3).standard_normal((5, 30))
    rounded = round_trip(weights, "nf4", 64)
    assert rounded.shape == weights.shape
    flat, back = weights.ravel(), rounded.ravel()
    for start in range(0, 150, 64):
        top = np.argmax(np.abs(flat[start : start + 64])) + start
        assert back[top] == flat[top]
    assert np.array_equal(round_trip(np.zeros(64)), np.zeros(64))
    exact = np.array(codebook("nf4")) * 0.3
    assert round_trip(exact, "nf4", 16) == pytest.approx(exact, abs=1e-15)


def test_perturbation_norm_of_a_gaussian_matrix() -> None:
    weights = 0.02 * np.random.default_rng(4).standard_normal((300, 500))
    error = np.linalg.norm(round_trip(weights) - weights, 2)
    assert perturbation_norm((300, 500), 0.02, relative_error()) == pytest.approx(error, rel=0.03)


def test_weyl_holds_and_is_attained() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        first, second = rng.standard_normal((2, 6, 6))
        H, E = first + first.T, 0.3 * (second + second.T)
        low, high = weyl_interval(np.linalg.eigvalsh(H)[-1], np.linalg.norm(E, 2))
        assert low - 1e-12 <= np.linalg.eigvalsh(H + E)[-1] <= high + 1e-12
    assert weyl_interval(2.0, 0.5) == (1.5, 2.5)  # attained by E = +-0.5 I
    with pytest.raises(ValueError, match="at least 0"):
        weyl_interval(1.0, -0.1)


# --- bitsandbytes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def functional():
    from bitsandbytes import functional

    return functional


@pytest.mark.parametrize("quantization", ["nf4", "fp4"])
def test_codebooks_are_those_of_bitsandbytes(functional, quantization: str) -> None:
    theirs = sorted(set(functional.get_4bit_type(quantization, device="cpu").tolist()))
    assert codebook(quantization) == pytest.approx(theirs, abs=1e-6)


def test_dynamic_map_is_that_of_bitsandbytes(functional) -> None:
    assert dynamic_codebook() == pytest.approx(functional.create_dynamic_map().tolist(), abs=1e-6)


@pytest.mark.parametrize("quantization", ["nf4", "fp4"])
@pytest.mark.parametrize("block_size", [32, 64, 256])
@pytest.mark.parametrize("double", [False, True])
def test_predicted_error_is_the_real_one_within_two_percent(
    functional, quantization: str, block_size: int, double: bool
) -> None:
    import torch

    weights = torch.randn(512, 512, generator=torch.Generator().manual_seed(6))
    packed, state = functional.quantize_4bit(
        weights, blocksize=block_size, quant_type=quantization, compress_statistics=double
    )
    back = functional.dequantize_4bit(packed, state)
    real = float((back - weights).norm() / weights.norm())
    assert relative_error(quantization, block_size, double) == pytest.approx(real, rel=0.02)
    # The round trip is the same function up to float32 rounding at the borders between codes.
    ours = round_trip(weights.numpy(), quantization, block_size, double)
    assert np.linalg.norm(ours - back.numpy()) < 0.02 * np.linalg.norm(back.numpy() - weights.numpy())
