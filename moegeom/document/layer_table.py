"""The table of layers: which columns, and which lines of a long checkpoint are worth showing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.text import half_width, number_of, percent
from moegeom.document.model import Look, Table
from moegeom.document.summary import Summary

Row = Mapping[str, Any]

#: Checkpoints up to this many layers are shown whole.
SHORT = 12

#: Lines of a long checkpoint: those with findings, at most this many.
MOST_LINES = 10


@dataclass(frozen=True)
class LayerColumn:
    """A column: two lines of heading, the figure, and its text.

    On a narrow screen the columns with the highest ``drop`` go first; those with 0 stay.
    """

    heading: tuple[str, str]
    value: Callable[[Row], float | None]
    text: Callable[[float], str]
    error: Callable[[Row], float | None] = lambda row: None
    drop: int = 0


def _column(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.get(name)


def _load(row: Row) -> float | None:
    vio = row.get("max_vio_global")
    return None if vio is None else 1.0 + vio


def _short(value: float, digits: int) -> str:
    """Fixed digits without the zero before the point, as tables of shares are set."""
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("0.") else text


def _share(value: float) -> str:
    """A share as a percentage with two significant figures."""
    return percent(value, ".1f" if value < 0.1 else ".0f")


TOKEN_COLUMNS = (
    LayerColumn(("max load /", "mean load"), _load, lambda v: f"{v:.1f}x"),
    LayerColumn(("dead", "exp."), _column("num_dead"), lambda v: f"{v:.0f}"),
    LayerColumn(
        ("load CV", "+- 95 %"),
        _column("load_cv_ddof0"),
        lambda v: _short(v, 2),
        error=_column("load_cv_ddof0_se"),
    ),
    LayerColumn(
        ("entropy", "of 1"), _column("load_entropy_normalised"), lambda v: _short(v, 2), drop=2
    ),
    LayerColumn(("margin", "median"), _column("margin_p50"), lambda v: _short(v, 3), drop=1),
    LayerColumn(("flip under", "bf16 rounding"), _column("bf16_flip_share_isotropic"), _share),
)

WEIGHT_COLUMNS = (
    LayerColumn(("row norm", "median"), _column("row_norm_median"), lambda v: f"{v:.3g}"),
    LayerColumn(
        ("longest", "of median"), _column("row_norm_max_over_median"), lambda v: f"{v:.2f}x"
    ),
    LayerColumn(("zero", "rows"), _column("num_zero_rows"), lambda v: f"{v:.0f}"),
)

DUPLICATES = LayerColumn(("dup.", "rows"), _column("num_duplicate_rows"), lambda v: f"{v:.0f}")


#: How a layer looks that has a finding.
_LOOKS: dict[str, Look] = {"error": "error", "warning": "warning"}


def layer_table(summary: Summary, all_layers: bool, has_bars: bool = True) -> Table:
    """The lines worth showing: layers with findings first, then the rest or their quantiles.

    With ``has_bars`` a bar stands beside the load of the busiest expert.
    """
    has_tokens = any(row.get("load_cv_ddof0") is not None for row in summary.layers)
    has_margins = any(row.get("margin_p50") is not None for row in summary.layers)
    columns = (*(TOKEN_COLUMNS if has_tokens or has_margins else WEIGHT_COLUMNS), DUPLICATES)
    columns = tuple(c for c in columns if any(c.value(row) is not None for row in summary.layers))
    worst = summary.worst
    marked = [row for row in summary.layers if row["router"] in worst]
    plain = [row for row in summary.layers if row["router"] not in worst]
    is_short = all_layers or len(summary.layers) <= SHORT
    shown = [*marked, *plain] if is_short else marked[:MOST_LINES]
    order = {row["router"]: number for number, row in enumerate(summary.layers)}
    anchors = [f"layer-{order[row['router']]}" for row in shown]
    largest = max((_load(row) or 0.0 for row in shown), default=0.0) if has_bars else 0.0
    lines: list[list[str]] = []
    looks: list[Look] = []
    for row in shown:
        finding = worst.get(row["router"])
        lines.append(
            [
                summary.place(row["router"]),
                *(_cell(column, row, largest) for column in columns),
                {"error": "ERROR", "warning": "warn"}.get(finding.severity, "") if finding else "",
            ]
        )
        looks.append(_LOOKS.get(finding.severity, "dim") if finding else "plain")
    if len(summary.layers) > 1:
        number = number_of(len(summary.layers), "layer")
        more = "" if is_short else "--all-layers"
        lines.append(["median", *(_quantile(c, summary.layers, (50,)) for c in columns), number])
        lines.append(["p5-p95", *(_quantile(c, summary.layers, (5, 95)) for c in columns), more])
        looks.extend(("dim", "dim"))
    if summary.random:
        lines.append(["random", *(_quantile(c, summary.random, (50,)) for c in columns), "routers"])
        looks.append("dim")
    headings = (("layer", ""), *(column.heading for column in columns), ("verdict", ""))
    return Table(
        [list(line) for line in zip(*headings, strict=True)],
        lines,
        looks,
        left=(0, len(headings) - 1),
        drops=(0, *(column.drop for column in columns), 0),
        gap=3,
        heads_look="strong",
        anchors=anchors,
    )


def _cell(column: LayerColumn, row: Row, largest: float) -> str:
    value = column.value(row)
    if value is None:
        return "-"
    text, error = column.text(value), column.error(row)
    if error is not None:
        text += f" +-{_short(half_width(error, row.get('num_blocks')), 2)}"
    if column.value is _load and largest > 0:
        bar = "#" * max(1, round(10 * value / largest))
        text = f"{bar:<10} {text:>5}"
    return text


def _quantile(column: LayerColumn, rows: Sequence[Row], _shareiles: tuple[int, ...]) -> str:
    values = [value for row in rows if (value := column.value(row)) is not None]
    if not values:
        return "-"
    low, *high = (column.text(v) for v in np.percentile(values, _shareiles).tolist())
    return f"{low.removesuffix(' %')}-{high[0]}" if high else low
