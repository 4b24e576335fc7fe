"""Quantities of the weights that several metrics share, computed once for each router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moegeom.core.metric import Metric
from moegeom.core.router import Router
from moegeom.geometry.gram.effective_rows import effective_rows

#: By the name that a metric of scope ``weights`` gives in ``needs``.
WEIGHT_QUANTITIES: Mapping[str, Callable[[Router], Any]] = {
    "effective_rows": lambda router: effective_rows(router.weight, router.gain),
}


def weight_quantities(router: Router, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Every quantity that a metric of scope ``weights`` needs."""
    needed = {need for metric in metrics if metric.scope == "weights" for need in metric.needs}
    return {name: WEIGHT_QUANTITIES[name](router) for name in sorted(needed)}
