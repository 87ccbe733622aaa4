"""Modelled step costs: operation counts against torch's own counter, and limits of the rates."""

from __future__ import annotations

import math

import pytest

from bcd_theory.cost import dequantisation_speedup, speedup, step_seconds
from bcd_theory.device import DeviceRates, modelled_costs
from bcd_theory.geometry import GEOMETRIES, Geometry

TINY = Geometry(3, 48, 80, 4, 2, 12, 100)


def test_forward_operations_are_those_torch_counts() -> None:
    """One layer's products, written in torch and counted by its operation counter; one second an operation."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    tokens, rank = 10, 4
    inputs = {
        name: torch.randn(tokens, shape[1], requires_grad=True) for name, shape in TINY.projections().items()
    }
    counter = FlopCounterMode(display=False)
    with counter:
        for name, (rows, columns) in TINY.projections().items():
            weight, down, up = torch.randn(rows, columns), torch.randn(rank, columns), torch.randn(rows, rank)
            _ = inputs[name] @ weight.T + (inputs[name] @ down.T) @ up.T
        query, key = torch.randn(2, TINY.heads, tokens, TINY.head_dim)
        _ = (query @ key.mT) @ query
    # Causal attention needs half of the dense products that torch counted here.
    dense = 4 * tokens * tokens * TINY.heads * TINY.head_dim
    expected = counter.get_total_flops() - dense / 2
    costs = modelled_costs(TINY, DeviceRates(flops=1.0), tokens=tokens, rank=rank)
    assert costs.forward == pytest.approx(3 * expected)


def test_gradient_operations_are_those_torch_counts() -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    tokens, rank, total = 10, 4, 0
    for rows, columns in TINY.projections().values():
        x = torch.randn(tokens, columns, requires_grad=True)
        down = torch.randn(rank, columns, requires_grad=True)
        up = torch.randn(rows, rank, requires_grad=True)
        y = x @ torch.randn(rows, columns).T + (x @ down.T) @ up.T
        counter = FlopCounterMode(display=False)
        with counter:
            y.sum().backward()
        total += counter.get_total_flops()
    costs = modelled_costs(TINY, DeviceRates(flops=1.0, attention_flops=math.inf), tokens=tokens, rank=rank)
    assert costs.total("input_gradient") + costs.total("adapter_gradient") == pytest.approx(3 * total)


def test_rates_scale_their_own_part_only() -> None:
    slow = modelled_costs(TINY, DeviceRates(1e6, 1e5, 1e6), tokens=16)
    fast = modelled_costs(TINY, DeviceRates(2e6, 1e5, 1e6), tokens=16)
    dequantising = slow.total("dequantisation")
    assert dequantising == pytest.approx(2 * 3 * TINY.layer_weights / 1e5) == fast.total("dequantisation")
    assert slow.head == 2 * fast.head and slow.optimizer == fast.optimizer
    both = slow.total("recompute") + slow.total("input_gradient") - dequantising
    assert both == pytest.approx(2 * (fast.total("recompute") + fast.total("input_gradient") - dequantising))
    unquantised = modelled_costs(TINY, DeviceRates(1e6), tokens=16)
    assert unquantised.total("dequantisation") == 0.0


def test_free_dequantisation_is_the_closed_form_speedup() -> None:
    with_it = modelled_costs(TINY, DeviceRates(1e6, 1e5, math.inf), tokens=16)
    backward = sum(with_it.total(part) for part in ("recompute", "input_gradient", "adapter_gradient"))
    r, phi = backward / with_it.forward, with_it.total("dequantisation") / backward
    without = backward - with_it.total("dequantisation")
    assert dequantisation_speedup(phi, r) == pytest.approx(
        (with_it.forward + backward) / (with_it.forward + without)
    )


def test_a_phone_sized_prediction_orders_the_modes() -> None:
    costs = modelled_costs(GEOMETRIES["qwen2.5-3b"], DeviceRates(5e10, 1e9, 1e8), tokens=256)
    times = [step_seconds(costs, mode, layers_per_step=9) for mode in ("identity", "mlp", "exact", "full")]
    assert times == sorted(times)
    assert 1 < speedup(costs, "exact", layers_per_step=9) < speedup(costs, "identity", layers_per_step=9) < 4
    with pytest.raises(ValueError, match="flops must be a positive rate"):
        DeviceRates(0.0)
    with pytest.raises(ValueError, match="at least 1"):
        modelled_costs(TINY, DeviceRates(1.0), tokens=0)
