r"""Distance to the boundary of a cell with curved or grouped boundaries, or bounds of it.

Every change passes a barrier: a swap between the kept groups, a score that passes the fill of the
mask, or a dropped group that overtakes a kept one. Nothing changes through a barrier nearer than
its bound, so that the least of them is one for the distance; something may change at its guess.
Barriers are not kept: the two least of their bounds are, and the way through the nearest.

For scores of one logit swaps and fills have exact distances. Group swaps have a bound: with
:math:`T_g - T_h \le C(y) = \sum_{top\,g} q - \sum_p q` falling by at most :math:`n r + H r^2 / 2`
(n = slope of C, H = bound of its bend), and by at most ``group_slopes`` times r. For softmax, pairs
are bounded in the same way, and by half of the widest row distance; experts with equal biases by
the exact distance of their logits. Group swaps need not change the set, so that the lower bound may
be far below the distance.

The upper bound is the length of a step after which the rule itself chose another set: a line search
along the steepest descent of what seems nearest, and where that leaves more than 5 % to the lower
bound along each of a number of rays.

What a token's scores can do within a distance, and what the rule makes of them after a step.

Selection scores q have the slopes :math:`\nabla q_e = s_e (w_e - \bar w)`, with s the slope of the
score, or the probability p for softmax, and :math:`\bar w = \sum_a p_a w_a` for softmax, else 0,
known by its products with the rows and with itself. The log-odds of softmax,
:math:`\log p_e / (1 - p_e)`, have the slope :math:`w_e` less a mean of the other rows.

A constraint is a signed sum of the scores of up to four experts; what a direction does to logits
is given by coefficients of their rows and, last, one of the mean row.

Source: docs/theory.md E1b, E2.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from moegeom.core.shapes import Float, Float64, Int32
from moegeom.geometry.boundary.curved import CurvedRows
from moegeom.geometry.boundary.linear import NEVER
from moegeom.kernels.cpu import ONCE, UNCOUNTED, kernel
from moegeom.kernels.cpu.curved_boundaries import (
    FAR,
    NOBODY,
    Boundaries,
    boundaries_of,
    fill,
    load_token,
    nearest_boundary,
    pair_boundary,
    work_for,
)
from moegeom.kernels.cpu.score_curve import curve_at, curve_inverse

#: Share of the squared terms of a gradient that their rounding may cancel to.
_ROUNDING = 1e-14
#: Halvings of the distance within which a bend is bounded.
_BISECTIONS = 8
#: A length is found up to this share, unless nothing is known to change before it.
RESOLUTION = 1e-3
#: A first step reaches a little beyond where a boundary is thought to be.
_BEYOND = 1.0 + 1e-9
#: Steps grow by this factor until something changes.
_GROWTH = 1.25
_MAX_STEPS = 200
#: Where a boundary is touched, steps begin here, in units of the router input.
SHORTEST = 1e-12


@njit(**ONCE)
def _load_scores(boundaries, logits, work):
    """Scores, slopes and log-odds of one token, and the mean row."""
    work.search.mean_square = 0.0
    if not boundaries.is_softmax:
        load_token(boundaries, logits, work)
        for expert in range(work.each.shape[0]):
            work.each[expert].odds = work.each[expert].z
            work.each[expert].with_mean = 0.0
        return
    z, p, mean = work.each.z, work.each.slope, work.each.with_mean
    top = 0
    for expert in range(z.shape[0]):
        z[expert] = logits[expert] * boundaries.multiplier
        if z[expert] > z[top]:
            top = expert
    others = 0.0
    for expert in range(z.shape[0]):
        p[expert] = math.exp(z[expert] - z[top])
        if expert != top:
            others += p[expert]
    total = others + p[top]
    for expert in range(z.shape[0]):
        rest = others if expert == top else total - p[expert]
        work.each[expert].odds = z[expert] - z[top] - math.log(rest) if rest > 0.0 else math.inf
        p[expert] /= total
        work.each[expert].q = p[expert] + boundaries.bias[expert]
    for expert in range(z.shape[0]):
        mean[expert] = 0.0
    for expert in range(z.shape[0]):
        for other in range(z.shape[0]):
            mean[other] += p[expert] * boundaries.gram[expert, other]
    for expert in range(z.shape[0]):
        work.search.mean_square += p[expert] * mean[expert]


@njit(**UNCOUNTED)
def _bound_scores(boundaries, work, radius):
    """Least and largest selection score of each expert within a distance."""
    for expert in range(work.each.shape[0]):
        reach = radius * boundaries.stretch[expert]
        low = curve_at(boundaries.curve, work.each[expert].odds - reach)[0]
        work.each[expert].low = low + boundaries.bias[expert]
        high = curve_at(boundaries.curve, work.each[expert].odds + reach)[0]
        work.each[expert].high = high + boundaries.bias[expert]


@njit(**UNCOUNTED)
def _bend(boundaries, work, number, radius):
    r"""Bound of how fast the slope of the constraint falls along any line, within a distance.

    One logit: :math:`|f''| |w|^2` for each expert. Softmax:
    :math:`p'' = p (((w - \bar w) \cdot x)^2 - \mathrm{Var}_p(w \cdot x))`, where the variance is at
    most a quarter of :math:`D^2`, the widest row distance squared, and that mean moves by no more
    than :math:`r D^2 / 4`. Of the two, one lowers what is added, the other what is subtracted.
    """
    out = 0.0
    variance = boundaries.widest * boundaries.widest / 4.0
    for n in range(number):
        expert = work.search.experts[n]
        if not boundaries.is_softmax:
            out += boundaries.curve.bend * boundaries.length[expert] ** 2
            continue
        odds = work.each[expert].odds + radius * boundaries.stretch[expert]
        largest = curve_at(boundaries.curve, odds)[0]
        if work.search.signs[n] > 0.0:
            out += largest * variance
            continue
        own = boundaries.gram[expert, expert]
        squared = max(own - 2.0 * work.each[expert].with_mean + work.search.mean_square, 0.0)
        from_mean = math.sqrt(squared + _ROUNDING * own) + radius * variance
        out += largest * min(from_mean, boundaries.stretch[expert]) ** 2
    return out


@njit(**UNCOUNTED)
def _root(bend, slope, gap):
    root = slope + math.sqrt(slope * slope + 2.0 * bend * gap)
    return 2.0 * gap / root if root > 0.0 else math.inf


@njit(**ONCE)
def _reach_of(boundaries, work, number, gap, slope, radius):
    r"""No input within this distance breaks the constraint; at most ``radius``.

    :math:`C(x) \ge C_0 - n r - H r^2 / 2` with the slope n here and H the bend within r, and the
    largest r for which this stays positive, by bisection; and, for softmax, a slope of at most half
    of the widest row distance everywhere.
    """
    reach = min(_root(_bend(boundaries, work, number, radius), slope, gap), radius)
    if not boundaries.is_softmax:
        return reach
    high = radius
    for _ in range(_BISECTIONS if reach < radius else 0):
        middle = (reach + high) / 2.0
        root = _root(_bend(boundaries, work, number, middle), slope, gap)
        if root >= middle:
            reach = middle
        else:  # the bound within a larger distance holds within a smaller one
            reach = max(reach, root)
            high = middle
    return max(reach, 2.0 * gap / boundaries.widest) if boundaries.widest > 0.0 else reach


@njit(**UNCOUNTED)
def _steepest_descent(boundaries, work, number, of_logits):
    """Slope of the constraint; its steepest descent, of unit length, into the coefficients.

    ``of_logits``: of the same sum of logits instead of scores. 0 and no direction without any.
    """
    experts, signs, coefficients = work.search.experts, work.search.signs, work.search.coefficients
    fill(coefficients, 0.0)
    excess = 0.0
    own = 0.0
    squared = 0.0
    with_mean = 0.0
    for n in range(number):
        e = experts[n]
        weight = signs[n] * (1.0 if of_logits else work.each[e].slope)
        if boundaries.is_softmax:
            excess += weight
        own += boundaries.gram[e, e] * weight * weight
        with_mean += weight * work.each[e].with_mean
        for m in range(number):
            other = experts[m]
            of_other = signs[m] * (1.0 if of_logits else work.each[other].slope)
            squared += weight * of_other * boundaries.gram[e, other]
    squared += excess * (excess * work.search.mean_square - 2.0 * with_mean)
    slope = math.sqrt(max(squared, 0.0) + _ROUNDING * own)
    unit = 1.0 / slope if slope > 0.0 else 0.0
    for n in range(number):
        coefficients[n] = -signs[n] * (1.0 if of_logits else work.each[experts[n]].slope) * unit
    coefficients[4] = excess * unit
    return slope


@njit(**ONCE)
def _load_selection(boundaries, work, length):
    there = work.each.there
    if not boundaries.is_softmax:
        for expert in range(there.shape[0]):
            z = work.each[expert].z + length * work.each[expert].direction
            there[expert] = curve_at(boundaries.curve, z)[0] + boundaries.bias[expert]
        return
    largest = -math.inf
    for expert in range(there.shape[0]):
        there[expert] = work.each[expert].z + length * work.each[expert].direction
        largest = max(largest, there[expert])
    total = 0.0
    for expert in range(there.shape[0]):
        there[expert] = math.exp(there[expert] - largest)
        total += there[expert]
    for expert in range(there.shape[0]):
        there[expert] = there[expert] / total + boundaries.bias[expert]


@njit(**UNCOUNTED)
def _best_sum(values, start, stop, takes):
    """Sum of the one or two largest values of a group."""
    first = -math.inf
    second = -math.inf
    for expert in range(start, stop):
        if values[expert] > first:
            second = first
            first = values[expert]
        elif values[expert] > second:
            second = values[expert]
    return first + second if takes == 2 else first


@njit(**UNCOUNTED)
def keep_groups(boundaries: Boundaries, q: np.ndarray, is_kept: np.ndarray) -> None:
    """Marks the groups that the group mask keeps; equal scores: the lower index."""
    fill(is_kept, boundaries.num_kept == boundaries.num_groups)
    if boundaries.num_kept == boundaries.num_groups:
        return
    size = q.shape[0] // boundaries.num_groups
    for _ in range(boundaries.num_kept):
        best = -1
        value = -math.inf
        for group in range(boundaries.num_groups):
            if is_kept[group]:
                continue
            score = _best_sum(q, group * size, (group + 1) * size, boundaries.takes)
            if best < 0 or score > value:
                best = group
                value = score
        is_kept[best] = True


@njit(**UNCOUNTED)
def _is_changed(boundaries, work, length):
    """Whether the rule chooses other experts after a step of this length."""
    _load_selection(boundaries, work, length)
    q, is_kept = work.each.there, work.is_kept_there
    keep_groups(boundaries, q, is_kept)
    size = q.shape[0] // boundaries.num_groups
    worst = -1
    best = -1
    for expert in range(q.shape[0]):
        if not is_kept[expert // size]:
            q[expert] = boundaries.fill
        if work.each[expert].inside:
            if worst < 0 or q[expert] <= q[worst]:
                worst = expert
        elif best < 0 or q[expert] > q[best]:
            best = expert
    if best < 0 or worst < 0:
        return False
    return q[best] > q[worst] or (q[best] == q[worst] and best < worst)


@njit(**UNCOUNTED)
def _point(boundaries, work, experts, coefficients, number):
    """The direction of logits that some coefficients of rows stand for."""
    for expert in range(work.each.shape[0]):
        value = coefficients[4] * work.each[expert].with_mean
        for n in range(number):
            value += coefficients[n] * boundaries.gram[experts[n], expert]
        work.each[expert].direction = value


@njit(**UNCOUNTED)
def _shorter_change(boundaries, work, low, length):
    """The step along the direction if it changes the set, shortened; inf if it does not."""
    if not _is_changed(boundaries, work, length):
        return math.inf
    while length - low > RESOLUTION * length:
        middle = (low + length) / 2.0
        if _is_changed(boundaries, work, middle):
            length = middle
        else:
            low = middle
    return length


@njit(**ONCE)
def _first_change(boundaries, work, low, guess, limit):
    """Length of a step along the direction after which the set differs; inf from ``limit`` on.

    Steps begin at ``guess`` and grow; the first that changes the set is shortened by bisection down
    to ``low``, below which nothing changes, or to a share of ``RESOLUTION``. At the step returned
    the rule was evaluated, and chose another set.
    """
    length = max(guess * _BEYOND, SHORTEST)
    if not math.isfinite(length):
        return math.inf
    steps = 0
    while True:
        if length >= limit or steps == _MAX_STEPS:
            return math.inf
        if _is_changed(boundaries, work, length):
            break
        low = length
        length = length * _GROWTH
        steps += 1
    return _shorter_change(boundaries, work, low, length)


#: Bounds that are this near to each other are not brought nearer.
_CLOSE = 1.05
#: Where nothing is known to change, rays are tried at lengths that grow by this factor, so often.
_LEAP, _MAX_LEAPS = 1.6, 96
#: What is looked for in turn: a first change of softmax scores, swaps, other groups.
_FIRST_SWAP, _SWAPS = 0, 1
#: Numbers of a type of their own would be compiled apart: these are typed like all others.
_ONE, _TWO = np.int64(1), np.int64(2)


@njit(**UNCOUNTED)
def _clear(work):
    """Empties the list of barriers."""
    fill(work.search.bounds, math.inf)
    fill(work.search.pair, -1)
    fill(work.search.experts, 0)
    fill(work.search.coefficients, 0.0)


@njit(**UNCOUNTED)
def _add(work, lower, guess, out, entering):
    bounds = work.search.bounds
    if lower < bounds[0]:
        bounds[1] = bounds[0]
        bounds[0] = lower
        work.search.pair[0] = out
        work.search.pair[1] = entering
    elif lower < bounds[1]:
        bounds[1] = lower
    if guess < bounds[2]:
        bounds[2] = guess
        work.search.low_of_nearest = lower
        for n in range(4):
            work.search.nearest[n] = work.search.experts[n]
            work.search.way[n] = work.search.coefficients[n]
        work.search.way[4] = work.search.coefficients[4]


@njit(**UNCOUNTED)
def _add_constraint(boundaries, work, number, gap, always, out, entering, radius):
    slope = _steepest_descent(boundaries, work, number, False)
    lower = _reach_of(boundaries, work, number, gap, slope, radius)
    _add(work, max(lower, always), gap / slope if slope > 0.0 else math.inf, out, entering)


@njit(**UNCOUNTED)
def _add_boundary(boundaries, work, i, j, nearest, out, entering):
    """Adds the direction to the nearest point of a boundary, from both logits at that point."""
    lower, upper, at_i, at_j = nearest
    coefficients = work.search.coefficients
    fill(coefficients, 0.0)
    work.search.experts[0] = i
    work.search.experts[1] = j
    if 0.0 < upper < math.inf:
        du = at_i - work.each[i].z
        dv = at_j - work.each[j].z
        length = boundaries.length[i]
        across = boundaries.across[i, j]
        if length == 0.0:
            coefficients[1] = dv / boundaries.gram[j, j] / upper
        else:
            along = boundaries.gram[i, j] / length
            x = du / length
            of_j = (dv - along * x) / (across * across) if across > 0.0 else 0.0
            coefficients[0] = (x - along * of_j) / length / upper
            coefficients[1] = of_j / upper
    _add(work, lower, upper, out, entering)


@njit(**UNCOUNTED)
def _add_swap(boundaries, work, i, j, radius):
    work.search.experts[0] = i
    work.search.experts[1] = j
    work.search.signs[0] = 1.0
    work.search.signs[1] = -1.0
    gap = max(work.each[i].q - work.each[j].q, 0.0)
    _add_constraint(boundaries, work, _TWO, gap, 0.0, i, j, radius)


@njit(**UNCOUNTED)
def _first(work, marks, mark):
    """The best of the experts with this mark; NOBODY if there is none."""
    first = NOBODY
    for expert in range(work.each.shape[0]):
        if marks[expert] == mark and (first < 0 or work.each[expert].q > work.each[first].q):
            first = expert
    return first


@njit(**ONCE)
def _add_swaps(boundaries, work, members, radius):
    """Adds swaps within the kept groups; for scores of one logit only the nearest, exactly."""
    if not boundaries.is_softmax:
        lower, upper, out, entering, at_out, at_in = nearest_boundary(boundaries, work, members)
        if lower < math.inf:
            nearest = (lower, upper, at_out, at_in)
            _add_boundary(boundaries, work, out, entering, nearest, out, entering)
        return
    _bound_scores(boundaries, work, radius)
    for rank in range(members.shape[0] - 1, NOBODY, NOBODY):
        i = members[rank]
        for j in range(work.each.shape[0]):
            if not work.each[j].is_open or work.each[i].low > work.each[j].high:
                continue
            if boundaries.bias[i] != boundaries.bias[j]:
                _add_swap(boundaries, work, i, j, radius)
                continue
            # probabilities order as logits do
            inverse = boundaries.inverse[i, j]
            distance = max(work.each[i].z - work.each[j].z, 0.0) * inverse
            if distance < NEVER:
                work.search.experts[0] = i
                work.search.experts[1] = j
                fill(work.search.coefficients, 0.0)
                work.search.coefficients[0] = -inverse
                work.search.coefficients[1] = inverse
                _add(work, distance, distance, i, j)


@njit(**UNCOUNTED)
def _add_fill(boundaries, work, expert, sign, radius):
    gap = max(sign * (work.each[expert].q - boundaries.fill), 0.0)
    work.search.experts[0] = expert
    work.search.signs[0] = sign
    if boundaries.is_softmax:
        _add_constraint(boundaries, work, _ONE, gap, 0.0, NOBODY, NOBODY, radius)
        return
    score = boundaries.fill - boundaries.bias[expert]
    there, _ = curve_inverse(boundaries.curve, score, boundaries.curve.own_high - score)
    way = sign * (work.each[expert].z - there)
    length = boundaries.length[expert]
    if gap == 0.0 or (way < math.inf and length > 0.0):
        distance = 0.0 if gap == 0.0 else max(way, 0.0) / length
        fill(work.search.coefficients, 0.0)
        work.search.coefficients[0] = -sign / length if length > 0.0 else 0.0
        _add(work, distance, distance, NOBODY, NOBODY)


@njit(**ONCE)
def _add_fills(boundaries, work, members, radius):
    """Scores that pass the value which masked experts have.

    A chosen expert leaves when it falls to the fill and some masked expert is out; one that is out
    enters when it rises to the fill and some masked expert is chosen.
    """
    if not math.isfinite(boundaries.fill):
        return
    masked_out = False
    masked_in = False
    for expert in range(work.each.shape[0]):
        if not work.each[expert].allowed:
            masked_in |= work.each[expert].inside
            masked_out |= not work.each[expert].inside
    if masked_out:
        for rank in range(members.shape[0]):
            _add_fill(boundaries, work, members[rank], 1.0, radius)
    if masked_in:
        for expert in range(work.each.shape[0]):
            if work.each[expert].is_open:
                _add_fill(boundaries, work, expert, -1.0, radius)


@njit(**UNCOUNTED)
def tops_of(q: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """The largest and the second largest of a range of experts, -1 where there is none."""
    first = start
    for expert in range(start, stop):
        if q[expert] > q[first]:
            first = expert
    second = -1
    for expert in range(start, stop):
        if expert != first and (second < 0 or q[expert] > q[second]):
            second = expert
    return first, second


@njit(**UNCOUNTED)
def _oppose(boundaries, work, ours, theirs):
    """Builds the constraint 'group h overtakes group g'; returns its length."""
    takes = boundaries.takes
    for n in range(takes):
        work.search.experts[n] = ours[n]
        work.search.experts[takes + n] = theirs[n]
        work.search.signs[n] = 1.0
        work.search.signs[takes + n] = -1.0
    return 2 * takes


@njit(**UNCOUNTED)
def _add_rival(boundaries, work, tops, rivals, always, radius):
    if boundaries.takes == 1 and not boundaries.is_softmax:
        i, j = tops[0], rivals[0]
        _add_boundary(
            boundaries, work, i, j, pair_boundary(boundaries, work, i, j, radius), NOBODY, NOBODY
        )
        return
    number = _oppose(boundaries, work, tops, rivals)
    ours = 0.0
    theirs = 0.0
    for n in range(boundaries.takes):
        ours += work.each[tops[n]].q
        theirs += work.each[rivals[n]].q
    gap = max(ours - theirs, 0.0)
    _add_constraint(boundaries, work, number, gap, always, NOBODY, NOBODY, radius)


@njit(**ONCE)
def _add_groups(boundaries, work, radius):
    """Dropped groups that may overtake kept ones.

    A dropped group h overtakes a kept group g only where one of its sets of experts overtakes the
    set that is now the best of g, because the score of g is at least that sum.
    """
    q, low, high = work.each.q, work.each.low, work.each.high
    size = q.shape[0] // boundaries.num_groups
    takes = boundaries.takes
    _bound_scores(boundaries, work, radius)
    for g in range(boundaries.num_groups):
        if not work.is_kept[g]:
            continue
        tops = tops_of(q, g * size, (g + 1) * size)
        least_of_g = _best_sum(low, g * size, (g + 1) * size, takes)
        own = low[tops[0]] + low[tops[1]] if takes == 2 else low[tops[0]]
        best_of_g = _best_sum(q, g * size, (g + 1) * size, takes)
        for h in range(boundaries.num_groups):
            if work.is_kept[h]:
                continue
            start, stop = h * size, (h + 1) * size
            if least_of_g > _best_sum(high, start, stop, takes):
                continue
            slope = boundaries.slopes[g, h]
            highest = _best_sum(high, start, stop, 1)
            gap = max(best_of_g - _best_sum(q, start, stop, takes), 0.0)
            always = gap / slope if slope > 0.0 else math.inf
            for one in range(start, stop):
                if takes == 1:
                    if high[one] >= own:
                        _add_rival(boundaries, work, tops, (one, one), always, radius)
                    continue
                if high[one] + highest < own:
                    continue
                for two in range(one + 1, stop):
                    if high[one] + high[two] >= own:
                        _add_rival(boundaries, work, tops, (one, two), always, radius)


@njit(**ONCE)
def _search(boundaries, work, limit):
    """A verified change through the barrier that seems nearest, or ``limit``."""
    guess = work.search.bounds[2]
    is_nowhere = True
    for n in range(5):
        is_nowhere &= work.search.way[n] == 0.0
    if guess == 0.0 and is_nowhere:
        return 0.0
    _point(boundaries, work, work.search.nearest, work.search.way, 4)
    return min(limit, _first_change(boundaries, work, work.search.low_of_nearest, guess, limit))


@njit(**ONCE)
def _sort_out(boundaries, chosen, work):
    """Marks chosen, allowed and open experts; returns how many chosen ones are in kept groups."""
    size = work.each.shape[0] // boundaries.num_groups
    keep_groups(boundaries, work.each.q, work.is_kept)
    for expert in range(work.each.shape[0]):
        work.each[expert].allowed = work.is_kept[expert // size]
        work.each[expert].is_open = work.each[expert].allowed and not work.each[expert].inside
    number = 0
    for rank in range(chosen.shape[0]):
        if work.each[chosen[rank]].allowed:
            work.members[number] = chosen[rank]
            number += 1
    return number


@njit(**ONCE)
def _along(boundaries, work, number, low, length, far):
    """Shortest step down the constraint that changes the set; ``far`` if none does."""
    for of_logits in (False, True):
        _steepest_descent(boundaries, work, number, of_logits)
        _point(boundaries, work, work.search.experts, work.search.coefficients, number)
        trial = length if far == math.inf else far * (1.0 - RESOLUTION)
        far = min(far, _shorter_change(boundaries, work, low, trial))
    return far


@njit(**ONCE)
def _on_rays(boundaries, work, chosen, low, far):
    """Looks for a change of the set along rays, at growing lengths.

    The last chosen expert against each that is out, each chosen one against the first that is out,
    and the best of each kept group against the best of each dropped one: each way down the
    difference of the scores, and of the logits.
    """
    q = work.each.q
    size = q.shape[0] // boundaries.num_groups
    last, first = chosen[chosen.shape[0] - 1], _first(work, work.each.inside, False)
    if first < 0:
        return far
    length = max(low, SHORTEST)
    for _ in range(_MAX_LEAPS):
        # those that are out, then those that are chosen, then pairs of groups
        for ray in range(q.shape[0] + chosen.shape[0] + boundaries.num_groups**2):
            number = 2
            work.search.signs[0] = 1.0
            work.search.signs[1] = -1.0
            if ray < q.shape[0]:
                if work.each[ray].inside:
                    continue
                work.search.experts[0] = last
                work.search.experts[1] = ray
            elif ray < q.shape[0] + chosen.shape[0]:
                work.search.experts[0] = chosen[ray - q.shape[0]]
                work.search.experts[1] = first
            else:
                pair = ray - q.shape[0] - chosen.shape[0]
                g, h = pair // boundaries.num_groups, pair % boundaries.num_groups
                if not work.is_kept[g] or work.is_kept[h]:
                    continue
                ours = tops_of(q, g * size, (g + 1) * size)
                number = _oppose(boundaries, work, ours, tops_of(q, h * size, (h + 1) * size))
            far = _along(boundaries, work, number, low, length, far)
        if far < math.inf or length > FAR:
            return far
        length *= _LEAP
    return far


@njit(**UNCOUNTED)
def _bracket(boundaries, work, logits, chosen, on_rays):
    """Lower and upper bound of one token; ``work.search.pair`` is the pair if it is known, else -1.

    The pair is known where everything else is farther than the upper bound. 0 and 0 where the set
    is not what the rule makes of these logits: a tie up to rounding. Rays
    take nearly half of the time; they bring the upper bound down and leave the lower one.
    """
    _load_scores(boundaries, logits, work)
    fill(work.each.inside, False)
    fill(work.each.direction, 0.0)
    for rank in range(chosen.shape[0]):
        work.each[chosen[rank]].inside = True
    _clear(work)
    if _is_changed(boundaries, work, 0.0):
        return 0.0, 0.0
    members = work.members[: _sort_out(boundaries, chosen, work)]
    far = math.inf
    for stage in range(3):
        if stage == _FIRST_SWAP:
            first = _first(work, work.each.is_open, True)
            if boundaries.is_softmax and first >= 0 and members.shape[0] > 0:
                _add_swap(boundaries, work, members[-1], first, FAR)
        elif stage == _SWAPS:
            _clear(work)
            radius = min(far, FAR)
            _add_swaps(boundaries, work, members, radius)
            _add_fills(boundaries, work, members, radius)
        elif boundaries.num_kept < boundaries.num_groups:
            # bounds stay, the nearest is looked for again
            work.search.bounds[2] = math.inf
            _add_groups(boundaries, work, min(FAR, far, work.search.bounds[0]))
        if work.search.bounds[2] < far:
            far = _search(boundaries, work, far)
    low = min(far, work.search.bounds[0])
    if on_rays and far > _CLOSE * low:
        far = _on_rays(boundaries, work, chosen, low, far)
    if not (work.search.bounds[0] < far < math.inf and work.search.bounds[1] >= far):
        fill(work.search.pair, -1)
    return min(far, work.search.bounds[0]), far


# ------------------------------------------------------------------------------------------- kernel
@kernel(error_model="numpy")
def _separable(boundaries, work, logits, chosen, on_rays, lower, upper, pair):
    for token in range(logits.shape[0]):
        load_token(boundaries, logits[token], work)
        fill(work.each.is_open, True)
        for rank in range(chosen.shape[1]):
            work.each[chosen[token, rank]].is_open = False
        nearest = nearest_boundary(boundaries, work, chosen[token])
        lower[token], upper[token], pair[token, 0], pair[token, 1] = nearest[:4]


@kernel(error_model="numpy")
def _bounded(boundaries, work, logits, chosen, on_rays, lower, upper, pair):
    for token in range(logits.shape[0]):
        bounds = _bracket(boundaries, work, logits[token], chosen[token], on_rays)
        lower[token], upper[token] = bounds
        pair[token, 0], pair[token, 1] = work.search.pair[0], work.search.pair[1]


def curved_distance(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: CurvedRows,
    on_rays: bool = True,
) -> tuple[
    Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"], Int32[np.ndarray, "tokens 2"]
]:
    r"""Lower and upper bound of the distance, and the nearest boundary (expert out, expert in).

    ``chosen`` is what the rule of ``rows`` makes of ``logits``, in descending order. In units of
    the router input. For scores of one logit without groups,

    .. math:: d(y) = \min_{i \in S,\, j \notin S} d_{ij}, \quad
        d_{ij} = \min \{|y' - y| : f(z_i') + c_i = f(z_j') + c_j\}

    which holds for every increasing f, because the way to another choice crosses some such
    boundary; each d_ij is certified: ``lower >= (1 - 1e-6) upper``, up to the rounding of logits
    and scores. 0 on a boundary and on a permanent tie (equal rows, biases and selection biases);
    inf when every expert is chosen, or no pair can ever tie. Pairs with equal selection biases have
    linear boundaries, those of docs/theory.md A3.

    Groups and softmax have bounds: nothing changes nearer than ``lower``, and the rule chooses
    another set after some step of length ``upper``, which is inf if none is found. Without
    ``on_rays`` it is looked for in fewer directions; ``lower`` is the same. 0 and 0 where the set
    is not what the rule makes of these logits: a tie up to rounding. The pair is -1, -1
    where no boundary exists or the nearest one is not known.

    The input is free to go anywhere: behind a norm it stays on an ellipsoid, and the distance along
    that is no less (docs/theory.md E3).

    Source: docs/theory.md E1, E1b, E2. Oracle in tests: SLSQP on every boundary, the boundary of
    two rows as a function of one logit, and dense searches for another choice.
    """
    lower, upper = np.empty(len(logits)), np.empty(len(logits))
    pair = np.empty((len(logits), 2), dtype=np.int32)
    boundaries = boundaries_of(rows)
    # one layout and type of arguments: each further one would be compiled apart
    arguments = (logits.astype(np.float64, order="C"), chosen.astype(np.int64, order="C"))
    loop = _separable if rows.curve is not None and rows.groups is None else _bounded
    loop(boundaries, work_for(boundaries), *arguments, on_rays, lower, upper, pair)
    return lower, upper, pair
