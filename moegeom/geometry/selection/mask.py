"""Group masks: only experts of the best groups may be chosen."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Float64

from moegeom.core.router import GroupMask


def group_scores(
    selection: Float[np.ndarray, "tokens experts"], groups: GroupMask
) -> Float64[np.ndarray, "tokens groups"]:
    r"""Score of each group: :math:`T_g = \max_{i \in g} q_i`, or the sum of the two largest.

    Experts are split into ``num_groups`` runs of equal length. A group of one expert has its own
    score in both variants. Source: docs/theory.md E2 (DeepSeek-V2: max; V3: top2_sum).
    """
    tokens, experts = selection.shape
    grouped = selection.astype(np.float64).reshape(
        tokens, groups.num_groups, experts // groups.num_groups
    )
    if groups.score == "max" or grouped.shape[2] == 1:
        return grouped.max(axis=2)
    return np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)


def kept_groups(
    scores: Float64[np.ndarray, "tokens groups"], num_kept: int
) -> Bool[np.ndarray, "tokens groups"]:
    """True for the ``num_kept`` best groups of each token; equal groups: the lower index wins."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :num_kept]
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, order, True, axis=1)
    return kept


def group_mask(
    selection: Float[np.ndarray, "tokens experts"], groups: GroupMask
) -> Float64[np.ndarray, "tokens experts"]:
    """Selection scores with every expert outside the kept groups set to ``groups.fill``.

    The fill is a fact of the code that a family runs on: 0.0 and -inf choose differently as soon
    as a kept score is negative (docs/theory.md E2).
    """
    kept = kept_groups(group_scores(selection, groups), groups.num_kept)
    allowed = np.repeat(kept, selection.shape[1] // groups.num_groups, axis=1)
    return np.where(allowed, selection.astype(np.float64), groups.fill)


def fill_decides(last: Float[np.ndarray, "tokens"], fill: float) -> Bool[np.ndarray, "tokens"]:
    """True where masking with 0.0 and with -inf choose different sets.

    ``last`` is the masked selection score of the last chosen expert, ``fill`` what masks. A masked
    expert at 0.0 beats every kept one below zero: with -inf the sets differ where the last chosen
    score is negative, with 0.0 where it is 0, which is a masked expert's (or negative, when fewer
    are masked than wanted). A kept score of exactly 0 counts as a masked one. nan: nothing is
    masked, so False everywhere.
    Source: docs/theory.md E2. Oracle in tests: the rule with the other fill.
    """
    if np.isnan(fill):
        return np.zeros(len(last), dtype=bool)
    return last < 0.0 if np.isneginf(fill) else last <= 0.0


def group_margin(
    selection: Float[np.ndarray, "tokens experts"], groups: GroupMask
) -> Float64[np.ndarray, "tokens"]:
    """Score of the last kept group minus that of the first dropped one; inf when none is dropped.

    Source: docs/theory.md E2 (`gap_group`), fixture `group_gap`.
    """
    if groups.num_kept == groups.num_groups:
        return np.full(selection.shape[0], np.inf)
    descending = -np.sort(-group_scores(selection, groups), axis=1)
    return descending[:, groups.num_kept - 1] - descending[:, groups.num_kept]
