"""The map of t-SNE keeps near points near, is the same every time, and needs no installation."""

import csv
import importlib.util
import io

import numpy as np
import pytest
from sklearn.manifold import trustworthiness
from sklearn.neighbors import NearestNeighbors
from threadpoolctl import threadpool_limits

from moegeom.core.errors import UsageError
from moegeom.document.drawing import figures_of
from moegeom.document.figures.space import embedding, neighbours_kept, points_of
from moegeom.document.renderers.html import comma_separated
from tests.unit.document.records import scanned_sample


@pytest.fixture(scope="module")
def scanned():
    return scanned_sample()


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
