"""Rows of one router: finite, apart from each other, of similar lengths, spanning their space."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator

from moegeom.checks.check import Limit, Limits, check, without_saying
from moegeom.checks.measured import Measured, Row
from moegeom.checks.statistics import MAD
from moegeom.core.finding import Finding
from moegeom.core.text import listed, number_of


@check("MGI101", "a router row is not finite", "error", ("num_non_finite_rows",))
def non_finite_rows(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Every router row is finite.

    Looked for: rows, or their biases, with nan or infinity.

    A finding means: a token that meets such a row has no order among its experts, and engines
    differ in what they make of it. The file is damaged, or training diverged before it was saved.

    What to do: compare the file with its source, then look at earlier checkpoints.
    """
    for row in measured.layers:
        if not row.get("num_non_finite_rows"):
            continue
        rows = measured.experts[row["router"]]
        experts = [e["expert"] for e in rows if e["is_row_finite"] is False]
        is_weight = measured.facts(row["router"]).get("num_non_finite_rows", len(experts))
        what = "router rows" if is_weight else "biases"
        yield non_finite_rows.finding(
            row["router"],
            f"{len(experts)} of {len(rows)} {what} are not finite: expert {listed(experts)}.",
            "No token has an order among its experts here. The file is damaged, or training "
            "diverged before it was saved.",
        )


