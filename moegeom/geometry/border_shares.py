r"""Ties: the share that borders the chosen set, the weight of each order, and points near them.

A tie of order n is where n + 1 experts share one logit: a flat of codimension n. Of it, only the
part on which between k - n and k - 1 of the other experts are above borders the chosen set: its
border share :math:`\alpha`, a share of the directions on the flat. D does not enter: logits of
directions are :math:`z \sim N(0, G)`, G the Gram matrix of the rows, moved onto the flat by

.. math:: z' = z - G A (A^\top G A)^{-1} A^\top z

with A the n differences of the tied experts to the first of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from moegeom.core.shapes import Float64, Int32, Int64, Integer
from moegeom.geometry.boundary.orders import order_distance
from moegeom.geometry.gram import symmetric_root
from moegeom.geometry.reference_laws import Law, Logits, Normal, Random
from moegeom.geometry.selection import top_k
from moegeom.geometry.statistics import jackknife_error, rank_correlation


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
    freedom that the rows do not see, :math:`r = R U^{1/D}`; of the sphere alone r = R. Around
    another centre c the bias is b + W c. Exact in law at any D. For no fewer experts than
    dimensions the points themselves are drawn. Source: docs/theory.md A7; oracle in tests: uniform
    points of the ball.
    """

    bias: Float64[np.ndarray, "experts"]
    radius: float
    hidden: int
    is_sphere: bool = False

    def of_normal(self, normal: Normal, product: Logits, random: Random) -> Logits:
        tokens, rank = normal.shape
        square = np.einsum("ij,ij->i", normal, normal, dtype=np.float64)
        if rank < self.hidden:
            square += random.chisquare(self.hidden - rank, tokens)
        length = self.radius / np.sqrt(square)
        if not self.is_sphere:
            length *= random.random(tokens) ** (1.0 / self.hidden)
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


def tie_factor(
    gram: Float64[np.ndarray, "experts experts"], tied: Integer[np.ndarray, "tied"]
) -> float:
    r""":math:`\kappa = \det(A A^\top)^{-1/2}`, A the differences of the tied rows to one of them.

    How much wider, in inputs, a tube of given width in logits is; the same for every choice of that
    one. :math:`(n + 1)^{-1/2}` for orthonormal rows, inf for dependent differences.
    Source: docs/theory.md A7; oracle in tests: every base, and numpy.linalg.svd.
    """
    square = _of_differences(gram, tied)
    if not _is_independent(square):
        return math.inf
    return math.exp(-0.5 * float(np.linalg.slogdet(square)[1]))


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
    """Over all ties of an order: how many flats there are, the sums of their border shares and of
    these times their factors, with standard errors from draws and from ties that were left out.
    """

    order: int
    flats: int
    borders: float
    borders_error: float
    weighted: float
    weighted_error: float


def tie_sums(
    gram: Float64[np.ndarray, "experts experts"],
    k: int,
    order: int,
    draws: int,
    most: int,
    random: np.random.Generator,
) -> TieSums:
    r""":math:`\sum \alpha` and :math:`\sum \kappa \alpha` over the C(E, n + 1) ties of order n.

    All of them where there are at most ``most``, else that many at random, scaled. Ties of
    dependent rows count as none. Standard errors have both sources: the spread between eighths of
    the ``draws``, which all ties share, and that between ties where they are a sample.
    Source: docs/theory.md A7; oracle in tests: the closed form of orthonormal rows.
    """
    experts = len(gram)
    flats = math.comb(experts, order + 1)
    if flats == 0:
        return TieSums(order, 0, 0.0, 0.0, 0.0, 0.0)
    ties = _ties(experts, order + 1, most, random)
    shares = border_shares(gram, direction_logits(gram, draws, random), k, ties)
    factors = np.array([tie_factor(gram, tied) for tied in ties])
    is_known = np.isfinite(factors)
    shares[~is_known], factors[~is_known] = 0.0, 0.0
    is_part = len(ties) < flats
    (borders, of_borders), (weighted, of_weighted) = (
        _sum(values, flats, is_part) for values in (shares, shares * factors[:, None])
    )
    return TieSums(order, flats, borders, of_borders, weighted, of_weighted)


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


@dataclass(frozen=True)
class _Convention:
    """What a width means: the sums that count, how it stands to R, and the volume of a tube."""

    total: Callable[[TieSums], float]
    width: float
    volume: Callable[[int, int], float]
    has_corners: bool = False


def _log_ball(dimension: int, order: int) -> float:
    """Logarithm of the volume of the unit ball of D - n dimensions."""
    left = dimension - order
    if left < 0:
        return -math.inf
    return 0.5 * left * math.log(math.pi) - math.lgamma(0.5 * left + 1.0)


