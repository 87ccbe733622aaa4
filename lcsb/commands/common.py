"""What the commands share: the two consoles, exit codes, options and the ways to print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

console = Console(stderr=False)
errors = Console(stderr=True)

BAD_INPUT, FAILED, STOPPED, INTERRUPTED = 2, 1, 3, 130

Run = Annotated[Path, typer.Argument(help="Run folder, for example runs/validate.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line, for machines.")]
Gate = Annotated[bool, typer.Option("--gate", help="Exit with 1 if a claim is refuted or a check fails.")]
Size = Annotated[str, typer.Option(help="quick, standard or full.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, dotted: --set optimizer.eps=1e-6."),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="A log to judge, repeated for more: metrics.jsonl, or a Trainer's state as ARM/SEED=trainer_state.json.",
    ),
]
Bench = Annotated[Path | None, typer.Option(help="JSON of lcsb bench memory, for claim C7.")]
Claims = Annotated[str | None, typer.Option(help="Only these claims: C1,C4.")]


def print_json(value: object) -> None:
    """One JSON object as the last line."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def run_folder(run: Path) -> Any:
    """The run folder. Raises ValueError if it is none."""
    from reports.records import RunFolder

    folder = RunFolder(run)
    if not folder.config.exists():
        raise ValueError(f"{run}: not a run folder (no config.yaml in it)")
    return folder


def one_process(command: str) -> None:
    """Refuse a launch in several processes, which `command` has no meaning for."""
    from lcsb.launch import refuse_unsupported_launch

    refuse_unsupported_launch(f"lcsb {command}")


def terminal_progress() -> Callable[[str], Any]:
    """Progress bars with the time left, on the error console."""
    from lcsb.progress import progress

    return partial(progress, errors)
