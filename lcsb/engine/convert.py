"""Conversion of a model to the packed folder that `Engine`, `load_quantized` and transformers read, within a budget.

Tensor by tensor, large ones by rows; one shard a layer and one for the rest. Shards are finished one after another in
a hidden folder beside the target, whose manifest lists what is finished with its sha256: a conversion that was killed
goes on from there, and the folder gets its name when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lcsb.cache import damage, file_sha256, named_errors
from lcsb.engine.architecture import Architecture
from lcsb.engine.conversion_layout import Job, lay_out, type_name
from lcsb.engine.packed import pack
from lcsb.engine.ram import peak_bytes
from lcsb.engine.shards import (
    INDEX,
    Content,
    ShardFile,
    count,
    index_json,
    put_descriptions,
    quantization_config,
    shard_name,
    write_json,
)
from lcsb.engine.sources import NUMBERS_AT_ONCE, FolderSource, Source, copy_tokenizer, tokenizer_files
from lcsb.gguf_files import BUILTIN_MODELS, builtin_parts, check_sha256, copy_licence_note

MANIFEST: Final = "lcsb-convert.json"
EMBEDDINGS: Final = ("source", "float32", "bfloat16", "float16")
BLOCK_SIZES: Final = (64, 128, 256, 512, 1024, 2048, 4096)
# A chunk in float32 (4 MiB), what dequantisation and packing make of it, and room for the allocator; measured.
_WORKING_BYTES: Final = 64 << 20
_FORMAT: Final = 1

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did, or would do.

    Attributes:
        matrices: packed.
        packed_bytes, plain_bytes: of the packed matrices with their scales, and of everything else.
        embedding: type of embedding and head.
        least_bytes: the smallest budget that would do.
        peak_bytes: VmHWM of this process so far.
        resumed: shards of an earlier, interrupted call that were taken over.
        state: planned, converted, or there already.
        notes: what a user should know, a line each.
    """

    source: str
    folder: str
    family: str
    layers: int
    matrices: int
    packed_bytes: int
    plain_bytes: int
    embedding: str
    least_bytes: int
    peak_bytes: int
    ram: int | None
    resumed: int
    state: str
    seconds: float
    notes: tuple[str, ...]


