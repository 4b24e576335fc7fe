"""Figures say what the tables hold, load nothing, and survive the names of others; the map of t-SNE
is the same every time; red-blind and green-blind readers tell colours apart, too.
"""

import base64
import csv
import dataclasses
import hashlib
import html
import importlib.util
import io
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.manifold import trustworthiness
from sklearn.neighbors import NearestNeighbors
from threadpoolctl import threadpool_limits

import moegeom as mg
from moegeom.core.errors import UsageError
from moegeom.document.chart import Areas, Axis, Bars, Chart, Guide, Heat, Panel, Points, Polyline
from moegeom.document.colours import GROUPS, GROUPS_ON_BLACK, ROLES, parsed, ramp
from moegeom.document.drawing import DRAWINGS, figures_of
from moegeom.document.figures.load import most_used
from moegeom.document.figures.space import embedding, neighbours_kept, points_of
from moegeom.document.model import Command, Document, Gallery, View
from moegeom.document.paper import ENDINGS, write_figure
from moegeom.document.render import render
from moegeom.document.renderers.html import comma_separated
from moegeom.document.svg import panel_svg, png, shades
from moegeom.geometry.gram import effective_rows
from moegeom.routing_cells.pictures.page import PALETTE
from tests.by_day import by_day
from tests.unit.document.pages import Page
from tests.unit.document.records import SAMPLE, scanned_sample

ROOT = Path(__file__).resolve().parents[3]

#: One of every mark, with gaps.
PANELS = {
    "line": Panel(
        "t",
        Axis("x", "log2"),
        Axis("y", "log10"),
        [
            Polyline("a", "tokens", [1, 2, 4, 8], [0.1, None, 0.2, 0.0], [0.05] * 4, [0.3] * 4),
            Guide("r", "limit", 0.1),
        ],
    ),
    "bars": Panel(
        "t",
        Axis("x", names=["a", "b", "c"]),
        Axis("y"),
        [Bars("A", "tokens", [1.0, None, -2.0], [0.5, None, -3.0], [1.5, None, -1.0])],
    ),
    "lying": Panel(
        "t",
        Axis("x"),
        Axis("y", names=["a long name " * 9, "b", "c"]),
        [
            Bars("A", "tokens", [1.0, None, 2.0], [0.5, None, 1.0], [1.5, None, 3.0]),
            Bars("B", "other", [None, 4.0, 1.0]),
            Guide("r", "limit", 3.0),
        ],
    ),
    "points": Panel("t", Axis("x"), Axis("y"), [Points([0, 1], [0, None], [0, 1], ["p", "q"])]),
    "crosses": Panel("t", Axis("x"), Axis("y"), [Points([0, 1], [0, None], [0, 1], (), True)]),
    "areas": Panel("t", Axis("x"), Axis("y"), [Areas([0, 1], [[0.2, 0.5], [0.8, None]], "pq")]),
    "heat": Panel(
        "t",
        Axis("x", names=["a", "b"]),
        Axis("y", names=["c"], links=["#layer-0"]),
        [Heat([[0.5, None]], "h", 0.25, 4.0, 1.0, "log2", [["half", ""]])],
    ),
    "empty": Panel("t", Axis("x"), Axis("y"), [Polyline("a", "dim", [], [])]),
}


def figure(panel: Panel, name: str = "f", **more) -> Chart:
    facts = {"columns": [("v", [1.0, None])]} | more
    return Chart(name, "title", "shows", "shows not", "alt", [panel], **facts)


@pytest.fixture(scope="module")
def scanned():
    return scanned_sample()


def rows_behind(figure: Chart) -> list[dict[str, str]]:
    """What a page holds of a figure."""
    return list(csv.DictReader(io.StringIO(comma_separated(figure))))


@pytest.fixture(scope="module")
def behind(scanned) -> dict[str, list[dict[str, str]]]:
    """The rows behind each figure of the sample."""
    return {figure.name: rows_behind(figure) for figure in figures_of(scanned.value)}


def tables_of(page: Page) -> list[list[dict[str, str]]]:
    """The numbers that a page holds."""
    packed = (a for a in page.addresses if a.startswith("data:text/csv;base64,"))
    texts = (base64.b64decode(a.partition(",")[2]).decode() for a in packed)
    return [list(csv.DictReader(io.StringIO(text))) for text in texts]


