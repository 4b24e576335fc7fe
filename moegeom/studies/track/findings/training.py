"""States of single steps that are broken or come back; how rows, biases and loads move in a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.checks.check import Tested, Unknown
from moegeom.checks.statistics import p_above
from moegeom.core.finding import Finding
from moegeom.core.row_keys import ALL, is_domain
from moegeom.core.shapes import Bool, Float64
from moegeom.core.text import figure_text, listed, number_of, percent
from moegeom.geometry.load import FEW_EXPERTS
from moegeom.geometry.series import (
    Undone,
    alternation_p_value,
    changes,
    least_alternation_p_value,
    main_scores,
    rank_agreement,
    undone,
)
from moegeom.geometry.statistics import LEAST_STEPS, departures, in_logs
from moegeom.studies.track.findings import least_steps_for, series_check, share
from moegeom.studies.track.steps import Concentration, History, RouterHistory


@series_check("MGT106", "a step cannot be read", "error", of_each_step=True)
def steps_unread(history: History) -> Iterator[Unknown]:
    """Every step that is there can be read.

    Looked for: matches of the pattern that are no whole checkpoint (empty, without weights or
    config, shards that an index names and that are not there) or whose files cannot be opened. A
    step that says by a name that it is being written (.partial, .tmp, .temp, .incomplete) is
    listed, and not counted.

    A finding means: the series is inconclusive: it has a hole, at its end more often than not.

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
    before. Each number that changed in between came back by chance with probability 1/2 at most;
    the p-value is the product, times the pairs of steps.

    A finding means: the job went on from an older checkpoint, or an older file was written: what
    was learned in between is lost. An engine that loads only part of a state leaves this to single
    routers, or to the bias alone.

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


@series_check("MGT103", "updates of a router are undone", "warning", least_steps=lambda history: 3)
def updates_undone(history: History) -> Iterator[Tested]:
    """No step takes back what the steps before it did to a router.

    Looked for: the share of the way from an earlier step to the last that the next step takes back,
    all rows brought to one length. Independent steps take back nothing, rows that only scatter
    about a point one half. A finding takes back three quarters at least (heuristic), more than one
    half by Student's t over the experts, and ends nearer to the earlier step than to the last, by
    0.6 of the squared distance (heuristic); not at two steps in a row, as swings would.

    A finding means: the job went on from the earlier step and trained from there, as is meant after
    a rollback; else updates are lost. A checkpoint of another kind, such as averaged weights among
    those of single steps, looks so too.

    What to do: compare the step that the log resumed from with the one named here; where the run
    was rolled back on purpose, leave the steps that it gave up out of the series.
    """
    for router in history.routers:
        returns = _nearest_returns(router)
        if not returns:
            continue
        ways = (one.undone for one in returns)
        large = [w.share >= _LEAST_UNDONE and w.nearness <= _MOST_NEARNESS for w in ways]
        single = [
            one
            for place, one in enumerate(returns)
            if large[place] and not any(large[max(place - 1, 0) : place] + large[place + 1 :][:1])
        ]
        if not single:
            yield Tested(router.name, None, 1.0)
            continue
        one = min(single, key=lambda one: (one.p_value, one.now))
        earlier, before = history.step(one.earlier), history.step(one.now - 1)
        nearness = percent(float(np.sqrt(one.undone.nearness)))
        finding = updates_undone.finding(
            router.name,
            f"step {history.step(one.now)} takes back {percent(one.undone.share)} of the way from "
            f"step {earlier} to step {before}.",
            f"By scatter alone it would be half. Its distance to step {earlier} is {nearness} of "
            f"that to step {before}: look at what the job resumed from.",
        )
        yield Tested(router.name, finding, min(1.0, one.p_value * len(returns)))


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
        if router.row_digests[now] == router.row_digests[earlier] != "":
            one = Undone(np.nan, np.nan, np.nan)  # bit for bit: another check tells it
        p_value = p_above(one.share, _OF_SCATTER, one.error, len(router.grams) - 1.0)
        returns.append(_Return(now, earlier, one, min(1.0, p_value * (now - 1))))
    return returns


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


