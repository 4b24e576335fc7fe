"""How far along a line a choice changes, compiled."""

from __future__ import annotations

import math

from numba import njit

from moegeom.geometry.boundary.first_change import BEYOND, GROWTH, MAX_STEPS, RESOLUTION, SHORTEST
from moegeom.kernels.cpu._inner import INNER
from moegeom.kernels.cpu.curved.score_curve import curve_at


@njit(**INNER)
def _load_selection(walls, groups, work, direction, length, there):
    if not groups.is_softmax:
        for expert in range(there.shape[0]):
            z = work.z[expert] + length * direction[expert]
            there[expert] = curve_at(walls.curve, z)[0] + walls.bias[expert]
        return
    largest = -math.inf
    for expert in range(there.shape[0]):
        there[expert] = work.z[expert] + length * direction[expert]
        largest = max(largest, there[expert])
    total = 0.0
    for expert in range(there.shape[0]):
        there[expert] = math.exp(there[expert] - largest)
        total += there[expert]
    for expert in range(there.shape[0]):
        there[expert] = there[expert] / total + walls.bias[expert]


@njit(**INNER)
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


@njit(**INNER)
def keep_groups(groups, q, kept):
    """The groups that are kept; of equal ones, the lower index."""
    for group in range(groups.num_groups):
        kept[group] = groups.num_kept == groups.num_groups
    if groups.num_kept == groups.num_groups:
        return
    size = q.shape[0] // groups.num_groups
    for _ in range(groups.num_kept):
        best = -1
        value = -math.inf
        for group in range(groups.num_groups):
            if kept[group]:
                continue
            score = best_sum(q, group * size, (group + 1) * size, groups.takes)
            if best < 0 or score > value:
                best = group
                value = score
        kept[best] = True


@njit(**INNER)
def is_changed(walls, groups, work, scratch, length):
    """Whether the rule chooses other experts after a step of this length."""
    q = scratch.there
    _load_selection(walls, groups, work, scratch.direction, length, q)
    kept = scratch.kept_there
    keep_groups(groups, q, kept)
    size = q.shape[0] // groups.num_groups
    worst = -1
    best = -1
    for expert in range(q.shape[0]):
        if not kept[expert // size]:
            q[expert] = groups.fill
        if scratch.inside[expert]:
            if worst < 0 or q[expert] <= q[worst]:
                worst = expert
        elif best < 0 or q[expert] > q[best]:
            best = expert
    if best < 0 or worst < 0:
        return False
    return q[best] > q[worst] or (q[best] == q[worst] and best < worst)


@njit(**INNER)
def point(walls, scratch, experts, coefficients, number):
    """The direction of logits that some coefficients of rows stand for."""
    gram = walls.gram
    for expert in range(scratch.direction.shape[0]):
        value = coefficients[4] * scratch.mean[expert]
        for n in range(number):
            value += coefficients[n] * gram[experts[n], expert]
        scratch.direction[expert] = value


@njit(**INNER)
def shorter_change(walls, groups, work, scratch, low, length):
    """The step along ``scratch.direction`` if it changes the set, shortened; inf if it does not."""
    if not is_changed(walls, groups, work, scratch, length):
        return math.inf
    while length - low > RESOLUTION * length:
        middle = (low + length) / 2.0
        if is_changed(walls, groups, work, scratch, middle):
            length = middle
        else:
            low = middle
    return length


@njit(**INNER)
def first_change(walls, groups, work, scratch, low, guess, limit):
    """Length of a step along ``scratch.direction`` after which the chosen set differs, or inf."""
    length = max(guess * BEYOND, SHORTEST)
    if not math.isfinite(length):
        return math.inf
    steps = 0
    while True:
        if length >= limit or steps == MAX_STEPS:
            return math.inf
        if is_changed(walls, groups, work, scratch, length):
            break
        low = length
        length = length * GROWTH
        steps += 1
    return shorter_change(walls, groups, work, scratch, low, length)
