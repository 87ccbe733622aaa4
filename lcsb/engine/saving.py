"""Checkpoints and adapters of the memory engine, written layer by layer, whole or not at all.

A checkpoint is a copy of every layer's x, m and v, so steps taken after it can write to a mapped file as they like.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lcsb.engine.engine import Engine
from lcsb.engine.shards import ShardFile
from reports.records import read_json, write_json

_FILE = "state.safetensors"


@contextlib.contextmanager
def _whole(folder: Path, what: str) -> Iterator[Path]:
    """A folder beside it that takes its name when all is written; a failure to write is one line."""
    temporary = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(
            f"{folder}: the {what} cannot be written ({error.strerror or error}); earlier ones are whole"
        ) from error


def save_state(folder: Path, engine: Engine, facts: Mapping[str, Any]) -> None:
    """Write a checkpoint of an engine that owes no idle step; `facts` is any strict JSON object.

    Raises:
        OSError: disk full or read-only, in one line; nothing with the final name was made.
    """
    states = engine.states
    entries = {_name(index): (torch.float32, (3, states.size)) for index in range(states.layers)}
    with _whole(folder, "checkpoint") as temporary:
        with ShardFile(temporary / _FILE, entries) as file:
            for index in range(states.layers):
                for row, values in enumerate((states.x(index), *states.moments(index))):
                    file.put(_name(index), values, row * states.size)
                states.release(index)
        write_json(temporary / "state.json", {**facts, "engine": {"t": engine.t, "steps": states.steps}})


def load_state(folder: Path, engine: Engine) -> dict[str, Any]:
    """Restore an engine's states and step counts; returns the checkpoint's facts.

    Raises:
        ValueError: a damaged file, or another model's (names the folder).
    """
    facts: dict[str, Any] = read_json(folder / "state.json")
    states = engine.states
    try:
        with safe_open(folder / _FILE, "pt") as saved:
            found = len(saved.keys())
        if found != states.layers:
            raise ValueError(
                f"{folder}: checkpoint of {found} layers, expected {states.layers}; of another model"
            )
        for index in range(states.layers):
            # Opened for each layer: one open file would keep the pages of all layers in memory.
            with safe_open(folder / _FILE, "pt") as saved:
                rows = saved.get_slice(_name(index))
                if rows.get_shape() != [3, states.size]:
                    raise ValueError(
                        f"{folder}: {_name(index)} has shape {rows.get_shape()}, expected {[3, states.size]}"
                    )
                for row, values in enumerate((states.x(index), *states.moments(index))):
                    values.copy_(rows[row])
                states.release(index)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / _FILE}: cannot be read ({error})") from None
    engine.t, states.steps[:] = int(facts["engine"]["t"]), facts["engine"]["steps"]
    return facts


def _name(index: int) -> str:
    return f"layer.{index}"


def save_adapter(folder: Path, engine: Engine, base: str) -> None:
    """Write the adapters as PEFT saves them: adapter_model.safetensors and adapter_config.json.

    Args:
        base: name of the model that they belong to.

    Raises:
        OSError: disk full or read-only, in one line.
    """
    engine.settle()
    places = [(name, index, tuple(view.shape)) for name, index, view in engine._adapter_places()]
    lora = engine.lora
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }
    with _whole(folder, "adapter") as temporary:
        entries = {name: (torch.float32, shape) for name, _, shape in places}
        with ShardFile(temporary / "adapter_model.safetensors", entries) as file:
            for name, index, view in engine._adapter_places():
                file.put(name, view)
                engine.states.release(index)
        write_json(temporary / "adapter_config.json", config)
        with (temporary / "adapter_config.json").open("rb") as written:
            os.fsync(written.fileno())
