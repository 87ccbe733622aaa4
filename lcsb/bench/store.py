"""Results case by case: each finished one in a file of its own, found again by what it was measured with.

OUT.json is the whole; OUT/ holds the parts. A part counts as finished if its settings are those asked for and the
sources it was measured with are today's, so a run that was interrupted goes on and a change of the code measures anew.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lcsb.bench.processes import load_average
from lcsb.bench.records import REPORTS
from reports.records import environment
from reports.strict import first_problem, read_json, write_json


class Store:
    """The parts of one benchmark.

    Args:
        out: the JSON file of the whole.
        threads: compute threads of each process.
    """

    def __init__(self, out: Path, threads: int) -> None:
        self.out, self.folder = out, out.with_suffix("")
        if self.folder == out:
            raise ValueError(f"--out {out}: expected a file that ends in .json")
        self.environment = {**environment(threads), "sources_sha256": sources_sha256()}

    def part(
        self, key: str, settings: Mapping[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """The result of `measure`, or what an earlier call with the same settings and sources left."""
        path = self.folder / f"{key}.json"
        if path.exists():
            found = read_json(path)
            same = found.get("settings") == dict(settings)
            if same and found["environment"]["sources_sha256"] == self.environment["sources_sha256"]:
                result: dict[str, Any] = found["result"]
                return result
        before = load_average()
        result = measure()
        # Of the machine while it was measured: a timing taken beside other work says so.
        result["load_average"] = [before, load_average()]
        write_json(path, {"settings": dict(settings), "environment": self.environment, "result": result})
        return result

    def whole(self, benchmark: str, settings: Mapping[str, Any], **content: Any) -> dict[str, Any]:
        """Write OUT.json and return it; `met` is whether no verdict in `content` is false."""
        found = list(verdicts(content))
        report = {
            "benchmark": benchmark,
            "settings": dict(settings),
            **content,
            "targets": len(found),
            "met": all(met for _, met in found),
            "missed": [where for where, met in found if not met],
            "environment": self.environment,
        }
        try:
            checked = REPORTS[benchmark].model_validate(report).model_dump(mode="json")
        except ValidationError as error:
            raise ValueError(f"{self.out}: {first_problem(error)}") from None
        write_json(self.out, checked)
        return checked


def verdicts(content: Any, where: str = "") -> list[tuple[str, bool]]:
    """(dotted place, met) of every target in a report that was judged."""
    if isinstance(content, Mapping):
        if content.keys() == {"value", "limit", "met"}:
            return [] if content["met"] is None else [(where, bool(content["met"]))]
        pairs = list(content.items())
    elif isinstance(content, list):
        # A row names itself; other lists hold no targets.
        pairs = [
            (item.get("name", str(i)), item) for i, item in enumerate(content) if isinstance(item, Mapping)
        ]
    else:
        return []
    return [found for key, item in pairs for found in verdicts(item, f"{where}.{key}" if where else str(key))]


def sources_sha256() -> str:
    """One hash over the Python sources that a figure comes from: lcsb and bcd_theory."""
    digest = hashlib.sha256()
    for package in ("bcd_theory", "lcsb"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
