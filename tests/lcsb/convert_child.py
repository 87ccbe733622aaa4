"""A conversion in a process of its own, within 1 GB: python convert_child.py SRC DIR [KILL_AT ...]

Writes peak memory and the large libraries that were imported as one JSON line. With KILL_AT, processes forked one after
another convert first, and each kills itself (SIGKILL) when that many pieces were written, or at the moment before the
folder gets its name (KILL_AT = "rename"); the line then says how each ended and how many shards it left finished.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from lcsb.engine.convert import MANIFEST, convert


class _Pieces:
    """Counts pieces, and kills this process at one of them."""

    def __init__(self, kill_at: str | None = None) -> None:
        self.seen, self.kill_at = 0, kill_at

    def __call__(self, done: int, total: int, name: str) -> None:
        self.seen += 1
        if str(self.seen) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(source: str, folder: Path, kill_at: str) -> list[int]:
    """(signal that ended a forked conversion, shards that it left)."""
    process = os.fork()
    if process == 0:
        if kill_at == "rename":
            Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        convert(source, folder, progress=_Pieces(kill_at))
        os._exit(0)
    _, status = os.waitpid(process, 0)
    held = json.loads((folder.parent / f".{folder.name}.converting" / MANIFEST).read_text())["files"]
    return [os.waitstatus_to_exitcode(status), sum(name.endswith(".safetensors") for name in held)]


def main() -> None:
    source, folder, *kills = sys.argv[1:]
    ends = [killed(source, Path(folder), kill_at) for kill_at in kills]
    pieces = _Pieces()
    report = convert(source, folder, ram=10**9, progress=pieces)
    found = {
        "peak": report.peak_bytes,
        "least": report.least_bytes,
        "heavy": [name for name in ("transformers", "bitsandbytes", "peft") if name in sys.modules],
        "pieces": pieces.seen,
        "resumed": report.resumed,
        "state": report.state,
        "ends": ends,
    }
    sys.stdout.write(json.dumps(found) + "\n")


main()
