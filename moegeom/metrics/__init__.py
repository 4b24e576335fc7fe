"""Metrics in rooms of their subject: reductions in, values and standard errors out, no token."""

from collections.abc import Sequence

from moegeom.core.metric import Column, Metric, estimate
from moegeom.core.registry import Rooms
from moegeom.results.reader import DERIVED

METRICS = Rooms("metric", "moegeom.metrics", Metric)


def metrics_of_scan(
    compares: bool = False, is_noisy: bool = False, has_experts: bool = False
) -> list[Metric]:
    """All metrics but those of what was not asked for: another choice to compare with, noise,
    experts.
    """
    applies = {
        "flip": compares,
        "noise": is_noisy,
        "exposure": compares,
        "jump": has_experts,
        "flip_jump": compares and has_experts,
    }
    return [metric for metric in METRICS.all() if applies.get(metric.scope, True)]


def read_columns_of(metric: Metric, table: str) -> Sequence[Column]:
    """Columns that readers of ``table`` find: those that the metric fills, and derived ones."""
    filled = metric.columns.get(table, ())
    names = {column.name for column in filled} if table == "layers" else set()
    return [
        *filled,
        *(
            estimate(name, derived.text, derived.formula, derived.unit)
            for name, derived in DERIVED.items()
            if derived.column in names
        ),
    ]
