"""Find the decoder layers of a language model, and the attention branch of each, by structure.

No class name and no attribute path is built in. A decoder layer is an element of a `ModuleList` that lies in the
subtree of the module which owns the token embedding, and which holds exactly one attention branch (a child whose
forward takes an attention mask or an equivalent) and matrices outside it (the MLP). In a multimodal wrapper the
token embedding belongs to the language model, so a vision stack is never looked at.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

# A forward argument that only an attention branch has: its mask, or what stands for a mask in ALiBi and T5-like models.
_ATTENTION_ARGUMENTS = frozenset({"attention_mask", "attn_mask", "alibi", "position_bias"})
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def decoder_layers(model: nn.Module, layers: str | Sequence[nn.Module] | None = None) -> list[nn.Module]:
    """The decoder layers of `model`, from the embedding upward.

    Args:
        model: a causal language model, plain, quantised, wrapped by PEFT or part of a multimodal wrapper.
        layers: dotted path of the `ModuleList` (relative to `model` or, under PEFT, to its base model) or the layers
            themselves; wins over discovery.

    Raises:
        ValueError: no such stack or more than one; an encoder-decoder, a mixture of experts, or keys and values
            shared between layers, for which switching off a layer's backward is not defined here.
    """
    return [layer for _, layer in named_decoder_layers(model, layers)]


def named_decoder_layers(
    model: nn.Module, layers: str | Sequence[nn.Module] | None = None
) -> list[tuple[str, nn.Module]]:
    """As `decoder_layers`, with each layer's dotted name in `model`."""
    _refuse_by_config(model)
    if layers is None:
        found = _discover(model)
    elif isinstance(layers, str):
        found = _stack_at(model, layers)
    else:
        found = _given(model, layers)
    _refuse_by_structure(model, found)
    return found


def token_embedding(model: nn.Module) -> nn.Module:
    """The module that maps token ids to the input of the lowest decoder layer.

    Raises:
        ValueError: the model has no `get_input_embeddings` or it returns nothing.
    """
    getter = getattr(model, "get_input_embeddings", None)
    try:
        embedding = getter() if callable(getter) else None
    except NotImplementedError:
        embedding = None
    if not isinstance(embedding, nn.Module):
        raise ValueError(
            f"{_class_name(model)} names no token embedding (get_input_embeddings); "
            "pass layers= as a dotted path or a sequence of modules"
        )
    return embedding


def attention_module(layer: nn.Module) -> nn.Module:
    """The attention branch of a decoder layer: its one child whose forward takes an attention mask.

    Raises:
        ValueError: the layer has no such child, or several (cross attention).
    """
    branches = _attention_branches(layer)
    if len(branches) != 1:
        found = ", ".join(name for name, _ in branches) or "none among " + _child_names(layer)
        raise ValueError(
            f"{type(layer).__name__} must have exactly one attention branch "
            f"(a child whose forward takes one of {', '.join(sorted(_ATTENTION_ARGUMENTS))}); found {found}"
        )
    return branches[0][1]


def is_decoder_layer(module: nn.Module) -> bool:
    """Whether a module has the parts of a decoder layer: one attention branch, and matrices outside it."""
    branches = _attention_branches(module)
    return len(branches) == 1 and any(
        _has_matrix(child) for child in module.children() if child is not branches[0][1]
    )


def _discover(model: nn.Module) -> list[tuple[str, nn.Module]]:
    embedding = token_embedding(model)
    names = {id(module): name for name, module in model.named_modules()}
    if id(embedding) not in names:
        raise ValueError(
            f"the token embedding of {_class_name(model)} is not one of its modules; pass layers="
        )
    path = names[id(embedding)]
    while path:
        path = path.rpartition(".")[0]
        owner = model.get_submodule(path)
        stacks = list(_layer_stacks(owner, path))
        if len(stacks) > 1:
            raise ValueError(
                f"{_class_name(model)} has {len(stacks)} stacks of decoder layers beside its token embedding "
                f"({', '.join(name for name, _ in stacks)}); choose one with layers="
            )
        if stacks:
            name, stack = stacks[0]
            return [(f"{name}.{index}", layer) for index, layer in enumerate(stack)]
    raise ValueError(
        f"found no decoder layers in {_class_name(model)}: looked for a ModuleList whose elements each hold one "
        f"attention branch and an MLP, beside the token embedding {names[id(embedding)]!r}; "
        f"found {_described_lists(model)}; pass layers= as a dotted path or a sequence of modules"
    )


