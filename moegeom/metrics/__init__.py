"""Metrics in rooms of their subject: reductions in, values and standard errors out, no token."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.core.metric import Metric, RouterFacts, Values
from moegeom.core.registry import Rooms

METRICS = Rooms("metric", "moegeom.metrics", Metric)

#: Rooms in the order of columns: what tokens choose, how near they are to choosing otherwise, what
#: reaches the router and leaves the experts, and the weights.
_TOPICS = (*("tokens", "load", "expert_sets", "margins", "flips"), *("inputs", "outputs", "rows"))


def by_topic(metrics: Sequence[Metric]) -> list[Metric]:
    """The metrics in the order of their columns: by topic, and as the room of a topic has them."""
    ranks = {f"{__name__}.{room}": rank for rank, room in enumerate(_TOPICS)}
    every = sorted(METRICS.in_rooms(), key=lambda m: ranks.get(m.finish.__module__, len(ranks)))
    return [metric for metric in every if metric in metrics]


def metrics_of_scan(
    compares: bool = False, is_noisy: bool = False, has_experts: bool = False
) -> list[Metric]:
    """All metrics but those of what was not asked for: another choice to compare with, noise,
    experts.
    """
    applies = {
        "flip": compares,
        "noise": is_noisy,
        "jump": has_experts,
        "flip_jump": compares and has_experts,
    }
    return [metric for metric in METRICS.all() if applies.get(metric.scope, True)]


def stacked(name: str) -> Callable[[Sequence[Mapping[str, Any]], RouterFacts], Values]:
    """``Metric.without_each`` of the metric, which finishes selections along a first axis too."""
    return lambda parts, facts: METRICS[name].finish(
        {need: np.stack([part[need] for part in parts]) for need in parts[0]}, facts
    )
