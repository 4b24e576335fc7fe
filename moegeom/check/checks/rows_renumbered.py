"""MGI121: no row changed places since the baseline, unless its expert moved along.

Looked for: rows that are far from their own place in the baseline and near another one. Then a
sample of every expert's weights and the selection bias tell whether the experts moved along.

A finding means: the rows of the router were permuted and the experts were not. Every token that
chose an expert is now sent to another one.

What to do: look at the conversion that wrote the file; experts sorted as text (expert 10 before
expert 2) are the usual cause.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.check._check import Check, Limits, Unknown
from moegeom.check._drift import Drift, drifts
from moegeom.check._measured import Measured, listed
from moegeom.core.finding import Finding

#: A bias moved along when it is this near to its old value, over the spread of the biases.
_BIAS_MOVED = 0.1


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    for compared in drifts(measured):
        if isinstance(compared, Unknown):
            yield compared
            continue
        row, drift = compared
        router = row["router"]
        if not drift.renumbered.any():
            continue
        experts = np.flatnonzero(drift.renumbered).tolist()
        moved_along, why = _experts_moved_along(measured, router, drift)
        if moved_along:
            continue
        swaps = ", ".join(f"{e} was {drift.place[e]}" for e in experts[:4])
        yield CHECK.finding(
            router,
            f"{len(experts)} rows are those of other experts in the baseline: {swaps}"
            f"{' ...' if len(experts) > 4 else ''}.",
            f"{why} Rows that changed places: {listed(experts)}.",
            measured.see(router),
        )


def _experts_moved_along(measured: Measured, router: str, drift: Drift) -> tuple[bool, str]:
    """Whether everything that belongs to the rows moved with them, and the evidence."""
    before = measured.before(router)
    rows = measured.experts[router]
    groups = int(measured.facts(router).get("num_groups") or 1)
    if not _keeps_groups(drift, groups):
        return False, (
            f"The rule keeps whole groups of experts ({groups}), and the new places mix groups: "
            "other experts compete even if every expert moved along."
        )
    samples = [e.get("expert_sample") for e in rows]
    if before is not None and before.selection_bias is not None:
        bias = np.array([e["selection_bias"] for e in rows], dtype=np.float64)
        difference = bias - before.selection_bias[drift.place]
        left = np.abs(difference - np.median(difference)).max()
        if left > _BIAS_MOVED * max(float(before.selection_bias.std()), 1e-12):
            return False, "The selection bias did not move along."
    if before is None or before.samples is None or None in samples:
        return False, (
            "Whether the experts moved along is not known: their weights are not in the "
            "checkpoint, or not in the baseline."
        )
    same = sum(samples[i] == before.samples[drift.place[i]] for i in range(len(rows)))
    stayed = sum(samples[i] == before.samples[i] for i in range(len(rows)))
    if stayed < same == len(rows):
        return True, "Every expert moved along."
    return False, f"{stayed} of {len(rows)} experts are where they were: they did not move along."


def _keeps_groups(drift: Drift, num_groups: int) -> bool:
    """True when each group of experts consists of the experts of one group of the baseline."""
    groups = drift.place.reshape(num_groups, -1) // (len(drift.place) // num_groups)
    return bool((groups == groups[:, :1]).all())


CHECK = Check(
    "MGI121",
    "rows changed places and their experts did not",
    "error",
    _judge,
    ("row_rank",),
    inputs="baseline",
)
