"""Rows and routers that were not made by the training that made the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from moegeom.checks.check import Limit, Limits, Unknown, check, same_sentence
from moegeom.checks.measured import Measured, Row
from moegeom.checks.statistics import MAD
from moegeom.core.finding import Finding
from moegeom.core.shapes import Float64, Int64
from moegeom.core.text import listed

#: Fewer rows than this have no "others" to speak of.
_LEAST_ROWS = 32

#: Cosines above this are judged where pairs are named.
_NEARLY_EQUAL = 0.98

#: ... and so are lengths this far from the median of their layer.
_FAR = 3.0

#: A twentieth of a normal distribution is further out than so many standard deviations.
_TAIL = 1.645

_ROW_FEATURES = {
    "length": "its length",
    "nearest_cosine": "its cosine to the nearest row",
    "row_kurtosis": "the kurtosis of its entries",
    "zeros": "its share of exact zeros",
}


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


@check(
    "MGG205",
    "a row is unlike every other row",
    "warning",
    ("centred_norm_median",),
    limits=(
        Limit("sigmas", 12.0, "largest distance from the median, in robust standard deviations"),
    ),
    absent="no row is finite",
    too_little=lambda measured: (
        f"fewer than {_LEAST_ROWS} rows" if sum(1 for _ in _judged(measured)) < _LEAST_ROWS else ""
    ),
    severities={"release": "error"},
)
def row_unlike_others(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """No row is unlike every other row of the checkpoint.

    Looked for: for each row its length over the median of its layer, its largest cosine to another
    row, the kurtosis of its entries and its share of zeros, beside all rows of all layers: one that
    is many robust standard deviations from the median, as they are on its side of it, so that the
    end of a wide or skew distribution is no exception.

    A finding means: this row was not made by the training that made the others: overwritten,
    patched in from elsewhere, or partly zeroed.

    What to do: compare the row with the source of the checkpoint. The limit is heuristic.
    """
    rows = _rows(measured)
    outliers: dict[str, list[tuple[float, int, str]]] = {}
    keys = list(rows)
    number = {router: at for at, router in enumerate(dict.fromkeys(r for r, _ in keys))}
    limit = {router: limits("sigmas", router) for router in number}
    layer = np.array([number[router] for router, _ in keys], np.int64)
    of_rows = np.array(list(limit.values()))[layer]
    for name, words in _ROW_FEATURES.items():
        values = np.array([row[name] for row in rows.values()], np.float64)
        present = np.flatnonzero(~np.isnan(values))
        sigmas = _distances(values[present], layer[present], name == "zeros")
        for at in np.flatnonzero(sigmas > of_rows[present]):
            router, expert = keys[present[at]]
            outliers.setdefault(router, []).append((float(sigmas[at]), expert, words))
    for router, figures in sorted(outliers.items(), key=lambda item: -max(item[1])[0]):
        sigmas, expert, words = max(figures)
        others = sorted({e for _, e, _ in figures} - {expert})
        also = f" Also expert {', '.join(map(str, others[:6]))}." if others else ""
        yield row_unlike_others.finding(
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
    ends = np.array([_twentieths(one.tolist()) for one in np.split(values[order], firsts[1:])])
    below, above = np.maximum(spread, np.median(np.abs(ends - middle), axis=0) / _TAIL)
    return np.where(values > middle, (values - middle) / above, (middle - values) / below)


def _twentieths(values: Sequence[float]) -> tuple[float, float]:
    """The values between which all but a twentieth lies each; of a single one itself."""
    parts = statistics.quantiles(values, n=20) if len(values) > 1 else values
    return parts[0], parts[-1]


def _rows(measured: Measured) -> dict[tuple[str, int], dict[str, float | None]]:
    features = {}
    for layer, e in _judged(measured):
        kurtosis = e["row_kurtosis"]
        features[layer["router"], e["expert"]] = {
            "length": _relative(e["centred_row_norm"], layer.get("centred_norm_median")),
            "nearest_cosine": _stretched(e["nearest_cosine"]),
            "zeros": e.get("zero_share"),
            "row_kurtosis": math.log(kurtosis) if kurtosis else None,
        }
    return features


def _relative(length: float | None, median: float | None) -> float | None:
    """Logarithm of the ratio; none for rows so long or short that MGG203 names them."""
    if not length or not median or not 1.0 / _FAR < length / median < _FAR:
        return None
    return math.log(length / median)


def _stretched(cosine: float | None) -> float | None:
    """Fisher's transformation; none for rows that are nearly equal, which is MGG201's to say."""
    return None if cosine is None or cosine > _NEARLY_EQUAL else math.atanh(max(cosine, -0.999))


_LEAST_LAYERS = 8

_LAYER_FEATURES = {
    "centred_norm_median": "the median length of its rows",
    "gram_score_centred": "its Gram score",
    "effective_rank": "its effective rank",
}


@check(
    "MGG206",
    "a router is unlike those of its neighbouring layers",
    "warning",
    ("centred_norm_median",),
    limits=(
        Limit("factor", 1.5, "largest ratio to the neighbours' mean"),
        Limit("times_usual", 8.0, "the same over the median of all layers"),
    ),
    absent="no row is finite",
    too_little=lambda measured: (
        f"fewer than {_LEAST_LAYERS} layers" if len(measured.layers) < _LEAST_LAYERS else ""
    ),
    severities={"release": "error"},
)
def layer_unlike_neighbours(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """No layer is unlike its neighbours.

    Looked for: the median length, Gram score and effective rank of each router beside the mean of
    the layers before and after it, where the difference is many times what other layers show, and
    large in itself. Needs eight layers.

    A finding means: this router was not trained with the others: it comes from another revision,
    was initialised anew, or was scaled.

    What to do: compare the layer with the source of the checkpoint. The limits are heuristic.
    """
    largest: dict[str, tuple[float, str]] = {}
    for name, words in _LAYER_FEATURES.items():
        rows = [row for row in measured.layers if _value(row, name) is not None]
        if len(rows) < _LEAST_LAYERS:  # of one figure; of all, there is too little to judge
            continue
        steps = _steps([_value(row, name) or 0.0 for row in rows])
        usual = statistics.median(abs(step) for step in steps)
        for row, step in zip(rows, steps, strict=True):
            router = row["router"]
            times = abs(step) / usual if usual else math.inf
            is_far = abs(step) > math.log(limits("factor", router))
            if is_far and times > limits("times_usual", router):
                largest[router] = max(largest.get(router, (0.0, "")), (abs(step), words))
    for router, (step, words) in sorted(largest.items(), key=lambda item: -item[1][0]):
        yield layer_unlike_neighbours.finding(
            router,
            "this router is unlike those of the layers before and after it.",
            f"By {words}: {math.exp(step):.2f} times apart from the mean of its neighbours "
            f"(limit {limits('factor', router):g}, heuristic).",
        )


def _value(row: Row, name: str) -> float | None:
    """Logarithm of the figure; for the score, of the rms cosine that it is one minus."""
    value = row.get(name)
    if value is not None and name == "gram_score_centred":
        value = 1.0 - value
    return math.log(value) if value else None


def _steps(values: list[float]) -> list[float]:
    """Each value less the mean of its two neighbours, or less the nearer one where that is less.

    The neighbour of an odd layer has another neighbour, which it is close to; so have the first and
    last layer, which are compared with the two layers next to them.
    """
    last = len(values) - 1
    steps = []
    for i, value in enumerate(values):
        first = min(max(i - 1, 0), last - 2)
        around = [values[j] for j in range(first, first + 3) if j != i]
        nearest = min((value - other for other in around), key=abs)
        mean = value - sum(around) / len(around)
        steps.append(nearest if abs(nearest) < abs(mean) else mean)
    return steps


#: With fewer numbers a spread tells nothing.
_LEAST = 512


def _too_little(measured: Measured) -> str:
    config = measured.run["initialised"]
    if "initializer_range" not in config:
        is_enough = any(facts.get("law") is not None for facts in config["routers"])
        return "" if is_enough else "no initializer_range, and too few numbers to tell a law"
    counts = [facts["num_weights"] for facts in config["routers"]]
    return "" if max(counts, default=0) >= _LEAST else f"routers of fewer than {_LEAST} numbers"


@check(
    "MGG207",
    "rows are as an initialisation draws them",
    "warning",
    limits=(
        Limit(
            "standard_errors",
            3.0,
            "largest distance from what normal numbers would show",
            basis="definition",
        ),
    ),
    facts="initialised",
    absent="these results do not hold the moments of rows",
    alike=same_sentence,
    too_little=_too_little,
    severities={"release": "error", "training": "note"},
)
def as_initialised(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """No router, and no group of its rows, is as an initialisation draws it.

    Looked for: weights that are independent normal or uniform numbers of one size, whatever it is,
    in routers of 32,768 numbers or more, in runs of as many among other rows, and in smaller
    routers that have 262,144 together; weights whose standard deviation is the config's
    ``initializer_range``, whose mean is 0 and whose kurtosis is that of a normal distribution, each
    within three standard errors of what as many normal numbers would show, and whose rows are no
    more aligned than independent ones: rows of a trained router share directions. The same of four
    rows or more among others that are not.

    A finding means: this router, or these rows, are as they were drawn, or training has hardly
    moved them: a checkpoint of step 0, a router that no gradient reached, experts that were added
    and never trained, or rows that a conversion drew anew. By chance fewer than one router in a
    thousand has it, if its spread moved by a few standard errors at all. No finding does not say
    that routers were trained: other initialisations are not known here, and a router may move
    without learning anything.

    What to do: compare with an earlier checkpoint (moegeom diff): a router without a gradient is
    identical, or moves by weight decay alone. Early in training it is normal.
    """
    config = measured.run["initialised"]
    rows = {row["router"]: row for row in measured.layers}
    in_part = {some["router"] for some in config.get("groups", ())}
    for facts in config["routers"]:
        if facts["router"] in in_part:
            continue  # said below, of these rows alone
        if law := facts.get("law"):
            yield as_initialised.finding(
                facts["router"],
                f"its rows are independent {law} numbers of one size: standard deviation "
                f"{facts['std']:.4g}.",
                "Rows of a trained router share directions, and differ in size. Was it trained?",
            )
            continue
        if "initializer_range" not in config:
            continue
        count, spread = facts["num_weights"], facts["std"] / config["initializer_range"]
        if count < _LEAST:  # at this router; at all, there is too little to judge
            continue
        errors = (
            (spread - 1.0) * math.sqrt(2.0 * count),
            facts["mean"] / config["initializer_range"] * math.sqrt(count),
            facts["kurtosis"] * math.sqrt(count / 24.0),
        )
        most = limits("standard_errors", facts["router"])
        alignment = _alignment(measured, rows.get(facts["router"], {}))
        if max(*map(abs, errors), alignment) > most:
            continue
        yield as_initialised.finding(
            facts["router"],
            f"its rows are spread as the config initialises them: standard deviation "
            f"{facts['std']:.4g}, initializer_range {config['initializer_range']:g}.",
            f"Of {count:,} normal numbers: standard deviation, mean and kurtosis are "
            f"{errors[0]:+.1f}, {errors[1]:+.1f} and {errors[2]:+.1f} standard errors away, and "
            "its rows share no direction. Was it trained?",
        )
    for row in measured.layers:  # moments of constant rows are not defined, and nobody draws those
        if measured.facts(row["router"]).get("num_non_finite_rows"):
            yield Unknown(row["router"], "the moments of its rows cannot be computed")
    for some in config.get("groups", ()):
        law = some.get("law")
        entries = (
            f"{law} numbers of one size, and they share no direction with each other"
            if law
            else f"normal numbers of standard deviation {config['initializer_range']:g}, and they "
            "share no direction with each other or with the other rows"
        )
        yield as_initialised.finding(
            some["router"],
            f"{len(some['rows'])} of {some['num_rows']} rows are as "
            f"{'an initialisation' if law else 'the config'} draws them: expert "
            f"{listed(some['rows'])}.",
            f"Their entries are {entries}. Were they trained?",
        )


def _alignment(measured: Measured, row: Row) -> float:
    """How far the mean squared cosine of the stored rows is above 1/D, in standard errors.

    Of independent rows it has the standard error 2/(E D), to first order. 0 where it is not known.
    """
    score, facts = row.get("gram_score_raw"), measured.facts(row.get("router", ""))
    if score is None or not facts:
        return 0.0
    hidden, experts = facts["hidden_size"], facts["num_experts"]
    return ((1.0 - score) ** 2 * hidden - 1.0) * experts / 2.0
