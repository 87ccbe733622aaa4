"""Gradient fidelity: how far a surrogate backward pass is from the truth, layer by layer (T7; T2's angle form).

Two layouts. `cyclic`: each layer's adapter gradient while its own block is selected, what training uses. `all-above`:
the same when every layer above it is skipped; it answers after how many skipped layers the direction is lost. Both come
from one true pass and local vector-Jacobian products along its trajectory, one layer at a time from the top, because
each surrogate gradient at a layer's output is known from the layers above. `cyclic_gradients` gets the cyclic layout
from the engine itself, at a pass a block: the slow reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bcd_theory.predictions import SURROGATE_MODES, Fidelity, Layout
from lcsb.branches import detached_attention
from lcsb.config import LCSBConfig
from lcsb.local import hidden_cosine, inner
from lcsb.selective import SelectiveBackward, selective_backward
from lcsb.switches import without_recompute

Gradients = list[dict[str, torch.Tensor]]  # one dict (parameter name -> gradient) a layer


@dataclass(frozen=True)
class FidelityMeasurement:
    """Fidelity on one batch.

    Attributes:
        rows: one `Fidelity` a surrogate mode and layout.
        gradient_norm: 2-norm of the true adapter gradient by layer (N values).
        hidden_cosine: mode -> N one-layer cosines of the hidden gradient (see `Measurements.hidden_cosine`).
        loss: the batch's loss.
    """

    rows: tuple[Fidelity, ...]
    gradient_norm: tuple[float, ...]
    hidden_cosine: dict[str, tuple[float, ...]]
    loss: float


def compare(mode: str, layout: Layout, surrogate: Gradients, truth: Gradients) -> Fidelity:
    """Cosine, norm ratio rho and relative error delta of each layer's adapter gradient (T2).

    A layer whose true gradient is exactly zero has none of the three (None). A surrogate that is exactly zero while
    the truth is not has cosine 0, rho 0 and delta 1.
    """
    cosines: list[float | None] = []
    ratios: list[float | None] = []
    errors: list[float | None] = []
    for approximate, true in zip(surrogate, truth, strict=True):
        true_square = inner(true, true) if true else 0.0
        if true_square == 0.0:
            for values in (cosines, ratios, errors):
                values.append(None)
            continue
        square, product = inner(approximate, approximate), inner(approximate, true)
        cosines.append(product / (square * true_square) ** 0.5 if square > 0 else 0.0)
        ratios.append((square / true_square) ** 0.5)
        errors.append((max(square - 2 * product + true_square, 0.0) / true_square) ** 0.5)
    return Fidelity(mode, layout, tuple(cosines), tuple(ratios), tuple(errors))


def _take_gradients(lcsb: SelectiveBackward, layers: Sequence[int]) -> Gradients:
    """Move the gradients of some layers' adapters out of the model."""
    taken: Gradients = []
    for index in layers:
        group = {}
        for name, parameter in lcsb.adapters[index].items():
            if parameter.grad is None:
                raise RuntimeError(f"{name}: no gradient after backward")
            group[name], parameter.grad = parameter.grad, None
        taken.append(group)
    return taken


def cyclic_gradients(
    model: nn.Module, batch: Mapping[str, torch.Tensor], backward: str, layers_per_step: int | None
) -> Gradients:
    """The adapter gradient that each layer gets when its own block is selected, by the engine itself."""
    config = LCSBConfig(backward, layers_per_step=layers_per_step)  # type: ignore[arg-type]
    with selective_backward(model, config) as lcsb:
        gradients: Gradients = [{} for _ in lcsb.layers]
        for _ in range(lcsb.schedule.cycle_length):
            selected = lcsb.begin()
            model(**batch).loss.backward()
            for index, group in zip(selected, _take_gradients(lcsb, selected), strict=True):
                gradients[index] = group
            lcsb.advance()
    return gradients


