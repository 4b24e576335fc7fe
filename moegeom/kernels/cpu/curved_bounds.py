r"""What a token's scores can do within a distance, and what the rule makes of them after a step.

Selection scores q have the slopes :math:`\nabla q_e = s_e (w_e - \bar w)`, with s the slope of the
score, or the probability p for softmax, and :math:`\bar w = \sum_a p_a w_a` for softmax, else 0,
known by its products with the rows and with itself. The log-odds of softmax,
:math:`\log p_e / (1 - p_e)`, have the slope :math:`w_e` less a mean of the other rows.

A constraint is a signed sum of the scores of up to four experts; what a direction does to logits
is given by coefficients of their rows and, last, one of the mean row.

Source: docs/theory.md E1b.
"""

from __future__ import annotations

import math

from numba import njit

from moegeom.kernels.cpu import ONCE, UNCOUNTED
from moegeom.kernels.cpu.curved_boundaries import fill, load_token
from moegeom.kernels.cpu.score_curve import curve_at

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
def load_scores(boundaries, logits, work):
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
def bound_scores(boundaries, work, radius):
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
def reach_of(boundaries, work, number, gap, slope, radius):
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
def steepest_descent(boundaries, work, number, of_logits):
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
def best_sum(values, start, stop, takes):
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
def keep_groups(boundaries, q, is_kept):
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
            score = best_sum(q, group * size, (group + 1) * size, boundaries.takes)
            if best < 0 or score > value:
                best = group
                value = score
        is_kept[best] = True


@njit(**UNCOUNTED)
def is_changed(boundaries, work, length):
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
def point(boundaries, work, experts, coefficients, number):
    """The direction of logits that some coefficients of rows stand for."""
    for expert in range(work.each.shape[0]):
        value = coefficients[4] * work.each[expert].with_mean
        for n in range(number):
            value += coefficients[n] * boundaries.gram[experts[n], expert]
        work.each[expert].direction = value


@njit(**UNCOUNTED)
def shorter_change(boundaries, work, low, length):
    """The step along the direction if it changes the set, shortened; inf if it does not."""
    if not is_changed(boundaries, work, length):
        return math.inf
    while length - low > RESOLUTION * length:
        middle = (low + length) / 2.0
        if is_changed(boundaries, work, middle):
            length = middle
        else:
            low = middle
    return length


@njit(**ONCE)
def first_change(boundaries, work, low, guess, limit):
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
        if is_changed(boundaries, work, length):
            break
        low = length
        length = length * _GROWTH
        steps += 1
    return shorter_change(boundaries, work, low, length)
