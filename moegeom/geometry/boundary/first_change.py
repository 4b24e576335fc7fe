"""How far along a line the chosen set of a token really changes, by the rule itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float64, Int32

from moegeom.geometry.boundary.curved_rows import CurvedRows
from moegeom.geometry.selection.logit_map import mapped_logits
from moegeom.geometry.selection.mask import group_mask
from moegeom.geometry.selection.pick import top_k
from moegeom.geometry.selection.score import SCORES

#: A length is found up to this share, unless nothing is known to change before it.
RESOLUTION = 1e-3
#: A first step reaches a little beyond where a wall is thought to be.
BEYOND = 1.0 + 1e-9
#: Steps grow by this factor until something changes.
GROWTH = 1.25
MAX_STEPS = 200
#: Bounds that are this near to each other are not brought nearer.
CLOSE = 1.05
#: Where nothing is known to change, rays are tried at lengths that grow by this factor, so often.
LEAP, MAX_LEAPS = 1.6, 96
#: Where a wall is touched, steps begin here, in units of the router input.
SHORTEST = 1e-12


def is_changed(
    z: Float64[np.ndarray, "experts"], chosen: Int32[np.ndarray, "k"], rows: CurvedRows
) -> bool:
    """Whether the rule chooses other experts than these; logits are multiplied already."""
    rule = rows.rule
    selection = SCORES[rule.score](mapped_logits(z[None], rows.cap)) + rows.bias
    if rule.groups is not None:
        selection = group_mask(selection, rule.groups)
    found = top_k(selection, len(chosen))[0]
    return set(found.tolist()) != set(chosen.tolist())


def shorter_change(is_changed_at: Callable[[float], bool], low: float, length: float) -> float:
    """The step of this length if it changes the set, shortened by bisection; inf if it does not."""
    if not is_changed_at(length):
        return math.inf
    while length - low > RESOLUTION * length:
        middle = (low + length) / 2.0
        if is_changed_at(middle):
            length = middle
        else:
            low = middle
    return length


def first_change(
    is_changed_at: Callable[[float], bool], low: float, guess: float, limit: float
) -> float:
    """Length of a step after which the chosen set differs; inf if none is found below ``limit``.

    Steps begin at ``guess`` and grow; the first that changes the set is shortened by bisection
    down to ``low``, below which nothing changes, or to a share of ``RESOLUTION``. The step returned
    is one at which the rule was evaluated, and chose another set.
    """
    length = max(guess * BEYOND, SHORTEST)
    if not math.isfinite(length):
        return math.inf
    for _ in range(MAX_STEPS):
        if length >= limit:
            return math.inf
        if is_changed_at(length):
            break
        low, length = length, length * GROWTH
    else:
        return math.inf
    return shorter_change(is_changed_at, low, length)
