"""Points near a boundary: by counting boundaries, by laws, and by the tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float64, Int32
from moegeom.geometry.border_shares import (
    CONVENTIONS,
    TieSums,
    ball_logits,
    log_leading_share,
    log_order_bound,
    log_order_ratio,
    tie_sums,
)
from moegeom.geometry.boundary.order_distance import order_distance
from moegeom.geometry.statistics import jackknife_error

Rows = Float64[np.ndarray, "experts hidden"]
Draw = Callable[[int, np.random.Generator], Float64[np.ndarray, "tokens experts"]]

#: The law of uniform points of a ball of the rms length of the inputs, and of its surface.
BALL, SPHERE = "ball", "sphere"

#: Ties of an order that are counted one by one, at most, and draws of each.
_TIES, _DRAWS = 1024, 1000

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
    the share of it that does; ``leading`` the share of the ball near them if all went through its
    middle and none met; ``bounds_log10`` bounds of the share near ties of 2, 3 and 4 experts.
    """

    width: float
    radius: float
    borders: float
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
@dataclass(frozen=True, eq=False)
class Balls:
    """A ball around 0 and one around the mean of the inputs, by centre: its radius, and the draw
    of its logits.
    """

    rows: Rows
    bias: Mapping[str, Float64[np.ndarray, "experts"]]
    radius: Mapping[str, float]

    def law(self, centre: str = "origin", is_sphere: bool = False) -> Draw:
        """Logits of uniform points of the ball around ``origin`` or ``mean``."""
        return functools.partial(
            ball_logits, self.rows, self.bias[centre], self.radius[centre], is_sphere=is_sphere
        )


def balls(
    rows: Rows,
    bias: Float64[np.ndarray, "experts"],
    inputs: Float64[np.ndarray, "tokens hidden"],
    radius: float | None = None,
) -> Balls:
    """Balls of the rms length of the inputs, about 0 and about their mean; or of this radius."""
    mean = inputs.mean(axis=0)
    about_zero, about_mean = (
        math.sqrt(float((away**2).sum(axis=1).mean())) for away in (inputs, inputs - mean)
    )
    return Balls(
        rows,
        {"origin": bias, "mean": bias + rows @ mean},
        {"origin": radius or about_zero, "mean": radius or about_mean},
    )


def near_boundaries(rows: Rows, k: int, width: float, radius: float, seed: int) -> NearBoundaries:
    """What the number of boundaries alone makes of the share of a ball near a linear boundary."""
    experts, hidden = rows.shape
    sums = _sums(rows, k, 1, seed)
    bounds = (log_order_bound(experts, n, hidden, width / radius) / math.log(10.0) for n in _ORDERS)
    leading = math.exp(log_leading_share(sums, hidden, width / radius))
    return NearBoundaries(width, radius, sums.borders, sums.flats, leading, tuple(bounds))


def _sums(rows: Rows, k: int, order: int, seed: int) -> TieSums:
    random = np.random.default_rng([seed, len(rows), order])
    return tie_sums(rows @ rows.T, k, order, _DRAWS, _TIES, random)


# ------------------------------------------------------------------------------------------- shares
@dataclass(frozen=True, eq=False)
class LinearBoundaries:
    """The linear boundaries of a router: its rows, the coordinates in which distances to ties are
    searched, and the exact ``distance`` of logits to the nearest one.
    """

    rows: Rows
    coordinates: Float64[np.ndarray, "experts dims"]
    k: int
    distance: Callable[[Float64[np.ndarray, "tokens experts"]], Float64[np.ndarray, "tokens"]]


def measured_shares(
    boundaries: LinearBoundaries,
    near: float,
    laws: Mapping[str, Draw],
    around: Balls | None,
    logits: Float64[np.ndarray, "tokens experts"],
    block: Int32[np.ndarray, "tokens"],
    seed: int,
) -> tuple[MeasuredShare, ...]:
    """Shares near ties of order 1 to 3 at every width: of tokens, of laws, of balls.

    ``logits`` and ``block`` are those of the tokens; of every law as many points are drawn.
    """
    widths = np.array(sorted({*_WIDTHS, near}))
    # the tokens that are searched come first
    order = np.random.default_rng(seed).permutation(len(logits))
    shares = [*_shares("tokens", boundaries, logits[order], widths, block[order])]
    draws: dict[tuple[str, str | None], Draw] = {(name, None): draw for name, draw in laws.items()}
    if around is not None:
        for centre in around.radius:
            draws[BALL, centre] = around.law(centre)
            draws[SPHERE, centre] = around.law(centre, is_sphere=True)
    for number, ((law, centre), draw) in enumerate(draws.items()):
        points = draw(len(logits), np.random.default_rng([seed, number]))
        radius = None if centre is None or around is None else around.radius[centre]
        shares += [
            dataclasses.replace(share, centre=centre, radius=radius)
            for share in _shares(law, boundaries, points, widths)
        ]
    if around is None:
        return tuple(shares)
    sums = {order: _sums(boundaries.rows, boundaries.k, order, seed) for order in _ORDERS}
    return tuple(_counted(share, sums, boundaries.rows.shape) for share in shares)


def _shares(
    law: str,
    boundaries: LinearBoundaries,
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
    boundaries: LinearBoundaries, logits: Float64[np.ndarray, "tokens experts"]
) -> Iterator[tuple[int, Float64[np.ndarray, "some"], Float64[np.ndarray, "some"]]]:
    """Order, and both ends of the distance; of order 2 and more of the first points alone."""
    exact = boundaries.distance(logits)
    yield 1, exact, exact
    for order in _ORDERS[1:]:
        ends = [
            order_distance(one, boundaries.coordinates, boundaries.k, order)
            for one in logits[:_SEARCHED]
        ]
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
