"""One self-contained HTML page from a judged run folder, and the JSON and SVG of every figure beside it."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bcd_theory.predictions import Prediction
from bcd_theory.theorems import THEOREMS
from reports.decisions import count
from reports.figures import Plot, Table, plots
from reports.judge import reproduce_command
from reports.numbers import fixed, percent, significant
from reports.records import RunFolder
from reports.run import Run, load_run
from reports.strict import plain, write_json, write_text
from reports.svg import PALETTE, inline, render_svg, standalone, style
from reports.verdicts import ClaimVerdict, Judgement, Verdicts, read_verdicts

# Strokes in a 16 x 16 box; the word beside them says the same.
ICONS = {
    "supported": "M3 8.5 6.5 12 13 4.5",
    "refuted": "M4 4 12 12 M12 4 4 12",
    "no difference": "M3 6h10 M3 10.5h10",
    "inconclusive": "M5.2 5.6a2.8 2.6 0 1 1 4 2.4c-.9.4-1.2.9-1.2 1.8 M8 12.6v.2",
    "not testable here": "M4 8h8",
    "for information": "M8 7.4v4.6 M8 4.2v.2",
}

GROUPS = (
    ("fidelity", "Gradient fidelity", ("fidelity",)),
    ("idle", "Idle layers", ("law", "movement")),
    ("cost", "Speed and memory", ("speed", "memory")),
)


@dataclass(frozen=True)
class Drawn:
    """A figure as the template needs it."""

    name: str
    title: str
    caption: str
    wide: Markup
    narrow: Markup
    table: Table
    link: str


def render(folder: RunFolder | Path | str) -> Path:
    """Write report.html and figures/ of a judged run; return the page's path.

    Raises ValueError when verdicts.json is missing or belongs to other predictions, or when a record is wrong
    (see `load_run`). The same folder gives the same bytes.
    """
    run = load_run(folder)
    place = run.folder
    if not place.verdicts.exists():
        raise ValueError(f"{place.verdicts}: not there, expected the judge's output")
    verdicts = read_verdicts(place.verdicts)
    if verdicts.predictions_sha256 != run.predictions_sha256:
        raise ValueError(
            f"{place.verdicts}: found predictions_sha256 {verdicts.predictions_sha256}, "
            f"expected {run.predictions_sha256} (the sha256 of predictions.json)"
        )
    drawn = [_draw(plot, run) for plot in plots(run)]
    write_text(place.report, page(run, verdicts, drawn))
    return place.report


def _draw(plot: Plot, run: Run) -> Drawn:
    data = plain(
        {
            "figure": plot.name,
            "title": plot.title,
            "run": run.config.name,
            "predictions_sha256": run.predictions_sha256,
            "data": plot.data,
        },
        f"figures/{plot.name}.json",
    )
    write_json(run.folder.figures / f"{plot.name}.json", data)
    with style():
        wide, narrow = (render_svg(plot.draw(is_narrow)) for is_narrow in (False, True))
    write_text(run.folder.figures / f"{plot.name}.svg", standalone(wide, plot.title))
    return Drawn(
        plot.name,
        plot.title,
        plot.caption,
        # Our own drawing, every text in it escaped by matplotlib.
        Markup(inline(wide, f"{plot.name}-wide", plot.label)),
        Markup(inline(narrow, f"{plot.name}-narrow", plot.label)),
        plot.table,
        packed(data),
    )


def page(run: Run, verdicts: Verdicts, drawn: list[Drawn]) -> str:
    """The page's text."""
    shown = {plot.name for plot in drawn}
    used = {name for entry in verdicts.verdicts if _tested(entry) for name in entry.theorems}
    theorems = [(name, theorem) for name, theorem in THEOREMS.items() if name in used]
    sections = [
        ("verdicts", "Verdicts"),
        ("claims", "Why"),
        ("training", "Training"),
        *[(key, title) for key, title, names in GROUPS if shown.intersection(names)],
        *([("theory", "Theory")] if theorems else []),
        ("predictions", "Predictions"),
        ("run", "The run"),
        ("reproduce", "Reproduce"),
    ]
    return (
        templates()
        .get_template("report.html")
        .render(
            run=run,
            verdicts=verdicts,
            drawn=drawn,
            groups=GROUPS,
            sections=sections,
            icons=ICONS,
            palette=palette(),
            summary=summary(verdicts),
            facts=_facts(run),
            untested=[entry for entry in verdicts.verdicts if not _tested(entry)],
            theorems=theorems,
            arms=_arms(run),
            predictions=_predictions(run),
            settings=_settings(run),
            command=reproduce_command(run.config),
        )
    )


