"""The stages of a run: validate, measure, predict, train, run, judge, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lcsb.commands.against import claim_names, judge_user_logs
from lcsb.commands.common import (
    FAILED,
    STOPPED,
    Against,
    AsJson,
    Bench,
    Claims,
    ConfigFile,
    Gate,
    Overrides,
    Run,
    Size,
    console,
    errors,
    one_process,
    print_json,
    run_folder,
    terminal_progress,
)


def validate(
    size: Size = "standard",
    config: ConfigFile = None,
    set_: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME.")] = None,
    claims: Claims = None,
    against: Against = None,
    bench: Bench = None,
    dry_run: Annotated[bool, typer.Option(help="Print what would be done, and do nothing.")] = False,
    gate: Gate = False,
    as_json: AsJson = False,
) -> None:
    """The main job: measure, predict, run every arm on the real model, judge the claims, write the report.

    An interrupted run is taken up where it stopped by the same command. With --claims only what these claims need is
    run; C3 takes probe steps, which no run takes unasked. With --against nothing is run: your own logs are judged.

    Examples: [bold]lcsb validate[/]    [bold]lcsb validate --size quick[/]
    [bold]lcsb validate --set data.source=notes.txt --out runs/notes[/]
    """
    from reports.records import RunConfig

    names = claim_names(claims)
    if against:
        judge_user_logs(against, names, bench, gate, as_json)
        return
    settings = RunConfig.build(size, config, set_ or [])
    root = out or Path("runs") / settings.name
    if dry_run:
        _describe(settings, root, names)
        return
    one_process("validate")
    from lcsb import stages
    from lcsb.progress import duration

    needs = stages.EVERYTHING if names is None else stages.needs_of(names, settings)
    folder = stages.open_run(root, settings)
    progress = terminal_progress()
    stages.measure(folder, progress)
    _print_corpus(folder)
    stages.predict(folder)
    expected = duration(stages.expected_run_seconds(folder, needs))
    what = "a whole run" if names is None else f"what {', '.join(names)} needs"
    errors.print(f"predictions registered; {what} is expected to take about {expected}", highlight=False)
    stages.run(folder, progress, needs)
    _judge(folder, names, gate, as_json, with_report=True, bench=bench)


def _print_corpus(folder: Any) -> None:
    from reports.records import read_json

    corpus = read_json(folder.environment)["corpus"]
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in corpus["counts"].items())
    errors.print(f"corpus {corpus['source']} (sha256 {corpus['sha256'][:12]}): {counts}", highlight=False)


def _describe(settings: Any, root: Path, names: list[str] | None) -> None:
    if names is not None:
        from lcsb import stages

        needs = stages.needs_of(names, settings)
        wanted = [arm.name for arm in settings.arms if needs.trains(arm)]
        parts = ", ".join(sorted(needs.evidence)) or "no other evidence"
        console.print(
            f"{settings.model} into {root}, for {', '.join(names)} only: {parts}; arms: {', '.join(wanted) or 'none'}; "
            f"{len(settings.seeds)} seeds x {settings.steps} steps. The time is known after the first stage.",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        return
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
    one_process("measure")
    from lcsb import stages
    from reports.records import RunConfig, RunFolder

    folder = RunFolder(run)
    if size != "standard" or config is not None or set_ or not folder.config.exists():
        folder = stages.open_run(run, RunConfig.build(size, config, set_ or []))
    measured = stages.measure(folder, terminal_progress())
    _print_corpus(folder)
    costs = measured.costs
    if as_json:
        print_json({"held_out_loss": measured.held_out_loss, "forward": costs.forward, "head": costs.head})
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


def predict(run: Run, as_json: AsJson = False) -> None:
    """Second stage: turn measurements into predictions, written down before the first training step.

    Example: [bold]lcsb predict runs/mine[/]
    """
    from rich.table import Table

    from lcsb import stages
    from reports.records import sha256_of

    folder = run_folder(run)
    predictions = stages.predict(folder)
    if as_json:
        print_json({item.id: item.value for item in predictions.items})
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


def train(
    run: Run,
    arm: Annotated[str, typer.Option(help="Name of the arm, for example exact-frozen.")],
    seed: Annotated[int, typer.Option(help="One of the run's seeds.")] = 0,
    ram: Annotated[
        str | None,
        typer.Option(
            help="Memory of the whole process, by the memory engine: 1GB = 10^9 bytes, 1GiB = 2^30."
        ),
    ] = None,
) -> None:
    """Train one arm with one seed. Exit code 3 if it diverged.

    With --ram the packed weights stay on disk, and of the large libraries torch alone is imported.

    Examples: [bold]lcsb train runs/mine --arm exact-frozen --seed 1[/]
    [bold]lcsb train runs/mine --arm identity-momentum --ram 650MiB[/]
    """
    from lcsb.launch import refuse_unsupported_launch

    refuse_unsupported_launch()
    folder = run_folder(run)
    if ram is not None:
        status = _train_within(folder, arm, seed, ram)
    else:
        from lcsb.jobs import start_worker
        from lcsb.train import train_arm

        start_worker(1)
        status = train_arm(folder, arm, seed)
    console.print(f"{arm}, seed {seed}: {status}; {folder.arm(arm, seed).metrics}")
    if status == "diverged":
        raise typer.Exit(STOPPED)


def _train_within(folder: Any, arm: str, seed: int, ram: str) -> str:
    from lcsb.engine.ram import parse_ram, shown
    from lcsb.engine.training import train_within

    budget = parse_ram(ram)
    trained = train_within(folder, arm, seed, budget)
    if trained.plan is not None:
        kept = trained.plan.residency
        words = {"packed weights": kept.weights, "head": kept.head, "adapters and moments": kept.states}
        console.print(
            "in memory: " + (", ".join(name for name, there in words.items() if there) or "none of weights and states")
            + f"; layer inputs: {kept.inputs}; predicted peak {shown(trained.plan.peak.total)}, "
            f"measured {shown(trained.peak_bytes)}, budget {shown(budget)}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if trained.peak_bytes > budget:
        errors.print(
            f"the budget was not kept: {trained.peak_bytes} bytes of {budget}", style="red", highlight=False
        )
    return trained.status


def run_(run: Run) -> None:
    """Third stage: time and memory of each mode, then all arms and seeds, then fidelity on held-out batches.

    Example: [bold]lcsb run runs/mine[/]
    """
    one_process("run")
    from lcsb import stages

    stages.run(run_folder(run), terminal_progress())


def judge(
    run: Annotated[Path | None, typer.Argument(help="Run folder, for example runs/validate.")] = None,
    claims: Claims = None,
    against: Against = None,
    bench: Bench = None,
    gate: Gate = False,
    as_json: AsJson = False,
) -> None:
    """Fourth stage: two verdicts a claim, the paper's claim and our prediction; writes verdicts.json.

    With --against in place of a run folder your own logs are judged, as far as they allow, and nothing is written.

    Examples: [bold]lcsb judge runs/mine --gate[/]
    [bold]lcsb judge --against full/0=out/trainer_state.json --against identity-momentum/0=out2/trainer_state.json[/]
    """
    names = claim_names(claims)
    if (run is None) == (not against):
        raise ValueError("judge: give a run folder, or logs with --against FILE")
    if against:
        judge_user_logs(against, names, bench, gate, as_json)
        return
    assert run is not None
    _judge(run_folder(run), names, gate, as_json, with_report=False, bench=bench)


def _judge(
    folder: Any,
    names: list[str] | None,
    gate: bool,
    as_json: bool,
    with_report: bool,
    bench: Path | None = None,
) -> None:
    from rich.table import Table

    from reports.judge import judge as judge_run
    from reports.judge import write_verdicts

    verdicts = judge_run(folder, names, bench)
    write_verdicts(folder, verdicts)
    page = None
    if with_report:
        from reports.render import render

        page = render(folder)
    rows = [(v.claim, v.title, v.paper.verdict, v.ours.verdict) for v in verdicts.verdicts]
    if as_json:
        print_json(
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


def report(run: Run) -> None:
    """Last stage: one self-contained HTML page, and the JSON behind every figure.

    Example: [bold]lcsb report runs/mine[/]
    """
    from reports.render import render

    folder = run_folder(run)
    if not folder.verdicts.exists():
        raise ValueError(f"{folder.verdicts}: not there; judge the run first (lcsb judge {run})")
    console.print(str(render(folder)), soft_wrap=True)
