"""Which chosen sets a row of selection scores admits, where some of the scores are equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Float64, Integer

#: How equal scores are told apart.
Ties = Literal["lowest", "highest", "random"]

TIES: tuple[Ties, ...] = ("lowest", "highest", "random")


@dataclass(frozen=True, eq=False)
class AdmittedSets:
    """Whether a set is one that the scores admit, and how many they admit: 1 without a tie.

    ``is_lowest`` and ``is_highest``: whether it is the one in which of equal experts those with the
    lowest, or the highest, numbers are taken.
    """

    is_admitted: Bool[np.ndarray, "tokens"]
    num_sets: Float64[np.ndarray, "tokens"]
    is_lowest: Bool[np.ndarray, "tokens"]
    is_highest: Bool[np.ndarray, "tokens"]

    def credit(self, ties: Ties) -> Float64[np.ndarray, "tokens"]:
        """Probability of the set when ties are broken so: 0, 1, or 1 / ``num_sets`` at random."""
        if ties == "random":
            return np.where(self.is_admitted, 1.0 / self.num_sets, 0.0)
        return (self.is_lowest if ties == "lowest" else self.is_highest).astype(np.float64)


def admitted_sets(
    selection: Float[np.ndarray, "tokens experts"], chosen: Integer[np.ndarray, "tokens k"]
) -> AdmittedSets:
    r"""Whether each set is a top-k of its scores under some way of breaking ties.

    With v the k-th largest score: every expert above v is chosen, all others are at v. Of the ties
    at v, :math:`n = |\{q = v\}|`, :math:`m = k - |\{q > v\}|` are taken, in :math:`\binom{n}{m}`
    ways. A token with a score that is nan admits nothing, in one way. ``chosen`` holds distinct
    experts in any order. Oracle in tests: all subsets of six experts.
    """
    from scipy.special import comb

    k, experts = chosen.shape[1], selection.shape[1]
    least = np.partition(selection, experts - k, axis=1)[:, experts - k, None]
    ids = chosen.astype(np.int64)
    own = np.take_along_axis(selection, ids, axis=1)
    is_equal = selection == least
    num_above, num_equal = (selection > least).sum(axis=1), is_equal.sum(axis=1)
    num_taken = k - num_above
    is_known = ~np.isnan(selection).any(axis=1)
    is_admitted = is_known & (own >= least).all(axis=1)
    is_admitted &= (own > least).sum(axis=1) == num_above
    # the number of a tied expert among those that are tied, from 1
    rank = np.take_along_axis(is_equal.cumsum(axis=1), ids, axis=1)
    is_tied = own == least
    first = (~is_tied | (rank <= num_taken[:, None])).all(axis=1)
    last = (~is_tied | (rank > (num_equal - num_taken)[:, None])).all(axis=1)
    with np.errstate(over="ignore"):  # beyond 1e308 ways is no way
        num_sets = np.where(is_known, np.maximum(comb(num_equal, num_taken), 1.0), 1.0)
    return AdmittedSets(is_admitted, num_sets, is_admitted & first, is_admitted & last)