@dataclass
class _Trajectory:
    """The true pass: each layer's call, and the true gradient of the hidden state above each layer."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    hidden_gradients: list[torch.Tensor]


def _hidden(call: tuple[tuple[Any, ...], dict[str, Any]]) -> torch.Tensor:
    args, kwargs = call
    return args[0] if args else kwargs["hidden_states"]


def _local(
    layer: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], hidden: torch.Tensor
) -> torch.Tensor:
    """Run one layer alone at `hidden` with the recorded other arguments."""
    args, kwargs = call
    output = layer(hidden, *args[1:], **kwargs) if args else layer(**{**kwargs, "hidden_states": hidden})
    return output[0] if isinstance(output, tuple) else output


@contextlib.contextmanager
def _recording(layers: Sequence[nn.Module], record: _Trajectory) -> Iterator[None]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record.calls.append((args, kwargs))

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        value.register_hook(record.hidden_gradients.append)

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(after).remove)
        yield


def _true_pass(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[_Trajectory, Gradients, float]:
    record = _Trajectory([], [])
    with selective_backward(model, LCSBConfig("full")) as lcsb:
        lcsb.begin()
        with _recording(lcsb.layers, record):
            loss = model(**batch).loss
        loss.backward()
        gradients = _take_gradients(lcsb, lcsb.selected)
        truth: Gradients = [{} for _ in lcsb.layers]
        for index, group in zip(lcsb.selected, gradients, strict=True):
            truth[index] = group
    record.hidden_gradients.reverse()  # backward ran from the top
    return record, truth, float(loss.detach())


@dataclass
class _Surrogates:
    """What the local passes gather, by mode."""

    all_above: dict[str, Gradients]
    cyclic: dict[str, Gradients]
    hidden_cosine: dict[str, list[float]]


def _local_passes(model: nn.Module, record: _Trajectory, layers_per_step: int | None) -> _Surrogates:
    lcsb = selective_backward(model, LCSBConfig("exact", layers_per_step=layers_per_step))
    layers, n = lcsb.layers, len(lcsb.layers)
    top_of_block = {lcsb.trainable_layers[max(block)] for block in lcsb.schedule.blocks}
    found = _Surrogates(
        {mode: [{} for _ in layers] for mode in SURROGATE_MODES},
        {mode: [{} for _ in layers] for mode in SURROGATE_MODES},
        {mode: [0.0] * n for mode in SURROGATE_MODES},
    )
    # The surrogate gradient above the current layer: if all layers from here up are idle, and inside the current block.
    idle = dict.fromkeys(SURROGATE_MODES, record.hidden_gradients[-1])
    inside = dict(idle)
    for index in reversed(range(n)):
        layer, call, group = layers[index], record.calls[index], lcsb.adapters[index]
        hidden = _hidden(call).detach().requires_grad_(True)
        output = _local(layer, call, hidden)
        names, parameters = list(group), list(group.values())
        if index in top_of_block:
            inside = dict(idle)
        for mode in SURROGATE_MODES if group else ():
            below, *own = torch.autograd.grad(output, [hidden, *parameters], inside[mode], retain_graph=True)
            selected = dict(zip(names, own, strict=True))
            found.cyclic[mode][index] = found.all_above[mode][index] = selected
            if index not in top_of_block:
                skipped = torch.autograd.grad(output, parameters, idle[mode], retain_graph=True)
                found.all_above[mode][index] = dict(zip(names, skipped, strict=True))
            inside[mode] = below
        true_above = record.hidden_gradients[index]
        if index > 0:
            true_below = record.hidden_gradients[index - 1]
        else:
            (true_below,) = torch.autograd.grad(output, hidden, true_above)
        del output
        with detached_attention(layer)():
            output = _local(layer, call, hidden)
        (mlp_of_truth,) = torch.autograd.grad(output, hidden, true_above, retain_graph=True)
        if not group:  # never selected, so idle also inside a block
            (inside["mlp"],) = torch.autograd.grad(output, hidden, inside["mlp"], retain_graph=True)
        (idle["mlp"],) = torch.autograd.grad(output, hidden, idle["mlp"])
        found.hidden_cosine["identity"][index] = hidden_cosine(true_above, true_below)
        found.hidden_cosine["mlp"][index] = hidden_cosine(mlp_of_truth, true_below)
    return found


def measure_fidelity(
    model: nn.Module, batch: Mapping[str, torch.Tensor], layers_per_step: int | None
) -> FidelityMeasurement:
    """Fidelity of the modes identity and mlp on one batch, in both layouts.

    Args:
        model: a model with adapters, in evaluation of dropout-free training (dropout would make the two gradients
            belong to different losses).
        batch: keyword arguments of `model`, with labels.
        layers_per_step: k of the cyclic layout.

    Raises:
        ValueError: an active dropout module.
    """
    active = [
        name for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0 and m.training
    ]
    if active:
        raise ValueError(f"fidelity needs a deterministic loss: dropout is active in {active[0]!r}")
    with without_recompute(model):
        record, truth, loss = _true_pass(model, batch)
        found = _local_passes(model, record, layers_per_step)
    layouts: tuple[tuple[Layout, dict[str, Gradients]], ...] = (
        ("cyclic", found.cyclic),
        ("all-above", found.all_above),
    )
    return FidelityMeasurement(
        rows=tuple(
            compare(m, layout, by_mode[m], truth) for layout, by_mode in layouts for m in SURROGATE_MODES
        ),
        gradient_norm=tuple(inner(group, group) ** 0.5 if group else 0.0 for group in truth),
        hidden_cosine={mode: tuple(values) for mode, values in found.hidden_cosine.items()},
        loss=loss,
    )