def templates() -> Environment:
    """Jinja with this package's templates and filters."""
    environment = Environment(
        loader=PackageLoader("reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"numbers": numbers, "tested": _tested, "numeric": _numeric, "tight": tight}
    return environment


def palette() -> dict[str, Markup]:
    """Colour variables of both schemes, for the style sheet."""
    return {"light": _variables(0), "dark": _variables(1)}


def packed(data: Any) -> str:
    """JSON as a data address, so that a page can offer it without a second file."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"data:application/json;base64,{base64.b64encode(text.encode()).decode()}"


def _variables(scheme: int) -> Markup:
    return Markup("\n".join(f"  --{name}: {colours[scheme]};" for name, colours in PALETTE.items()))


def _tested(entry: ClaimVerdict) -> bool:
    return not (entry.paper.verdict == entry.ours.verdict == "not testable here")


def tight(text: str) -> str:
    """The text with spaces that must not break: '27 %', 'p = 4', '3 seeds'."""
    return re.sub(r"(?<=\d) (?=%)|(?<=\bp) (?== )|(?<=\bp =) (?=\d)", "\u00a0", text)


def _numeric(table: Table) -> set[int]:
    """Columns whose cells are all numbers, to be set flush right."""
    found = set()
    for i in range(1, len(table.columns)):
        cells = [row[i] for row in table.rows]
        if cells and all(re.fullmatch(r"none|[-−\d.,e%> \[\]±]+", cell) for cell in cells):
            found.add(i)
    return found


def summary(verdicts: Verdicts) -> str:
    """Two sentences: how many claims and predictions ended how."""

    def tally(judgements: list[Judgement]) -> str:
        found = Counter(str(judgement.verdict) for judgement in judgements)
        order = ("supported", "refuted", "no difference", "inconclusive")
        return ", ".join(f"{found[verdict]} {verdict}" for verdict in order if found[verdict])

    tested = [entry for entry in verdicts.verdicts if _tested(entry)]
    if not tested:
        return "None of the claims was tested in this run."
    return (
        f"{len(tested)} of {count(len(verdicts.verdicts), 'claim')} of the paper tested in this run: "
        f"{tally([entry.paper for entry in tested])}. Our own predictions for them, written down beforehand: "
        f"{tally([entry.ours for entry in tested])}."
    )


def _facts(run: Run) -> str:
    config = run.config
    base = f"{config.quantization} weights" if config.quantization else "unquantised weights"
    return (
        f"Run {config.name}: {config.model}, {base}, LoRA rank {config.lora.r}, {count(len(config.arms), 'arm')}, "
        f"{count(len(config.seeds), 'seed')}, {count(config.steps, 'step')} of {config.batch_size} × "
        f"{config.data.tokens} tokens, p = {config.cycle_length}."
    )


def numbers(judgement: Judgement) -> list[tuple[str, str]]:
    """Effect, interval, margin and n of a judgement, in its unit."""
    if judgement.effect is None:
        return []
    unit = judgement.unit

    def show(value: float) -> str:
        if unit.startswith("share") or unit == "relative error":
            return percent(value)
        return fixed(value, 2) if unit == "speed-up" else significant(value)

    found = [(unit, show(judgement.effect))]
    if judgement.interval is not None:
        found.append(("95 % interval", f"{show(judgement.interval[0])} to {show(judgement.interval[1])}"))
    if judgement.margin is not None:
        found.append(("margin", show(judgement.margin)))
    found.append(("n", count(judgement.n, judgement.n_of)))
    return found


def _arms(run: Run) -> Table:
    rows = []
    for arm in run.config.arms:
        outcomes = run.outcomes(arm.name)
        losses = [o.final_loss for o in outcomes if o.final_loss is not None]
        status = Counter(
            f"{o.status} (from step {o.began})" if o.began is not None else o.status for o in outcomes
        )
        jumps = run.update_jumps(arm.name)
        if jumps:
            status[f"whose updates jump (from step {min(jumps)})"] = len(jumps)
        rate = arm.learning_rate(run.config.optimizer.learning_rate, run.config.cycle_length)
        rows.append(
            [
                arm.name,
                arm.backward,
                arm.idle if arm.backward != "full" else "no idle layer",
                arm.schedule if arm.method == "lcsb" else f"by {arm.method}",
                significant(rate),
                fixed(sum(losses) / len(losses)) if losses else "none",
                ", ".join(f"{n} {what}" for what, n in status.items()),
            ]
        )
    columns = ["arm", "backward", "idle", "schedule", "learning rate", "final held-out loss", "seeds"]
    return Table(columns, rows)


def _value(prediction: Prediction) -> str:
    value = prediction.value
    if not isinstance(value, tuple):
        return significant(value, 4)
    texts = [significant(item, 3) for item in value]
    if len(texts) > 6:
        return f"{', '.join(texts[:3])}, …, {texts[-1]} ({len(texts)} values)"
    return ", ".join(texts)


def _predictions(run: Run) -> Table:
    rows = [
        [
            item.id,
            _value(item),
            "" if item.unit == "1" else item.unit,
            "none" if item.uncertainty is None else f"± {significant(item.uncertainty, 2)}",
            ", ".join(item.theorems),
            "; ".join(item.assumptions),
        ]
        for item in run.predictions.items
    ]
    return Table(["id", "value", "unit", "uncertainty", "theorem", "assumes"], rows)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value)) or "none"
    return "none" if value is None else str(value)


def _settings(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    settings = run.config.to_mapping()
    groups: list[tuple[str, list[tuple[str, str]]]] = [
        (
            "Settings",
            [(key, _text(v)) for key, v in settings.items() if not isinstance(v, dict) and key != "arms"],
        )
    ]
    for key, title in (("optimizer", "Optimiser"), ("lora", "LoRA"), ("data", "Data")):
        groups.append((title, [(name, _text(value)) for name, value in settings[key].items()]))
    found = dict(run.environment)
    corpus = found.pop("corpus", None)
    if isinstance(corpus, dict):
        flat = []
        for name, value in corpus.items():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            flat += [(f"{name} {part}".strip(), _text(item)) for part, item in inner]
        groups.append(("Corpus", flat))
    versions = found.pop("versions", {})
    if isinstance(memory := found.get("memory_bytes"), int):
        found = {"memory" if key == "memory_bytes" else key: value for key, value in found.items()}
        found["memory"] = f"{memory / 2**30:.1f} GiB"
    if found:
        groups.append(
            ("Machine and source", [(name.replace("_", " "), _text(v)) for name, v in found.items()])
        )
    if versions:
        groups.append(("Versions", [(name, _text(value)) for name, value in versions.items() if value]))
    return groups
