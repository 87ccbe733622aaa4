"""REF-BACK: plain autograd references of the backward modes, written without lcsb.selective.

Branch outputs of idle layers are detached by forward hooks on the branch modules; everything else is ordinary
backpropagation. Use as `import reference`.
"""

from __future__ import annotations

import contextlib

import torch

from lcsb.layers import attention_module, decoder_layers


def _detach(module, args, output):
    return (output[0].detach(), *output[1:]) if isinstance(output, tuple) else output.detach()


def mlp_module(layer):
    """The MLP of a decoder layer, by the name all tested families use."""
    return layer.mlp


@contextlib.contextmanager
def detached_branches(model, grades):
    """Branch outputs are constants in the layers of `grades`: both (identity) or attention's alone (mlp)."""
    handles = []
    for index, layer in enumerate(decoder_layers(model)):
        grade = grades.get(index, "exact")
        if grade in ("identity", "mlp"):
            handles.append(attention_module(layer).register_forward_hook(_detach))
        if grade == "identity":
            handles.append(mlp_module(layer).register_forward_hook(_detach))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradients(model, batch, backward="full", selected=()):
    """Adapter gradients of the selected layers (all if none are named), by parameter name.

    `backward`: the mode of every idle layer, or a dict with a grade for single layers (others are exact).
    """
    layers = decoder_layers(model)
    chosen = set(selected) or set(range(len(layers)))
    wanted = {id(p) for index in chosen for p in layers[index].parameters() if p.requires_grad}
    names = {name: p for name, p in model.named_parameters() if id(p) in wanted}
    grades = backward
    if not isinstance(backward, dict):
        grades = {index: backward for index in range(len(layers)) if index not in chosen}
    with detached_branches(model, grades):
        loss = model(**batch).loss
    values = torch.autograd.grad(loss, list(names.values()))
    return dict(zip(names, values, strict=True)), loss.detach()