#: What a width can mean: a distance of inputs; the largest difference to the logit of one tied
#: expert; half the spread of tied logits (how far logits must move); that spread.
CONVENTIONS: Mapping[str, _Convention] = MappingProxyType(
    {
        "euclidean": _Convention(lambda sums: sums.borders, 1.0, log_half_binomial),
        "base": _Convention(lambda sums: sums.weighted, 2.0, _log_ball),
        "half_spread": _Convention(lambda sums: sums.weighted, 2.0, _log_ball, True),
        "spread": _Convention(lambda sums: sums.weighted, 1.0, _log_ball, True),
    }
)


def log_order_ratio(
    upper: TieSums, lower: TieSums, dimension: int, width: float, convention: str
) -> float:
    r"""Logarithm of the ratio of leading terms of two orders n > m, in one of CONVENTIONS.

    Euclidean: :math:`\frac{\sum \alpha_n}{\sum \alpha_m} \binom{D/2}{n/2} \binom{D/2}{m/2}^{-1}
    (\epsilon / R)^{n - m}`. In logits :math:`\frac{\sum (\kappa\alpha)_n}{\sum (\kappa\alpha)_m}
    \frac{\omega_{D-n}}{\omega_{D-m}} c^{n - m}`, :math:`\omega` volumes of unit balls, c = 2
    eps / R where one expert is the base; times (n + 1) / (m + 1) for half the spread, and for the
    spread itself with c = eps / R. ``width`` is eps / R. nan without borders of the lower order.
    Source: docs/theory.md A7, and F-10 there; oracle in tests: draws in three dimensions.
    """
    used = CONVENTIONS[convention]
    above, below = used.total(upper), used.total(lower)
    if below <= 0.0:
        return math.nan
    if above <= 0.0:
        return -math.inf
    order, other = upper.order, lower.order
    corners = math.log((order + 1) / (other + 1)) if used.has_corners else 0.0
    volumes = used.volume(dimension, order) - used.volume(dimension, other)
    powers = (order - other) * math.log(used.width * width)
    return math.log(above) - math.log(below) + volumes + powers + corners


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

#: The law of uniform points of a ball of the rms length of the inputs, and of its surface.
BALL, SPHERE = "ball", "sphere"

#: Ties of an order that are counted one by one, at most, and draws of each.
_TIES, _DRAWS = 1024, 1000

#: By how much fewer where their sum alone is printed, beside its error.
_FEWER = 4

#: Experts more than one that tie.
_ORDERS = (1, 2, 3)

#: Points of which the distance to ties of order 2 and 3 is searched: milliseconds each.
_SEARCHED = 256

#: Widths of the shares, beside the one that counts as near.
_WIDTHS = tuple(2.0**power for power in range(-12, 9))


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


@dataclass(frozen=True)
class TieCount:
    """What counting ties of one order says of a ball: ``borders`` and ``weighted`` are the sums of
    border shares and of these times their factors, the rest logarithms of shares and ratios to
    order 1, by convention of a width.
    """

    flats: int
    borders: float
    borders_se: float
    weighted: float
    weighted_se: float
    bound_log10: float
    leading_log10: float
    ratios_log10: Mapping[str, float]


@dataclass(frozen=True)
class MeasuredShare:
    """The share of a law nearer than ``epsilon`` to ties of an order, between two certain ends.

    The ends are one number for order 1 and where searches came to their end. The error is that of
    the upper one. Balls have a centre and a radius.
    """

    law: str
    order: int
    epsilon: float
    centre: str | None
    radius: float | None
    share_lower: float
    share_upper: float
    share_se: float
    counted: TieCount | None = None


# -------------------------------------------------------------------------------------------- balls
def balls(
    rows: Rows,
    bias: Float64[np.ndarray, "experts"],
    inputs: Float64[np.ndarray, "tokens hidden"],
    root: Float64[np.ndarray, "experts experts"],
    radius: float | None = None,
) -> dict[str, BallLaw]:
    """Balls of the rms length of the inputs, about 0 (``origin``) and about their ``mean``, less
    one that is a point; or of this radius. ``root`` is that of the products of the rows.
    """
    mean, hidden = inputs.mean(axis=0), rows.shape[1]
    square = float(np.vdot(inputs, inputs)) / len(inputs)
    about_mean = max(square - float(mean @ mean), 0.0)
    own = root if len(rows) < hidden else rows
    around = {
        "origin": BallLaw(own, bias, radius or math.sqrt(square), hidden),
        "mean": BallLaw(own, bias + rows @ mean, radius or math.sqrt(about_mean), hidden),
    }
    least = 0.0 if radius else 1e-6 * math.sqrt(square)
    return {centre: ball for centre, ball in around.items() if ball.radius > least}


def near_boundaries(rows: Rows, k: int, width: float, radius: float, seed: int) -> NearBoundaries:
    """What the number of boundaries alone makes of the share of a ball near a linear boundary."""
    experts, hidden = rows.shape
    sums = _sums(rows, k, 1, seed, _FEWER)
    bounds = (log_order_bound(experts, n, hidden, width / radius) / math.log(10.0) for n in _ORDERS)
    leading = math.exp(log_leading_share(sums, hidden, width / radius))
    borders = sums.borders, sums.borders_error
    return NearBoundaries(width, radius, *borders, sums.flats, leading, tuple(bounds))


