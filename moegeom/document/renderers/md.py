"""A document as Markdown of GitHub, for a job summary or an issue; complete."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from moegeom.document.model import (
    Block,
    Command,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Headline,
    Note,
    Problem,
    Table,
    Title,
    View,
)
from moegeom.document.render import Renderer, heads_of

#: What HTML and tables begin with becomes an entity; what Markdown and formulas do is escaped.
_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}
    | {character: f"\\{character}" for character in "\\`*_[]~$#!"}
)


def render(document: Document, view: View) -> str:
    """A heading, then block after block; nothing in it is taken for Markdown or HTML."""
    del view
    lines = [f"## moegeom {document.kind}: {_escaped(document.name)}", ""]
    for section in document.sections:
        lines += [*(line for block in section for line in _block(block)), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def _block(block: Block) -> Iterator[str]:
    match block:
        case Title(name, text):
            yield from ("", f"**{_escaped(name)}** {_escaped(text)}".rstrip(), "")
        case Fact(label, text, _, right):
            line = f"{_escaped(text)}{f' ({_escaped(right)})' if right else ''}"
            yield f"- **{_escaped(label)}** {line}" if label else f"- {line}"
        case Problem(finding, places):
            head = f"**{finding.severity.upper()} {_escaped(finding.code)}**"
            line = f"{places}: {finding.title} {finding.detail}".rstrip()
            yield f"- {head} {_escaped(line)}"
            if finding.fix:
                yield f"  - fix: {_escaped(finding.fix)}"
            if finding.next_command:
                yield f"  - next: {_code(finding.next_command)}"
        case Table():
            yield from _table(block)
        case Note(text):
            yield from ("", _escaped(text), "")
        case Command(label, text):
            yield f"- {_escaped(label.strip().rstrip(':'))}: {_code(text)}"
        case Excerpt(page=page, summary=summary):
            folded = ("", "<details>", f"<summary>{_escaped(summary)}</summary>", "")
            yield from folded if summary else ()
            for part in page:
                yield from _block(part)
            yield from ("", "</details>", "") if summary else ()
        case Gallery() | Headline():
            return


def _table(table: Table) -> Iterator[str]:
    yield ""
    heads = heads_of(table)
    yield _row([_escaped(head) for head in heads])
    yield _row(["---"] * len(heads))
    for row in table.rows:
        yield _row([_escaped(cell.strip()) for cell in row])
    yield ""
    if table.rest:
        yield from (_escaped(table.rest), "")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """The text with nothing in it that Markdown, HTML or a table would take for its own."""
    return text.translate(_ESCAPES)


def _code(text: str) -> str:
    """A code span that no backtick in the text can end."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


RENDERER = Renderer("md", render)
