"""Which chosen sets a row of selection scores admits, where some of the scores are equal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Integer


@dataclass(frozen=True, eq=False)
class AdmittedSets:
    """Whether a set is one that the scores admit, and how many they admit: 1 without a tie."""

    is_admitted: Bool[np.ndarray, "tokens"]
    num_sets: Float64[np.ndarray, "tokens"]

    @property
    def credit(self) -> Float64[np.ndarray, "tokens"]:
        """Probability of the set when ties fall at random: 0 or 1 / ``num_sets``."""
        return np.where(self.is_admitted, 1.0 / self.num_sets, 0.0)


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
    own = np.take_along_axis(selection, chosen.astype(np.int64), axis=1)
    num_above = (selection > least).sum(axis=1)
    num_equal = (selection == least).sum(axis=1)
    is_admitted = (own >= least).all(axis=1) & ((own > least).sum(axis=1) == num_above)
    with np.errstate(over="ignore"):  # beyond 1e308 ways is no way
        num_sets = np.maximum(comb(num_equal, k - num_above), 1.0)
    is_known = ~np.isnan(selection).any(axis=1)
    return AdmittedSets(is_admitted & is_known, np.where(is_known, num_sets, 1.0))
