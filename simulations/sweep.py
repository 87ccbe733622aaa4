"""Many configurations of one task: by joblib, or on a Dask cluster; resumable, and no failure loses another run.

A configuration is a JSON object; its result lies in OUT/<sha256 of the configuration, 16 digits>.json and is not
computed again. A failed one leaves OUT/<hash>.failed.json and is tried again by the next call. OUT/results.json holds
them all by hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed

from reports.strict import plain, read_json, write_json

Configuration = Mapping[str, Any]
Task = Callable[[Sequence[Configuration]], Sequence[Mapping[str, Any]]]
"""Results of several configurations, in their order; a module-level function, since it travels to other processes."""

PATIENCE = 60.0


@dataclass(frozen=True)
class Kind:
    """A kind of sweep. expand: settings of the file to configurations, or ValueError. together: configurations with the
    same value may be given to `run` in one call (None: each alone)."""

    name: str
    expand: Callable[[Mapping[str, Any]], list[dict[str, Any]]]
    run: Task
    together: Callable[[Configuration], Hashable] | None = None


@dataclass(frozen=True)
class Sweep:
    """Hashes by what became of them; `done` includes those found finished already. failed: hash to one line."""

    done: tuple[str, ...]
    reused: tuple[str, ...]
    failed: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """What became of one configuration: a result, or an error of one line with its traceback."""

    key: str
    configuration: Configuration
    result: Mapping[str, Any] | None = None
    error: str | None = None
    trace: str = ""


def key_of(configuration: Configuration) -> str:
    """Hash of the configuration, independent of the order of its keys."""
    text = json.dumps(plain(configuration, "configuration"), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def finished(configurations: Sequence[Configuration], out: Path) -> set[str]:
    """Hashes of the configurations whose result is in the folder, whole and their own."""
    return {key_of(c) for c in configurations if _finished(Path(out) / f"{key_of(c)}.json", c)}


def attempt(task: Task, configurations: Sequence[Configuration], out: str | None = None) -> list[Outcome]:
    """Run some configurations in one call; where that fails, each alone. Nothing that a task does is raised.

    out: a folder that holds OUT/<hash>.running while a run is in flight, so that a process that dies names its runs.
    """
    keys = [key_of(configuration) for configuration in configurations]
    markers = [] if out is None else [Path(out) / f"{key}.running" for key in keys]
    for marker in markers:
        marker.touch()
    try:
        results = [plain(result, "result") for result in task(configurations)]
        if len(results) != len(keys):
            raise ValueError(f"the task gave {len(results)} results, expected {len(keys)}")
        return [Outcome(k, c, r) for k, c, r in zip(keys, configurations, results, strict=True)]
    except (Exception, SystemExit) as error:
        if len(keys) > 1:
            return [outcome for c in configurations for outcome in attempt(task, [c], out)]
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Outcome(keys[0], configurations[0], None, line, traceback.format_exc())]
    finally:
        for marker in markers:
            marker.unlink(missing_ok=True)


def sweep(
    configurations: Sequence[Configuration],
    out: Path,
    task: Task,
    *,
    together: Callable[[Configuration], Hashable] | None = None,
    batch: int = 64,
    jobs: int = 1,
    cluster: str | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Run every configuration that has no result yet.

    jobs     processes of this machine (1: this process)
    cluster  address of a Dask scheduler (extra `cluster`) in place of them; results come back through it, so the
             workers need not see the folder
    batch    configurations alike by `together` run in one call, at most this many
    report   called with (finished, all) as results arrive

    A run whose process dies is done again alone in a process of its own (on a cluster: elsewhere); if that dies too, it
    is recorded as failed. Raises ModuleNotFoundError for a cluster without the extra, OSError where none answers.
    """
    if jobs < 1 or batch < 1:
        raise ValueError(f"jobs is {jobs}, batch is {batch}, expected at least 1")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    by_key = {key_of(configuration): configuration for configuration in configurations}
    reused = [key for key in by_key if _finished(out / f"{key}.json", by_key[key])]
    todo = {key: by_key[key] for key in by_key if key not in set(reused)}
    if cluster is None:
        outcomes = _local(task, todo, out, jobs, together, batch)
    else:
        outcomes = _on_cluster(cluster, task, list(_chunks(list(todo.values()), together, batch)))
    done, failed = list(reused), dict[str, str]()
    for outcome in outcomes:
        if outcome.error is None:
            done.append(outcome.key)
            write_json(
                out / f"{outcome.key}.json",
                {"configuration": outcome.configuration, "result": outcome.result},
            )
            (out / f"{outcome.key}.failed.json").unlink(missing_ok=True)
        else:
            failed[outcome.key] = outcome.error
            write_json(
                out / f"{outcome.key}.failed.json",
                {"configuration": outcome.configuration, "error": outcome.error, "trace": outcome.trace},
            )
        if report is not None:
            report(len(done) + len(failed), len(by_key))
    merge(out)
    return Sweep(tuple(done), tuple(reused), failed)


