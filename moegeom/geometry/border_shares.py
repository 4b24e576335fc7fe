r"""Ties: the share that borders the chosen set, the weight of each order, and points near them.

A tie of order n is where n + 1 experts share one logit: a flat of codimension n. Of it, only the
part on which between k - n and k - 1 of the other experts are above borders the chosen set: its
border share :math:`\alpha`, a share of the directions on the flat. D does not enter: logits of
directions are :math:`z \sim N(0, G)`, G the Gram matrix of the rows, moved onto the flat by

.. math:: z' = z - G A (A^\top G A)^{-1} A^\top z

with A the n differences of the tied experts to the first of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float64, Int64, Integer
from moegeom.geometry.gram import symmetric_root
from moegeom.geometry.reference_laws import Law, Logits, Normal, Random
from moegeom.geometry.selection import top_k
from moegeom.geometry.statistics import rank_correlation


# -------------------------------------------------------------------------------------------- balls
def log_half_binomial(dimension: int, order: int) -> float:
    r""":math:`\ln \binom{D/2}{n/2}`; -inf for n > D, where none tie. Oracle in tests: mpmath."""
    if order > dimension:
        return -math.inf
    half, part = dimension / 2.0, order / 2.0
    return math.lgamma(half + 1.0) - math.lgamma(part + 1.0) - math.lgamma(half - part + 1.0)


def log_order_bound(num_experts: int, order: int, dimension: int, width: float) -> float:
    r"""Logarithm of a bound of the share within a ``width`` of ties of order n, of any router.

    :math:`\binom{E}{n+1} \binom{D/2}{n/2} (\epsilon / R)^n`, ``width`` in units of the radius:
    every tie of n + 1 experts is a flat, and a flat through the centre has the largest tube. There
    are :math:`\binom{E}{n+1}` flats. Not cut at 0: above it says nothing. -inf where fewer experts
    are than tie. Source: docs/theory.md A7; oracle in tests: mpmath, and shares measured.
    """
    if order + 1 > num_experts:
        return -math.inf
    flats = math.log(math.comb(num_experts, order + 1))
    return flats + log_half_binomial(dimension, order) + order * math.log(width)


@dataclass(frozen=True, eq=False)
class BallLaw(Law):
    r"""Logits of uniform points of the ball of this radius around 0, without drawing its points.

    :math:`z = b + L u` with :math:`L L^\top = W W^\top` and :math:`u = r g / \sqrt{|g|^2 +
    \chi^2}`, g standard normal of the rank's dimension, :math:`\chi^2` with the D - E degrees of
    freedom that the rows do not see, :math:`r = R U^{1/D}`. Exact in law at any D. For no fewer
    experts than dimensions the points themselves are drawn.
    Source: docs/theory.md A7; oracle in tests: uniform points of the ball.
    """

    bias: Float64[np.ndarray, "experts"]
    radius: float
    hidden: int

    def of_normal(self, normal: Normal, product: Logits, random: Random) -> Logits:
        tokens, rank = normal.shape
        square = np.einsum("ij,ij->i", normal, normal, dtype=np.float64)
        if rank < self.hidden:
            square += random.chisquare(self.hidden - rank, tokens)
        length = self.radius / np.sqrt(square) * random.random(tokens) ** (1.0 / self.hidden)
        return length.astype(product.dtype)[:, None] * product + self.bias.astype(product.dtype)


#: Groups of draws, whose spread is the error that draws leave.
_GROUPS = 8


# ------------------------------------------------------------------------------------------- shares
def border_shares(
    gram: Float64[np.ndarray, "experts experts"],
    logits: Float64[np.ndarray, "draws experts"],
    k: int,
    ties: Integer[np.ndarray, "ties tied"],
) -> Float64[np.ndarray, "ties groups"]:
    r"""Border share of each of these ties, on each eighth of the draws.

    ``logits`` are those of :func:`direction_logits`; the shares of a tie have the standard error
    :math:`\sqrt{\alpha (1 - \alpha) / S}` for S draws each. nan where equal or dependent rows leave
    no such flat, or the whole space. Source: docs/theory.md A7; oracle in tests: directions in the
    space of inputs, and the closed form of orthonormal rows.
    """
    order = ties.shape[1] - 1
    shares = np.full((len(ties), _GROUPS), math.nan)
    for place, tied in enumerate(ties):
        square = _of_differences(gram, tied)
        if not _is_independent(square):
            continue
        apart = logits[:, tied[1:]] - logits[:, tied[:1]]
        # of each expert, over the first tied one, how much a move across the flat changes it
        towards = gram[:, tied[1:]] - gram[:, tied[:1]]
        steps = np.linalg.solve(square, (towards - towards[tied[0]]).T)
        moved = logits - logits[:, tied[:1]] - apart @ steps
        moved[:, tied] = -np.inf
        above = (moved > 0.0).sum(axis=1)
        is_border = (above >= k - order) & (above <= k - 1)
        shares[place] = [part.mean() for part in np.array_split(is_border, _GROUPS)]
    return shares


def direction_logits(
    gram: Float64[np.ndarray, "experts experts"], draws: int, random: np.random.Generator
) -> Float64[np.ndarray, "draws experts"]:
    """Logits of random directions under rows with this Gram matrix: N(0, G)."""
    return random.standard_normal((draws, len(gram))) @ symmetric_root(gram)


def _of_differences(
    gram: Float64[np.ndarray, "experts experts"], tied: Integer[np.ndarray, "tied"]
) -> Float64[np.ndarray, "order order"]:
    """Gram matrix of the differences of the tied rows to the first of them."""
    part = gram[np.ix_(tied, tied)]
    return part[1:, 1:] - part[1:, :1] - part[:1, 1:] + part[0, 0]


def _is_independent(square: Float64[np.ndarray, "order order"]) -> bool:
    values = np.linalg.eigvalsh(square)
    return bool(values[0] > 1e-12 * values[-1] > 0.0)


# --------------------------------------------------------------------------------------------- sums
@dataclass(frozen=True)
class TieSums:
    """Over all ties of an order: how many flats there are, and the sum of their border shares, with
    a standard error from draws and from ties that were left out.
    """

    order: int
    flats: int
    borders: float
    borders_error: float


def tie_sums(
    gram: Float64[np.ndarray, "experts experts"],
    k: int,
    order: int,
    draws: int,
    most: int,
    random: np.random.Generator,
) -> TieSums:
    r""":math:`\sum \alpha` over the C(E, n + 1) ties of order n.

    All of them where there are at most ``most``, else that many at random, scaled. Ties of
    dependent rows count as none. The standard error has both sources: the spread between eighths of
    the ``draws``, which all ties share, and that between ties where they are a sample.
    Source: docs/theory.md A7; oracle in tests: the closed form of orthonormal rows.
    """
    experts = len(gram)
    flats = math.comb(experts, order + 1)
    if flats == 0:
        return TieSums(order, 0, 0.0, 0.0)
    ties = _ties(experts, order + 1, most, random)
    shares = border_shares(gram, direction_logits(gram, draws, random), k, ties)
    borders = _sum(np.nan_to_num(shares), flats, is_part=len(ties) < flats)
    return TieSums(order, flats, *borders)


def _ties(
    experts: int, tied: int, most: int, random: np.random.Generator
) -> Integer[np.ndarray, "ties tied"]:
    """Every set of so many experts, or ``most`` drawn ones."""
    import itertools

    if math.comb(experts, tied) <= most:
        return np.array(list(itertools.combinations(range(experts), tied)))
    return np.stack([random.permutation(experts)[:tied] for _ in range(most)])


def _sum(
    values: Float64[np.ndarray, "ties groups"], flats: int, is_part: bool
) -> tuple[float, float]:
    """Scaled to all flats, with its error."""
    of_ties, of_groups = values.mean(axis=1), values.mean(axis=0)
    variance = of_groups.var(ddof=1) / len(of_groups)
    if is_part:
        variance += of_ties.var(ddof=1) / len(of_ties)
    return flats * float(of_ties.mean()), flats * math.sqrt(float(variance))


# ------------------------------------------------------------------------------------ leading terms
def log_leading_share(sums: TieSums, dimension: int, width: float) -> float:
    r"""Logarithm of :math:`\sum \alpha\, \binom{D/2}{n/2} (\epsilon / R)^n`, ``width`` over R.

    The share of a ball near ties of order n if all flats went through its middle and tubes did not
    meet: the leading term for :math:`R \gg \sqrt D\, \delta` with :math:`\delta` the distance of
    the flats from the middle; a tube there has :math:`(1 - \delta^2 / R^2)^{(D - n) / 2}` of it.
    -inf where no tie borders the chosen set. Source: docs/theory.md A7; oracle in tests: draws.
    """
    if sums.borders <= 0.0:
        return -math.inf
    leading = log_half_binomial(dimension, sums.order) + sums.order * math.log(width)
    return math.log(sums.borders) + leading


# ------------------------------------------------------------------------------------- solid angles
@dataclass(frozen=True, eq=False)
class SolidAngles:
    """Share of directions of each cell of a central router, in the order of the sorted experts."""

    expert_set: Int64[np.ndarray, "cells k"]
    share: Float64[np.ndarray, "cells"]


#: Directions that are drawn at once.
_AT_ONCE = 16384


def sampled_angles(
    weight: Float64[np.ndarray, "experts dims"], k: int, num_directions: int, seed: int
) -> SolidAngles:
    r"""Shares by Monte Carlo: Gaussian directions, counted by their top-k set.

    Standard error :math:`\sqrt{s (1 - s) / n}`; a cell that was not seen has a share below
    :math:`1 - 0.05^{1/n}` at 95 %. Equal rows tie exactly, and the lower number wins. Raises
    ValueError for k outside 1..E and without directions. Oracle in tests: the exact arcs, and
    symmetry.
    """
    experts, dims = weight.shape
    if not 1 <= k <= experts or num_directions < 1:
        raise ValueError(f"top_k {k} of {experts} experts, {num_directions} directions")
    generator = np.random.default_rng(seed)
    rows, same = np.unique(weight, axis=0, return_inverse=True)
    parts = []
    for start in range(0, num_directions, _AT_ONCE):
        size = min(_AT_ONCE, num_directions - start)
        logits = (generator.standard_normal((size, dims)) @ rows.T)[:, same.reshape(-1)]
        parts.append(np.sort(top_k(logits, k), axis=1))
    sets, counts = np.unique(np.concatenate(parts), axis=0, return_counts=True)
    return SolidAngles(sets.astype(np.int64), counts / num_directions)


def shares_of(
    angles: SolidAngles, expert_set: Integer[np.ndarray, "cells k"]
) -> Float64[np.ndarray, "cells"]:
    """The share of each of the given cells, 0 for those that are not listed; rows are sorted."""
    listed = map(tuple, angles.expert_set.tolist())
    share_of = dict(zip(listed, angles.share.tolist(), strict=True))
    return np.array([share_of.get(tuple(row), 0.0) for row in expert_set.tolist()])


#: Logits of directions, and directions at most.
_LOGITS, _DIRECTIONS = 2**22, 2**18

#: Share of the visited cells that directions must meet for their sizes to be compared.
_LEAST_MET = 0.5


@dataclass(frozen=True)
class ConeShares:
    """Cells of the visited expert sets as shares of all directions, from so many drawn ones.

    ``correlation`` of ranks between visits and shares, and the one that as many tokens without any
    preferred direction would show; None where directions meet fewer than half of the visited cells.
    ``modal`` is the share of the set that is visited most.
    """

    directions: int
    covered: float
    covered_se: float
    correlation: float | None
    correlation_by_size: float | None
    modal: float


def cone_shares(
    rows: Float64[np.ndarray, "experts dims"], chosen: Integer[np.ndarray, "tokens k"], seed: int
) -> ConeShares:
    """How large the cells of the visited expert sets are, seen from 0: of routers without bias.

    Oracle in tests: angles of a plane.
    """
    directions = min(_LOGITS // len(rows), _DIRECTIONS)
    angles = sampled_angles(rows, chosen.shape[1], directions, seed)
    visited, visits = np.unique(np.sort(chosen, axis=1), axis=0, return_counts=True)
    shares = shares_of(angles, visited)
    covered = float(shares.sum())
    correlation = by_size = None
    if (shares > 0.0).mean() >= _LEAST_MET:
        # what the counts of as many tokens show of sizes where sizes are all there is
        counts = np.random.default_rng(seed).multinomial(len(chosen), angles.share)
        by_size = rank_correlation(counts[counts > 0], angles.share[counts > 0])
        correlation = rank_correlation(visits, shares)
    return ConeShares(
        directions=directions,
        covered=covered,
        covered_se=math.sqrt(covered * (1.0 - covered) / directions),
        correlation=correlation,
        correlation_by_size=by_size,
        modal=float(shares[visits.argmax()]),
    )


# ----------------------- points near a boundary: by counting boundaries, by laws, and by the tokens
Rows = Float64[np.ndarray, "experts hidden"]

#: The law of uniform points of a ball of the rms length of the inputs.
BALL = "ball"

#: Ties of an order that are counted one by one, at most, and draws of each.
_TIES, _DRAWS = 256, 250

#: Experts more than one that tie.
_ORDERS = (1, 2, 3)


@dataclass(frozen=True)
class NearBoundaries:
    """What counting boundaries says of the share near one, in a ball around 0.

    The ball has the rms length of the inputs, ``width`` is the distance that counts as near.
    ``borders`` is how many of the ``num_pairs`` boundaries z_i = z_j border the chosen set, each by
    the share of it that does, and ``borders_se`` its error; ``leading`` the share of the ball
    near them if all went through its middle and none met; ``bounds_log10`` bounds of the share near
    ties of 2, 3 and 4 experts.
    """

    width: float
    radius: float
    borders: float
    borders_se: float
    num_pairs: int
    leading: float
    bounds_log10: tuple[float, ...]


# -------------------------------------------------------------------------------------------- balls
def ball_of(
    rows: Rows,
    bias: Float64[np.ndarray, "experts"],
    inputs: Float64[np.ndarray, "tokens hidden"],
    root: Float64[np.ndarray, "experts experts"],
) -> BallLaw | None:
    """The ball about 0 of the rms length of the inputs; None where that is 0. ``root`` is that of
    the products of the rows.
    """
    hidden = rows.shape[1]
    radius = math.sqrt(float(np.vdot(inputs, inputs)) / len(inputs))
    own = root if len(rows) < hidden else rows
    return BallLaw(own, bias, radius, hidden) if radius else None


def near_boundaries(rows: Rows, k: int, width: float, radius: float, seed: int) -> NearBoundaries:
    """What the number of boundaries alone makes of the share of a ball near a linear boundary."""
    experts, hidden = rows.shape
    random = np.random.default_rng([seed, experts, 1])
    sums = tie_sums(rows @ rows.T, k, 1, _DRAWS, _TIES, random)
    bounds = (log_order_bound(experts, n, hidden, width / radius) / math.log(10.0) for n in _ORDERS)
    leading = math.exp(log_leading_share(sums, hidden, width / radius))
    borders = sums.borders, sums.borders_error
    return NearBoundaries(width, radius, *borders, sums.flats, leading, tuple(bounds))
