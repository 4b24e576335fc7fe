"""A study as one object: its command, its Python function and its page are made of it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from moegeom.core.errors import RecordingError, UsageError

if TYPE_CHECKING:
    from moegeom.core.tokens import TokenSource
    from moegeom.document.report import Report, ScanReport
    from moegeom.engine.session import Session
    from moegeom.pipeline import Watch
    from moegeom.studies.opened import Checkpoint


class _Named(Protocol):
    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=_Named)
T = TypeVar("T")

#: What a study looks at: a checkpoint and its tokens, two of them, or what its options say.
Subject = Literal["checkpoint", "pair", "options"]


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is asked of checkpoints and tokens under the name of a command.

    ``question`` is what it answers, in a sentence, and ``example`` a line to type; ``group`` and
    ``place`` order it in the help. ``request`` is the record of its options, those fields that
    ``option`` made; ``run`` takes a request and a listener and returns a record, ``document`` makes
    a page of that. Each of the three is ``MODULE:NAME`` in ``package``, that of the study, so that
    a list of studies loads none, or ``:NAME`` where the package is one file.

    ``has_figures`` where the page has charts, ``is_gate`` where the record passes or fails,
    ``takes_held`` where results in memory may stand for a checkpoint; ``unit`` is what the work is
    counted in.

    ``without_tokens`` is what is said where there are none, ``without_inputs`` of a recording that
    does not hold router inputs, empty where it need not; ``endings`` are those of a file that
    ``out`` names, empty where that is no file.
    """

    name: str
    package: str
    group: str = "research"
    place: int
    question: str
    example: str
    subject: Subject = "checkpoint"
    request: str
    run: str
    document: str = "document:document"
    without_tokens: str = ""
    without_inputs: str = ""
    endings: tuple[str, ...] = (".parquet",)
    has_figures: bool = False
    is_gate: bool = False
    takes_held: bool = False
    unit: str = "tokens"

    def open(self, request: Any) -> tuple[Session, TokenSource]:
        """Checkpoint and tokens of a request, after all that can be refused before the work.

        Raises
        ------
        MoeGeomError
            UsageError for ``out`` and without tokens, RecordingError without router inputs, and
            whatever cannot be read.
        """
        from moegeom.engine.session import Session
        from moegeom.studies.written import refuse_out
        from moegeom.tokens.stages import INPUT_STAGES

        if self.endings and request.out is not None:
            refuse_out(request.out, request.overwrite, self.endings)
        opened = Session.open(request)
        source = opened.source
        if source is None:
            raise UsageError(f"{self.without_tokens}.", "Add --tokens REC.")
        stage = source.facts.stage
        if self.without_inputs and stage not in INPUT_STAGES:
            raise RecordingError(
                f"{source.facts.name}: holds {stage.replace('_', ' ')}; {self.without_inputs}.",
                "moegeom capture --keep hidden records them.",
            )
        return opened, source

    def load(self, part: Literal["request", "run", "document"]) -> Any:
        """The record, or one of the two functions."""
        return self.named(getattr(self, part))

    def named(self, place: str) -> Any:
        """What ``MODULE:NAME`` is in the package of the study."""
        module, _, name = place.partition(":")
        path = f"{self.package}.{module}" if module else self.package
        return getattr(importlib.import_module(path), name)

    def answer(self, request: Any, watch: Watch | None) -> Any:
        """The record of a request of a program; nothing is left in the working directory."""
        return self.load("run")(request, watch)

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """What Python calls: the subject, then the options by name; a ``Report``."""
        from moegeom.engine.parameters import asks

        record, run = self.load("request"), self.load("run")
        function = _FUNCTIONS[self.subject](self)
        default = record.__dataclass_fields__.get("checkpoint", dataclasses.field()).default
        if default is not dataclasses.MISSING:  # options may say what a checkpoint would
            inspect.unwrap(function).__defaults__ = (default, None)
        about = (inspect.getdoc(run) or "").partition("\n\n")
        function.__name__ = function.__qualname__ = self.name
        function.__doc__ = f"{self.question}{''.join(about[1:])}"
        return asks(record)(function)

    def report(self, request: Any, watch: Watch | None) -> Report[Any]:
        """What the function returns."""
        from moegeom.document.report import GateReport, Report

        kind = GateReport if self.is_gate else Report
        return kind(self.answer(request, watch), self.load("document"))


