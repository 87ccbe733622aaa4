"""`lcsb bench memory` and `lcsb bench speed`: the engine beside its peers, on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lcsb.commands.common import FAILED, AsJson, Gate, console, one_process, print_json, terminal_progress

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Memory and speed of the memory engine beside its peers. A run that was interrupted goes on where it stopped.",
)

Cases = Annotated[
    list[str] | None, typer.Option("--case", help="Model or geometry, repeated for more; default all.")
]
Arms = Annotated[
    list[str] | None,
    typer.Option("--arm", help="full, exact, identity, mlp, qlora, badam or lisa; default all."),
]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of the one row of a batch.")]
Rank = Annotated[int, typer.Option(min=1, help="Rank of the adapters, on all seven projections.")]
Threads = Annotated[int, typer.Option(min=1, help="Compute threads of each process.")]
ComputeType = Annotated[
    str,
    typer.Option(
        "--compute-dtype", help="float32 or bfloat16: of the large products, ours and the peers' alike."
    ),
]
Models = Annotated[
    Path | None,
    typer.Option(help="Folder for models of random weights; default in the cache (up to 2.5 GB each)."),
]


@app.command()
def memory(
    case: Cases = None,
    arm: Arms = None,
    tokens: Tokens = 256,
    rank: Rank = 16,
    threads: Threads = 1,
    compute_dtype: ComputeType = "float32",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each arm; default one cycle.")] = None,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold", help="Ours once more with the model dropped from the page cache before each step."
        ),
    ] = False,
    growth: Annotated[
        bool, typer.Option("--growth", help="Instead: peak and seconds against length, depth and vocabulary.")
    ] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only write the models of random weights.")
    ] = False,
    models: Models = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSON, parts in a folder of that name; default runs/bench/memory.json or growth.json."
        ),
    ] = None,
    gate: Gate = False,
    as_json: AsJson = False,
) -> None:
    """Peak memory of the whole process, each arm in a fresh one, against its target.

    Batch 1, AdamW, adapters on all seven projections. Peers: QLoRA in a Trainer, BAdam, LISA, on the same packed
    weights. Geometries of random weights are measured for ours alone, with seconds against the matrix products.

    Examples: [bold]lcsb bench memory[/]    [bold]lcsb bench memory --case smollm2-135m --arm full --arm qlora[/]
    [bold]lcsb bench memory --case qwen2.5-3b --cold[/]
    """
    one_process("bench")
    from lcsb.bench.cases import ARMS, CASES, COMPUTE_TYPES, chosen
    from lcsb.bench.memory import Setup, measure_memory
    from lcsb.bench.processes import folder_of

    chosen([compute_dtype], COMPUTE_TYPES, "--compute-dtype")
    setup = Setup(tokens, rank, threads, _models(models), steps, cold, compute_dtype=compute_dtype)
    if growth:
        from lcsb.bench.growth import measure_growth

        out = out or Path("runs/bench/growth.json")
        _finish(measure_growth(setup, out, _shown), _growth_tables, gate, as_json, out)
        return
    out = out or Path("runs/bench/memory.json")
    cases = [CASES[name] for name in chosen(case, tuple(CASES), "--case")]
    if prepare:
        for found in cases:
            console.print(str(folder_of(found, setup.models)), markup=False, highlight=False, soft_wrap=True)
        return
    arms = chosen(arm, ARMS, "--arm") if arm else None
    _finish(measure_memory(cases, arms, setup, out, _shown), _memory_tables, gate, as_json, out)


@app.command()
def speed(
    case: Cases = None,
    arm: Arms = None,
    tokens: Tokens = 256,
    rank: Rank = 16,
    threads: Threads = 1,
    compute_dtype: ComputeType = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count; medians are over them.")] = 3,
    profile: Annotated[
        bool, typer.Option("--profile", help="Instead: where the time of a step goes, by row and phase.")
    ] = False,
    allocator: Annotated[
        str,
        typer.Option(
            help="The peers' allocator: default (the system's), fast (keeps freed memory) or small."
        ),
    ] = "default",
    models: Models = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON; default runs/bench/speed.json or profile.json.")
    ] = None,
    gate: Gate = False,
    as_json: AsJson = False,
) -> None:
    """Seconds per step, engine and peers in turn within one run, and the forward pass against its matrix products.

    Ratios are of CPU seconds; wall seconds stand beside them.

    Examples: [bold]lcsb bench speed[/]    [bold]lcsb bench speed --case smollm2-135m --repeats 3[/]
    [bold]lcsb bench speed --profile[/]
    """
    one_process("bench")
    from lcsb.bench.cases import ARMS, CASES, COMPUTE_TYPES, OURS, chosen
    from lcsb.bench.memory import Setup
    from lcsb.bench.processes import ALLOCATORS
    from lcsb.bench.speed import measure_profile, measure_speed

    chosen([allocator], tuple(ALLOCATORS), "--allocator")
    real = tuple(name for name, found in CASES.items() if found.real)
    names = chosen(case, tuple(CASES), "--case") if case else real
    cases = [CASES[name] for name in names]
    chosen([compute_dtype], COMPUTE_TYPES, "--compute-dtype")
    setup = Setup(tokens, rank, threads, _models(models), allocator=allocator, compute_dtype=compute_dtype)
    if profile:
        modes = chosen(arm, OURS, "--arm") if arm else ("full",)
        if len(modes) > 1:
            raise ValueError(f"--profile: one --arm at a time, found {', '.join(modes)}")
        out = out or Path("runs/bench/profile.json")
        report = measure_profile(cases, modes[0], setup, repeats, out, _shown)
        _finish(report, _profile_tables, gate, as_json, out)
        return
    out = out or Path("runs/bench/speed.json")
    arms = chosen(arm, ARMS, "--arm")
    _finish(measure_speed(cases, arms, setup, repeats, out, _shown), _speed_tables, gate, as_json, out)


def _models(models: Path | None) -> Path:
    from lcsb.cache import cache_root

    return models or cache_root() / "random-weights"


@contextlib.contextmanager
def _shown(title: str) -> Iterator[Callable[[float, str], None]]:
    """A progress bar that takes (share, words) and works out the time left."""
    began = time.monotonic()
    with terminal_progress()(title) as show:

        def report(share: float, words: str) -> None:
            show(share, (time.monotonic() - began) * (1 - share) / share if share else None, words)

        yield report


def _finish(
    report: dict[str, Any],
    tables: Callable[[Mapping[str, Any]], list[Any]],
    gate: bool,
    as_json: bool,
    out: Path,
) -> None:
    if as_json:
        print_json(report)
    else:
        for table in tables(report):
            console.print(table)
        words = f"{report['targets'] - len(report['missed'])} of {report['targets']} targets met; {out}"
        console.print(words, markup=False, highlight=False, soft_wrap=True)
        if report["missed"]:
            console.print(
                f"missed: {', '.join(report['missed'])}", markup=False, highlight=False, soft_wrap=True
            )
    if gate and not report["met"]:
        raise typer.Exit(FAILED)


def _mib(count: float | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f}"


def _against(found: Mapping[str, Any], show: Callable[[float], str], sign: str = "<=") -> str:
    """value (limit), coloured where there is a target."""
    if found["value"] is None:
        return "-"
    if found["met"] is None:
        return show(found["value"])
    colour = "green" if found["met"] else "red"
    return f"[{colour}]{show(found['value'])}[/] ({sign} {show(found['limit'])})"


def _memory_tables(report: Mapping[str, Any]) -> list[Any]:
    from rich.table import Table

    tables = []
    for name, case in report["cases"].items():
        table = Table(
            "arm", "peak MiB", "plan", "parts", "anon", "floor", "CPU s", "wall s", "x products",
            title=f"{name} ({case['weights']})",
        )  # fmt: skip
        for row in case["arms"]:
            times = row["times_products"]
            name = row["name"] + (", cold" if row["page_cache"] == "cold" else "")
            table.add_row(
                name, _against(row["peak"], _mib), _mib(row["planned"] and row["planned"]["peak"]["total"]),
                _mib(row["parts"] and sum(row["parts"].values())),
                _mib(row["anonymous_bytes"]), _mib(row["floor_bytes"]),
                *(f"{row['seconds'][clock]:.2f}" for clock in ("cpu", "wall")),
                "-" if times is None else f"{times:.2f}",
            )  # fmt: skip
        tables.append(table)
    return tables


def _speed_tables(report: Mapping[str, Any]) -> list[Any]:
    from rich.table import Table

    def ratio(value: float) -> str:
        return f"{value:.3f}"

    tables = []
    for name, case in report["cases"].items():
        table = Table(
            "arm", "CPU s/step", "of QLoRA", "(wall)", "layers CPU s", "of QLoRA", "(wall)", "peak MiB",
            title=f"{name} ({case['weights']})",
        )  # fmt: skip
        for row in case["arms"]:
            walls = [row[f"{part}_wall_ratio"] for part in ("step", "layers")]
            step, layers = ("-" if wall is None else ratio(wall) for wall in walls)
            table.add_row(
                row["name"], f"{row['step']['cpu']:.3f}", _against(row["step_ratio"], ratio), step,
                f"{row['layers']['cpu']:.3f}", _against(row["layers_ratio"], ratio), layers, _mib(row["peak_bytes"]),
            )  # fmt: skip
        tables.append(table)
        if case["forward"] is not None:
            found = case["forward"]
            table = Table("forward pass", "CPU s", "products alone", "share", title=f"{name}: forward")
            for part in ("layers", "head"):
                alone = found["products_seconds"][f"{part}_forward"]
                share = ratio(found[f"{part}_share"])
                table.add_row(part, f"{found['seconds'][part]:.3f}", f"{alone:.3f}", share)
            alone = sum(found["products_seconds"][f"{part}_forward"] for part in ("layers", "head"))
            share = _against(found["share"], ratio, ">=")
            table.add_row("both", f"{found['seconds']['whole']:.3f}", f"{alone:.3f}", share)
            tables.append(table)
    return tables


def _profile_tables(report: Mapping[str, Any]) -> list[Any]:
    from rich.table import Table

    from lcsb.bench.ledger import PHASES

    tables = []
    for name, case in report["cases"].items():
        table = Table("seconds of one step", *PHASES, "sum", "share", title=f"{name}, mode {case['mode']}")
        for row, phases in case["table"].items():
            whole = sum(phases.values())
            table.add_row(
                row, *(f"{phases[p]:.3f}" for p in PHASES), f"{whole:.3f}", f"{whole / case['seconds']:.1%}"
            )
        sums = [sum(phases[p] for phases in case["table"].values()) for p in PHASES]
        table.add_row("sum", *(f"{s:.3f}" for s in sums), f"{case['seconds']:.3f}", "100%")
        table.caption = (
            f"wall; measuring costs {case['cost_of_measuring'] - 1:+.1%} CPU; "
            f"dequantisation is {case['dequantisation_of_backward']:.1%} of backward"
        )
        tables.append(table)
    return tables


def _growth_tables(report: Mapping[str, Any]) -> list[Any]:
    from rich.table import Table

    tables = []
    for name, rows in report["sweeps"].items():
        table = Table(
            name, "peak MiB", "predicted", "apart", "CPU s/step", "predicted", title=f"growth with {name}"
        )
        for row in rows:
            seconds = row["predicted_seconds"]
            table.add_row(
                row["name"], _mib(row["peak_bytes"]), _mib(row["predicted_bytes"]),
                _against(row["error"], lambda share: f"{share:.1%}"), f"{row['seconds']['cpu']:.2f}",
                "-" if seconds is None else f"{seconds:.2f}",
            )  # fmt: skip
        tables.append(table)
    return tables
