"""T6 held against a training run, whatever form the optimiser keeps its moments in. Use as `import idle`."""

from __future__ import annotations

import numpy as np
import torch
from transformers import TrainerCallback

from bcd_theory.momentum import idle_step


def moments(state):
    """m and v of one parameter as float64 arrays, dequantised if bitsandbytes keeps them in 8 bits."""
    if "exp_avg" in state:
        return [state[key].double().numpy().copy() for key in ("exp_avg", "exp_avg_sq")]
    if state["state1"].dtype != torch.uint8:
        return [state[key].double().numpy().copy() for key in ("state1", "state2")]
    from bitsandbytes.functional import dequantize_blockwise

    return [
        dequantize_blockwise(
            state[f"state{i}"], absmax=state[f"absmax{i}"], code=state[f"qmap{i}"], blocksize=256
        )
        .double()
        .numpy()
        for i in (1, 2)
    ]


class Law(TrainerCallback):
    """Predicts the idle layers' moves of a run by AdamW; `found` has (error, predicted, start) norms of each idle step.

    Put it after the LCSBCallback. `lcsb` is a function that returns the run's SelectiveBackward.
    """

    def __init__(self, lcsb):
        self.lcsb, self.found, self.types, self._left = lcsb, [], set(), {}

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        lcsb = self.lcsb()
        for index, group in enumerate(lcsb.adapters):
            for name, parameter in group.items():
                entry = optimizer.state.get(parameter)
                if index in lcsb.selected or not entry:
                    self._left.pop(name, None)
                elif name not in self._left:
                    x = parameter.detach().double().numpy().copy()
                    self._left[name] = [
                        parameter,
                        x,
                        *moments(entry),
                        int(entry["step"]),
                        0,
                        np.zeros_like(x),
                    ]
                    self.types.add(next(v.dtype for k, v in entry.items() if k in ("exp_avg", "state1")))

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        squares = np.zeros(3)
        for entry in self._left.values():
            parameter, x, m, v, count, k, displacement = entry
            group = groups[id(parameter)]
            entry[5] = k = k + 1
            displacement += idle_step(
                "adamw", k=k, first_moment=m, second_moment=v, step_count=count, parameter=x + displacement,
                learning_rate=group["lr"], betas=group["betas"][:2], eps=group["eps"],
                weight_decay=group["weight_decay"],
            )  # fmt: skip
            error = parameter.detach().double().numpy() - x - displacement
            squares += [np.sum(error**2), np.sum(displacement**2), k * np.sum(x**2)]
        if self._left:
            self.found.append(np.sqrt(squares))
