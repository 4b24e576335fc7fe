"""MGG206: no layer is unlike its neighbours.

Looked for: the median length, Gram score and effective rank of each router beside the mean of the
layers before and after it; a layer stands out when the difference is many times what other layers
show, and large in itself. Needs eight layers.

A finding means: this router was not trained with the others: it comes from another revision, was
initialised anew, or was scaled.

What to do: compare the layer with the source of the checkpoint. The limits are heuristic.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import Measured, Row
from moegeom.core.finding import Finding

_LEAST_LAYERS = 8

_FEATURES = {
    "centred_norm_median": "the median length of its rows",
    "gram_score_centred": "its Gram score",
    "effective_rank": "its effective rank",
}


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    found: dict[str, tuple[float, str]] = {}
    for name, words in _FEATURES.items():
        rows = [row for row in measured.layers if _value(row, name) is not None]
        if len(rows) < _LEAST_LAYERS:  # of one figure; of all, there is too little to judge
            continue
        steps = _steps([_value(row, name) or 0.0 for row in rows])
        usual = statistics.median(abs(step) for step in steps)
        for row, step in zip(rows, steps, strict=True):
            router = row["router"]
            times = abs(step) / usual if usual else math.inf
            is_far = abs(step) > math.log(limits("factor", router))
            if is_far and times > limits("times_usual", router):
                found[router] = max(found.get(router, (0.0, "")), (abs(step), words))
    for router, (step, words) in sorted(found.items(), key=lambda item: -item[1][0]):
        yield CHECK.finding(
            router,
            "this router is unlike those of the layers before and after it.",
            f"By {words}: {math.exp(step):.2f} times apart from the mean of its neighbours "
            f"(limit {limits('factor', router):g}, heuristic).",
        )


def _value(row: Row, name: str) -> float | None:
    """Logarithm of the figure; for the score, of the rms cosine that it is one minus."""
    value = row.get(name)
    if value is not None and name == "gram_score_centred":
        value = 1.0 - value
    return math.log(value) if value else None


def _steps(values: list[float]) -> list[float]:
    """Each value less the mean of its two neighbours, or less the nearer one where that is less.

    The neighbour of an odd layer has another neighbour, which it is close to; so have the first and
    last layer, which are compared with the two layers next to them.
    """
    last = len(values) - 1
    steps = []
    for i, value in enumerate(values):
        first = min(max(i - 1, 0), last - 2)
        around = [values[j] for j in range(first, first + 3) if j != i]
        nearest = min((value - other for other in around), key=abs)
        mean = value - sum(around) / len(around)
        steps.append(nearest if abs(nearest) < abs(mean) else mean)
    return steps


CHECK = Check(
    "MGG206",
    "a router is unlike those of its neighbouring layers",
    "warning",
    _judge,
    ("centred_norm_median",),
    (
        Limit("factor", 1.5, "largest ratio to the neighbours' mean"),
        Limit("times_usual", 8.0, "the same over the median of all layers"),
    ),
    absent="no row is finite",
    too_little=lambda measured: (
        f"fewer than {_LEAST_LAYERS} layers" if len(measured.layers) < _LEAST_LAYERS else ""
    ),
    severities={"release": "error"},
)
