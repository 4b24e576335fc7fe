"""How far each row of a router has moved since the baseline, and whether rows changed places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from moegeom.check._check import Unknown
from moegeom.check._measured import Measured, Row

#: A row has changed places when another row of the baseline is this much nearer than its own.
_NEARER = 0.25

#: ... and its own place is further away than this share of its length.
_AWAY = 0.05


@dataclass(frozen=True, eq=False)
class Drift:
    """One router beside its baseline.

    ``place[i]`` is the row of the baseline that row i is compared with: i, unless rows changed
    places. ``moved[i]`` is the distance to it over its length, from 32 projections: true to 12 %.
    ``scale`` is the factor by which all rows were multiplied; it is taken out for an affine rule,
    whose choices it does not change.
    """

    place: Int64[np.ndarray, "experts"]
    moved: Float64[np.ndarray, "experts"]
    scale: float

    @property
    def renumbered(self) -> Bool[np.ndarray, "experts"]:
        """Rows that are found in another place of the baseline."""
        return self.place != np.arange(len(self.place))


def drift_of(measured: Measured, router: str) -> Drift | None:
    """The drift of a router; None without a baseline of the same shape, or with broken rows."""
    before, now = measured.before(router), _projections(measured, router)
    if before is None or now is None or len(now) != len(before.norms):
        return None
    old = before.projections.astype(np.float64)
    lengths = np.where(before.norms > 0.0, before.norms, np.inf).astype(np.float64)
    facts = measured.facts(router)
    if not facts.get("is_affine"):
        # a vector added to every row changes a curved rule: compare the rows with their mean
        now = now + _mean(measured, router)
        old = old + before.mean_projections
    scale = 1.0
    if facts.get("is_affine") and not facts.get("has_logit_bias"):
        # beside a bias a common factor would change choices
        scale = _scale(now, old)
    if not 0.0 < scale < np.inf or not np.isfinite(now).all():
        return None
    apart = _distances(now / scale, old)
    own = np.diag(apart) / lengths
    nearest = apart.argmin(axis=1)
    is_elsewhere = (own > _AWAY) & (apart.min(axis=1) < _NEARER * np.diag(apart))
    place = np.where(is_elsewhere, nearest, np.arange(len(own)))
    moved = apart[np.arange(len(own)), place] / lengths[place]
    return Drift(place, moved, scale)


def drifts(measured: Measured) -> Iterator[tuple[Row, Drift] | Unknown]:
    """Every router that the baseline knows, with its drift, or why it cannot be compared."""
    for row in measured.layers:
        router = row["router"]
        before = measured.before(router)
        if before is None:
            continue
        drift = drift_of(measured, router)
        if drift is not None:
            yield row, drift
        elif len(measured.experts[router]) == len(before.norms):  # else MGI124 says so
            yield Unknown(router, "its rows cannot be compared: zero, infinite, or not measured")


def places_in_baseline(measured: Measured, router: str) -> Int64[np.ndarray, "experts"]:
    """The expert of the baseline that each expert is, if its row was renumbered."""
    drift = drift_of(measured, router)
    if drift is None or len(set(drift.place.tolist())) < len(drift.place):
        return np.arange(len(measured.experts[router]))
    return drift.place


def _projections(measured: Measured, router: str) -> Float64[np.ndarray, "experts count"] | None:
    rows = [e.get("row_projections") for e in measured.experts[router]]
    return None if any(row is None for row in rows) else np.array(rows, dtype=np.float64)


def _mean(measured: Measured, router: str) -> Float64[np.ndarray, "count"]:
    row = next(row for row in measured.layers if row["router"] == router)
    return np.array(row["mean_row_projections"], dtype=np.float64)


def _scale(
    now: Float[np.ndarray, "experts count"], old: Float[np.ndarray, "experts count"]
) -> float:
    """Median ratio of lengths in order of length: the same whatever rows changed places."""
    lengths = [np.sort(np.linalg.norm(rows, axis=1)) for rows in (now, old)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = lengths[0] / lengths[1]
    known = ratios[np.isfinite(ratios)]
    return float(np.median(known)) if known.size else 1.0


def _distances(
    a: Float64[np.ndarray, "rows count"], b: Float64[np.ndarray, "others count"]
) -> Float64[np.ndarray, "rows others"]:
    return np.stack([np.linalg.norm(b - row, axis=1) for row in a])
