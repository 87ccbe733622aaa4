"""What bitsandbytes' layers need before they can be trusted in training on a CPU, and what a model holds in memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def make_trainable_safe(model: nn.Module) -> int:
    """Make each quantised linear layer compute one function, in training and evaluation alike; returns their number.

    4-bit, on CPUs with AVX512_BF16: in evaluation mode, when the input needs no gradient, `Linear4bit.forward`
    repacks its weight in place; from then on the product takes a bfloat16 kernel outside autograd, so later training
    steps lose gradients and accuracy without a word (or the layer fails where a row is no multiple of 64). The
    switch is an attribute of each layer and is turned off here; copies (deepcopy, `to`) keep it.

    int8 on the CPU: in evaluation mode the activations are cast to float16 and quantised as well, in training mode
    the weight is dequantised instead. Here both modes take the second way.

    4-bit, on any CPU: where a row is no multiple of the quantisation block long, the dequantisation takes wrong scales
    (bitsandbytes 0.50): training and evaluation agree, but on a matrix twice as far from the original. Such layers
    are named in a warning.

    Raises:
        ValueError: a 4-bit weight is repacked already, which rounded its scales to bfloat16 for good.
    """
    import bitsandbytes as bnb

    count, misread = 0, []
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            block = getattr(getattr(module.weight, "quant_state", None), "blocksize", 64)
            if module.weight.device.type == "cpu" and module.in_features % block:
                misread.append(name)
            module.support_avx512bf16_for_cpu = False
            if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                raise ValueError(
                    f"{name}: its 4-bit weight was repacked by an evaluation on this CPU, with rounded scales; "
                    "load the model anew and call this before its first forward"
                )
            count += 1
        elif isinstance(module, bnb.nn.Linear8bitLt):
            if module.weight.device.type == "cpu":
                module.state.__class__ = _dequantising_state()
            count += 1
    if misread:
        warnings.warn(
            f"{len(misread)} 4-bit layers, first {misread[0]}, have rows that are no multiple of the quantisation "
            "block long: on the CPU bitsandbytes reads wrong scales for them, so their error is about twice NF4's",
            stacklevel=2,
        )
    return count


@functools.cache
def _dequantising_state() -> type:
    from bitsandbytes import MatmulLtState

    class DequantisingState(MatmulLtState):  # type: ignore[misc]
        """A state that answers `is_training` with yes, which on the CPU means: dequantise, then multiply."""

        @property
        def is_training(self) -> bool:
            return True

        @is_training.setter
        def is_training(self, value: bool) -> None:
            pass

    return DequantisingState


def check_shapes(model: nn.Module) -> None:
    """Check that each quantised matrix has the shape of its layer: bitsandbytes packs, and takes, any shape.

    Raises:
        ValueError: one has another shape; names the layer and both shapes.
    """
    import bitsandbytes as bnb

    for name, module in model.named_modules():
        if not isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            continue
        state = getattr(module.weight, "quant_state", None)
        shape = tuple(module.weight.shape if state is None else state.shape)
        expected = (module.out_features, module.in_features)
        if shape != expected:
            raise ValueError(f"{name}.weight has shape {shape}, expected {expected}")


def refuse_half(model: nn.Module) -> None:
    """Refuse a model that computes in float16 on the CPU.

    float16 needs loss scaling to survive the backward pass (its range ends at 65504, its smallest normal number is
    6e-5), and there is none on the CPU. On CUDA, Trainer's own gradient scaler takes care of it.

    Raises:
        ValueError: a weight, or the compute type of a 4-bit layer, is float16 and lies on the CPU.
    """
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        # A 4-bit layer is told its type, or takes that of its input at the first call.
        computes = getattr(owner, "compute_dtype", None) if hasattr(parameter, "quant_state") else None
        if torch.float16 in (parameter.dtype, computes):
            raise ValueError(
                f"{name} computes in float16 on the CPU, where nothing scales the loss; expected float32 or bfloat16 "
                "(load_quantized(..., compute_dtype=...), from_pretrained(..., dtype=torch.float32))"
            )


def set_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the type in which a model computes: 4-bit products, and the weights that are not quantised.

    A folder saved quantised gives both the types they were saved in, whatever type the load asks for.
    """
    import bitsandbytes as bnb

    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = dtype
            module.compute_type_is_set = True
    for parameter in model.parameters():
        # 4-bit weights are integers here; buffers (rotary frequencies) keep their own precision.
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.dtype = dtype
        if hasattr(getattr(config, "quantization_config", None), "bnb_4bit_compute_dtype"):
            config.quantization_config.bnb_4bit_compute_dtype = dtype


def own_memory(model: nn.Module) -> None:
    """Copy every weight that lies in a mapped file to memory of its own (CPU).

    After a load, weights point into the mapped file, and the whole file stays mapped while one of them does: the
    pages count as the process's file memory and not as the model's.
    """
    for owner, name, tensor in _held_tensors(model):
        if tensor.device.type != "cpu":
            continue
        copied = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            was_int8 = getattr(tensor, "CB", None) is not None
            tensor.data = copied
            if was_int8:
                tensor.CB = tensor.data  # type: ignore[attr-defined]  # the same matrix under its second name
        else:
            setattr(owner, name, copied)


def parameter_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of the weights a model holds, by kind, each storage once: float32, bfloat16, ...; nf4, fp4, int8; scales.

    `scales` are the quantisation constants (absmax, code tables, nested scales) that lie outside the parameters.
    """
    table: dict[str, int] = {}
    seen = set()
    for owner, name, tensor in _held_tensors(model):
        if tensor.data_ptr() in seen or not tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        kind = str(tensor.dtype).removeprefix("torch.")
        if isinstance(tensor, nn.Parameter):
            kind = getattr(tensor, "quant_type", kind) if getattr(tensor, "quant_state", None) else kind
        elif not isinstance(owner, nn.Module) or name == "SCB":
            kind = "scales"
        table[kind] = table.get(kind, 0) + tensor.numel() * tensor.element_size()
    return dict(sorted(table.items()))


def dequantized_weight(module: nn.Module) -> torch.Tensor:
    """The weight matrix [out, in] that a linear layer stands for, in its compute type (float32 for int8)."""
    weight: Any = module.weight
    matrix: torch.Tensor = weight.data
    state = getattr(weight, "quant_state", None)
    if state is not None:
        from bitsandbytes.functional import dequantize_4bit

        matrix = dequantize_4bit(weight.data, state)
    elif weight.dtype == torch.int8:
        held: Any = module.state if getattr(weight, "SCB", None) is None else weight
        matrix = weight.data.float() * (held.SCB.float().unsqueeze(1) / 127.0)
    return matrix


def _held_tensors(model: nn.Module) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """(owner, attribute, tensor) of each parameter, buffer and quantisation constant; shared parameters once."""
    for parameter in model.parameters():
        yield model, "", parameter
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer
        weight = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        while state is not None:
            for name in ("absmax", "code", "offset"):
                if isinstance(getattr(state, name, None), torch.Tensor):
                    yield state, name, getattr(state, name)
            state = getattr(state, "state2", None)
        for holder in (weight, getattr(module, "state", None)):
            scale = getattr(holder, "SCB", None)
            if isinstance(scale, torch.Tensor):
                yield holder, "SCB", scale
