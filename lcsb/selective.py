"""The backward modes: which layers take part in `loss.backward()`, and how (theory "What one LCSB step is", T7).

Every mode leaves the forward value exact. What changes is the graph that the forward pass leaves behind:

    selected   h' = h + F(h; x)             ordinary backpropagation (recomputed if the model asks for recompute)
    exact      h' = h + F(h; x)             idle: input gradient only, no adapter gradient
    identity   h' = h + detach(F(h; x))     idle: nothing is recomputed, dequantised or differentiated
    mlp        a = h + detach(Attn(h)),     idle: gradient through the MLP branch alone; the attention output of the
               h' = a + MLP(a)              forward pass is kept, so that recompute does not run attention again
    below      h' = h + F(h; x)             idle and below the lowest selected layer: no graph at all

Nothing in the model is replaced: for the time of the context each decoder layer's `forward` is shadowed by an
instance attribute, which is deleted afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lcsb.branches import (
    IdentityPath,
    OnceDifferentiable,
    detached_attention,
    on_hidden,
    shadowed_forward,
    without_adapter_gradients,
)
from lcsb.config import LCSBConfig
from lcsb.layers import decoder_layers
from lcsb.optim import check_optimizer, set_idle_gradients

Role = Literal["selected", "exact", "identity", "mlp", "below"]


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
    """

    t: int
    block: int | None
    selected: tuple[int, ...]
    grad_norm: float
    taken: bool


def plan_roles(
    backward: str, selected: Sequence[int], n_layers: int, reach_bottom: bool = False
) -> list[Role]:
    """The role of each layer at a step.

    Args:
        backward: backward mode.
        selected: selected layers.
        reach_bottom: True if something below layer 0 is trained, so that the gradient must arrive there.

    Returns:
        One role a layer, index 0 nearest to the embedding.
    """
    if not selected:
        raise ValueError("selection: no layer is selected; expected at least one")
    chosen = set(selected)
    lowest = -1 if reach_bottom else min(chosen)
    idle: Role = "exact" if backward == "full" else backward  # type: ignore[assignment]
    return ["selected" if i in chosen else idle if i > lowest else "below" for i in range(n_layers)]


def _switch_off_recompute(model: nn.Module, stack: contextlib.ExitStack) -> bool:
    """Switch the model's own recompute off until `stack` closes; returns whether it was on."""
    on = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in on:
        stack.callback(setattr, module, "gradient_checkpointing", True)
        setattr(module, "gradient_checkpointing", False)  # noqa: B010 - not declared on nn.Module
    return bool(on)


@contextlib.contextmanager
def without_recompute(model: nn.Module) -> Iterator[None]:
    """Inside, no layer is recomputed in backward (activation checkpointing is off)."""
    with contextlib.ExitStack() as stack:
        _switch_off_recompute(model, stack)
        yield


