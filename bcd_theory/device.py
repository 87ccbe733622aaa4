"""Step costs of any geometry on any machine from a few measured rates (T12): what a phone would need, without one.

Every part of a step is a number of floating-point operations and a number of dequantised weights, divided by the
machine's rates. Norms, activations and rotations are left out, so small layers come out too fast; where the model can
be run, measure instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bcd_theory.cost import StepCosts
from bcd_theory.geometry import PROJECTIONS, Geometry

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Measured rates of a machine.

    Attributes:
        flops: floating-point operations a second in matrix products of the layers' sizes (multiply and add are two).
        dequantised_weights: weights a second from packed codes to compute type; inf for an unquantised base.
        optimizer_parameters: parameters a second in one AdamW step.
        attention_flops: the same as flops, for the two products inside attention; None: flops.
    """

    flops: float
    dequantised_weights: float = math.inf
    optimizer_parameters: float = 1e9
    attention_flops: float | None = None

    def __post_init__(self) -> None:
        for name in ("flops", "dequantised_weights", "optimizer_parameters"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a positive rate, got {getattr(self, name)}")
        if self.attention_flops is not None and not self.attention_flops > 0:
            raise ValueError(f"attention_flops must be a positive rate, got {self.attention_flops}")


def modelled_costs(
    geometry: Geometry,
    rates: DeviceRates,
    *,
    tokens: int,
    batch: int = 1,
    rank: int = 16,
    targets: Sequence[str] = PROJECTIONS,
) -> StepCosts:
    """Seconds by part of one full step (T12), from counts of operations.

    With n = batch x tokens positions, w weights in a matrix, and a = rank (rows + columns) of its adapter:

    - forward and recompute: 2 n (w + a) operations and w dequantised weights a matrix; causal attention
      2 n tokens (heads x head_dim) operations for its two products;
    - input gradient: the same, with 2.5 times the attention products (scores again, and two gradients each);
    - adapter gradient: 2 n a;
    - head and loss: 4 n (hidden x vocabulary), forward and input gradient.

    Raises:
        ValueError: sizes below 1.
    """
    if tokens < 1 or batch < 1 or rank < 1:
        raise ValueError(f"tokens, batch and rank must be at least 1, got {tokens}, {batch}, {rank}")
    positions = tokens * batch
    attention_rate = rates.flops if rates.attention_flops is None else rates.attention_flops
    products = 2 * positions * tokens * geometry.heads * geometry.head_dim / attention_rate

    def through(names: Sequence[str]) -> tuple[float, float, float]:
        """Seconds of (products with weights and adapters, dequantising, adapter gradient) for some matrices."""
        weights = adapters = 0
        for name in names:
            rows, columns = geometry.projections()[name]
            weights += rows * columns
            adapters += rank * (rows + columns) if name in targets else 0
        return (
            2 * positions * (weights + adapters) / rates.flops,
            weights / rates.dequantised_weights,
            2 * positions * adapters / rates.flops,
        )

    matrices, dequantising, adapter_gradient = through(PROJECTIONS)
    attention_matrices, attention_dequantising, _ = through(ATTENTION)
    n = geometry.layers
    forward = matrices + dequantising + products
    return StepCosts(
        layers=n,
        forward=n * forward,
        head=4 * positions * geometry.hidden * geometry.vocabulary / rates.flops,
        optimizer=geometry.lora_parameters(rank, targets) / rates.optimizer_parameters,
        recompute=n * forward,
        input_gradient=n * (matrices + dequantising + 2.5 * products),
        adapter_gradient=n * adapter_gradient,
        dequantisation=n * 2 * dequantising,
        attention_recompute=n * (attention_matrices + attention_dequantising + products),
        attention_input_gradient=n * (attention_matrices + attention_dequantising + 2.5 * products),
    )
