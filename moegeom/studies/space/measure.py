"""Points near a boundary: by counting boundaries, by laws, and by the tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Float64, Int32
from moegeom.engine.sample import Sample
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
from moegeom.geometry.reference_laws import LogitLaw
from moegeom.geometry.statistics import jackknife_error
from moegeom.studies.space.laws import Choosing
from moegeom.studies.space.record import Balls, MeasuredShare, NearBoundaries, TieCount

Draw = Callable[[int, np.random.Generator], Float64[np.ndarray, "tokens experts"]]

#: The law of uniform points of a ball of the rms length of the inputs, and of its surface.
BALL, SPHERE = "ball", "sphere"

#: Ties of an order that are looked at, at most, and draws of each.
_TIES, _DRAWS = 1024, 1000

#: Experts more than one that tie.
_ORDERS = (1, 2, 3)

#: Points of which the distance to ties of order 2 and 3 is looked for: milliseconds each.
_SEARCHED = 256

#: Distances at which shares are told, beside the one that counts as near.
_WIDTHS = tuple(2.0**power for power in range(-12, 9))


def bias_of(router: Router) -> Float64[np.ndarray, "experts"]:
    """What the rule adds to logits whatever is read: of an affine rule both biases."""
    found = np.zeros(router.num_experts)
    if router.logit_bias is not None:
        found = found + router.logit_bias
    if router.rule.is_affine and router.selection_bias is not None:
        found = found + router.selection_bias
    return found.astype(np.float64)


def balls(router: Router, sample: Sample, radius: float | None = None) -> Balls | None:
    """Balls of the rms length of the inputs, around 0 and around their mean; or of this radius.

    None without inputs.
    """
    if sample.input is None:
        return None
    inputs = sample.inputs.astype(np.float64)
    mean = inputs.mean(axis=0)
    around_zero, around_mean = (
        math.sqrt(float((away**2).sum(axis=1).mean())) for away in (inputs, inputs - mean)
    )
    moved = router.weight.astype(np.float64) @ mean
    return Balls(radius or around_zero, radius or around_mean, tuple(moved.tolist()))


def ball_law(router: Router, found: Balls, centre: str, is_sphere: bool = False) -> Draw:
    """Logits of uniform points of the ball around ``origin`` or ``mean``."""
    bias, radius = bias_of(router), found.around_zero
    if centre == "mean":
        bias, radius = bias + np.array(found.logits_of_mean), found.around_mean
    rows = router.weight.astype(np.float64)
    return functools.partial(ball_logits, rows, bias, radius, is_sphere=is_sphere)


def near_boundaries(
    router: Router, width: float | None, found: Balls | None, seed: int
) -> NearBoundaries | None:
    """What the number of boundaries alone makes of the share near one, of linear boundaries."""
    if not width or found is None or not found.around_zero:
        return None
    experts, hidden = router.weight.shape
    relative = width / found.around_zero
    sums = _sums(router, 1, seed)
    bounds = (log_order_bound(experts, n, hidden, relative) / math.log(10.0) for n in _ORDERS)
    leading = math.exp(log_leading_share(sums, hidden, relative))
    return NearBoundaries(
        width, found.around_zero, sums.borders, sums.flats, leading, tuple(bounds)
    )


def _sums(router: Router, order: int, seed: int) -> TieSums:
    rows, k = router.weight.astype(np.float64), router.rule.top_k
    random = np.random.default_rng([seed, len(rows), order])
    return tie_sums(rows @ rows.T, k, order, _DRAWS, _TIES, random)


# ------------------------------------------------------------------------------------------ shares
def measured_shares(
    choose: Choosing,
    laws: Mapping[str, LogitLaw],
    sample: Sample,
    found: Balls | None,
    seed: int,
) -> tuple[MeasuredShare, ...]:
    """Shares near ties of order 1 to 3 at every width: of tokens, of laws, of balls.

    Nothing where boundaries are not linear.
    """
    if choose.near is None or choose.prepared.coordinates is None:
        return ()
    router = choose.prepared.router
    widths = np.array(sorted({*_WIDTHS, choose.near}))
    told = [*_of_tokens(choose, sample, widths, seed)]
    draws: dict[tuple[str, str | None], Draw] = {(name, None): laws[name].draw for name in laws}
    if found is not None:
        for centre in ("origin", "mean"):
            draws[BALL, centre] = ball_law(router, found, centre)
            draws[SPHERE, centre] = ball_law(router, found, centre, is_sphere=True)
    for number, ((law, centre), draw) in enumerate(draws.items()):
        random = np.random.default_rng([seed, number])
        logits = draw(len(sample.logits), random)
        for order, lower, upper in _distances(choose, logits):
            shares = _shares(law, order, widths, lower, upper, None)
            told += [_placed(share, centre, found) for share in shares]
    if found is None:
        return tuple(told)
    sums = {order: _sums(router, order, seed) for order in _ORDERS}
    return tuple(_counted(share, sums, router) for share in told)


def _of_tokens(
    choose: Choosing, sample: Sample, widths: Float64[np.ndarray, "widths"], seed: int
) -> Iterator[MeasuredShare]:
    order = np.random.default_rng(seed).permutation(len(sample.logits))
    # the tokens that are searched come first
    found = _distances(choose, sample.logits[order].astype(np.float64))
    for number, lower, upper in found:
        yield from _shares(
            "tokens", number, widths, lower, upper, sample.block[order][: len(lower)]
        )


def _distances(
    choose: Choosing, logits: Float64[np.ndarray, "tokens experts"]
) -> Iterator[tuple[int, Float64[np.ndarray, "some"], Float64[np.ndarray, "some"]]]:
    """Order, and both ends of the distance; of order 2 and more of the first points alone."""
    exact = choose.distances(logits)
    yield 1, exact, exact
    rows, k = choose.prepared.coordinates, choose.prepared.router.rule.top_k
    assert rows is not None, "asked for where boundaries are linear"
    for order in _ORDERS[1:]:
        ends = [order_distance(one, rows, k, order) for one in logits[:_SEARCHED]]
        yield order, np.array([e.lower for e in ends]), np.array([e.upper for e in ends])


def _shares(
    law: str,
    order: int,
    widths: Float64[np.ndarray, "widths"],
    lower: Float64[np.ndarray, "tokens"],
    upper: Float64[np.ndarray, "tokens"],
    block: Int32[np.ndarray, "tokens"] | None,
) -> Iterator[MeasuredShare]:
    """Both ends of each share; errors by leaving out blocks, of draws of independent points."""
    for width in widths.tolist():
        near, surely = lower < width, upper < width
        share = float(near.mean())
        error = math.sqrt(share * (1.0 - share) / len(near))
        if block is not None:
            kept = [block != one for one in np.unique(block)]
            without = [near[rows].mean() for rows in kept if rows.any()]
            error = float(jackknife_error(np.array(without)))
        yield MeasuredShare(law, order, width, None, None, float(surely.mean()), share, error)


def _placed(share: MeasuredShare, centre: str | None, found: Balls | None) -> MeasuredShare:
    if centre is None or found is None:
        return share
    radius = found.around_zero if centre == "origin" else found.around_mean
    return dataclasses.replace(share, centre=centre, radius=radius)


def _counted(share: MeasuredShare, sums: Mapping[int, TieSums], router: Router) -> MeasuredShare:
    """With what counting ties says of a ball of this radius."""
    if share.radius is None or share.law != BALL:
        return share
    experts, hidden = router.weight.shape
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
