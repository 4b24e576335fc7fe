"""Checkpoints and tokens that are opened once and passed to any study."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import UsageError
from moegeom.core.router import Router, RouterSet, format_layers
from moegeom.core.row_keys import layer_of
from moegeom.core.text import number_of
from moegeom.core.tokens import StoredValues
from moegeom.document.model import Document, Table, Title
from moegeom.document.render import render
from moegeom.document.report import Report, ScanReport
from moegeom.document.rule_words import assumed, rule_brief
from moegeom.engine.parameters import request_of, speaking_python
from moegeom.engine.request import Terms, Tokens, tokens_path
from moegeom.router.rule import describe_router, rule_origin
from moegeom.tokens.files import TokenFiles, are_paths
from moegeom.tokens.memory import HeldArrays, hold
from moegeom.tokens.stages import VALUE_STAGES

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
        from moegeom.studies.routers import routers

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
        """Where the selection rule comes from; only recorded choices of a run verify it."""
        return assumed(rule_origin(self.found.family))

    def report(self) -> Report[RouterSet]:
        """What ``moegeom list routers`` says."""
        from moegeom.studies.routers import document

        return Report(self.found, document)

    def __repr__(self) -> str:
        rows = [describe_router(router) for router in self.routers]
        table = Table([_COLUMNS], [[str(row[name]) for name in _COLUMNS] for row in rows])
        subtitle = f"{self.found.family}: {self.rule}; rule {self.evidence}."
        page = Document("routers", self.path, [[Title(self.path, subtitle), table]], dict)
        return render(page, "table").rstrip("\n")


#: What a line of a checkpoint says of a router.
_COLUMNS = ("router", "experts", "top_k", "hidden", "stored", "selection")


@dataclass(frozen=True, eq=False, repr=False)
class Recording:
    """Tokens to route, the path of a file or what is in memory, and what is known of them.

    A file that does not name its routers is opened with those of the checkpoint it goes with.
    """

    tokens: Tokens
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

        if checkpoint is None and isinstance(self.tokens, HeldArrays):
            raise UsageError(
                "arrays in memory do not say which routers they are of.",
                "Name the checkpoint: open(checkpoint).",
            )
        if isinstance(checkpoint, str | os.PathLike):
            checkpoint = Checkpoint(os.fspath(checkpoint))
        whole = () if checkpoint is None else checkpoint.routers
        source = open_source(request_of(Terms, **self.options), self.tokens, whole, whole)
        assert source is not None
        return source

    def __repr__(self) -> str:
        path, several = tokens_path(self.tokens), getattr(self.tokens, "paths", ())
        parts = [repr([*several] or path or "in memory")]
        parts += [f"{name}={value!r}" for name, value in self.options.items()]
        if isinstance(self.tokens, HeldArrays):
            parts += [f"{key} {a.shape} {a.dtype}" for key, a in self.tokens.arrays.items()][:4]
        elif path and (Path(path) / "recording.json").is_file():
            source = self.open()
            facts, dtype = source.facts, ""
            if isinstance(source, StoredValues) and facts.stage in VALUE_STAGES:
                dtype = f" in {source.stored_dtype(facts.routers[0])}"
            numbers = {n for name in facts.routers if (n := layer_of(name)) is not None}
            num_documents = facts.num_documents
            documents = f" in {number_of(num_documents, 'document')}" if num_documents else ""
            parts += [
                f"{number_of(facts.num_tokens, 'token')}{documents}",
                f"{facts.stage} of {number_of(len(facts.routers), 'router')}{dtype}",
                f"layers {format_layers(numbers)}",
                f"{'with' if facts.has_chosen else 'without'} the model's choices",
            ]
        return f"Recording({', '.join(parts)})"


def asked_request(
    record: type[R], sides: Mapping[str, Any], tokens: Any, options: Mapping[str, Any]
) -> R:
    """The request of a Python call; explicit options override those of opened objects."""
    fields = merged(sides, {} if tokens is None else of_tokens(tokens))
    for name, value in options.items():
        if isinstance(value, Checkpoint):
            fields[name] = value.path
        elif isinstance(value, Recording) and name == "run_b":
            if (path := tokens_path(value.tokens)) is None:
                raise UsageError(
                    "run_b holds tokens in memory; expected the path of a recording.",
                    "moegeom.tokens.recording.writer.RecordingWriter writes one.",
                )
            # a recording with options of its own
            fields |= {name: path} | {f"{key}_b": of for key, of in value.options.items()}
        elif name == "rerun" and value is not None:
            rerun = of_tokens(value)
            fields = merged(fields, {key: of for key, of in rerun.items() if key != "tokens"})
            fields[name] = rerun["tokens"]
        else:
            fields[name] = value
    return request_of(record, **fields)


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """The union of the mappings; UsageError where two of them differ."""
    fields: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name in fields and fields[name] != value:
                raise UsageError(
                    f"{name} is {fields[name]!r} of one and {value!r} of another of the objects "
                    "that are given.",
                    f"Name it once: {name}=...",
                )
            fields[name] = value
    return fields


def side(
    name: str, target: str | Path | Checkpoint | ScanReport, takes_held: bool = False
) -> dict[str, Any]:
    """A checkpoint, or results, as parameters of a request; ``takes_held``: in memory too."""
    if isinstance(target, Checkpoint):
        default = Terms()
        fields = ("layers", "remote", "requested_family")
        terms = {n: getattr(target.terms, n) for n in fields}
        return {name: target.path} | {n: v for n, v in terms.items() if v != getattr(default, n)}
    if isinstance(target, ScanReport):
        if target.value.path is not None:
            return {name: str(target.value.path)}
        if takes_held:
            return {name: target.value}
        raise UsageError(
            f"{name} holds results in memory; expected a checkpoint or a folder.",
            "scan(..., out=FOLDER) keeps results.",
        )
    if isinstance(target, str | os.PathLike):
        return {name: os.fspath(target)}
    raise UsageError(
        f"{name} is a {type(target).__name__}; expected a path, a URL, or what open() returned."
    )


def of_tokens(tokens: Any) -> dict[str, Any]:
    """Tokens as parameters of a request: ``tokens``, and what is known of them."""
    if isinstance(tokens, Recording):
        return {"tokens": tokens.tokens, **tokens.options}
    if isinstance(tokens, str | os.PathLike):
        return {"tokens": os.fspath(tokens)}
    if are_paths(tokens):
        return {"tokens": TokenFiles.of(tokens)}
    is_source = hasattr(tokens, "facts") and hasattr(tokens, "read_values")
    return {"tokens": tokens if is_source else hold(tokens)}


def of_sides(sides: Any) -> dict[str, Any]:
    """One recording, or a list or tuple with one for each side, as parameters of a request."""
    several = sides if isinstance(sides, list | tuple) else () if sides is None else (sides,)
    options = [of_tokens(one) for one in several]
    tokens = tuple(one.pop("tokens") for one in options)
    return merged(*options) | {"tokens": tokens}


def of_steps(steps: Any) -> dict[str, Any]:
    """A path with {step} or {name}, or a mapping from the name of a checkpoint to its tokens."""
    if not isinstance(steps, Mapping):
        return {} if steps is None else {"tokens": os.fspath(steps)}
    options = {str(name): of_tokens(one) for name, one in steps.items()}
    tokens = {name: one.pop("tokens") for name, one in options.items()}
    return merged(*options.values()) | {"tokens": tokens}
