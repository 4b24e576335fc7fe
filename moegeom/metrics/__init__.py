"""Metrics, one file each: reductions in, values and standard errors out; none sees a token."""

from moegeom.core.metric import Metric
from moegeom.core.registry import Registry

#: Metrics by file name.
METRICS: Registry[Metric] = Registry("metric", "moegeom.metrics", "METRIC", Metric)


def metrics_of_scan(compares: bool = False, is_noisy: bool = False) -> list[Metric]:
    """All metrics but those of what was not asked for: another choice to compare with, noise."""
    asked = {"flip": compares, "noise": is_noisy, "exposure": compares}
    return [metric for metric in METRICS.all() if asked.get(metric.scope, True)]
