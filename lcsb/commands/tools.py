"""What needs no run: doctor and bounds."""

from __future__ import annotations

from typing import Annotated

import typer

from lcsb.commands.common import FAILED, AsJson, Gate, console, print_json


def doctor(gate: Gate = False, as_json: AsJson = False) -> None:
    """Look for what is wrong with this installation, and say what mends it.

    Example: [bold]lcsb doctor[/]
    """
    from dataclasses import asdict

    from rich.table import Table

    from lcsb.doctor import diagnose

    checks = diagnose()
    if as_json:
        print_json({"checks": [asdict(check) for check in checks]})
    else:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}
        table = Table("check", "", "found", "mend")
        for check in checks:
            table.add_row(check.name, f"[{colour[check.status]}]{check.status}[/]", check.found, check.mend)
        console.print(table)
    if gate and any(check.status == "fail" for check in checks):
        raise typer.Exit(FAILED)


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
            print_json({"tightness": rows})
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
            print_json({"bounds": [{"id": b.id, "name": b.name, "kind": b.kind} for b in BOUNDS.values()]})
            return
        table = Table("id", "name", "kind", "source")
        for item in BOUNDS.values():
            table.add_row(item.id, item.name, item.kind, item.source)
        console.print(table)
        return
    found = describe(bound_named(bound), numbers(set_ or []))
    if as_json:
        print_json(found)
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
