"""The `lcsb` command. Heavy imports happen inside the commands: `lcsb --help` must not load torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

app = typer.Typer(
    name="lcsb",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Measure, predict, run and judge layer-cyclic selective backpropagation on a real 4-bit model.",
    epilog="The main job: [bold]lcsb validate[/]. A look at every part in minutes: lcsb validate --size quick.",
)
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
Claims = Annotated[str | None, typer.Option(help="Only these claims: C1,C4.")]


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def _folder(run: Path) -> Any:
    from reports.records import RunFolder

    folder = RunFolder(run)
    if not folder.config.exists():
        raise ValueError(f"{run}: not a run folder (no config.yaml in it)")
    return folder


def _one_process(command: str) -> None:
    from lcsb.launch import refuse_unsupported_launch

    refuse_unsupported_launch(f"lcsb {command}")


def _progress() -> Callable[[str], Any]:
    from lcsb.progress import progress

    return partial(progress, errors)


@app.command()
def validate(
    size: Size = "standard",
    config: ConfigFile = None,
    set_: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME.")] = None,
    claims: Claims = None,
    dry_run: Annotated[bool, typer.Option(help="Print what would be done, and do nothing.")] = False,
    gate: Gate = False,
    as_json: AsJson = False,
) -> None:
    """The main job: measure, predict, run every arm on the real model, judge the claims, write the report.

    An interrupted run is taken up where it stopped by the same command.

    Examples: [bold]lcsb validate[/]    [bold]lcsb validate --size quick[/]
    [bold]lcsb validate --set data.source=notes.txt --out runs/notes[/]
    """
    from reports.records import RunConfig

    settings = RunConfig.build(size, config, set_ or [])
    root = out or Path("runs") / settings.name
    if dry_run:
        _describe(settings, root)
        return
    _one_process("validate")
    from lcsb import stages
    from lcsb.progress import duration

    folder = stages.open_run(root, settings)
    progress = _progress()
    stages.measure(folder, progress)
    _print_corpus(folder)
    stages.predict(folder)
    expected = duration(stages.expected_run_seconds(folder))
    errors.print(f"predictions registered; a whole run is expected to take about {expected}", highlight=False)
    stages.run(folder, progress)
    _judge(folder, claims, gate, as_json, with_report=True)


def _print_corpus(folder: Any) -> None:
    from reports.records import read_json

    corpus = read_json(folder.environment)["corpus"]
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in corpus["counts"].items())
    errors.print(f"corpus {corpus['source']} (sha256 {corpus['sha256'][:12]}): {counts}", highlight=False)


def _describe(settings: Any, root: Path) -> None:
    arms, seeds = len(settings.arms), len(settings.seeds)
    steps = arms * seeds * settings.steps
    windows = arms * seeds * (-(-settings.steps // settings.eval_every)) * settings.eval_windows
    timed = (settings.timing_repeats + 1) * (1 + 3 * sum(settings.timing_cycle_lengths))
    console.print(
        f"{settings.model} ({settings.quantization or 'not quantised'}) into {root}: {arms} arms x {seeds} seeds x "
        f"{settings.steps} steps = {steps} training steps of {settings.batch_size} x {settings.data.tokens} tokens, "
        f"{windows} held-out windows, {timed} timed steps, {2 * settings.fidelity_batches + 1} fidelity batches; "
        f"{settings.workers} processes of one thread. The time is known after the first stage (lcsb measure).",
        highlight=False,
    )


@app.command()
def measure(
    run: Run,
    size: Size = "standard",
    config: ConfigFile = None,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """First stage: gradient fidelity by layer and seconds by part of this model on this machine.

    Example: [bold]lcsb measure runs/mine --set cycle_length=2[/]
    """
    _one_process("measure")
    from lcsb import stages
    from reports.records import RunConfig, RunFolder

    folder = RunFolder(run)
    if size != "standard" or config is not None or set_ or not folder.config.exists():
        folder = stages.open_run(run, RunConfig.build(size, config, set_ or []))
    measured = stages.measure(folder, _progress())
    _print_corpus(folder)
    costs = measured.costs
    if as_json:
        _print_json({"held_out_loss": measured.held_out_loss, "forward": costs.forward, "head": costs.head})
        return
    parts = (
        "forward",
        "head",
        "recompute",
        "input_gradient",
        "adapter_gradient",
        "dequantisation",
        "optimizer",
    )
    for part in parts:
        console.print(f"{part.replace('_', ' '):18} {_total(costs, part):8.3f} s")
    console.print(
        f"held-out loss at the start: {measured.held_out_loss:.3f}; all figures in {folder.measurements}"
    )


def _total(costs: Any, part: str) -> float:
    value = getattr(costs, part)
    return float(value if isinstance(value, float) else sum(value))


@app.command()
def predict(run: Run, as_json: AsJson = False) -> None:
    """Second stage: turn measurements into predictions, written down before the first training step.

    Example: [bold]lcsb predict runs/mine[/]
    """
    from rich.table import Table

    from lcsb import stages
    from reports.records import sha256_of

    folder = _folder(run)
    predictions = stages.predict(folder)
    if as_json:
        _print_json({item.id: item.value for item in predictions.items})
        return
    table = Table("prediction", "value", "unit", "theorem")
    for item in predictions.items:
        values = item.value if isinstance(item.value, tuple) else (item.value,)
        shown = ", ".join("-" if v is None else f"{v:.3g}" for v in values[:6])
        table.add_row(
            item.id, shown + (", ..." if len(values) > 6 else ""), item.unit, ", ".join(item.theorems)
        )
    console.print(table)
    console.print(f"sha256 {sha256_of(folder.predictions)}")


@app.command()
def train(
    run: Run,
    arm: Annotated[str, typer.Option(help="Name of the arm, for example exact-frozen.")],
    seed: Annotated[int, typer.Option(help="One of the run's seeds.")] = 0,
) -> None:
    """Train one arm with one seed. Exit code 3 if it diverged.

    Example: [bold]lcsb train runs/mine --arm exact-frozen --seed 1[/]
    """
    from lcsb.launch import refuse_unsupported_launch

    refuse_unsupported_launch()
    folder = _folder(run)
    from lcsb.jobs import start_worker
    from lcsb.train import train_arm

    start_worker(1)
    status = train_arm(folder, arm, seed)
    console.print(f"{arm}, seed {seed}: {status}; {folder.arm(arm, seed).metrics}")
    if status == "diverged":
        raise typer.Exit(STOPPED)


@app.command("run")
def run_(run: Run) -> None:
    """Third stage: time and memory of each mode, then all arms and seeds, then fidelity on held-out batches.

    Example: [bold]lcsb run runs/mine[/]
    """
    _one_process("run")
    from lcsb import stages

    stages.run(_folder(run), _progress())


@app.command()
def evaluate(
    task: Annotated[
        str, typer.Option(help="A task's name, a .jsonl or text file, or owner/name of the hub.")
    ],
    adapter: Annotated[
        Path | None, typer.Option(help="Folder of a PEFT adapter; the base alone if left out.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Base model; default: what the adapter was trained on.")
    ] = None,
    quantization: Annotated[str, typer.Option(help="nf4, fp4, int8 or none.")] = "nf4",
    path: Annotated[
        Path | None, typer.Option(help="Folder with the named tasks' files; or LCSB_DATA.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Only so many rows or questions; windows of a text.")
    ] = None,
    window: Annotated[int, typer.Option(help="Most tokens of a row or window.")] = 512,
    stride: Annotated[int | None, typer.Option(help="Of a text's windows; default half a window.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows at once; changes no figure.")] = 4,
    text_field: Annotated[str, typer.Option(help="Field of a .jsonl file of texts.")] = "text",
    size: Annotated[
        str, typer.Option(help="full: gsm8k also by exact match of 100 generated answers.")
    ] = "standard",
    harness: Annotated[
        bool, typer.Option("--harness", help="By lm-evaluation-harness (extra eval).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score a model, with an adapter or without, on a task: perplexity, accuracy, loss of answers.

    Examples: [bold]lcsb evaluate --task arc-challenge --path data --limit 100[/]
    [bold]lcsb evaluate --adapter runs/mine/arms/full/seed-0/adapter --task wikitext-2 --path data[/]
    """
    _one_process("evaluate")
    from lcsb.evaluate_command import EvaluateOptions, evaluate_task

    options = EvaluateOptions(
        task, adapter, model, quantization, path, limit, window, stride, batch_size, text_field, size, harness
    )
    result = evaluate_task(options, _progress())
    if as_json:
        _print_json({"task": result.task, "metrics": result.metrics, "counts": result.counts})
        return
    from rich.table import Table

    table = Table("figure", "value", title=result.task, title_justify="left")
    for name, value in result.metrics.items():
        table.add_row(name, "not finite" if value is None else f"{value:.6g}")
    console.print(table)
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in result.counts.items())
    console.print(counts, highlight=False, soft_wrap=True)


