"""The page of all experiments, from their records: `python -m simulations.gallery --out DIR` writes DIR/index.html."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from reports.gallery import Entry, gallery_page
from reports.records import RunFolder, read_json
from reports.strict import write_text
from simulations.experiment import Experiment
from simulations.records import SimulationVerdict, Size, metrics_path
from simulations.registry import NAMES, get


def entry(experiment: Experiment, folder: RunFolder) -> Entry:
    """Judge and draw one experiment from its files."""
    verdict, record = experiment.conclude(folder)
    (wide, data), (narrow, _) = experiment.figure(record, False), experiment.figure(record, True)
    return Entry(
        experiment.name,
        experiment.title,
        experiment.paragraph,
        experiment.theorems,
        record.size,
        record.seed,
        verdict.verdict,
        verdict.parts,
        record.seconds,
        verdict.command,
        record.predictions_sha256,
        wide,
        narrow,
        data,
    )


def render(out: Path) -> Path:
    """OUT/index.html from the records in OUT; nothing is run. The same records give the same bytes.

    Raises ValueError where there is no record, or one that was registered against other predictions.
    """
    folders = {name: RunFolder(Path(out) / name) for name in NAMES}
    present = [name for name, folder in folders.items() if metrics_path(folder).exists()]
    if not present:
        raise ValueError(
            f"{out}: found no record of {', '.join(NAMES)}, expected what `lcsb simulate --out` leaves"
        )
    entries = [entry(get(name), folders[name]) for name in present]
    first = folders[present[0]].environment
    commit = read_json(first).get("commit") if first.exists() else None
    path = Path(out) / "index.html"
    write_text(path, gallery_page(entries, _command(entries), commit))
    return path


def _command(entries: Sequence[Entry]) -> str:
    sizes = {each.size for each in entries}
    seeds = {each.seed for each in entries}
    if len(entries) < len(NAMES) or len(sizes) > 1 or len(seeds) > 1:
        return "\n".join(f"{each.command} --out gallery" for each in entries)
    seed = f" --seed {entries[0].seed}" if entries[0].seed else ""
    return f"lcsb simulate --all --size {entries[0].size}{seed} --out gallery"


def build(
    out: Path,
    size: Size = "quick",
    seed: int = 0,
    names: Sequence[str] = NAMES,
    tell: Callable[[SimulationVerdict], None] = lambda verdict: None,
) -> Path:
    """Run the experiments, `tell` of each, write their records and the page. Returns the page's path."""
    for name in names:
        tell(get(name).run(size, seed, out)[0])
    return render(out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m simulations.gallery", description="One page of the records."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that holds the records")
    sys.stdout.write(f"{render(parser.parse_args(arguments).out)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