#: A router moves at all from this relative change on: writing it again in bfloat16 moves it by
#: 0.0018.
_MOVES = 0.003

#: Share of the rate of those that move up to which one stands still. Rates of routers of one run
#: differ by a small factor; heuristic.
_STANDS = 0.01


@dataclass(frozen=True)
class _Standing:
    """A router that stands still from step ``onset`` to the end.

    ``own`` and ``others`` are median rates from there on, ``others`` those of the ``num_moving``
    routers that move.
    """

    router: str
    onset: int
    own: float
    others: float
    num_moving: int


def _standing(
    rates: Mapping[str, Float64[np.ndarray, "intervals"]], least: int = 1
) -> Iterator[_Standing]:
    """Routers that stand still for ``least`` intervals or more up to the end, while others move.

    Only intervals count in which more than half of the others move, so that a run that is over has
    none, and one router that runs away does not make the others look still.
    """
    if len(rates) < 2:
        return
    table = np.stack(list(rates.values()))
    moves = table >= _MOVES
    counted = np.flatnonzero(moves.sum(axis=0) > (len(table) - 1) / 2.0)
    if not len(counted):
        return
    usual = np.array([np.median(table[moves[:, at], at]) for at in counted])
    for router, rate in zip(rates, table, strict=True):
        is_above = rate[counted] > _STANDS * usual
        begin = int(np.flatnonzero(is_above)[-1]) + 1 if is_above.any() else 0
        if len(counted) - begin >= least:
            behind = counted[begin:]
            number = int(moves[:, behind].any(axis=1).sum())
            own, others = (float(np.median(part)) for part in (rate[behind], usual[begin:]))
            yield _Standing(router, int(behind[0]), own, others, number)


@series_check(
    "MGT104",
    "a router stands still while others are trained",
    "warning",
    too_little=lambda history: "" if len(history.routers) > 1 else "there is no other router",
)
def rows_stand_still(history: History) -> Iterator[Finding]:
    """No router stands still while the others are trained.

    Looked for: rows that change by no more than a hundredth of what the moving routers do (median,
    heuristic), from some step on to the end. Only intervals count in which more than half of the
    others change by 0.3 % of their length, more than writing them again in bfloat16 would.

    A finding means: the router no longer gets updates: it fell out of the optimiser, its gradient
    is 0 or not finite, or its updates are too small for the precision it is kept in. Experts are
    trained on behind a choice that no longer learns.

    What to do: look whether the parameter is in the optimiser and its gradient arrives, and in
    which precision it is updated. Where it was frozen on purpose, leave the layer out (--layers).
    """
    rates = {r.name: changes(r.rows, r.row_digests) for r in history.routers if r.rows}
    for one in _standing(rates):
        others = number_of(one.num_moving, "other router moves", "other routers move")
        yield rows_stand_still.finding(
            one.router,
            f"from step {history.step(one.onset)} on its rows stand still, and {others} on.",
            f"They change by {percent(one.own)} of their length from step to step (median), those "
            f"of the others by {percent(one.others)}. Look whether the optimiser holds the router.",
        )


def _longest_run(flags: Bool[np.ndarray, "intervals"]) -> tuple[int, int]:
    """Beginning and length of the longest run of what is true; the first of equal ones."""
    padded = np.concatenate([[False], flags, [False]]).astype(np.int8)
    begin, end = np.flatnonzero(np.diff(padded) == 1), np.flatnonzero(np.diff(padded) == -1)
    if not len(begin):
        return 0, 0
    longest = int((end - begin).argmax())
    return int(begin[longest]), int(end[longest] - begin[longest])


#: Steps at the end of a series over which what does not change is told from what waits.
_STILL_STEPS = 3


