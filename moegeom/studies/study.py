"""A study as one object: its command, its Python function and its page are made of it."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from moegeom.core.errors import RecordingError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from moegeom.core.tokens import TokenSource
    from moegeom.engine.session import Session
    from moegeom.pipeline import Watch


class _Named(Protocol):
    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=_Named)


@dataclass(frozen=True, kw_only=True)
class Study:
    """What tokens of a recording say of the routers of a checkpoint, under the name of a command.

    ``question`` is what it answers, in a sentence, and ``example`` a line to type; ``place`` orders
    it in the help. ``request`` is the record of its options, those fields that ``option`` made;
    ``run`` takes a request and a listener and returns a record, ``document`` makes a page of that.
    Each of the three is ``MODULE:NAME`` in ``package``, that of the study: a list of studies loads
    none.
    ``has_figures`` where the page has charts.

    ``without_tokens`` is what is said where there are none, ``without_inputs`` of a recording that
    does not hold router inputs, empty where it need not; ``endings`` are those of a file that
    ``out`` names, empty where that is no file.
    """

    name: str
    package: str
    place: int
    question: str
    example: str
    request: str
    run: str
    document: str
    without_tokens: str
    without_inputs: str = ""
    endings: tuple[str, ...] = (".parquet",)
    has_figures: bool = False

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
        module, _, name = getattr(self, part).partition(":")
        return getattr(importlib.import_module(f"{self.package}.{module}"), name)

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """What Python calls: checkpoint and tokens, then the options by name; a ``Report``."""
        from moegeom.document.report import Report
        from moegeom.engine.parameters import asks
        from moegeom.studies.opened import Checkpoint, asked_request, side

        record, run = self.load("request"), self.load("run")

        def function(
            checkpoint: str | Path | Checkpoint,
            tokens: Any = None,
            *,
            watch: Watch | None = None,
            **options: Any,
        ) -> Report[Any]:
            request = asked_request(record, side("checkpoint", checkpoint), tokens, options)
            return Report(run(request, watch), self.load("document"))

        sections = (inspect.getdoc(run) or "").partition("\nRaises\n")
        function.__name__ = function.__qualname__ = self.name
        function.__doc__ = f"{self.question}\n{''.join(sections[1:])}"
        return asks(record)(function)


def each(routers: Sequence[R], watch: Watch | None, work: int = 1) -> Iterator[R]:
    """The routers in turn, while a listener is told of each, and of ``work`` where it is done."""
    if watch:
        watch.start(len(routers) * work)
    for router in routers:
        if watch:
            watch.begin(router.name)
        yield router
        if watch:
            watch.advance(work)


#: Where studies are: those that most people use, and those of the papers.
_FOLDERS = ("moegeom.studies", "moegeom.research")


@functools.cache
def studies() -> Mapping[str, Study]:
    """Every study by name: each package of their folders that defines ``STUDY``."""
    packages = (
        importlib.import_module(f"{folder}.{module.name}")
        for folder in _FOLDERS
        for module in pkgutil.iter_modules(importlib.import_module(folder).__path__)
        if module.ispkg
    )
    return {of.STUDY.name: of.STUDY for of in packages if hasattr(of, "STUDY")}
