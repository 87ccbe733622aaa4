"""Baselines behind the interface of `selective_backward`: begin, loss and gradient, step, record.

Each class is a context that leaves the model as it was, each choice of layers a pure function of (seed, t), so a run
is resumed from its step count, its parameters and its optimiser's state alone. Freezing, surgical fine-tuning and
importance selection are schedules and need no class; `open_method` says which.

    with open_method(model, arm, layers_per_step=8, seed=0) as method:
        method.begin()
        loss = loss_and_gradient(method, lambda: model(**batch).loss)
        record = method.step(optimizer)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from bcd_theory.schedule import Measurements, Schedule
from lcsb.config import LCSBConfig
from lcsb.layers import decoder_layers
from lcsb.selective import NonFiniteError, SelectiveBackward, StepRecord
from reports.records import ArmConfig

THIRDS = ("first", "middle", "last")

Loss = Callable[[], torch.Tensor]
"""A forward pass on one batch: the loss, a scalar that a graph may hang on."""


# -- schedules -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomLayers(Schedule):
    """k layers, uniform without replacement, drawn anew at the steps t with t mod `period` = 0 (LISA's choice)."""

    period: int = 1

    def selected(self, step: int, measurements: Measurements | None = None) -> tuple[int, ...]:
        return self._draw_layers(self._step(step) // self.period, np.ones(self.n_layers))


@dataclass(frozen=True)
class Survival(Schedule):
    """Layer l of 1, ..., N takes part with probability 1 - l/N (1 - `last_survival`), independently at each step.

    A step at which no layer would survive is drawn again: without a layer there is nothing to train.
    """

    last_survival: float = 0.5

    def selected(self, step: int, measurements: Measurements | None = None) -> tuple[int, ...]:
        generator = self._generator(self._step(step))
        depth = np.arange(1, self.n_layers + 1) / self.n_layers
        while True:
            survives = generator.random(self.n_layers) < 1 - depth * (1 - self.last_survival)
            if survives.any():
                return tuple(int(i) for i in np.flatnonzero(survives))


def third_of(n_layers: int, third: str) -> tuple[int, ...]:
    """The first, middle or last of three contiguous parts whose sizes differ by at most one, larger first.

    >>> [third_of(4, third) for third in THIRDS]
    [(0, 1), (2,), (3,)]
    """
    if n_layers < len(THIRDS):
        raise ValueError(f"surgical: {n_layers} layers, expected at least 3 to take a third of")
    part = np.array_split(np.arange(n_layers), len(THIRDS))[THIRDS.index(third)]
    return tuple(int(i) for i in part)


def trained_when_frozen(n_layers: int, frozen: str, trained_layers: int) -> tuple[int, ...]:
    """The `trained_layers` layers that stay trainable when the `lowest` or the `highest` are frozen for good.

    >>> trained_when_frozen(4, "lowest", 1)
    (3,)
    """
    if not 1 <= trained_layers <= n_layers:
        raise ValueError(f"freeze: trained_layers is {trained_layers}, expected 1 to {n_layers}")
    return tuple(range(n_layers)[-trained_layers:] if frozen == "lowest" else range(trained_layers))


# -- methods -------------------------------------------------------------------------------------------------------


class Lisa(SelectiveBackward):
    """LISA, layerwise importance sampled AdamW (Pan et al., arXiv 2403.17919, Algorithm 1).

        for i = 0, 1, ...: freeze all layers but embedding and head; unfreeze `active_layers` layers drawn at random;
                           run AdamW for `period` steps

    The draw is uniform without replacement and at step t a function of (seed, t // period) alone. Frozen layers have
    no gradient and do not move; whatever is trainable outside the decoder layers is trained at every step: nothing
    with adapters; embedding, final norm and head after `unfreeze`. With adapters, exact gradients and kept moments the
    order of blocks is one that T6b allows (for EMA momentum; AdamW adds its own scaling), though T6b's rate over
    cycles is not there: a layer may wait for any number of periods. With outer parameters trained at every step, or
    moments dropped, no theorem here applies.

    Args:
        active_layers: gamma of the paper.
        period: K of the paper.
        moments: what becomes of AdamW's moments of a layer that leaves the selection: `keep` (it goes on from them
            when it is drawn again; memory grows to that of all layers) or `drop` (it starts from zero, with the bias
            correction of a first step). The paper does not say.
        backward: how idle layers above the lowest active one pass the gradient; `exact` is LISA.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        active_layers: int,
        period: int,
        moments: str = "keep",
        backward: str = "exact",
        seed: int = 0,
    ) -> None:
        if period < 1:
            raise ValueError(f"lisa: period is {period}, expected at least 1")
        settings = LCSBConfig(
            backward,  # type: ignore[arg-type]
            "frozen",
            "depth-weighted",
            layers_per_step=active_layers,
            depth_exponent=0.0,
        )
        self.period, self.moments = period, moments
        super().__init__(model, settings, seed=seed)

    def _make_schedule(self, seed: int) -> Schedule:
        return RandomLayers(
            "depth-weighted",
            n_layers=len(self.trainable_layers),
            layers_per_step=self.config.layers_per_step,
            seed=seed,
            depth_exponent=0.0,
            period=self.period,
        )

    def apply_idle_policy(self, optimizer: torch.optim.Optimizer) -> None:
        super().apply_idle_policy(optimizer)
        if self.moments == "drop":
            for parameter in self.idle_parameters():
                optimizer.state.pop(parameter, None)


def unfreeze(model: nn.Module) -> None:
    """Make every weight of a plain model trainable (LISA over whole layers), in place.

    Raises:
        ValueError: the model is quantised or carries adapters.
    """
    if getattr(model, "peft_config", None):
        raise ValueError(
            "lisa over whole layers trains the model's own weights; found adapters, expected a plain model"
        )
    odd = next((name for name, p in model.named_parameters() if not p.is_floating_point()), None)
    if getattr(model, "is_quantized", False) or odd is not None:
        where = f" ({odd} is {model.get_parameter(odd).dtype})" if odd else ""
        raise ValueError(
            f"lisa over whole layers needs an unquantised base; found a quantised one{where}: load it with "
            "quantization=None, or train adapters"
        )
    model.requires_grad_(True)


class Cached(SelectiveBackward):
    """Idle layers reuse their last true gradient: at step t AdamW gets g_i(x^t) of the selected layers, and of every
    other layer j the gradient of the last step at which j was selected.

    Until a layer has been selected for the first time the idle policy says what it gets. The gradient is kept as the
    optimiser received it (after clipping) in the optimiser's own state, key `cached_gradient`, and is saved with it.

    No theorem here applies: every step uses gradients up to p - 1 steps old for all but one block, so it is neither
    block descent (T1, T2) nor the implicit update (T6), and moments see each gradient p times.
    """

    _key = "cached_gradient"
    _fresh: Sequence[tuple[nn.Parameter, torch.Tensor]] = ()

    def apply_idle_policy(self, optimizer: torch.optim.Optimizer) -> None:
        super().apply_idle_policy(optimizer)
        for parameter in self.idle_parameters():
            cached = optimizer.state[parameter].get(self._key) if parameter in optimizer.state else None
            if cached is not None:
                parameter.grad = cached.clone()  # zero_grad may clear it in place
        outer = {id(p) for p in self.outer.values()}
        self._fresh = [
            (p, p.grad)
            for p in self.trained_parameters().values()
            if p.grad is not None and id(p) not in outer
        ]
        self._state = optimizer.state

    def advance(self) -> None:
        # After the optimiser's step: before its first one its state must stay empty, or it would not set it up.
        for parameter, gradient in self._fresh:
            self._state[parameter][self._key] = gradient.clone() if parameter.grad is gradient else gradient
        self._fresh = ()
        super().advance()


class StochasticDepth(SelectiveBackward):
    """Idle layers are left out of the forward pass too: h' = h (Huang et al., arXiv 1603.09382, equation 2).

        h_l = h_{l-1} + b_l F_l(h_{l-1}),   b_l in {0, 1}

    With `last_survival` = p_N the b_l are drawn independently, P(b_l = 1) = 1 - l/N (1 - p_N) (their linear decay,
    equation 4); without it b_l = 1 for the layers that the configured schedule selects.

    Without a graph (evaluation) every layer takes part and unscaled: the paper multiplies branches by their survival
    probability there, which fits training from scratch; a pretrained model's branches have their size already.

    The loss is not that of the model, so T1 to T6 do not apply. What the optimiser does with idle layers is T6 / T6b.
    """

    def __init__(
        self, model: nn.Module, config: LCSBConfig, last_survival: float | None = None, seed: int = 0
    ) -> None:
        if config.backward != "exact":
            raise ValueError(f"stochastic-depth: backward is {config.backward!r}, expected 'exact'")
        self.last_survival = last_survival
        self._as_tuple: dict[type, bool] = {}
        super().__init__(model, config, seed=seed)

    def _make_schedule(self, seed: int) -> Schedule:
        if self.last_survival is None:
            return super()._make_schedule(seed)
        return Survival(
            "depth-weighted",
            n_layers=len(self.trainable_layers),
            seed=seed if self.config.seed is None else self.config.seed,
            last_survival=self.last_survival,
        )

    def _run_exact(self, index: int, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
        kind = type(self.layers[index])
        if kind not in self._as_tuple:
            # Some families answer with a tuple. Asked once, without leaving a trace in the random generators.
            devices = [hidden.device] if hidden.is_cuda else []
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                self._as_tuple[kind] = isinstance(run(hidden), tuple)
        return (hidden,) if self._as_tuple[kind] else hidden

    _run_below = _run_exact


class MeZO(SelectiveBackward):
    """Zeroth-order SGD in the memory of inference (Malladi et al., arXiv 2305.17333, Algorithm 1).

        z ~ N(0, I) from the seed of step t
        g = (L(x + epsilon z) - L(x - epsilon z)) / (2 epsilon)
        x <- x - learning_rate g z

    All adapters are perturbed in place and z is drawn again wherever it is needed, so nothing of the size of the
    model is kept and no graph is built. Use `evaluate` in place of forward and backward; more calls are accumulation
    (the same z, the sum of their g). `step` takes learning rate and (coupled) weight decay from a torch SGD without
    momentum and makes the update itself, as SGD would with the gradient g z.

    Moving to x + epsilon z and back leaves a float rounding of each parameter, as in the paper, also where a step is
    not taken. Dropout draws the same numbers in both evaluations. No theorem here applies: g z is unbiased for a
    smoothed loss and its variance grows with the number of parameters; T6 and T9 are about AdamW.

    Args:
        epsilon: size of the perturbation.
    """

    def __init__(self, model: nn.Module, epsilon: float = 1e-3, seed: int = 0) -> None:
        if not 0 < epsilon < math.inf:
            raise ValueError(f"mezo: epsilon is {epsilon}, expected a positive number")
        super().__init__(model, LCSBConfig("full", seed=seed))
        self.epsilon, self.seed = epsilon, seed
        self._projected: float | None = None

    def begin(self) -> tuple[int, ...]:
        self._projected = None
        return super().begin()

    def _directions(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each trained parameter and its part of z at step t."""
        words = np.random.SeedSequence([self.seed, self.t]).generate_state(1, np.uint64)
        generators: dict[torch.device, torch.Generator] = {}
        for parameter in self.trained_parameters().values():
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(int(words[0] >> np.uint64(1)))
            yield (
                parameter,
                torch.randn(
                    parameter.shape, generator=generators[device], device=device, dtype=parameter.dtype
                ),
            )

    @torch.no_grad()
    def _perturb(self, scale: float) -> None:
        for parameter, direction in self._directions():
            parameter.add_(direction, alpha=scale)

    @torch.no_grad()
    def evaluate(self, loss: Loss) -> torch.Tensor:
        """Two forward passes; returns the mean of the two losses, which is L(x) up to O(epsilon^2)."""
        if self.roles is None:
            raise RuntimeError("evaluate: call begin() first")
        devices = list({p.device for p in self.parameters().values() if p.is_cuda})
        at = 0.0
        try:
            self._perturb(self.epsilon)
            at = self.epsilon
            with torch.random.fork_rng(devices=devices):
                above = loss().detach()
            self._perturb(-2 * self.epsilon)
            at = -self.epsilon
            below = loss().detach()
        finally:
            self._perturb(-at)
        slope = float(above.double() - below.double()) / (2 * self.epsilon)
        self._projected = slope + (self._projected or 0.0)
        return (above + below) / 2

    @torch.no_grad()
    def step(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None = None, batch: str | None = None
    ) -> StepRecord:
        """x <- x - learning_rate (g z + weight_decay x); `grad_norm` of the record is |g| |z|.

        Raises:
            NonFiniteError: g is not finite and `on_nonfinite` is `stop`.
            TypeError, ValueError: the optimiser is not a torch SGD without momentum.
            RuntimeError: called without `begin` and `evaluate`.
        """
        if self.roles is None or self._projected is None:
            raise RuntimeError("step: call begin() and evaluate(loss) first")
        slope, self._projected = self._projected, None
        if self.refresh.agree is not None:  # several processes: the same z everywhere, so g alone is averaged
            slope = float(self.refresh.agree(torch.tensor([slope], dtype=torch.float64), "mean"))
        groups = _sgd_groups(optimizer)
        size = math.sqrt(sum(float(z.double().square().sum()) for _, z in self._directions()))
        norm = abs(slope) * size
        block = self.schedule.block_index(self.t)
        if not math.isfinite(norm):
            if self.config.on_nonfinite == "stop":
                where = f", batch {batch}" if batch else ""
                raise NonFiniteError(
                    f"step {self.t}{where}: the two losses differ by {slope * 2 * self.epsilon}; the step was not taken"
                )
            return StepRecord(self.t, block, self.selected, norm, taken=False)
        if max_norm is not None:
            slope *= min(1.0, max_norm / (norm + 1e-6))
        for parameter, direction in self._directions():
            group = groups[id(parameter)]
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(direction, alpha=-group["lr"] * slope)
        optimizer.zero_grad(set_to_none=True)
        record = StepRecord(self.t, block, self.selected, norm, taken=True)
        self.advance()
        return record

    def apply_idle_policy(self, optimizer: torch.optim.Optimizer) -> None:
        raise TypeError("mezo makes its update itself: call step(optimizer), not optimizer.step()")


def _sgd_groups(optimizer: torch.optim.Optimizer) -> dict[int, Mapping[str, Any]]:
    """Parameter id -> its group, of an optimiser that MeZO can stand in for."""
    if not isinstance(optimizer, torch.optim.SGD):
        raise TypeError(f"mezo: found {type(optimizer).__name__}, expected torch.optim.SGD without momentum")
    for group in optimizer.param_groups:
        if group["momentum"] or group["maximize"]:
            raise ValueError("mezo: found SGD with momentum or maximize, expected plain SGD")
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}


# -- arms ----------------------------------------------------------------------------------------------------------


def open_method(model: nn.Module, arm: ArmConfig, *, layers_per_step: int, seed: int) -> SelectiveBackward:
    """The method that an arm names, on `model`, to be entered with `with`.

    A baseline that is only a choice of layers is a schedule of exact backward:
        freeze      `fixed` and idle `frozen`: block descent that never visits the other blocks. Each step obeys T1
                    and T6b, their convergence is to a stationary point in the trained layers only.
        surgical    the same with one contiguous third (Lee et al., arXiv 2210.11466).
        importance  the schedule `importance` (method `lcsb`); T1 and T6 hold a step, as for any order.

    Args:
        layers_per_step: the run's k; arms that state no number of layers of their own take it.
        seed: the run's seed.

    Raises:
        ValueError: the options do not fit this model.
    """
    options = dict(arm.options)
    k = min(layers_per_step, sum(1 for _ in _layers_with_parameters(model)))
    if arm.method == "lisa":
        return Lisa(
            model,
            active_layers=options["active_layers"] or k,
            period=options["period"],
            moments=options["moments"],
            backward=arm.backward,
            seed=seed,
        )
    if arm.method == "mezo":
        return MeZO(model, epsilon=options["epsilon"], seed=seed)
    if arm.method in ("freeze", "surgical"):
        there = list(_layers_with_parameters(model))
        positions = (
            third_of(len(there), options["third"])
            if arm.method == "surgical"
            else trained_when_frozen(len(there), options["frozen"], options["trained_layers"] or k)
        )
        config = LCSBConfig(
            arm.backward,  # type: ignore[arg-type]
            "frozen",
            "fixed",
            fixed_layers=tuple(there[i] for i in positions),
        )
        return SelectiveBackward(model, config, seed=seed)
    survival = options.pop("last_survival", None)
    config = LCSBConfig(
        arm.backward,  # type: ignore[arg-type]
        arm.idle,
        arm.schedule,
        layers_per_step=None if arm.schedule == "fixed" else k,
        **options,
    )
    if arm.method == "cached":
        return Cached(model, config, seed=seed)
    if arm.method == "stochastic-depth":
        return StochasticDepth(model, config, survival, seed=seed)
    return SelectiveBackward(model, config, seed=seed)


def _layers_with_parameters(model: nn.Module) -> Iterator[int]:
    for index, layer in enumerate(decoder_layers(model)):
        if any(parameter.requires_grad for parameter in layer.parameters()):
            yield index


def loss_and_gradient(method: SelectiveBackward, *losses: Loss) -> torch.Tensor:
    """The forward passes of a step and whatever the method needs of them; returns their sum without a graph.

    A loss that is not finite gets no backward pass: its gradient would only hide where it came from.
    """
    if isinstance(method, MeZO):
        return method.evaluate(lambda: sum((loss() for loss in losses[1:]), losses[0]()))
    values = []
    for loss in losses:
        value = loss()
        if bool(torch.isfinite(value)):
            value.backward()
        values.append(value.detach())
    return torch.stack(values).sum()


def optimizer_for(method: SelectiveBackward, adamw: torch.optim.AdamW) -> torch.optim.Optimizer:
    """The optimiser whose `step` the method takes: AdamW as given, or for MeZO plain SGD with its rate and decay."""
    if not isinstance(method, MeZO):
        return adamw
    groups = [
        {"params": group["params"], "lr": group["lr"], "weight_decay": group["weight_decay"]}
        for group in adamw.param_groups
    ]
    return torch.optim.SGD(groups)


def idle_law_of(method: SelectiveBackward) -> str | None:
    """The theorem that says how idle layers move (T6, T6b), or None where their optimiser step is another one."""
    if isinstance(method, Cached | MeZO):
        return None
    return "T6" if method.config.idle == "momentum" else "T6b"
