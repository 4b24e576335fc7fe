"""A page for a browser: one file that reads nothing from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from moegeom.cells.pictures._caption import caption_text, title_text
from moegeom.cells.pictures._colours import INK
from moegeom.cells.pictures._options import PictureOptions
from moegeom.cells.pictures._picture import Coalition, SlicePicture, coalition_text

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


def hover_text(coalitions: Sequence[Coalition], per_line: int = 12) -> list[str]:
    """Experts of each cell, on several lines where there are many."""
    return [
        "experts "
        + "<br>".join(
            coalition_text(coalition[i : i + per_line])
            for i in range(0, max(len(coalition), 1), per_line)
        )
        for coalition in coalitions
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
