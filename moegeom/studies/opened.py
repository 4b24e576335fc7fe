"""Checkpoints and tokens that are opened once and handed to any study."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import UsageError
from moegeom.core.router import Router, RouterSet
from moegeom.document.model import Document, Table, Title
from moegeom.document.render import render
from moegeom.document.report import Report, ScanReport
from moegeom.document.rule_brief import rule_brief
from moegeom.document.rule_trust import assumed
from moegeom.engine.parameters import request_of, speaking_python
from moegeom.engine.request import ScanRequest, Terms
from moegeom.router.describe import describe_router, rule_origin
from moegeom.tokens.held import HeldArrays, hold

if TYPE_CHECKING:
    from moegeom.checkpoint.store import TensorStore
    from moegeom.core.tokens import TokenSource

R = TypeVar("R")


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint:
    """A checkpoint whose routers are read when they are first asked for, and nothing else is.

    ``path`` is a path or URL, ``terms`` say which routers and how they are read.
    """

    path: str
    terms: Terms = field(default_factory=Terms)

    @cached_property
    def store(self) -> TensorStore:
        """All tensors by name, none of them read."""
        return open_checkpoint(self.path, self.terms.remote)

    @cached_property
    def found(self) -> RouterSet:
        """The routers with their family, fingerprint, notes, and what was skipped and why."""
        from moegeom.studies.routers.study import routers

        with speaking_python():
            return routers(self.store, self.terms)

    @property
    def routers(self) -> tuple[Router, ...]:
        """The routers in the order of the layers."""
        return self.found.routers

    @property
    def rule(self) -> str:
        """How they choose, in words."""
        from moegeom.engine.run_facts import router_facts

        return rule_brief(self.found.family_text, [router_facts(r) for r in self.routers])

    @property
    def evidence(self) -> str:
        """What the rule was taken from; only recorded choices of a run verify it."""
        return assumed(rule_origin(self.found.family))

    def report(self) -> Report[RouterSet]:
        """What ``moegeom routers`` says."""
        from moegeom.studies.routers.document import document

        return Report(self.found, document)

    def __repr__(self) -> str:
        rows = [describe_router(router) for router in self.routers]
        table = Table([_COLUMNS], [[str(row[name]) for name in _COLUMNS] for row in rows])
        said = f"{self.found.family}: {self.rule}; rule {self.evidence}."
        page = Document("routers", self.path, [[Title(self.path, said), table]], dict)
        return render(page, "table").rstrip("\n")

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


#: What a line of a checkpoint says of a router.
_COLUMNS = ("router", "experts", "top_k", "hidden", "stored", "selection")


@dataclass(frozen=True, eq=False, repr=False)
class Recording:
    """Tokens to route: a file at ``path``, or a ``source`` in memory, and what is known of it.

    A file that does not name its routers is opened with those of the checkpoint it goes with.
    """

    path: str | None = None
    source: TokenSource | HeldArrays | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @speaking_python()
    def open(self, checkpoint: str | Path | Checkpoint | None = None) -> TokenSource:
        """The source, readable in any ranges of tokens.

        Raises
        ------
        MoeGeomError
            When it cannot be read, or does not fit the checkpoint.
        """
        from moegeom.engine.sources import open_source
        from moegeom.tokens.open import open_tokens

        if checkpoint is not None:
            whole = _opened(checkpoint).routers
            source = open_source(
                request_of(ScanRequest, checkpoint="", **_of_tokens(self)), whole, whole
            )
        elif self.path is not None:
            known = ("stage", "router_map", "dialect")
            source = open_tokens(self.path, **{n: v for n, v in self.options.items() if n in known})
        else:
            source = self.source
        if source is None or isinstance(source, HeldArrays):
            raise UsageError(
                "arrays in memory do not say which routers they are of.",
                "Name the checkpoint: open(checkpoint).",
            )
        return source

    def __repr__(self) -> str:
        what = self.path if self.path is not None else "in memory"
        said = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"Recording({', '.join([repr(what), *said])})"


def asked_request(
    record: type[R], sides: Mapping[str, Any], tokens: Any, options: Mapping[str, Any], **own: Any
) -> R:
    """The request of a function; an option goes before what an opened object says."""
    said = merged(sides, _of_tokens(tokens))
    for name, value in options.items():
        if isinstance(value, Checkpoint):
            said[name] = value.path
        elif isinstance(value, Recording):  # of run B, with options of its own
            said |= {f"{key}_b": option for key, option in value.options.items()}
            said[name] = _path_of(value)
        else:
            said[name] = value
    return request_of(record, **said, **own)


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """All of them; UsageError where two of them differ."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name in found and found[name] != value:
                raise UsageError(
                    f"{name} is {found[name]!r} of one and {value!r} of another of the objects "
                    "that are given.",
                    f"Name it once: {name}=...",
                )
            found[name] = value
    return found


def side(name: str, given: str | Path | Checkpoint | ScanReport) -> dict[str, Any]:
    """A checkpoint, or results where the request takes them, as parameters of a request."""
    if isinstance(given, Checkpoint):
        default = Terms()
        kept = ("layers", "remote", "asked")
        said = {n: getattr(given.terms, n) for n in kept}
        return {name: given.path} | {n: v for n, v in said.items() if v != getattr(default, n)}
    if isinstance(given, ScanReport):
        if given.value.path is None:
            raise UsageError(
                f"{name} holds results in memory; expected a checkpoint or a folder.",
                "scan(..., out=FOLDER) keeps results.",
            )
        return {name: str(given.value.path)}
    if isinstance(given, str | os.PathLike):
        return {name: os.fspath(given)}
    raise UsageError(
        f"{name} is a {type(given).__name__}; expected a path, a URL, or what open() returned."
    )


def _opened(given: str | Path | Checkpoint) -> Checkpoint:
    return given if isinstance(given, Checkpoint) else Checkpoint(os.fspath(given))


def is_source(given: Any) -> bool:
    """Whether it is a token source as it stands."""
    return hasattr(given, "facts") and hasattr(given, "read_values")


def _of_tokens(given: Any) -> dict[str, Any]:
    """Tokens as parameters of a request."""
    if given is None:
        return {}
    if isinstance(given, str | os.PathLike):
        return {"tokens": os.fspath(given)}
    if isinstance(given, Recording):
        found = {"tokens": given.path} if given.source is None else {"source": given.source}
        return {**found, **given.options}
    return {"source": given if is_source(given) else hold(given)}


def recordings(given: Any) -> dict[str, Any]:
    """One recording or several, each a file, as parameters of a request."""
    if given is None:
        return {}
    if isinstance(given, str | os.PathLike | Recording):
        given = (given,)
    said = merged(*(one.options for one in given if isinstance(one, Recording)))
    return said | {"tokens": tuple(_path_of(one) for one in given)}


def _path_of(given: Any) -> str:
    path = given.path if isinstance(given, Recording) else given
    if isinstance(path, str | os.PathLike):
        return os.fspath(path)
    raise UsageError(
        "tokens in memory go with one checkpoint; expected the path of a recording.",
        "moegeom.tokens.recording.writer.RecordingWriter writes one.",
    )
