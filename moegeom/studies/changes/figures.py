"""Which figures of two results differ by more than chance, at equal numbers of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegeom.checks.statistics import detectable_shift, holm_rejects, p_differs, welch_freedom
from moegeom.core.populations import is_whole
from moegeom.metrics import METRICS
from moegeom.results.reader import ResultsView
from moegeom.studies.changes.figure_columns import SAME_TEST, is_free_of_t, least_tokens
from moegeom.studies.diff.record import FigureChange, Figures

#: Probability that any figure is called changed by chance.
LEVEL = 0.05

Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Test:
    router: str
    column: str
    before: float
    after: float
    error: float
    freedom: float

    @property
    def p_value(self) -> float:
        return p_differs(self.after - self.before, self.error, self.freedom)


def figure_changes(a: ResultsView, b: ResultsView) -> Figures | None:
    r"""Tests of "no difference" for each router and each figure of ``layers`` that has an error.

    :math:`t = (x_B - x_A) / \sqrt{s_A^2 + s_B^2}` with the degrees of freedom of Welch and
    Satterthwaite from the numbers of blocks less 1, two-sided, Holm over all of them at LEVEL. The
    two sets of tokens are taken as independent: for the same text on both sides that is on the safe
    side. None unless both were measured on tokens.
    """
    rows = (_rows(a), _rows(b))
    common = [router for router in rows[0] if router in rows[1]]
    if not common:
        return None
    versions = tuple(results.run.get("column_versions", {}) for results in (a, b))
    tests: list[_Test] = []
    left_out: dict[str, list[str]] = {}
    for router in common:
        pair = (rows[0][router], rows[1][router])
        for column in _columns():
            found = _one(router, column, pair, (versions[0], versions[1]))
            if isinstance(found, _Test):
                tests.append(found)
            elif found and column not in left_out.setdefault(found, []):
                left_out[found].append(column)
    tokens = tuple(max(row["num_tokens"] or 0 for row in side.values()) for side in rows)
    return Figures(_judged(tests), LEVEL, (tokens[0], tokens[1]), left_out)


def _judged(tests: Sequence[_Test]) -> list[FigureChange]:
    p_values = [test.p_value for test in tests]
    rejected = holm_rejects(p_values, LEVEL)
    texts = {column.name: column.text for column in _layer_columns()}
    return [
        FigureChange(
            router=test.router,
            column=test.column,
            text=texts[test.column],
            before=test.before,
            after=test.after,
            error=test.error,
            p_value=p_value,
            is_significant=is_rejected,
            # both directions share the level
            detectable=detectable_shift(test.error, test.freedom, LEVEL / 2.0, len(tests)),
        )
        for test, p_value, is_rejected in zip(tests, p_values, rejected, strict=True)
    ]


def _one(
    router: str, column: str, pair: tuple[Row, Row], versions: tuple[Row, Row]
) -> _Test | str | None:
    """A test, the reason why there is none, or None where a side does not have the figure."""
    values = _known(column, pair)
    if values is None:
        return None
    if versions[0].get(column) != versions[1].get(column):
        return "another version of the metric"
    tokens = [row["num_tokens"] or 0 for row in pair]
    if tokens[0] != tokens[1] and not is_free_of_t(column):
        return "depends on the number of tokens"
    if min(tokens) < least_tokens(column):
        return "too few tokens for its standard error"
    errors = _known(f"{column}_se", pair)
    if errors is None:
        return "no standard error: fewer than two blocks of documents"
    both = math.hypot(*errors)
    if both == 0.0:
        return "no standard error: leaving out documents changes nothing"
    freedom = welch_freedom(errors, [row["num_blocks"] - 1 for row in pair])
    if math.isnan(freedom):
        return "no standard error: fewer than two blocks of documents"
    return _Test(router, column, *values, both, freedom)


def _known(column: str, pair: tuple[Row, Row]) -> tuple[float, float] | None:
    """The figure on both sides; None unless both are numbers."""
    values = [row.get(column) for row in pair]
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    return (known[0], known[1]) if len(known) == 2 else None


def _rows(results: ResultsView) -> dict[str, Row]:
    """The row of each router for all tokens, where it was measured on any."""
    return {
        row["router"]: row
        for row in results.rows("layers")
        if row["variant"] == "as_stored" and is_whole(row["population"]) and row.get("num_tokens")
    }


def _layer_columns() -> Iterator[Any]:
    for metric in METRICS.all():
        yield from metric.columns.get("layers", ())


def _columns() -> list[str]:
    """Figures with a standard error, once each."""
    return [c.name for c in _layer_columns() if c.has_se and c.name not in SAME_TEST]
