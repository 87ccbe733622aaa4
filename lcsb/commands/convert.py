"""The command that turns a model into the packed folder that training within a memory budget reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lcsb.commands.common import AsJson, console, one_process, print_json, terminal_progress

if TYPE_CHECKING:
    from lcsb.engine.convert import ConvertReport


def convert(
    source: Annotated[
        str | None, typer.Argument(metavar="SRC", help="Hub folder, .gguf file or built-in name.")
    ] = None,
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="New or empty folder.")] = None,
    ram: Annotated[
        str | None, typer.Option(help="Memory of the whole process: 1GB = 10^9 bytes, 1GiB = 2^30.")
    ] = "1GB",
    quantization: Annotated[str, typer.Option(help="nf4 is the one there is.")] = "nf4",
    block_size: Annotated[int, typer.Option(help="Weights that share a scale.")] = 64,
    embedding: Annotated[
        str,
        typer.Option(help="Type of embedding and head: source (as in the file), float32, bfloat16, float16."),
    ] = "source",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer, instead of the source's own.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="DIR", help="Only compare a converted folder with its hashes."),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Print what would be done, and do nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn a model into packed NF4 on disk, tensor by tensor within a memory budget.

    The result is read by training within a budget, by every other command as --model DIR, and by transformers. A
    conversion that was interrupted or killed carries on with the same command. Only torch is imported.

    Examples: [bold]lcsb convert smollm2-135m packed/smollm2[/]
    [bold]lcsb convert Qwen2.5-3B packed/qwen --ram 1GB[/]    [bold]lcsb convert --check packed/qwen[/]
    """
    one_process("convert")
    if check is not None:
        if source is not None or folder is not None:
            raise ValueError("convert: --check DIR stands alone, without SRC and DIR")
        from lcsb.engine.convert import check as check_folder

        files = check_folder(check)
        if as_json:
            print_json({"folder": str(check), "files": files, "whole": True})
        else:
            console.print(f"{check}: {files} files as they were written", highlight=False, soft_wrap=True)
        return
    if source is None or folder is None:
        raise ValueError("convert: give SRC and DIR, or --check DIR")
    import time
    from dataclasses import asdict

    from lcsb.engine.convert import convert as convert_model
    from lcsb.engine.ram import parse_ram

    def run(progress: Callable[[int, int, str], None] | None) -> ConvertReport:
        return convert_model(
            source, folder, ram=None if ram is None else parse_ram(ram), quantization=quantization,
            block_size=block_size, embedding=embedding, tokenizer=tokenizer, dry_run=dry_run, progress=progress,
        )  # fmt: skip

    if dry_run:
        report = run(None)
    else:
        began = time.monotonic()
        with terminal_progress()(f"convert {source}") as show:
            report = run(
                lambda done, total, name: show(
                    done / total, (time.monotonic() - began) * (total - done) / done, name
                )
            )
    if as_json:
        print_json(asdict(report))
        return
    mib = 2**20
    lines = [
        f"{report.family}, {report.layers} layers: {report.matrices} matrices in {report.packed_bytes / mib:.0f} MiB, "
        f"the rest in {report.plain_bytes / mib:.0f} MiB (embedding in {report.embedding})",
        f"least memory {report.least_bytes / mib:.0f} MiB"
        + ("" if dry_run else f", peak of this process {report.peak_bytes / mib:.0f} MiB"),
        *report.notes,
        f"{report.folder}: {report.state}"
        + (f", {report.resumed} shards taken over from an interrupted call" if report.resumed else ""),
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
