"""Options that several commands share, declared once: a command names a group and gets them all.

A group is a dataclass whose fields are options. ``with_groups`` shows Typer the fields of every
group among the parameters of a command and hands the command the group again, filled in.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_type_hints

import typer

from moegeom_cli.options import FamilyFile, Overwrite, PrintFormat, Quiet, Restart, Seed
from moegeom_cli.streams import Format, Watching, has_colours, parse_map, put_out, watching, width

if TYPE_CHECKING:
    from moegeom.document.model import Document, View

_UNKNOWN = "Unknown architectures"

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
    # what only this command has is listed first
    own = [one for one in inspect.signature(run).parameters.values() if one.name not in groups]
    parameters = [_plain(parameter, hints) for parameter in own]
    parameters += [option for kind in groups.values() for option in _options(kind)]
    names = [parameter.name for parameter in parameters]
    if len(set(names)) < len(names):
        raise TypeError(f"{run.__module__}: an option is declared twice.")

    @functools.wraps(run)
    def spread(**given: Any) -> R:
        filled = {
            name: kind(**{option.name: given.pop(option.name) for option in _options(kind)})
            for name, kind in groups.items()
        }
        return run(**given, **filled)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {one.name: one.annotation for one in parameters}
    del spread.__wrapped__  # or its signature would be taken instead
    return spread


def _plain(parameter: inspect.Parameter, hints: dict[str, Any]) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return parameter.replace(annotation=hints[parameter.name], kind=keyword)


def _options(kind: type) -> list[inspect.Parameter]:
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


@dataclasses.dataclass(frozen=True)
class Options:
    """A group whose options have the names of the parameters that they are."""

    @property
    def terms(self) -> dict[str, Any]:
        """Parameters of a request."""
        return dict(vars(self))


@dataclasses.dataclass(frozen=True)
class ModelOptions(Options):
    """Which routers of a checkpoint, how to read them where its family is not known, and how to
    fetch it.
    """

    layers: Annotated[
        str | None, typer.Option("--layers", "--layer", help="Layers, such as 0,3-7.")
    ] = None
    family: FamilyFile = None
    router_pattern: Annotated[
        str | None,
        typer.Option(
            "--router-pattern",
            metavar="REGEX",
            help="Names of router weights; a group is the layer.",
            rich_help_panel=_UNKNOWN,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=1, help="Experts chosen per token.", rich_help_panel=_UNKNOWN),
    ] = None
    score: Annotated[
        str | None,
        typer.Option(
            "--score", help="identity, softmax, sigmoid or sqrt_softplus.", rich_help_panel=_UNKNOWN
        ),
    ] = None
    renormalise: Annotated[
        bool,
        typer.Option(
            "--renormalise", help="Weights are divided by their sum.", rich_help_panel=_UNKNOWN
        ),
    ] = False
    selection_bias: Annotated[
        str | None,
        typer.Option(
            "--selection-bias",
            metavar="REGEX",
            help="Names of biases that only select.",
            rich_help_panel=_UNKNOWN,
        ),
    ] = None
    logit_bias: Annotated[
        str | None,
        typer.Option(
            "--logit-bias",
            metavar="REGEX",
            help="Names of biases of logits.",
            rich_help_panel=_UNKNOWN,
        ),
    ] = None
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Ask the server of a URL for everything; keep nothing."),
    ] = False

    @property
    def terms(self) -> dict[str, Any]:
        """Parameters of a request."""
        from moegeom.checkpoint.remote.options import RemoteOptions

        found = super().terms
        remote = RemoteOptions(cache_folder=None) if found.pop("no_cache") else None
        return found | {"remote": remote}


@dataclasses.dataclass(frozen=True)
class TokenOptions(Options):
    """Which tokens count, what their files are, and which of their tests are waived."""

    exclude_first: Annotated[
        int,
        typer.Option(
            "--exclude-first", min=0, help="Leave out the first N tokens of each document (sinks)."
        ),
    ] = 0
    non_finite: Annotated[
        str, typer.Option("--non-finite", help="Tokens that are not finite: fail or skip.")
    ] = "fail"
    seed: Seed = 0
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            help="What the numbers of a foreign file are: router_input, pre_norm, logits, "
            "top_logits or ids.",
        ),
    ] = None
    dialect: Annotated[
        str | None,
        typer.Option("--dialect", help="Whose trace it is, where the file does not show it."),
    ] = None
    expert_map: Annotated[
        str | None,
        typer.Option(
            "--expert-map",
            help="Which expert lies at which place, for a trace that names places: FILE.json.",
        ),
    ] = None
    router_map: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="KEY=ROUTER for a foreign array, or 'layer{i}=text/{i}' for all."
        ),
    ] = None
    stale_inputs: Annotated[
        bool, typer.Option("--stale-inputs", help="Accept a recording of another checkpoint.")
    ] = False
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Accept a recording that fails its tests.")
    ] = False

    @property
    def terms(self) -> dict[str, Any]:
        """Parameters of a request."""
        return super().terms | {"router_map": parse_map(self.router_map or ())}


@dataclasses.dataclass(frozen=True)
class RunBOptions(Options):
    """B, another run, and what its file is where it cannot say it itself."""

    run_b: Annotated[
        str | None,
        typer.Option("--run-b", help="B, another run of the same text: recording, or trace."),
    ] = None
    stage_b: Annotated[
        str | None,
        typer.Option("--stage-b", help="What the numbers of B are, where B is a foreign file."),
    ] = None
    dialect_b: Annotated[
        str | None,
        typer.Option("--dialect-b", help="Whose trace B is, where the file does not show it."),
    ] = None
    expert_map_b: Annotated[
        str | None,
        typer.Option("--expert-map-b", help="The same as --expert-map, for a trace B."),
    ] = None
    map_b: Annotated[
        list[str] | None, typer.Option("--map-b", help="The same as --map, for the arrays of B.")
    ] = None

    @property
    def terms(self) -> dict[str, Any]:
        """Parameters of a request."""
        return super().terms | {"map_b": parse_map(self.map_b or ())}


def _known_device(text: str | None) -> str | None:
    if text is not None:
        from moegeom.engine.devices.choice import refuse_unknown_device

        refuse_unknown_device(text)
    return text


@dataclasses.dataclass(frozen=True)
class RunOptions(Options):
    """How a scan is run."""

    num_workers: Annotated[
        int | None, typer.Option("--threads", min=1, help="Worker threads [default: all].")
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="auto, cpu, cuda, cuda:1 or cuda:0,1 [default: auto].",
            callback=_known_device,
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class ShareOptions(Options):
    """How a scan is shared out between machines."""

    part: Annotated[
        str | None,
        typer.Option("--part", metavar="I/N", help="One of n parts, for moegeom merge."),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="ray, or ray:ADDRESS: workers of a cluster fold parts."),
    ] = None


@dataclasses.dataclass(frozen=True)
class OutOptions(Options):
    """What becomes of results that are there already."""

    restart: Restart = False
    overwrite: Overwrite = False


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
        bool,
        typer.Option("--detail", help="All of it, however long: every layer, every finding."),
    ] = False
    format: PrintFormat = Format.table
    quiet: Quiet = False
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
        found: T,
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
        report = Report(found, document)
        put_out(report.render(self.format.value, view))
        if self.html is not None:
            write_whole(self.html, report.html())
            self.note(f"page: {self.html}")
        if plots is not None and plots.plot is not None:
            try:
                self.note(f"figure: {report.plot(plots.plot, plots.figure)}")
            except UsageError as error:  # what a gate found outweighs a figure that there is not
                if not getattr(found, "exit_code", 0):
                    raise
                self.note(str(error))
