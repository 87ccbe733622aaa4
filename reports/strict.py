"""Strict JSON: no NaN tokens, no repeated keys, atomic writes, and messages that name file and field."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

T = TypeVar("T")


def plain(value: Any, field: str, on_nonfinite: Callable[[str], None] | None = None) -> Any:
    """`value` as dicts, lists, strings, numbers, booleans and None.

    numpy scalars and arrays, tuples, dataclasses and pydantic models are unfolded. A number that is not
    finite raises ValueError that names its field; with `on_nonfinite` it becomes None and the field's name is
    handed over. Raises TypeError for anything else.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", by_alias=True)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = TypeAdapter(type(value)).dump_python(value, mode="json")
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return plain(value.tolist(), field, on_nonfinite)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if on_nonfinite is None:
            raise ValueError(f"{field} is {value}, expected a finite number")
        on_nonfinite(field)
        return None
    if isinstance(value, Mapping):
        return {_key(key, field): plain(item, f"{field}.{key}", on_nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{field}.{i}", on_nonfinite) for i, item in enumerate(value)]
    raise TypeError(f"{field} is a {type(value).__name__}, expected a number, string, list or mapping")


def _key(key: Any, field: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return str(int(key))
    raise TypeError(f"{field} has the key {key!r}, expected a string or an integer")


def parse(text: str, where: str) -> Any:
    """Strict JSON from `text`. Raises ValueError that begins with `where`."""

    def refuse(token: str) -> Any:
        raise ValueError(f"found the token {token}, expected strict JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"found the key {next(n for n in names if names.count(n) > 1)!r} twice")
        return keys

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def read_json(path: Path | str) -> Any:
    """Strict JSON of a file. Raises ValueError that names the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8") from None
    return parse(text, str(path))


def read_record(path: Path | str, kind: type[T]) -> T:
    """A pydantic model or dataclass from a JSON file. Raises ValueError that names file and field."""
    value = read_json(path)
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_problem(error)}") from None


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as strict JSON, atomically: a reader sees the old file or the new one, never a part.

    Raises ValueError for a number that is not finite and TypeError for a foreign type, naming the field; the
    old file is then untouched.
    """
    path = Path(path)
    text = json.dumps(plain(value, path.name), allow_nan=False, ensure_ascii=False, indent=1)
    write_text(path, text + "\n")


def write_text(path: Path | str, text: str) -> None:
    """Write `text` in UTF-8 by a temporary file in the same folder, fsync and rename.

    Raises:
        OSError: it cannot be written (no space, read-only); names the file, which is then as it was before.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A failure to write inside is one line that names the file; the system's own may name none."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error.strerror or error})") from error


def _sync_folder(folder: Path) -> None:
    # The rename itself survives a power cut only when the folder is synced; not every system can.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sha256_of(path: Path | str) -> str:
    """sha256 of the file's bytes, in lower-case hexadecimal."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def first_problem(error: ValidationError) -> str:
    """The first problem of a failed validation: field, what was found, what was expected."""
    problem = error.errors()[0]
    field = ".".join(str(part) for part in problem["loc"]) or "the record"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"field {field} is missing"
    found = repr(problem["input"])
    if len(found) > 80:
        found = found[:77] + "..."
    return f"field {field}: found {found}: {message[0].lower()}{message[1:]}"
