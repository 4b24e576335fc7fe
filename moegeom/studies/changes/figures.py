"""Which figures of two results differ by more than chance, at equal numbers of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from moegeom.checks.statistics import detectable_shift, holm_rejects, p_differs, welch_freedom
from moegeom.core.row_keys import is_whole
from moegeom.core.tokens import TILE
from moegeom.metrics import METRICS
from moegeom.results.reader import ResultsView
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
            outcome = _one(router, column, pair, (versions[0], versions[1]))
            if isinstance(outcome, _Test):
                tests.append(outcome)
            elif outcome and column not in left_out.setdefault(outcome, []):
                left_out[outcome].append(column)
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
    """The test, else the reason for none; None where a side lacks the figure."""
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
    numbers = [float(value) for value in values if value is not None and math.isfinite(value)]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


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
    return [c.name for c in _layer_columns() if c.has_se]


#: Figures whose expected value does not depend on the number of tokens: means over tokens or over
#: pairs of tokens, quantiles with many tokens below them, and what was corrected for it. All others
#: do: the largest of many counts, entropies and squares of counts, shares of sets seen before and
#: the length of a mean move with T even when nothing else does, so a figure that is not listed is
#: compared at equal T only.
FREE_OF_T: tuple[str, ...] = (
    "ambiguous_share",
    "bf16_flip_share*",
    "boundary_distance*_p01",
    "boundary_distance*_p50",
    "chosen_entropy_*",
    "chosen_score_share",
    "distance_exact_share",
    "first_choice_repeat",
    "load_cv_squared_debiased",
    "log_sum_exp_mean",
    "margin_p01",
    "margin_p50",
    "mean_pairwise_cosine",
    "neighbour_overlap",
    "neighbour_same_set",
    "noise_sigmas_p01",
    "noise_sigmas_p50",
    "overlap_output",
    "participation_ratio",
    "pre_norm_angle_p01",
    "pre_norm_angle_p50",
    "rounding_sigmas_p01",
    "rounding_sigmas_p50",
    "routing_entropy_*",
    "same_token_overlap",
    "z_loss",
)

#: Quantiles with few tokens below them have no standard error by leaving out documents: the share,
#: by the end of the name.
QUANTILES: dict[str, float] = {"_p001": 0.001, "_p01": 0.01}

#: Tokens that must lie below a quantile on both sides.
LEAST_BELOW = 100

#: Figures of larger units than tokens, and the tokens that give enough of them: a tile belongs to
#: one block, so with two tiles the error is that of two numbers and not of sixteen blocks.
LEAST_TOKENS: dict[str, int] = {"max_vio_tile_mean": 64 * TILE}


def is_free_of_t(column: str) -> bool:
    """True for a figure that may be compared between different numbers of tokens."""
    return any(fnmatchcase(column, pattern) for pattern in FREE_OF_T)


def least_tokens(column: str) -> float:
    """Tokens that both sides must have for the figure to be tested."""
    share = next((s for end, s in QUANTILES.items() if column.endswith(end)), None)
    return LEAST_TOKENS.get(column, 0) if share is None else LEAST_BELOW / share
