"""Distance between two choices for the same tokens, whose sets may differ in size."""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int32


def dense_weights(
    chosen: Int32[np.ndarray, "tokens slots"],
    weights: Float64[np.ndarray, "tokens slots"],
    num_experts: int,
) -> Float64[np.ndarray, "tokens experts"]:
    """Routing weights by expert, 0 for those that are not chosen; -1 is an empty slot."""
    dense = np.zeros((len(chosen), num_experts + 1))
    np.put_along_axis(dense, chosen.astype(np.int64), weights, axis=1)  # -1 is the last column
    return dense[:, :-1]


def weight_distance(
    first: Float64[np.ndarray, "tokens experts"], second: Float64[np.ndarray, "tokens experts"]
) -> Float64[np.ndarray, "tokens"]:
    r"""Share of a token's routing weight that two choices put on different experts.

    :math:`\frac12 \sum_e |w_e / \sum w - w'_e / \sum w'|`, 0 to 1: the total variation distance of
    the two mixtures, whatever their scales. At least the share on experts that leave
    (:func:`~moegeom.geometry.noise.weight_moved`); equal to it where the others keep their weights.
    1 where exactly one of the two has no weight at all, 0 where neither has any.
    Weights are at least 0; in size, where a rule lets them be less.
    Oracle in tests: scipy.spatial.distance.cityblock.
    """
    first, second = np.abs(first), np.abs(second)
    totals = first.sum(axis=1), second.sum(axis=1)
    shares = [
        np.divide(dense, total[:, None], out=np.zeros_like(dense), where=total[:, None] > 0.0)
        for dense, total in zip((first, second), totals, strict=True)
    ]
    distance = 0.5 * np.abs(shares[0] - shares[1]).sum(axis=1)
    is_empty = np.stack([total <= 0.0 for total in totals])
    return np.where(is_empty[0] != is_empty[1], 1.0, np.minimum(distance, 1.0))


def same_sets(
    first: Int32[np.ndarray, "tokens slots"], second: Int32[np.ndarray, "tokens others"]
) -> Bool[np.ndarray, "tokens"]:
    """True where both rows hold the same experts, in whatever order; -1 is an empty slot."""
    width = max(first.shape[1], second.shape[1])
    ordered = [
        np.sort(np.pad(chosen, ((0, 0), (0, width - chosen.shape[1])), constant_values=-1), axis=1)
        for chosen in (first, second)
    ]
    return (ordered[0] == ordered[1]).all(axis=1)
