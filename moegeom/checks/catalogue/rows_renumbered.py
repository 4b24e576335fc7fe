"""MGI121: no row changed places since the baseline without its expert, and no expert without it.

Looked for: rows that are far from their own place in the baseline and near another one. Then a
sample of every expert's weights and the selection bias tell whether the experts moved along; and
experts whose sample is that of another expert in the baseline, while rows stayed. Experts with
other weights than any in the baseline, as after training, have no place to be compared with.

A finding means: the rows of the router were permuted and the experts were not, or the reverse.
Every token that chose an expert is now sent to another one.

What to do: look at the conversion that wrote the file; experts sorted as text (expert 10 before
expert 2) are the usual cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int64

from moegeom.checks.check import Check, Limits, Unknown
from moegeom.checks.drift import Drift, drifts, spread_of
from moegeom.checks.measured import Measured, listed
from moegeom.core.finding import Finding
from moegeom.core.text import number_of

#: Pairs that a fix lists.
_MOST_PAIRS = 4

_ROWS = "rows are those of other experts"

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
            yield from _experts_alone(measured, router)
            continue
        experts = np.flatnonzero(drift.renumbered).tolist()
        moved_along, why = _experts_moved_along(measured, router, drift)
        if moved_along:
            continue
        swaps = ", ".join(f"{e} was {drift.place[e]}" for e in experts[:4])
        yield CHECK.finding(
            router,
            f"{number_of(len(experts), 'row is that of another expert', _ROWS)} in the baseline: "
            f"{swaps}"
            f"{' ...' if len(experts) > 4 else ''}.",
            f"{why} Rows of other experts: {listed(experts)}.",
            fix=_exchange(drift.place, _tensors(measured, router, drift.place)),
        )


def _experts_alone(measured: Measured, router: str) -> Iterator[Finding]:
    """Experts that are found in another place of the baseline, while no row is."""
    before = measured.before(router)
    now = [e.get("expert_sample") for e in measured.experts[router]]
    if before is None or before.samples is None or len(before.samples) != len(now):
        return
    known = {sample: expert for expert, sample in enumerate(before.samples)}
    place = np.array([known.get(str(sample), own) for own, sample in enumerate(now)])
    experts = np.flatnonzero(place != np.arange(len(now))).tolist()
    if not experts or len(known) < len(now):
        return  # experts that are alike in the baseline cannot be told apart
    swaps = ", ".join(f"{e} was {place[e]}" for e in experts[:4])
    yield CHECK.finding(
        router,
        f"{number_of(len(experts), 'expert is', 'experts are')} those of other rows in the "
        f"baseline: {swaps}"
        f"{' ...' if len(experts) > 4 else ''}.",
        f"The rows are where they were: they did not move along. Experts that changed places: "
        f"{listed(experts)}.",
        fix=_exchange(place, ("experts",)),
    )


def _exchange(place: Int64[np.ndarray, "experts"], tensors: Sequence[str]) -> str:
    """``exchange rows 3 and 9 of x``, where all that moved are such pairs; else empty."""
    moved = np.flatnonzero(place != np.arange(len(place))).tolist()
    pairs = [(a, int(place[a])) for a in moved if a < place[a] and place[place[a]] == a]
    if not tensors or 2 * len(pairs) != len(moved) or len(pairs) > _MOST_PAIRS:
        return ""
    what = "" if tensors == ("experts",) else "rows "
    told = ", ".join(f"{what}{a} and {b}" for a, b in pairs)
    if not what:
        return f"exchange experts {told}, which puts each back to its row."
    return f"exchange {told} of {' and of '.join(tensors)}, which puts each back to its expert."


def _tensors(
    measured: Measured, router: str, place: Int64[np.ndarray, "experts"]
) -> tuple[str, ...]:
    """What to exchange rows of: the weight, and a selection bias that moved along with them."""
    facts, before = measured.facts(router), measured.before(router)
    found = tuple(facts.get("tensors", ())[:1])
    if before is None or before.selection_bias is None or not facts.get("bias_tensor"):
        return found
    bias = np.array([e["selection_bias"] for e in measured.experts[router]], dtype=np.float64)
    moved = np.abs(bias - before.selection_bias[place]).sum()
    has_moved = moved < np.abs(bias - before.selection_bias).sum()
    return (*found, facts["bias_tensor"]) if has_moved else found


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
        if left > _BIAS_MOVED * max(spread_of(before.selection_bias), 1e-12):
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
    "rows changed places and their experts did not, or the reverse",
    "error",
    _judge,
    ("row_rank",),
    inputs="baseline",
)