@series_check("MGT108", "no router changes", "warning", least_steps=lambda history: _STILL_STEPS)
def nothing_changes(history: History) -> Iterator[Finding]:
    """Some router changes from step to step.

    Looked for: rows and selection biases of all routers that are bit for bit the same at every step
    of the series. A run that is over stops somewhere; this one never began.

    A finding means: routers are not trained at all, or one checkpoint was saved again and again.

    What to do: look whether the optimiser holds the routers, and whether what is saved is what is
    trained. Routers that are frozen on purpose are no fault.
    """
    digests = [states for r in history.routers for states in (r.row_digests, r.bias_digests)]
    has_bits = all(router.row_digests[0] for router in history.routers)
    if has_bits and all(len(set(states)) == 1 for states in digests):
        yield nothing_changes.finding(
            tuple(router.name for router in history.routers),
            f"all {number_of(len(history.routers), 'router')} that can be compared are bit for bit "
            f"the same at all {len(history.steps)} steps.",
            "Look whether the optimiser holds them, and whether what is saved is what is trained.",
        )


@series_check(
    "MGT109",
    "rows stand still while others are trained",
    "warning",
    least_steps=lambda history: _STILL_STEPS,
)
def experts_stand_still(history: History) -> Iterator[Finding]:
    """No router, and no expert's row, stands still while others are trained.

    Looked for: routers that are bit for bit the same at three steps on end and then move again,
    where more than half of the others change at each of them; rows that are the same numbers at the
    last three steps, where more than half of the rows of the router change.

    A finding means: no gradient reaches these rows: they are frozen, the experts are never chosen
    or masked out. Weight decay alone would move them.

    What to do: look at the load of these experts, and at what is left out of the optimiser.
    """
    moves = np.array(
        [
            [one != other or not one for one, other in itertools.pairwise(router.row_digests)]
            for router in history.routers
        ]
    )
    is_still = ~moves & (moves.mean(axis=0) > 0.5)
    for router, still, own in zip(history.routers, is_still, moves, strict=True):
        begin, length = _longest_run(still)
        # one that never moves again stands still from there on: MGT104
        if length >= _STILL_STEPS - 1 and own[begin + length :].any():
            yield experts_stand_still.finding(
                router.name,
                f"the router stood still from step {history.step(begin)} to "
                f"{history.step(begin + length)}.",
                "Most other routers changed at each of these steps. Look at what is left out of "
                "the optimiser, and at its gradients.",
            )
    for router in history.routers:
        if not router.rows:
            continue
        last = np.stack(router.rows[-_STILL_STEPS:])
        moves = (last[1:] != last[:-1]).any(axis=2)
        still = np.flatnonzero(~moves.any(axis=0))
        if len(still) and (moves.mean(axis=1) > 0.5).all():
            yield experts_stand_still.finding(
                router.name,
                f"{number_of(len(still), 'row')} of {moves.shape[1]} stood still at the last "
                f"{_STILL_STEPS} steps: expert {listed(still.tolist())}.",
                "The other rows change. Look at the load of these experts and at the optimiser.",
            )


@series_check(
    "MGT110",
    "experts stand still while their router is trained",
    "warning",
    least_steps=lambda history: _STILL_STEPS,
    too_little=lambda history: (
        "" if any(router.experts for router in history.routers) else "no experts were sampled"
    ),
)
def experts_frozen(history: History) -> Iterator[Finding]:
    """Experts change while their router does.

    Looked for: samples of experts (the first 1,024 bytes of one matrix, of 512 experts of a
    checkpoint at most) that are the same bytes at every step, where the rows of the router change
    at each of them.

    A finding means: the experts are not trained, or not saved: the router learns to choose among
    experts that do not learn.

    What to do: look whether the optimiser holds the experts (a name that a pattern does not match,
    stacked tensors that an optimiser for matrices passes over), and whether what is saved is what
    is trained. Experts that are frozen on purpose are no fault.
    """
    for router in history.routers:
        still = [expert for expert, states in router.experts.items() if len(set(states)) == 1]
        rows = router.row_digests
        if still and all(one != other for one, other in itertools.pairwise(rows)):
            number, sampled = number_of(len(still), "expert"), len(router.experts)
            which = "" if len(still) == sampled else f": {listed(still)}"
            yield experts_frozen.finding(
                router.name,
                f"{number} of {sampled} sampled did not change from step {history.step(0)} to "
                f"{history.step(-1)}{which}.",
                "The rows of the router changed at every step. Look whether the optimiser holds "
                "the experts, and whether what is saved is what is trained.",
            )


