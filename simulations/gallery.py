"""One page of all experiments: `python -m simulations.gallery --out DIR [--size quick]` writes DIR/gallery.html."""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from reports.strict import write_text
from reports.svg import PALETTE, inline, panels, render_svg, style
from simulations.experiment import Experiment, Result, Size
from simulations.registry import EXPERIMENTS, NAMES, get


def section(experiment: Experiment, record: dict[str, Any], result: Any) -> str:
    """One paragraph, the figure and the verdicts of one experiment."""
    with style():
        figure, axes = panels(False, experiment.panels, 3.4)
        result.draw(axes[0]) if isinstance(result, Result) else experiment.draw(result, axes)
        drawing = inline(render_svg(figure), experiment.name, experiment.title)
    rows = "".join(
        f"<tr><td>{html.escape(part['name'])}</td><td>{html.escape(part['verdict'])}</td>"
        f"<td>{html.escape(part['reason'])}</td></tr>"
        for part in record["parts"]
    )
    theorems = ", ".join(experiment.theorems) or "none"
    return (
        f'<section id="{experiment.name}"><h2>{html.escape(experiment.title)}</h2>'
        f"<p>{html.escape(experiment.paragraph)} Theorems: {theorems}. Verdict: <strong>{record['verdict']}</strong> "
        f"({record['size']}, {record['seconds']:.1f} s).</p><figure>{drawing}</figure>"
        f"<div class=table><table><thead><tr><th>Part</th><th>Verdict</th><th>Numbers</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def page(sections: Sequence[str]) -> str:
    """A page without scripts or foreign resources, light and dark."""
    light = ";".join(f"--{name}:{value}" for name, (value, _) in PALETTE.items())
    dark = ";".join(f"--{name}:{value}" for name, (_, value) in PALETTE.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Simulations</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><style>'
        f":root{{{light};--ground:#fff}}@media(prefers-color-scheme:dark){{:root{{{dark};--ground:#15181c}}}}"
        "body{max-width:56rem;margin:2rem auto;padding:0 1rem;font:1rem/1.5 system-ui,sans-serif;"
        "color:var(--ink);background:var(--ground)}figure{margin:1rem 0}svg{width:100%;height:auto}"
        ".table{overflow-x:auto}table{border-collapse:collapse}td,th{text-align:left;vertical-align:top;"
        "padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--grid)}</style></head><body><h1>Simulations</h1>"
        + "".join(sections)
        + "</body></html>\n"
    )


def build(out: Path, size: Size = "quick", seed: int = 0, names: Sequence[str] = NAMES) -> Path:
    """Run the experiments, write their records and the page. Returns the page's path."""
    sections = []
    for name in names:
        experiment = get(name)
        record, result = experiment.run(size, seed, out)
        sections.append(section(experiment, record.model_dump(mode="json"), result))
    path = Path(out) / "gallery.html"
    write_text(path, page(sections))
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m simulations.gallery", description="Run all, write one page."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=get_args(Size), default="quick")
    parser.add_argument("--only", action="append", choices=list(EXPERIMENTS), help="may be repeated")
    chosen = parser.parse_args(arguments)
    sys.stdout.write(f"{build(chosen.out, chosen.size, names=chosen.only or NAMES)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
