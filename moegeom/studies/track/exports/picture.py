"""A picture of the series: one panel per figure, a line per router."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moegeom.core.files import write_whole
from moegeom.core.series import SERIES_COLUMNS, Series, SeriesColumn
from moegeom.core.text import half_width
from moegeom.studies.track.export import SeriesExport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Blocks of documents behind a standard error, where a recording has as many documents.
NUM_BLOCKS = 16

#: Figures that get a panel, as far as they are known.
PANELS = (
    "max_vio_global",
    "routing_entropy_normalised",
    "overlap_with_last",
    "expert_set_churn",
    "row_drift_median",
    "margin_p50",
)

#: Routers up to this many get a colour and a name; more are shades of one colour by depth.
NAMED = 6


def write(series: Series, path: Path) -> None:
    """An SVG, PNG or PDF, by the ending of ``path``; bars are 95 % intervals over documents."""
    EXPORT.refuse_absent()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = {column.name: column for column in SERIES_COLUMNS}
    shown = [columns[name] for name in PANELS if series.of_column(name)]
    shown = shown or [columns[name] for name in dict.fromkeys(c.column for c in series.curves)][:6]
    across = min(3, max(len(shown), 1))
    down = max(-(-len(shown) // across), 1)
    with plt.rc_context({"svg.hashsalt": "moegeom", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = plt.subplots(
            down, across, figsize=(3.6 * across, 2.7 * down), squeeze=False, layout="constrained"
        )
        for axis, column in zip(axes.flat, shown, strict=False):
            _panel(axis, series, column)
        for axis in list(axes.flat)[len(shown) :]:
            axis.set_visible(False)
        if len(series.routers()) <= NAMED and shown:
            axes.flat[0].legend(frameon=False, fontsize=8, title="layer", title_fontsize=8)
        figure.suptitle(series.name, fontsize=10)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        facts = {"format": path.suffix.removeprefix("."), "metadata": metadata, "dpi": 130}
        write_whole(path, lambda file: figure.savefig(file, **facts))
        plt.close(figure)


def _panel(axis: Axes, series: Series, column: SeriesColumn) -> None:
    from matplotlib import colormaps

    steps = np.array([step.step for step in series.steps])
    curves = series.of_column(column.name)
    colours = colormaps["viridis"](np.linspace(0.1, 0.85, max(len(curves), 1)))
    for curve, colour in zip(curves, colours, strict=True):
        values = np.array([np.nan if v is None else v for v in curve.values])
        errors = np.array([0.0 if e is None else half_width(e, NUM_BLOCKS) for e in curve.errors])
        label = curve.router.split("/")[1]
        axis.errorbar(steps, values, errors, color=colour, marker="o", ms=3, lw=1.2, label=label)
    axis.set_title(column.words, fontsize=9)
    axis.set_xlabel("step", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.15)


EXPORT = SeriesExport("picture", write, "matplotlib", "plots")