def _too_few(history: History) -> str:
    number = sum(router.bias is not None for router in history.routers)
    return "" if number > 1 else "no other router has a selection bias"


@series_check(
    "MGT105",
    "a selection bias stands still while others are updated",
    "warning",
    least_steps=lambda history: 3,
    needs_bias=True,
    too_little=_too_few,
)
def bias_stands_still(history: History) -> Iterator[Finding]:
    """No selection bias stands still while those of other routers are updated.

    Looked for: biases, a common offset taken out, that change by no more than a hundredth of what
    those of the moving routers do (median, heuristic), for two intervals at least up to the end.
    Only intervals count in which more than half of the others change by 0.3 % of their largest
    spread. Biases that all stop at once were stopped on purpose, as late in training they are.

    A finding means: the update no longer reaches this router: it was left out, or is lost in a bias
    that is kept in too few bits.

    What to do: look whether the buffer is among those that are updated, and keep it in float32.
    """
    rates = {r.name: r.bias_rates for r in history.routers if r.bias_rates is not None}
    # two intervals: biases that swing in units of their update may meet themselves once
    for one in _standing(rates, 2):
        others = number_of(one.num_moving, "other router moves", "other routers move")
        yield bias_stands_still.finding(
            one.router,
            f"from step {history.step(one.onset)} on its selection bias stands still, and that of "
            f"{others} on.",
            f"It changes by {percent(one.own)} of its largest spread from step to step (median), "
            f"that of the others by {percent(one.others)}. Look whether its update is applied, and "
            "in how many bits it is kept.",
        )


#: Steps of the shortest stretch that is looked at.
_SHORTEST = 8

#: Share of the swings of its first half that those of its last half must have: others die down.
_LASTING = 0.7


@dataclass(frozen=True)
class _Swing:
    """The stretch from step ``onset`` to the end that alternates most, and what it may be chance.

    ``p_value`` is that of all stretches together, ``num_crossings`` of ``num_places`` steps cross
    the mean; ``expert`` swings most, by ``size`` from step to step. ``is_lasting`` is false where
    the swings die down.
    """

    onset: int
    p_value: float
    num_crossings: int
    num_places: int
    expert: int
    size: float
    is_lasting: bool


def _swing(states: Float64[np.ndarray, "steps experts"]) -> _Swing:
    """How far the states alternate about their mean, along the direction of their largest scatter.

    Every stretch of 8 steps at least that lasts to the end is looked at; there must be one.
    """
    starts = range(len(states) - _SHORTEST + 1)
    by_stretch = [main_scores(states[start:]) for start in starts]
    p_values = [alternation_p_value(one > 0.0) for one in by_stretch]
    onset = int(np.argmin(p_values))
    scores, part = by_stretch[onset], states[onset:]
    sizes = np.abs(np.diff(scores))
    half = len(sizes) // 2
    by_expert = np.abs(np.diff(part, axis=0)).mean(axis=0)
    expert = int(by_expert.argmax())
    return _Swing(
        onset,
        min(1.0, p_values[onset] * len(starts)),
        int(((scores[1:] > 0.0) != (scores[:-1] > 0.0)).sum()),
        len(sizes),
        expert,
        float(by_expert[expert]),
        float(sizes[-half:].mean()) >= _LASTING * float(sizes[:half].mean()),
    )


