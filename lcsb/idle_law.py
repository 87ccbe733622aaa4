"""Checks the implicit update of idle layers against its closed form while a run goes on (claim C2; T6, T6b).

The optimiser's moments are copied when a layer leaves the selection; from then on the closed form says where each of
its tensors goes, and the real float32 parameters are held against it at every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from bcd_theory.momentum import idle_step
from bcd_theory.predict import LAW_ROUNDINGS, LAW_TOLERANCE

FLOAT32_ROUNDING = 2.0**-24  # relative error of rounding to nearest


@dataclass
class _Departure:
    """Moments of one tensor after its last step as a selected one, and the steps its optimiser state counted."""

    first_moment: np.ndarray
    second_moment: np.ndarray
    step_count: int
    idle_steps: int = 0


def _float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


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
        self._before: dict[str, np.ndarray] = {}

    def before_step(self, selected: Sequence[int]) -> None:
        """Note the idle tensors' values, and the moments of those that have just become idle."""
        self._before.clear()
        chosen = set(selected)
        for index, group in enumerate(self._adapters):
            for name, parameter in group.items():
                if index in chosen:
                    self._departures.pop(name, None)
                    continue
                self._before[name] = _float64(parameter)
                if self._idle == "momentum" and name not in self._departures:
                    self._departures[name] = self._departure(parameter)

    def _departure(self, parameter: nn.Parameter) -> _Departure:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        if not state:  # never stepped: the moments are zero
            zero = np.zeros(tuple(parameter.shape))
            return _Departure(zero, zero, 0)
        # Kept in float64: the optimiser overwrites its own tensors.
        return _Departure(_float64(state["exp_avg"]), _float64(state["exp_avg_sq"]), int(state["step"]))

    def after_step(self, t: int) -> dict[str, Any] | None:
        """A `law` row for metrics.jsonl, or None if no tensor was idle."""
        if not self._before:
            return None
        parameters = {name: p for group in self._adapters for name, p in group.items()}
        if self._idle == "frozen":
            moved = sum(not np.array_equal(_float64(parameters[n]), x) for n, x in self._before.items())
            return {"kind": "law", "t": t, "checked": len(self._before), "moved": moved}
        worst, worst_tensor, rounding, violations = 0.0, None, 0, 0
        for name, before in self._before.items():
            parameter = parameters[name]
            error, predicted, limit = self._deviation(name, parameter, before)
            if predicted < limit:
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
            "checked": len(self._before),
            "worst": worst,
            "worst_tensor": worst_tensor,
            "within_rounding": rounding,
            "violations": int(violations),
        }

    def _deviation(
        self, name: str, parameter: nn.Parameter, before: np.ndarray
    ) -> tuple[float, float, float]:
        """|recorded - predicted|_2, |predicted|_2 and 100 float32 roundings of x, for one tensor at one idle step."""
        departure, group = self._departures[name], self._group[id(parameter)]
        departure.idle_steps += 1
        predicted = idle_step(
            "adamw",
            k=departure.idle_steps,
            first_moment=departure.first_moment,
            second_moment=departure.second_moment,
            parameter=before,
            step_count=departure.step_count,
            learning_rate=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        recorded = _float64(parameter) - before
        limit = LAW_ROUNDINGS * FLOAT32_ROUNDING * float(np.linalg.norm(before))
        return float(np.linalg.norm(recorded - predicted)), float(np.linalg.norm(predicted)), limit
