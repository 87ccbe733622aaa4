"""Adapters in PEFT's own format: written whole or not at all, and read back key by key.

PEFT itself reads leniently: keys that are missing or left over are passed by, and the model goes on with random or
absent adapters. Here what the file holds and what the model then holds is the same, or the load fails.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lcsb.adapters import refuse_other_adapters
from lcsb.cache import whole_folder
from lcsb.models import remove_input_gradient_hooks

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(model: Any, folder: Path) -> None:
    """Write a PEFT model's adapter to `folder`, which appears whole or not at all; an adapter there is replaced.

    `peft.PeftModel.from_pretrained(base, folder)` reads it in a process that does not have this project.

    Raises:
        OSError: the place cannot be written to (read-only, full); what was there before is there still.
    """
    with whole_folder(folder, replace=True) as temporary, _quiet():
        # "auto" would ask the hub about the base; a trained embedding or head is saved by modules_to_save anyway.
        model.save_pretrained(temporary, save_embedding_layers=False)


def write_adapter(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    r: int,
    alpha: float,
    targets: Sequence[str],
    base: str,
) -> None:
    """Write LoRA matrices that belong to no PEFT model in PEFT's format, beside what else is in `folder`.

    Each of the two files appears whole or not at all, the settings last.

    Args:
        tensors: by the names that PEFT saves.
        r, alpha, targets: rank, alpha and names of the adapted projections.
        base: name of the model that it belongs to.

    Raises:
        OSError: the place cannot be written to.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    settings = LoraConfig(
        r=r,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    written = folder / ".adapter"
    with whole_folder(written, replace=True) as temporary:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            temporary / WEIGHTS,
            {"format": "pt"},
        )
        settings.save_pretrained(temporary)
    for name in (WEIGHTS, SETTINGS):
        (written / name).replace(folder / name)
    written.rmdir()


def load_adapter(model: Any, folder: str | Path, *, trainable: bool = True) -> Any:
    """Put the adapter of `folder` on `model`, or in the place of the equal one that `model` has.

    Args:
        model: a base model without adapters, or a PEFT model whose adapter has the same parameters.
        folder: as `save_adapter` and PEFT write it.
        trainable: continue training (adapters require grad, the rest does not), or inference only (nothing does).

    Returns:
        The PeftModel, in the mode (training, evaluation) of `model`.

    Raises:
        ValueError: no adapter there; a damaged file; an adapter of another PEFT type; a key that the file has and the
            model has not, or the reverse; another shape; a number that is not finite. A base model is left without
            adapters, a PEFT model as it was.
    """
    folder = Path(folder)
    weights = read_weights(folder)
    if getattr(model, "peft_config", None):
        wrapped, added = model, False
    else:
        wrapped, added = _wrap(model, folder), True
    try:
        refuse_other_adapters(wrapped)
        _check_match(folder, weights, _state(wrapped))
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(wrapped, dict(weights))
        _check_loaded(folder, weights, _state(wrapped))
    except ValueError:
        if added:
            wrapped.unload()
        raise
    if not trainable:
        wrapped.requires_grad_(False)
    return wrapped


def base_of(folder: str | Path) -> str:
    """The model that the adapter of `folder` was trained on, as it was named then.

    Raises:
        ValueError: no adapter there, or it names none.
    """
    name = read_settings(Path(folder)).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{Path(folder) / SETTINGS} names no base model; give --model")
    return str(name)


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the adapter in `folder`.

    Raises:
        ValueError: they cannot be read, or are of another PEFT type than LORA.
    """
    path = folder / SETTINGS
    try:
        held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind = held["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    if kind != "LORA":
        raise ValueError(f"{path} is of PEFT type {kind}, expected LORA (LoRA, rsLoRA or DoRA)")
    return held


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the adapter in `folder`, by PEFT's names.

    Raises:
        ValueError: no adapter there, a damaged file, or a number that is not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        found = "no such folder" if not folder.is_dir() else f"no {WEIGHTS} in it"
        raise ValueError(f"{folder}: {found}; expected the folder of a PEFT adapter")
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if not weights:
        raise ValueError(f"{path}: holds no tensor")
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{path}: {name!r} is not finite")
    return weights


def _wrap(model: Any, folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    held = read_settings(folder)
    config = LoraConfig.from_pretrained(str(folder))
    config.inference_mode = False
    trained_on, here = held.get("base_model_name_or_path"), getattr(model, "name_or_path", "")
    if trained_on and here and trained_on != here:
        warnings.warn(f"{folder}: adapter trained on {trained_on!r}, put on {here!r}", stacklevel=3)
    try:
        with torch.random.fork_rng(devices=[]), _quiet():
            wrapped = get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"{folder}: adapter of another model: {str(error).splitlines()[0]}") from None
    wrapped.train(model.training)
    remove_input_gradient_hooks(wrapped)
    return wrapped


def _state(wrapped: Any) -> dict[str, torch.Tensor]:
    """The adapter's tensors under the names that the file uses."""
    from peft import get_peft_model_state_dict

    with _quiet():
        state: dict[str, torch.Tensor] = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    return state


def _check_match(
    folder: Path, weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    odd = sorted(weights.keys() ^ expected.keys())
    if odd:
        missing = sum(name in expected for name in odd)
        where = "not in the file" if odd[0] in expected else "not in the model"
        raise ValueError(
            f"{folder}: adapter of another model or damaged; {missing} keys are missing and {len(odd) - missing} are "
            f"left over, first {odd[0]!r} ({where})"
        )
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{folder}: adapter of another model; {name!r} has shape {list(tensor.shape)}, "
                f"expected {list(expected[name].shape)}"
            )


def _check_loaded(
    folder: Path, weights: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]
) -> None:
    for name, tensor in weights.items():
        if not torch.equal(held[name].detach().cpu(), tensor.to(held[name].dtype)):
            raise ValueError(f"{folder}: {name!r} did not arrive in the model as the file has it")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # PEFT warns of tied targets and of embeddings it cannot look up; both are dealt with here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def adapted_modules(wrapped: nn.Module) -> list[str]:
    """Names, in the base model, of the modules that adapters change (LoRA layers and modules trained whole)."""
    base: Any = wrapped.get_base_model()  # type: ignore[operator]
    return [
        name
        for name, module in base.named_modules()
        if hasattr(module, "lora_A") or hasattr(module, "modules_to_save")
    ]
