"""Whether a figure of a layer has changed since the baseline by more than chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from moegeom.checks.check import NO_ERROR, Check, Limits, Tested, Unknown
from moegeom.checks.measured import Measured, Row
from moegeom.checks.statistics import p_above, welch_freedom


def changes(
    check: Check,
    measured: Measured,
    limits: Limits,
    column: str,
    words: Callable[[float, float], str],
    largest: float,
) -> Iterator[Tested | Unknown]:
    """A test for each router that "``column`` is within the limit ``change`` of the baseline".

    The two sets of tokens are taken as independent. ``words`` puts the two values, before and now,
    into a sentence; ``largest`` is the largest change that the column can show.
    """
    found = [
        claim
        for row in measured.layers
        if (claim := _one(check, measured, limits, column, words, largest, row))
    ]
    yield from sorted(found, key=lambda claim: claim.p_value if isinstance(claim, Tested) else 2.0)


def _one(
    check: Check,
    measured: Measured,
    limits: Limits,
    column: str,
    words: Callable[[float, float], str],
    largest: float,
    row: Row,
) -> Tested | Unknown | None:
    router = row["router"]
    before = measured.before(router)
    value, error = row.get(column), row.get(f"{column}_se")
    if before is None or value is None or column not in before.columns:
        return None
    old, old_error = before.columns[column]
    if error is None or old_error is None:
        return Unknown(router, f"{NO_ERROR}, here and in the baseline")
    blocks = (row["num_blocks"] - 1, before.columns.get("num_blocks", (1.0, None))[0] - 1)
    freedom = welch_freedom((error, old_error), blocks)
    both = math.hypot(error, old_error)
    limit = limits("change", router)
    finding = check.finding(
        router,
        words(old, value),
        f"Changed by {value - old:+.3g} (limit {limit:g}, uncalibrated; standard error of the "
        f"difference {both:.2g}).",
        measured.measure_again(router),
    )
    # both directions: the other tail is lighter, so that twice the one is an upper bound
    p_value = min(1.0, 2.0 * p_above(abs(value - old), limit, both, freedom))
    return Tested(router, finding, p_value, both, freedom, 2, largest)
