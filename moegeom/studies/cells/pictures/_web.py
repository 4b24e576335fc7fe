"""A page for a browser, one file that reads nothing from elsewhere, and what it draws of planes."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float64

from moegeom.studies.cells.pictures._caption import caption_text, count_text, title_text
from moegeom.studies.cells.pictures._legend import (
    DOMAIN_INKS,
    INK,
)
from moegeom.studies.cells.pictures._picture import (
    ExpertSet,
    PictureOptions,
    PlaneCells,
    RasterCells,
    SlicePicture,
    TokenMarks,
    expert_set_text,
)
from moegeom.studies.cells.pictures._polygons import centre

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


#: A browser that obeys it loads nothing, whatever the script would like.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval' blob:; worker-src blob:; "
    "style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
html, body {{ height: 100%; margin: 0; background: #fff; color: {ink}; }}
body {{ display: flex; flex-direction: column; font: 14px/1.45 system-ui, sans-serif; }}
h1 {{ font-size: 16px; font-weight: 600; margin: 12px 16px 0; overflow-wrap: anywhere; }}
h1 span {{ font-weight: 400; }}
p {{ margin: 4px 16px 14px; max-width: 75em; overflow-wrap: anywhere; }}
main {{ flex: 1; min-height: 420px; position: relative; }}
main > div {{ position: absolute; inset: 0; }}
</style>
</head>
<body>
<h1>{title}<span>{subtitle}</span></h1>
<main>{drawing}</main>
{caption}</body>
</html>
"""

_FONT = {"family": "system-ui, sans-serif", "size": 12, "color": INK}


def web_page(
    picture: SlicePicture, options: PictureOptions, figure: Figure, subtitle: str = ""
) -> bytes:
    """The figure with the script that draws it; the same bytes for the same figure."""
    figure.update_layout(
        template="none",
        font=_FONT,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        hovermode="closest",
        legend={"itemsizing": "constant"},
        showlegend=True,
        autosize=True,
    )
    drawing = figure.to_html(
        full_html=False,
        include_plotlyjs=True,
        include_mathjax=False,
        div_id="slice",
        default_height="100%",
        config={
            "responsive": True,
            "displaylogo": False,
            "scrollZoom": True,
            "modeBarButtonsToRemove": ["sendDataToCloud", "select2d", "lasso2d"],
        },
    )
    caption = f"<p>{html.escape(caption_text(picture))}</p>\n" if options.with_caption else ""
    page = _PAGE.format(
        policy=html.escape(_POLICY),
        title=html.escape(title_text(picture)),
        subtitle=html.escape(f": {subtitle}") if subtitle else "",
        ink=INK,
        drawing=drawing,
        caption=caption,
    )
    return page.encode("utf-8", "xmlcharrefreplace")


def broken_lines(parts: Sequence[Float64[np.ndarray, "_ dims"]]) -> Float64[np.ndarray, "all dims"]:
    """Corners of all parts with a gap between any two, as plotly wants several lines in one."""
    dims = parts[0].shape[1] if parts else 2
    gap = np.full((1, dims), math.nan)
    pieces = [piece for part in parts for piece in (part, gap)]
    return np.concatenate(pieces[:-1]) if pieces else np.zeros((0, dims))


def hover_text(expert_sets: Sequence[ExpertSet], per_line: int = 12) -> list[str]:
    """Experts of each cell, on several lines where there are many."""
    return [
        "experts "
        + "<br>".join(
            expert_set_text(expert_set[i : i + per_line])
            for i in range(0, max(len(expert_set), 1), per_line)
        )
        for expert_set in expert_sets
    ]


def plane_axes(figure: Figure, frame: Sequence[float]) -> None:
    """Both axes alike, within the frame; dragging moves it."""
    figure.update_layout(dragmode="pan")
    plain: dict[str, Any] = {"zeroline": False, "showgrid": False, "ticks": "outside"}
    figure.update_xaxes(
        range=list(frame[:2]), title_text="first coordinate", constrain="domain", **plain
    )
    figure.update_yaxes(
        range=list(frame[2:]),
        title_text="second coordinate",
        scaleanchor="x",
        constrain="domain",
        **plain,
    )


def space_axes(figure: Figure, names: Sequence[str], aspect: Sequence[float]) -> None:
    """Plain axes in space."""
    plain = {"showbackground": False, "zeroline": False, "showspikes": False}
    keys = ("xaxis", "yaxis", "zaxis")
    axes = {key: {"title": {"text": n}, **plain} for key, n in zip(keys, names, strict=True)}
    ratio = dict(zip("xyz", aspect, strict=True))
    camera = {"eye": {"x": 1.0, "y": -1.65, "z": 0.85}, "center": {"x": 0, "y": 0, "z": -0.16}}
    figure.update_layout(
        scene={**axes, "aspectmode": "manual", "aspectratio": ratio, "camera": camera}
    )


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


def add_facets(
    figure: Figure,
    picture: PlaneCells,
    is_kept: Bool[np.ndarray, "facets"],
    colour: str,
    wide: float,
) -> None:
    if not is_kept.any():
        return
    lines = broken_lines(list(picture.facet_ends[is_kept]))
    figure.add_scatter(
        x=lines[:, 0],
        y=lines[:, 1],
        mode="lines",
        line={"color": colour, "width": wide},
        hoverinfo="skip",
        showlegend=False,
    )
    middle = picture.facet_ends[is_kept].mean(1)
    pairs = zip(
        picture.facet_out[is_kept].tolist(), picture.facet_into[is_kept].tolist(), strict=True
    )
    figure.add_scatter(
        x=middle[:, 0],
        y=middle[:, 1],
        mode="markers",
        marker={"size": 8, "opacity": 0.0},
        text=[f"facet {out}|{into}" for out, into in pairs],
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
        text=hover_text([picture.expert_sets[cell] for cell in shown]),
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
    told = "token %{x:.4g}, %{y:.4g}<br>%{customdata:.4g} from its facet<extra></extra>"
    return {"customdata": tokens.distance[kept], "hovertemplate": told}
