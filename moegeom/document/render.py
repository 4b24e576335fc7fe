"""Documents as text, in any of the formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from moegeom.core.errors import InternalError
from moegeom.core.registry import Rooms
from moegeom.document.model import Document, Table, View
from moegeom.document.sparkline import ASCII
from moegeom.document.untrusted import printable


@dataclass(frozen=True)
class Renderer:
    """``render`` turns a document, made fit to print, into the text that goes to stdout.

    ``of_verdicts`` is set where it passes on the verdict of a gate, and nothing else.
    """

    name: str
    render: Callable[[Document, View], str]
    of_verdicts: bool = False


#: Renderers by name.
RENDERERS = Rooms("format", "moegeom.document.renderers", Renderer)


def render(document: Document, name: str, view: View | None = None) -> str:
    """The document in the format ``name``; what others named in it is made fit to print here.

    Raises
    ------
    UsageError
        For a format that there is not.
    """
    renderer = RENDERERS[name]
    if renderer.of_verdicts and document.judged is None:
        raise InternalError(f"{name} passes on verdicts; {document.kind} has none")
    safe = dataclasses.replace(
        document,
        kind=printable(document.kind),
        name=printable(document.name),
        sections=printable(document.sections),
        judged=printable(document.judged),
    )
    view = view or View()
    text = renderer.render(safe, view)
    return text.translate(ASCII) if view.is_ascii else text


# -------------------------------------------------------------------------------------------- pages
def heads_of(table: Table) -> list[str]:
    """One heading for each column; what runs on over several stands in front of each of theirs."""
    lines: list[list[str]] = []
    for number, line in enumerate(table.heads):
        full = list(line)
        if number < len(table.heads) - 1:
            for place in range(1, len(full)):
                full[place] = full[place] or full[place - 1]
        lines.append(full)
    return [" ".join(part for part in column if part) for column in zip(*lines, strict=True)]
