"""The `lcsb` command. Heavy imports happen inside the commands: `lcsb --help` must not load torch.

The only module of lcsb that imports simulations and proofs; the commands that need neither lie in `lcsb/commands`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from lcsb.commands import bench, convert, models, plan, runs, study, tools
from lcsb.commands.common import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    AsJson,
    Gate,
    console,
    errors,
    one_process,
    print_json,
    terminal_progress,
)

app = typer.Typer(
    name="lcsb",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Measure, predict, run and judge layer-cyclic selective backpropagation on a real 4-bit model.",
    epilog="The main job: [bold]lcsb validate[/]. A look at every part in minutes: lcsb validate --size quick.",
)

app.command()(runs.validate)
app.command()(runs.measure)
app.command()(runs.predict)
app.command()(runs.train)
app.command("run")(runs.run_)
app.command()(models.evaluate)
app.command()(runs.judge)
app.command()(runs.report)
app.command()(study.study)
app.command()(tools.doctor)
app.command()(tools.bounds)
app.command()(convert.convert)
app.command()(plan.plan)
app.add_typer(bench.app, name="bench")


@app.command()
def simulate(
    name: Annotated[str | None, typer.Argument(help="Experiment, for example limits.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every experiment.")] = False,
    size: Annotated[str, typer.Option(help="quick, standard or full.")] = "quick",
    seed: Annotated[int, typer.Option(help="Seed of the random problems.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for records, figures and the page of all.")] = None,
    judge_only: Annotated[
        bool, typer.Option("--judge", help="Judge and draw again from the records in --out; run nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Synthetic problems through the same spine: measured, predicted, run and judged.

    With --out each experiment leaves the records of a real run, and OUT/index.html shows all of them.

    Examples: [bold]lcsb simulate limits[/]    [bold]lcsb simulate --all --out gallery[/]    [bold]lcsb simulate --all
    --out gallery --judge[/]
    """
    from reports.records import RunFolder
    from simulations.experiment import describe, last_line
    from simulations.gallery import render
    from simulations.registry import NAMES, get

    if (name is None) == (not all_):
        raise ValueError(f"simulate: give one experiment ({', '.join(NAMES)}) or --all")
    if judge_only and out is None:
        raise ValueError("simulate: --judge reads records, so it needs --out FOLDER")
    verdict = None
    for chosen in NAMES if name is None else (name,):
        if judge_only and out is not None:
            verdict, _ = get(chosen).conclude(RunFolder(out / chosen))
        else:
            verdict, _ = get(chosen).run(size, seed, out)  # type: ignore[arg-type]
        console.print(describe(verdict), markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        console.print(str(render(out)), markup=False, highlight=False, soft_wrap=True)
    if as_json and verdict is not None:
        sys.stdout.write(last_line(verdict) + "\n")


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="YAML file of the sweep.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the results; default runs/sweep-NAME.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes of this machine; 1 stays in this process.")] = 1,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Dask scheduler, for example tcp://10.0.0.1:8786.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Simulated runs in one tensor program, at most.")] = 64,
    dry_run: Annotated[bool, typer.Option(help="Print what would be done, and do nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Many configurations: every combination of the lists in a YAML file is one run.

    A finished run is found by the hash of its configuration and not done again, so the same command goes on after an
    interruption and a longer list costs only what is new. A failed run is recorded and the others go on; the exit code
    is then 1. OUT/results.json holds all results by hash. A diverged run is a result.

    \b
    kind: simulation             # each problem x arm x learning rate x seed
    problems: [{name: coupled, n: 64, p: 8, coupling: 0.3, condition: 100}]
    arms:
      - {name: full, order: full}
      - {name: lcsb, optimizer: sgd-ema, momentum: 0.9, idle: momentum}
    learning_rates: [0.5, 1.0, 1.5]
    unit: 1/L_max                # or 1/L, or absolute
    seeds: [0, 1, 2]
    steps: 400

    \b
    kind: experiment             # each experiment x size x seed
    experiments: \\[limits, rates]
    seeds: [0, 1]

    \b
    kind: train                  # arms of a run that was measured and predicted, each arm x seed
    run: runs/validate
    arms: \\[full, exact-momentum]

    Examples: [bold]lcsb sweep grid.yaml --jobs 4[/]    [bold]lcsb sweep grid.yaml --cluster tcp://10.0.0.1:8786[/]
    """
    one_process("sweep")
    from lcsb import sweep_training
    from reports.config import read_yaml
    from simulations.sweep import Kind, finished
    from simulations.sweep import sweep as run_all
    from simulations.sweep_kinds import EXPERIMENT, SIMULATION, expand

    try:
        train = Kind("train", sweep_training.expand, sweep_training.train)
        kind, configurations = expand(read_yaml(file), (SIMULATION, EXPERIMENT, train))
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(str(file)) else f"{file}: {error}") from None
    out = out or Path("runs") / f"sweep-{file.stem}"
    if dry_run:
        there = len(finished(configurations, out))
        total = len(configurations)
        if as_json:
            print_json({"kind": kind.name, "total": total, "finished": there, "to_run": total - there})
        else:
            words = f"{total} runs of kind {kind.name} into {out}: {there} finished, {total - there} to run"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
        return
    began = time.monotonic()
    with terminal_progress()(f"sweep {file.stem}") as show:

        def report(done: int, total: int) -> None:
            left = (time.monotonic() - began) * (total - done) / done
            show(done / total, left, f"{done} of {total} runs")

        found = run_all(
            configurations, out, kind.run, together=kind.together, batch=batch, jobs=jobs, cluster=cluster,
            report=report,
        )  # fmt: skip
    for key, message in found.failed.items():
        errors.print(f"{key}: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    total = len(found.done) + len(found.failed)
    if as_json:
        print_json(
            {"kind": kind.name, "total": total, "done": len(found.done), "reused": len(found.reused),
             "failed": found.failed, "results": str(out / "results.json")}
        )  # fmt: skip
    else:
        words = f"{len(found.done)} of {total} runs done ({len(found.reused)} found finished)"
        words += f", {len(found.failed)} failed; {out / 'results.json'}"
        console.print(words, markup=False, highlight=False, soft_wrap=True)
    if found.failed:
        raise typer.Exit(FAILED)


@app.command()
def prove(gate: Gate = False, as_json: AsJson = False) -> None:
    """Check the Coq proofs here and now: a row a claim, with its axioms and where its hypotheses are met.

    Example: [bold]lcsb prove[/]
    """
    from rich.table import Table

    from proofs.check import prove as check_proofs
    from proofs.check import rows_as_json

    rows = check_proofs(gate=gate)
    if as_json:
        sys.stdout.write(rows_as_json(rows) + "\n")
    else:
        table = Table("id", "statement", "file", "Coq", "sympy", "axioms")
        for row in rows:
            axioms = "-" if row.axioms is None else str(len(row.axioms))
            table.add_row(row.theorem, row.statement, row.file, row.coq, row.sympy, axioms)
        console.print(table)
    if gate and not all(row.checked for row in rows):
        raise typer.Exit(FAILED)


app.command()(models.merge)


def _fail(message: str, code: int) -> NoReturn:
    errors.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


def main() -> None:
    """Entry point: an error is one clear line, not a traceback."""
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        _fail("interrupted; the same command goes on from here", INTERRUPTED)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        _fail(f"lcsb: {error}", BAD_INPUT)
    except RuntimeError as error:
        from lcsb.jobs import JobError

        if not isinstance(error, JobError):
            raise
        _fail(f"lcsb: {error}", BAD_INPUT if error.bad_input else FAILED)


if __name__ == "__main__":
    main()