def test_every_drawing_draws_the_sample_or_says_what_it_lacks(scanned, behind):
    few_layers, no_arithmetic = {"overview"}, {"flips"}
    assert {*behind} == {*DRAWINGS.names()} - few_layers - no_arithmetic
    assert [*behind] == scanned.figures()
    assert all(DRAWINGS[name].name == name for name in DRAWINGS.names())


def test_every_number_behind_a_figure_is_that_of_a_table(scanned, behind):
    """Joined by router, expert and domain: what the page holds is what the table holds."""
    loads = {
        (row["population"], row["router"], row["expert"]): row["load"]
        for row in scanned.table("experts").to_pylist()
        if row["variant"] == "as_stored"
    }
    compared = 0
    for name in ("load_map", "load", "domains"):
        for row in behind[name]:
            where = row.get("population", "all"), row["router"], int(row["expert"])
            assert float(row["load"]) == loads[where]
            compared += 1
    assert compared > 100
    margins = {
        (r["router"], r["quantity"], r["threshold"]): r["share_below"]
        for r in scanned.table("margins").to_pylist()
        if (r["variant"], r["population"]) == ("as_stored", "all")
    }
    for row in behind["near_boundary"]:
        key = row["router"], row["quantity"], float(row["threshold"])
        assert float(row["share_below"]) == margins[key]


#: Columns behind figures that no table holds under that name; other tests compare them.
OF_NO_TABLE = {
    *(("gram", "values_for_later_experts"), ("tsne", "kind")),
    *(("tsne", "x"), ("tsne", "y")),
}


def test_whatever_stands_behind_a_figure_stands_in_a_table(scanned, behind):
    values: dict[str, set[str]] = {}
    for table in map(scanned.table, scanned.value.tables()):
        for column in table.column_names:
            values.setdefault(column, {""}).update(map(str, table.column(column).to_pylist()))
    elsewhere = {
        (figure, column)
        for figure, rows in behind.items()
        for row in rows
        for column, value in row.items()
        if value not in values.get(column, ())
    }
    assert elsewhere == OF_NO_TABLE


def test_captions_say_documents_where_there_are_some_to_tell_apart(scanned):
    for known, number, units in ((True, 8, "documents"), (True, 1, "runs"), (False, None, "runs")):
        tokens = {"has_documents": known, "num_documents": number}
        run = {**scanned.run, "tokens": {**scanned.run["tokens"], **tokens}}
        results = dataclasses.replace(scanned.value, run=run)
        load, near = figures_of(results, ("load", "near_boundary"))
        assert f"interval over {units}" in load.shows
        assert f"interval over {units}" in near.shows


def test_cosines_of_the_page_are_those_of_the_rows(behind):
    router = mg.open(SAMPLE / "step_1500").routers[0]
    rows = effective_rows(router.weight, router.gain).centred
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    drawn = [
        row
        for row in behind["gram"]
        if (row["router"], row["matrix"]) == (router.name, "row_cosine")
    ]
    assert len(drawn) == len(rows)
    for row in drawn:
        i, values = int(row["expert"]), row["values_for_later_experts"].split()
        np.testing.assert_allclose(np.array(values, float), (unit @ unit[i])[i + 1 :], atol=1e-3)


def test_a_page_runs_the_script_of_its_policy_and_loads_nothing(scanned):
    text = scanned.html()
    page = Page(text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy[1]).split(";"))
    (script,) = [text for text in page.scripts if text.strip()]
    known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{known}'"
    assert not {"iframe", "object", "embed", "form", "link"} & {*page.tags}
    assert not page.handlers
    assert all(a.startswith(("data:", "#")) for a in page.addresses)
    assert {a[1:] for a in page.addresses if a.startswith("#")} <= {*page.attributes["id"]}
    assert len(tables_of(page)) == len(scanned.figures())


def test_names_of_others_are_text_in_every_figure(hostile):
    names = [hostile, "<script>alert(1)</script>", "x" * 10_000, "=cmd()"]
    x, links = Axis(hostile, names=names), ["#layer-0"] * 4
    heat = Heat([[1.0] * 4] * 4, hostile, 0.0, 1.0, cells=[names] * 4)
    panels = [
        Panel(hostile, x, Axis(hostile), [Bars(hostile, "tokens", [1] * 4)]),
        Panel(hostile, x, Axis(hostile, names=names, links=links), [heat]),
        Panel("", Axis(""), Axis(""), [Points([1], [1], [0], names), Areas([1], [[1]], [hostile])]),
    ]
    shown = Chart("f", hostile, hostile, hostile, hostile, panels, [("name", names)])
    document = Document("scan", "m", [[Gallery(lambda: [shown])]], dict)
    text = render(document, "html", View())
    assert text.count("<script") == 1
    assert "\x1b" not in text
    page = Page(text)
    assert not page.handlers
    assert [row["name"] for row in tables_of(page)[0]][1:] == [*names[1:3], "'=cmd()"]


