r"""Distance from a centre to a routing cell or facet: the reference, in float64 with proved bounds.

.. math:: \min |y|^2 \quad\text{s.t.}\quad a_m y + g_m \ge 0, \qquad a_{ij} = w_i - w_j, \;
   g_{ij} = z_i(c) - z_j(c)

for i in S and j not in S, with equality for the pair that a facet exchanges. Any multipliers
:math:`\lambda \ge 0` (of either sign for the equation) prove, by weak duality,

.. math:: |y| \ge -\lambda g \,/\, |\textstyle\sum_m \lambda_m a_m|

for every y that satisfies the constraints, and any point that satisfies them proves the other side.
Rounding is bounded as in a dot product of n terms, :math:`\gamma_n = n u`, each n twice what it
needs to be. Source: Goldfarb and Idnani 1983; docs/theory.md G2. Oracle in the tests: the
least distance program of Lawson and Hanson, by NNLS.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import numpy as np
from jaxtyping import Float64

from moegeom.studies.cells.exact.dictionary import Arrangement
from moegeom.studies.cells.exact.exact_nearest import exact_nearest, root_bracket

#: Unit roundoff.
_UNIT = 2.0**-53

#: What is added to lengths, whose squares may have vanished.
_TINY = 1e-150

#: How far inside a point is looked for that no rounding can take out, relative to the scale.
_STEPS = (2.0**-36, 2.0**-26, 2.0**-16)


@dataclass(frozen=True, eq=False)
class Nearest:
    """The nearest point of a closed cell or facet, and a proved bracket of its distance.

    ``point`` and ``distance`` are as good as float64 gets them; ``pairs`` are the constraints that
    hold them, ``multipliers`` their weights. ``proof`` is what proved the bracket. Where nothing
    satisfies the constraints the distance and its bracket are infinite, proved exactly, the point
    is NaN, and pairs and multipliers are those of Farkas.
    """

    point: Float64[np.ndarray, "dims"]
    distance: float
    lower: float
    upper: float
    pairs: tuple[tuple[int, int], ...]
    multipliers: Float64[np.ndarray, "active"]
    proof: Literal["float64", "exact"]


def nearest(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    expert_set: Collection[int],
    centre: Float64[np.ndarray, "dims"],
    exchanged: tuple[int, int] | None = None,
) -> Nearest:
    """The nearest point of the closed cell; with a pair (out, into), of the facet where they tie.

    The bracket is that of float64 where a point strictly inside can be proved near the foot, and
    of exact arithmetic where not: then it is a rounded square root.
    """
    shift, error = shifted(weight, bias, centre)
    problem = _Problem(weight, shift, error, tuple(expert_set), exchanged)
    solved = problem.solve()
    if solved is not None:
        step, pairs, multipliers = solved
        upper = problem.upper(step)
        if upper < math.inf:
            lower = min(problem.lower(pairs, multipliers), upper)
            distance = min(max(float(np.linalg.norm(step)), lower), upper)
            weights = np.array(multipliers)
            point = centre + step
            return Nearest(point, distance, lower, upper, tuple(pairs), weights, "float64")
    return _settled(weight, bias, expert_set, centre, exchanged)


def shifted(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    centre: Float64[np.ndarray, "dims"],
) -> tuple[Float64[np.ndarray, "experts"], Float64[np.ndarray, "experts"]]:
    """Logits at the centre, and bounds of their rounding; none where the centre is 0."""
    terms = weight * centre
    reach = np.abs(bias) + np.abs(terms).sum(axis=1)
    gamma = 2.0 * (weight.shape[1] + 2) * _UNIT if terms.any() else 0.0
    return bias + terms.sum(axis=1), gamma * reach


def _settled(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    expert_set: Collection[int],
    centre: Float64[np.ndarray, "dims"],
    exchanged: tuple[int, int] | None,
) -> Nearest:
    found = exact_nearest(
        arrangement_of(weight, bias),
        frozenset(expert_set),
        [Fraction(value) for value in centre.tolist()],
        exchanged,
    )
    weights = np.array([float(value) for value in found.multipliers])
    if found.point is None or found.squared is None:
        nowhere = np.full(len(centre), np.nan)
        return Nearest(nowhere, math.inf, math.inf, math.inf, found.pairs, weights, "exact")
    lower, upper = root_bracket(found.squared)
    point = np.array([float(value) for value in found.point])
    middle = lower + (upper - lower) / 2
    return Nearest(point, middle, lower, upper, found.pairs, weights, "exact")


def arrangement_of(
    weight: Float64[np.ndarray, "experts dims"], bias: Float64[np.ndarray, "experts"]
) -> Arrangement:
    """The same numbers as fractions."""
    rows = [[Fraction(value) for value in row] for row in weight.tolist()]
    return Arrangement(rows, [Fraction(value) for value in bias.tolist()])


@dataclass(eq=False)
class _Problem:
    """The quadratic program around the centre."""

    weight: Float64[np.ndarray, "experts dims"]
    shift: Float64[np.ndarray, "experts"]
    error: Float64[np.ndarray, "experts"]
    chosen: tuple[int, ...]
    exchanged: tuple[int, int] | None
    others: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.others = tuple(sorted(set(range(len(self.shift))) - set(self.chosen)))

    def solve(
        self,
    ) -> tuple[Float64[np.ndarray, "dims"], list[tuple[int, int]], list[float]] | None:
        """Step, active pairs and multipliers; None where rounding or a contradiction stops it."""
        step = np.zeros(self.weight.shape[1])
        pairs: list[tuple[int, int]] = []
        weights: list[float] = []
        if self.exchanged is not None:
            slope, gap = self._constraint(self.exchanged)
            length = float(slope @ slope)
            if length == 0.0:
                return None
            pairs, weights, step = [self.exchanged], [-gap / length], -gap / length * slope
        for _ in range(50 * (len(step) + 1)):
            pair = self._violated(step)
            if pair is None or pair in pairs:
                return step, pairs, weights
            following = self._enforced(pair, step, pairs, weights)
            if following is None:
                return None
            step, pairs, weights = following
        return None

    def _violated(self, step: Float64[np.ndarray, "dims"]) -> tuple[int, int] | None:
        if not self.others:
            return None
        logits = self.shift + self.weight @ step
        out = min(self.chosen, key=logits.__getitem__)
        into = max(self.others, key=logits.__getitem__)
        return (out, into) if logits[out] - logits[into] < -self._rounding(step) else None

    def _enforced(
        self,
        pair: tuple[int, int],
        step: Float64[np.ndarray, "dims"],
        pairs: list[tuple[int, int]],
        weights: list[float],
    ) -> tuple[Float64[np.ndarray, "dims"], list[tuple[int, int]], list[float]] | None:
        """Makes a violated pair active, others leaving; None where it contradicts them."""
        slope, gap = self._constraint(pair)
        pairs, values, own = list(pairs), np.array(weights), 0.0
        num_equations = int(self.exchanged is not None)
        while True:
            rows = np.array([self._constraint(p)[0] for p in pairs]).reshape(len(pairs), len(step))
            share = np.linalg.lstsq(rows.T, slope, rcond=None)[0] if pairs else np.empty(0)
            away = slope - share @ rows
            gain = float(away @ away)
            falls = np.flatnonzero(share > 1e-13)
            falls = falls[falls >= num_equations]
            ratios = values[falls] / share[falls]
            least = float(ratios.min(initial=math.inf))
            is_free = len(pairs) < len(step) and gain > 1e-24 * float(slope @ slope)
            full = -(float(slope @ step) + gap) / gain if is_free else math.inf
            change = min(least, full)
            if change == math.inf:
                return None
            values, own = values - change * share, own + change
            if is_free:
                step = step + change * away
            if full <= least:
                return step, [*pairs, pair], [*values.tolist(), own]
            leaving = int(falls[ratios.argmin()])
            del pairs[leaving]
            values = np.delete(values, leaving)

    def lower(self, pairs: Sequence[tuple[int, int]], multipliers: Sequence[float]) -> float:
        """A lower bound of the distance, by weak duality."""
        gamma = 2.0 * (len(pairs) + 4) * _UNIT
        height, loss = 0.0, 0.0
        total, reach = np.zeros(self.weight.shape[1]), np.zeros(self.weight.shape[1])
        for pair, weight in zip(pairs, multipliers, strict=True):
            value = weight if pair == self.exchanged else max(weight, 0.0)
            slope, gap = self._constraint(pair)
            height -= value * gap
            loss += abs(value) * (self.error[list(pair)].sum() + gamma * abs(gap))
            total += value * slope
            reach += np.abs(value * slope)
        length = float(np.linalg.norm(np.abs(total) + gamma * reach))
        length = length * (1.0 + 2.0 * (len(total) + 4) * _UNIT) + _TINY
        height = (height - 1.01 * loss) * (1.0 - 8.0 * _UNIT)
        return height / length if height > 0.0 else 0.0

    def upper(self, step: Float64[np.ndarray, "dims"]) -> float:
        """The length of a step that is surely inside, close to the given one; infinite without."""
        inwards = self._inwards(step)
        if inwards is None:
            return math.inf
        gaps = np.abs(np.subtract.outer(self.shift, self.shift))
        lengths = np.linalg.norm(self.weight[:, None] - self.weight[None], axis=2)
        feet = gaps[lengths > 0.0] / lengths[lengths > 0.0]
        scale = max(float(np.linalg.norm(step)), float(np.median(feet)) if len(feet) else 1.0)
        for relative in _STEPS:
            moved = step + relative * scale * inwards
            off = self._off(moved)
            if off < math.inf:
                length = float(np.linalg.norm(moved)) * (1.0 + 2.0 * (len(step) + 4) * _UNIT)
                length += _TINY if moved.any() else 0.0
                return (length + off) * (1.0 + 4.0 * _UNIT)
        return math.inf

    def _inwards(self, step: Float64[np.ndarray, "dims"]) -> Float64[np.ndarray, "dims"] | None:
        """A unit direction in which chosen experts leave the level upwards and others downwards."""
        logits = self.shift + self.weight @ step
        near = 64.0 * self._rounding(step)
        if self.exchanged is None:
            top, bottom = (
                logits[list(self.chosen)].min(),
                logits[list(self.others)].max(initial=-np.inf),
            )
            if top > bottom + near:
                return np.zeros(len(step))
            level = (top + bottom) / 2.0
        else:
            level = float(logits[self.exchanged[0]])
        rises = {i: 1.0 for i in self.chosen if logits[i] < level + near}
        rises |= {j: -1.0 for j in self.others if logits[j] > level - near}
        rises |= dict.fromkeys(self.exchanged or (), 0.0)
        first, *rest = rises
        if len(rest) > len(step):
            return None
        rows = self.weight[rest] - self.weight[first]
        wanted = np.array([rises[i] - rises[first] for i in rest])
        direction = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        length = float(np.linalg.norm(direction))
        return direction / length if length > 0.0 else direction

    def _off(self, step: Float64[np.ndarray, "dims"]) -> float:
        """How far a point of the set may be from the step; infinite where that is not proved.

        For a cell the step itself must be inside, for a facet its foot on the hyperplane, where
        logits have changed by no more than the length of the longest row times the way.
        """
        logits = self.shift + self.weight @ step
        rounding = self._rounding(step)
        inside = [logits[i] for i in self.chosen if i not in (self.exchanged or ())]
        outside = [logits[j] for j in self.others if j not in (self.exchanged or ())]
        if self.exchanged is None:
            clear = min(inside, default=math.inf) - rounding
            return 0.0 if clear > max(outside, default=-math.inf) + rounding else math.inf
        slope, _ = self._constraint(self.exchanged)
        out, into = (float(logits[i]) for i in self.exchanged)
        length = float(np.linalg.norm(slope)) * (1.0 - 2.0 * (len(step) + 4) * _UNIT)
        off = (abs(out - into) + 2.0 * rounding) / length * (1.0 + 8.0 * _UNIT)
        longest = float(np.linalg.norm(self.weight, axis=1).max())
        change = 2.0 * (rounding + 1.01 * off * longest)
        is_clear = min(inside, default=math.inf) - change > min(out, into) and max(
            outside, default=-math.inf
        ) + change < max(out, into)
        return off if is_clear else math.inf

    def _rounding(self, step: Float64[np.ndarray, "dims"]) -> float:
        """What any logit after a step may be off by."""
        reach = np.abs(self.shift) + np.abs(self.weight) @ np.abs(step)
        gamma = 2.0 * (len(step) + 4) * _UNIT
        return float(1.01 * self.error.max() + gamma * reach.max())

    def _constraint(self, pair: tuple[int, int]) -> tuple[Float64[np.ndarray, "dims"], float]:
        out, into = pair
        return self.weight[out] - self.weight[into], float(self.shift[out] - self.shift[into])