@app.command()
def judge(run: Run, claims: Claims = None, gate: Gate = False, as_json: AsJson = False) -> None:
    """Fourth stage: two verdicts a claim, the paper's claim and our prediction; writes verdicts.json.

    Example: [bold]lcsb judge runs/mine --gate[/]
    """
    _judge(_folder(run), claims, gate, as_json, with_report=False)


def _judge(folder: Any, claims: str | None, gate: bool, as_json: bool, with_report: bool) -> None:
    from rich.table import Table

    from reports.judge import judge as judge_run
    from reports.judge import write_verdicts

    verdicts = judge_run(folder, [name.strip() for name in claims.split(",")] if claims else None)
    write_verdicts(folder, verdicts)
    page = None
    if with_report:
        from reports.render import render

        page = render(folder)
    rows = [(v.claim, v.title, v.paper.verdict, v.ours.verdict) for v in verdicts.verdicts]
    if as_json:
        _print_json(
            {"verdicts": [dict(zip(("claim", "title", "paper", "ours"), row, strict=True)) for row in rows]}
        )
    else:
        table = Table("claim", "", "the paper's claim", "our prediction")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print(
            f"verdicts in {folder.verdicts}" + (f", report in {page}" if page else ""), soft_wrap=True
        )
    if gate and any("refuted" in row[2:] for row in rows):
        raise typer.Exit(FAILED)


