"""Checkpoints of one arm: everything that the rest of its trajectory depends on, written whole or not at all.

A checkpoint folder holds `state.safetensors` (adapters, optimiser moments, random state) and `state.json` (steps taken,
lines of metrics, running sums). It is written to a temporary folder and renamed, so a folder that has the final name
is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from reports.records import read_json, write_json

_RANDOM = "random/torch"


def _named_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    tensors = {f"parameter/{name}": p.detach().contiguous() for name, p in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{name}"] = torch.as_tensor(value).detach().contiguous()
    return tensors


def save_checkpoint(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    facts: Mapping[str, Any],
) -> None:
    """Write a checkpoint; `facts` is any strict JSON object.

    Raises:
        OSError: disk full or read-only, in one line; nothing with the final name was made, earlier ones are whole.
    """
    temporary = folder.with_name(folder.name + ".partial")
    tensors = _named_state(parameters, optimizer)
    tensors[_RANDOM] = torch.get_rng_state()
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(tensors, temporary / "state.safetensors")
        with (temporary / "state.safetensors").open("rb") as file:
            os.fsync(file.fileno())
        write_json(temporary / "state.json", dict(facts))
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(
            f"{folder}: the checkpoint cannot be written ({str(error).splitlines()[0]}); earlier ones are whole"
        ) from error


def load_checkpoint(
    folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Restore parameters, optimiser and random state in place; returns the checkpoint's facts.

    Raises:
        ValueError: a damaged file, or tensors that are not this model's (names the folder and the first difference).
    """
    facts: dict[str, Any] = read_json(folder / "state.json")
    try:
        tensors = load_file(folder / "state.safetensors")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / 'state.safetensors'}: cannot be read ({error})") from None
    expected = {f"parameter/{name}" for name in parameters}
    found = {name for name in tensors if name.startswith("parameter/")}
    if expected != found:
        odd = sorted(expected ^ found)[0]
        where = "not in the checkpoint" if odd in expected else "not in the model"
        raise ValueError(
            f"{folder}: checkpoint of another model; {odd.removeprefix('parameter/')!r} is {where}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            saved = tensors[f"parameter/{name}"]
            if saved.shape != parameter.shape:
                raise ValueError(
                    f"{folder}: {name!r} has shape {list(saved.shape)}, expected {list(parameter.shape)}"
                )
            parameter.copy_(saved)
    for name, parameter in parameters.items():
        state = {
            key.split("/", 2)[1]: value
            for key, value in tensors.items()
            if key.startswith("optimizer/") and key.split("/", 2)[2] == name
        }
        if state:
            optimizer.state[parameter] = state
    torch.set_rng_state(tensors[_RANDOM])
    return facts
