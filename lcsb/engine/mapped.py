"""A model folder read through memory maps: tensors are views of the file, and their pages can be given back.

The folder is what transformers saves: config.json and safetensors (one file or shards), 4-bit matrices as bitsandbytes
packs them. Nothing is converted and nothing is copied; a page is read when it is touched.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_QUANT_STATE = ".quant_state.bitsandbytes__"


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: file, first byte and byte count in it, type and shape."""

    file: int
    start: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class MappedFolder:
    """The tensors of a saved model, by name, as read-only views of its files.

    Args:
        folder: holds config.json and model.safetensors or its shards.
        files: the safetensors files to read; default: all of the folder.

    Attributes:
        config: the parsed config.json.

    Raises:
        ValueError: a file is missing, cut short or not safetensors; names the file and what was found.
    """

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        self.folder = Path(folder)
        self.config: dict[str, Any] = read_json(self.folder / "config.json")
        self._places: dict[str, _Place] = {}
        self._paths: list[Path] = []
        self._maps: list[mmap.mmap] = []
        self._bytes: list[torch.Tensor] = []
        files = sorted(self.folder.glob("*.safetensors")) if files is None else files
        if not files:
            raise ValueError(f"{self.folder}: no .safetensors file in it")
        for path in files:
            self._add(path)

    def _add(self, path: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= length <= size - 8:
                raise ValueError(f"{path}: not a safetensors file (header of {length} bytes in {size})")
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise ValueError(f"{path}: the safetensors header is not JSON ({error})") from None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            # The buffer is read-only; nothing here writes to a weight.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes.append(torch.frombuffer(mapped, dtype=torch.uint8))
        self._paths.append(path)
        self._maps.append(mapped)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            if end > size:
                raise ValueError(f"{path}: {name} ends at byte {end}, the file has {size}; it was cut short")
            if entry["dtype"] not in _TYPES:
                raise ValueError(
                    f"{path}: {name} is of type {entry['dtype']}, expected one of {', '.join(_TYPES)}"
                )
            place = _Place(
                len(self._maps) - 1, start, end - start, _TYPES[entry["dtype"]], tuple(entry["shape"])
            )
            if math.prod(place.shape) * place.dtype.itemsize != place.length:
                raise ValueError(
                    f"{path}: {name} has {place.length} bytes, expected {place.shape} of {entry['dtype']}"
                )
            self._places[name] = place

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        """All tensors, in no particular order."""
        return list(self._places)

    def nbytes(self, name: str) -> int:
        """Bytes of one tensor in its file."""
        return self._place(name).length

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise ValueError(f"{self.folder}: no tensor {name!r} in it")
        return self._places[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as saved."""
        return self._place(name).shape

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the file. Do not write to it."""
        place = self._place(name)
        raw = self._bytes[place.file][place.start : place.start + place.length]
        if place.start % place.dtype.itemsize:
            raw = raw.clone()  # safetensors of other writers need not be aligned
        return raw.view(place.dtype).view(place.shape)

    def dtype(self, name: str) -> torch.dtype:
        """Type as saved."""
        return self._place(name).dtype

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """A copy of rows [first, last) (of a vector: its numbers), read from the file and not through the map.

        Raises:
            ValueError: the file ended before them; it was cut short since it was opened.
        """
        place = self._place(name)
        width = math.prod(place.shape[1:]) * place.dtype.itemsize
        raw = torch.empty((last - first) * width, dtype=torch.uint8)
        with self._paths[place.file].open("rb", buffering=0) as file:
            file.seek(place.start + first * width)
            view = raw.numpy().data
            while view:
                got = file.readinto(view)
                if not got:
                    raise ValueError(f"{self._paths[place.file]}: ended within {name}; it was cut short")
                view = view[got:]
        return raw.view(place.dtype).view(last - first, *place.shape[1:])

    def gather(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        """A copy of the rows [count] of a matrix, each read from the file and not through the map.

        Through the map, the system would bring in up to a megabyte around every row.
        """
        wanted, places = torch.unique(indices, return_inverse=True)
        return torch.cat([self.rows(name, row, row + 1) for row in wanted.tolist()])[places]

    def release(self, name: str, first: float = 0.0, last: float = 1.0) -> None:
        """Give back the pages of a tensor (or of the share [first, last] of it): they leave this process's memory.

        They stay in the system's page cache as long as it has room. No effect where the system has no madvise.
        """
        place = self._place(name)
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin = place.start + int(first * place.length)
        end = place.start + int(last * place.length)
        # Whole pages only, rounded outwards: a neighbour's page is read again if it is needed.
        page = mmap.PAGESIZE
        begin -= begin % page
        self._maps[place.file].madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def quantization(self, name: str) -> dict[str, Any] | None:
        """bitsandbytes' description of a packed 4-bit matrix (quant_type, blocksize, shape), None if it is not packed.

        Raises:
            ValueError: packed in a way that the engine does not read (double quantisation, fp4).
        """
        for kind in ("nf4", "fp4"):
            key = f"{name}{_QUANT_STATE}{kind}"
            if key in self._places:
                state = json.loads(bytes(self.tensor(key).tolist()))
                if kind != "nf4" or "nested_blocksize" in state:
                    raise ValueError(
                        f"{self.folder}: {name} is packed as {kind}"
                        f"{' with double quantisation' if 'nested_blocksize' in state else ''}, "
                        "expected nf4 with plain scales"
                    )
                return state  # type: ignore[no-any-return]
        return None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: not there, not JSON, or no object; names the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: not there; expected a folder that transformers saved") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: found a {type(found).__name__}, expected an object")
    return found
