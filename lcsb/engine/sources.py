"""What a conversion reads: config, files, and tensors by rows, from a safetensors folder.

Rows are read into memory of their own, never through a map: no page of a source counts as this process's memory.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lcsb.engine.mapped import MappedFolder
from lcsb.engine.shards import INDEX

# Of one piece; 4 MiB in float32.
NUMBERS_AT_ONCE = 1 << 20
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_COPIED = ("tokenizer", "special_tokens_map", "added_tokens", "vocab.", "merges.", "chat_template", "generation_config",
           "LICENSE", "LICENCE", "NOTICE", "SOURCE.txt")  # fmt: skip


class Source(ABC):
    """Tensors under transformers' names, read by rows.

    Attributes:
        label: what errors call it.
        files: name -> paths whose contents, one after another, are that file.
        config: config.json of the unquantised model.
        tied: whether the head is the embedding.
    """

    label: str
    files: dict[str, list[Path]]
    config: dict[str, Any]

    @abstractmethod
    def names(self) -> list[str]:
        """All tensors."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The type that holds a tensor without a loss (float32 for quantised blocks)."""

    @abstractmethod
    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) (numbers of a vector) in the type `dtype`, in memory of their own."""

    def row_step(self, name: str) -> int:
        """Rows are to be read in multiples of this."""
        return 1

    def packed(self, name: str) -> dict[str, Any] | None:
        """bitsandbytes' description of a matrix that is packed already, None if it is not."""
        return None

    def write_tokenizer(self, folder: Path) -> list[str]:
        """Write the tokenizer's files; returns what the user should know."""
        return []

    def extra_bytes(self) -> int:
        """Memory that the tokenizer takes beyond a conversion's own."""
        return 0


class FolderSource(Source):
    """A hub folder: config.json and safetensors, whole or in shards; float32, float16, bfloat16 or packed NF4.

    Raises:
        ValueError: not such a folder; a shard that its index names is missing, a file is cut short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.label = folder, str(folder)
        if not (folder / "config.json").is_file():
            kind = "an adapter's" if (folder / "adapter_config.json").is_file() else "no model's"
            raise ValueError(
                f"{folder} is {kind} folder, expected one with config.json and .safetensors weights"
            )
        weights = _weight_files(folder)
        self._mapped = MappedFolder(folder, weights)
        self.config = dict(self._mapped.config)
        held = self.config.pop("quantization_config", None)
        if held is not None:
            _refuse_other_than_nf4(folder, held)
        paths = [folder / "config.json", *weights]
        self.files = {path.name: [path] for path in paths}

    def names(self) -> list[str]:
        parts = (".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
        packed = {
            name.removesuffix(part) for name in self._mapped.names() for part in parts if name.endswith(part)
        }
        extra = {f"{name}{part}" for name in packed for part in parts}
        return [name for name in self._mapped.names() if name not in extra]

    def shape(self, name: str) -> tuple[int, ...]:
        state = self.packed(name)
        return tuple(state["shape"]) if state else self._mapped.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._mapped.dtype(name)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return self._mapped.rows(name, first, last)

    def packed(self, name: str) -> dict[str, Any] | None:
        return self._mapped.quantization(name)

    def scales(self, name: str) -> Tensor:
        """float32 scales of a packed matrix."""
        return self.rows(f"{name}.absmax", 0, self._mapped.shape(f"{name}.absmax")[0])

    def write_tokenizer(self, folder: Path) -> list[str]:
        return copy_tokenizer(self.folder, folder)


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of a hub folder that go with the weights: tokenizer, generation settings, licence."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.name.startswith(_COPIED)]


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy them; returns what the user should know."""
    found = tokenizer_files(source)
    for path in found:
        # By parts: a tokenizer.json can be 30 MB.
        with path.open("rb") as old, (folder / path.name).open("wb") as new:
            while block := old.read(1 << 20):
                new.write(block)
    if not any(path.name.startswith(("tokenizer", "vocab.")) for path in found):
        return [f"{source} holds no tokenizer, so neither does the result"]
    return []


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not an index of shards ({error})") from None
        for name in names:
            if not (folder / name).is_file():
                raise ValueError(f"{folder}: {INDEX} names {name}, which is not there")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        other = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
        hint = f"; {other[0]} is a pickle, which is not read" if other else ""
        raise ValueError(f"{folder}: no .safetensors file in it{hint}")
    return found


def _refuse_other_than_nf4(folder: Path, held: dict[str, Any]) -> None:
    method = held.get("quant_method")
    if method != "bitsandbytes" or held.get("load_in_8bit"):
        kind = "int8" if method == "bitsandbytes" else repr(method)
        raise ValueError(f"{folder} is quantised already ({kind}), expected plain weights or plain nf4")
    if held.get("bnb_4bit_quant_type") != "nf4" or held.get("bnb_4bit_use_double_quant"):
        double = ", double quantisation" if held.get("bnb_4bit_use_double_quant") else ""
        raise ValueError(
            f"{folder} is quantised already ({held.get('bnb_4bit_quant_type')}{double}), expected plain weights or "
            "plain nf4"
        )
