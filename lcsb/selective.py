"""The backward modes: which layers take part in `loss.backward()`, and how (theory "What one LCSB step is", T7).

Every mode leaves the forward value exact. What changes is the graph that the forward pass leaves behind:

    selected   h' = h + F(h; x)             ordinary backpropagation (recomputed if the model asks for recompute)
    exact      h' = h + F(h; x)             idle: input gradient only, no adapter gradient
    identity   h' = h + detach(F(h; x))     idle: nothing is recomputed, dequantised or differentiated
    mlp        a = h + detach(Attn(h)),     idle: gradient through the MLP branch alone; the attention output of the
               h' = a + MLP(a)              forward pass is kept, so that recompute does not run attention again
    below      h' = h + F(h; x)             idle and below the lowest selected layer: no graph at all

In mode certified an idle layer is exact, identity or mlp, as its block's plan says. Plans, and the schedules that go by
measurements, are refreshed every R steps: the backward pass of that step's first micro-batch is an exact one over all
layers, whose gradient the selected layers keep and whose measurements stay.

Nothing in the model is replaced: for the time of the context each decoder layer's `forward` is shadowed by an
instance attribute, which is deleted afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bcd_theory.schedule import Schedule
from lcsb.adapters import refuse_other_adapters, trainable_by_layer
from lcsb.branches import (
    IdentityPath,
    OnceDifferentiable,
    detached_attention,
    on_hidden,
    reaches,
    refuse_cache,
    require_path,
    shadowed_forward,
    without_adapter_gradients,
)
from lcsb.config import LCSBConfig
from lcsb.layers import decoder_layers
from lcsb.measured import Measured, PlanRecord
from lcsb.optim import check_optimizer, set_idle_gradients
from lcsb.quantized import refuse_half
from lcsb.refresh import Refresh
from lcsb.roles import Role, plan_roles
from lcsb.switches import cache_settings, switch_off_recompute

_MAY_CHANGE = ("layers", "on_nonfinite", "ram_budget")
"""Settings that a resumed run may change; `layers` is compared by what it found."""


class NonFiniteError(FloatingPointError):
    """A loss or gradient that is not finite, met with `on_nonfinite="stop"`; no state was changed."""


@dataclass(frozen=True)
class StepRecord:
    """What one call of `SelectiveBackward.step` did.

    Attributes:
        t: index of the optimiser step, counted in steps taken (a skipped one keeps its number).
        block: index of the selected block, None if the schedule has no blocks.
        selected: selected layers, ascending, as positions among all decoder layers.
        grad_norm: 2-norm of the gradients of the selected layers (and of outer trained parameters), before clipping.
        taken: False if the step was skipped.
        plan: the block's plan (mode certified).
        refreshed: the plans made at this step, before it was taken.
    """

    t: int
    block: int | None
    selected: tuple[int, ...]
    grad_norm: float
    taken: bool
    plan: PlanRecord | None = None
    refreshed: tuple[PlanRecord, ...] = ()


class SelectiveBackward:
    """Controls one model's backward pass; made by `selective_backward`.

    Per step: `begin()`, any number of forward and backward passes (accumulation), `step(optimizer)`.

    Attributes:
        t: optimiser steps taken.
        schedule: which layers at step t.
        layers: the decoder layers, index 0 nearest to the embedding.
        adapters: one dict (parameter name -> parameter) a layer.
    """

    def __init__(self, model: nn.Module, config: LCSBConfig, seed: int = 0, t: int = 0) -> None:
        refuse_other_adapters(model)
        refuse_half(model)
        self.model, self.config, self.t = model, config, t
        self.layers = decoder_layers(model, config.layers)
        self.adapters, self.outer = trainable_by_layer(model, self.layers)
        self._order = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        #: layers with adapters; one without is idle for good and leaves the cycle
        self.trainable_layers = [i for i, group in enumerate(self.adapters) if group]
        if not self.trainable_layers:
            raise ValueError(
                f"adapters: none of the {len(self.layers)} decoder layers has a trainable parameter; attach LoRA "
                "adapters first (lcsb.attach_lora, peft.get_peft_model)"
            )
        self.schedule = self._make_schedule(seed)
        self.selected: tuple[int, ...] = ()
        self.roles: list[Role] | None = None
        #: measurements, and the plans and selections made from them
        self.refresh = Refresh(config, self.schedule, self.layers, self.trainable_layers, self.adapters)
        self._last_plan: tuple[int, PlanRecord] | None = None  # the newest step taken and its plan
        self._started = 0.0
        self.recompute = False
        self._optimizer_checked: int | None = None
        self._forwards: list[Callable[..., Any]] = []
        self._restore = contextlib.ExitStack()

    def _make_schedule(self, seed: int) -> Schedule:
        return self.config.make_schedule(len(self.trainable_layers), seed, self.trainable_layers)

    # -- life cycle ----------------------------------------------------------------------------------------------

    def __enter__(self) -> SelectiveBackward:
        if any("forward" in layer.__dict__ and hasattr(layer.forward, "_lcsb") for layer in self.layers):
            raise RuntimeError(
                "selective_backward: this model is already inside a selective_backward context"
            )
        with contextlib.ExitStack() as stack:
            for index, layer in enumerate(self.layers):
                original = layer.forward
                self._forwards.append(original)
                stack.enter_context(shadowed_forward(layer, self._layer_forward(index)))
            for configuration in cache_settings(self.model):
                # A key/value cache is of no use in training and is filled twice by a recompute.
                stack.callback(setattr, configuration, "use_cache", configuration.use_cache)
                configuration.use_cache = False
            if self.config.outer == "freeze":
                for parameter in self.outer.values():
                    stack.callback(parameter.requires_grad_, True)
                    parameter.requires_grad_(False)
            self._take_over_recompute(stack)
            self._restore = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.roles = None
        self._restore.close()
        self._forwards.clear()

    def _take_over_recompute(self, stack: contextlib.ExitStack) -> None:
        """Switch the model's own recompute off and do it here (use_reentrant=False): the roles decide what is redone.

        Trainer may switch it on again at any time, so `begin` looks again.
        """
        self.recompute |= switch_off_recompute(self.model, stack)

    # -- one step ------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[int, ...]:
        """Select the layers of step t; returns them, ascending.

        Where a refresh of the schedule `importance` is due the answer is all layers, and the selection is made at the
        end of the first backward pass, from what it measures: read `selected` after it.
        """
        if not self._forwards:
            raise RuntimeError("begin: not inside `with selective_backward(...)`")
        self._take_over_recompute(self._restore)
        self._started = time.perf_counter()
        self.selected = self.refresh.begin(self.t)
        self._set_roles()
        return self.selected

    def _set_roles(self, reach_bottom: bool = False) -> None:
        n = len(self.layers)
        if self.refresh.pending:
            # One exact backward pass over all layers; those that are not selected give their gradient back.
            self.roles = plan_roles("full", self.trainable_layers, n, reach_bottom)
            return
        plan = self.plan
        grades = None if plan is None else plan.grades
        self.roles = plan_roles(self.config.backward, self.selected, n, reach_bottom, grades)

    @property
    def plan(self) -> PlanRecord | None:
        """The plan in force for the selected layers (mode certified)."""
        return self.refresh.plan(self.selected)

    @property
    def measured(self) -> Measured:
        """What the run has measured so far and goes on by; part of `state_dict`."""
        return self.refresh.measured

    def _end_of_exact_pass(self) -> None:
        self.selected = self.refresh.end_of_pass(self.t, self.selected)
        self._set_roles()

    def finish_refresh(self) -> tuple[PlanRecord, ...]:
        """Make this step's measurements, if a refresh was due and its backward pass has ended.

        `step`, `apply_idle_policy` and the next micro-batch do this themselves.

        Returns:
            The plans made at this step (mode certified).
        """
        if self.refresh.finish(self.t) and self.roles is not None:
            self._set_roles()
        return self.refresh.plans

    def log(self) -> dict[str, float | str]:
        """What the run log shows of plan and schedule, for the step just taken."""
        values: dict[str, float | str] = {}
        if self._last_plan is not None:
            t, plan = self._last_plan
            values |= plan.log(t)
        if self.refresh.plans:
            values["lcsb/refresh_work"] = sum(plan.work for plan in self.refresh.plans)
            held = [p.replaced_cosine for p in self.refresh.plans if p.replaced_cosine is not None]
            if held:  # the true bias of the plans that were in force until now
                values["lcsb/plan_cosine_before"] = min(held)
        if self.schedule.name == "adaptive":
            values["lcsb/layers_per_step"] = len(self.selected)
        return values

    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of everything that some step of the cycle trains."""
        outer = self.outer if self.config.outer == "train" else {}
        return {name: p for group in (*self.adapters, outer) for name, p in group.items()}

    def idle_parameters(self) -> list[nn.Parameter]:
        """The adapters of the layers that are not selected."""
        chosen = set(self.selected)
        return [p for i, group in enumerate(self.adapters) if i not in chosen for p in group.values()]

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of the selected layers' adapters and of the outer trained parameters, in model order."""
        outer = self.outer if self.config.outer == "train" else {}
        groups = (*(self.adapters[i] for i in self.selected), outer)
        found = {name: p for group in groups for name, p in group.items()}
        return {name: found[name] for name in self._order if name in found}

    def gradient_norm(self) -> torch.Tensor:
        """2-norm of the gradients of the selected layers and outer parameters, as one vector.

        Raises:
            RuntimeError: none of them has a gradient.
        """
        gradients = [p.grad for p in self.trained_parameters().values() if p.grad is not None]
        if not gradients:
            raise RuntimeError(
                f"step {self.t}: none of the selected layers {list(self.selected)} has a gradient"
            )
        return nn.utils.get_total_norm(gradients)

    def nonfinite_error(self, batch: str | None = None) -> NonFiniteError:
        """The error that says which step, batch and parameter has a gradient that is not finite."""
        gradients = {name: p.grad for name, p in self.trained_parameters().items() if p.grad is not None}
        bad = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
        where = (
            f"in {len(bad)} of {len(gradients)} parameters, first in {bad[0]}"
            if bad
            else "in its norm (overflow)"
        )
        return NonFiniteError(
            f"step {self.t}{f', batch {batch}' if batch else ''}: the gradient is not finite {where}; "
            "the step was not taken"
        )

    def apply_idle_policy(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimiser's next step follow the idle policy (`step` does this itself)."""
        self._require_measured()
        self.finish_refresh()
        if self._optimizer_checked != id(optimizer):
            check_optimizer(optimizer, self.parameters(), self.config.idle)
            self._optimizer_checked = id(optimizer)
        set_idle_gradients(self.idle_parameters(), self.config.idle)

    def advance(self) -> None:
        """Count a step as taken."""
        self.finish_refresh()
        plan = self.plan
        self._last_plan = None if plan is None else (self.t, plan)
        self.refresh.note_seconds(self.t, time.perf_counter() - self._started)
        self.t += 1
        self.roles = None

    def _require_measured(self) -> None:
        if self.refresh.pending:
            raise RuntimeError(
                f"step {self.t}: a refresh is due and no backward pass has reached all layers; call loss.backward() "
                "on a loss of this step's forward pass first"
            )

    def step(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None = None, batch: str | None = None
    ) -> StepRecord:
        """Finite check, clip, idle policy, `optimizer.step()`, `zero_grad`, advance.

        Args:
            optimizer: holds every adapter of every layer.
            max_norm: clip the selected layers' gradients, as one vector, to this 2-norm.
            batch: name of the batch, for the message if a gradient is not finite.

        Raises:
            NonFiniteError: a gradient is not finite and `on_nonfinite` is `stop`. Gradients are cleared; parameters,
                moments and t are as before.
            RuntimeError: called without `begin`, or no selected layer received a gradient.
        """
        if self.roles is None:
            raise RuntimeError("step: call begin() and run a backward pass first")
        self._require_measured()
        block = self.refresh.block_index(self.t)
        total = self.gradient_norm()
        norm = float(total)
        if not math.isfinite(norm):
            error = self.nonfinite_error(batch)
            optimizer.zero_grad(set_to_none=True)
            if self.config.on_nonfinite == "stop":
                raise error
            return StepRecord(self.t, block, self.selected, norm, taken=False)
        if max_norm is not None:
            # torch's own formula, max_norm / (norm + 1e-6), so that Trainer and a hand-written loop agree bit for bit
            nn.utils.clip_grads_with_norm_(self.trained_parameters().values(), max_norm, total)
        self.apply_idle_policy(optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        record = StepRecord(self.t, block, self.selected, norm, True, self.plan, self.refresh.plans)
        self.advance()
        return record

    # -- resume --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as strict JSON: steps taken, measurements, the settings that must not change.

        Call it between steps. Nothing here draws random numbers: schedules are functions of (seed, t, measurements).
        """
        settings = dataclasses.replace(self.config, layers=None).to_dict()
        state = {
            "t": self.t,
            "measured": self.measured.to_dict(),
            "config": {key: value for key, value in settings.items() if key not in _MAY_CHANGE},
            "schedule": dataclasses.asdict(self.schedule),
            "n_layers": len(self.layers),
            "trainable_layers": self.trainable_layers,
        }
        restored: dict[str, Any] = json.loads(json.dumps(state))
        return restored

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on where `state_dict` was taken.

        Raises:
            ValueError: the state is of another schedule, configuration or number of layers (all of them are named).
        """
        expected = ("t", "measured", "config", "schedule", "n_layers", "trainable_layers")
        missing = [key for key in expected if key not in state]
        if missing:
            raise ValueError(f"checkpoint: the state of the backward selection has no {missing[0]!r}")
        now = self.state_dict()
        pairs = {key: (state[key], now[key]) for key in ("n_layers", "trainable_layers")}
        for part in ("schedule", "config"):
            for key in sorted({*now[part], *state[part]}):
                pairs.setdefault(key, (state[part].get(key), now[part].get(key)))
        differ = [f"{key} was {old!r} and is {new!r}" for key, (old, new) in pairs.items() if old != new]
        if differ:
            raise ValueError(f"checkpoint of another run: {'; '.join(differ)}")
        self.refresh.measured = Measured.from_dict(state["measured"])
        self.refresh.abandon()
        self.t, self.roles = int(state["t"]), None

    # -- the layers' forward -------------------------------------------------------------------------------------

    def _layer_forward(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(index, args, kwargs)

        forward._lcsb = True  # type: ignore[attr-defined]
        return forward

    def _run(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        original = self._forwards[index]
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if self.roles is None:
            raise RuntimeError("forward pass with gradients inside selective_backward: call begin() first")
        if self.recompute:
            refuse_cache((*args, *kwargs.values()))
        if args:
            hidden, rest = args[0], args[1:]

            def run(hidden: torch.Tensor) -> Any:
                return original(hidden, *rest, **kwargs)
        else:
            hidden = kwargs["hidden_states"]
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}

            def run(hidden: torch.Tensor) -> Any:
                return original(hidden_states=hidden, **others)

        if index == 0:
            self.finish_refresh()
            hidden = self._cut_input_gradient(hidden)
        recorded = self.refresh.recording(index)
        if recorded is not None:
            recorded.note(self.layers[index], run, hidden)
        output = getattr(self, f"_run_{self.roles[index]}")(index, run, hidden)
        if recorded is not None:
            self.refresh.watch(recorded, output, self._end_of_exact_pass)
        return output

    def _cut_input_gradient(self, hidden: torch.Tensor) -> torch.Tensor:
        """Undo the input-gradient hook, which would make every backward pass run to the bottom.

        Peft, the k-bit helper, Trainer.train() and SFTTrainer all switch it on, in ways that removing one handle does
        not undo; here it does not matter who did. A trained parameter below layer 0 does keep its gradient.
        """
        if not hidden.requires_grad:
            return hidden
        outer = {id(p) for p in self.outer.values() if p.requires_grad}
        if outer and reaches(hidden.grad_fn, outer):
            self._set_roles(reach_bottom=True)
            return hidden
        return hidden.detach()

    def _with_recompute(self, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
        return checkpoint(run, hidden, use_reentrant=False) if self.recompute else run(hidden)

    def _run_selected(self, index: int, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
        return self._with_recompute(run, hidden)

    def _run_below(self, index: int, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
        with torch.no_grad():
            return run(hidden)

    def _run_exact(self, index: int, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
        parameters = tuple(self.adapters[index].values())

        def without_adapters(hidden: torch.Tensor) -> Any:
            with without_adapter_gradients(parameters):
                return run(hidden)

        return self._with_recompute(without_adapters, hidden)

    def _run_identity(self, index: int, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
        with torch.no_grad():
            output = run(hidden)
        return on_hidden(output, lambda value: IdentityPath.apply(hidden, value))

    def _run_mlp(self, index: int, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
        attention = detached_attention(self.layers[index], keep=self.recompute)

        def without_attention(hidden: torch.Tensor) -> Any:
            with attention():
                return run(hidden)

        output = self._run_exact(index, without_attention, hidden)
        require_path(self.layers[index], hidden, output)
        return on_hidden(output, OnceDifferentiable.apply)


def selective_backward(
    model: nn.Module, config: LCSBConfig | None = None, *, seed: int = 0, t: int = 0
) -> SelectiveBackward:
    """A context in which `loss.backward()` follows `config`; the model is left as it was found.

    Args:
        model: a causal language model with adapters (PEFT LoRA, rsLoRA or DoRA), or an `EngineModel`.
        config: defaults to `LCSBConfig()`.
        seed: the run's seed, used by schedules that draw if the config has none of its own.
        t: steps already taken (resume).

    Example:
        >>> with selective_backward(model, LCSBConfig("exact", layers_per_step=8)) as lcsb:  # doctest: +SKIP
        ...     lcsb.begin()
        ...     model(**batch).loss.backward()
        ...     record = lcsb.step(optimizer)

    Raises:
        ValueError: no decoder layers or no adapters were found, or k does not fit the number of layers; a memory
            budget for a model that is in memory already.
    """
    config = config or LCSBConfig()
    open_selection = getattr(model, "selective_backward", None)  # EngineModel brings its own
    if open_selection is not None:
        return open_selection(config, seed=seed, t=t)  # type: ignore[no-any-return]
    if config.ram_budget is not None:
        raise ValueError(
            f"ram_budget: found {config.ram_budget!r} for a {type(model).__name__} that is in memory already; a budget "
            "is kept by the memory engine: LCSBTrainer(model='folder of packed weights', lcsb=config), or "
            "lcsb.EngineModel('folder', config) in place of this model"
        )
    return SelectiveBackward(model, config, seed=seed, t=t)