def _least_swing(steps: int) -> float:
    """The least p-value that so many steps can have; 1 where they are too few."""
    if steps < _SHORTEST:
        return 1.0
    return least_alternation_p_value(steps) * (steps - _SHORTEST + 1)


#: Fair shares by which the load of an expert must change from step to step to matter.
_LEAST_SHARES = 0.1


@series_check(
    "MGT201",
    "loads swing from step to step",
    "warning",
    inputs="series and tokens",
    least_steps=least_steps_for(_least_swing),
    needs_one_text=True,
)
def load_swings(history: History) -> Iterator[Tested]:
    """Loads do not swing from one step to the next.

    Looked for: loads that cross their mean, along the direction in which they scatter most, more
    often than in a series of any order (runs test; every stretch of 8 steps or more up to the last
    is looked at and counted), whose swings do not die down (those of the last half are 0.7 of those
    of the first at least) and move an expert by 0.1 fair shares a step at least (both heuristic).
    The tokens must be the same at every step.

    A finding means: something overcorrects: a bias or a balancing loss drives tokens to and fro
    between the same experts. Scatter without memory and slow drifts do not look so.

    What to do: make the update of the bias, or the weight of the balancing loss, smaller; look
    whether the bias swings as well.
    """
    for router in history.routers:
        if router.loads is None:
            continue
        worst = _swing(router.loads)
        finding = load_swings.finding(
            router.name,
            f"from step {history.step(worst.onset)} on its loads swing: {worst.num_crossings} of "
            f"{worst.num_places} steps cross their mean.",
            f"Expert {worst.expert} swings most, by {worst.size:.2f} fair shares a step. Make the "
            "update of the bias, or the weight of the balancing loss, smaller.",
        )
        is_enough = worst.is_lasting and worst.size >= _LEAST_SHARES
        yield Tested(router.name, finding if is_enough else None, worst.p_value)


#: Share of the spread by which the bias of an expert must change from step to step to matter.
_LEAST_OF_SPREAD = 0.1


@series_check(
    "MGT202",
    "selection biases swing from step to step",
    "warning",
    least_steps=least_steps_for(_least_swing),
    needs_bias=True,
)
def bias_swings(history: History) -> Iterator[Tested]:
    """Selection biases do not swing from one step to the next.

    Looked for: biases, a common offset taken out, that swing as loads do in MGT201, and move an
    expert by a tenth of the spread of all biases a step at least (heuristic).

    A finding means: the bias is updated too strongly for how often it is updated: each update goes
    beyond the balance, and the next one back. Updates that shrink, and the last unit of a constant
    one, do not look so.

    What to do: make the update smaller, or let it shrink towards the end; count loads over a larger
    batch.
    """
    for router in history.routers:
        if router.bias is None:
            continue
        centred = router.bias - router.bias.mean(axis=1, keepdims=True)
        worst = _swing(centred)
        spread = float(np.sqrt((centred[worst.onset :] ** 2).mean()))
        part = worst.size / spread if spread > 0.0 else 0.0
        finding = bias_swings.finding(
            router.name,
            f"from step {history.step(worst.onset)} on its selection bias swings: "
            f"{worst.num_crossings} of {worst.num_places} steps cross the mean.",
            f"That of expert {worst.expert} swings most, by {worst.size:.2g} a step, "
            f"{percent(part)} of the spread. Make the update of the bias smaller.",
        )
        is_enough = worst.is_lasting and part >= _LEAST_OF_SPREAD
        yield Tested(router.name, finding if is_enough else None, worst.p_value)


#: Intervals of the shortest stretch that is looked at.
_FEWEST_INTERVALS = 2


def _too_few_experts(history: History) -> str:
    looks = len(history.steps) - _FEWEST_INTERVALS
    most = max(len(router.bias[0]) for router in history.routers if router.bias is not None)
    if looks * math.exp(-math.lgamma(most + 1.0)) <= share(history):
        return ""
    return f"no more than {number_of(most, 'expert')}, too few for a correlation of ranks"