def test_every_mark_is_drawn_with_its_gaps():
    for kind, panel in PANELS.items():
        text = panel_svg(panel, "alt")
        assert text == panel_svg(panel, "alt"), kind
        assert 'aria-label="alt"' in text, kind
        assert not re.search("nan|inf", text), kind


@pytest.mark.parametrize(
    ("kind", "ending"),
    by_day(
        itertools.product(PANELS, ENDINGS),
        list(zip(PANELS, itertools.cycle(ENDINGS), strict=False)),
    ),
)
def test_every_mark_is_a_file_for_a_paper_of_equal_bytes(kind, ending, tmp_path):
    first, second = tmp_path / f"a{ending}", tmp_path / f"b{ending}"
    write_figure(figure(PANELS[kind]), first)
    write_figure(figure(PANELS[kind]), second)
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_bytes()) > 1000


def test_an_axis_with_a_scale_has_numbers_though_it_holds_no_power(tmp_path):
    narrow = Panel("", Axis("x"), Axis("y", "log10"), [Polyline("a", "tokens", [1, 2], [6.1, 9.8])])
    write_figure(figure(narrow), tmp_path / "a.svg")
    for text in (panel_svg(narrow, "alt"), (tmp_path / "a.svg").read_text("utf-8")):
        assert {"7", "8", "9"} <= set(re.findall(r">\s*(\d+)\s*<", text))


def test_bars_lie_where_their_names_stand_at_the_side():
    text = panel_svg(PANELS["lying"], "alt")
    bars = re.findall(r'<path class="f (?:tokens|other)" d="M([\d.]+) [\d.]+h([\d.]+)v', text)
    assert len({start for start, _ in bars}) == 1  # all begin at 0
    lengths = [float(length) for _, length in bars]  # of 1, 2; 4, 1
    assert lengths == pytest.approx([lengths[0] * n for n in (1, 2, 4, 1)], abs=0.2)
    assert "rotate(-38" not in text
    assert re.search(r'<path class="rule s limit" fill="none" d="M[\d.]+ [\d.]+v', text)


def test_bars_of_a_name_stand_around_it_side_by_side():
    for of_x, of_y in (("ab", ()), ((), "ab")):
        bars = [Bars(name, "tokens", [1.0, 2.0]) for name in "ABC"]
        text = panel_svg(Panel("", Axis("x", names=of_x), Axis("y", names=of_y), bars), "alt")
        paths = re.findall(r'class="f tokens" d="M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)', text)
        side, width = (0, 2) if of_x else (1, 3)
        starts, widths = (np.array(paths, float)[:, n].reshape(3, 2) for n in (side, width))
        names = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>[ab]<', text)
        places = np.array(names, float)[:, side] - 4.0 * bool(of_y)  # a name beside: on its line
        np.testing.assert_allclose((starts + widths / 2).mean(axis=0), places, atol=0.11)
        np.testing.assert_allclose(np.diff(starts, axis=0), widths[1:], atol=0.11)


def test_bars_that_no_name_has_two_of_take_the_whole_room():
    alone = [Bars("A", "tokens", [1.0, None]), Bars("B", "other", [None, 2.0])]
    beside = [Bars("A", "tokens", [1.0, 1.0]), Bars("B", "other", [None, 2.0])]
    widths = []
    for marks in (alone, beside):
        text = panel_svg(Panel("", Axis("x", names="ab"), Axis("y"), marks), "alt")
        first = re.search(r'<path class="f tokens" d="M[\d.]+ [\d.]+h([\d.]+)v', text)
        widths.append(float(first[1]))
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.16)  # each is rounded to 0.1
    # a few bars that stand are narrow, and long names beside bars are not
    assert not PANELS["bars"].fills_page
    assert PANELS["lying"].fills_page
    assert PANELS["heat"].fills_page
    many = Axis("x", names=[str(n) for n in range(13)])
    assert Panel("t", many, Axis("y"), [Bars("A", "tokens", [1.0] * 13)]).fills_page


