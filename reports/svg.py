"""From a matplotlib figure to SVG text that follows the page's colours, and one that stands alone.

Colours are drawn as the light palette's hexadecimal values; in the page each becomes a CSS variable, so that one
drawing serves light and dark. Text stays text. Output is deterministic: fixed salt, no dates, no versions.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# name: (on light ground, on dark ground). Contrast to the ground at least 3:1 for marks, 4.5:1 for text.
PALETTE: dict[str, tuple[str, str]] = {
    "ink": ("#1c2128", "#e8eaed"),
    "muted": ("#59616c", "#a4acb7"),
    "grid": ("#dde0e5", "#363c45"),
    "full": ("#3c424b", "#ccd1d8"),
    "exact": ("#1d5fc4", "#7db2ff"),
    "frozen": ("#0b7a85", "#46c5d0"),
    "identity": ("#c03c0a", "#ff9264"),
    "mlp": ("#56780f", "#a9d05c"),
    "certified": ("#8536a5", "#d59df2"),
    "other": ("#9a6a00", "#e3b341"),
}
LIGHT = {name: light for name, (light, _) in PALETTE.items()}

WIDE, NARROW = 8.4, 3.45  # inches, at 72 points an inch

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lcsb",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.titlesize": 9.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.labelcolor": LIGHT["muted"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.edgecolor": LIGHT["muted"],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.6,
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "legend.handlelength": 3.2,
    "legend.borderaxespad": 0.2,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure; draw and save inside it."""
    with mpl.rc_context(_STYLE):
        yield


def panels(
    narrow: bool, count: int, height: float, narrow_height: float | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels: side by side when wide, stacked when narrow. Heights in inches a panel."""
    tall = height if narrow_height is None else narrow_height
    size = (NARROW, tall * count) if narrow else (WIDE, height)
    figure = Figure(figsize=size, layout="constrained")
    shape = (count, 1) if narrow else (1, count)
    axes = figure.subplots(*shape, squeeze=False)
    return figure, [axis for row in axes for axis in row]


def legend(figure: Figure, axis: Axes, columns: int, narrow: bool) -> None:
    """One legend below the panels, from one panel's labels."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower left", ncols=1 if narrow else columns, columnspacing=1.6
        )


def render_svg(figure: Figure) -> str:
    """The raw SVG of a figure. Call inside `style()`."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def inline(raw: str, prefix: str, label: str) -> str:
    """SVG for the page: CSS variables for colours, ids that belong to `prefix` only, `label` as text alternative."""
    body = _clean(raw)
    for name, (light, _) in PALETTE.items():
        body = body.replace(light, f"var(--{name})")
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', body))
    body = re.sub(
        r' id="([^"]+)"', lambda match: f' id="{prefix}-{match[1]}"' if match[1] in used else "", body
    )
    body = re.sub(r'(?:xlink:)?(url\(#|href="#)', rf"\g<1>{prefix}-", body)
    box = re.search(r'viewBox="([^"]+)"', raw)
    assert box is not None  # matplotlib always writes one
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{html.escape(label, quote=True)}">{body}</svg>'


def standalone(raw: str, label: str) -> str:
    """SVG file in the light palette on white, for viewers that know no CSS variables."""
    box = re.search(r'viewBox="([^"]+)"', raw)
    assert box is not None
    width, height = box[1].split()[2:]
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box[1]}" '
        f'width="{width}pt" height="{height}pt"><title>{html.escape(label)}</title>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{_clean(raw)}</svg>\n'
    )


def _clean(raw: str) -> str:
    body = raw[raw.index("<svg") :]
    body = body[body.index(">") + 1 : body.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.S)
    # A style sheet inside an inline SVG would reach the whole page.
    body = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", body, flags=re.S)
    # The page's own font shall be used; older matplotlib writes the shorthand.
    body = re.sub(r"font: (?:(bold|\d+) )?([\d.]+)px [^;\"]+", _font, body)
    body = re.sub(r"font-family: [^;\"]+", "font-family: inherit", body)
    # A hundredth of a point is enough for a place; numbers in texts are left alone.
    body = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: _SHORT.sub(r"\1", found[0]), body)
    return re.sub(r"\s*\n\s*", " ", body).strip()


_SHORT = re.compile(r"(\d\.\d\d)\d+")


def _font(match: re.Match[str]) -> str:
    weight = f"font-weight: {match[1]}; " if match[1] else ""
    return f"{weight}font-size: {match[2]}px; font-family: inherit"
