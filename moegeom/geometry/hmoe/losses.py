"""How far the parameters of a fitted mixture are from the true ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float64, Int64
from moegeom.geometry.hmoe.activation import SIGMOID, Activation
from moegeom.geometry.hmoe.mixture import Mixture, centred
from moegeom.geometry.hmoe.regression import Position, channel_functions


def voronoi_cells(
    fitted: Float64[np.ndarray, "samples heads channels"],
    true: Float64[np.ndarray, "samples true_heads true_channels"],
) -> Int64[np.ndarray, "heads channels"]:
    r"""Of each fitted channel, the number h K* + k of the nearest true one.

    Nearest in the mean square over the samples of what channels give; equal ones go to the lowest
    number. S2 prints the same index on both sides, K* for K and a missing star (F-20).
    Source: S2 section 3; docs/theory.md C3. Oracle in tests: scipy.spatial.distance.cdist.
    """
    channels = fitted.reshape(len(fitted), -1)
    true_channels = true.reshape(len(true), -1)
    distances = np.stack([((channels - one[:, None]) ** 2).mean(axis=0) for one in true_channels.T])
    return distances.argmin(axis=0).reshape(fitted.shape[1:])


def matched_experts(
    fitted: Mixture, true: Mixture, at: tuple[int, int], of: tuple[int, int]
) -> tuple[Float64[np.ndarray, "experts"], Float64[np.ndarray, "experts"]]:
    r"""Distances of scores and of expert vectors when the experts of two heads are matched best.

    The permutation has the least :math:`\sum_i \lVert \Delta M_i \rVert^2 + \lVert \Delta a_i
    \rVert^2`; S2 takes the nearest, which need not be a permutation (F-20). ``at`` and ``of`` are
    (head, channel) of the fitted and of the true mixture. Source: docs/theory.md C3.
    Oracle in tests: all permutations.
    """
    from scipy.optimize import linear_sum_assignment

    (head, channel), (true_head, true_channel) = at, of
    score = fitted.scores[head][:, None] - true.scores[true_head]
    expert = fitted.experts[head, :, channel][:, None] - true.experts[true_head, :, true_channel]
    score_square = (score**2).sum(axis=(2, 3))
    expert_square = (expert**2).sum(axis=2)
    pairs = linear_sum_assignment(score_square + expert_square)
    return np.sqrt(score_square[pairs]), np.sqrt(expert_square[pairs])


@dataclass(frozen=True, eq=False)
class Matched:
    """A fitted mixture beside the true one: cells, and distances of matched experts."""

    weights: Float64[np.ndarray, "fitted"]
    true_weights: Float64[np.ndarray, "true"]
    cell: Int64[np.ndarray, "fitted"]
    score_distance: Float64[np.ndarray, "fitted experts"]
    expert_distance: Float64[np.ndarray, "fitted experts"]

    def loss(self, power: Float64[np.ndarray, "fitted"]) -> float:
        r"""Misplaced weight, and :math:`|\omega'| R(r)` with the power r of each fitted channel."""
        cell_weights = np.bincount(self.cell, self.weights, len(self.true_weights))
        r = power[:, None]
        apart = (self.score_distance**r + self.expert_distance**r).sum(axis=1)
        return float(np.abs(cell_weights - self.true_weights).sum() + np.abs(self.weights) @ apart)


def matched(
    fitted: Mixture,
    true: Mixture,
    inputs: Float64[np.ndarray, "samples dims"],
    position: Position = "none",
    activation: Activation = SIGMOID,
) -> Matched:
    """Cells and distances between centred parameters, for both losses."""
    fitted, true = centred(fitted), centred(true)
    cell = voronoi_cells(
        channel_functions(fitted, inputs, position, activation),
        channel_functions(true, inputs, position, activation),
    )
    pairs = [
        matched_experts(fitted, true, place, divmod(int(cell[place]), true.num_channels))
        for place in np.ndindex(cell.shape)
    ]
    score, expert = (np.stack(parts) for parts in zip(*pairs, strict=True))
    return Matched(fitted.weights.ravel(), true.weights.ravel(), cell.ravel(), score, expert)


def loss_1(
    fitted: Mixture,
    true: Mixture,
    inputs: Float64[np.ndarray, "samples dims"],
    power: float,
    position: Position = "none",
    activation: Activation = SIGMOID,
) -> float:
    r"""L_{1,r}: :math:`\sum_{hk} |\sum_{\text{cell}} \omega' - \omega^*| + \sum \omega' R(r)`,
    :math:`R(r) = \sum_i \lVert\Delta M_i\rVert^r + \lVert\Delta a_i\rVert^r`.

    Centred scores, cells of :func:`voronoi_cells` and matches of :func:`matched_experts`. An empty
    cell costs its weight. S2 assumes weights of at least 0 (A.2); a fitted one below 0 counts by
    its absolute value in the second sum. 0 for the same parameters in any order.
    Source: S2 section 3; docs/theory.md C3. Oracle in tests: worked numbers, brute force.
    """
    match = matched(fitted, true, inputs, position, activation)
    return match.loss(np.full(len(match.weights), power))


def loss_2(
    fitted: Mixture,
    true: Mixture,
    inputs: Float64[np.ndarray, "samples dims"],
    position: Position = "none",
    activation: Activation = SIGMOID,
) -> float:
    """L_2: as :func:`loss_1` with r = 1 in cells of one fitted channel and 2 in those of several.

    Source: S2 section 4.1; docs/theory.md C3. Oracle in tests: worked numbers, brute force.
    """
    match = matched(fitted, true, inputs, position, activation)
    members = np.bincount(match.cell, minlength=len(match.true_weights))
    return match.loss(np.where(members[match.cell] == 1, 1.0, 2.0))