def _layer_stacks(owner: nn.Module, prefix: str) -> Iterator[tuple[str, nn.ModuleList]]:
    """Outermost ModuleLists under `owner` whose elements are all decoder layers."""
    for name, child in owner.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList) and len(child) and all(map(is_decoder_layer, child)):
            yield path, child
        else:
            yield from _layer_stacks(child, path)


def _stack_at(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    roots = [("", model)]
    base = getattr(model, "get_base_model", None)
    if callable(base):
        inner = base()
        roots += [(f"{name}.", module) for name, module in model.named_modules() if module is inner and name]
    for prefix, root in roots:
        try:
            stack = root.get_submodule(path)
        except AttributeError:
            continue
        if not isinstance(stack, nn.ModuleList | nn.Sequential) or not len(stack):
            raise ValueError(f"layers={path!r} is a {type(stack).__name__}, expected a non-empty ModuleList")
        return [(f"{prefix}{path}.{index}", layer) for index, layer in enumerate(stack)]
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    near = difflib.get_close_matches(path, lists, n=1, cutoff=0.0)
    hint = f"; nearest is {near[0]!r}" if near else ""
    raise ValueError(f"layers={path!r} names no module of {_class_name(model)}{hint}")


def _given(model: nn.Module, layers: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    given = list(layers)
    if not given:
        raise ValueError("layers= is an empty sequence, expected at least one module")
    names = {id(module): name for name, module in model.named_modules()}
    for index, layer in enumerate(given):
        if not isinstance(layer, nn.Module) or id(layer) not in names:
            raise ValueError(
                f"layers[{index}] ({type(layer).__name__}) is not a module of {_class_name(model)}"
            )
    if len({id(layer) for layer in given}) != len(given):
        raise ValueError("layers= holds the same module more than once")
    return [(names[id(layer)], layer) for layer in given]


def _refuse_by_config(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if config is None:
        return
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{_class_name(model)} is an encoder-decoder; expected a decoder-only language model"
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    shared = _count(text, "num_kv_shared_layers")
    if shared > 0:
        raise ValueError(
            f"{_class_name(model)} shares keys and values between layers (num_kv_shared_layers={shared}); "
            "expected layers that are independent of each other but for the residual stream"
        )
    for field in _EXPERT_COUNTS:
        # Gemma 4 names an expert count also where its switch is off.
        if _count(text, field) > 1 and getattr(text, "enable_moe_block", True):
            raise ValueError(
                f"{_class_name(model)} is a mixture of experts ({field}={_count(text, field)}); expected dense layers"
            )


def _refuse_by_structure(model: nn.Module, found: list[tuple[str, nn.Module]]) -> None:
    for layer_name, layer in found:
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] == "experts":
                raise ValueError(
                    f"{_class_name(model)} is a mixture of experts ({layer_name}.{name}); expected dense layers"
                )
            if getattr(module, "is_kv_shared_layer", False) is True:
                raise ValueError(
                    f"{_class_name(model)} shares keys and values between layers ({layer_name}.{name})"
                )


def _count(config: Any, field: str) -> int:
    value = getattr(config, field, 0)
    return value if isinstance(value, int) else 0


def _attention_branches(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in layer.named_children() if _takes_attention_mask(child)]


def _takes_attention_mask(module: nn.Module) -> bool:
    # The class's forward and not the instance's: a wrapper put on the instance may hide the arguments.
    try:
        arguments = inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):
        return False
    return not _ATTENTION_ARGUMENTS.isdisjoint(arguments)


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters())


def _class_name(model: nn.Module) -> str:
    base = getattr(model, "get_base_model", None)
    inner = base() if callable(base) else model
    return type(inner).__name__


def _child_names(layer: nn.Module) -> str:
    names = [f"{name} ({type(child).__name__})" for name, child in layer.named_children()]
    return ", ".join(names) or "no children"


def _described_lists(model: nn.Module) -> str:
    lists = [
        f"{name} ({len(module)} x {type(module[0]).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    shown = ", ".join(lists[:4]) + (f" and {len(lists) - 4} more" if len(lists) > 4 else "")
    return f"ModuleLists {shown}" if lists else "no ModuleList"
