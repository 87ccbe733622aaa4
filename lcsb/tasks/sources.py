"""Where rows come from: files of a named task, a user's file, or a data set of the hub read as a stream."""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = tuple[str, Mapping[str, Any] | None]
"""("place", fields) of one row; None where the row is blank."""

DATA_VARIABLE = "LCSB_DATA"


@dataclass(frozen=True)
class HubName:
    """A data set of the hub: owner/name, configuration, split."""

    name: str
    config: str | None = None
    split: str = "train"

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """`owner/name[:config][@split]`, or None where the text is not of this form."""
        match = re.fullmatch(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+))?(?:@([\w.\[\]:%+-]+))?", text)
        return cls(match[1], match[2], match[3] or "train") if match else None

    def __str__(self) -> str:
        return self.name + (f":{self.config}" if self.config else "") + f"@{self.split}"


def hub_rows(source: HubName, limit: int | None = None, **options: Any) -> Iterator[Row]:
    """The first `limit` rows of a data set as `datasets` streams them, without downloading the rest.

    Args:
        options: passed on to `datasets.load_dataset`, for example data_files with the builder "json".

    Raises:
        ModuleNotFoundError: `datasets` is not installed.
        ValueError: the hub cannot be reached, or has no such data set, configuration or split (names it).
    """
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{source}: reading from the hub needs `datasets`: pip install 'lcsb[eval]'"
        ) from None
    try:
        stream = datasets.load_dataset(
            source.name, source.config, split=source.split, streaming=True, **options
        )
        for number, row in enumerate(itertools.islice(stream, limit), start=1):
            yield f"{source} row {number}", row
    except Exception as error:  # datasets, fsspec and httpx each raise their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{source}: the hub gave nothing: {reason[:300]}") from error


def task_file(task: str, names: tuple[str, ...], path: str | Path | None) -> Path | None:
    """The file of a named task: the first of `names` in `path`/task or `path`; None where no folder is given.

    Without `path` the folder is that of the environment variable LCSB_DATA.

    Raises:
        ValueError: a folder is given and holds none of them.
    """
    given = path if path is not None else os.environ.get(DATA_VARIABLE) or None
    if given is None:
        return None
    folder = Path(given).expanduser()
    for place in (folder / task, folder):
        for name in names:
            if (place / name).is_file():
                return place / name
    raise ValueError(f"{folder}: no {' or '.join(names)} of the task {task!r} in it, nor in {folder / task}")
