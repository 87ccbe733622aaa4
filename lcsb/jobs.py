"""Run jobs side by side in fresh processes, one thread each, with progress and an estimate of the time left.

A job is a module-level function of plain arguments that leaves its result in files, so an interrupted run loses only
what its unfinished jobs had not yet written. One failed job does not stop the others.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """One piece of work.

    Attributes:
        name: shown to the user.
        function, arguments: called in the worker process.
        seconds: expected duration alone on one thread, the weight of the job in the estimate of the time left.
        done: share done so far, read off the job's own files (0 to 1); polled by the parent. A job without one counts
            as done in proportion to its expected duration while it runs.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    seconds: float
    done: Callable[[], float] | None = None


class Reporter(Protocol):
    """Receives progress: share done (0 to 1), seconds left (None if unknown) and what is running."""

    def __call__(self, share: float, seconds_left: float | None, running: str) -> None: ...


class JobError(RuntimeError):
    """Some jobs failed; the message has one line for each.

    Attributes:
        bad_input: every failure was one of what the job was given (ValueError, OSError), not of the job.
    """

    def __init__(self, message: str, bad_input: bool = False) -> None:
        super().__init__(message)
        self.bad_input = bad_input


@contextlib.contextmanager
def _thread_limit(threads: int) -> Iterator[None]:
    """Spawned processes read these variables when they import their numerical libraries."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update({name: str(threads) for name in _THREADS})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_worker(threads: int) -> None:
    """Limit this process to `threads` threads and silence the libraries' loading bars."""
    _quiet()
    import torch

    torch.set_num_threads(threads)


def _quiet() -> None:
    """Loading bars and advice of the libraries would tear the progress display.

    Only what is known to be harmless here is silenced: an optional kernel package that is absent, and a property that
    peft still calls by its old name.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


class _Shares:
    """How much of each job is done."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.started: dict[int, float] = {}
        self.finished: set[int] = set()

    def of(self, index: int) -> float:
        job = self.jobs[index]
        if index in self.finished:
            return 1.0
        if job.done is not None:
            return min(job.done(), 1.0)
        # 0.95: an estimate never says that a running job is over.
        began = self.started.get(index)
        return 0.0 if began is None else min((time.monotonic() - began) / job.seconds, 0.95)

    def total(self) -> float:
        weights = sum(job.seconds for job in self.jobs)
        return sum(self.of(i) * job.seconds for i, job in enumerate(self.jobs)) / weights


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    report: Reporter | None = None,
    threads: int = 1,
    poll_seconds: float = 1.0,
) -> list[Any]:
    """Run all jobs, at most `workers` at a time, each in a process with `threads` threads; returns their results.

    Raises:
        JobError: after all other jobs have finished, if any failed.
        KeyboardInterrupt: passed on after the workers have been stopped.
    """
    if not jobs:
        return []
    began = time.monotonic()
    total = sum(job.seconds for job in jobs)
    shares = _Shares(jobs)
    start_share = shares.total()
    results: dict[int, Any] = {}
    failures: list[str] = []
    bad_input = True
    context = multiprocessing.get_context("spawn")
    with (
        _thread_limit(threads),
        ProcessPoolExecutor(
            workers, mp_context=context, initializer=start_worker, initargs=(threads,)
        ) as pool,
    ):
        futures: dict[Future[Any], int] = {
            pool.submit(job.function, *job.arguments): index for index, job in enumerate(jobs)
        }
        pending = set(futures)
        try:
            while pending:
                finished, pending = wait(pending, timeout=poll_seconds, return_when=FIRST_COMPLETED)
                for future in finished:
                    index = futures[future]
                    shares.finished.add(index)
                    try:
                        results[index] = future.result()
                    except BrokenProcessPool:
                        failures.append(f"{jobs[index].name}: its process was killed (out of memory?)")
                        bad_input = False
                    except Exception as error:
                        failures.append(f"{jobs[index].name}: {type(error).__name__}: {error}")
                        bad_input &= isinstance(error, (ValueError, OSError))
                running = [futures[future] for future in pending if future.running()][:workers]
                for index in running:
                    shares.started.setdefault(index, time.monotonic())
                if report is not None:
                    share = shares.total()
                    elapsed, gained = time.monotonic() - began, share - start_share
                    expected = total * (1 - start_share) / min(workers, len(jobs))
                    # Until the run itself tells its speed, the expected durations do.
                    left = elapsed * (1 - share) / gained if gained > 0.05 else expected - elapsed
                    report(share, max(left, 0.0), ", ".join(jobs[index].name for index in running))
        except BaseException:
            for future in pending:
                future.cancel()
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
    if failures:
        raise JobError("\n".join(failures), bad_input)
    return [results[index] for index in range(len(jobs))]
