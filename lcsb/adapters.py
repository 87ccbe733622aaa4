"""The trainable parameters of a model, by decoder layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

# Settings of PEFT's LoRA that make another method of it: other parameters, losses or forward passes.
_VARIANTS = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip


def refuse_other_adapters(model: nn.Module) -> None:
    """LoRA, rsLoRA and DoRA have their parameters inside the layers, which is what a block is made of."""
    for name, settings in (getattr(model, "peft_config", None) or {}).items():
        kind = getattr(settings.peft_type, "value", settings.peft_type)
        if kind != "LORA":
            raise ValueError(f"adapter {name!r} is of PEFT type {kind}, expected LORA (LoRA, rsLoRA or DoRA)")
        for field in _VARIANTS:
            if getattr(settings, field, None):
                raise ValueError(f"adapter {name!r} is a LoRA with {field}, expected LoRA, rsLoRA or DoRA")


def trainable_by_layer(
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
