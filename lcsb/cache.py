"""A cache of converted models: folders named by what went in, written whole or not at all, checked when read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_MANIFEST = "lcsb-cache.json"
_STALE_SECONDS = 24 * 3600


def cache_root() -> Path:
    """`LCSB_CACHE`, else `XDG_CACHE_HOME`/lcsb, else ~/.cache/lcsb."""
    own = os.environ.get("LCSB_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "lcsb"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_sha256(folder: Path) -> str:
    """One hash over the names and contents of a folder's files (hidden ones and sub-folders left out)."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            digest.update(f"{path.name}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def cached_folder(label: str, key: Mapping[str, str], build: Callable[[Path], None]) -> Path:
    """The folder that `build` fills, built once for each `key`.

    `build` gets an empty temporary folder beside the final place; a manifest with the sha256 of every file is added
    and the folder renamed, so a reader sees a whole folder or none. Two processes may build at once: the first to
    rename wins and the other takes the winner's. A folder whose files are not those of its manifest is reported by a
    warning that names the file, and built again.
    """
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    root = cache_root()
    folder = root / f"{re.sub(r'[^A-Za-z0-9.]+', '-', label).strip('-')}-{digest[:20]}"
    if folder.exists():
        found = damage(folder)
        if found is None:
            return folder
        warnings.warn(f"cached model {folder} is damaged ({found}); converting again", stacklevel=2)
        _discard(folder)
    with named_errors(folder), _building(root) as temporary:
        _sweep(root)
        build(temporary)
        _write_manifest(temporary, key)
        try:
            temporary.rename(folder)
        except OSError:
            # Another process finished first; its folder is as good as ours, if whole.
            if not folder.exists() or damage(folder) is not None:
                raise
    return folder


@contextlib.contextmanager
def whole_folder(folder: Path, replace: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the context ends without an error, and vanishes otherwise.

    Args:
        replace: put it in the place of a folder of that name; else one that is not empty is refused at the start.

    Raises:
        FileExistsError: there is something at `folder` already.
        OSError: the place cannot be written to (read-only, full); names it.
    """
    with named_errors(folder):
        if folder.exists() and not (folder.is_dir() and (replace or not any(folder.iterdir()))):
            raise FileExistsError(f"{folder} exists already, expected a new or empty folder")
    with named_errors(folder), _building(folder.parent) as temporary:
        yield temporary
        if folder.exists():
            _discard(folder)
        temporary.rename(folder)


@contextlib.contextmanager
def _building(place: Path) -> Iterator[Path]:
    place.mkdir(parents=True, exist_ok=True)
    temporary = place / f".building-{uuid.uuid4().hex}"  # tempfile's folders are for the owner alone
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


_CANNOT_WRITE = (
    errno.EACCES,
    errno.EEXIST,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ENOTDIR,
)


@contextlib.contextmanager
def named_errors(folder: Path) -> Iterator[None]:
    """A read-only or full disk is one line that names `folder`, whichever library met it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        raise OSError(f"{folder} cannot be written: {error.strerror}") from error
    except Exception as error:
        # safetensors raises an error of its own, which says what the system said.
        if type(error).__name__ != "SafetensorError" or "os error" not in str(error):
            raise
        raise OSError(f"{folder} cannot be written: {error}") from error


def _write_manifest(folder: Path, key: Mapping[str, str]) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    text = json.dumps({"key": dict(key), "files": files}, indent=1, sort_keys=True)
    (folder / _MANIFEST).write_text(text, encoding="utf-8")


def damage(folder: Path, manifest: str = _MANIFEST) -> str | None:
    """What differs from the sizes and hashes in the folder's manifest; None if nothing does."""
    try:
        files = json.loads((folder / manifest).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            path = folder / name
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, expected {expected['bytes']}"
            if file_sha256(path) != expected["sha256"]:
                return f"{name} does not have the sha256 recorded for it"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _discard(folder: Path) -> None:
    # Renamed first, so that no other process can read it half deleted.
    doomed = Path(tempfile.mkdtemp(prefix=".discarded-", dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):
        folder.rename(doomed / folder.name)
    shutil.rmtree(doomed, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove what processes killed in mid-build left behind more than a day ago."""
    for path in [*root.glob(".building-*"), *root.glob(".discarded-*")]:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
