"""One page for many small experiments: a paragraph, a figure and the verdicts of each, in the look of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from bcd_theory.theorems import THEOREMS
from reports.decisions import Verdict, count
from reports.render import ICONS, packed, palette, templates
from reports.svg import inline
from reports.verdicts import Part

_ORDER: tuple[Verdict, ...] = ("supported", "refuted", "no difference", "inconclusive", "not testable here")


@dataclass(frozen=True)
class Entry:
    """One experiment on the page. raw: SVG texts of matplotlib, for wide and narrow screens; data: their numbers."""

    name: str
    title: str
    paragraph: str
    theorems: tuple[str, ...]
    size: str
    seed: int
    verdict: Verdict
    parts: tuple[Part, ...]
    run_seconds: float
    command: str
    predictions_sha256: str
    raw_wide: str
    raw_narrow: str
    data: dict[str, Any]

    @property
    def tally(self) -> str:
        """'9 supported, 1 refuted, 2 for information'."""
        found = Counter[str](part.verdict if part.counts else "for information" for part in self.parts)
        return ", ".join(f"{found[name]} {name}" for name in (*_ORDER, "for information") if found[name])

    @property
    def seconds(self) -> str:
        return f"{self.run_seconds:.0f} s" if self.run_seconds >= 10 else f"{self.run_seconds:.1f} s"

    @property
    def wide(self) -> Markup:
        # Our own drawing, every text in it escaped by matplotlib.
        return Markup(inline(self.raw_wide, f"{self.name}-wide", self.title))

    @property
    def narrow(self) -> Markup:
        return Markup(inline(self.raw_narrow, f"{self.name}-narrow", self.title))

    @property
    def link(self) -> str:
        return packed(self.data)


def gallery_page(entries: Sequence[Entry], command: str, commit: str | None = None) -> str:
    """The page's text; `command` rebuilds all of it. Raises ValueError without entries."""
    if not entries:
        raise ValueError("the gallery has no experiment, expected at least one")
    used = {name for entry in entries for name in entry.theorems}
    verdicts = Counter(entry.verdict for entry in entries)
    summary = ", ".join(f"{verdicts[name]} {name}" for name in _ORDER if verdicts[name])
    parts = [part for entry in entries for part in entry.parts if part.counts]
    right = sum(part.verdict == "supported" for part in parts)
    return (
        templates()
        .get_template("gallery.html")
        .render(
            entries=entries,
            icons=ICONS,
            palette=palette(),
            summary=f"{count(len(entries), 'experiment')}: {summary}. Of {count(len(parts), 'statement')} judged, "
            f"{right} {'is' if right == 1 else 'are'} supported.",
            theorems=[(name, theorem) for name, theorem in THEOREMS.items() if name in used],
            command=command,
            commit=commit,
        )
    )