def convert(
    source: str | Path,
    folder: str | Path,
    *,
    ram: int | None = None,
    quantization: str = "nf4",
    block_size: int = 64,
    embedding: str = "source",
    tokenizer: Path | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert a model to packed NF4; the same call after an interruption carries on.

    Codes and scales are bitsandbytes' bit for bit, as `load_quantized` makes them from float32 on the CPU. Norms and
    biases are float32.

    Args:
        source: a hub folder with safetensors (plain, or packed as plain nf4, which is copied), a .gguf file or a
            built-in name.
        folder: new or empty.
        ram: bytes that the whole process may hold at its peak.
        quantization: nf4 is the one there is.
        block_size: weights that share a scale.
        embedding: type of embedding and head. "source" keeps the type of the file (float32 for quantised GGUF): the
            same numbers as `load_quantized`, which widens them to float32, in half the bytes where the file has 16
            bits. "float32" writes what `load_quantized` writes. "bfloat16" and "float16" round, and a note says how
            far.
        tokenizer: folder whose tokenizer files are taken instead of the source's.
        dry_run: only say what would be done.
        progress: called with (numbers done, numbers in all, tensor) after each piece.

    Raises:
        ValueError: a source that cannot be converted (named: file, tensor, what was found and expected); a budget
            that is too small, with the least that would do.
        FileExistsError: `folder` holds something else.
        OSError: the source cannot be read or the folder not be written (full, read-only). Finished shards are kept.
    """
    began, folder = time.monotonic(), Path(folder)
    if quantization != "nf4":
        raise ValueError(f"quantization {quantization!r}, expected 'nf4'")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {block_size}, expected one of {', '.join(map(str, BLOCK_SIZES))}")
    if embedding not in EMBEDDINGS:
        raise ValueError(f"embedding {embedding!r}, expected one of {', '.join(EMBEDDINGS)}")
    opened = _open(source)
    job = Job(opened, Architecture.from_config(opened.config, opened.label), block_size, embedding)
    lay_out(job)
    least = peak_bytes() + _WORKING_BYTES + (0 if tokenizer else opened.extra_bytes())
    if ram is not None and ram < least:
        raise ValueError(f"{source}: converting needs {least} bytes of process memory, the budget is {ram}")
    resumed, state = 0, "planned"
    if not dry_run:
        resumed, state = _write(job, str(source), folder, tokenizer, progress)
    peak = peak_bytes()
    if ram is not None and peak > ram:
        job.notes.append(
            f"the process held {peak} bytes, more than the budget of {ram}: a fault of this program"
        )
    packed = sum(_nbytes(content, True) for content in job.contents)
    return ConvertReport(
        source=str(source), folder=str(folder), family=str(opened.config["model_type"]),
        layers=job.architecture.layers, matrices=sum(len(content.packed) for content in job.contents),
        packed_bytes=packed, plain_bytes=sum(_nbytes(content, False) for content in job.contents),
        embedding=type_name(job.contents[0].plain["model.embed_tokens.weight"][0]), least_bytes=least,
        peak_bytes=peak, ram=ram, resumed=resumed, state=state, seconds=time.monotonic() - began,
        notes=tuple(job.notes),
    )  # fmt: skip


def check(folder: str | Path) -> int:
    """Compare a converted folder with the sizes and sha256 of its manifest; returns the number of files.

    Raises:
        ValueError: no manifest, or a file that differs; names it.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: no {MANIFEST} in it, expected a folder that `lcsb convert` wrote")
    found = damage(folder, MANIFEST)
    if found is not None:
        raise ValueError(f"{folder} is damaged: {found}")
    return len(_manifest(folder)["files"])


# -- what goes where ---------------------------------------------------------------------------------------------------


def _open(source: str | Path) -> Source:
    name, path = str(source), Path(source).expanduser()
    if name in BUILTIN_MODELS or (path.is_file() and path.suffix == ".gguf"):
        from lcsb.engine.gguf_source import GGUFSource

        return GGUFSource(builtin_parts(name) if name in BUILTIN_MODELS else [path], name)
    if path.is_dir():
        return FolderSource(path)
    near = difflib.get_close_matches(name, BUILTIN_MODELS, n=1, cutoff=0.6)
    hint = f"; nearest built-in name is {near[0]!r}" if near else ""
    raise ValueError(
        f"{name!r} is neither a folder, a .gguf file nor a built-in name ({', '.join(BUILTIN_MODELS)}){hint}; a hub "
        "model is to be downloaded first"
    )


def _nbytes(content: Content, packed: bool) -> int:
    return sum(
        count(shape) * dtype.itemsize
        for name, (dtype, shape) in content.entries.items()
        if (name not in content.plain) == packed
    )


# -- writing -----------------------------------------------------------------------------------------------------------


def _write(
    job: Job, label: str, folder: Path, tokenizer: Path | None, progress: Progress | None
) -> tuple[int, str]:
    """(shards taken over from an earlier call, state)."""
    files = {name: _joined_sha256(paths) for name, paths in job.source.files.items()}
    if label in BUILTIN_MODELS:
        check_sha256(label, files[label]["sha256"])
    settings = {
        "quantization": "nf4", "block_size": job.block_size, "embedding": job.embedding,
        "tokenizer": None if tokenizer is None else _tokenizer_sha256(tokenizer),
    }  # fmt: skip
    key = {"format": _FORMAT, "source": {"name": Path(label).name, "files": files}, "settings": settings}
    if (folder / MANIFEST).is_file():
        held = _manifest(folder)
        if {name: held.get(name) for name in key} != key:
            raise FileExistsError(f"{folder} holds another conversion, expected a new or empty folder")
        check(folder)
        job.notes += held["notes"]
        return 0, "there already"
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already, expected a new or empty folder")
    with named_errors(folder), _working_folder(folder) as work:
        manifest = _resumable(work, key)
        resumed = len(manifest["files"])
        _refuse_full_disk(job, folder, manifest)
        done = _Counter(job.numbers, progress)
        for index, content in enumerate(job.contents):
            name = shard_name(index, len(job.contents))
            if name in manifest["files"]:
                done.skip(content)
                continue
            notes = _write_shard(job, content, work / f"{name}.part", done)
            (work / f"{name}.part").replace(work / name)
            manifest["files"][name] = _size_and_hash(work / name)
            manifest["notes"] += notes
            write_json(work / MANIFEST, manifest)
        _write_small_files(job, label, work, tokenizer, manifest)
        _sync(work)
        work.rename(folder)
        _sync(folder.parent)
    job.notes += manifest["notes"]
    return resumed, "converted"


class _Counter:
    """Numbers written so far, passed on to the caller."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, numbers: int, name: str) -> None:
        self._done += numbers
        if self._progress is not None:
            self._progress(self._done, self._total, name)

    def skip(self, content: Content) -> None:
        self._done += sum(count(shape) for _, shape in content.plain.values())
        self._done += sum(rows * columns for rows, columns in content.packed.values())


@contextlib.contextmanager
def _working_folder(folder: Path) -> Iterator[Path]:
    """The hidden folder that becomes `folder`, for one process at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.parent / f".{folder.name}.converting"
    work.mkdir(exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Locked, but perhaps renamed just before by the process that finished it.
            ours = work.exists() and os.path.samestat(work.stat(), os.fstat(descriptor))
        except BlockingIOError:
            ours = False
        if not ours:
            raise ValueError(f"{folder}: another process is converting to it at this moment")
        yield work
    finally:
        os.close(descriptor)


def _resumable(work: Path, key: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest so far; files that it does not vouch for are removed, as is everything of another conversion."""
    manifest: dict[str, Any] = {**key, "files": {}, "notes": []}
    with contextlib.suppress(ValueError):
        held = _manifest(work)
        if {name: held.get(name) for name in key} == dict(key):
            manifest = held
    for name in list(manifest["files"]):
        whole = name.endswith(".safetensors") and (work / name).is_file()
        if not whole or _size_and_hash(work / name) != manifest["files"][name]:
            del manifest["files"][name]
    if not manifest["files"]:
        manifest["notes"] = []
    for path in work.iterdir():
        if path.name not in manifest["files"]:
            path.unlink()
    write_json(work / MANIFEST, manifest)
    return manifest


def _write_shard(job: Job, content: Content, path: Path, done: _Counter) -> list[str]:
    notes = []
    try:
        with ShardFile(path, content.entries) as shard:
            for target in content.plain:
                notes += _put_plain(job, shard, target, done)
            for target, shape in content.packed.items():
                _put_packed(job, shard, target, shape, done)
            put_descriptions(shard, content)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()  # on a full disk, room for the manifest
        raise
    return notes


def _steps(
    source: Source, name: str, shape: tuple[int, ...], block_size: int = 1
) -> Iterator[tuple[int, int]]:
    """(first, last) rows of each piece: whole quantisation blocks, whole heads where their rows are in disorder."""
    rows, columns = shape if len(shape) == 2 else (shape[0], 1)
    if len(shape) == 1:
        yield 0, rows
        return
    unit = math.lcm(block_size // math.gcd(columns, block_size), source.row_step(name))
    step = max(unit, NUMBERS_AT_ONCE // columns // unit * unit)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _put_plain(job: Job, shard: ShardFile, target: str, done: _Counter) -> list[str]:
    name = job.origin[target]
    dtype, shape = shard.entries[target]
    width, moved, largest = count(shape[1:]), 0.0, 0.0
    for first, last in _steps(job.source, name, shape):
        values = job.source.rows(name, first, last)
        kept = values.to(dtype)
        _refuse_nonfinite(job, name, kept)
        if dtype != torch.float32 and dtype != values.dtype:
            moved = max(moved, float((kept.float() - values.float()).abs().max()))
            largest = max(largest, float(values.float().abs().max()))
        shard.put(target, kept, first * width)
        done.add(kept.numel(), target)
    if not moved:
        return []
    return [
        f"{target} was rounded to {type_name(dtype)}: by {moved:.3g} at most, its largest number is {largest:.3g}"
    ]


def _put_packed(job: Job, shard: ShardFile, target: str, shape: tuple[int, int], done: _Counter) -> None:
    name, source = job.origin[target], job.source
    columns, block = shape[1], job.block_size
    if source.packed(name) is not None:
        assert isinstance(source, FolderSource)
        scales = source.scales(name)
        _refuse_nonfinite(job, f"{name}.absmax", scales)
        shard.put(f"{target}.absmax", scales)
        for first in range(0, count(shape) // 2, NUMBERS_AT_ONCE):
            codes = source.rows(name, first, min(first + NUMBERS_AT_ONCE, count(shape) // 2))
            shard.put(target, codes, first)
            done.add(2 * codes.numel(), target)
        return
    for first, last in _steps(source, name, shape, block):
        values = source.rows(name, first, last)
        codes, scales = pack(values, block)
        _refuse_nonfinite(job, name, scales)
        shard.put(target, codes, first * columns // 2)
        shard.put(f"{target}.absmax", scales, first * columns // block)
        done.add(values.numel(), target)


def _refuse_nonfinite(job: Job, name: str, values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise ValueError(
            f"{job.source.label}: {name} holds numbers that are not finite, or too large for the result"
        )


def _write_small_files(
    job: Job, label: str, work: Path, tokenizer: Path | None, manifest: dict[str, Any]
) -> None:
    notes = copy_tokenizer(tokenizer, work) if tokenizer else job.source.write_tokenizer(work)
    manifest["notes"] += notes
    config = {name: value for name, value in job.source.config.items() if name != "torch_dtype"}
    write_json(
        work / "config.json", config | {"dtype": "float32", "quantization_config": quantization_config()}
    )
    write_json(work / INDEX, index_json(job.contents))
    if label in BUILTIN_MODELS:
        copy_licence_note(label, work)
    for path in sorted(work.iterdir()):
        if path.name != MANIFEST and path.name not in manifest["files"]:
            manifest["files"][path.name] = _size_and_hash(path)
            _sync(path)
    write_json(work / MANIFEST, manifest)


def _refuse_full_disk(job: Job, folder: Path, manifest: Mapping[str, Any]) -> None:
    needed = sum(
        _nbytes(content, packed)
        for index, content in enumerate(job.contents)
        for packed in (True, False)
        if shard_name(index, len(job.contents)) not in manifest["files"]
    )
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(f"{folder} needs {needed} bytes more, its disk has {free} left")


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        held = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        held["files"].keys(), held["notes"].__iter__
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / MANIFEST}: not the manifest of a conversion ({error})") from None
    return held  # type: ignore[no-any-return]


def _size_and_hash(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _tokenizer_sha256(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder, expected one with tokenizer files")
    return {path.name: file_sha256(path) for path in tokenizer_files(folder)}


def _joined_sha256(paths: list[Path]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return {"bytes": sum(path.stat().st_size for path in paths), "sha256": digest.hexdigest()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
