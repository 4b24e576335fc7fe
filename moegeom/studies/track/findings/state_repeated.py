"""MGT101: no router is again, bit for bit, what it was at an earlier step.

Looked for: rows or a selection bias with the bits of an earlier step and not those of the step
before. Each number that changed in between and came back may have done so by chance, with
probability 1/2 at most; the p-value is the product, times the pairs of steps.

A finding means: the job went on from an older checkpoint, or an older file was written. What was
learned in between is not in the later step. An engine that loads only part of a state leaves this
to single routers, or to the bias alone.

What to do: compare the step that the log resumed from with the one named here, look whether router
and bias are in the state that is saved and loaded, and train again from the step before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moegeom.checks.check import Tested
from moegeom.studies.track.history import History, RouterHistory
from moegeom.studies.track.series_check import SeriesCheck, same_onset


def _judge(history: History) -> Iterator[Tested]:
    steps = len(history.steps)
    num_pairs = (steps - 1) * (steps - 2) // 2
    for router in history.routers:
        found = min(_returns(router), default=None)
        if found is None:
            yield Tested(router.name, None, 1.0)
            continue
        log_p, now, earlier, what, number = found
        finding = CHECK.finding(
            router.name,
            f"step {history.step(now)} holds the {what} of step {history.step(earlier)} again, "
            "bit for bit.",
            f"{number:,} numbers were different at step {history.step(now - 1)}. What was learned "
            f"after step {history.step(earlier)} is lost: look at what the job resumed from.",
        )
        p_value = min(1.0, 2.0 * num_pairs * 2.0**log_p)
        yield Tested(router.name, finding, p_value)


def _returns(router: RouterHistory) -> Iterator[tuple[float, int, int, str, int]]:
    """Binary logarithm of the probability, step, the earlier step, what returned, how much."""
    biases: Sequence[np.ndarray] = () if router.bias is None else tuple(router.bias)
    parts = (("rows", router.rows, router.row_digests),)
    parts += (("selection bias", biases, router.bias_digests),)
    for what, states, digests in parts:
        for now in range(2, len(states)):
            before = digests[: now - 1]
            if digests[now] in ("", digests[now - 1]) or digests[now] not in before:
                continue
            if what != "rows" and np.ptp(states[now]) == 0.0:
                continue  # the same constant: the check of biases that are reset says it
            number = int(np.count_nonzero(states[now] != states[now - 1]))
            # the last step of those bits is where the job went on from
            earlier = now - 2 - before[::-1].index(digests[now])
            yield -float(number), now, earlier, what, number


CHECK = SeriesCheck(
    "MGT101",
    "an earlier state is there again",
    "error",
    _judge,
    inputs="series",
    alike=same_onset,
    least_steps=lambda history: 3,
)