@dataclass(frozen=True, kw_only=True)
class ResultsStudy(Study):
    """A study whose ``run`` writes results, of which ``record`` is made; also of earlier ones."""

    record: str

    def written(self, request: Any, watch: Watch | None) -> Path:
        """The directory of the results: those that the request names, or what it measures."""
        from moegeom.engine.request import refuse_late
        from moegeom.results.reader import is_results

        if is_results(Path(request.checkpoint)):
            refuse_late(request, request.checkpoint, "checkpoint")
            return Path(request.checkpoint)
        return self.load("run")(request, watch)

    def record_at(self, written: Path) -> Any:
        """What results say."""
        from moegeom.results.reader import open_results

        return self.named(self.record)(open_results(written))

    def answer(self, request: Any, watch: Watch | None) -> Any:
        """As of a study; results stay in memory, unless ``out`` names a folder."""
        from moegeom.pipeline import results_of
        from moegeom.results.reader import is_results

        if is_results(Path(request.checkpoint)):
            return self.record_at(self.written(request, watch))
        return self.named(self.record)(results_of(request, watch, self.load("run")))


def _of_checkpoint(study: Study) -> Callable[..., Report[Any]]:
    def function(
        checkpoint: str | Path | Checkpoint,
        tokens: Any = None,
        *,
        watch: Watch | None = None,
        **options: Any,
    ) -> Report[Any]:
        from moegeom.studies.opened import asked_request, side

        named = side("checkpoint", checkpoint)
        return study.report(asked_request(study.load("request"), named, tokens, options), watch)

    return function


def _of_pair(study: Study) -> Callable[..., Report[Any]]:
    def function(
        a: str | Path | Checkpoint | ScanReport,
        b: str | Path | Checkpoint | ScanReport,
        tokens: Any = (),
        *,
        watch: Watch | None = None,
        **options: Any,
    ) -> Report[Any]:
        from moegeom.studies.opened import asked_request, merged, of_sides, side

        sides = merged(
            side("a", a, study.takes_held), side("b", b, study.takes_held), of_sides(tokens)
        )
        return study.report(asked_request(study.load("request"), sides, None, options), watch)

    return function


def _of_options(study: Study) -> Callable[..., Report[Any]]:
    def function(*, watch: Watch | None = None, **options: Any) -> Report[Any]:
        from moegeom.engine.parameters import request_of

        return study.report(request_of(study.load("request"), **options), watch)

    return function


#: The function of each kind of study.
_FUNCTIONS: Mapping[Subject, Callable[[Study], Callable[..., Report[Any]]]] = {
    "checkpoint": _of_checkpoint,
    "pair": _of_pair,
    "options": _of_options,
}


def each(
    routers: Sequence[R], watch: Watch | None, work: int = 1, is_paced: bool = False
) -> Iterator[R]:
    """The routers in turn, while a listener is told of each, and of ``work`` where it is done:
    here, or part by part by the pace of the study.
    """
    if watch:
        watch.start(len(routers) * work)
    for router in routers:
        if watch:
            watch.begin(router.name)
        yield router
        if watch and not is_paced:
            watch.advance(work)


def watched(results: Iterator[T], names: Sequence[str], watch: Watch | None) -> Iterator[T]:
    """Results of routers, computed side by side, while a listener is told of each."""
    if watch:
        watch.start(len(names), "routers")
    for name in names:
        if watch:
            watch.begin(name)
        yield next(results)
        if watch:
            watch.advance(1)


#: Folders of studies, those that most people use and those of the papers, and one that is a study.
_FOLDERS = ("moegeom.studies", "moegeom.research")
_PACKAGES = ("moegeom.routing_cells",)


@functools.cache
def studies() -> Mapping[str, Study]:
    """Every study by name: each package that defines ``STUDY``."""
    names = (
        f"{folder}.{module.name}"
        for folder in _FOLDERS
        for module in pkgutil.iter_modules(importlib.import_module(folder).__path__)
        if module.ispkg
    )
    packages = map(importlib.import_module, (*names, *_PACKAGES))
    return {of.STUDY.name: of.STUDY for of in packages if hasattr(of, "STUDY")}
