"""Many configurations of one function: by joblib, or on a Dask cluster; resumable, and no failure loses another run.

A configuration is a JSON object; its result lies in OUT/<sha256 of the configuration, 16 digits>.json and is not
computed again. A failed one leaves OUT/<hash>.failed.json and is tried again by the next call.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed

from reports.strict import plain, read_json, write_json

Configuration = Mapping[str, Any]
Task = Callable[[Configuration], Mapping[str, Any]]


@dataclass(frozen=True)
class Sweep:
    """Hashes by what became of them; `done` includes those found finished already."""

    done: tuple[str, ...]
    reused: tuple[str, ...]
    failed: dict[str, str]


def key_of(configuration: Configuration) -> str:
    """Hash of the configuration, independent of the order of its keys."""
    text = json.dumps(plain(configuration, "configuration"), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def simulate(configuration: Configuration) -> Mapping[str, Any]:
    """The task of `lcsb sweep`: {"experiment": name, "size": size, "seed": n} to the experiment's verdict."""
    from simulations.registry import get

    known = {"experiment", "size", "seed"}
    if unknown := set(configuration) - known:
        raise ValueError(f"the configuration has {sorted(unknown)}, expected {sorted(known)}")
    verdict, _ = get(configuration["experiment"]).run(
        configuration.get("size", "quick"), configuration.get("seed", 0)
    )
    found: dict[str, Any] = verdict.model_dump(mode="json", by_alias=True)
    return found


def attempt(task: Task, configuration: Configuration, out: str) -> tuple[str, str | None]:
    """Run one, write its result or its failure. Returns (hash, None or the error's last line)."""
    key = key_of(configuration)
    path, failed = Path(out) / f"{key}.json", Path(out) / f"{key}.failed.json"
    try:
        write_json(path, {"configuration": configuration, "result": task(configuration)})
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        write_json(
            failed, {"configuration": configuration, "error": message, "trace": traceback.format_exc()}
        )
        return key, message
    failed.unlink(missing_ok=True)
    return key, None


def sweep(
    configurations: Sequence[Configuration],
    out: Path,
    *,
    task: Task = simulate,
    jobs: int = 1,
    cluster: str | None = None,
) -> Sweep:
    """Run every configuration without a result. `cluster`: address of a Dask scheduler (extra `cluster`).

    The folder must be seen by all workers. A worker that dies has its run done again elsewhere; a run whose worker
    dies repeatedly is reported as failed. Raises ModuleNotFoundError for a cluster without the extra.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    by_key = {key_of(configuration): configuration for configuration in configurations}
    reused = [key for key in by_key if _finished(out / f"{key}.json", by_key[key])]
    todo = [by_key[key] for key in by_key if key not in reused]
    if cluster is None:
        pairs = Parallel(n_jobs=jobs)(
            delayed(attempt)(task, configuration, str(out)) for configuration in todo
        )
    else:
        pairs = _on_cluster(cluster, task, todo, str(out))
    failed = {key: message for key, message in pairs if message is not None}
    done = [*reused, *(key for key, message in pairs if message is None)]
    return Sweep(tuple(done), tuple(reused), failed)


def _finished(path: Path, configuration: Configuration) -> bool:
    if not path.exists():
        return False
    try:
        return bool(read_json(path)["configuration"] == plain(configuration, "configuration"))
    except (ValueError, KeyError, TypeError):
        return False  # damaged: it is computed again


def _on_cluster(
    address: str, task: Task, todo: Sequence[Configuration], out: str
) -> list[tuple[str, str | None]]:
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a cluster needs the extra 'cluster': pip install 'lcsb[cluster]'"
        ) from None
    pairs: list[tuple[str, str | None]] = []
    with Client(address) as client:
        futures = {key_of(c): client.submit(attempt, task, c, out, pure=False) for c in todo}
        for key, future in futures.items():
            try:
                pairs.append(future.result())
            except Exception as error:  # the worker died too often
                pairs.append((key, f"{type(error).__name__}: {error}"))
    return pairs
