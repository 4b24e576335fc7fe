"""What a command is made of: its own options, and groups of them that several commands share.

A group is a request, or a dataclass of this module, whose fields are options. Typer is shown the
fields of every group among the parameters of a command, which gets the group again, filled in.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

from moegeom.checkpoint.remote.url import RemoteOptions
from moegeom.core.errors import UsageError
from moegeom.engine.parameters import (
    hints_of,
    kinds_of,
    option_of,
    own_parameters,
    request_of,
    typed_parameters,
)
from moegeom.studies.study import ResultsStudy, Study
from moegeom.tokens.files import TokenFiles
from moegeom_cli.command import Command, Group
from moegeom_cli.streams import (
    Format,
    Silence,
    has_colours,
    log_to_stderr,
    put_out,
    watching,
    width,
)

if TYPE_CHECKING:
    from moegeom.document.model import Document, View

R = TypeVar("R")
T = TypeVar("T")

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", callback=log_to_stderr, help="Say what is read and measured, on stderr."
    ),
]
PrintFormat = Annotated[Format, typer.Option("--format", help="How to print.")]

#: What a value is typed as, by what its field may hold: the first of these.
_TYPED = (bool, int, float, Path, str)

#: Numbers that one range may stand for.
_MOST_NUMBERS = 100_000


def _options(group: type) -> list[inspect.Parameter]:
    """What the parser is given for a group, its arguments among them."""
    if _is_of_screen(group):
        hints = get_type_hints(group, include_extras=True)
        options = [
            (f.name, f.default, hints[f.name]) for f in dataclasses.fields(cast("Any", group))
        ]
    else:
        hints = hints_of(group)
        options = [
            (name, _default(field, hints[name]), _annotation(name, field.metadata, hints[name]))
            for name, field in typed_parameters(group).items()
        ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, keyword, default=default, annotation=hint)
        for name, default, hint in options
    ]


def _items(hint: Any) -> Any:
    """Of what a field holds several; None of one."""
    several = [
        get_args(kind)[0] for kind in kinds_of(hint) if get_origin(kind) in (tuple, Sequence)
    ]
    return several[0] if several else None


def _has(hint: Any, *kinds: Any) -> bool:
    return any((get_origin(kind) or kind) in kinds for kind in kinds_of(hint))


def _annotation(name: str, facts: Mapping[str, Any], hint: Any) -> Any:
    kind: Any = next((one for one in _TYPED if one in kinds_of(_items(hint) or hint)), str)
    if _has(hint, RemoteOptions):
        kind = bool
    elif _is_listed(facts, hint):
        kind = list[str]
    elif _items(hint) is int:
        kind = str
    if facts.get("is_argument"):
        return Annotated[kind, typer.Argument(help=facts["help"], metavar=facts.get("metavar"))]
    also = [f"--{facts['also']}"] if "also" in facts else ["-o"] * (name == "out")
    option = typer.Option(
        option_of(name),
        *also,
        help=facts["help"],
        min=facts.get("min"),
        metavar=facts.get("metavar"),
        rich_help_panel=facts.get("panel"),
    )
    return Annotated[kind if kind is bool else kind | None, option]


def _is_listed(facts: Mapping[str, Any], hint: Any) -> bool:
    """Whether an option may be given several times; numbers and lists in one text may not."""
    if not facts.get("is_list", True):
        return False
    is_map = _has(hint, Mapping) and not _has(hint, str)
    is_several = _items(hint) is not None and _items(hint) is not int
    return is_several or is_map or _has(hint, TokenFiles)


def _default(field: dataclasses.Field[Any], hint: Any) -> Any:
    if _has(hint, RemoteOptions):
        return False
    if field.default_factory is not dataclasses.MISSING:
        return None
    if field.default is dataclasses.MISSING:
        return inspect.Parameter.empty
    if isinstance(field.default, tuple):
        return ",".join(map(str, field.default)) or None
    return field.default


def _value(name: str, typed: Any, hint: Any) -> Any:
    """What was typed, as its field may hold it."""
    if typed is None:
        return None
    if _has(hint, RemoteOptions):
        return RemoteOptions(cache_folder=None) if typed else None
    if _has(hint, Mapping) and not _has(hint, str):
        return _parse_map(typed)
    return _parse_numbers(option_of(name), typed) if _items(hint) is int else typed


def _parse_map(entries: Sequence[str]) -> dict[str, str]:
    """``KEY=ROUTER`` entries as a mapping; UsageError for anything else."""
    pairs = [entry.partition("=") for entry in entries]
    if any(not sign or not key or not router for key, sign, router in pairs):
        raise UsageError("--map expects KEY=ROUTER.", "For example --map layer3=text/3.")
    return {key: router for key, _, router in pairs}


def _parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Numbers such as ``3,17,40-42`` in their order; UsageError for anything else."""
    indices: list[int] = []
    for part in text.split(",") if text else ():
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        is_range = all(end.isdecimal() and len(end) < 10 for end in ends)
        if not is_range or int(ends[1]) - int(ends[0]) > _MOST_NUMBERS:
            raise UsageError(
                f"{option} {text}: expected numbers.", f"For example {option} 3,17,40."
            )
        indices += range(int(ends[0]), int(ends[1]) + 1)
    return tuple(indices)


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
    parameters = [
        one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for one in signature
        if one.name not in groups
    ]
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


def command(group: Group, place: int, example: str) -> Callable[[Callable[..., Any]], Command]:
    """The decorator that makes a command of a Typer function, its groups spread out."""
    return lambda run: Command(group, place, example, with_groups(run))


def _filled(kind: type, typed: dict[str, Any]) -> Any:
    """The group of what was typed; UsageError for what a field of a request cannot hold."""
    if _is_of_screen(kind):
        return kind(**typed)
    hints = hints_of(kind)
    return request_of(kind, **{name: _value(name, typed[name], hints[name]) for name in typed})


def _is_of_screen(kind: type) -> bool:
    """Whether it is a group of this module; else it is a request."""
    return kind.__module__ == __name__


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

    def watching(self, unit: str = "tokens") -> closing[Silence]:
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

    def show_part(self, written: Path) -> int:
        """Prints a folded part of a scan, and how parts become results; the exit code."""
        from moegeom.engine.parts import read_part
        from moegeom.studies.parts import part_document

        self.show(part_document, read_part(written))
        return 0


def command_of(study: Study, **flags: Any) -> Callable[..., int]:
    """What the parser is given for a study; the exit code is that of the record, or 0.

    ``flags`` are options that are answered before there is a request, by their callbacks.
    """

    def run(
        request: Any, screen: ScreenOptions, plots: PlotOptions | None = None, **_: bool
    ) -> int:
        with screen.watching(study.unit) as watch:
            if isinstance(study, ResultsStudy):
                answer = study.written(request, watch)
            else:
                answer = study.load("run")(request, watch)
        if isinstance(study, ResultsStudy):
            if request.part is not None:
                return screen.show_part(answer)
            answer = study.record_at(answer)
        screen.show(study.load("document"), answer, plots=plots)
        return getattr(answer, "exit_code", 0)

    kinds: dict[str, type] = {"request": study.load("request"), "screen": ScreenOptions}
    if study.has_figures:
        kinds["plots"] = PlotOptions
    run.__doc__ = study.question + (
        "\n\nExit code 0 passed, 1 failed, 4 inconclusive." * study.is_gate
    )
    run.__annotations__ = kinds | flags
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword) for name in kinds]
    parameters += [inspect.Parameter(name, keyword, default=False) for name in flags]
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return with_groups(run)