@series_check(
    "MGT203",
    "the selection bias runs the wrong way",
    "warning",
    inputs="series and tokens",
    least_steps=lambda history: _FEWEST_INTERVALS + 1,
    needs_bias=True,
    too_little=_too_few_experts,
)
def bias_wrong_way(history: History) -> Iterator[Tested]:
    """The selection bias does not rise for experts that have too much load.

    Looked for: the correlation of ranks between the load of the experts at a step and the change of
    their biases up to the next, over every stretch of two intervals at least up to the last step,
    all counted; by chance it is that of experts numbered at random, the same at all steps. Told
    only where the load is at the end no more even than where the stretch begins.

    A finding means: the update of the bias has the wrong sign, or its loads and its experts are in
    another order: it drives loads apart. On text unlike that of the training, experts that are rare
    in training may look overloaded although their bias is raised rightly.

    What to do: look at the sign of the update (up where the load is below the mean) and at the
    order of the counts; record tokens that are drawn as the training draws them.
    """
    for router in history.routers:
        if router.bias is None or router.loads is None:
            continue
        # Loads at the beginning of an interval: a bias that happens to be high at its end makes
        # the load there high, with any update.
        steps, loads = np.diff(router.bias, axis=0), router.loads[:-1]
        starts = range(len(steps) - _FEWEST_INTERVALS + 1)
        agreements = [rank_agreement(steps[start:], loads[start:]) for start in starts]
        onset = min(starts, key=lambda start: agreements[start].p_value)
        one = agreements[onset]
        first, last = (float(router.loads[at].std()) for at in (onset, -1))
        finding = bias_wrong_way.finding(
            router.name,
            f"from step {history.step(onset)} on its selection bias rises for experts above the "
            "mean load and falls for those below.",
            f"Correlation of ranks {one.correlation:+.2f} over {len(steps) - onset} intervals, by "
            f"chance within {one.by_chance:.2f} of 0 (95 %). Load CV {first:.2f} -> {last:.2f}. "
            "Look at the sign of the update, and whether counts and biases are in one order.",
        )
        is_enough = one.correlation > 0.0 and last >= first
        p_value = min(1.0, one.p_value * len(starts))
        yield Tested(router.name, finding if is_enough else None, p_value)


#: Part of its experts that the whole must keep to look fine.
_WHOLE_KEEPS = 0.9


@dataclass(frozen=True)
class _Fall:
    """Of one domain, from step ``onset`` on: experts in use before and after, and the p-value."""

    domain: str
    onset: int
    p_value: float
    before: float
    after: float


@series_check(
    "MGT204",
    "the load of a domain concentrates",
    "warning",
    inputs="series and domains",
    least_steps=lambda history: LEAST_STEPS,
    needs_one_text=True,
)
def domain_concentrates(history: History) -> Iterator[Tested]:
    """The load of no domain concentrates while the whole looks fine.

    Looked for: the number of experts that the load of a domain lies on in effect (exp of its
    entropy). It must fall to half of what it was (median before and after, heuristic), and to half
    of what it does in the other domains (median), while that of all tokens keeps nine tenths; every
    later step must be below every earlier one by more than chance (Student's t over blocks of
    documents, all steps and domains counted). The tokens must be the same at every step.

    A finding means: the router sends nearly all text of one kind to a few experts, which are
    overloaded wherever such text comes in batches. The mean over all domains hides it.

    What to do: look at the data of that domain from this step on (repeated documents, another
    tokenizer), and at its MaxVio; balance within sequences or by domain. Specialisation that is
    meant looks alike, so look at the loss of the domain as well.
    """
    for router in history.routers:
        domains = [name for name in router.concentrations if is_domain(name)]
        if len(domains) < 2 or ALL not in router.concentrations:
            continue
        level = share(history) / len(domains)
        falls = [_fall(name, router.concentrations[name], level) for name in domains]
        falls_alone = [one for one in falls if _is_alone(one, router, domains)]
        if not falls_alone:
            yield Tested(router.name, None, 1.0)
            continue
        one = min(falls_alone, key=lambda one: one.p_value)
        whole = _rest_of(router.concentrations[ALL], one.onset)
        finding = domain_concentrates.finding(
            router.name,
            f"from step {history.step(one.onset)} on the load of domain "
            f"{one.domain.removeprefix('domain=')} lies on few experts.",
            f"In effect on {one.after:.1f}, before on {one.before:.1f}; over all tokens "
            f"{percent(whole, '.0f')} of the experts in use stay. Look at the data of that domain.",
        )
        yield Tested(router.name, finding, min(1.0, one.p_value * len(domains)))


