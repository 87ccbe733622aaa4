"""Probe steps of plain block gradient descent: does the loss fall as T1 promises?

    x' = x - m g_i / L_i,   m in {1, 2, 4},   L_i the largest eigenvalue of block i's Hessian at x, on the same batch

Mode exact takes the true gradient g_i of the block. A surrogate takes its own direction, and its cosine and norm ratio
to g_i say what T2 promises of it. Every step is taken back: the parameters are bit for bit as before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lcsb.config import LCSBConfig
from lcsb.local import inner
from lcsb.measure.curvature import Curvature
from lcsb.measure.fidelity import cyclic_gradients
from lcsb.selective import selective_backward
from lcsb.switches import without_recompute

MULTIPLES = (1.0, 2.0, 4.0)
MODES = ("exact", "identity")
_PRODUCTS = 100


@dataclass(frozen=True)
class Probes:
    """Steps as rows of evidence, and what was not tried.

    Attributes:
        steps: rows for `reports.evidence.ProbeStep`, without point and seed.
        skipped: one sentence a block without positive curvature, where no step 1/L_i exists.
        products: Hessian products used.
    """

    steps: list[dict[str, Any]]
    skipped: list[str]
    products: int


def measure_probes(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    layers_per_step: int | None,
    *,
    seed: int,
    modes: Sequence[str] = MODES,
    multiples: Sequence[float] = MULTIPLES,
    tolerance: float = 1e-2,
) -> Probes:
    """Probe steps in every block of the cycle on one batch.

    Args:
        model: a model with adapters, without active dropout; left as it was.
        batch: keyword arguments of `model`, with labels.
        layers_per_step: k of the cyclic blocks.
        seed: of the start vectors of the eigenvalue computation.
        tolerance: relative accuracy of L_i.

    Raises:
        NotDeterministicError: the loss changes from one evaluation to the next.
        NotConvergedError: an eigenvalue did not settle.
    """
    with without_recompute(model):
        lcsb = selective_backward(model, LCSBConfig("exact", layers_per_step=layers_per_step))
        blocks = [tuple(lcsb.trainable_layers[i] for i in block) for block in lcsb.schedule.blocks]
        adapters = [dict(group) for group in lcsb.adapters]
        wanted = dict.fromkeys(("exact", *modes))
        fields = {mode: cyclic_gradients(model, batch, mode, layers_per_step) for mode in wanted}
        steps: list[dict[str, Any]] = []
        skipped: list[str] = []
        products = 0
        for index, block in enumerate(blocks):
            parameters = _of_block(adapters, block)
            gradients = {mode: _of_block(field, block) for mode, field in fields.items()}
            with Curvature(lambda: model(**batch).loss, parameters) as curvature:
                largest = curvature.eigenvalue(
                    "largest", seed=seed, tolerance=tolerance, most_products=_PRODUCTS
                )
                products += curvature.products
            if largest.value <= 0:
                skipped.append(
                    f"block {index}: the largest eigenvalue is {largest.value:.3g}, so no step 1/L_i"
                )
                continue
            truth = gradients["exact"]
            squared = inner(truth, truth)
            before = _loss(model, batch)
            for mode in modes:
                direction = gradients[mode]
                size = inner(direction, direction)
                cosine = ratio = 1.0
                if mode != "exact":
                    cosine = inner(direction, truth) / (size * squared) ** 0.5 if size * squared > 0 else 0.0
                    ratio = (size / squared) ** 0.5 if squared > 0 else 0.0
                for multiple in multiples:
                    after = _after(model, batch, parameters, direction, multiple / largest.value)
                    steps.append(
                        {
                            "block": index,
                            "multiple": multiple,
                            "mode": mode,
                            "loss_before": before,
                            "loss_after": after if math.isfinite(after) else None,
                            "gradient_squared": squared,
                            "smoothness": largest.value,
                            "smoothness_residual": largest.residual,
                            "cosine": cosine,
                            "norm_ratio": ratio,
                        }
                    )
    return Probes(steps, skipped, products)


def _of_block(groups: Sequence[Mapping[str, Any]], block: Sequence[int]) -> dict[str, Any]:
    return {name: value for layer in block for name, value in groups[layer].items()}


@torch.no_grad()
def _loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> float:
    return float(model(**batch).loss.double())


@torch.no_grad()
def _after(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    direction: Mapping[str, torch.Tensor],
    step: float,
) -> float:
    """The loss at x - step * direction; x is restored."""
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.sub_(direction[name], alpha=step)
        return _loss(model, batch)
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(before[name])
