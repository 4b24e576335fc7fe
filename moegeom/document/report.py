"""The report of a command, ready to be shown in any format."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from moegeom.core.finding import Finding
from moegeom.document.drawing import figure_named
from moegeom.document.model import Document, Fact, View
from moegeom.document.paper import refuse_undrawable, write_figure
from moegeom.document.render import render
from moegeom.document.summary import summarise
from moegeom.results.reader import Results

if TYPE_CHECKING:
    import pyarrow as pa


T = TypeVar("T")

#: Characters of a verdict that a console shows.
_MOST_SHOWN = 120


@dataclass(frozen=True, eq=False, repr=False)
class Report(Generic[T]):
    """``value`` is the record that a command found; ``tell`` says it in blocks of a document.

    A report prints what the command prints; a notebook shows its page.
    """

    value: T
    tell: Callable[[T, View], Document]

    @property
    def document(self) -> Document:
        """Title, facts, verdict, findings, tables and notes; ``record()`` is the same as data."""
        return self.tell(self.value, View())

    def render(self, name: str, view: View | None = None) -> str:
        """The report in the format ``name``, a file of moegeom/document/renderers.

        Raises
        ------
        UsageError
            For a format that there is not.
        """
        view = view or View()
        return render(self.tell(self.value, view), name, view)

    def text(self, width: int = 100, detail: bool = False, colours: bool = False) -> str:
        """As a terminal of ``width`` columns shows it; with ``detail`` all of it."""
        return self.render("table", View(width, colours, detail))

    def markdown(self) -> str:
        """As Markdown."""
        return self.render("md")

    def html(self) -> str:
        """As one page of HTML: complete, with its figures, without requests."""
        return self.render("html")

    def figures(self) -> list[str]:
        """Names of the figures that its page shows."""
        return [figure.name for figure in self.document.figures()]

    def plot(self, path: str | Path, figure: str | None = None) -> Path:
        """The figure of that name, or the first, as a file: .svg, .pdf or .png.

        Raises
        ------
        UsageError
            For another ending, a figure that there is not, and without matplotlib.
        """
        refuse_undrawable(Path(path))
        write_figure(figure_named(self.document.figures(), figure), Path(path))
        return Path(path)

    def json(self) -> str:
        """The record as one line of JSON: infinities are "inf" and "-inf", what is unknown null."""
        return self.render("json")

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        document = self.document
        facts = (b for blocks in document.sections for b in blocks if isinstance(b, Fact))
        verdicts = [fact.text for fact in facts if fact.label in ("VERDICT", "RESULT")]
        verdict = f": {textwrap.shorten(verdicts[0], _MOST_SHOWN)}" if verdicts else ""
        return f"{type(self).__name__}({document.kind}: {document.name}{verdict})"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its style does not touch the notebook."""
        style = "width:100%;height:40em;border:0"
        rights, page = "allow-downloads allow-scripts", escape(self.html())
        return f'<iframe sandbox="{rights}" style="{style}" srcdoc="{page}"></iframe>'


class HasExitCode(Protocol):
    """The record of a command that passes or fails."""

    @property
    def exit_code(self) -> int: ...


G = TypeVar("G", bound=HasExitCode)


class GateReport(Report[G]):
    """The report of ``check`` and ``signoff``: true when the gate is passed, as exit code 0 says.

    ``exit_code`` is 0 passed, 1 failed, 4 inconclusive.
    """

    @property
    def exit_code(self) -> int:
        return self.value.exit_code

    def __bool__(self) -> bool:
        return self.exit_code == 0


class ScanReport(Report[Results]):
    """The report of ``scan`` and ``report``: results, as tables and as a screen."""

    @property
    def run(self) -> dict[str, Any]:
        """Facts of the run: checkpoint, routers, tokens, versions, seconds."""
        return self.value.run

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the checks found, worst first."""
        summary = summarise(self.value)
        return (*summary.findings, *summary.notes)

    def layers(self, variant: str = "as_stored", population: str = "all") -> pa.Table:
        """One row for each router; ``population`` such as ``domain=code`` counts some tokens."""
        return self.value.layers(variant, population)

    def tables(self) -> list[str]:
        """Names of the tables."""
        return self.value.tables()

    def table(self, name: str) -> pa.Table:
        """A table, such as ``experts``, as Arrow; ``.to_pandas()`` makes a frame of it."""
        return self.value.table(name)
