"""`lcsb study`: every claim on real models, part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lcsb.commands.common import (
    FAILED,
    AsJson,
    Bench,
    Gate,
    Size,
    console,
    errors,
    one_process,
    print_json,
    terminal_progress,
)


def study(
    folder: Annotated[Path, typer.Argument(help="Folder of the study, for example runs/study.")],
    size: Size = "quick",
    part: Annotated[str | None, typer.Option(help="Only these parts: a,f. Default all.")] = None,
    path: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' files; default LCSB_DATA, else the hub.")
    ] = None,
    bench: Bench = None,
    dry_run: Annotated[bool, typer.Option(help="Print what it would cost, and do nothing.")] = False,
    judge_only: Annotated[bool, typer.Option("--judge", help="Judge what is there; run nothing.")] = False,
    gate: Gate = False,
    as_json: AsJson = False,
) -> None:
    """All claims on real models: parts a to f, each of ordinary run folders, then one verdict table and page.

    \b
    a  all arms at one setting       d  the alternatives
    b  equal updates per block       e  a second model
    c  tasks with answers            f  sweeps of learning rates to divergence

    The same command goes on after an interruption, run by run and arm by arm. FOLDER/verdicts.json and
    FOLDER/report.html hold the table; a memory benchmark in FOLDER/memory.json is judged with them.

    Examples: [bold]lcsb study runs/study --size standard --dry-run[/]    [bold]lcsb study runs/study --size standard
    --part f[/]    [bold]lcsb study runs/study --judge[/]
    """
    from reports.study import judge_study, write_study

    if judge_only:
        _show(folder, judge_study(folder, bench), write_study, gate, as_json)
        return
    one_process("study")
    from lcsb.study import PARTS, cost_of, plan, run_study

    names = tuple(PARTS) if part is None else tuple(name.strip() for name in part.split(","))
    runs = plan(size, names, None if path is None else str(path))
    if dry_run:
        _costs([cost_of(folder, run) for run in runs], as_json)
        return

    def say(text: str) -> None:
        errors.print(text, markup=False, highlight=False, soft_wrap=True)

    failed = run_study(folder, size, runs, terminal_progress(), say)
    _show(folder, judge_study(folder, bench), write_study, gate, as_json)
    if failed:
        say(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(line.partition(':')[0] for line in failed)}"
        )
        raise typer.Exit(FAILED)


def _costs(costs: list[Any], as_json: bool) -> None:
    from rich.table import Table

    known = sum(cost.seconds for cost in costs if cost.seconds is not None)
    unknown = [cost.run.name for cost in costs if cost.seconds is None]
    if as_json:
        runs = [
            {"part": c.run.part, "name": c.run.name, "core_hours": None if c.seconds is None else c.seconds / 3600,
             "source": c.source}
            for c in costs
        ]  # fmt: skip
        print_json({"runs": runs, "core_hours": known / 3600, "unknown": unknown})
        return
    table = Table("part", "run", "arms x seeds x steps", "tokens", "core-hours", "from")
    for cost in costs:
        config = cost.run.config
        shape = f"{len(config.arms)} x {len(config.seeds)} x {config.steps}"
        hours = "unknown" if cost.seconds is None else f"{cost.seconds / 3600:.2f}"
        table.add_row(cost.run.part, cost.run.name, shape, str(config.data.tokens), hours, cost.source)
    console.print(table)
    by_part: dict[str, float] = {}
    for cost in costs:
        by_part[cost.run.part] = by_part.get(cost.run.part, 0.0) + (cost.seconds or 0.0) / 3600
    parts = ", ".join(f"{name} {hours:.2f}" for name, hours in by_part.items())
    more = f"; unknown before it is measured: {', '.join(unknown)}" if unknown else ""
    console.print(
        f"{known / 3600:.2f} core-hours ({parts}){more}. Estimates scale the published run's measured costs by T12's "
        "counts; an arm that diverges stops early and costs less.",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _show(folder: Path, verdicts: Any, write: Any, gate: bool, as_json: bool) -> None:
    from rich.table import Table

    page = write(folder, verdicts)
    if as_json:
        print_json({"verdicts": [row.model_dump(mode="json") for row in verdicts.table]})
    else:
        table = Table("claim", "", "the paper's claim", "our prediction")
        for row in verdicts.table:
            table.add_row(row.claim, row.title, row.paper, row.ours)
        console.print(table)
        console.print(verdicts.planted, markup=False, highlight=False, soft_wrap=True)
        for line in verdicts.missing:
            console.print(f"missing: {line}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"verdicts in {folder / 'verdicts.json'}, page {page}", soft_wrap=True)
    if gate and any("refuted" in (row.paper, row.ours) for row in verdicts.table):
        raise typer.Exit(FAILED)
