"""Router rows and tokens in their space: cosines, plane, t-SNE."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.extras import install_command
from moegeom.core.shapes import Float64, Int64
from moegeom.core.text import figure_text, percent
from moegeom.document.chart import Axis, Chart, Heat, Numbers, Panel, Points
from moegeom.document.colours import GROUPS
from moegeom.document.drawing import Drawing, FigureResults

#: Layers that are drawn: as many as stand side by side.
_MOST = 3

Matrix = Float64[np.ndarray, "experts experts"]

Rows = list[tuple[int, list[float | None]]]


def _draw_gram(source: FigureResults) -> Iterator[Chart]:
    if not source.has("matrices", "values"):
        return
    scores = source.layers("gram_score_centred")
    lowest = sorted(scores, key=lambda router: scores[router])[:_MOST]
    rows = _rows(source, lowest)
    cosines, together = (_whole(rows[name]) for name in _NAMES)
    routers = list(cosines)
    if not routers:
        return
    orders = {router: by_likeness(cosines[router]) for router in routers}
    panels = [
        Panel(
            f"layer {source.names[r]}, cosine of rows",
            Axis("expert, in the order of likeness"),
            Axis(""),
            [Heat(_ordered(cosines[r], orders[r]), "cosine of centred rows", -1.0, 1.0, 0.0)],
            is_wide=False,
        )
        for r in routers
    ]
    over = "frequency over even chance"
    panels += [
        Panel(
            f"layer {source.names[r]}, co-activation",
            Axis("expert, in the same order"),
            Axis(""),
            [Heat(_ordered(together[r], orders[r]), over, 0.125, 8.0, 1.0, "log2")],
            is_wide=False,
        )
        for r in routers
        if r in together and len(together[r]) == len(orders[r])
    ]
    random, best = source.layers("gram_score_random"), source.layers("gram_score_best")
    most = source.layers("max_cosine_centred")
    sentences = [
        f"layer {source.names[r]}: Gram score {figure_text(scores[r])} (random rows "
        f"{figure_text(random[r])}, best possible {figure_text(best[r])}), largest cosine "
        f"{figure_text(most[r])}"
        for r in routers
        if r in random and r in best and r in most
    ]
    kinds = [(r, name, part) for name in _NAMES for r, part in rows[name].items()]
    yield Chart(
        "gram",
        "Rows of the router, and which experts go together",
        "First, how alike the directions of two experts are, with the mean of all rows taken off: "
        "-1 opposite, blue, 1 equal, red. Experts stand in the order of a clustering by likeness, "
        "so that families of experts are squares on the diagonal. Then, in the same order, how "
        "often two experts are chosen together, over even chance. Layers with the lowest score.",
        "What experts compute: rows say who is asked, not what is answered.",
        "; ".join(sentences) + ".",
        panels,
        [
            ("router", [r for r, _, part in kinds for _ in part]),
            ("matrix", [name for _, name, part in kinds for _ in part]),
            ("expert", [expert for _, _, part in kinds for expert, _ in part]),
            ("values_for_later_experts", [_cells(row) for _, _, part in kinds for _, row in part]),
        ],
    )


#: Matrices that are drawn, side by side.
_NAMES = ("row_cosine", "coactivation")


def _cells(values: Sequence[float | None]) -> str:
    """A row of a matrix in one cell: a column for each pair would be a hundred times as long."""
    return " ".join("" if value is None else f"{value:.4g}" for value in values)


def _rows(source: FigureResults, routers: Sequence[str]) -> dict[str, dict[str, Rows]]:
    """By matrix and router: experts, each with its values for the later ones."""
    matrices: dict[str, dict[str, Rows]] = {name: {} for name in _NAMES}
    by_router = source.by_router("matrices", ["matrix", "expert", "values"], router=routers)
    for router, columns in by_router.items():
        for name, expert, values in zip(*columns.values(), strict=True):
            if name in matrices and expert is not None and values is not None:
                matrices[name].setdefault(router, []).append((expert, values))
    return matrices


def _whole(rows: Mapping[str, Rows]) -> dict[str, Matrix]:
    """Whole matrices by router; nan on the diagonal and where nothing is known."""
    matrices = {}
    for router, listed in rows.items():
        matrix = np.full((len(listed), len(listed)), np.nan)
        for expert, values in listed:
            row = np.array([np.nan if v is None else v for v in values], np.float64)
            if expert >= 0 and len(row) == len(listed) - 1 - expert:
                matrix[expert, expert + 1 :] = matrix[expert + 1 :, expert] = row
        matrices[router] = matrix
    return matrices


def by_likeness(cosine: Matrix) -> list[int]:
    """Experts so that like ones stand together: average linkage of 1 - cosine, leaves in order."""
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering

    if len(cosine) < 3:
        return list(range(len(cosine)))
    first, second = np.triu_indices(len(cosine), 1)
    apart = np.clip(1.0 - np.nan_to_num(cosine[first, second]), 0.0, 2.0)
    tree = linkage(apart, "average")
    tree = optimal_leaf_ordering(tree, apart) if len(cosine) <= 128 else tree
    return leaves_list(tree).tolist()


def _ordered(matrix: Matrix, order: Sequence[int]) -> list[list[float | None]]:
    rows = matrix[np.ix_(order, order)].tolist()
    return [[None if value != value else value for value in row] for row in rows]


GRAM = Drawing("gram", 60, "cosines of router rows, and which experts go together", _draw_gram)


#: Layers that are drawn: the first, the middle and the last.
_LAYERS = 3

_COLUMNS_PLANE = ("expert", "is_expert", "domain_number", "x", "y", "margin")


@dataclass(frozen=True)
class TokensOfLayer:
    """The sample of a layer: rows of its tokens and of its busiest experts, and colours of them.

    The busiest experts have a colour each, all others one; ``names`` are those of the colours.
    """

    tokens: Sequence[int]
    experts: Sequence[int]
    groups: Sequence[int]
    names: Sequence[str]
    domains: Sequence[int]


def shown_of(routers: Sequence[str]) -> list[str]:
    """The first, the middle and the last of them, or as many as there are."""
    last = len(routers) - 1
    places = sorted({round(i * last / (_LAYERS - 1)) for i in range(_LAYERS)})
    return [routers[place] for place in places if place >= 0]


def domains_of(source: FigureResults) -> list[str]:
    """Names of the domains in the order of their numbers."""
    return list((source.results.run["tokens"] or {}).get("domains") or ())


def coloured(rows: Mapping[str, Sequence[Any]], num_domains: int) -> TokensOfLayer:
    """Rows of the table ``sample`` of one router, told apart and coloured."""
    is_expert, expert = rows["is_expert"], rows["expert"]
    tokens = [row for row, of_router in enumerate(is_expert) if not of_router]
    busiest = Counter(expert[row] for row in tokens).most_common(len(GROUPS) - 1)
    colour = {number: place for place, (number, _) in enumerate(busiest)}
    domain = rows["domain_number"]
    return TokensOfLayer(
        tokens,
        [row for row, of_router in enumerate(is_expert) if of_router and expert[row] in colour],
        [colour.get(number, len(colour)) for number in expert],
        [*(f"expert {number}" for number in colour), "others"],
        [min(max(domain[row] or 0, 0), max(num_domains - 1, 0)) for row in tokens],
    )


def likeness_of_neighbours(source: FigureResults, router: str) -> str:
    """What holds in all dimensions: whether near tokens choose alike; empty if not known."""
    same, chance, near = (
        source.layers(name).get(router)
        for name in ("near_same_choice", "near_same_choice_chance", "choice_silhouette")
    )
    if same is None or chance is None:
        return ""
    text = f"{percent(same, '.3g')} of the 10 nearest tokens, in all dimensions, choose the same "
    text += f"first expert ({percent(chance, '.3g')} by chance)"
    return text if near is None else f"{text}, silhouette {figure_text(near)}"


def _draw_plane(source: FigureResults) -> Iterator[Chart]:
    if not source.has("sample", "x"):
        return
    domains, whole = domains_of(source), source.by_router("sample", _COLUMNS_PLANE)
    samples = {router: whole[router] for router in shown_of(list(whole))}
    wide = source.layers("plane_share")
    by_choice, by_domain, texts = [], [], []
    for router, rows in samples.items():
        layer, sample = f"layer {source.names[router]}", coloured(rows, len(domains))
        groups = [sample.groups[row] for row in sample.tokens]
        crosses = [sample.groups[row] for row in sample.experts]
        points = Points(*_places(rows, sample.tokens), groups, sample.names)
        experts = Points(*_places(rows, sample.experts), crosses, are_crosses=True)
        by_choice.append(_panel_plane(f"{layer}, by first choice", [points, experts]))
        if len(domains) > 1:
            points = Points(*_places(rows, sample.tokens), sample.domains, domains)
            by_domain.append(_panel_plane(f"{layer}, by domain", [points]))
        if alike := likeness_of_neighbours(source, router):
            if (share := wide.get(router)) is not None:
                alike += f"; the plane holds {percent(share, '.3g')} of the variance"
            texts.append(f"{layer}: {alike}")
    alt = "; ".join(texts) or "Too few tokens to say whether near ones choose alike"
    yield Chart(
        "plane",
        "Tokens in the plane of their widest directions",
        "A sample of tokens by the two principal components of the router inputs, coloured by "
        "their first choice, and by domain if there are any. Crosses are the rows of the named "
        "experts on the same axes, in their colours, scaled to the spread of the tokens. The "
        "sentence below gives what does not depend on a plane: whether near tokens choose alike.",
        "Clusters and gaps that look like any: all but two of the directions are left out.",
        f"{alt}.",
        [*by_choice, *by_domain],
        [
            ("router", [router for router in samples for _ in samples[router]["x"]]),
            *(
                (name, [v for rows in samples.values() for v in rows[name]])
                for name in _COLUMNS_PLANE
            ),
        ],
    )


def _places(rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> tuple[Numbers, Numbers]:
    return [rows["x"][row] for row in numbers], [rows["y"][row] for row in numbers]


def _panel_plane(title: str, marks: Sequence[Points]) -> Panel:
    x, y = Axis("widest direction, in units of the input"), Axis("second direction")
    return Panel(title, x, y, marks, is_wide=False)


PLANE = Drawing("plane", 70, "tokens in the plane of their widest directions", _draw_plane)


#: Neighbours that a point is drawn to, about, and steps of the search: 500 points take half a
#: second, and three times as many steps keep one near point in a hundred more. How coarsely far
#: points are taken together (0.2 to 0.8) changes the time alone.
PERPLEXITY, STEPS, COARSENESS = 30.0, 350, 0.8

#: Points below which there is nothing to see.
_FEWEST = 8

#: Nearest points that are looked for in the map again.
_NEIGHBOURS = 10

_COLUMNS_TSNE = ("expert", "is_expert", "domain_number", "x", "y", "widest")

Places = Float64[np.ndarray, "points 2"]

_SHOWS_NOT = (
    "How large clusters are, how far apart, and whether they are any: t-SNE tears random points "
    "into clusters too, and another perplexity draws others. Only who is beside whom means "
    "something; directions and distances do not."
)


def _draw_tsne(source: FigureResults) -> Iterator[Chart]:
    if not source.has("sample", "widest"):
        return
    title = "Tokens and rows by t-SNE"
    if importlib.util.find_spec("sklearn") is None:
        shows = "Nothing yet: t-SNE needs scikit-learn, which is not installed."
        yield Chart("tsne", title, shows, _SHOWS_NOT, f"To have it: {install_command()}", [], [])
        return
    whole = source.by_router("sample", _COLUMNS_TSNE)
    router = middle_of(list(whole))
    rows, domains = whole[router], domains_of(source)
    sample = coloured(rows, len(domains))
    points = np.array([rows["widest"][row] for row in sample.tokens], np.float64)
    if (places := embedding(points)) is None:
        return
    layer, (x, y) = f"layer {source.names[router]}", places.T.tolist()
    groups = [sample.groups[row] for row in sample.tokens]
    panels = [_panel_tsne(f"{layer}, tokens by first choice", x, y, groups, sample.names)]
    if len(domains) > 1:
        panels.append(_panel_tsne(f"{layer}, tokens by domain", x, y, sample.domains, domains))
    labels = ((rows["expert"][row], rows["domain_number"][row]) for row in sample.tokens)
    table: list[tuple[str, str, int, int | None, float, float]] = [
        (router, "token", *of_token, *place)
        for of_token, place in zip(labels, zip(x, y, strict=True), strict=True)
    ]
    has_cosines = source.has("matrices", "values")
    cosine = _whole(_rows(source, [router])["row_cosine"]).get(router) if has_cosines else None
    rows_at = None if cosine is None else embedding(points_of(cosine))
    if rows_at is not None:
        x, y = rows_at.T.tolist()
        colour = {rows["expert"][row]: sample.groups[row] for row in range(len(sample.groups))}
        groups = [colour.get(expert, len(sample.names) - 1) for expert in range(len(x))]
        panels.append(_panel_tsne(f"{layer}, rows", x, y, groups, sample.names, are_crosses=True))
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


def _panel_tsne(
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


TSNE = Drawing(
    "tsne", 71, "tokens and router rows by t-SNE, near ones beside each other", _draw_tsne
)
