"""What `cells` finds is told whole on a page and in part on a screen, and what it expects before."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from moegeom.core.errors import RouterRuleError, UsageError
from moegeom.geometry.capacity import expected_diagram
from moegeom.router.requested_family import RequestedFamily
from moegeom.routing_cells.document import cells_figures, document
from moegeom.routing_cells.facet_graph import Visited
from moegeom.routing_cells.record import Answer, Cells, CutShort, Enumerations, RouterCells
from moegeom.routing_cells.request import CellsRequest
from moegeom.routing_cells.router import enough_vertices
from moegeom.routing_cells.study import cells
from tests.unit.studies.samples import BALANCED, GROUPED, unwrapped, worded


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


shown = functools.partial(worded, document)


def text_of(*routers: RouterCells, **changes) -> str:
    return unwrapped(shown(enumerations(*routers, **changes)))


def test_a_screen_shows_six_routers_and_a_page_all():
    found = enumerations(*(router(f"text/{n}") for n in range(8)))
    paragraphs = [part.split("\n")[0] for part in shown(found).split("\n\n")]
    routers = [f"text/{n}  9 experts, top-3" for n in range(6)]
    assert paragraphs[1:] == [*routers, "and 2 more routers: --detail"]
    every = shown(found, detail=True)
    for text in (every, shown(found, "md"), shown(found, "html")):
        assert all(f"text/{n}" in text for n in range(8))
        assert "--detail" not in text


#: What was checked of each cell, and what was not: that the list is whole.
CHECKED = (
    "was checked again in integers, by other code; that no cell is missing rests on the line above"
)


def cut_short(*limit) -> dict:
    unfinished = {"outcome": "unfinished", "cells": None}
    return unfinished | {"cut_short": CutShort(*limit)}


def walked(num_facets: int, num_components: int) -> dict:
    facts = {"num_facets": num_facets, "num_components": num_components, "diameter": 3}
    return {"cells": Cells(3, "walk", **facts)}


#: Facts of the router ``w``, and what is said of them.
SENTENCES = [
    (cut_short(100, 1900), "about 948. Try --vertices 1900 (up to 380 kB of memory), o"),
    (cut_short(100, None), "More are not kept: ask for a slice of fewer dimens"),
    ({"num_possible": 1, "cells": Cells(1, "one cell")}, "1 of C(9, 3) = 1 set proof"),
    (walked(24, 1), "facets 24; the farthest cells are 3 facets apart proof"),
    (
        walked(24, 2),
        "24; no facet joins the 2 pieces that the cells fall into; the farthest cells w",
    ),
    (walked(0, 3), "facets none: no two of the 3 cells share one proof"),
    ({"num_checked": 17}, f"1.0 s certify a point inside of 17 cells {CHECKED}"),
    ({"num_checked": 0}, "1.0 s certify nothing was checked again: no cell is listed"),
    ({"visited": Visited(7, 9, 1, 1.0, True)}, "7 expert sets used by these tokens, all connected"),
    ({"visited": Visited(7, 9, 1, 1.0, False)}, "in 1 piece of the most visited ones by 9 single"),
    ({"visited": Visited(7, 1, 6, 0.5, True)}, ", in 6 pieces by 1 single-expert swap; the larges"),
]


@pytest.mark.parametrize(("facts", "sentence"), SENTENCES)
def test_what_is_known_of_a_router_is_a_sentence(facts, sentence):
    text = text_of(router("w", **facts))
    assert sentence in text
    assert ("certify" in text) == ("num_checked" in facts)
    assert " ties " not in text


def test_the_figure_counts_what_there_is_what_the_slice_meets_and_what_tokens_use():
    used = router(
        "text/0", most_cells=46, visited=Visited(7, 9, 1, 1.0, True, (0.5, 0.75, 0.9, 1.0))
    )
    every = router("text/1", outcome="all subsets", cells=None)
    (figure,) = cells_figures(enumerations(used, every))
    columns = dict(figure.columns)
    assert columns["num_cells"] == [17, 84]
    assert (columns["most_cells"], columns["visited"]) == ([46, None], [7, None])
    sets, tokens = figure.panels
    assert [mark.y for mark in sets.marks][2] == pytest.approx(np.log10([17, 84]))
    assert (tokens.marks[0].x, tokens.marks[0].y) == ([1, 2, 4, 7], [50.0, 75.0, 90.0, 100.0])
    assert figure.alt.startswith("text/0: of 84 expert sets there are, the slice meets 17, the tok")
    assert [*cells_figures(enumerations())] == []


def test_twice_what_is_expected_should_do_or_ten_times_what_did_not():
    expected = [70_862.0, 948.0, 400.0, None, 2e9, float("inf")]
    enough = [enough_vertices(number, 1000) for number in expected]
    assert enough == [150_000, 1900, 10_000, 10_000, None, None]
    assert enough_vertices(3.0, 5) == 6


@pytest.mark.parametrize(
    ("num_tied", "domain", "said"),
    [
        (3, "", "3 regions of the slice are in no cell: 2 of its experts are equal to another one"),
        (1, "", "1 region of the slice is in no cell"),
        (0, "", "2 of its experts are equal to another one, but nowhere here tie"),
        (None, "within 1", "where they tie for the last place is no cell, which is not counted"),
    ],
)
def test_what_equal_experts_keep_from_being_a_cell_is_said_below_the_cells(num_tied, domain, said):
    tied_cells = Cells(17, "walk", num_vertices=19, num_tied=num_tied)
    tied = router(
        "w", cells=tied_cells, domain=domain, num_equal=2, num_tokens=200, num_own=9, num_on_ties=50
    )
    text = shown(enumerations(tied), width=80)
    labels = [line.split()[0] for line in text.splitlines()[3:] if not line.startswith(" ")]
    assert labels[:3] == ["slice", "cells", "ties"]
    assert said in " ".join(text.split())
    assert ("50 tokens are drawn there (25 %)" in " ".join(text.split())) == (
        num_tied is not None and num_tied > 0
    )
    assert "ties" not in shown(enumerations(router("w", num_tokens=200, num_own=9)))


@pytest.mark.parametrize(
    ("num", "said"),
    [
        (0, "ties as in general position"),
        (1, "at 1 point more experts tie than in general position"),
        (4, "at 4 points more experts tie than in general position"),
        (None, None),
    ],
)
def test_a_walk_says_whether_experts_are_in_general_position(num, said):
    text = shown(enumerations(router("w", cells=Cells(17, "walk", num_concurrent=num))), width=500)
    assert (said is None) == ("general position" not in text)
    assert said is None or said in text
    assert "parallel" not in text
    cells = Cells(17, "walk", num_concurrent=num, num_parallel=1200)
    text = shown(enumerations(router("w", cells=cells)), width=500)
    assert "1,200 boundaries parallel to others" in text


@pytest.mark.parametrize("form", ["table", "md", "html"])
def test_a_set_that_is_no_cell_is_told_with_its_proof(form):
    weights = (((0, 0.5), (1, 0.5)), ((2, 1.0),))
    answer = Answer("text/0", (0, 1), "all", False, None, weights, {}, True, 1.0)
    text = " ".join(shown(enumerations(answers=(answer,)), form).split())
    assert "NO CELL" in text
    assert "experts 0, 1 are chosen together nowhere on all. Checked again" in text
    assert "proof: 0.5 x 0 + 0.5 x 1 of the set mixes to the same row as 1 x 2" in text


class Notes:
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.notes: list[str] = []

    def start(self, num_tokens: int, unit: str = "") -> None: ...

    def begin(self, what: str) -> None:
        self.begun.append(what)

    def advance(self, num_tokens: int) -> None: ...

    def say(self, text: str) -> None:
        self.notes.append(text)


def watched(folder: Path, weight: np.ndarray, bias=None, is_refused=False, **options) -> Notes:
    arrays = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    np.savez(folder / "w.npz", **arrays)
    notes = Notes()
    request = CellsRequest(
        "", weights=folder / "w.npz", requested_family=RequestedFamily(top_k=4), **options
    )
    with pytest.raises(UsageError, match="exact") if is_refused else nullcontext():
        cells(request, notes)
    return notes


WEIGHT = np.random.default_rng(0).integers(-99, 100, (12, 3)).astype(np.float64)


@pytest.mark.parametrize(
    ("bias", "is_central"),
    [
        (None, True),
        (np.full(12, 2.5), True),
        (-WEIGHT @ np.array([1.0, -2.0, 0.5]), True),
        (np.arange(12.0) ** 2, False),
    ],
)
def test_the_vertices_expected_are_those_of_cones_where_all_experts_tie(tmp_path, bias, is_central):
    expected = round(expected_diagram(12, 4, 3, is_central).vertices)
    assert expected != round(expected_diagram(12, 4, 3, not is_central).vertices)
    notes = watched(tmp_path, WEIGHT, bias)
    assert notes.begun == [f"w, about {expected} vertices expected"]
    assert notes.notes == []


def test_nothing_is_expected_where_nothing_is_walked(tmp_path):
    asked = watched(tmp_path, WEIGHT, np.arange(12.0) ** 2, expert_set=(0, 1, 2, 3))
    assert asked.begun == ["w"]


def test_exact_arithmetic_of_many_answers_is_said_once(tmp_path):
    """Biases that are rounded: all experts nearly tie at one point."""
    weight = np.random.default_rng(0).standard_normal((26, 3))
    notes = watched(tmp_path, weight, -weight @ np.array([0.3, -0.1, 0.2]))
    (note,) = notes.notes
    assert note.startswith("w: many experts tie, or nearly so")


def test_a_few_answers_in_exact_arithmetic_are_not_worth_a_word(tmp_path):
    """Two experts are equal, which leaves what they tie on to exact arithmetic."""
    weight = WEIGHT.copy()
    weight[5] = weight[2]
    request = CellsRequest(
        "", weights=tmp_path / "w.npz", requested_family=RequestedFamily(top_k=4)
    )
    assert watched(tmp_path, weight).notes == []
    (one,) = cells(request).routers
    assert one.cells is not None
    assert one.cells.num_exact > 1


class Bar(Notes):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.done, self.places = 0, 0, []

    def start(self, num_tokens: int) -> None:
        assert num_tokens >= self.total
        self.total = num_tokens

    def advance(self, num_tokens: int) -> None:
        assert num_tokens >= 0
        self.done += num_tokens
        self.places.append(self.done)
        assert self.done <= self.total


def of_sample(folder: Path, **options) -> CellsRequest:
    return CellsRequest(
        str(folder / "step_1500"), tokens=str(folder / "rec/step_1500"), layers="1-2", **options
    )


@pytest.mark.parametrize(("folder", "parts"), [(BALANCED, 20), (GROUPED, 40)])
def test_progress_goes_on_within_each_part_of_each_router_to_the_end(folder, parts):
    bar = Bar()
    cells(of_sample(folder, subspace="pca:2", pixels=64), bar)
    assert 0.9 * bar.total < bar.done
    assert len(set(bar.places)) > parts
    names = ["text/1", "text/1", "text/2", "text/2"]
    assert [text.partition(",")[0] for text in bar.begun] == names


@pytest.mark.parametrize(
    ("folder", "options", "words"),
    [
        (GROUPED, {"subspace": "full"}, "no polyhedra"),
        (GROUPED, {"subspace": "pca:3"}, "no polyhedra"),
        (GROUPED, {"subspace": "circle:1,2"}, "great circle"),
        (GROUPED, {"subspace": "pca:2", "out": Path("cells")}, "writes lists"),
        (GROUPED, {"expert_set": (0, 1, 2, 3)}, "linear routers"),
        (BALANCED, {"expert_set": (0, 1, 1, 3)}, "4 different experts"),
        (BALANCED, {"subspace": "pca:65"}, "from 1 to 64"),
        (BALANCED, {"subspace": "plane:1,2"}, "plane:A,B,C"),
        (BALANCED, {"subspace": "sphere"}, "expected full"),
        (BALANCED, {"subspace": "circle:1,2", "out": Path("cells")}, "writes lists"),
    ],
)
def test_what_no_tokens_could_change_is_refused_before_any_is_read(
    monkeypatch, tmp_path, folder, options, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moegeom.routing_cells.slices.draw_sample", lambda *_, **__: 1 / 0)
    with pytest.raises((UsageError, RouterRuleError), match=words):
        cells(of_sample(folder.resolve(), **options))
