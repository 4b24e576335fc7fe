"""Text of others in the font of the page: what it can draw, and how wide that is."""

from __future__ import annotations

from typing import Any

from moegeom.document.untrusted import printable


def _font() -> Any:
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont("DejaVu Sans"))


def drawable(text: str) -> str:
    r"""The same text; characters that the font lacks or that no line can hold as ``\u4e2d``."""
    font = _font()
    return "".join(c if font.get_char_index(ord(c)) else _escaped(c) for c in printable(text))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def text_width(text: str, size: float) -> float:
    """Points of a drawable text."""
    font = _font()
    font.set_size(size, 72)
    font.set_text(text, 0.0)
    return font.get_width_height()[0] / 64


def shortened(text: str, width: float, size: float) -> str:
    """The text, or its beginning and end with an ellipsis between, in at most ``width`` points."""
    if text_width(text, size) <= width:
        return text
    fits, too_long = 1, len(text)
    while too_long - fits > 1:
        kept = (fits + too_long) // 2
        if text_width(cut(text, kept), size) <= width:
            fits = kept
        else:
            too_long = kept
    return cut(text, fits)


def cut(text: str, kept: int) -> str:
    """The text, or so many of its characters, two thirds from its beginning, and an ellipsis."""
    if len(text) <= kept:
        return text
    tail = kept // 3
    return text[: kept - tail].rstrip() + "\u2026" + text[len(text) - tail :].lstrip()
