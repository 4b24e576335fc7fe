"""Thresholds of a profile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from moegeom.checks.check import Claim, Limits, Tested, Unknown, check, same_sentence
from moegeom.checks.measured import Measured, Row, layer_of
from moegeom.checks.profile import Threshold
from moegeom.checks.statistics import p_above
from moegeom.core.finding import Finding

#: Figures of a baseline are rounded to seven digits.
_ROUNDED = 1e-6


@check("MGP901", "a threshold of the profile is broken", "error", alike=same_sentence)
def profile_threshold(measured: Measured, limits: Limits) -> Iterator[Claim]:
    """Every column is within the thresholds of the profile.

    Looked for: the columns of ``layers`` that the profile bounds with ``[[threshold]]``: absolute
    or relative to the baseline, in each layer or at a percentile over the layers. A column with a
    standard error is beyond its bound only when chance does not explain it.

    A finding means: what the team asked for does not hold.

    What to do: read the reason that the profile gives.
    """
    for threshold in measured.thresholds:
        within = threshold.layers
        layers = [r for r in measured.layers if not within or int(layer_of(r["router"])) in within]
        rows = [row for row in layers if row.get(threshold.column) is not None]
        for row in layers if rows else ():
            # of routers that choose for no token the verdict speaks by itself
            is_due = row.get("num_tokens") or not measured.has_tokens
            if is_due and row.get(threshold.column) is None:
                yield Unknown(row["router"], f"{threshold.column} is missing")
        if not rows:
            why = "is missing in every layer" if layers else "is asked of layers that are not there"
            yield Unknown("all layers", f"{threshold.column} {why}")
        elif threshold.percentile is not None:
            judged = [_claim(measured, threshold, _at_percentile(rows, threshold))]
            yield from (claim for claim in judged if claim)
        else:
            judged = [_claim(measured, threshold, row) for row in rows]
            yield from (claim for claim in judged if claim)


def _at_percentile(rows: list[Row], threshold: Threshold) -> Row:
    """The layer at the percentile, by the nearest rank."""
    ordered = sorted(rows, key=lambda row: row[threshold.column])
    rank = math.ceil((threshold.percentile or 0.0) / 100.0 * len(ordered))
    return ordered[max(rank - 1, 0)]


def _claim(measured: Measured, threshold: Threshold, row: Row) -> Claim | None:
    slack = 0.0
    router, column = row["router"], threshold.column
    value, error = float(row[column]), row.get(f"{column}_se")
    bound, words = threshold.bound, f"{threshold.bound:g}"
    if threshold.is_relative:
        before = measured.before(router)
        if before is None or measured.baseline is None:
            return Unknown(router, "there is no baseline to be relative to")
        if column not in before.columns or measured.baseline.changed_versions(
            measured.run, [column]
        ):
            return Unknown(router, f"the baseline does not hold {column} in this version")
        old, old_error = before.columns[column]
        # the baseline rounds to seven digits: its own checkpoint must stay within 1.0 times it
        slack = _ROUNDED * abs(old * bound)
        bound, words = old * bound, f"{threshold.bound:g} times the baseline's {old:.4g}"
        if error is not None:
            error = math.hypot(error, threshold.bound * (old_error or 0.0))
    finding = _finding(threshold, row, value, error, words)
    sign = 1.0 if threshold.side == "at_most" else -1.0
    if error is None:
        # exact: a figure of the weights, or one without a standard error
        return finding if sign * value > sign * bound + slack else None
    freedom = max((row.get("num_blocks") or 2) - 1, 1)
    p_value = p_above(sign * value, sign * bound, error, freedom)
    return Tested(router, finding, p_value, error, freedom)


def _finding(
    threshold: Threshold, row: Row, value: float, error: float | None, words: str
) -> Finding:
    spread = "" if error is None else f" +- {error:.2g}"
    at = "" if threshold.percentile is None else f" (percentile {threshold.percentile:g})"
    side = threshold.side.replace("_", " ")
    finding = profile_threshold.finding(
        row["router"],
        f"{threshold.column} is {value:.4g}{spread}{at}; the profile asks for {side} {words}.",
        threshold.reason,
        "moegeom list metrics",
    )
    return dataclasses.replace(finding, severity=threshold.severity)
