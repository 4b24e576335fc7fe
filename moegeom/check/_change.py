"""Whether a figure of a layer has changed since the baseline by more than chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from moegeom.check._check import Check, Limits, Tested, Unknown
from moegeom.check._measured import Measured, Row
from moegeom.check._statistics import p_above, welch_freedom


def changes(
    check: Check,
    measured: Measured,
    limits: Limits,
    column: str,
    words: Callable[[float, float], str],
) -> Iterator[Tested | Unknown]:
    """A test for each router that "``column`` is within the limit ``change`` of the baseline".

    The two sets of tokens are taken as independent. ``words`` puts the two values, before and now,
    into a sentence.
    """
    found = [
        claim
        for row in measured.layers
        if (claim := _one(check, measured, limits, column, words, row))
    ]
    yield from sorted(found, key=lambda claim: claim.p_value if isinstance(claim, Tested) else 2.0)


def _one(
    check: Check,
    measured: Measured,
    limits: Limits,
    column: str,
    words: Callable[[float, float], str],
    row: Row,
) -> Tested | Unknown | None:
    router = row["router"]
    before = measured.before(router)
    value, error = row.get(column), row.get(f"{column}_se")
    if before is None or value is None or column not in before.columns:
        return None
    old, old_error = before.columns[column]
    if error is None or old_error is None:
        return Unknown(router, "fewer than two blocks of documents give no standard error")
    blocks = before.columns["num_blocks"][0]
    freedom = welch_freedom((error, old_error), (row["num_blocks"] - 1, blocks - 1))
    both = math.hypot(error, old_error)
    limit = limits("change", router)
    finding = check.finding(
        router,
        words(old, value),
        f"Changed by {value - old:+.3g} (limit {limit:g}, uncalibrated; standard error of the "
        f"difference {both:.2g}).",
        measured.measure_again(router),
    )
    return Tested(
        router,
        finding,
        min(1.0, 2.0 * p_above(abs(value - old), limit, both, freedom)),
        both,
        freedom,
    )
