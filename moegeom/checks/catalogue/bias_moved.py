"""MGN126: the biases of every router are where they were.

Looked for: the selection bias and the logit bias of each expert beside the baseline, less what is
common to all experts, over their spread in the baseline.

A finding means: these biases route other tokens than they did. Between two steps of a training that
is expected; after a conversion it is not. A bias that was permuted, negated, zeroed or cast shows
here.

What to do: one layer alone points at a file, all layers at training. The limit is heuristic; a
profile for conversions may well put it at 0.001.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.checks.check import Check, Limit, Limits, Unknown
from moegeom.checks.drift import spread_of
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import percent

_BIASES = {"selection_bias": "selection bias", "logit_bias": "logit bias"}


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    found: list[tuple[float, Finding]] = []
    for row in measured.layers:
        router, before = row["router"], measured.before(row["router"])
        for name, words in _BIASES.items():
            old = getattr(before, name, None)
            now = [e.get(name) for e in measured.experts[router]]
            if old is None or len(now) != len(old):
                continue  # another shape, or a bias that came or went: MGI124 and MGI107 say so
            if None in now:
                yield Unknown(router, f"its {words} is not finite, or was not measured")
                continue
            drift = measured.drifts.get(router)
            if drift is not None and (drift.renumbered.any() or drift.faults(words)):
                continue  # MGI121 asks whether the biases moved along; MGI128 names the fault
            change = np.array(now, dtype=np.float64) - old
            change -= np.median(change)  # a common offset changes no choice
            largest, spread = float(np.abs(change).max()), spread_of(old)
            share = largest / spread if spread else math.inf if largest else 0.0
            if share > limits("moved", router):
                limit = percent(limits("moved", router))
                found.append((share, _finding(measured, router, words, change, spread, limit)))
    found.sort(key=lambda pair: -pair[0])
    for _, finding in found:
        yield finding


def _finding(
    measured: Measured, router: str, words: str, change: np.ndarray, spread: float, limit: str
) -> Finding:
    expert = int(np.abs(change).argmax())
    by = (
        f"by {percent(abs(change[expert]) / spread)} of its spread" if spread else "from the others"
    )
    return CHECK.finding(
        router,
        f"the {words} of expert {expert} moved {by} since the baseline.",
        f"{np.count_nonzero(change)} of {len(change)} biases changed, a common offset taken out; "
        f"they spread {spread:.3g} (limit {limit}, heuristic).",
    )


CHECK = Check(
    "MGN126",
    "biases moved since the baseline",
    "warning",
    _judge,
    limits=(Limit("moved", 0.1, "largest movement of a bias, over the spread of the biases"),),
    inputs="baseline",
    severities={"release": "error", "training": "note"},
)