def _fall(name: str, concentration: Concentration, level: float) -> _Fall:
    """The earliest step from which on it is lower beyond ``level``, else the clearest."""
    values, errors = in_logs(concentration.effective, concentration.errors)
    looks = len(values) - 1
    p_values = departures(values, errors, concentration.num_blocks - 1.0) * looks
    clear = np.flatnonzero(p_values <= level)
    onset = int(clear[0]) if len(clear) else 1 + int(p_values[1:].argmin())
    before, after = (float(np.median(part)) for part in np.split(concentration.effective, [onset]))
    return _Fall(name, onset, float(p_values[onset]), before, after)


def _is_alone(one: _Fall, router: RouterHistory, domains: list[str]) -> bool:
    """Whether the domain falls, and neither the whole nor the other domains with it."""
    rest = one.after / one.before
    others = [_rest_of(router.concentrations[d], one.onset) for d in domains if d != one.domain]
    is_fall = rest <= FEW_EXPERTS * min(1.0, float(np.median(others)))
    return is_fall and _rest_of(router.concentrations[ALL], one.onset) >= _WHOLE_KEEPS


def _rest_of(concentration: Concentration, onset: int) -> float:
    before, after = (float(np.median(part)) for part in np.split(concentration.effective, [onset]))
    return after / before


def _no_logits(history: History) -> str:
    has_logits = any(router.z_loss is not None for router in history.routers)
    return "" if has_logits else "the recordings hold no logits at every step"


#: A z-loss of 100 is a log-sum-exp of 10; from there on one more factor of ten is told.
_LARGE_Z_LOSS, _TIMES = 100.0, 10.0


@series_check(
    "MGT205",
    "logits grow",
    "warning",
    inputs="series and tokens",
    least_steps=lambda history: LEAST_STEPS,
    needs_one_text=True,
    too_little=_no_logits,
)
def logits_grow(history: History) -> Iterator[Finding]:
    """The logits do not grow without bound.

    Looked for: a z-loss, the mean square of the log-sum-exp of the logits, that is above 100 at the
    last step and ten times that of the first (both heuristic). The tokens must be the same at every
    step.

    A finding means: nothing holds the size of the logits. Choices harden, weights of the chosen go
    to 0 and 1, and low precision rounds ever more of each logit off.

    What to do: give the router a z-loss or a larger one, a smaller learning rate, or a norm in
    front of it.
    """
    grown = [
        (z_loss[-1] / z_loss[0], router.name, z_loss)
        for router in history.routers
        if (z_loss := router.z_loss) is not None
        and z_loss[-1] > max(_LARGE_Z_LOSS, _TIMES * z_loss[0])
    ]
    for _, name, z_loss in sorted(grown, key=lambda one: -one[0]):
        yield logits_grow.finding(
            name,
            f"its z-loss went from {figure_text(z_loss[0])} to {figure_text(z_loss[-1])}.",
            f"Steps {history.step(0)} to {history.step(-1)}: log-sum-exp {z_loss[0] ** 0.5:.2g} to "
            f"{z_loss[-1] ** 0.5:.3g}. Give the router a larger z-loss or a smaller learning rate.",
        )
