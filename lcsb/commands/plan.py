"""`lcsb plan`: what the memory engine would keep in memory under a budget, and what that takes."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lcsb.commands.common import AsJson, console, print_json

if TYPE_CHECKING:
    from lcsb.engine.architecture import Architecture
    from lcsb.engine.planner import Plan


def plan(
    model: Annotated[
        str,
        typer.Option(help="Folder of packed weights (or with a config.json alone), or a geometry's name."),
    ],
    ram: Annotated[str, typer.Option(help="Memory of the whole process: 1GB = 10^9 bytes, 1GiB = 2^30.")],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 256,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 1,
    mode: Annotated[str, typer.Option(help="Backward mode: full, exact, identity or mlp.")] = "exact",
    layers_per_step: Annotated[
        int | None, typer.Option(min=1, help="Layers selected at a step; default all.")
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters, on all seven projections.")] = 16,
    trainer: Annotated[
        bool, typer.Option("--trainer", help="Inside a Trainer, whose imports need memory too.")
    ] = False,
    measure: Annotated[
        bool, typer.Option(help="Measure this machine for a second or two, to predict seconds.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """What stays in memory under a budget, and the peak and seconds of a step that are predicted for it.

    Works from the model's shapes alone. A budget that cannot be met is refused with the least that could (exit 2).

    Examples: [bold]lcsb plan --model qwen2.5-3b --ram 1GB[/]    [bold]lcsb plan --model FOLDER --ram 650MiB --tokens
    1024 --mode exact --layers-per-step 8[/]
    """
    import torch

    from lcsb.config import LCSBConfig
    from lcsb.engine.compute import bfloat16_gain
    from lcsb.engine.engine import LoRASettings
    from lcsb.engine.planner import constants
    from lcsb.engine.planner import plan as make_plan
    from lcsb.engine.ram import parse_ram
    from lcsb.engine.rates import measured_rates

    torch.set_num_threads(1)  # as `lcsb train` computes
    budget = parse_ram(ram)
    architecture, folder_bytes = _model(model)
    found = make_plan(
        architecture,
        tokens=tokens,
        rows=rows,
        config=LCSBConfig(mode, layers_per_step=layers_per_step),  # type: ignore[arg-type]
        lora=LoRASettings(r=rank),
        ram=budget,
        floor=constants().floor_bytes["trainer"] if trainer else None,
        folder_bytes=folder_bytes,
        scratch=Path("scratch"),
        rates=measured_rates() if measure else None,
        states_in_file=not trainer,
    )
    narrow = bfloat16_gain(architecture.hidden, architecture.intermediate) if measure else None
    if as_json:
        print_json({"model": model, **found.as_dict(), "bfloat16_gain": narrow})
        return
    _show(found, f"{model}: {rows} x {tokens} tokens, mode {mode}")
    if narrow is not None:
        console.print(
            f"products in bfloat16 take {1 / narrow:.2f} of float32's time here; float32 is computed unless asked "
            "(EngineModel's compute_dtype)",
            highlight=False,
            soft_wrap=True,
        )


def _model(model: str) -> tuple[Architecture, int | None]:
    """Architecture of a folder or a named geometry, and the bytes of the folder's tensors (None: no folder)."""
    from bcd_theory.geometry import GEOMETRIES
    from lcsb.engine.architecture import Architecture
    from lcsb.engine.mapped import MappedFolder, read_json
    from lcsb.engine.random_weights import config_of

    if model in GEOMETRIES:
        return Architecture.from_config(config_of(model), model), None
    folder = Path(model)
    if not folder.is_dir():
        near = difflib.get_close_matches(model, GEOMETRIES, n=1)
        hint = f"; nearest is {near[0]!r}" if near else ""
        raise ValueError(
            f"--model {model!r}: no such folder, and no geometry ({', '.join(GEOMETRIES)}){hint}"
        )
    if not any(folder.glob("*.safetensors")):
        return Architecture.from_config(read_json(folder / "config.json"), str(folder / "config.json")), None
    mapped = MappedFolder(folder)
    architecture = Architecture.from_config(mapped.config, str(folder / "config.json"))
    return architecture, sum(mapped.nbytes(name) for name in mapped.names())


def _show(found: Plan, title: str) -> None:
    from rich.table import Table

    from lcsb.engine.ram import shown

    residency = found.residency
    kept = Table("what", "where", title=title)
    kept.add_row("packed weights", "memory" if residency.weights else "file, a layer at a time")
    kept.add_row("embedding and head", "memory" if residency.head else "file, a chunk at a time")
    kept.add_row("adapters, m and v", "memory" if residency.states else "file, a layer at a time")
    kept.add_row("layer inputs", residency.inputs)
    kept.add_row("products kept for backward", f"{residency.products} layers")
    kept.add_row("numbers of the head at once", f"{residency.chunk_logits:,}")
    console.print(kept)
    _amounts("peak", found.peak.parts, found.peak.total, shown, f"in {found.peak.phase}")
    console.print(
        f"budget {shown(found.budget or 0)}, left as margin at least {shown(found.margin_bytes)}; "
        f"least budget {shown(found.least_bytes)} ({found.least_bytes:,} bytes)",
        highlight=False,
        soft_wrap=True,
    )
    if found.seconds is None:
        console.print("seconds: not measured (--measure)", highlight=False)
    else:
        total = sum(found.seconds.values())
        _amounts("seconds", found.seconds, total, lambda seconds: f"{seconds:.2f}", "of a step, estimated")


def _amounts(name: str, parts: Any, total: float, words: Any, where: str) -> None:
    from rich.table import Table

    table = Table(name, where)
    for part, amount in parts.items():
        if amount:
            table.add_row(part, words(amount))
    table.add_row("total", words(total), style="bold")
    console.print(table)
