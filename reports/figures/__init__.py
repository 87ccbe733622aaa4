"""The figures of a report.

Everywhere: predicted is a dashed outline or line, measured is solid; a band or whisker is a 95 % interval or the range
over seeds, as the caption says.
"""

from __future__ import annotations

from reports.figures.base import Plot as Plot
from reports.figures.base import Table as Table
from reports.figures.cost import memory_plot, speed_plot
from reports.figures.fidelity import fidelity_plot
from reports.figures.idle import law_plot, movement_plot
from reports.figures.training import drop_plot, loss_plot
from reports.run import Run


def plots(run: Run) -> list[Plot]:
    """Every figure that the run has data for, in the order of the report."""
    makers = (loss_plot, drop_plot, fidelity_plot, law_plot, movement_plot, speed_plot, memory_plot)
    return [plot for make in makers if (plot := make(run)) is not None]
