"""Counts in sentences."""

from moegeom.core.text import all_of, number_of, these


def test_one_is_one_and_thousands_are_separated():
    assert [number_of(n, "row") for n in (0, 1, 2, 2048)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "2,048 rows",
    ]
    assert [all_of(n, "row") for n in (1, 2048)] == ["the row", "all 2,048 rows"]
    assert [these(n, "row is", "rows are") for n in (1, 2)] == ["this row is", "these 2 rows are"]
    assert [number_of(n, "batch is", "batches are") for n in (1, 2)] == [
        "1 batch is",
        "2 batches are",
    ]
