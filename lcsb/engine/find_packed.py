"""The packed folder that a model's name stands for, found without transformers."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

from lcsb.cache import cache_root, damage, folder_sha256
from lcsb.engine.mapped import read_json
from lcsb.gguf_files import BUILTIN_MODELS


def packed_model(name: str) -> Path:
    """A folder of NF4 weights: `name` itself, or the cache's for a built-in name, a plain folder or a hub name.

    Raises:
        ValueError: there is none; the message has the `lcsb convert` command that makes one.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder}: no config.json in it, expected a model's folder")
        held = read_json(folder / "config.json").get("quantization_config")
        if held is not None:
            return folder
        found = _cached(lambda key, _: key["kind"] == "folder" and key["content"] == folder_sha256(folder))
    elif name in BUILTIN_MODELS:
        content = BUILTIN_MODELS[name].sha256
        found = _cached(lambda key, _: key["kind"] == "gguf" and key["content"] == content)
    else:
        commit = _hub_commit(name)
        found = None
        if commit is not None:
            found = _cached(
                lambda key, place: key["kind"] == "folder" and place.name.startswith(f"{commit}-nf4-")
            )
    if found is None:
        near = difflib.get_close_matches(name, BUILTIN_MODELS, n=1, cutoff=0.6)
        hint = f" (nearest built-in name: {near[0]!r})" if near and name not in BUILTIN_MODELS else ""
        raise ValueError(
            f"model {name!r} has no packed form{hint}; within a memory budget convert it once: "
            f"lcsb convert {name} DIR --ram 1GB, then set model to DIR"
        )
    return found


def _cached(fits: Any) -> Path | None:
    """The newest whole folder of the cache with NF4 weights, plain scales, whose key and place fit."""
    found = []
    for manifest in cache_root().glob("*/lcsb-cache.json"):
        try:
            key = json.loads(manifest.read_text(encoding="utf-8"))["key"]
            named = key["quantization"] == "nf4" and key["double_quant"] == "False"
            if named and fits(key, manifest.parent) and damage(manifest.parent) is None:
                found.append(manifest.parent)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a folder of this cache, or of another format
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def _hub_commit(name: str) -> str | None:
    """Commit of the hub's main branch that the local hub cache has; None if it has none."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    root = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    ref = root / f"models--{name.replace('/', '--')}" / "refs" / "main"
    return ref.read_text(encoding="utf-8").strip() if ref.is_file() else None
