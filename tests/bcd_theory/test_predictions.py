"""predict: every family of predictions against its closed form, written out here on small measurements."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from bcd_theory.cost import StepCosts
from bcd_theory.geometry import GEOMETRIES, peak_bytes
from bcd_theory.partition import contiguous_blocks
from bcd_theory.predictions import (
    Fidelity,
    GradientNoise,
    Measurements,
    MemorySettings,
    Smoothness,
    WeightCode,
    predict,
)

N, P = 8, 4
COSINES = (0.1, 0.2, None, 0.4, 0.6, 0.7, 0.9, 1.0)


def measurements(**changes):
    ones = (1.0,) * N
    values = {
        "model": "toy",
        "layers": N,
        "cycle_length": P,
        "blocks": contiguous_blocks(N, N // P),
        "learning_rate": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "costs": StepCosts(
            layers=N, forward=1.0, head=0.5, optimizer=0.1, recompute=1.1, input_gradient=1.0,
            adapter_gradient=0.4, dequantisation=0.5, attention_recompute=0.3, attention_input_gradient=0.2,
        ),
        "costs_spread": 0.05,
        "recompute": True,
        "cycle_lengths": (1, 2, 4),
        "fidelity": (
            Fidelity("identity", "cyclic", COSINES, ones, ones),
            Fidelity("identity", "all-above", COSINES, ones, ones),
        ),
        "gradient_norm": ones,
        "held_out_loss": 3.0,
        "hidden_cosine": {"identity": (0.5,) * N, "mlp": tuple(np.linspace(0.8, 0.95, N))},
    }  # fmt: skip
    return Measurements(**{**values, **changes})


def test_speedups_are_t12_closed_forms():
    found = predict(measurements())
    forward, head, optimizer, backward = 1.0, 0.5, 0.1, 2.5
    assert found.number("seconds/full/1") == pytest.approx(4.1)
    for p in (1, 2, 4):
        identity = 4.1 / (forward + head + optimizer + backward / p)
        exact = 4.1 / (forward + head + optimizer + 2.1 * (1 + 1 / p) / 2 + 0.4 / p)
        idle = (1 + 1 / p) / 2 - 1 / p  # share of layers that are idle and above the lowest selected one
        mlp = 4.1 / (forward + head + optimizer + 2.5 / p + (2.1 - 0.5) * idle)
        for mode, expected in (("identity", identity), ("exact", exact), ("mlp", mlp)):
            item = found[f"speedup/{mode}/{p}"]
            assert item.value == pytest.approx(expected, rel=1e-12)
            assert item.uncertainty == pytest.approx(0.05 * expected)
    assert found.number("dequantisation/share") == pytest.approx(0.5 / 2.5)


def test_a_layer_without_a_graph_has_a_cheaper_forward_pass():
    found = predict(measurements(costs=dataclasses.replace(measurements().costs, graph_forward=0.4)))
    for p in (1, 2, 4):
        reach = (1 + 1 / p) / 2
        identity = 1.6 - 0.4 * (1 - 1 / p) + 2.5 / p
        exact = 1.6 - 0.4 * (1 - reach) + 2.1 * reach + 0.4 / p
        assert found.number(f"seconds/identity/{p}") == pytest.approx(identity, rel=1e-12)
        assert found.number(f"seconds/exact/{p}") == pytest.approx(exact, rel=1e-12)
    assert found.number("seconds/full/1") == pytest.approx(4.1)


def test_without_recompute_nothing_of_it_is_counted():
    found = predict(measurements(recompute=False))
    assert found.number("seconds/full/1") == pytest.approx(4.1 - 1.1)
    assert found.number("dequantisation/share") == pytest.approx(0.5 / 1.4)


def test_movement_and_equivalent_rates_are_t9():
    found = predict(measurements())
    beta1, beta2 = 0.9, 0.999
    rho = beta1 / math.sqrt(beta2)
    factor = (1 - beta1) / (1 - beta1**P) * math.sqrt((1 - beta2**P) / (1 - beta2)) * (1 - rho**P) / (1 - rho)
    assert found.number("movement/full/steady") == P
    assert found.number("movement/momentum/steady") == pytest.approx(factor, rel=1e-12)
    assert found.number("movement/frozen/steady") == 1
    assert found.number("equivalent/momentum/drift") == pytest.approx(1e-3 * factor / P, rel=1e-12)
    assert found.number("equivalent/frozen/drift") == pytest.approx(1e-3 / P, rel=1e-12)
    assert found.number("equivalent/frozen/diffusion") == pytest.approx(1e-3 / math.sqrt(P), rel=1e-12)
    assert found["movement/momentum/ratio"].value == pytest.approx((factor / P, 1.0), rel=1e-12)
    assert found["movement/frozen/ratio"].value == pytest.approx((1 / P, 1 / math.sqrt(P)), rel=1e-12)


def test_first_cycle_is_adamw_with_one_gradient():
    """One unit gradient at step j, then idle steps: an AdamW written out here, eps = 0."""
    beta1, beta2 = 0.9, 0.999
    expected = []
    for block in range(P):
        x = m = v = 0.0
        for t in range(1, block + P + 1):
            g = 1.0 if t == block + 1 else 0.0
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            if v > 0:
                x += (m / (1 - beta1**t)) / math.sqrt(v / (1 - beta2**t))
        expected.append(x)
    found = predict(measurements())
    assert found["movement/momentum/first-cycle"].value == pytest.approx(expected, rel=1e-12)
    assert found["movement/frozen/first-cycle"].value == pytest.approx([1.0] * P, rel=1e-12)
    assert expected[0] > expected[-1]  # blocks do not start equal


def test_limits_are_t5_in_adamw_units():
    found = predict(measurements())
    assert found.number("limit/full") == pytest.approx(38)
    assert found.number("limit/frozen") == pytest.approx(38)
    assert found.number("limit/momentum") == pytest.approx(4.816, abs=5e-4)


def test_fidelity_is_carried_and_composed():
    found = predict(measurements())
    assert found["fidelity/identity/cyclic"].value == COSINES
    assert found["fidelity/identity/cyclic"].uncertainty == 0.1
    # blocks of two layers, every layer 0.5: 6, 4, 2, 0 idle layers above
    assert found["fidelity/identity/composed"].value == pytest.approx(
        [0.5**6] * 2 + [0.5**4] * 2 + [0.5**2] * 2 + [1.0] * 2
    )
    # from the top: 0.9 after one skipped layer, 0.7, 0.6, then 0.4 < 0.5 after four
    assert found.number("fidelity-length/identity") == 4
    high = tuple(0.9 for _ in range(N))
    row = Fidelity("identity", "all-above", high, high, high)
    assert predict(measurements(fidelity=(row,)))["fidelity-length/identity"].value is None


def test_one_block_predicts_full_backpropagation():
    found = predict(measurements(cycle_length=1, blocks=(tuple(range(N)),)))
    for idle in ("momentum", "frozen"):
        assert found.number(f"equivalent/{idle}/drift") == pytest.approx(1e-3)
        assert found["movement/momentum/ratio"].value == pytest.approx((1.0, 1.0))
    assert found.number("speedup/identity/1") == pytest.approx(1.0)
    assert found["fidelity/identity/composed"].value == (1.0,) * N


def test_guarantees_without_momentum_are_t1_and_t2():
    smooth = Smoothness(joint=6.0, blocks=(2.0, 4.0, 1.0, 3.0), gap=5.0, cycles=10, relative_uncertainty=0.1)
    found = predict(measurements(learning_rate=0.25, smoothness=smooth))
    assert found.number("step-limit/T1") == found.number("step-limit/T2") == pytest.approx(0.5)
    assert found["step-limit/T1"].uncertainty == pytest.approx(0.05)
    expected = 2 * 4.0 * (1 + math.sqrt(3) * 6 / 4) ** 2 * 5.0 / 10  # delta = 0, eta = 1/L_max
    assert found.number("rate/T2") == pytest.approx(expected)
    too_large = predict(measurements(learning_rate=0.6, smoothness=smooth))
    assert too_large["rate/T2"].value is None


def test_guarantees_with_momentum_are_t6_and_t6b():
    smooth = Smoothness(joint=6.0, blocks=(2.0, 4.0, 1.0, 3.0), gap=5.0, cycles=10, momentum=0.9)
    found = predict(measurements(learning_rate=0.01, smoothness=smooth))
    assert "step-limit/T1" not in found
    assert found.number("step-limit/T6-corollary") == pytest.approx(min(1 / 8, 0.1 / (2 * 0.9 * 6)))
    assert found.number("step-limit/T6b-cycles") == pytest.approx(0.5)
    r, d = 1.9 / 0.1, 5.0 / (0.01 * (1 - 0.01 * 4 / 2))
    assert found.number("rate/T6b-cycles") == pytest.approx((r + 0.01 * 6 * math.sqrt(3)) ** 2 * d / 10)


def test_noise_floor_is_t10():
    noise = GradientNoise(curvature=(1.0, 2.0), variance=(0.5, 0.1))
    found = predict(measurements(learning_rate=0.1, noise=noise))
    plain = sum(h * 0.1 * v / (h * (2 - 0.1 * h)) / 2 for h, v in ((1.0, 0.5), (2.0, 0.1)))
    for idle in (
        "full",
        "momentum",
        "frozen",
    ):  # without momentum all three are plain descent on one coordinate
        assert found.number(f"noise-floor/{idle}") == pytest.approx(plain)


def test_bytes_and_quantisation():
    geometry = GEOMETRIES["smollm2-135m"]
    settings = MemorySettings(geometry, tokens=128, batch=1, rank=16, floor=10**8)
    found = predict(measurements(memory=settings, weights=WeightCode("nf4")))
    assert found.number("quantisation/relative-error") == pytest.approx(0.0920, abs=5e-5)
    whole = peak_bytes(geometry, "full", tokens=128, floor=10**8, embedding_bytes=4).total
    assert found.number("bytes/full") == whole
    assert found.number("bytes/identity") < found.number("bytes/exact") <= whole
    assert "bytes/full" not in predict(measurements())


def test_lookup_errors():
    found = predict(measurements())
    with pytest.raises(KeyError, match="no prediction 'speed'"):
        found["speed"]
    with pytest.raises(TypeError, match="not a single number"):
        found.number("movement/momentum/ratio")
    assert "speedup/exact/2" in found and "speedup/exact/3" not in found
    assert len({item.id for item in found.items}) == len(found.items)
    assert all(item.theorems and item.assumptions for item in found.items)
    assert dataclasses.is_dataclass(found.items[0])
