"""MGG205: no row is unlike every other row of the checkpoint.

Looked for: for each row its length over the median of its layer, its largest cosine to another row,
the kurtosis of its entries and its share of zeros, beside all rows of all layers. A row stands out
when one of them is many robust standard deviations away from the median, as they are on its side of
it: the end of a wide or of a skew distribution is no exception.

A finding means: this row was not made by the training that made the others: overwritten, patched in
from elsewhere, or partly zeroed.

What to do: compare the row with the source of the checkpoint. The limit is heuristic.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import Measured, Row
from moegeom.checks.statistics import MAD
from moegeom.core.finding import Finding

#: Fewer rows than this have no "others" to speak of.
_LEAST_ROWS = 32

#: Cosines above this are judged where pairs are named.
_NEARLY_EQUAL = 0.98

#: ... and so are lengths this far from the median of their layer.
_FAR = 3.0

#: A twentieth of a normal distribution is further out than so many standard deviations.
_TAIL = 1.645

_FEATURES = {
    "length": "its length",
    "nearest_cosine": "its cosine to the nearest row",
    "row_kurtosis": "the kurtosis of its entries",
    "zeros": "its share of exact zeros",
}


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    rows = _rows(measured)
    found: dict[str, list[tuple[float, int, str]]] = {}
    keys = list(rows)
    number = {router: at for at, router in enumerate(dict.fromkeys(r for r, _ in keys))}
    limit = {router: limits("sigmas", router) for router in number}
    layer = np.array([number[router] for router, _ in keys], np.int64)
    of_rows = np.array(list(limit.values()))[layer]
    for name, words in _FEATURES.items():
        values = np.array([row[name] for row in rows.values()], np.float64)
        known = np.flatnonzero(~np.isnan(values))
        sigmas = _distances(values[known], layer[known], name == "zeros")
        for at in np.flatnonzero(sigmas > of_rows[known]):
            router, expert = keys[known[at]]
            found.setdefault(router, []).append((float(sigmas[at]), expert, words))
    for router, told in sorted(found.items(), key=lambda item: -max(item[1])[0]):
        sigmas, expert, words = max(told)
        others = sorted({e for _, e, _ in told} - {expert})
        also = f" Also expert {', '.join(map(str, others[:6]))}." if others else ""
        yield CHECK.finding(
            router,
            f"expert {expert} is unlike every other row of this checkpoint.",
            f"By {words}: {sigmas:.0f} robust standard deviations from the median of {len(rows):,} "
            f"rows (limit {limit[router]:g}, heuristic).{also}",
        )


def _distances(
    values: Float64[np.ndarray, "rows"], layers: Int64[np.ndarray, "rows"], are_zeros: bool
) -> Float64[np.ndarray, "rows"]:
    """How far each value is from the median, in robust standard deviations of its side of it."""
    middle = np.median(values) if len(values) else 0.0
    spread = MAD * np.median(np.abs(values - middle)) if len(values) else 0.0
    if are_zeros and len(values):
        # trained rows hold no zeros, so there is no spread: count a percent as a sigma
        spread = max(spread, 0.01)
    if not spread:
        return np.zeros(len(values))
    # of the layers in the middle: what happened to one of them is no end of a distribution
    order = np.argsort(layers, kind="stable")
    firsts = np.flatnonzero(np.diff(layers[order], prepend=-1))
    ends = np.array([_twentieths(held.tolist()) for held in np.split(values[order], firsts[1:])])
    below, above = np.maximum(spread, np.median(np.abs(ends - middle), axis=0) / _TAIL)
    return np.where(values > middle, (values - middle) / above, (middle - values) / below)


def _twentieths(values: Sequence[float]) -> tuple[float, float]:
    """The values between which all but a twentieth lies each; of a single one itself."""
    parts = statistics.quantiles(values, n=20) if len(values) > 1 else values
    return parts[0], parts[-1]


def _judged(measured: Measured) -> Iterator[tuple[Row, Row]]:
    """Layer and expert of each row but equal, zero and broken ones, which have checks of their
    own.
    """
    for layer in measured.layers:
        experts = measured.experts.get(layer["router"], ())
        copied = {e.get("duplicate_of") for e in experts}
        for e in experts:
            is_copy = e.get("duplicate_of") not in (None, -1) or e["expert"] in copied
            if not is_copy and e.get("row_norm"):
                yield layer, e


def _rows(measured: Measured) -> dict[tuple[str, int], dict[str, float | None]]:
    found = {}
    for layer, e in _judged(measured):
        kurtosis = e["row_kurtosis"]
        found[layer["router"], e["expert"]] = {
            "length": _relative(e["centred_row_norm"], layer.get("centred_norm_median")),
            "nearest_cosine": _stretched(e["nearest_cosine"]),
            "zeros": e.get("zero_share"),
            "row_kurtosis": math.log(kurtosis) if kurtosis else None,
        }
    return found


def _relative(length: float | None, median: float | None) -> float | None:
    """Logarithm of the ratio; none for rows so long or short that MGG203 names them."""
    if not length or not median or not 1.0 / _FAR < length / median < _FAR:
        return None
    return math.log(length / median)


def _stretched(cosine: float | None) -> float | None:
    """Fisher's transformation; none for rows that are nearly equal, which is MGG201's to say."""
    return None if cosine is None or cosine > _NEARLY_EQUAL else math.atanh(max(cosine, -0.999))


CHECK = Check(
    "MGG205",
    "a row is unlike every other row",
    "warning",
    _judge,
    ("centred_norm_median",),
    (Limit("sigmas", 12.0, "largest distance from the median, in robust standard deviations"),),
    absent="no row is finite",
    too_little=lambda measured: (
        f"fewer than {_LEAST_ROWS} rows" if sum(1 for _ in _judged(measured)) < _LEAST_ROWS else ""
    ),
    severities={"release": "error"},
)
