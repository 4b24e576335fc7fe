"""Tokens and rows of the router by t-SNE, a map that keeps near ones near.

Drawn anew from what the results hold, by scikit-learn where that is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moegeom.core.extras import install_command
from moegeom.core.shapes import Float64, Int64
from moegeom.core.text import percent
from moegeom.document.chart import Axis, Chart, Numbers, Panel, Points
from moegeom.document.drawing import Drawing, FigureResults
from moegeom.document.figures.gram import Matrix, cosines_of
from moegeom.document.figures.plane import (
    coloured,
    domains_of,
    likeness_of_neighbours,
)

#: Neighbours that a point is drawn to, about, and steps of the search: 500 points take half a
#: second, and twice as many steps change nothing that can be seen. How coarsely far points are
#: taken together (0.2 to 0.8) changes the time alone.
PERPLEXITY, STEPS, COARSENESS = 30.0, 500, 0.8

#: Points below which there is nothing to see.
_FEWEST = 8

#: Nearest points that are looked for in the map again.
_NEIGHBOURS = 10

_COLUMNS = ("expert", "is_expert", "domain_number", "x", "y", "widest")

Places = Float64[np.ndarray, "points 2"]

_SHOWS_NOT = (
    "How large clusters are, how far apart, and whether they are any: t-SNE tears random points "
    "into clusters too, and another perplexity draws others. Only who is beside whom means "
    "something; directions and distances do not."
)


def _draw(source: FigureResults) -> Iterator[Chart]:
    if not source.has("sample", "widest"):
        return
    title = "Tokens and rows by t-SNE"
    if importlib.util.find_spec("sklearn") is None:
        shows = "Nothing yet: t-SNE needs scikit-learn, which is not installed."
        yield Chart("tsne", title, shows, _SHOWS_NOT, f"To have it: {install_command()}", [], [])
        return
    whole = source.by_router("sample", _COLUMNS)
    router = middle_of(list(whole))
    rows, domains = whole[router], domains_of(source)
    sample = coloured(rows, len(domains))
    points = np.array([rows["widest"][row] for row in sample.tokens], np.float64)
    if (places := embedding(points)) is None:
        return
    layer, (x, y) = f"layer {source.names[router]}", places.T.tolist()
    groups = [sample.groups[row] for row in sample.tokens]
    panels = [_panel(f"{layer}, tokens by first choice", x, y, groups, sample.names)]
    if len(domains) > 1:
        panels.append(_panel(f"{layer}, tokens by domain", x, y, sample.domains, domains))
    labels = ((rows["expert"][row], rows["domain_number"][row]) for row in sample.tokens)
    table: list[tuple[str, str, int, int | None, float, float]] = [
        (router, "token", *of_token, *place)
        for of_token, place in zip(labels, zip(x, y, strict=True), strict=True)
    ]
    cosine = cosines_of(source, [router]).get(router)
    rows_at = None if cosine is None else embedding(points_of(cosine))
    if rows_at is not None:
        x, y = rows_at.T.tolist()
        colour = {rows["expert"][row]: sample.groups[row] for row in range(len(sample.groups))}
        groups = [colour.get(expert, len(sample.names) - 1) for expert in range(len(x))]
        panels.append(_panel(f"{layer}, rows", x, y, groups, sample.names, are_crosses=True))
        table += [(router, "row", expert, None, x[expert], y[expert]) for expert in range(len(x))]
    share = source.layers("widest_share").get(router)
    percentage = percent(neighbours_kept(points, places), ".3g")
    sentences = [
        likeness_of_neighbours(source, router),
        ""
        if share is None
        else f"{points.shape[1]} widest directions hold {percent(share, '.3g')} of the variance",
        f"the map keeps {percentage} of the {_NEIGHBOURS} nearest tokens",
    ]
    names = ("router", "kind", "expert", "domain_number", "x", "y")
    yield Chart(
        "tsne",
        title,
        "The tokens of the middle layer by t-SNE, which puts points beside those that they are "
        f"nearest to: from their widest directions, perplexity {PERPLEXITY:.0f}, begun at the "
        "plane above, the same every time. Then the rows of the router by the angles between them, "
        "in the same colours. The sentence below gives what does not depend on the map, and how "
        "true the map is.",
        _SHOWS_NOT,
        f"{layer}: {'; '.join(filter(None, sentences))}.",
        panels,
        [
            (name, list(values))
            for name, values in zip(names, zip(*table, strict=True), strict=True)
        ],
    )


def middle_of(routers: Sequence[str]) -> str:
    """The router in the middle: one map takes half a second, and there are up to hundreds."""
    return routers[len(routers) // 2]


def _panel(
    title: str,
    x: Numbers,
    y: Numbers,
    groups: Sequence[int],
    names: Sequence[str],
    are_crosses: bool = False,
) -> Panel:
    return Panel(
        title,
        Axis("t-SNE 1, no unit"),
        Axis("t-SNE 2, no unit"),
        [Points(x, y, groups, names, are_crosses)],
        is_wide=False,
    )


def embedding(points: Float64[np.ndarray, "points components"]) -> Places | None:
    """t-SNE of points whose components stand in the order of their spread.

    Begun at the first two components and computed in one thread, so that it is the same every time
    on a machine. None for fewer than 8 points, and for points that are all equal.
    """
    spread = float(points[:, 0].std()) if len(points) >= _FEWEST else 0.0
    if not spread > 0.0 or points.shape[1] < 2:
        return None
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    unit = points / spread
    perplexity = min(PERPLEXITY, (len(points) - 1) / 3.0)
    start: Any = 1e-4 * unit[:, :2]
    search = TSNE(
        perplexity=perplexity,
        init=start,
        max_iter=STEPS,
        angle=COARSENESS,
        random_state=0,
        n_jobs=1,
    )
    with threadpool_limits(1):
        return np.round(search.fit_transform(unit).astype(np.float64), 3)


def points_of(cosine: Matrix) -> Float64[np.ndarray, "experts components"]:
    """Points with these cosines between them, components in the order of their spread.

    What is not known counts as a right angle.
    """
    gram = np.nan_to_num(cosine)
    np.fill_diagonal(gram, 1.0)
    means = gram.mean(axis=0)
    values, vectors = np.linalg.eigh(gram - means[:, None] - means[None, :] + means.mean())
    points = vectors * np.sqrt(np.maximum(values, 0.0))
    return points[:, ::-1]


def neighbours_kept(points: Float64[np.ndarray, "points components"], places: Places) -> float:
    """Share of the 10 nearest others of a point that are among its 10 nearest on the map."""
    before, after = (_nearest(each) for each in (points, places))
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(after, before, strict=True)]))


def _nearest(points: Float64[np.ndarray, "points _"]) -> Int64[np.ndarray, "points nearest"]:
    length = (points**2).sum(axis=1)
    squared = length[:, None] + length[None, :] - 2.0 * points @ points.T
    np.fill_diagonal(squared, np.inf)
    return np.argsort(squared, axis=1, kind="stable")[:, :_NEIGHBOURS]


DRAWING = Drawing("tsne", 71, "tokens and router rows by t-SNE, near ones beside each other", _draw)
