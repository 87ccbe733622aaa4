"""Progress with an estimate of the time left: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from lcsb.jobs import Reporter

_EVERY_SECONDS = 20.0


def duration(seconds: float) -> str:
    """A duration for people: 42 s, 3 min 05 s, 2 h 10 min.

    >>> [duration(s) for s in (41.7, 185, 7800)]
    ['42 s', '3 min 05 s', '2 h 10 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _left(seconds: float | None) -> str:
    return "time left unknown" if seconds is None else f"about {duration(seconds)} left"


@contextlib.contextmanager
def progress(console: Console, title: str) -> Iterator[Reporter]:
    """A reporter for one part of the work, named `title`."""
    began = time.monotonic()
    if console.is_terminal:
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}"),
            TextColumn("[dim]{task.fields[running]}"), console=console, transient=True,
        )  # fmt: skip
        with bar:
            task = bar.add_task(title, total=1.0, left="", running="")

            def show(share: float, seconds_left: float | None, running: str) -> None:
                bar.update(task, completed=share, left=_left(seconds_left), running=running)

            yield show
    else:
        last = -_EVERY_SECONDS

        def write(share: float, seconds_left: float | None, running: str) -> None:
            nonlocal last
            elapsed = time.monotonic() - began
            if elapsed - last >= _EVERY_SECONDS and share < 1:
                last = elapsed
                console.print(f"{title}: {share:4.0%}, {_left(seconds_left)} ({running})", highlight=False)

        yield write
    console.print(f"{title}: done in {duration(time.monotonic() - began)}", highlight=False)
