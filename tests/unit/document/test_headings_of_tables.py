"""Where a heading over several columns stands on a screen."""

from __future__ import annotations

from moegeom.document.model import Document, Table, View
from moegeom.document.render import render


def test_a_heading_runs_on_over_every_empty_one_and_widens_no_column_that_has_room():
    heads = [("", "all of these three", "", "", "one"), ("", "a", "b", "c", "d")]
    row = ("row", "10000", "20000", "30000", "4")
    shown = render(Document("x", "x", [[Table(heads, [row])]], dict), "table", View(80))
    assert shown.splitlines() == [
        "     all of these three   one",
        "         a      b      c    d",
        "row  10000  20000  30000    4",
    ]