def test_experts_along_a_document_are_those_with_the_largest_weight():
    experts, weights = [7, 7, 60, 3, 99, *range(100, 147)], [0.2, 0.3, 0.4, None, 0.1, *[0.01] * 47]
    shown = most_used(experts, weights, 256)
    assert len(shown) == 48
    assert shown == sorted(shown)
    assert {7, 60, 99} < {*shown}
    assert 3 not in shown
    assert list(most_used(experts, weights, 48)) == list(range(48))


def test_a_command_on_a_page_is_copied_as_it_is_typed():
    typed = "moegeom scan 'a  b' --tokens REC --per-token <x>"
    text = render(Document("scan", "m", [[Command("next", typed)]], dict), "html", View())
    (code,) = re.findall(r'<code class="typed">(.*?)</code>', text)
    assert html.unescape(re.sub(r"</?span>", "", code)) == typed


def test_endings_and_figures_that_there_are_not_are_refused(scanned, tmp_path):
    with pytest.raises(UsageError, match=r"expected a name that ends in \.svg, \.pdf, \.png"):
        write_figure(figure(PANELS["line"]), tmp_path / "a.jpg")
    with pytest.raises(UsageError, match="no figure 'lod'") as refused:
        scanned.plot(tmp_path / "a.svg", "lod")
    assert "load_map" in refused.value.hint


def test_shades_are_monotone_and_ramps_darken_evenly_away_from_their_pale_ends():
    values = [[0.25, 0.5, 1.0, 2.0, 4.0, None, 100.0, 0.0]]
    parted = shades(Heat(values, "h", 0.25, 4.0, 1.0, "log2"))[0]
    assert parted == [1, 65, 128, 191, 255, 0, 255, 1]
    assert shades(Heat([[0.0, 5.0, 10.0]], "h", 0.0, 10.0))[0] == [1, 128, 255]

    def light(colours):
        return np.array(colours) @ [0.2126, 0.7152, 0.0722]

    assert (np.diff(light(ramp(parts=False))) < 0).all()
    both = light(ramp(parts=True))
    assert (np.diff(both[:128]) > 0).all()
    assert (np.diff(both[127:]) < 0).all()


def test_a_picture_of_pixels_is_read_by_another_library():
    places = [[0, 1, 128], [255, 254, 2]]
    image = np.asarray(Image.open(io.BytesIO(png(places, ramp(parts=True)))).convert("RGBA"))
    assert image.shape == (2, 3, 4)
    assert image[0, 0, 3] == 0
    for y, row in enumerate(places):
        for x, place in enumerate(row):
            if place:
                assert tuple(image[y, x]) == (*ramp(parts=True)[place - 1], 255)


def test_a_view_on_the_page_is_nothing_that_a_terminal_prints():
    drawn: list[str] = []

    def make():
        drawn.append("made")
        return [figure(PANELS["line"])]

    document = Document("scan", "m", [[Gallery(make)]], dict)
    for name in ("table", "md"):
        render(document, name, View())
    assert not drawn
    render(document, "html", View())
    assert drawn == ["made"]


def test_the_page_of_figures_lists_each_with_what_it_shows():
    listed = re.findall(r"^\| `(\w+)` \| (.+) \|$", (ROOT / "docs/figures.md").read_text(), re.M)
    drawings = sorted(DRAWINGS.all(), key=lambda drawing: (drawing.place, drawing.name))
    assert listed == [(drawing.name, drawing.text) for drawing in drawings]


@pytest.fixture(scope="module")
def clusters() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 6, 180)
    return 8.0 * rng.normal(size=(6, 10))[label] + rng.normal(size=(180, 10)), label


def test_points_of_far_clusters_have_their_own_cluster_beside_them_on_the_map(clusters):
    points, label = clusters
    places = embedding(points)
    assert places is not None
    nearest = NearestNeighbors(n_neighbors=6).fit(places).kneighbors(return_distance=False)
    assert (label[nearest] == label[:, None]).mean() > 0.99
    assert trustworthiness(points, places, n_neighbors=10) > 0.95


def test_the_map_is_the_same_in_any_units_and_on_any_number_of_threads(clusters):
    points, _ = clusters
    first = embedding(points)
    with threadpool_limits(4):
        second = embedding(points * 2.0**40)
    np.testing.assert_array_equal(first, second)


