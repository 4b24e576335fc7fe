"""Tables and plain text in Markdown of GitHub."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: What HTML and tables begin with becomes an entity; what Markdown and formulas do is escaped.
_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}
    | {character: f"\\{character}" for character in "\\`*_[]~$#!"}
)


def escaped(text: str) -> str:
    """The text with nothing in it that Markdown, HTML or a table would take for its own."""
    return text.translate(_ESCAPES)


def table_row(cells: Sequence[str]) -> str:
    """One line of a table; a bar in a cell does not end it."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def code_span(text: str) -> str:
    """A code span that no backtick in the text can end."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"
