"""Gates with a threshold: every expert whose logit is above it runs."""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float, Float64


def threshold_for(logits: Float[np.ndarray, "tokens experts"], experts: float) -> float:
    r"""The threshold above which a token has ``experts`` logits in the mean.

    :math:`\theta = (z_{(m)} + z_{(m+1)}) / 2` of all logits in descending order, m = round(T * K),
    so that m / T experts run if the two differ, else those strictly above. The largest logit for
    m = 0, and just below the least for all. In units of the logit.

    Raises
    ------
    ValueError
        For a mean that is not between 0 and the number of experts.
    Oracle in tests: counting.
    """
    pool = logits.astype(np.float64).ravel()
    count = round(len(logits) * experts)
    if not pool.size or not 0 <= count <= pool.size:
        raise ValueError(f"{experts:g} of {logits.shape[1]} experts")
    if count == 0:
        return float(pool.max())
    if count == pool.size:
        return float(np.nextafter(pool.min(), -np.inf))
    last = pool.size - count  # place of the least logit above, ascending
    return float(np.partition(pool, (last - 1, last))[last - 1 : last + 1].mean())


def relu_gate(
    logits: Float[np.ndarray, "tokens experts"], threshold: float
) -> Float64[np.ndarray, "tokens experts"]:
    r"""Weights :math:`\max(z_i - \theta, 0)`; an expert runs where its weight is above 0.

    Continuous: a weight is 0 where its expert starts. A token may have none.
    Oracle in tests: torch.relu.
    """
    return np.maximum(logits.astype(np.float64) - threshold, 0.0)


def threshold_distance(
    logits: Float[np.ndarray, "tokens experts"],
    row_norms: Float64[np.ndarray, "experts"],
    threshold: float,
) -> Float64[np.ndarray, "tokens"]:
    r"""Distance to the nearest router input with another set, :math:`\min_e |z_e - \theta|/|w_e|`.

    The set changes where a logit crosses the threshold, on one of E hyperplanes. In units of the
    router input. Rows of zeros, whose logit never moves, have no boundary; inf when all are such.
    Oracle in tests: the nearest point of each hyperplane.
    """
    gap = np.abs(logits.astype(np.float64) - threshold)
    quotient = np.divide(gap, row_norms, out=np.full(gap.shape, np.inf), where=row_norms > 0.0)
    return quotient.min(axis=1, initial=np.inf)
