"""Checks of one figure per router: is it beyond its limit, or has it changed, by more than chance?

The function under ``figure_check`` or ``change_check`` has the words; its docstring is the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moegeom.checks.baseline import BaselineRouter
from moegeom.checks.check import NO_ERROR, Check, Limit, Limits, Tested, Unknown
from moegeom.checks.measured import Measured, Row
from moegeom.checks.profile import BuiltIn
from moegeom.checks.statistics import p_above, welch_freedom
from moegeom.core.finding import Severity
from moegeom.core.registry import record_of_function
from moegeom.core.text import range_text

#: Loads and directions move until training has balanced them.
WHILE_TRAINING_RUNS: Mapping[BuiltIn, Severity] = MappingProxyType({"training": "note"})


@dataclass(frozen=True)
class Figure:
    """One router's figure, its standard error and its limit, to be put into words."""

    measured: Measured
    row: Row
    value: float
    error: float
    limit: float

    def basis(self, digits: int) -> str:
        """Where the limit comes from, and how well the figure is known, to so many digits."""
        spread = range_text(self.value, self.error, self.row["num_blocks"], digits)
        documents = (self.measured.run.get("tokens") or {}).get("num_documents") or 0
        unit = "documents" if documents > 1 else "blocks of tokens"
        return f"heuristic; 95 % range over {unit} {spread}"


@record_of_function
def figure_check(
    name: str,
    page: str,
    words: Callable[[Figure], tuple[str, str]],
    code: str,
    title: str,
    column: str,
    limit: Limit,
    detects: Callable[[float], str],
    room: Callable[[Figure], float],
    absent: str,
    sign: float = 1.0,
    offset: float = 0.0,
    extra: str = "",
    severities: Mapping[BuiltIn, Severity] | None = None,
    severity: Severity = "warning",
) -> Check:
    """A check that ``offset`` + ``column`` is at most its limit; at least, with ``sign`` -1.

    ``words`` puts a figure beyond its limit into a title and a detail, ``room`` is how far beyond
    it can be at all, and ``extra`` an option of the command that measures again.
    """

    def judge(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
        rows = [row for row in measured.layers if row.get(column) is not None]
        for row in sorted(rows, key=lambda row: -sign * row[column]):
            router, error = row["router"], row.get(f"{column}_se")
            if error is None:
                yield Unknown(router, NO_ERROR)
                continue
            figure = Figure(measured, row, offset + row[column], error, limits(limit.name, router))
            again, freedom = measured.measure_again(router, extra), row["num_blocks"] - 1
            finding = check.finding(router, *words(figure), again)
            value, bound = sign * figure.value, sign * figure.limit
            yield Tested(
                router,
                finding,
                p_above(value, bound, error, freedom),
                error,
                freedom,
                room=room(figure),
                p_beyond=p_above(-value, -bound, error, freedom),
            )

    weights: dict[BuiltIn, Severity] = {**WHILE_TRAINING_RUNS, **(severities or {})}
    of = (name, page, judge, code, title, severity, (column,), (limit,), "tokens")
    check = Check(*of, absent=absent, detects=detects, severities=weights)
    return check


@record_of_function
def change_check(
    name: str,
    page: str,
    words: Callable[[float, float], str],
    code: str,
    title: str,
    column: str,
    limit: Limit,
    detects: Callable[[float], str],
    largest: float,
    absent: str,
) -> Check:
    """A check that ``column`` is within a limit of what the baseline has.

    The two sets of tokens are taken as independent. ``words`` puts the two values, before and now,
    into a sentence; ``largest`` is the largest change that the column can show.
    """

    def claim(measured: Measured, row: Row, limit: float) -> Tested | Unknown | None:
        router, before = row["router"], measured.before(row["router"])
        value, error = row.get(column), row.get(f"{column}_se")
        if before is None or value is None:
            return None
        if column not in before.columns:
            return Unknown(router, f"the baseline holds no {column} of it")
        old, old_error = before.columns[column]
        if error is None or old_error is None:
            return Unknown(router, f"{NO_ERROR}, here and in the baseline")
        both, freedom = difference_error(row, before, error, old_error)
        finding = check.finding(
            router,
            words(old, value),
            f"Changed by {value - old:+.3g} (limit {limit:g}, heuristic; standard error of the "
            f"difference {both:.2g}).",
            measured.measure_again(router),
        )
        # both directions: the other tail is lighter, so that twice the one is an upper bound
        p_value = min(1.0, 2.0 * p_above(abs(value - old), limit, both, freedom))
        return Tested(router, finding, p_value, both, freedom, 2, largest)

    def judge(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
        claims = [
            claim(measured, row, limits(limit.name, row["router"])) for row in measured.layers
        ]
        yield from sorted(
            (one for one in claims if one),
            key=lambda one: one.p_value if isinstance(one, Tested) else 2.0,
        )

    of = (name, page, judge, code, title, "warning", (column,), (limit,), "baseline and tokens")
    check = Check(*of, absent=absent, detects=detects, severities=WHILE_TRAINING_RUNS)
    return check


def difference_error(
    row: Row, before: BaselineRouter, error: float, old_error: float
) -> tuple[float, float]:
    """Standard error of a figure less the baseline's, and its degrees of freedom."""
    old_blocks = before.columns.get("num_blocks", (1.0, None))[0]
    freedom = welch_freedom((error, old_error), (row["num_blocks"] - 1, old_blocks - 1))
    return math.hypot(error, old_error), freedom
