"""The pipe between the benchmark and its processes: one JSON object a line, both ways; stopwatches.

Imports nothing heavy: the process at the other end is the one whose memory is measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Channel:
    """The child's end. Whatever the libraries print goes to standard error instead of into the protocol."""

    def __init__(self) -> None:
        self._in = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any] | None:
        """The next request; None when the benchmark has gone."""
        line = self._in.readline()
        return json.loads(line) if line else None

    def requests(self) -> Iterator[dict[str, Any]]:
        """Requests until the benchmark goes or says stop."""
        while (request := self.receive()) is not None and request["do"] != "stop":
            yield request

    def send(self, answer: dict[str, Any]) -> None:
        """Answer a request."""
        self._out.write(json.dumps(answer, allow_nan=False) + "\n")
        self._out.flush()


class Stopwatch:
    """CPU and wall seconds since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def read(self) -> dict[str, float]:
        """{cpu, wall} in seconds."""
        return {"cpu": time.process_time() - self._cpu, "wall": time.perf_counter() - self._wall}


def disk_bytes_read() -> int | None:
    """Bytes that the disk was asked for by this process; None where the system does not count them."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes")), None)


def fail(error: BaseException) -> None:
    """The last line of standard error, which the benchmark shows."""
    sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