def _reaches(node: Any, targets: set[int]) -> bool:
    """Whether the graph below `node` ends in a parameter whose id is in `targets`."""
    stack, seen = [node], set()
    while stack:
        current = stack.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        if id(getattr(current, "variable", None)) in targets:
            return True
        stack.extend(parent for parent, _ in current.next_functions)
    return False


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
        _refuse_other_adapters(model)
        self.model, self.config, self.t = model, config, t
        self.layers = decoder_layers(model, config.layers)
        self.adapters, self.outer = _trainable_by_layer(model, self.layers)
        #: layers with adapters; one without is idle for good and leaves the cycle
        self.trainable_layers = [i for i, group in enumerate(self.adapters) if group]
        if not self.trainable_layers:
            raise ValueError(
                f"adapters: none of the {len(self.layers)} decoder layers has a trainable parameter; attach LoRA "
                "adapters first (lcsb.attach_lora, peft.get_peft_model)"
            )
        self.schedule = config.make_schedule(len(self.trainable_layers), seed)
        self.selected: tuple[int, ...] = ()
        self.roles: list[Role] | None = None
        self.recompute = False
        self._optimizer_checked: int | None = None
        self._forwards: list[Callable[..., Any]] = []
        self._restore = contextlib.ExitStack()

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
            for configuration in _configurations(self.model):
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
        self.recompute |= _switch_off_recompute(self.model, stack)

    # -- one step ------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[int, ...]:
        """Select the layers of step t; returns them, ascending."""
        if not self._forwards:
            raise RuntimeError("begin: not inside `with selective_backward(...)`")
        self._take_over_recompute(self._restore)
        positions = self.schedule.selected(self.t)
        self.selected = tuple(self.trainable_layers[i] for i in positions)
        self.roles = plan_roles(self.config.backward, self.selected, len(self.layers))
        return self.selected

    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of everything that some step of the cycle trains."""
        outer = self.outer if self.config.outer == "train" else {}
        return {name: p for group in (*self.adapters, outer) for name, p in group.items()}

    def idle_parameters(self) -> list[nn.Parameter]:
        """The adapters of the layers that are not selected."""
        chosen = set(self.selected)
        return [p for i, group in enumerate(self.adapters) if i not in chosen for p in group.values()]

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of the selected layers' adapters and of the outer trained parameters."""
        outer = self.outer if self.config.outer == "train" else {}
        groups = (*(self.adapters[i] for i in self.selected), outer)
        return {name: p for group in groups for name, p in group.items()}

    def apply_idle_policy(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimiser's next step follow the idle policy (`step` does this itself)."""
        if self._optimizer_checked != id(optimizer):
            check_optimizer(optimizer, self.parameters(), self.config.idle)
            self._optimizer_checked = id(optimizer)
        set_idle_gradients(self.idle_parameters(), self.config.idle)

    def advance(self) -> None:
        """Count a step as taken."""
        self.t += 1
        self.roles = None

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
        block = self.schedule.block_index(self.t)
        gradients = {name: p.grad for name, p in self.trained_parameters().items() if p.grad is not None}
        if not gradients:
            raise RuntimeError(
                f"step {self.t}: none of the selected layers {list(self.selected)} has a gradient"
            )
        norm = float(nn.utils.get_total_norm(list(gradients.values())))
        if not torch.isfinite(torch.tensor(norm)):
            optimizer.zero_grad(set_to_none=True)
            if self.config.on_nonfinite == "stop":
                bad = [
                    name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())
                ]
                where = f"first in {bad[0]}" if bad else "in the total norm (overflow)"
                raise NonFiniteError(
                    f"step {self.t}{f', batch {batch}' if batch else ''}: the gradient is not finite, {where}; "
                    "the step was not taken"
                )
            return StepRecord(self.t, block, self.selected, norm, taken=False)
        if max_norm is not None and norm > max_norm:
            for gradient in gradients.values():
                gradient.mul_(max_norm / norm)
        self.apply_idle_policy(optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        record = StepRecord(self.t, block, self.selected, norm, taken=True)
        self.advance()
        return record

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
            hidden = self._cut_input_gradient(hidden)
        return getattr(self, f"_run_{self.roles[index]}")(index, run, hidden)

    def _cut_input_gradient(self, hidden: torch.Tensor) -> torch.Tensor:
        """Undo the input-gradient hook, which would make every backward pass run to the bottom.

        Peft, the k-bit helper, Trainer.train() and SFTTrainer all switch it on, in ways that removing one handle does
        not undo; here it does not matter who did. A trained parameter below layer 0 does keep its gradient.
        """
        if not hidden.requires_grad:
            return hidden
        outer = {id(p) for p in self.outer.values() if p.requires_grad}
        if outer and _reaches(hidden.grad_fn, outer):
            self.roles = plan_roles(self.config.backward, self.selected, len(self.layers), reach_bottom=True)
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

        return on_hidden(self._run_exact(index, without_attention, hidden), OnceDifferentiable.apply)


def _refuse_other_adapters(model: nn.Module) -> None:
    """LoRA, rsLoRA and DoRA have their parameters inside the layers, which is what a block is made of."""
    for name, settings in (getattr(model, "peft_config", None) or {}).items():
        kind = getattr(settings.peft_type, "value", settings.peft_type)
        if kind != "LORA":
            raise ValueError(f"adapter {name!r} is of PEFT type {kind}, expected LORA (LoRA, rsLoRA or DoRA)")


def _trainable_by_layer(
    model: nn.Module, layers: Sequence[nn.Module]
) -> tuple[list[dict[str, nn.Parameter]], dict[str, nn.Parameter]]:
    """Trainable parameters of each layer, and those outside all layers, by name."""
    owner: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if parameter.requires_grad and owner.setdefault(id(parameter), index) != index:
                raise ValueError(
                    f"adapters: layers {owner[id(parameter)]} and {index} share a trainable parameter; a shared "
                    "parameter belongs to no single block"
                )
    by_layer: list[dict[str, nn.Parameter]] = [{} for _ in layers]
    outer: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = by_layer[owner[id(parameter)]] if id(parameter) in owner else outer
            group[name] = parameter
    return by_layer, outer


def _configurations(model: nn.Module) -> list[Any]:
    """The model's configuration objects that carry `use_cache` (multimodal wrappers have one for the text part)."""
    found: dict[int, Any] = {}
    for module in model.modules():
        configuration = getattr(module, "config", None)
        if configuration is not None and hasattr(configuration, "use_cache"):
            found[id(configuration)] = configuration
    return list(found.values())


def selective_backward(
    model: nn.Module, config: LCSBConfig | None = None, *, seed: int = 0, t: int = 0
) -> SelectiveBackward:
    """A context in which `loss.backward()` follows `config`; the model is left as it was found.

    Args:
        model: a causal language model with adapters (PEFT LoRA, rsLoRA or DoRA).
        config: defaults to `LCSBConfig()`.
        seed: the run's seed, used by schedules that draw if the config has none of its own.
        t: steps already taken (resume).

    Example:
        >>> with selective_backward(model, LCSBConfig("exact", layers_per_step=8)) as lcsb:  # doctest: +SKIP
        ...     lcsb.begin()
        ...     model(**batch).loss.backward()
        ...     record = lcsb.step(optimizer)

    Raises:
        ValueError: no decoder layers or no adapters were found, or k does not fit the number of layers.
    """
    return SelectiveBackward(model, config or LCSBConfig(), seed=seed, t=t)
