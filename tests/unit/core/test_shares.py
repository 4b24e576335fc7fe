"""Shares as percentages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.text import percent, percent_of_all


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.00123, "0.12 %"), (0.0996, "10 %"), (0.123, "12 %"), (2.0, "200 %")],
)
def test_a_share_has_two_figures_and_all_before_the_point(share, text):
    assert percent(share) == text


def test_a_share_is_written_as_asked():
    assert percent(0.12345, ".1f") == "12.3 %"


@given(share=st.floats(0.0, 1.0))
def test_what_is_not_all_is_never_all(share):
    """It is never more than it is, and less by a hundredth of a per cent at most."""
    said = float(percent_of_all(share).removesuffix(" %"))
    assert said - 1e-9 <= 100.0 * share < said + 0.01 + 1e-9
    assert (said == 100.0) == (share == 1.0)
