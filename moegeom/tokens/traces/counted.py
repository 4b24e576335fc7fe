"""Counts of chosen slots as a token source: no token of it can be read, only its counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from jaxtyping import Int64

from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.text import number_of
from moegeom.core.tokens import SourceFacts, TokenColumns
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.axes import main_stack, named_layers
from moegeom.tokens.traces.trace import Trace

_EXPERTS_HINT = "Is the log of another model, or of one rank of expert parallelism?"


class CountedSource:
    """Slots by step and expert of each router; everything else is refused."""

    def __init__(
        self, facts: SourceFacts, counts: Mapping[str, Int64[np.ndarray, "steps experts"]]
    ) -> None:
        self._facts = facts
        self._counts = counts

    @property
    def facts(self) -> SourceFacts:
        return self._facts

    def counts(self, router: str) -> Int64[np.ndarray, "steps experts"]:
        """How often each expert of ``router`` was chosen in each step."""
        if router not in self._counts:
            raise InternalError(f"{self._facts.name} does not count router {router}.")
        return self._counts[router]

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        self._refuse()

    def read_values(self, router: str, start: int, stop: int) -> NoReturn:
        self._refuse()

    def read_top_logits(self, router: str, start: int, stop: int) -> NoReturn:
        self._refuse()

    def read_chosen(self, router: str, start: int, stop: int) -> NoReturn:
        self._refuse()

    def read_output(self, router: str, kind: str, start: int, stop: int) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RecordingError(
            f"{self._facts.name}: counts only, of {self._facts.num_tokens:,} tokens; it holds "
            "nothing of any token.",
            "Use moegeom scan, which makes load figures of counts.",
        )


def counted_source(
    path: Path, trace: Trace, known: Sequence[KnownRouter], wanted: Sequence[str]
) -> CountedSource:
    """A log of counts, held against all routers of the checkpoint.

    Raises
    ------
    RecordingError
        When layers or experts do not fit, or layers did not see the same tokens.
    """
    assert trace.counts is not None, "a log of counts"
    routers = main_stack(known, trace.where)
    columns, notes = _columns(trace, routers)
    counts = trace.counts
    widest = max(router.num_experts for router in routers)
    if not trace.counts_zeros and counts.shape[2] < widest:
        counts = np.pad(counts, ((0, 0), (0, 0), (0, widest - counts.shape[2])))
    by_router = {r.name: counts[:, c] for r, c in zip(routers, columns, strict=True)}
    for router in routers:
        if by_router[router.name].shape[1] != router.num_experts:
            raise RecordingError(
                f"{trace.where}: counts {by_router[router.name].shape[1]} experts; router "
                f"{router.name} has {router.num_experts}.",
                _EXPERTS_HINT,
            )
    totals = {router.name: int(by_router[router.name].sum()) for router in routers}
    empty = [name for name, total in totals.items() if not total]
    if empty:
        raise RecordingError(
            f"{trace.where}: no choices are counted at {', '.join(empty[:6])}.",
            "A pipeline stage whose layers were not gathered leaves them empty.",
        )
    top_k, low, high = routers[0].top_k, min(totals.values()), max(totals.values())
    said = [f"Counts of {trace.dialect}, of no token by itself; steps: {len(trace.counts):,}"]
    if any(total % top_k for total in totals.values()):
        said.append(f"totals are no multiples of k = {top_k}: slots were dropped, or k was another")
    if low < high:
        said.append(
            f"layers count {low:,} to {number_of(high, 'slot')}: some saw or kept fewer tokens"
        )
    facts = SourceFacts(
        name=path.resolve().name,
        stage="counts",
        num_tokens=high // top_k,
        routers=tuple(router.name for router in routers if router.name in wanted),
        domains=(),
        has_documents=False,
        has_chosen=False,
        engine=trace.dialect,
        size_bytes=path.stat().st_size,
        notes=(*said, *trace.notes, *notes),
    )
    return CountedSource(facts, by_router)


def _columns(
    trace: Trace, routers: Sequence[KnownRouter]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The index of each router's layer; layers without a router must count nothing."""
    assert trace.counts is not None, "a log of counts"
    length = trace.counts.shape[1]
    if trace.layers is not None:
        return named_layers(trace.where, trace.layers, routers)
    if length == len(routers):
        return tuple(range(length)), ()
    columns = tuple(router.layer for router in routers)
    filled = np.flatnonzero(trace.counts.any(axis=(0, 2))).tolist()
    if columns[-1] >= length or not set(filled) <= set(columns):
        raise RecordingError(
            f"{trace.where}: {number_of(length, 'layer')}, of which {len(filled)} have counts; "
            "the checkpoint "
            f"has {number_of(len(routers), 'router')} in layers {columns[0]} to {columns[-1]}.",
            "Is the log of another model?",
        )
    return columns, (f"layers without router, which count nothing: {length - len(routers)}",)
