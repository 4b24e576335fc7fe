"""Group-limited selection."""

from __future__ import annotations

import numpy as np
from numba import njit

from moegeom.core.router import GroupMask


@njit(nogil=True, cache=True)
def _mask(selection, num_groups, num_kept, is_sum_of_two, fill, masked, margin):
    tokens, experts = selection.shape
    size = experts // num_groups
    scores = np.empty(num_groups)
    kept = np.empty(num_groups, dtype=np.bool_)
    for token in range(tokens):
        for group in range(num_groups):
            first = -np.inf
            second = -np.inf
            for expert in range(group * size, (group + 1) * size):
                value = selection[token, expert]
                if value > first:
                    second = first
                    first = value
                elif value > second:
                    second = value
            scores[group] = first + second if is_sum_of_two and size > 1 else first
            kept[group] = False
        last = np.inf
        for _ in range(num_kept):
            best = -1
            for group in range(num_groups):
                # strictly greater: of equal groups the lower index is kept
                if not kept[group] and (best < 0 or scores[group] > scores[best]):
                    best = group
            kept[best] = True
            last = scores[best]
        following = -np.inf
        for group in range(num_groups):
            if not kept[group]:
                following = max(following, scores[group])
            for expert in range(group * size, (group + 1) * size):
                masked[token, expert] = selection[token, expert] if kept[group] else fill
        margin[token] = last - following


def group_mask(selection: np.ndarray, groups: GroupMask) -> tuple[np.ndarray, np.ndarray]:
    """Masked selection scores and the group margin."""
    masked = np.empty_like(selection)
    margin = np.empty(len(selection))
    is_sum = groups.score == "top2_sum"
    _mask(selection, groups.num_groups, groups.num_kept, is_sum, groups.fill, masked, margin)
    return masked, margin
