"""Options that several commands share, declared once: a command names a group and gets them all.

A group is a dataclass whose fields are options. ``with_groups`` shows Typer the fields of every
group among the parameters of a command and hands the command the group again, filled in.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_type_hints

import typer

from moegeom.engine.parameters import own_parameters
from moegeom_cli.options import PrintFormat, Quiet, Verbose
from moegeom_cli.request_options import options_of, request_typed
from moegeom_cli.streams import Format, Watching, has_colours, put_out, watching, width

if TYPE_CHECKING:
    from moegeom.document.model import Document, View

R = TypeVar("R")
T = TypeVar("T")


def with_groups(run: Callable[..., R]) -> Callable[..., R]:
    """The same command with each group spread out into its options.

    Raises
    ------
    TypeError
        When two of its parameters have one name.
    """
    hints = get_type_hints(run, include_extras=True)
    groups: dict[str, type] = {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }
    signature = inspect.signature(run).parameters.values()
    parameters = [_plain(one, hints) for one in signature if one.name not in groups]
    options = {name: _options(kind) for name, kind in groups.items()}
    parameters += itertools.chain.from_iterable(options.values())
    # what only this command has is listed first, and of that what it is about
    requests = [kind for kind in groups.values() if not _is_of_screen(kind)]
    about = [name for kind in requests for name in own_parameters(kind)]
    order = [*about, *(one.name for one in signature)]
    parameters.sort(key=lambda one: order.index(one.name) if one.name in order else len(order))
    names = [parameter.name for parameter in parameters]
    if len(set(names)) < len(names):
        raise TypeError(f"{run.__module__}: an option is declared twice.")

    @functools.wraps(run)
    def spread(**flags: Any) -> R:
        filled = {
            name: _filled(kind, {option.name: flags.pop(option.name) for option in options[name]})
            for name, kind in groups.items()
        }
        return run(**flags, **filled)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {one.name: one.annotation for one in parameters}
    del spread.__wrapped__  # or its signature would be taken instead
    return spread


def _plain(parameter: inspect.Parameter, hints: dict[str, Any]) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return parameter.replace(annotation=hints[parameter.name], kind=keyword)


def _filled(kind: type, typed: dict[str, Any]) -> Any:
    return kind(**typed) if _is_of_screen(kind) else request_typed(kind, typed)


def _is_of_screen(kind: type) -> bool:
    """Whether it is a group of this module; else it is a request."""
    return kind.__module__ == __name__


def _options(kind: type) -> list[inspect.Parameter]:
    if not _is_of_screen(kind):
        return options_of(kind)
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(cast("Any", kind))
    ]


def _writable(path: Path | None) -> Path | None:
    """The path, when it can be written to: better said before the work than after it."""
    if path is not None:
        from moegeom.core.files import refuse_unwritable

        refuse_unwritable(path)
    return path


def _drawable(path: Path | None) -> Path | None:
    if path is not None:
        from moegeom.document.paper import refuse_undrawable

        refuse_undrawable(path)
    return _writable(path)


@dataclasses.dataclass(frozen=True)
class PlotOptions:
    """One figure of the page, as a file for a paper."""

    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="A figure: FILE.svg, .pdf or .png.", callback=_drawable),
    ] = None
    figure: Annotated[
        str | None,
        typer.Option("--figure", metavar="NAME", help="Which figure [default: the first]."),
    ] = None


@dataclasses.dataclass(frozen=True)
class ScreenOptions:
    """How what was found is printed."""

    detail: Annotated[
        bool, typer.Option("--detail", help="All of it, however long: every layer, every finding.")
    ] = False
    format: PrintFormat = Format.table
    quiet: Quiet = False
    verbose: Verbose = False
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Also write a page with every figure: FILE.html.", callback=_writable
        ),
    ] = None

    def watching(self, unit: str = "tokens") -> closing[Watching]:
        """What listens to the work: a progress bar where somebody can see it."""
        return closing(watching(self.quiet, unit))

    def note(self, text: str) -> None:
        """Says something about the work on stderr."""
        if not self.quiet:
            typer.echo(text, err=True)

    def show(
        self,
        document: Callable[[T, View], Document],
        record: T,
        is_ascii: bool = False,
        plots: PlotOptions | None = None,
    ) -> None:
        """Prints what was found, in the format asked for; bars of blocks only where they show.

        Then writes its page, and the figure that ``plots`` ask for.
        """
        from moegeom.core.errors import UsageError
        from moegeom.core.files import write_whole
        from moegeom.document.model import View
        from moegeom.document.report import Report

        is_plain = is_ascii or not (sys.stdout.encoding or "").lower().startswith("utf")
        view = View(width(), has_colours(), self.detail, is_plain)
        report = Report(record, document)
        put_out(report.render(self.format.value, view))
        if self.html is not None:
            write_whole(self.html, report.html())
            self.note(f"page: {self.html}")
        if plots is not None and plots.plot is not None:
            try:
                self.note(f"figure: {report.plot(plots.plot, plots.figure)}")
            except UsageError as error:  # what a gate found outweighs a figure that there is not
                if not getattr(record, "exit_code", 0):
                    raise
                self.note(str(error))
