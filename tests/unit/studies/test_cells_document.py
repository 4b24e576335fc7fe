"""What `cells` found is told whole on a page, and in part on a screen."""

from __future__ import annotations

import json

import pytest

from moegeom.document.model import View
from moegeom.document.render import render
from moegeom.studies.cells.document import document
from moegeom.studies.cells.record import Answer, Cells, CutShort, Enumerations, RouterCells
from moegeom.studies.cells.study.found import enough_vertices


def router(name: str, **changes) -> RouterCells:
    facts = {
        "num_experts": 9,
        "top_k": 3,
        "subspace": "the whole input space",
        "domain": "",
        "dims": 2,
        "outcome": "cells",
        "cells": Cells(17, "walk", num_vertices=19),
        "num_possible": 84,
        "most_cells": None,
        "expected_vertices": 948.0,
        "seconds": 1.0,
    }
    return RouterCells(name, **(facts | changes))


def enumerations(*routers: RouterCells, **changes) -> Enumerations:
    facts = {"run": None, "answers": (), "left_out": (), "seed": 0}
    return Enumerations("router.npz", routers=routers, **(facts | changes))


def shown(found: Enumerations, form: str, **view) -> str:
    return render(document(found, View(**view)), form, View(**view))


def test_a_screen_shows_six_routers_and_a_page_all():
    found = enumerations(*(router(f"text/{n}") for n in range(8)))
    some = shown(found, "table").splitlines()
    assert [line for line in some if line.startswith("text/")] == [
        f"text/{n}  9 experts, top-3" for n in range(6)
    ]
    assert some[-2:] == ["", "and 2 more routers: --detail"]
    every = shown(found, "table", detail=True)
    for text in (every, shown(found, "md"), shown(found, "html")):
        assert all(f"text/{n}" in text for n in range(8))
        assert "--detail" not in text


def test_every_router_is_told_in_a_paragraph_of_its_own():
    text = shown(enumerations(router("text/0"), router("text/1")), "table")
    heads = [part.split("\n")[0] for part in text.split("\n\n")]
    assert [head.split()[0] for head in heads] == ["router.npz", "text/0", "text/1"]


def test_what_was_not_finished_is_no_number_of_cells():
    cut = CutShort(100, "vertices", 1900)
    found = enumerations(router("text/0", outcome="unfinished", cells=None, cut_short=cut))
    said = " ".join(shown(found, "table").split())
    assert "cells not listed: more than the 100 vertices that --vertices allows" in said
    assert "a random router has about 948." in said


@pytest.mark.parametrize(("count", "said"), [(1, "1 set"), (84, "84 sets")])
def test_the_sets_that_there_could_be_agree_with_their_count(count, said):
    one = router("w", num_possible=count, cells=Cells(1, "one cell"))
    assert f"1 of C(9, 3) = {said} proof" in " ".join(shown(enumerations(one), "table").split())


@pytest.mark.parametrize(
    ("cut", "domain", "said"),
    [
        (CutShort(100, "vertices", 1900), "", "Try --vertices 1900 (up to 380 kB of memory), or a"),
        (CutShort(100, "vertices", None), "", "More are not kept: ask for a slice of fewer dimens"),
        (
            CutShort(50, "cells", 500),
            "within 1",
            "allows within 1. Try --vertices 500, or tighter b",
        ),
    ],
)
def test_a_limit_that_was_too_low_comes_with_one_that_should_do(cut, domain, said):
    one = router("w", outcome="unfinished", cells=None, cut_short=cut, domain=domain)
    text = " ".join(shown(enumerations(one), "table").split())
    assert f"not listed: more than the {cut.most} {cut.what} that --vertices allows" in text
    assert said in text


