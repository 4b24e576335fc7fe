"""How far each row of a router has moved since the baseline, and whether rows changed places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from moegeom.checks.check import Unknown
from moegeom.checks.measured import Measured, Row

#: A row has changed places when another row of the baseline is this much nearer than its own.
_NEARER = 0.25

#: ... and its own place is further away than this share of its length.
_AWAY = 0.05


def spread_of(bias: Float[np.ndarray, "experts"]) -> float:
    """Standard deviation of biases; inf where their squares leave the range of numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(bias.std())
    return found if np.isfinite(found) else np.inf


@dataclass(frozen=True, eq=False)
class Drift:
    """One router beside its baseline.

    ``place[i]`` is the row of the baseline that row i is compared with: i, unless rows changed
    places. ``moved[i]`` is the distance to it over its length, from 32 projections: right where the
    row was scaled, turned round or zeroed, else true to 12 % (one standard error).
    ``scale`` is the factor by which most rows were multiplied; it is taken out for an affine rule,
    whose choices it does not change, and so is the vector that was added to most rows.
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
    if not np.isfinite(now).all():
        return None
    is_affine = bool(facts.get("is_affine"))
    # beside a bias a common factor would change choices
    scales = _scales(now, old) if is_affine and not facts.get("has_logit_bias") else {1.0}
    found = [_placed(now / scale, old, lengths, scale, is_affine) for scale in sorted(scales)]
    # of equally good ones that which leaves the rows as long as they are
    best = min(found, key=lambda drift: (np.median(drift.moved), abs(np.log(drift.scale))))
    return best if np.isfinite(best.moved).all() else None


def _placed(
    now: Float64[np.ndarray, "experts count"],
    old: Float64[np.ndarray, "experts count"],
    lengths: Float64[np.ndarray, "experts"],
    scale: float,
    is_affine: bool,
) -> Drift:
    """Where each row is, and how far from there; a few rows that moved do not move the others.

    The vector that is common to all rows is the median of the differences: the mean of the rows,
    which projections are stored without, is dragged by one row alone.
    """
    place, shift = np.arange(len(now)), np.zeros(now.shape[1])
    for _ in range(2 if is_affine else 0):
        shift = np.median(now - old[place], axis=0)
        place = _place(now - shift, old, lengths)
    if not is_affine:
        place = _place(now, old, lengths)
    return Drift(place, _moved(now - shift, old[place], lengths[place]), scale)


def _moved(
    now: Float64[np.ndarray, "experts count"],
    old: Float64[np.ndarray, "experts count"],
    lengths: Float64[np.ndarray, "experts"],
) -> Float64[np.ndarray, "experts"]:
    """Distances over lengths; projections stand only for the part that is across the old row.

    The part along it is a multiple of a row whose true length is known.
    """
    squares = (old**2).sum(axis=1)
    along = np.divide((now * old).sum(axis=1), squares, np.ones(len(now)), where=squares > 0.0)
    across = np.linalg.norm(now - along[:, None] * old, axis=1) / lengths
    return np.hypot(along - 1.0, across)


def _place(
    now: Float64[np.ndarray, "experts count"],
    old: Float64[np.ndarray, "experts count"],
    lengths: Float64[np.ndarray, "experts"],
) -> Int64[np.ndarray, "experts"]:
    """Its own place of each row, or another one that it is much nearer to."""
    apart = _distances(now, old)
    own = np.diag(apart) / lengths
    nearest = apart.argmin(axis=1)
    is_elsewhere = (own > _AWAY) & (apart.min(axis=1) < _NEARER * np.diag(apart))
    return np.where(is_elsewhere, nearest, np.arange(len(own)))


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


def _scales(
    now: Float[np.ndarray, "experts count"], old: Float[np.ndarray, "experts count"]
) -> set[float]:
    """Factors that may have multiplied all rows: median ratios of lengths in order of length, the
    same whatever rows changed places, and of distances of rows, the same whatever was added to all
    and, unlike the lengths, for most pairs whatever happened to a few rows; 1 is one of them.
    """
    lengths = [np.sort(np.linalg.norm(rows, axis=1)) for rows in (now, old)]
    pairs = np.triu_indices(len(now), 1)
    apart = [_distances(rows, rows)[pairs] for rows in (now, old)]
    found = {1.0}
    for a, b in (lengths, apart):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratios = a / b
        known = ratios[np.isfinite(ratios) & (ratios > 0.0)]
        if known.size:
            found.add(float(np.median(known)))
    return found


def _distances(
    a: Float64[np.ndarray, "rows count"], b: Float64[np.ndarray, "others count"]
) -> Float64[np.ndarray, "rows others"]:
    return np.stack([np.linalg.norm(b - row, axis=1) for row in a])
