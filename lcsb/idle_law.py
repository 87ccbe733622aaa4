"""Checks the implicit update of idle layers against its closed form while a run goes on (claim C2; T6, T6b).

When a layer leaves the selection, its parameters and the optimiser's moments are copied. From then on the closed form
says where each of its tensors is after k idle steps, x_{s+k} - x_s, and the real float32 parameters are held against
it at every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from bcd_theory.momentum import idle_step
from bcd_theory.predictions import LAW_ROUNDINGS, LAW_TOLERANCE

FLOAT32_ROUNDING = 2.0**-24  # relative error of rounding to nearest


@dataclass
class _Departure:
    """One tensor after its last step as a selected one, and the closed form's displacement since then (float64)."""

    parameter: np.ndarray
    displacement: np.ndarray
    first_moment: np.ndarray
    second_moment: np.ndarray
    step_count: int
    idle_steps: int = 0


def _float64(tensor: torch.Tensor) -> np.ndarray:
    """A copy, also of what is float64 on the CPU already."""
    return tensor.detach().to("cpu", torch.float64, copy=True).numpy()


class IdleLaw:
    """Follows the idle tensors of one run.

    Args:
        adapters: one dict (name -> parameter) a layer.
        optimizer: torch AdamW.
        idle: `momentum` (T6) or `frozen` (nothing may move at all).
    """

    def __init__(
        self, adapters: Sequence[Mapping[str, nn.Parameter]], optimizer: torch.optim.Optimizer, idle: str
    ) -> None:
        self._adapters, self._optimizer, self._idle = adapters, optimizer, idle
        self._group = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._departures: dict[str, _Departure] = {}

    def before_step(self, selected: Sequence[int]) -> None:
        """Note the state of the tensors that have just become idle, and forget those that are selected."""
        chosen = set(selected)
        for index, group in enumerate(self._adapters):
            for name, parameter in group.items():
                if index in chosen:
                    self._departures.pop(name, None)
                elif name not in self._departures:
                    self._departures[name] = self._departure(parameter)

    def _departure(self, parameter: nn.Parameter) -> _Departure:
        x = _float64(parameter)
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        if not state:  # never stepped: the moments are zero
            return _Departure(x, np.zeros_like(x), np.zeros_like(x), np.zeros_like(x), 0)
        # Copied: the optimiser overwrites its own tensors.
        moments = _float64(state["exp_avg"]), _float64(state["exp_avg_sq"])
        return _Departure(x, np.zeros_like(x), *moments, int(state["step"]))

    def after_step(self, t: int) -> dict[str, Any] | None:
        """A `law` row for metrics.jsonl, or None if no tensor was idle."""
        if not self._departures:
            return None
        parameters = {name: p for group in self._adapters for name, p in group.items()}
        if self._idle == "frozen":
            moved = sum(
                not np.array_equal(_float64(parameters[name]), departure.parameter)
                for name, departure in self._departures.items()
            )
            return {"kind": "law", "t": t, "checked": len(self._departures), "moved": moved}
        worst, worst_tensor, rounding, violations = 0.0, None, 0, 0
        for name, departure in self._departures.items():
            error, predicted, limit, rounded = self._deviation(departure, parameters[name])
            if predicted < limit or LAW_TOLERANCE * predicted < error <= rounded:
                rounding += 1
                violations += error > limit
                continue
            relative = error / predicted if predicted > 0 else 0.0
            violations += error > LAW_TOLERANCE * predicted
            if relative >= worst:
                worst, worst_tensor = relative, name
        return {
            "kind": "law",
            "t": t,
            "checked": len(self._departures),
            "worst": worst,
            "worst_tensor": worst_tensor,
            "within_rounding": rounding,
            "violations": int(violations),
        }

    def _deviation(self, departure: _Departure, parameter: nn.Parameter) -> tuple[float, float, float, float]:
        """|recorded - predicted|_2, |predicted|_2, 100 float32 roundings of x, and those that decay makes.

        Weight decay multiplies x itself at every step, before momentum is added: two roundings of x a step, which can
        be more than the tolerance of a displacement as small as decay alone gives.
        """
        group = self._group[id(parameter)]
        departure.idle_steps += 1
        departure.displacement += idle_step(
            "adamw",
            k=departure.idle_steps,
            first_moment=departure.first_moment,
            second_moment=departure.second_moment,
            parameter=departure.parameter + departure.displacement if group["weight_decay"] else None,
            step_count=departure.step_count,
            learning_rate=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        recorded = _float64(parameter) - departure.parameter
        error = float(np.linalg.norm(recorded - departure.displacement))
        rounding = FLOAT32_ROUNDING * float(np.linalg.norm(departure.parameter))
        rounded = 2 * departure.idle_steps * rounding if group["weight_decay"] else 0.0
        return error, float(np.linalg.norm(departure.displacement)), LAW_ROUNDINGS * rounding, rounded
