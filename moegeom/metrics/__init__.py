"""Metrics, one file each: reductions in, values and standard errors out; none sees a token."""

from moegeom.core.metric import Metric
from moegeom.core.registry import Registry
from moegeom.metrics._finish import Finished, finish_router
from moegeom.metrics._measure import MeasuredRouter, RouterRun, measure_router, measure_weights

__all__ = [
    "METRICS",
    "Finished",
    "MeasuredRouter",
    "RouterRun",
    "finish_router",
    "measure_router",
    "measure_weights",
]

#: Metrics by file name.
METRICS: Registry[Metric] = Registry("metric", "moegeom.metrics", "METRIC", Metric)