def merge(out: Path) -> Path:
    """Write OUT/results.json, {"runs": {hash: {"configuration", "status", "result" or "error"}}}, of all in OUT."""
    runs: dict[str, Any] = {}
    for path in sorted(Path(out).iterdir()):
        match = re.fullmatch(r"([0-9a-f]{16})(\.failed)?\.json", path.name)
        if not match:
            continue
        with contextlib.suppress(ValueError, KeyError, TypeError):  # damaged: the next call computes it again
            record = read_json(path)
            field = "error" if match[2] else "result"
            entry = {"configuration": record["configuration"], field: record[field]}
            runs.setdefault(match[1], {**entry, "status": "failed" if match[2] else "done"})
    path = Path(out) / "results.json"
    write_json(path, {"schema": 1, "runs": runs})
    return path


def _finished(path: Path, configuration: Configuration) -> bool:
    if not path.exists():
        return False
    try:
        record = read_json(path)
        return bool(record["configuration"] == plain(configuration, "configuration") and "result" in record)
    except (ValueError, KeyError, TypeError):
        return False  # damaged: it is computed again


def _chunks(
    todo: Sequence[Configuration], together: Callable[[Configuration], Hashable] | None, batch: int
) -> Iterator[list[Configuration]]:
    groups: dict[Hashable, list[Configuration]] = {}
    for i, configuration in enumerate(todo):
        groups.setdefault(i if together is None else (together(configuration),), []).append(configuration)
    for group in groups.values():
        for i in range(0, len(group), batch):
            yield group[i : i + batch]


def _local(
    task: Task,
    todo: Mapping[str, Configuration],
    out: Path,
    jobs: int,
    together: Callable[[Configuration], Hashable] | None,
    batch: int,
) -> Iterator[Outcome]:
    pending = dict(todo)
    # Left by a sweep that died: one of these may have killed it.
    suspects = _in_flight(pending, out)
    while pending:
        for key in suspects:
            yield _alone(task, pending.pop(key), out)
        chunks = list(_chunks(list(pending.values()), together, batch))
        if jobs == 1:
            for chunk in chunks:
                yield from attempt(task, chunk, str(out))
            return
        before = len(pending)
        try:
            parallel = Parallel(
                n_jobs=jobs, return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs"
            )
            for outcomes in parallel(delayed(attempt)(task, chunk, str(out)) for chunk in chunks):
                for outcome in outcomes:
                    del pending[outcome.key]
                    yield outcome
        except BrokenProcessPool:
            suspects = _in_flight(pending, out)
            if not suspects and len(pending) == before:  # it died before any run began: no run is to blame
                raise
    return


def _in_flight(pending: Mapping[str, Configuration], out: Path) -> list[str]:
    return [key for key in pending if (out / f"{key}.running").exists()]


def _alone(task: Task, configuration: Configuration, out: Path) -> Outcome:
    """In a process of its own, where only it can be to blame."""
    (out / f"{key_of(configuration)}.running").unlink(missing_ok=True)
    try:
        # Two, since joblib runs one in this process.
        ((outcome,),) = Parallel(n_jobs=2)([delayed(attempt)(task, [configuration])])
    except BrokenProcessPool as error:
        line = f"the process that ran it died, twice: {str(error).split('.')[0]}"
        return Outcome(key_of(configuration), configuration, None, line)
    found: Outcome = outcome
    return found


def _on_cluster(address: str, task: Task, chunks: Sequence[list[Configuration]]) -> Iterator[Outcome]:
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a cluster needs the extra 'cluster': pip install 'lcsb[cluster]'"
        ) from None
    with Client(address, timeout="30s") as client:
        again: list[Configuration] = []
        for chunk, found in _gathered(client, task, chunks):
            if isinstance(found, BaseException):
                again += chunk
            else:
                yield from found
        for configuration in again:  # one at a time, so that no other run is on its worker
            for chunk, found in _gathered(client, task, [[configuration]]):
                if isinstance(found, BaseException):
                    line = f"{type(found).__name__}: {found}".splitlines()[0]
                    yield Outcome(key_of(chunk[0]), chunk[0], None, line)
                else:
                    yield from found


def _gathered(
    client: Any, task: Task, chunks: Sequence[list[Configuration]]
) -> Iterator[tuple[list[Configuration], Any]]:
    """(chunk, its outcomes or what Dask raised) as they finish. Without a worker for PATIENCE seconds: TimeoutError."""
    from distributed import wait

    futures = {client.submit(attempt, task, chunk, pure=False): chunk for chunk in chunks}
    waited = 0.0
    while futures:
        try:
            ready = wait(list(futures), timeout=5.0, return_when="FIRST_COMPLETED").done
        except TimeoutError:
            waited = 0.0 if client.scheduler_info(n_workers=-1)["workers"] else waited + 5.0
            if waited < PATIENCE:
                continue
            error = TimeoutError(f"the cluster had no worker for {PATIENCE:.0f} s")
            for future, chunk in futures.items():
                future.cancel()
                yield chunk, error
            return
        waited = 0.0
        for future in ready:
            error = future.exception()
            yield futures.pop(future), future.result() if error is None else error
