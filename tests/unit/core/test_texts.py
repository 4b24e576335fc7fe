"""Numbers as texts: layers, shares, and ranges by the one 95 % that there is."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import moegeom
from moegeom.core.errors import UsageError
from moegeom.core.router import format_layers, parse_layers
from moegeom.core.text import (
    all_of,
    half_width,
    number_of,
    percent,
    percent_of_all,
    range_text,
    these,
)

SOURCES = Path(moegeom.__file__).parent

#: ``2 * error``, ``1.96 * load_se`` and the like: a range with a factor of its own.
OF_ITS_OWN = re.compile(
    r"\b(2(\.0)?|1\.96)\s*\*\s*\w*(error|_se)\b|\b\w*(error|_se)\s*\*\s*(2(\.0)?|1\.96)\b"
)


def test_the_half_width_is_that_of_student_or_of_the_normal_distribution():
    for blocks in (2, 3, 16, 100):
        low, high = stats.t.interval(0.95, blocks - 1, loc=1.0, scale=0.3)
        np.testing.assert_allclose(half_width(0.3, blocks), (high - low) / 2.0)
    for blocks in (None, 0, 1):
        np.testing.assert_allclose(half_width(1.0, blocks), stats.norm.ppf(0.975), rtol=1e-6)
    assert range_text(3.5, 0.1, 16, 1) == "3.3-3.7"
    assert range_text(0.1, 0.1, 16, 2) == "0.00-0.31"


def test_no_range_has_a_factor_of_its_own():
    for copy in ("load - 2 * error", "1.96 * row_se", "2.0*standard_error"):
        assert OF_ITS_OWN.search(copy)
    folders = ["checks", "document", "measure", "metrics", "results", "studies", "core"]
    files = [path for folder in folders for path in sorted((SOURCES / folder).rglob("*.py"))]
    assert {path.relative_to(SOURCES).parts[0] for path in files} == set(folders)
    offenders = [
        f"{path.name}: {line.strip()}"
        for path in files
        if "cells" not in path.parts  # error bounds there, not standard errors
        for line in path.read_text("utf-8").splitlines()
        if OF_ITS_OWN.search(line)
    ]
    assert offenders == []


def test_a_share_has_two_figures_and_all_before_the_point():
    for share, text in {0.0: "0 %", 0.00123: "0.12 %", 0.0996: "10 %", 2.0: "200 %"}.items():
        assert percent(share) == text
    assert percent(0.12345, ".1f") == "12.3 %"


@given(share=st.floats(0.0, 1.0))
def test_what_is_not_all_is_never_all(share):
    """It is never more than it is, and less by a hundredth of a per cent at most."""
    said = float(percent_of_all(share).removesuffix(" %"))
    assert said - 1e-9 <= 100.0 * share < said + 0.01 + 1e-9
    assert (said == 100.0) == (share == 1.0)


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_formatting_layers_is_the_inverse_of_parsing(layers):
    assert parse_layers(format_layers(layers)) == layers


def test_ranges_of_layers_include_their_ends():
    assert parse_layers("0,3-5, 7 - 7") == {0, 3, 4, 5, 7}
    assert format_layers(frozenset({0, 3, 4, 5, 9})) == "0,3-5,9"
    assert format_layers(frozenset()) == ""


def test_layers_that_are_nonsense_are_answered_with_an_example():
    for text in ("", "a", "1,,2", "-1", "1-", "1-2-3", "1.5", "999999", "١"):
        with pytest.raises(UsageError) as caught:
            parse_layers(text)
        assert caught.value.exit_code == 2
        assert caught.value.hint == "Write numbers and ranges, such as 0,3-7."
    with pytest.raises(UsageError) as caught:
        parse_layers("7-3")
    assert caught.value.message == "Layers '7-3': the range '7-3' runs backwards."
    assert caught.value.hint == "Write 3-7."


def test_one_is_one_and_thousands_are_separated():
    rows = [number_of(n, "row") for n in (0, 1, 2, 2048)]
    assert rows == ["0 rows", "1 row", "2 rows", "2,048 rows"]
    assert [all_of(n, "row") for n in (1, 2048)] == ["the row", "all 2,048 rows"]
    assert [these(n, "row is", "rows are") for n in (1, 2)] == ["this row is", "these 2 rows are"]
    batches = [number_of(n, "batch is", "batches are") for n in (1, 2)]
    assert batches == ["1 batch is", "2 batches are"]