@pytest.mark.parametrize(
    ("expected", "most", "enough"),
    [
        (70_862.0, 1000, 150_000),
        (948.0, 1000, 1900),
        (400.0, 1000, 10_000),
        (None, 7, 70),
        (3.0, 5, 6),
        (2e9, 1000, None),
        (float("inf"), 1000, None),
    ],
)
def test_twice_what_is_expected_should_do_or_ten_times_what_did_not(expected, most, enough):
    assert enough_vertices(expected, most) == enough


@pytest.mark.parametrize(
    ("num_tied", "domain", "said"),
    [
        (
            3,
            "",
            "3 regions of the slice are in no cell: 2 of its experts are equal to another one",
        ),
        (1, "", "1 region of the slice is in no cell"),
        (0, "", "2 of its experts are equal to another one, but nowhere here tie"),
        (None, "within 1", "where they tie for the last place is no cell, which is not counted"),
    ],
)
def test_what_equal_experts_keep_from_being_a_cell_is_said_below_the_cells(num_tied, domain, said):
    cells = Cells(17, "walk", num_vertices=19, num_tied=num_tied)
    tied = router(
        "w", cells=cells, domain=domain, num_equal=2, num_tokens=200, num_own=9, num_on_ties=50
    )
    text = shown(enumerations(tied), "table", width=80)
    labels = [line.split()[0] for line in text.splitlines()[3:] if not line.startswith(" ")]
    assert labels[:3] == ["slice", "cells", "ties"]
    assert said in " ".join(text.split())
    assert ("50 tokens are drawn there (25 %)" in " ".join(text.split())) == (
        num_tied is not None and num_tied > 0
    )
    assert "ties" not in shown(enumerations(router("w", num_tokens=200, num_own=9)), "table")


@pytest.mark.parametrize(
    ("facets", "pieces", "diameter", "said"),
    [
        (24, 1, 3, "24; the farthest cells are 3 facets apart proof"),
        (
            24,
            2,
            3,
            "24; no facet joins the 2 pieces that the cells fall into; the farthest cells within",
        ),
        (0, 3, 0, "none: no two of the 3 cells share one proof"),
    ],
)
def test_the_farthest_cells_are_those_of_one_piece(facets, pieces, diameter, said):
    cells = Cells(3, "walk", num_facets=facets, num_components=pieces, diameter=diameter)
    text = " ".join(shown(enumerations(router("w", cells=cells)), "table").split())
    assert f"facets {said}" in text


#: What was checked of each cell, and what was not: that the list is whole.
CHECKED = (
    "inside that was checked again in integers, by code that did not find it; that no cell is "
    "missing rests on the line above"
)


@pytest.mark.parametrize(
    ("num_checked", "said"),
    [
        (17, f"17 cells have a point {CHECKED}"),
        (1, f"1 cell has a point {CHECKED}"),
        (0, "nothing was checked again: no cell is listed"),
    ],
)
def test_what_certify_checked_is_said_below_the_proof(num_checked, said):
    text = " ".join(shown(enumerations(router("w", num_checked=num_checked)), "table").split())
    assert f"1.0 s certify {said}" in text
    assert "certify" not in shown(enumerations(router("w")), "table")


@pytest.mark.parametrize("form", ["table", "md", "html"])
def test_a_set_that_is_no_cell_is_told_with_its_proof(form):
    weights = (((0, 0.5), (1, 0.5)), ((2, 1.0),))
    answer = Answer("text/0", (0, 1), "all", False, None, weights, {}, True, 1.0)
    text = " ".join(shown(enumerations(answers=(answer,)), form).split())
    assert "NO CELL" in text
    assert "experts 0, 1 are chosen together nowhere on all. Checked again" in text
    assert "proof: 0.5 x 0 + 0.5 x 1 of the set mixes to the same row as 1 x 2" in text


def test_json_is_the_record():
    told = json.loads(shown(enumerations(router("text/0"), files=("a.svg",)), "json"))
    assert told["routers"][0]["cells"]["num_cells"] == 17
    assert told["files"] == ["a.svg"]
    assert told["run"] is None
