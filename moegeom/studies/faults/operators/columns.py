"""Damaged columns: runs of them, every n-th, or blocks that weigh otherwise; or the same
coordinates of what the router reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Bool, Float64
from moegeom.engine.plan import one_blas_thread
from moegeom.geometry.low_rank_fit import fitted_factors
from moegeom.studies.faults.operator import Proposal, Site, operator, routed
from moegeom.studies.faults.scope import listed

#: Tokens with other sets, and with equal ones, to which factors are fitted.
_LOOKED = 512

#: Mean square of the pulls of columns, in standard errors, from which they are at issue.
_PULLS = 1.5

#: Factors of columns, with words; how far a fitted one has to be from 1, and how many are tried.
_FACTORS = {
    0.0: "read as zeros",
    0.5: "halved",
    -1.0: "with the other sign",
    1.5: "times 1.5",
    2.0: "twice as large",
    4.0: "four times as large",
}
_APART, _NEAREST = 0.2, 2

#: Parts of the width at whose borders slices begin; numbers of ranks that take turns, and how many
#: of these are tried.
_PARTS, _MOST_TURNS, _TRIED = (2, 4, 8, 16, 32), 16, 4

#: Blocks of columns whose factors are said one by one, and bits of each.
_MOST_BLOCKS, _FACTOR_BITS = 64, 10.0


@operator
def columns_scaled(site: Site) -> Iterator[Proposal]:
    """Runs of columns and every n-th times one factor, and blocks each times its own.

    Which follows from the factors of all columns that make B's choices likely.
    """
    rule, hidden = site.router.rule, site.router.hidden_size
    is_biased_sigmoid = rule.score == "sigmoid" and site.router.selection_bias is not None
    if site.pulls is None or not are_at_issue(site) or not (rule.is_affine or is_biased_sigmoid):
        return
    tried: set[tuple[bytes, float]] = set()
    size = math.ceil(hidden / _MOST_BLOCKS)
    fits = [_fitted(site, width) for width in dict.fromkeys((1, size))]
    for sign in (-1.0, 1.0):
        for text, is_some, bits in _columns(sign * (fits[0] - 1.0)):
            middle = float(np.median(fits[0][is_some]))
            for factor in sorted(_FACTORS, key=lambda one: abs(one - middle))[:_NEAREST]:
                if (is_some.tobytes(), factor) in tried:
                    continue
                tried.add((is_some.tobytes(), factor))
                each = np.where(is_some, factor, 1.0)
                name = f"{text} of {hidden} {_FACTORS[factor]}"
                yield from _weighed(site, name, each, bits=bits)
    for text, each, own_bits in _gains(site, fits[0]):
        for one in _weighed(site, text, each, bits=4.0, own_bits=own_bits):
            yield dataclasses.replace(one, cause="gain not folded")
    changed = np.flatnonzero(np.abs(fits[-1][::size] - 1.0) > _APART)
    if len(changed):
        text = f"{len(changed)} blocks of {size} columns weighed otherwise ({listed(changed)})"
        own_bits = _FACTOR_BITS * math.ceil(hidden / size)
        yield from _weighed(site, text, fits[-1], own_bits=own_bits)


def _gains(
    site: Site, factors: Float64[np.ndarray, "hidden"]
) -> Iterator[tuple[str, Float64[np.ndarray, "hidden"], float]]:
    """Gains that follow from the factors: a number added to each, and their order; in words, what
    they make of columns, and the bits of an order.
    """
    gain = site.router.gain
    if gain is None or not gain.all():
        return
    own = gain.astype(np.float64)
    (slope, added), *_ = np.linalg.lstsq(np.c_[own, np.ones(len(own))], factors * own)
    if slope > 0.0 and abs(added) > _APART * slope * float(np.median(np.abs(own))):
        number = round(float(added / slope), 1)
        yield f"norm gain taken as g {number:+g}", (own + number) / own, 0.0
    moved = np.empty(len(own))
    moved[np.argsort(factors * own)] = np.sort(own)
    order = math.lgamma(len(own) + 1.0) / math.log(2.0)
    yield "norm gain in another order", moved / own, min(order, _FACTOR_BITS * _MOST_BLOCKS)


def are_at_issue(site: Site) -> bool:
    """Whether columns pull at B's choices as noise does not; of few tokens nobody knows."""
    return site.pulls is None or float((site.pulls**2).mean()) >= _PULLS


def _weighed(
    site: Site,
    text: str,
    factors: Float64[np.ndarray, "hidden"],
    bits: float = 0.0,
    own_bits: float = 0.0,
) -> Iterator[Proposal]:
    router = site.router
    rows = (router.weight.astype(np.float64) * factors).astype(router.weight.dtype)
    edited = dataclasses.replace(router, weight=rows)
    for one in routed(
        site, text.partition(" (")[0], text, "columns damaged", edited, bits=bits, own_bits=own_bits
    ):
        yield dataclasses.replace(one, of_all_only=True)


def _fitted(site: Site, size: int) -> Float64[np.ndarray, "hidden"]:
    """A factor for each column, the same in blocks of this size, that makes B's choices likely."""
    # those that agree say where factors would break what holds
    halves = (np.flatnonzero(site.differs), np.flatnonzero(~site.differs))
    some = np.sort(np.concatenate([half[:: -(-len(half) // _LOOKED) or 1] for half in halves]))
    values = site.values_at(site.number)(some)
    assert values is not None
    with one_blas_thread():
        factors = fitted_factors(values, site.router.weight, site.choices_of(some), size)
    return np.repeat(factors, size)[: values.shape[1]]


def _columns(
    apart: Float64[np.ndarray, "hidden"],
) -> Iterator[tuple[str, Bool[np.ndarray, "hidden"], float]]:
    """Runs and every n-th of columns whose factors are apart, in words, and the bits of a name."""
    hidden, number = len(apart), np.arange(len(apart))
    beyond = apart - _APART
    total = np.concatenate([[0.0], np.cumsum(beyond)])
    stop = int((total - np.minimum.accumulate(total)).argmax())
    start = int(total[: stop + 1].argmin())
    ends = {(start, stop)}
    for parts in _PARTS:
        part = hidden / parts
        ends.add((round(round(start / part) * part), round(round(stop / part) * part)))
    for first, last in sorted(ends):
        inside = (number >= first) & (number < last)
        few = int(inside.sum())
        if 0 < few < hidden and beyond[inside].sum() > 0.0:
            # half of most columns is twice the others: few are said first
            bits = 2.0 * math.log2(hidden) + 4.0 * few / hidden
            yield f"columns {first}-{last - 1}", inside, bits
    turns = []
    for count in range(2, min(_MOST_TURNS, hidden // 2) + 1):
        of_each = np.bincount(number % count, weights=beyond, minlength=count)
        some = np.flatnonzero(of_each > 0.0)
        if 0 < len(some) < count:
            inside = np.isin(number % count, some)
            # many residues fit anything: each costs as much as a column
            turns.append((float(beyond[inside].sum()) - len(some), count, some, inside))
    for _, count, some, inside in sorted(turns, key=lambda one: -one[0])[:_TRIED]:
        yield f"columns {listed(some)} modulo {count}", inside, 4.0 + count
