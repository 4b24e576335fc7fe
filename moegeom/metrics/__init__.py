"""Metrics, one file each: reductions in, values and standard errors out; none sees a token."""

from moegeom.core.metric import Metric
from moegeom.core.registry import Registry
from moegeom.measure.counted import measure_counts
from moegeom.measure.finish import Finished, finish_router
from moegeom.measure.passes import (
    MAIN,
    MeasuredRouter,
    Pass,
    RouterRun,
    finish_passes,
    measure_router,
    measure_weights,
    plan_passes,
)

__all__ = [
    "MAIN",
    "METRICS",
    "Finished",
    "MeasuredRouter",
    "Pass",
    "RouterRun",
    "finish_passes",
    "finish_router",
    "measure_counts",
    "measure_router",
    "measure_weights",
    "metrics_of_scan",
    "plan_passes",
]

#: Metrics by file name.
METRICS: Registry[Metric] = Registry("metric", "moegeom.metrics", "METRIC", Metric)


def metrics_of_scan(compares: bool = False, is_noisy: bool = False) -> list[Metric]:
    """All metrics but those of what was not asked for: another choice to compare with, noise."""
    asked = {"flip": compares, "noise": is_noisy, "exposure": compares}
    return [metric for metric in METRICS.all() if asked.get(metric.scope, True)]