@app.command()
def report(run: Run) -> None:
    """Last stage: one self-contained HTML page, and the JSON behind every figure.

    Example: [bold]lcsb report runs/mine[/]
    """
    from reports.render import render

    folder = _folder(run)
    if not folder.verdicts.exists():
        raise ValueError(f"{folder.verdicts}: not there; judge the run first (lcsb judge {run})")
    console.print(str(render(folder)), soft_wrap=True)


@app.command()
def doctor(gate: Gate = False, as_json: AsJson = False) -> None:
    """Look for what is wrong with this installation, and say what mends it.

    Example: [bold]lcsb doctor[/]
    """
    from dataclasses import asdict

    from rich.table import Table

    from lcsb.doctor import diagnose

    checks = diagnose()
    if as_json:
        _print_json({"checks": [asdict(check) for check in checks]})
    else:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}
        table = Table("check", "", "found", "mend")
        for check in checks:
            table.add_row(check.name, f"[{colour[check.status]}]{check.status}[/]", check.found, check.mend)
        console.print(table)
    if gate and any(check.status == "fail" for check in checks):
        raise typer.Exit(FAILED)


@app.command()
def bounds(
    bound: Annotated[str | None, typer.Argument(help="Id of one bound, for example T2.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A variable's value.")
    ] = None,
    latex: Annotated[bool, typer.Option(help="Print the formula as LaTeX.")] = False,
    tightness: Annotated[
        bool, typer.Option(help="How close each bound comes on the declared problems.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The step-size bounds and rates: formula, assumptions, source, derivation, value.

    Examples: [bold]lcsb bounds[/]    [bold]lcsb bounds T1 --set eta=0.5 --set L_i=2 --set g2=4[/]
    [bold]lcsb bounds --tightness[/]
    """
    from rich.table import Table

    from bcd_theory.stepsize import BOUNDS
    from lcsb.bounds_table import bound_named, describe, numbers, tightness_rows

    if tightness:
        rows = tightness_rows()
        if as_json:
            _print_json({"tightness": rows})
            return
        table = Table("bound", "tightness", "with p > 1", "cases", "attained by")
        for row in rows:
            mark = "" if row["testable"] else " (not testable by sampling)"
            problem = row["problem"] + mark
            table.add_row(
                row["id"], f"{row['tightness']:.4f}", f"{row['coupled']:.4f}", str(row["cases"]), problem
            )
        console.print(table)
        return
    if bound is None:
        if set_ or latex:
            raise ValueError("--set and --latex need the id of a bound")
        if as_json:
            _print_json({"bounds": [{"id": b.id, "name": b.name, "kind": b.kind} for b in BOUNDS.values()]})
            return
        table = Table("id", "name", "kind", "source")
        for item in BOUNDS.values():
            table.add_row(item.id, item.name, item.kind, item.source)
        console.print(table)
        return
    found = describe(bound_named(bound), numbers(set_ or []))
    if as_json:
        _print_json(found)
        return
    if latex:
        console.print(found["latex"], markup=False, highlight=False, soft_wrap=True)
        return
    sign = {"upper": "<=", "lower": ">=", "equal": "="}[found["sense"]]
    lines = [
        f"{found['id']}: {found['name']} ({found['kind']})",
        f"{found['quantity']} {sign} {found['expression']}",
    ]
    if found["largest_step"] is not None:
        lines.append(f"learning rates below {found['largest_step']}")
    lines += [f"assumes: {text}" for text in found["assumptions"]] + [f"source: {found['source']}"]
    lines += [
        f"step ({'checked' if step['checked'] else 'NOT CHECKED'}): {step['words']}"
        for step in found["derivation"]
    ]
    if "value" in found:
        lines.append(f"value: {'no guarantee at these values' if found['value'] is None else found['value']}")
    if "largest_step_value" in found:
        lines.append(f"largest learning rate: {found['largest_step_value']}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


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
    _one_process("sweep")
    from lcsb import sweep_training
    from reports.config import _read_yaml
    from simulations.sweep import Kind, finished
    from simulations.sweep import sweep as run_all
    from simulations.sweep_kinds import EXPERIMENT, SIMULATION, expand

    try:
        train = Kind("train", sweep_training.expand, sweep_training.train)
        kind, configurations = expand(_read_yaml(file), (SIMULATION, EXPERIMENT, train))
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(str(file)) else f"{file}: {error}") from None
    out = out or Path("runs") / f"sweep-{file.stem}"
    if dry_run:
        there = len(finished(configurations, out))
        total = len(configurations)
        if as_json:
            _print_json({"kind": kind.name, "total": total, "finished": there, "to_run": total - there})
        else:
            words = f"{total} runs of kind {kind.name} into {out}: {there} finished, {total - there} to run"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
        return
    began = time.monotonic()
    with _progress()(f"sweep {file.stem}") as show:

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
        _print_json(
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


@app.command()
def merge(
    adapter: Annotated[Path, typer.Option(help="Folder of the adapter.")],
    model: Annotated[
        str | None, typer.Option(help="Base model; default: what the adapter was trained on.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New or empty folder for the merged model.")] = None,
    quantization: Annotated[
        str, typer.Option(help="The base's while training: nf4, fp4, int8 or none.")
    ] = "nf4",
    double_quant: Annotated[bool, typer.Option(help="The base's scales were quantised too.")] = False,
    untie: Annotated[
        bool, typer.Option(help="Separate a tied head and embedding if the adapter must.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Compare the four models that a merge can mean.")
    ] = False,
    data: Annotated[str, typer.Option(help="Text for --table: file or built-in corpus.")] = "pydoc",
    windows: Annotated[int, typer.Option(help="Held-out windows for --table, of 128 tokens.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Merge an adapter into the dequantised base it was trained on; the result is read back and compared.

    Examples: [bold]lcsb merge --adapter runs/mine/arms/full/seed-0/adapter --model smollm2-135m --out merged[/]
    [bold]lcsb merge --adapter ADAPTER --model smollm2-135m --table[/]
    """
    _one_process("merge")
    from dataclasses import asdict

    from rich.table import Table

    from lcsb.adapter_files import base_of
    from lcsb.jobs import start_worker
    from lcsb.merge import MergeError, merge_adapter, merge_table, text_rows

    if (out is None) == (not table):
        raise ValueError("merge: give --out FOLDER to write the merged model, or --table to compare")
    start_worker(1)
    model = model or base_of(adapter)
    kind = None if quantization == "none" else quantization
    try:
        if out is not None:
            report = merge_adapter(
                model, adapter, out, quantization=kind, double_quant=double_quant, untie=untie
            )
            if as_json:
                _print_json(asdict(report))
                return
            console.print(
                f"{out}: {report.modules} modules merged{', head untied from embedding' if report.untied else ''}; "
                f"read back, loss {report.loss_merged:.6f} (adapter on its base {report.loss_adapter:.6f}), logits "
                f"differ by {report.logit_difference:.1e} of the largest",
                soft_wrap=True,
                highlight=False,
            )
            return
        if kind is None:
            raise ValueError(
                "merge --table: --quantization none leaves nothing to compare, expected nf4, fp4 or int8"
            )
        rows = merge_table(
            model, adapter, text_rows(model, kind, double_quant, data, windows), quantization=kind,
            double_quant=double_quant,
        )  # fmt: skip
    except MergeError as error:
        errors.print(f"lcsb: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(FAILED) from None
    if as_json:
        _print_json({"rows": [asdict(row) for row in rows]})
        return
    shown = Table("", "model", "loss", "loss - a", "logits", "")
    for row in rows:
        same = "-" if row.row == "a" else "the same function" if row.same else "another model"
        shown.add_row(
            row.row, row.model, f"{row.loss:.6f}", f"{row.gap:+.1e}", f"{row.logit_difference:.1e}", same
        )
    console.print(shown)


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
