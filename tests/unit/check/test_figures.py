"""A figure with a standard error: the worst is told first, and its p-value is Student's."""

from __future__ import annotations

import pytest
from scipy import stats

from moegeom.checks import CHECKS, check
from moegeom.checks.measured import measured_rows


def claims(name: str, column: str, values: list[float], error: float = 0.01) -> list[check.Tested]:
    shared = {"variant": "as_stored", "population": "all", "num_blocks": 16, f"{column}_se": error}
    facts = {"effective_experts": 1.0, "router": ""}
    rows = [shared | facts | {column: v, "router": f"text/{i}"} for i, v in enumerate(values)]
    experts = [{**shared, "router": row["router"], "expert": 0} for row in rows]
    return list(CHECKS[name].judge(measured_rows(rows, experts), lambda name, router: 0.5))


@pytest.mark.parametrize(
    ("name", "column", "order"),
    [
        ("angular_collapse", "mean_resultant_length", [2, 0, 1]),
        ("uneven_load", "load_entropy_normalised", [1, 0, 2]),
    ],
)
def test_the_worst_figure_comes_first_also_where_it_is_0(name, column, order) -> None:
    found = claims(name, column, [0.4, 0.0, 0.9])
    assert [claim.router for claim in found] == [f"text/{i}" for i in order]


@pytest.mark.parametrize(
    ("name", "column", "beyond"),
    [
        ("angular_collapse", "mean_resultant_length", 1.0),
        ("uneven_load", "load_entropy_normalised", -1.0),
    ],
)
def test_the_p_value_is_that_of_a_one_sided_t_test_towards_the_finding(name, column, beyond):
    for value in (0.48, 0.5, 0.53):
        (claim,) = claims(name, column, [value], 0.02)
        expected = stats.t(df=15).sf(beyond * (value - 0.5) / 0.02)
        assert claim.p_value == pytest.approx(expected, rel=1e-9)
