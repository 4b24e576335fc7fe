r"""What parts the expert set of an input from others, whatever the rule, in deviations of noise.

A barrier is a difference of scores that is positive as long as the set stays: of a chosen expert
and another one, or of a group that the mask keeps and one whose experts would come in its place.
Its distance, :math:`r = c(z) / |F^T \nabla c|`, is exact for linear rules; for others it is the
tangent's at that point, whose error shrinks with the square of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moegeom.core.router import Rule
from moegeom.core.shapes import Float, Float32, Float64, Int32, Int64
from moegeom.geometry.boundary.curved import as_logits
from moegeom.geometry.boundary.linear import RowDistances
from moegeom.geometry.selection import group_scores, kept_groups, score_slopes, selection_scores
from moegeom.geometry.set_code import chosen_mask

#: Exponents beyond which a crossing counts for nothing, and the share by which the distances of
#: barriers differ that coincide.
NOTHING, COINCIDES = 80.0, 1e-7


@dataclass(frozen=True, eq=False)
class _Scores:
    """Masked scores, their slopes, and of softmax the probabilities whose mean row is taken off.

    ``values`` are those before the mask; ``groups`` are the scores of the groups, ``is_kept`` which
    of them the mask keeps.
    """

    values: Float64[np.ndarray, "points experts"]
    masked: Float64[np.ndarray, "points experts"]
    slopes: Float64[np.ndarray, "points experts"]
    probability: Float64[np.ndarray, "points experts"] | None
    groups: Float64[np.ndarray, "points groups"]
    is_kept: np.ndarray


@dataclass(frozen=True, eq=False)
class Barriers(ABC):
    """The barriers of some cells: those of ``chosen`` around inputs that noise moves.

    ``moves`` are the noisy rows in as few dimensions as they need, ``scale`` how much more the
    noise moves the inputs of each cell. The numbers of barriers are those of the pairs (expert in
    order of rank, other in order of number), then of the pairs of groups.
    """

    rule: Rule
    bias: Float64[np.ndarray, "experts"] | None
    inside: Int64[np.ndarray, "cells k"]
    outside: Int64[np.ndarray, "cells others"]
    scale: Float64[np.ndarray, "cells"]
    moves: Float64[np.ndarray, "experts dims"]
    distances: RowDistances

    @classmethod
    def of(
        cls,
        rule: Rule,
        bias: Float64[np.ndarray, "experts"] | None,
        chosen: Int32[np.ndarray, "cells k"],
        rows: Float64[np.ndarray, "experts noises"],
        distances: RowDistances,
        scale: Float64[np.ndarray, "cells"] | None = None,
    ) -> Barriers:
        """Of logits that hold every bias of a linear rule; else ``bias`` is added to scores."""
        outside = np.nonzero(~chosen_mask(chosen, len(rows)))[1].reshape(len(chosen), -1)
        if rule.is_affine or bias is None or not bias.any():
            rule, bias = as_logits(rule), None
        scale = np.ones(len(chosen)) if scale is None else scale
        # scores of one logit see the mean of the rows, which differences of logits do not
        sees_mean = not (rule.is_affine or rule.score == "softmax")
        moves = np.linalg.qr((rows if sees_mean else rows - rows.mean(axis=0)).T)[1].T
        return cls(rule, bias, chosen.astype(np.int64), outside, scale, moves, distances)

    @cached_property
    def _short_moves(self) -> Float32[np.ndarray, "experts dims"]:
        return self.moves.astype(np.float32)

    @cached_property
    def _gram(self) -> Float64[np.ndarray, "experts experts"]:
        return self.moves @ self.moves.T

    @cached_property
    def _of_pairs(self) -> Float64[np.ndarray, "cells k others"]:
        """Inverse deviations of linear rules, products of rows of others."""
        of = self.distances.inverse if self.rule.is_affine else self._gram
        return of[self.inside[:, :, None], self.outside[:, None, :]]

    @property
    def is_exact(self) -> bool:
        """Whether distances are exact: of linear rules."""
        return self.rule.is_affine

    @property
    def num_pairs(self) -> int:
        """How many barriers are between two experts."""
        return self.inside.shape[1] * self.outside.shape[1]

    def moved(
        self, cell: Int64[np.ndarray, "points"], noise: Float[np.ndarray, "points dims"]
    ) -> Float64[np.ndarray, "points experts"]:
        """What normal numbers do to the logits of inputs of these cells, in their precision."""
        moves = self.moves if noise.dtype == np.float64 else self._short_moves
        return self.scale[cell, None] * (noise @ moves.T)

    @property
    def num_barriers(self) -> int:
        """How many barriers each cell has, of which some may be nowhere."""
        groups = self.rule.groups
        return self.num_pairs + (0 if groups is None else groups.num_groups**2)

    @abstractmethod
    def sigmas(
        self,
        cell: Int64[np.ndarray, "points"],
        logits: Float64[np.ndarray, "points experts"],
        out: Float64[np.ndarray, "points barriers"] | None = None,
    ) -> Float64[np.ndarray, "points barriers"]:
        """The distance of each barrier of these cells, in deviations; not positive where another
        set is chosen, inf where there is none. Into ``out``, if that is there.
        """

    @abstractmethod
    def staying(
        self,
        before: Float64[np.ndarray, "paths barriers"],
        after: Float64[np.ndarray, "paths barriers"],
        step: float,
    ) -> Float64[np.ndarray, "2 paths"]:
        r"""Least and largest chance that none of the barriers is crossed in a step, from the
        distances before and after: bridges that reach 0 with probability
        :math:`e^{-2 a_0 a_1 / h}`.
        """

    @abstractmethod
    def two_least(
        self, ahead: Float64[np.ndarray, "walks barriers"], is_start: bool
    ) -> tuple[
        Int64[np.ndarray, "walks"], Float64[np.ndarray, "walks"], Float64[np.ndarray, "walks"]
    ]:
        """The nearest barrier, its distance and that of the next one: barriers of equal rows
        coincide and are one, but at the start, where others may be as far.
        """

    def exchange(
        self,
        cell: Int64[np.ndarray, "points"],
        logits: Float64[np.ndarray, "points experts"],
        barrier: Int64[np.ndarray, "points"],
    ) -> Int32[np.ndarray, "points 2"]:
        """Which expert leaves and which one comes; of groups the last and the best."""
        out, into = np.divmod(barrier % max(self.num_pairs, 1), max(self.outside.shape[1], 1))
        pair = np.stack([self.inside[cell, out], self.outside[cell, into]], axis=1)
        swap = np.flatnonzero(barrier >= self.num_pairs)
        if len(swap):
            scores, (leaving, coming) = self._scores(logits[swap]), self._groups_of(barrier[swap])
            of = np.arange(logits.shape[1]) // (logits.shape[1] // scores.groups.shape[1])
            ours = self.inside[cell[swap]]
            masked = np.take_along_axis(scores.masked, ours, axis=1)
            is_there = of[ours] == leaving[:, None]
            masked = np.where(is_there | ~is_there.any(axis=1, keepdims=True), masked, np.inf)
            row = np.arange(len(swap))
            pair[swap, 0] = ours[row, masked.argmin(axis=1)]
            others = np.where(of == coming[:, None], scores.values, -np.inf)
            pair[swap, 1] = others.argmax(axis=1)
        return pair.astype(np.int32)

    def normals(
        self,
        cell: Int64[np.ndarray, "points"],
        logits: Float64[np.ndarray, "points experts"],
        barrier: Int64[np.ndarray, "points"],
    ) -> Float64[np.ndarray, "points dims"]:
        """The way off a barrier in the dimensions of ``moves``: of length 1, or 0 without one."""
        points, experts = logits.shape
        row, along = np.arange(points), np.zeros((points, experts))
        pair = self.exchange(cell, logits, barrier).astype(np.int64)
        along[row, pair[:, 0]], along[row, pair[:, 1]] = 1.0, -1.0
        if not self.rule.is_affine:
            scores = self._scores(logits)
            swap = np.flatnonzero(barrier >= self.num_pairs)
            along[swap] = 0.0
            sides = zip(self._groups_of(barrier[swap]), (1.0, -1.0), strict=True)
            for group, sign in sides if len(swap) else ():
                tops = np.take_along_axis(
                    self._tops(scores.values[swap]), group[:, None, None], axis=1
                )
                for place in range(tops.shape[2]):
                    along[swap, tops[:, 0, place]] = sign
            along *= scores.slopes
            if scores.probability is not None:
                along -= along.sum(axis=1, keepdims=True) * scores.probability
        normal = along @ self.moves
        length = np.sqrt((normal**2).sum(axis=1, keepdims=True))
        return np.divide(normal, length, out=np.zeros_like(normal), where=length > 0.0)

    # ------------------------------------------------------------------------- curved and grouped
    def _scores(self, logits: Float64[np.ndarray, "points experts"]) -> _Scores:
        values = selection_scores(logits, self.rule, self.bias)
        slopes, probability = score_slopes(logits, self.rule), None
        if self.rule.score == "softmax":
            probability = selection_scores(logits, self.rule, None)
        groups, masked = self.rule.groups, values
        of_groups, is_kept = np.empty((len(logits), 0)), np.empty((len(logits), 0), bool)
        if groups is not None:
            of_groups = group_scores(values, groups)
            is_kept = kept_groups(of_groups, groups.num_kept)
            is_unmasked = np.repeat(is_kept, values.shape[1] // groups.num_groups, axis=1)
            masked = np.where(is_unmasked, values, groups.fill)
        return _Scores(values, masked, slopes, probability, of_groups, is_kept)

    def _tops(
        self, values: Float64[np.ndarray, "points experts"]
    ) -> Int64[np.ndarray, "points groups best"]:
        """The experts whose scores are that of each group."""
        groups = self.rule.groups
        assert groups is not None
        size = values.shape[1] // groups.num_groups
        best = 1 if groups.score == "max" or size == 1 else 2
        of = values.reshape(len(values), groups.num_groups, size)
        first = np.argpartition(-of, best - 1, axis=2)[:, :, :best]
        return first + size * np.arange(groups.num_groups)[None, :, None]

    def _groups_of(self, barrier: Int64[np.ndarray, "swaps"]) -> tuple[np.ndarray, np.ndarray]:
        """The group that goes and the one that comes."""
        groups = self.rule.groups
        number = 1 if groups is None else groups.num_groups
        return np.divmod(barrier - self.num_pairs, number)
