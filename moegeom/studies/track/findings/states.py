"""States of single steps: those that cannot be read, are broken, or come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.checks.check import Tested, Unknown
from moegeom.checks.statistics import p_above
from moegeom.core.finding import Finding
from moegeom.core.text import number_of, percent
from moegeom.geometry.series import Undone, undone
from moegeom.studies.track.history import History, RouterHistory
from moegeom.studies.track.series_check import series_check


@series_check("MGT106", "a step cannot be read", "error", of_each_step=True)
def steps_unread(history: History) -> Iterator[Unknown]:
    """Every step that is there can be read.

    Looked for: matches of the pattern that are no whole checkpoint (empty, without weights or
    config, shards that an index names and that are not there) or whose files cannot be opened. A
    step whose name, or one of whose files, says that it is being written (.partial, .tmp, .temp,
    .incomplete) is listed, and not counted.

    A finding means: the series is inconclusive. Nothing is known of that step, so the series has a
    hole, at its end more often than not.

    What to do: look at the file that is named. A job that follows a training should write a step
    under a name that ends in .tmp, and rename it.
    """
    for name, reason in history.unread:
        yield Unknown(name, reason)


@series_check("MGT107", "a step fails a check of integrity", "error", of_each_step=True)
def steps_broken(history: History) -> Iterator[Finding]:
    """No step fails a check of integrity.

    Looked for: what MGI101 and the other checks of integrity find in each step by itself, at the
    severity error: numbers that are not finite, tensors of wrong shapes, rules that no engine
    takes.

    A finding means: the routers of that step cannot route as they stand. A series of figures would
    show it as a gap.

    What to do: moegeom check on the step tells the whole of it; do not go on training from it.
    """
    for name, path, findings in history.broken:
        first, *others = findings
        more = f" And {number_of(len(others), 'more finding')}." if others else ""
        yield steps_broken.finding(
            first.routers,
            f"{name} is broken: {first.code}, {first.title}",
            f"{first.detail}{more}",
            f"moegeom check {path}",
        )


@series_check("MGT101", "an earlier state is there again", "error", least_steps=lambda history: 3)
def state_repeated(history: History) -> Iterator[Tested]:
    """No router is again, bit for bit, what it was at an earlier step.

    Looked for: rows or a selection bias with the bits of an earlier step and not those of the step
    before. Each number that changed in between and came back may have done so by chance, with
    probability 1/2 at most; the p-value is the product, times the pairs of steps.

    A finding means: the job went on from an older checkpoint, or an older file was written. What
    was learned in between is not in the later step. An engine that loads only part of a state
    leaves this to single routers, or to the bias alone.

    What to do: compare the step that the log resumed from with the one named here, look whether
    router and bias are in the state that is saved and loaded, and train again from the step before.
    """
    steps = len(history.steps)
    num_pairs = (steps - 1) * (steps - 2) // 2
    for router in history.routers:
        first_return = min(_returns(router), default=None)
        if first_return is None:
            yield Tested(router.name, None, 1.0)
            continue
        log_p, now, earlier, what, number = first_return
        finding = state_repeated.finding(
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


#: Share of the way that is taken back, and of the squared distance that is left, from and up to
#: which it is a return: one interval that is lost of a walk gives 1 and 0.5, scatter 0.5 and 1.
_LEAST_UNDONE = 0.75

_MOST_NEARNESS = 0.6

#: What independent scatter about a point takes back.
_OF_SCATTER = 0.5


@dataclass(frozen=True)
class _Return:
    """One step, and how much of the way from the nearest earlier one it takes back."""

    now: int
    earlier: int
    undone: Undone
    p_value: float

    @property
    def is_one(self) -> bool:
        """Whether it is large enough to be told."""
        return self.undone.share >= _LEAST_UNDONE and self.undone.nearness <= _MOST_NEARNESS


@series_check("MGT103", "updates of a router are undone", "warning", least_steps=lambda history: 3)
def updates_undone(history: History) -> Iterator[Tested]:
    """No step takes back what the steps before it did to a router.

    Looked for: the share of the way from an earlier step to the last that the next step takes back,
    all rows brought to one length. Steps that go on independently of each other take back nothing,
    rows that only scatter about a point one half. A finding takes back three quarters at least
    (heuristic), more than one half by Student's t over the experts, and ends nearer to the earlier
    step than to the last, by 0.6 of the squared distance (heuristic); not at two steps in a row, as
    swings would.

    A finding means: the job went on from the earlier step and trained from there. That is meant
    where a run was rolled back after a spike of the loss; else updates are lost. It is also what
    one checkpoint of another kind looks like, such as averaged weights among those of single steps.

    What to do: compare the step that the log resumed from with the one named here; where the run
    was rolled back on purpose, leave the steps that it gave up out of the series.
    """
    for router in history.routers:
        returns = _nearest_returns(router)
        if not returns:
            continue
        large = [one.is_one for one in returns]
        single = [
            one
            for place, one in enumerate(returns)
            if large[place] and not any(large[max(place - 1, 0) : place] + large[place + 1 :][:1])
        ]
        if not single:
            yield Tested(router.name, None, 1.0)
            continue
        one = min(single, key=lambda one: (one.p_value, one.now))
        p_value = min(1.0, one.p_value * len(returns))
        yield Tested(router.name, _undone_finding(history, router.name, one), p_value)


def _undone_finding(history: History, router: str, one: _Return):
    earlier, before = history.step(one.earlier), history.step(one.now - 1)
    nearness = percent(float(np.sqrt(one.undone.nearness)))
    return updates_undone.finding(
        router,
        f"step {history.step(one.now)} takes back {percent(one.undone.share)} of the way from step "
        f"{earlier} to step {before}.",
        f"By scatter alone it would be half. Its distance to step {earlier} is {nearness} of that "
        f"to step {before}: look at what the job resumed from.",
    )


def _nearest_returns(router: RouterHistory) -> list[_Return]:
    """For each step from the third on, beside the earlier step that it is nearest to."""
    if router.grams is None or len(router.grams) < 2:
        return []
    total = router.grams.sum(axis=0)
    squares = np.diag(total)
    distance = squares[:, None] + squares[None, :] - 2.0 * total
    returns = []
    for now in range(2, len(total)):
        earlier = int(distance[now, : now - 1].argmin())
        one = undone(router.grams, earlier, now - 1, now)
        if _is_same(router, now, earlier):
            one = Undone(np.nan, np.nan, np.nan)  # bit for bit: another check tells it
        p_value = p_above(one.share, _OF_SCATTER, one.error, len(router.grams) - 1.0)
        returns.append(_Return(now, earlier, one, min(1.0, p_value * (now - 1))))
    return returns


def _is_same(router: RouterHistory, now: int, earlier: int) -> bool:
    return router.row_digests[now] == router.row_digests[earlier] != ""


#: Different biases of a router that has been updated more than once.
_LEAST_DIFFERENT = 3


@series_check("MGT102", "the selection bias was reset", "error", needs_bias=True)
def bias_reset(history: History) -> Iterator[Finding]:
    """No selection bias that had been moved is back at one number for all experts.

    Looked for: a step at which every expert of a router has the same selection bias, where at the
    step before it they had three different ones at least: two are what a single update leaves, and
    what the next may take back.

    A finding means: the bias was not in the state that the job resumed from, and began again as it
    was made, mostly at 0. The load that it had balanced is uneven from there on.

    What to do: look whether the bias, mostly a buffer and no parameter, is saved and loaded; train
    again from the step before, or let the bias settle before loads count.
    """
    for router in history.routers:
        if router.bias is None:
            continue
        spread = np.ptp(router.bias, axis=1)
        kinds = np.array([len(np.unique(values)) for values in router.bias])
        resets = np.flatnonzero((kinds[1:] == 1) & (kinds[:-1] >= _LEAST_DIFFERENT)) + 1
        if not len(resets):
            continue
        now = int(resets[0])
        yield bias_reset.finding(
            router.name,
            f"at step {history.step(now)} every selection bias is {router.bias[now, 0]:.3g} again.",
            f"At step {history.step(now - 1)} they spread over {spread[now - 1]:.3g}. Look whether "
            "the bias is in the state that is saved and loaded.",
        )
