"""What a figure is: its data, a table to read it by, a drawing for wide and narrow pages; and the look of an arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from reports.config import ArmConfig
from reports.svg import LIGHT

Draw = Callable[[bool], Figure]


@dataclass(frozen=True)
class Table:
    """What is shown under a figure; numbers are formatted already."""

    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Plot:
    """One figure. data: strict JSON, the full record behind it. draw(narrow): a matplotlib figure."""

    name: str
    title: str
    caption: str
    label: str
    data: dict[str, Any]
    table: Table
    draw: Draw


@dataclass(frozen=True)
class ArmStyle:
    colour: str
    line: str | tuple[float, tuple[float, ...]] = "-"
    marker: str = "o"


BASELINE_MARKERS = {
    "lisa": "h", "freeze": "<", "surgical": ">", "cached": "p", "stochastic-depth": "d", "mezo": "H",
}  # fmt: skip


def arm_style(arm: ArmConfig) -> ArmStyle:
    """Colour by backward mode and idle policy, baselines by marker; a control has its arm's colour, dashed."""
    dashed = (0.0, (4.0, 2.0))
    if arm.method != "lcsb":
        return ArmStyle(LIGHT["other"], ":", BASELINE_MARKERS.get(arm.method, "*"))
    if arm.backward == "full":
        controls = {"eta/sqrt(p)": ("exact", "s"), "eta/p": ("frozen", "D")}
        if arm.learning_rate_rule in controls:
            colour, marker = controls[arm.learning_rate_rule]
            return ArmStyle(LIGHT[colour], dashed, marker)
        return ArmStyle(LIGHT["full"])
    if arm.backward == "exact":
        return ArmStyle(
            LIGHT["frozen" if arm.idle == "frozen" else "exact"], "-", "^" if arm.idle == "frozen" else "v"
        )
    colour = arm.backward if arm.backward in LIGHT else "other"
    marker = {"identity": "X", "mlp": "P"}.get(arm.backward, "*")
    return ArmStyle(LIGHT[colour], ":" if arm.idle == "frozen" else "-", marker)
