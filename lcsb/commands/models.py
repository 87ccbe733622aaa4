"""Models and adapters: evaluate and merge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lcsb.commands.common import FAILED, AsJson, console, errors, one_process, print_json, terminal_progress


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
    one_process("evaluate")
    from lcsb.evaluate_command import EvaluateOptions, evaluate_task

    options = EvaluateOptions(
        task, adapter, model, quantization, path, limit, window, stride, batch_size, text_field, size, harness
    )
    result = evaluate_task(options, terminal_progress())
    if as_json:
        print_json({"task": result.task, "metrics": result.metrics, "counts": result.counts})
        return
    from rich.table import Table

    table = Table("figure", "value", title=result.task, title_justify="left")
    for name, value in result.metrics.items():
        table.add_row(name, "not finite" if value is None else f"{value:.6g}")
    console.print(table)
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in result.counts.items())
    console.print(counts, highlight=False, soft_wrap=True)


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
    one_process("merge")
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
                print_json(asdict(report))
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
        print_json({"rows": [asdict(row) for row in rows]})
        return
    shown = Table("", "model", "loss", "loss - a", "logits", "")
    for row in rows:
        same = "-" if row.row == "a" else "the same function" if row.same else "another model"
        shown.add_row(
            row.row, row.model, f"{row.loss:.6f}", f"{row.gap:+.1e}", f"{row.logit_difference:.1e}", same
        )
    console.print(shown)
