"""What pictures of a plane are made of, for a browser: cells, walls, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float64

from moegeom.cells.pictures._caption import count_text
from moegeom.cells.pictures._colours import (
    DOMAIN_INKS,
    INK,
)
from moegeom.cells.pictures._picture import PlaneCells, RasterCells, TokenMarks
from moegeom.cells.pictures._polygons import centre
from moegeom.cells.pictures._web import (
    broken_lines,
    hover_text,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

#: Tokens beyond this are drawn by the graphics card.
_MOST_MARKS = 2000


def add_fill(
    figure: Figure,
    polygons: Sequence[Float64[np.ndarray, "_ 2"]],
    is_kept: Bool[np.ndarray, "cells"],
    colour: str,
) -> None:
    """Polygons of one colour as one trace: thousands of traces would make a browser slow."""
    kept = [p for p, own in zip(polygons, is_kept, strict=True) if own and len(p) > 2]
    if not kept:
        return
    lines = broken_lines([np.concatenate([polygon, polygon[:1]]) for polygon in kept])
    figure.add_scatter(
        x=lines[:, 0],
        y=lines[:, 1],
        mode="lines",
        fill="toself",
        fillcolor=colour,
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
    )


def add_walls(
    figure: Figure,
    picture: PlaneCells,
    is_kept: Bool[np.ndarray, "walls"],
    colour: str,
    wide: float,
) -> None:
    if not is_kept.any():
        return
    lines = broken_lines(list(picture.wall_ends[is_kept]))
    figure.add_scatter(
        x=lines[:, 0],
        y=lines[:, 1],
        mode="lines",
        line={"color": colour, "width": wide},
        hoverinfo="skip",
        showlegend=False,
    )
    middle = picture.wall_ends[is_kept].mean(1)
    pairs = zip(
        picture.wall_out[is_kept].tolist(), picture.wall_into[is_kept].tolist(), strict=True
    )
    figure.add_scatter(
        x=middle[:, 0],
        y=middle[:, 1],
        mode="markers",
        marker={"size": 8, "opacity": 0.0},
        text=[f"wall {out}|{into}" for out, into in pairs],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )


def add_middles(figure: Figure, picture: PlaneCells) -> None:
    """An invisible mark in each cell that tells its experts."""
    shown = [cell for cell, polygon in enumerate(picture.polygons) if len(polygon) > 2]
    middles = np.array([centre(picture.polygons[cell]) for cell in shown]).reshape(-1, 2)
    figure.add_scatter(
        x=middles[:, 0],
        y=middles[:, 1],
        mode="markers",
        marker={"size": 12, "opacity": 0.0},
        text=hover_text([picture.coalitions[cell] for cell in shown]),
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )


def add_tokens(figure: Figure, picture: PlaneCells | RasterCells) -> None:
    """Filled marks for tokens in their own cell, hollow ones for others; by domain."""
    tokens = picture.tokens
    if tokens is None:
        return
    number = len(tokens.place)
    add = figure.add_scattergl if number > _MOST_MARKS else figure.add_scatter
    names = ("token of another cell", "token in its own cell")
    for name, is_own, of_cell in zip(
        names, (False, True), (~tokens.is_own, tokens.is_own), strict=True
    ):
        for domain, ink, of_domain in _domains(tokens):
            kept = of_cell & of_domain
            if not kept.any():
                continue
            add(
                x=tokens.place[kept, 0],
                y=tokens.place[kept, 1],
                mode="markers",
                marker={**_mark(is_own, number), "color": ink},
                opacity=1.0 if is_own or number < 500 else 0.6,
                name=f"{name}{domain} ({count_text(int(kept.sum()))})",
                **_token_text(tokens, kept),
            )


def _mark(is_own: bool, number: int) -> dict[str, Any]:
    """Filled or hollow, smaller where there are many."""
    size = 3 if number > 2 * _MOST_MARKS else 5
    if is_own:
        return {"size": size + 2, "symbol": "circle"}
    return {"size": size, "symbol": "circle-open", "line": {"width": 1}}


def _domains(tokens: TokenMarks) -> list[tuple[str, str, Bool[np.ndarray, "tokens"]]]:
    """Name, colour and tokens of each domain; one without a name where they are not told apart."""
    numbers = [] if tokens.label is None else np.unique(tokens.label).tolist()
    if not 1 < len(numbers) <= len(DOMAIN_INKS):
        return [("", INK, np.ones(len(tokens.place), bool))]
    inks = (DOMAIN_INKS[number % len(DOMAIN_INKS)] for number in numbers)
    return [
        (f", domain {number}", ink, tokens.label == number)
        for number, ink in zip(numbers, inks, strict=True)
    ]


def _token_text(tokens: TokenMarks, kept: Bool[np.ndarray, "tokens"]) -> dict[str, Any]:
    if tokens.distance is None:
        return {"hoverinfo": "skip"}
    told = "token %{x:.4g}, %{y:.4g}<br>%{customdata:.4g} from its wall<extra></extra>"
    return {"customdata": tokens.distance[kept], "hovertemplate": told}