def test_the_share_of_neighbours_kept_is_that_of_two_searches(clusters):
    points, _ = clusters
    places = points[:, :2]
    search = NearestNeighbors(n_neighbors=10)
    before, after = (
        search.fit(each).kneighbors(return_distance=False) for each in (points, places)
    )
    share = np.mean([len({*a} & {*b}) / 10 for a, b in zip(before, after, strict=True)])
    assert neighbours_kept(points, places) == pytest.approx(share)
    assert neighbours_kept(places, places) == 1.0


def test_points_of_cosines_lie_as_far_apart_as_unit_rows_do():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(20, 7))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosine = rows @ rows.T
    np.fill_diagonal(cosine, np.nan)
    points = points_of(cosine)
    apart = [np.linalg.norm(each[:, None] - each[None], axis=2) for each in (points, rows)]
    np.testing.assert_allclose(*apart, atol=1e-7)
    assert (np.diff((points**2).sum(axis=0)) < 1e-12).all()  # in the order of their spread


def test_too_few_points_and_equal_points_have_no_map():
    assert embedding(np.random.default_rng(0).normal(size=(7, 5))) is None
    assert embedding(np.zeros((30, 5))) is None
    assert embedding(np.arange(30.0)[:, None]) is None


def rows_of(table, router: str) -> list[dict]:
    return [row for row in table.to_pylist() if row["router"] == router]


def test_what_is_drawn_are_the_tokens_and_experts_of_a_router(scanned):
    (drawn,) = figures_of(scanned.value, ["tsne"])
    rows = list(csv.DictReader(io.StringIO(comma_separated(drawn))))
    router = rows[0]["router"]
    sample = rows_of(scanned.table("sample"), router)
    tokens = [(str(r["expert"]), str(r["domain_number"])) for r in sample if not r["is_expert"]]
    assert [(r["expert"], r["domain_number"]) for r in rows if r["kind"] == "token"] == tokens
    assert [r["expert"] for r in rows if r["kind"] == "row"] == [str(e) for e in range(16)]
    (layer,) = rows_of(scanned.layers(), router)
    for figure in ("near_same_choice", "near_same_choice_chance", "widest_share"):
        assert f"{100 * layer[figure]:.3g} %" in drawn.alt, figure


def test_the_widest_directions_begin_with_the_plane_and_hold_their_share(scanned):
    layer = scanned.layers().to_pylist()[0]
    sample = rows_of(scanned.table("sample"), layer["router"])
    tokens = [row for row in sample if not row["is_expert"]]
    widest = np.array([row["widest"] for row in tokens])
    plane = np.array([(row["x"], row["y"]) for row in tokens])
    assert widest.shape == (len(tokens), 30)
    np.testing.assert_allclose(widest[:, :2], plane, rtol=1e-6)
    share = layer["plane_share"] * (widest**2).sum() / (plane**2).sum()
    assert layer["widest_share"] == pytest.approx(share, rel=1e-5)


def test_without_scikit_learn_the_page_says_what_to_install(scanned, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sklearn" else find(name)
    )
    page = scanned.html()
    assert "t-SNE needs scikit-learn, which is not installed" in page
    with pytest.raises(UsageError, match="nothing to draw of 'tsne'") as refused:
        scanned.plot(tmp_path / "a.svg", "tsne")
    assert "pip install" in refused.value.hint
    assert not list(tmp_path.iterdir())


#: Machado, Oliveira and Fernandes 2009, severity 1, on linear red, green and blue.
SEEN_BY = {
    "everybody": np.eye(3),
    "protanopes": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopes": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}  # fmt: skip


def oklab(linear):
    """Ottosson 2020."""
    to_cone = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566], [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099], [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    return np.cbrt(linear @ np.transpose(to_cone)) @ np.transpose(to_lab)


#: Colours that stand beside each other in a figure.
TOGETHER = {
    "meanings on white": [on_white for on_white, _ in ROLES.values()],
    "meanings on black": [on_black for _, on_black in ROLES.values()],
    "groups on white": GROUPS,
    "groups on black": GROUPS_ON_BLACK,
    "cells": PALETTE,
}


@pytest.mark.parametrize("colours", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("people", SEEN_BY)
def test_any_two_colours_differ_for_everybody(people, colours):
    encoded = np.array([parsed(colour) for colour in colours]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    seen = oklab(np.clip(linear @ SEEN_BY[people].T, 0, 1))
    apart = np.linalg.norm(seen[:, None] - seen, axis=-1) + np.eye(len(seen))
    assert apart.min() > 0.05  # two hundredths are just seen
