"""Figures of results: which there are, and what they are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from moegeom.core.errors import UsageError
from moegeom.core.registry import Rooms
from moegeom.core.row_keys import ALL, AS_STORED
from moegeom.core.text import half_width
from moegeom.document.chart import Chart, Numbers
from moegeom.document.place import place
from moegeom.results.reader import Results

#: Layers that get a picture of their own, where a figure has one for each layer: the worst of them.
MOST_LAYERS = 8


@dataclass(frozen=True, eq=False)
class FigureResults:
    """Results as figures see them: columns by table, routers by their names on the screen."""

    results: Results

    @cached_property
    def routers(self) -> list[str]:
        """Names of the routers, in the order of the layers."""
        return [router["name"] for router in self.results.run["routers"]]

    @cached_property
    def names(self) -> dict[str, str]:
        """What a screen calls each router: ``3``, or the whole name where that is ambiguous."""
        return {router: place(router, self.routers) for router in self.routers}

    @cached_property
    def links(self) -> dict[str, str]:
        """Where the page has the row of each router."""
        return {router: f"#layer-{number}" for number, router in enumerate(self.routers)}

    def has(self, table: str, *columns: str) -> bool:
        """Whether a table is there and holds these columns."""
        if table not in self.results.tables():
            return False
        rows = self.results.table(table)
        return all(c in rows.column_names and rows[c].null_count < len(rows) for c in columns)

    def columns(
        self, table: str, names: Sequence[str], **equal: str | Sequence[str]
    ) -> dict[str, list[Any]]:
        """Columns of all tokens of the routers as stored, unless ``equal`` says more."""
        where = {"variant": AS_STORED, "population": ALL} | equal
        return self.results.columns(table, names, **where)

    def by_router(
        self, table: str, names: Sequence[str], **equal: str | Sequence[str]
    ) -> dict[str, dict[str, list[Any]]]:
        """The same for each router that has rows, in the order of the layers."""
        columns = self.columns(table, ["router", *names], **equal)
        rows: dict[str, list[int]] = {}
        for number, router in enumerate(columns["router"]):
            rows.setdefault(router, []).append(number)
        return {
            router: {name: [columns[name][row] for row in rows[router]] for name in names}
            for router in self.routers
            if router in rows
        }

    def layers(self, column: str, **equal: str | Sequence[str]) -> dict[str, float]:
        """A figure of each router that has it."""
        if not self.has("layers", column):
            return {}
        columns = self.columns("layers", ["router", column], **equal)
        pairs = zip(columns["router"], columns[column], strict=True)
        figures = {router: float(value) for router, value in pairs if value is not None}
        return {router: figures[router] for router in self.routers if router in figures}

    def blocks(self, router: str) -> int | None:
        """Blocks of documents behind the standard errors of a router."""
        number = self.layers("num_blocks").get(router)
        return None if number is None else int(number)

    def worst(self, column: str, most: int = MOST_LAYERS) -> list[str]:
        """Routers with the largest figures, in the order of the layers."""
        figures = self.layers(column)
        largest = sorted(figures, key=lambda router: -figures[router])[:most]
        return [router for router in self.routers if router in largest]


@dataclass(frozen=True)
class Drawing:
    """A figure of results: ``draw`` gives none where its tables hold nothing for it.

    ``place`` orders figures on a page. ``text`` says in a line what is to be seen.
    """

    name: str
    place: int
    text: str
    draw: Callable[[FigureResults], Iterator[Chart]]


#: Figures of results by name.
DRAWINGS = Rooms("figure", "moegeom.document.figures", Drawing)


def figures_of(results: Results, names: Sequence[str] = ()) -> list[Chart]:
    """Every figure, or those of these names, that the results have the numbers for.

    In the order of a page.
    """
    source = FigureResults(results.in_memory())
    drawings = [DRAWINGS[name] for name in names] or DRAWINGS.all()
    ordered = sorted(drawings, key=lambda drawing: (drawing.place, drawing.name))
    return [figure for drawing in ordered for figure in drawing.draw(source)]


def figure_named(figures: Sequence[Chart], name: str | None) -> Chart:
    """The figure ``name``, or the first.

    Raises
    ------
    UsageError
        When there is none, or none of that name.
    """
    names = [figure.name for figure in figures]
    if not names:
        raise UsageError("There is no figure of it: it holds no numbers to draw.")
    if name is None:
        return figures[0]
    if name not in names:
        raise UsageError(f"There is no figure {name!r} of it.", f"Known: {', '.join(names)}.")
    return figures[names.index(name)]


# ------------------------------------------------------------------------------------------ helpers
def interval(value: Numbers, error: Numbers, num_blocks: int | None) -> tuple[Numbers, Numbers]:
    """Ends of the 95 % intervals over so many blocks of documents; None where a value or an error
    is not known.
    """
    ends = [
        (None, None) if v is None or e is None else (max(v - w, 0.0), v + w)
        for v, e in zip(value, error, strict=True)
        for w in [half_width(e or 0.0, num_blocks)]
    ]
    return [low for low, _ in ends], [high for _, high in ends]


def middle(values: Mapping[str, float]) -> float | None:
    """The median over the routers, None without any."""
    return median(values.values()) if values else None