def _sums(rows: Rows, k: int, order: int, seed: int, fewer: int = 1) -> TieSums:
    random = np.random.default_rng([seed, len(rows), order])
    return tie_sums(rows @ rows.T, k, order, _DRAWS // fewer, _TIES // fewer, random)


# ------------------------------------------------------------------------------------------- shares
@dataclass(frozen=True, eq=False)
class BoundaryEnds:
    """The boundaries of a router: its rows, and both ends of the ``distance`` of logits to the
    nearest one; ``coordinates``, in which distances to ties are searched, of linear rules alone.
    """

    rows: Rows
    coordinates: Float64[np.ndarray, "experts dims"] | None
    k: int
    distance: Callable[
        [Float64[np.ndarray, "tokens experts"]],
        tuple[Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"]],
    ]


def measured_shares(
    boundaries: BoundaryEnds,
    near: float,
    laws: Mapping[str, Law],
    around: Mapping[str, BallLaw],
    logits: Float64[np.ndarray, "tokens experts"],
    block: Int32[np.ndarray, "tokens"],
    seed: int,
) -> tuple[MeasuredShare, ...]:
    """Shares near ties of order 1 to 3 at every width: of tokens, of laws, of balls. Of curved and
    grouped rules of order 1 alone, between both ends, and without what counting flats says.

    ``logits`` and ``block`` are those of the tokens; of every law as many points are drawn.
    """
    widths = np.array(sorted({*_WIDTHS, near}))
    # the tokens that are searched come first
    order = np.random.default_rng(seed).permutation(len(logits))
    shares = [*_shares("tokens", boundaries, logits[order], widths, block[order])]
    draws: dict[tuple[str, str | None], Law] = {(name, None): law for name, law in laws.items()}
    for centre, ball in around.items():
        draws[BALL, centre] = ball
        draws[SPHERE, centre] = dataclasses.replace(ball, is_sphere=True)
    for number, ((name, centre), law) in enumerate(draws.items()):
        points = law.draw(len(logits), np.random.default_rng([seed, number]))
        radius = None if centre is None else around[centre].radius
        shares += [
            dataclasses.replace(share, centre=centre, radius=radius)
            for share in _shares(name, boundaries, points, widths)
        ]
    if not around or boundaries.coordinates is None:
        return tuple(shares)
    sums = {order: _sums(boundaries.rows, boundaries.k, order, seed) for order in _ORDERS}
    return tuple(_counted(share, sums, boundaries.rows.shape) for share in shares)


def _shares(
    law: str,
    boundaries: BoundaryEnds,
    logits: Float64[np.ndarray, "tokens experts"],
    widths: Float64[np.ndarray, "widths"],
    block: Int32[np.ndarray, "tokens"] | None = None,
) -> Iterator[MeasuredShare]:
    """Both ends of each share; errors by leaving out blocks, of draws of independent points."""
    for order, lower, upper in _distances(boundaries, logits):
        for width in widths.tolist():
            near, surely = lower < width, upper < width
            share = float(near.mean())
            error = math.sqrt(share * (1.0 - share) / len(near))
            if block is not None:
                others = [block[: len(near)] != one for one in np.unique(block[: len(near)])]
                without = [near[rows].mean() for rows in others if rows.any()]
                error = float(jackknife_error(np.array(without)))
            yield MeasuredShare(law, order, width, None, None, float(surely.mean()), share, error)


def _distances(
    boundaries: BoundaryEnds, logits: Float64[np.ndarray, "tokens experts"]
) -> Iterator[tuple[int, Float64[np.ndarray, "some"], Float64[np.ndarray, "some"]]]:
    """Order, and both ends of the distance; of order 2 and more of the first points alone."""
    yield 1, *boundaries.distance(logits)
    coordinates = boundaries.coordinates
    if coordinates is None:
        return
    for order in _ORDERS[1:]:
        ends = [order_distance(one, coordinates, boundaries.k, order) for one in logits[:_SEARCHED]]
        yield order, np.array([e.lower for e in ends]), np.array([e.upper for e in ends])


def _counted(
    share: MeasuredShare, sums: Mapping[int, TieSums], shape: tuple[int, ...]
) -> MeasuredShare:
    """With what counting ties says of a ball of this radius."""
    if share.radius is None or share.law != BALL:
        return share
    experts, hidden = shape
    width, of_order = share.epsilon / share.radius, sums[share.order]
    counted = TieCount(
        flats=of_order.flats,
        borders=of_order.borders,
        borders_se=of_order.borders_error,
        weighted=of_order.weighted,
        weighted_se=of_order.weighted_error,
        bound_log10=log_order_bound(experts, share.order, hidden, width) / math.log(10.0),
        leading_log10=log_leading_share(of_order, hidden, width) / math.log(10.0),
        ratios_log10={
            name: log_order_ratio(of_order, sums[1], hidden, width, name) / math.log(10.0)
            for name in CONVENTIONS
        },
    )
    return dataclasses.replace(share, counted=counted)
