"""Writing packed folders piece by piece: safetensors files whose tensors are filled a slice at a time, and their index.

    shard = ShardFile(path, entries)          entries: name -> (type, shape), known before the first byte is written
    shard.put(name, values, first)            values go to the numbers first, first + 1, ... of the tensor
    shard.close()                             flushed to the disk; a tensor that is not full is an error

A packed matrix is what bitsandbytes saves: codes [n/2, 1], `.absmax`, `.quant_map`, `.quant_state.bitsandbytes__nf4`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lcsb.engine.packed import NF4_LEVELS

TYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}
NAMES: Final = {dtype: name for name, dtype in TYPES.items()}

Entries = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

INDEX: Final = "model.safetensors.index.json"


def count(shape: tuple[int, ...]) -> int:
    """Numbers of a tensor of that shape."""
    total = 1
    for width in shape:
        total *= width
    return total


class ShardFile:
    """A safetensors file with every place fixed at the start. Wider types first, so each tensor is aligned.

    Raises:
        ValueError: values of another type, or outside their tensor.
        OSError: the disk is full or read-only.
    """

    def __init__(self, path: Path, entries: Entries) -> None:
        self.path, self.entries = path, dict(entries)
        order = sorted(self.entries, key=lambda name: (-self.entries[name][0].itemsize, name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        offset = 0
        for name in order:
            dtype, shape = self.entries[name]
            end = offset + count(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            self._offsets[name] = offset
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self.nbytes = self._data + offset
        self._left = {name: count(shape) for name, (_, shape) in self.entries.items()}
        self._file = path.open("wb")
        try:
            self._file.write(len(text).to_bytes(8, "little") + text)
            self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def put(self, name: str, values: Tensor, first: int = 0) -> None:
        """Write `values` to the numbers from `first` on of a tensor; each number is to be written once."""
        dtype, shape = self.entries[name]
        if values.dtype != dtype:
            raise ValueError(f"{self.path}: {name} is {dtype}, got values of {values.dtype}")
        if first + values.numel() > count(shape):
            raise ValueError(
                f"{self.path}: {name} has {count(shape)} numbers, got some up to {first + values.numel()}"
            )
        raw = values.contiguous().view(-1).view(torch.uint8).numpy().data
        at = self._data + self._offsets[name] + first * dtype.itemsize
        while raw:
            written = os.pwrite(self._file.fileno(), raw, at)
            raw, at = raw[written:], at + written
        self._left[name] -= values.numel()

    def close(self) -> None:
        """Flush to the disk. Raises ValueError if a tensor was not written in full."""
        wrong = [name for name, left in self._left.items() if left]
        try:
            if wrong:
                raise ValueError(f"{self.path}: {wrong[0]} has {self._left[wrong[0]]} numbers left to write")
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def quant_state(rows: int, columns: int, block_size: int) -> Tensor:
    """bitsandbytes' description of a packed matrix, as the bytes that it saves."""
    state = {"quant_type": "nf4", "blocksize": block_size, "dtype": "float32", "shape": [rows, columns]}
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@dataclass(frozen=True)
class Content:
    """What one shard holds.

    Attributes:
        plain: name -> (type, shape) of tensors written as they are.
        packed: name (with .weight) -> (rows, columns) of matrices in NF4.
    """

    plain: Entries
    packed: Mapping[str, tuple[int, int]]
    block_size: int = 64

    @property
    def entries(self) -> Entries:
        """Every tensor of the file."""
        entries = dict(self.plain)
        for name, (rows, columns) in self.packed.items():
            entries |= _packed_entries(name, rows, columns, self.block_size)
        return entries


def _packed_entries(key: str, rows: int, columns: int, block_size: int) -> Entries:
    """The four tensors of a packed matrix `key` (its name with .weight).

    Raises:
        ValueError: the matrix does not divide into whole quantisation blocks.
    """
    weights = rows * columns
    if columns % 2 or weights % block_size:
        raise ValueError(
            f"{key}: {rows} x {columns}, expected an even number of columns and whole quantisation blocks of "
            f"{block_size}"
        )
    return {
        key: (torch.uint8, (weights // 2, 1)),
        f"{key}.absmax": (torch.float32, (weights // block_size,)),
        f"{key}.quant_map": (torch.float32, (16,)),
        f"{key}.quant_state.bitsandbytes__nf4": (
            torch.uint8,
            tuple(quant_state(rows, columns, block_size).shape),
        ),
    }


def put_descriptions(shard: ShardFile, content: Content) -> None:
    """The two small tensors of each packed matrix: its levels and its description."""
    for key, (rows, columns) in content.packed.items():
        shard.put(f"{key}.quant_map", torch.tensor(NF4_LEVELS))
        shard.put(f"{key}.quant_state.bitsandbytes__nf4", quant_state(rows, columns, content.block_size))


def quantization_config() -> dict[str, Any]:
    """What config.json says of the packed matrices, in the words of transformers."""
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }


def shard_name(index: int, total: int) -> str:
    """File name of shard `index` (from 0) of `total`."""
    return f"model-{index + 1:05d}-of-{total:05d}.safetensors"


def index_json(contents: Sequence[Content]) -> dict[str, Any]:
    """The index that transformers reads: tensor -> file name."""
    shards = {shard_name(i, len(contents)): content.entries for i, content in enumerate(contents)}
    size = sum(
        count(shape) * dtype.itemsize for entries in shards.values() for dtype, shape in entries.values()
    )
    weights = {name: file for file, entries in shards.items() for name in entries}
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(weights.items()))}


def write_json(path: Path, value: object) -> None:
    """Strict JSON, flushed to the disk, whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
