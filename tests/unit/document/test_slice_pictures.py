"""Pictures of slices show what their records hold, alike every time, and load nothing."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from moegeom.core.errors import UsageError
from moegeom.document.paper import ENDINGS
from moegeom.routing_cells.pictures import views
from moegeom.routing_cells.pictures.page import (
    CircleCells,
    PlaneCells,
    RasterCells,
    SliceCaption,
    SpaceCells,
    TokenMarks,
    caption_text,
    cell_colours,
)
from moegeom.routing_cells.request import CellsRequest
from tests.by_day import by_day, one_of_each
from tests.oracle.exact_cells import exact_cells, expert_sets

FRAME = (-3.0, 3.0, -2.0, 2.0)
CAPTION = SliceCaption(
    model="a/model",
    router="text/12",
    top_k=2,
    num_experts=7,
    subspace="pca:2 of 16384 tokens",
    variance_share=0.183,
    num_own=3,
    num_tokens=16384,
    seed=5,
    version="0.1.0",
    is_certified=True,
    remark="",
)


def clipped(polygon, normal, offset):
    """The part of a convex polygon with normal . x <= offset."""
    kept = []
    for p, q in zip(np.roll(polygon, 1, axis=0), polygon, strict=True):
        a, b = p @ normal - offset, q @ normal - offset
        if a * b < 0:
            kept.append(p + a / (a - b) * (q - p))
        if b <= 0:
            kept.append(q)
    return np.array(kept, np.float64).reshape(-1, 2)


def random_rows(experts, seed):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((experts, 2)), generator.standard_normal(experts)


def plane(experts=7, top_k=2, frame=FRAME, seed=0, tokens=None) -> PlaneCells:
    """All cells of a random router, each clipped by all of its half-planes."""
    weight, bias = random_rows(experts, seed)
    x0, x1, y0, y1 = frame
    names, polygons = expert_sets(exact_cells(weight, bias, top_k)), []
    for name in names:
        polygon = np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]])
        for i in name:
            for j in set(range(experts)) - set(name):
                polygon = clipped(polygon, weight[j] - weight[i], bias[i] - bias[j])
        polygons.append(polygon)
    facets = []
    for a, one in enumerate(names):
        for b, other in enumerate(names):
            out, into = set(one) - set(other), set(other) - set(one)
            if a < b and len(out) == 1:
                i, j = *out, *into
                away = polygons[a] @ (weight[j] - weight[i]) - (bias[i] - bias[j])
                ends = polygons[a][np.abs(away) < 1e-9]
                if len(ends) == 2 and np.linalg.norm(ends[0] - ends[1]) > 1e-9:
                    facets.append((ends, (a, b), i, j))
    return PlaneCells(
        dataclasses.replace(CAPTION, top_k=top_k, num_experts=experts),
        frame,
        tuple(names),
        tuple(polygons),
        np.array([w[0] for w in facets]).reshape(-1, 2, 2),
        np.array([w[1] for w in facets], np.int64).reshape(-1, 2),
        np.array([w[2] for w in facets], np.int64),
        np.array([w[3] for w in facets], np.int64),
        tokens,
    )


def marks(number=40, seed=1) -> TokenMarks:
    generator = np.random.default_rng(seed)
    return TokenMarks(
        generator.uniform((-3, -2), (3, 2), (number, 2)), generator.random(number) < 0.3
    )


PLANE = plane(tokens=marks())


def raster() -> RasterCells:
    label = np.repeat(np.arange(3, dtype=np.int32), 4)[None, :].repeat(9, axis=0)
    state = np.zeros((9, 12), np.uint8)
    state[:, [3, 7]] = 1
    state[2:4, 9:11] = 2
    return RasterCells(CAPTION, FRAME, label, state, ((0, 1), (0, 2), (1, 2)), marks())


def space() -> SpaceCells:
    place = np.random.default_rng(2).standard_normal((6, 3))
    names = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    facets = np.array([[0, 1], [1, 2], [0, 3], [3, 5]])
    return SpaceCells(CAPTION, place, names, facets, np.arange(6))


def circle() -> CircleCells:
    start = np.array([0.5, 2.0, 4.0])
    stop = np.array([2.0, 4.0, 0.5 + 2 * np.pi])
    own = np.array([True, False, False])
    return CircleCells(CAPTION, ((0, 1), (1, 2), (0, 2)), start, stop, np.array([1.0, 3, 5]), own)


#: Pictures by the number of experts that a token has.
BY_TOP_K = {1: plane(9, 1), 2: PLANE}

PICTURES = {"plane": PLANE, "raster": raster(), "space": space(), "circle": circle()}
#: Every view of every kind of picture.
WAYS = {
    "cells": ("plane", {"view": "cells", "width": 183.0}),
    "expert": ("plane", {"view": "expert:3"}),
    "raster": ("raster", {}),
    "space": ("space", {}),
    "circle": ("circle", {}),
}


def written(picture, folder: Path, suffix: str, **options) -> bytes:
    path = folder / f"picture{suffix}"
    views.write_picture(picture, CellsRequest("", plot=path, **options))
    assert [file.name for file in folder.iterdir()] == [path.name]
    content = path.read_bytes()
    path.unlink()
    return content


def layer(svg: bytes, name: str) -> list[ET.Element]:
    """What is drawn in one group of an SVG: paths and marks."""
    spaces = "{http://www.w3.org/2000/svg}"
    for group in ET.fromstring(svg).iter(f"{spaces}g"):
        if group.get("id") == name:
            drawn = [e for e in group.iter() if e.tag in (f"{spaces}use", f"{spaces}path")]
            defined = [e for d in group.iter(f"{spaces}defs") for e in d.iter(f"{spaces}path")]
            return [e for e in drawn if e not in defined]
    return []


def text_of(svg: bytes) -> str:
    return "".join(ET.fromstring(svg).itertext())


STARTS = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}


@pytest.mark.parametrize(
    ("way", "suffix"),
    by_day(
        itertools.product(WAYS, ENDINGS), list(zip(WAYS, itertools.cycle(ENDINGS), strict=False))
    ),
)
def test_equal_input_gives_equal_bytes_where_names_of_others_are_text(
    way, suffix, hostile, tmp_path
):
    kind, options = WAYS[way]
    others = dict.fromkeys(("model", "router", "subspace", "remark"), hostile)
    caption = dataclasses.replace(CAPTION, **others)
    picture = dataclasses.replace(PICTURES[kind], caption=caption)
    first = written(picture, tmp_path, suffix, **options, caption=True)
    assert first.startswith(STARTS[suffix])
    assert written(picture, tmp_path, suffix, **options, caption=True) == first
    if suffix == ".svg":
        assert "<script>alert(1)</script>" in text_of(first).replace("\n", " ")


def test_settings_of_the_caller_change_nothing(tmp_path):
    import matplotlib as mpl

    plain = written(PLANE, tmp_path, ".svg")
    with mpl.rc_context({"font.size": 20, "svg.fonttype": "path", "lines.linewidth": 9}):
        assert written(PLANE, tmp_path, ".svg") == plain


#: Options that mean nothing, by the picture that they are given for.
NO_OPTIONS = [
    ("plane", {"view": "cell"}),
    ("plane", {"view": "expert"}),
    ("plane", {"view": "expert:7"}),
    ("plane", {"width": 5.0}),
    ("plane", {"width": float("nan")}),
    ("plane", {"dpi": 10**6}),
    ("circle", {"view": "expert:3"}),
]


def test_endings_and_options_that_mean_nothing_are_refused_with_a_hint(tmp_path):
    for ending in ("gif", "", "svg.gz", "html"):
        with pytest.raises(UsageError, match="a name that ends in") as refused:
            views.check_picture(CellsRequest("", plot=tmp_path / f"picture.{ending}"))
        assert all(way in refused.value.hint for way in (*ENDINGS, "--html FILE"))
    for kind, options in NO_OPTIONS:
        request = CellsRequest("", plot=tmp_path / "picture.svg", **options)
        with pytest.raises(UsageError) as refused:
            views.check_picture(request)
            views.write_picture(PICTURES[kind], request)
        assert refused.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("frame", [FRAME, (0.2, 0.9, -0.3, 0.4)])
def test_a_polygon_is_drawn_for_every_cell_within_the_frame_and_for_no_other(frame, tmp_path):
    picture = plane(frame=frame)
    inside = sum(size > 0 for size in views.areas(picture))
    assert 1 < inside < len(picture.expert_sets) or frame == FRAME
    svg = written(picture, tmp_path, ".svg")
    assert len(layer(svg, "cells")) == inside
    assert len(layer(svg, "facets")) == len(picture.facet_ends)


def test_tokens_are_filled_exactly_where_the_cell_is_their_own(tmp_path):
    for number in (40, 400):  # many are paler
        tokens = marks(number)
        own = int(tokens.is_own.sum())
        svg = written(dataclasses.replace(PLANE, tokens=tokens), tmp_path, ".svg")
        filled, hollow = layer(svg, "tokens-own"), layer(svg, "tokens-elsewhere")
        assert (len(filled), len(hollow)) == (own, number - own)
        assert all("fill: none" not in mark.get("style", "") for mark in filled)
        assert all("fill: none" in mark.get("style", "") for mark in hollow)
        assert f"token in its own cell ({own})" in text_of(svg)
    # many become one image
    many = written(plane(tokens=marks(4000)), tmp_path, ".svg", dpi=100)
    assert layer(many, "tokens-elsewhere") == []
    assert b"<image" in many
    assert len(layer(many, "cells")) > 3


def test_a_caption_names_what_is_known_and_nothing_else():
    assert caption_text(PLANE) == (
        "Cells of the top 2 of 7 experts of a/model, router text/12, on pca:2 of 16384 tokens "
        "(18.3 % of the variance). 7 cells and 11 facets in the frame; every one proved. "
        "3 of 16,384 tokens (0.02 %) lie in the cell they are drawn in. Seed 5; moegeom 0.1.0."
    )
    unknown = {"variance_share": None, "num_own": None, "num_tokens": None, "seed": None}
    caption = dataclasses.replace(CAPTION, **unknown, is_certified=False, remark="Only a part.")
    text = caption_text(dataclasses.replace(space(), caption=caption))
    for word in ("None", "Seed", "tokens)", "lie in"):
        assert word not in text
    assert "not all of it proved. Only a part. moegeom" in text


def test_a_caption_is_drawn_only_when_asked_for_and_as_it_is_or_by_number(tmp_path):
    caption = dataclasses.replace(CAPTION, model="$x_1$ \u4e2d \U0001f600")
    svg = written(dataclasses.replace(PLANE, caption=caption), tmp_path, ".svg")
    assert "$x_1$ \\u4e2d" in text_of(svg)
    assert b"Seed 5;" not in written(PLANE, tmp_path, ".svg")
    assert b"Seed 5;" in written(PLANE, tmp_path, ".svg", caption=True, width=183.0)


def test_a_name_of_a_million_letters_leaves_a_page(tmp_path):
    long = {"model": "m" * 10**6, "router": "r" * 10**6, "remark": "w " * 10**6}
    picture = dataclasses.replace(circle(), caption=dataclasses.replace(CAPTION, **long))
    text = caption_text(picture)
    assert len(text) < 2000
    assert "mmm\u2026mmm" in text
    content = written(picture, tmp_path, ".svg", caption=True)
    height = ET.fromstring(content).get("height", "")
    assert 200 < float(height.removesuffix("pt")) < 800


@pytest.mark.parametrize("seed", by_day(range(5), range(2)))
def test_cells_side_by_side_have_different_colours(seed):
    picture = plane(12, 3, seed=seed)
    colours = cell_colours(picture.expert_sets, picture.facet_cells)
    pairs = colours[picture.facet_cells]
    assert len(pairs) > 20
    assert (pairs[:, 0] != pairs[:, 1]).all()
    # they come from the expert sets and not from their numbers
    order = np.random.default_rng(3).permutation(len(picture.expert_sets))
    moved = tuple(picture.expert_sets[cell] for cell in order)
    renumbered = cell_colours(moved, np.argsort(order)[picture.facet_cells[::-1]])
    np.testing.assert_array_equal(renumbered, colours[order])


def test_cells_fill_the_frame_and_a_region_is_convex_for_top_1_and_has_their_share():
    np.testing.assert_allclose(views.areas(PLANE).sum(), 24.0, rtol=1e-12)
    picture = BY_TOP_K[1]
    served = [e for e in range(9) if views.region_of(picture, e).share > 0]
    assert len(served) > 3
    assert all(views.region_of(picture, expert).is_convex for expert in served)
    np.testing.assert_allclose(
        sum(views.region_of(picture, e).share for e in served), 1.0, rtol=1e-12
    )
    assert len(views.hull(np.array([[0.0, 0.0], [1.0, 1.0], [0.5, 0.5], [0.5, 0.5 + 2**-53]]))) == 0


def test_the_convexity_of_a_region_is_that_of_sampled_segments():
    """Oracle: midpoints of pairs of points where the expert serves."""
    generator = np.random.default_rng(4)
    verdicts = set()
    for seed in range(12):
        picture = plane(6, 2, seed=seed)
        points = generator.uniform((-3, -2), (3, 2), (4000, 2))
        middles = (points + points[::-1]) / 2
        weight, bias = random_rows(6, seed)
        chosen = [np.argsort(p @ weight.T + bias)[:, -2:] for p in (points, middles)]
        for expert in range(6):
            serves, between = ((c == expert).any(1) for c in chosen)
            is_broken = bool((serves & serves[::-1] & ~between).any())
            region = views.region_of(picture, expert)
            verdicts.add(region.is_convex)
            assert not (region.is_convex and is_broken)
            if region.is_convex is False and views.area(region.hull) > 24 * region.share + 1.4:
                assert is_broken
    assert {True, False} <= verdicts


@pytest.mark.parametrize(
    ("top_k", "expert"),
    one_of_each(
        itertools.product(BY_TOP_K, range(7)),
        lambda case: views.region_of(BY_TOP_K[case[0]], case[1]).is_convex,
    ),
)
def test_the_title_says_whether_the_region_is_convex(top_k, expert, tmp_path):
    titles = {None: "serves in no cell", True: "a convex region", False: "not a convex region"}
    is_convex = views.region_of(BY_TOP_K[top_k], expert).is_convex
    content = written(BY_TOP_K[top_k], tmp_path, ".svg", view=f"expert:{expert}").decode()
    assert titles[is_convex] in re.sub(r"<[^>]*>|\s+", " ", content)
    assert ("not a convex" in content) == (is_convex is False)


def test_names_of_facets_have_each_expert_on_its_own_side_and_do_not_touch():
    picture, (weight, bias) = plane(12, 3), random_rows(12, 0)
    ends, size = picture.facet_ends * 60, 6.0
    centres = np.array([p.mean(0) if len(p) else (9.0, 9.0) for p in picture.polygons]) * 60
    towards = ends.mean(1) - centres[picture.facet_cells[:, 0]]
    nothing = np.zeros((0, 2, 2)), np.zeros((0, 2))
    names = views.facet_names(
        ends, towards, picture.facet_out, picture.facet_into, *nothing, size=size, most=20
    )
    assert len(names) > 8
    places = np.array([name.place for name in names])
    apart = np.linalg.norm(places[:, None] - places, axis=-1) + 99 * np.eye(len(places))
    assert apart.min() > 0.7 * size
    for name in names:
        left, right = map(int, name.text.split("|"))
        step = 5 * np.array([np.cos(np.radians(name.angle)), np.sin(np.radians(name.angle))])
        assert -90 <= name.angle <= 90
        for side, expert, other in ((-step, left, right), (step, right, left)):
            here = (np.array(name.place) + side) / 60
            chosen = np.argsort(weight @ here + bias)[-3:]
            assert expert in chosen
            assert other not in chosen


def test_no_name_covers_what_is_to_be_kept_free():
    ends = np.array([[[0.0, 0.0], [0.0, 60.0]]])
    one, two = np.array([1]), np.array([22])
    free = np.zeros((0, 2, 2))
    towards = np.array([[1.0, 0.0]])

    def named(points):
        return views.facet_names(ends, towards, one, two, free, np.array(points, float), 6.0, 5)

    assert [n.place[1] for n in named([[50.0, 0.0]])] == [30.0]
    assert [n.place[1] for n in named([[2.0, 30.0]])] == [21.0]
    assert named([[2.0, y] for y in range(60)]) == []


def test_runs_of_pixels_are_those_that_are_marked():
    is_marked = np.random.default_rng(7).random((13, 17)) < 0.5
    drawn = np.zeros_like(is_marked)
    for row, first, end in views.runs(is_marked):
        assert not drawn[row, first:end].any()
        drawn[row, first:end] = True
    np.testing.assert_array_equal(drawn, is_marked)


def test_undecided_pixels_are_hatched_and_counted(tmp_path):
    svg = written(raster(), tmp_path, ".svg")
    assert len(layer(svg, "open")) == 2
    assert "not decided (4 pixels)" in text_of(svg)


def test_a_far_cell_is_drawn_nearer_on_its_ray_and_the_title_says_so(tmp_path):
    plain = space()
    assert views.near_places(plain)[1]
    place = plain.place.copy()
    place[0] *= 1e6
    far = dataclasses.replace(plain, place=place)
    shown, is_true = views.near_places(far)
    assert not is_true
    middle = np.median(place, axis=0)
    rays = [(p - middle) / np.linalg.norm(p - middle, axis=1)[:, None] for p in (shown, place)]
    np.testing.assert_allclose(*rays, rtol=1e-9, atol=1e-12)
    assert np.linalg.norm(shown - middle, axis=1).max() < 20
    assert "far cells drawn nearer" in text_of(written(far, tmp_path, ".svg"))
    assert "far cells drawn nearer" not in text_of(written(plain, tmp_path, ".svg"))


@pytest.mark.parametrize("suffix", by_day(ENDINGS, [".svg"]))
def test_a_picture_of_nothing_is_a_picture(suffix, tmp_path):
    no_tokens = TokenMarks(np.zeros((0, 2)), np.zeros(0, bool))
    outside = plane(3, 1, frame=(50.0, 51.0, 50.0, 51.0))
    nothing = np.zeros((0, 2), np.int64)
    one, whole = ((0, 1),), (np.array([0.0]), np.array([2 * np.pi]))
    undecided = np.full((2, 2), -1, np.int32), np.full((2, 2), 2, np.uint8)
    plane_of_nothing = dataclasses.replace(outside, tokens=no_tokens)
    assert written(plane_of_nothing, tmp_path, suffix, view="expert:0")
    for picture in (
        plane_of_nothing,
        SpaceCells(CAPTION, np.zeros((1, 3)), one, nothing),
        CircleCells(CAPTION, one, *whole),
        RasterCells(CAPTION, FRAME, *undecided, ()),
    ):
        assert written(picture, tmp_path, suffix, view="cells")
