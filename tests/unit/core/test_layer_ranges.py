from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.errors import UsageError
from moegeom.core.router import format_layers, parse_layers


def test_numbers_and_ranges_include_their_ends():
    assert parse_layers("0,3-5, 7 - 7") == {0, 3, 4, 5, 7}


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_formatting_is_the_inverse_of_parsing(layers):
    assert parse_layers(format_layers(layers)) == layers


def test_runs_are_written_as_ranges():
    assert format_layers(frozenset({0, 3, 4, 5, 9})) == "0,3-5,9"
    assert format_layers(frozenset()) == ""


@pytest.mark.parametrize("text", ["", "a", "1,,2", "-1", "1-", "1-2-3", "1.5", "999999", "١"])
def test_nonsense_is_answered_with_an_example(text):
    with pytest.raises(UsageError) as caught:
        parse_layers(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint == "Write numbers and ranges, such as 0,3-7."


def test_a_range_that_runs_backwards_is_turned_round_in_the_hint():
    with pytest.raises(UsageError) as caught:
        parse_layers("7-3")
    assert caught.value.message == "Layers '7-3': the range '7-3' runs backwards."
    assert caught.value.hint == "Write 3-7."