@check(
    "MGI102",
    "the gain in front of a router is not finite",
    "error",
    ("num_non_finite_gain",),
    absent="no norm stands in front of a router",
    concerns=without_saying,
)
def non_finite_gain(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The gain of the norm in front of every router is finite.

    Looked for: entries of the gain with nan or infinity.

    A finding means: the router input has that coordinate nan or infinite for every token, and with
    it every logit. The file is damaged, or training diverged before it was saved.

    What to do: compare the file with its source, then look at earlier checkpoints.
    """
    for row in measured.layers:
        count = row.get("num_non_finite_gain")
        if count:
            entries = number_of(count, "entry of the gain is", "entries of the gain are")
            yield non_finite_gain.finding(
                row["router"],
                f"{entries} not finite: neither is any logit of any token.",
                "The norm in front multiplies the router input by its gain, coordinate by "
                "coordinate.",
            )


@check("MGI103", "a router row is zero", "error", ("num_zero_rows",))
def zero_rows(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """No router row is zero.

    Looked for: rows whose every weight is 0, as stored or times the gain of the norm in front.

    A finding means: such an expert has the same logit for every token. It was never initialised, or
    never written.

    What to do: compare the file with its source.
    """
    for row in measured.layers:
        rows = measured.experts[row["router"]]
        experts = [e["expert"] for e in rows if 0.0 in (e["row_norm"], e.get("effective_row_norm"))]
        if not experts:
            continue
        stored = row.get("num_zero_rows")
        because = "" if stored else " The gain of the norm in front makes them so."
        yield zero_rows.finding(
            row["router"],
            f"{len(experts)} of {len(rows)} router rows are zero: expert {listed(experts)}.",
            "Their logit is the same for every token: nothing was trained or written here."
            + because,
        )


@check("MGI104", "two experts share a router row", "error", ("num_duplicate_rows",))
def duplicate_rows(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """No two experts share a router row.

    Looked for: rows of one router that are equal bit for bit, biases included.

    A finding means: the two score alike for every token, and ties go to the lower number: without
    groups the later one is never chosen alone. A merge that copied an expert, or a save that wrote
    a slice twice, leaves such rows; training does not.

    What to do: list the rows and compare the file with its source.
    """
    for row in measured.layers:
        if not row.get("num_duplicate_rows"):
            continue
        router = row["router"]
        duplicates = [e for e in measured.experts[router] if e["duplicate_of"] not in (None, -1)]
        pairs = ", ".join(f"{e['duplicate_of']} and {e['expert']}" for e in duplicates[:3])
        rest = number_of(len(duplicates) - 3, "more expert")
        more = f" and {rest} like an earlier one" if len(duplicates) > 3 else ""
        slots = [e["num_slots"] for e in duplicates if e.get("num_slots") is not None]
        on_tokens = (
            f" Chosen {sum(slots):,} times for {number_of(row['num_tokens'], 'token')}."
            if slots
            else ""
        )
        yield duplicate_rows.finding(
            router,
            f"experts {pairs}{more} are the same row: no token tells them apart.",
            f"Bit-identical weights and biases; ties go to the lower number.{on_tokens} "
            "A fault of the file, not of the data.",
        )


@check(
    "MGG201",
    "two experts have nearly the same direction",
    "warning",
    ("max_cosine_centred",),
    limits=(Limit("cosine", 0.98, "largest cosine between two centred effective rows"),),
    absent="fewer than two rows are finite",
    severities={"release": "error"},
)
def near_parallel_rows(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """No two experts have nearly the same direction.

    Looked for: pairs of rows whose cosine, after centring and with the gain folded in, is near 1.

    A finding means: the two experts are chosen by nearly the same tokens and differ by their length
    alone. An expert was copied and trained a little, or two have collapsed onto each other.

    What to do: compare the two experts' load and weights. The limit is from practice.
    """
    for row in sorted(measured.layers, key=lambda row: -(row.get("max_cosine_centred") or -1.0)):
        router, largest = row["router"], row.get("max_cosine_centred")
        limit = limits("cosine", router)
        if largest is None or largest <= limit:
            continue
        close = [
            e
            for e in measured.experts[router]
            if (e["nearest_cosine"] or -1.0) > limit and not _are_duplicates(measured, router, e)
        ]
        if not close:
            continue  # bit-equal rows are MGI104's to say
        pairs = {tuple(sorted((e["expert"], e["nearest_expert"]))) for e in close}
        examples = ", ".join(f"{a} and {b}" for a, b in sorted(pairs)[:3])
        worst = max(e["nearest_cosine"] for e in close)
        yield near_parallel_rows.finding(
            router,
            f"experts {examples} have nearly the same direction"
            + (f" ({number_of(len(pairs), 'such pair')})." if len(pairs) > 3 else "."),
            f"Largest cosine {_below_one(worst)} (limit {limit:g}, heuristic), rows centred and "
            "the gain of the norm folded in.",
        )


def _below_one(cosine: float) -> str:
    """Four digits, more where they would all be nines."""
    return (
        f"{cosine:.4f}"
        if cosine < 0.99995
        else "1 to six digits"
        if cosine > 1 - 5e-7
        else f"{cosine:.6f}"
    )


def _are_duplicates(measured: Measured, router: str, expert: Row) -> bool:
    rows = {e["expert"]: e for e in measured.experts[router]}
    other = rows[expert["nearest_expert"]]
    return expert["duplicate_of"] == other["expert"] or other["duplicate_of"] == expert["expert"]


#: Rows as parallel as this lower the rank by one for each pair: MGG201 names them.
_PARALLEL = 1.0 - 1e-6


@check(
    "MGG202",
    "the rows of a router span too few directions",
    "warning",
    ("row_rank",),
    limits=(
        Limit("condition", 1000.0, "largest condition number of the centred effective rows"),
        Limit("effective_rank_share", 0.25, "least effective rank over the largest possible rank"),
    ),
    severities={"release": "error"},
)
def rank_lost(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The rows of a router span all the directions they can.

    Looked for: a rank below the largest possible, a condition number far above that of trained
    routers, and an effective rank (exp of the entropy of the singular values) far below the rank.

    A finding means: few directions of the input choose the experts; many expert sets cannot occur,
    or only by large inputs. A low-rank update, a merge, or collapse.

    What to do: compare with earlier checkpoints. The limits are from practice; where there are
    about as many experts as columns, the limit is raised by what random rows of the shape would
    show.
    """
    for row in sorted(measured.layers, key=lambda row: row.get("effective_rank") or 0.0):
        router, rank, possible = row["router"], row.get("row_rank"), row.get("row_rank_possible")
        if (
            not possible
            or rank is None
            or row.get("num_zero_rows")
            or row.get("num_duplicate_rows")
        ):
            continue  # equal rows lower the rank: that is said where they are named
        if (row.get("max_cosine_centred") or 0.0) > _PARALLEL:
            continue  # so do parallel ones
        effective = row["effective_rank"] or 0.0
        condition = row["row_condition"]
        least = limits("effective_rank_share", router) * possible
        if rank < possible:
            title = f"the rows have rank {rank} of {possible}."
        elif condition is not None and condition > limits("condition", router) * _raised(
            measured, router
        ):
            title = f"the rows have condition number {condition:.3g}."
        elif effective < least:
            title = f"the rows use {effective:.1f} of {possible} directions."
        else:
            continue
        yield rank_lost.finding(
            router,
            title,
            f"Effective rank {effective:.1f} of {possible}, condition number "
            f"{'infinite' if condition is None or rank < possible else format(condition, '.3g')} "
            f"(limits {least:.1f} and {limits('condition', router):g}, heuristic).",
        )


def _raised(measured: Measured, router: str) -> float:
    """(1 + sqrt(g)) / (1 - sqrt(g)), the condition number of large random matrices, over ten.

    g is the smaller of rows and columns over the larger; at least 1, and infinite for a square.
    """
    facts = measured.facts(router)
    sides = sorted((max(facts.get("num_experts", 1) - 1, 0), facts.get("hidden_size", 0)))
    root = math.sqrt(sides[0] / sides[1]) if sides[1] else 0.0
    return max(1.0, 0.1 * (1.0 + root) / (1.0 - root)) if root < 1.0 else math.inf


#: Standard error of a robust standard deviation of n normal numbers, times sqrt(n), over it.
_MAD_ERROR = 1.17


@check(
    "MGG203",
    "a row is much longer or shorter than its layer's",
    "warning",
    ("centred_norm_median",),
    limits=(
        Limit("ratio", 3.0, "largest ratio of a row's length to the median of its layer"),
        # Of 61 layers of 256 rows with lengths of a log-normal law one row in a hundred models.
        Limit("sigmas", 5.0, "the same in robust standard deviations of the layer's lengths"),
    ),
    absent="no row is finite",
    severities={"release": "error"},
)
def norm_outliers(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """No expert's row is much longer or shorter than those of its layer.

    Looked for: the length of each centred effective row over the median of its layer, where the
    spread of the other lengths does not explain it: of widely spread lengths no long one is an
    exception.

    A finding means: a long row wins and loses by its length more than by its direction and takes
    the tokens it leans to; a short one hardly competes.

    What to do: look at the load of the expert on real tokens. The limit is from practice.
    """

    def excess(row: Row) -> float:
        low, high = row.get("centred_norm_min_over_median"), row.get("centred_norm_max_over_median")
        return max(high or 1.0, 1.0 / low if low else 1.0)

    for row in sorted(measured.layers, key=excess, reverse=True):
        router, median = row["router"], row.get("centred_norm_median")
        limit = limits("ratio", router)
        if not median or excess(row) <= limit:
            continue
        ratios = {
            e["expert"]: e["centred_row_norm"] / median
            for e in measured.experts[router]
            if e["centred_row_norm"] is not None and e.get("row_norm")  # zero rows: MGI103
        }
        if not ratios:
            continue
        bound = max(math.log(limit), limits("sigmas", router) * _spread(ratios.values()))
        far = [(e, r) for e, r in ratios.items() if not r or abs(math.log(r)) > bound]
        far.sort(key=lambda pair: -max(pair[1], 1.0 / pair[1] if pair[1] else float("inf")))
        if far:
            examples = ", ".join(f"{expert} ({ratio:.2g}x)" for expert, ratio in far[:4])
            more = f" and {len(far) - 4} more" if len(far) > 4 else ""
            yield norm_outliers.finding(
                router,
                f"rows far from the median length: expert {examples}{more}.",
                f"Limit {limit:g} times or 1/{limit:g} of the median, heuristic, and "
                f"{limits('sigmas', router):g} robust standard deviations of the layer; rows "
                "centred, gain folded in.",
            )


def _spread(ratios: Collection[float]) -> float:
    """Robust standard deviation of the logarithms of lengths over their median, with three of its
    standard errors: of few rows it is hardly known.
    """
    steps = [abs(math.log(ratio)) if ratio else math.inf for ratio in ratios]
    return MAD * statistics.median(steps) * (1.0 + 3.0 * _MAD_ERROR / math.sqrt(len(steps)))


@check(
    "MGG204",
    "router rows crowd together",
    "warning",
    ("gram_score_centred",),
    limits=(Limit("fall", 0.3, "largest fall of the Gram score below that of random rows"),),
    absent="fewer than two rows are finite",
    severities={"training": "note"},
)
def gram_collapse(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The rows of a router are not far from orthogonal.

    Looked for: the Gram score of the centred effective rows, 1 - rms cosine, beside the score of
    random rows of the same shape and the best score that any rows could have (Welch). Not centred,
    a score falls with any vector that is common to all rows, and means nothing.

    A finding means: rows crowd into a few directions.

    What to do: look at the effective rank and at the nearest pairs. The limit is heuristic.
    """
    for row in sorted(measured.layers, key=lambda row: row.get("gram_score_centred") or 2.0):
        router, score = row["router"], row.get("gram_score_centred")
        if score is None:
            continue
        fall = row["gram_score_random"] - score
        if fall > limits("fall", router):
            z, raw = row.get("gram_score_z"), row.get("gram_score_raw")
            sigmas = "" if z is None else f"; {abs(z):.0f} sigmas below random rows"
            stored = (
                "no score, for rows of zeros have no direction" if raw is None else f"{raw:.3f}"
            )
            yield gram_collapse.finding(
                router,
                f"rows crowd together: Gram score {score:.3f}, random rows "
                f"{row['gram_score_random']:.3f}.",
                f"Best possible {row['gram_score_best']:.3f}{sigmas} "
                f"(limit {limits('fall', router):g} below, heuristic). "
                f"As stored, not centred: {stored}.",
            )
