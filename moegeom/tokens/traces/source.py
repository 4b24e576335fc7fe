"""A trace of choices as a token source: cleaned by one set of rules, whoever wrote it.

What is cut is counted and said in the notes of the source; what does not fit is refused.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64, Integer

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import SourceFacts
from moegeom.tokens.foreign.arrays import RowColumns
from moegeom.tokens.rows import ArrayRows
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.stages import CHOSEN
from moegeom.tokens.stored import StoredSource
from moegeom.tokens.traces.axes import main_stack, shaped_requests, stacked
from moegeom.tokens.traces.rows import PlacedRows, placed_rows
from moegeom.tokens.traces.trace import TRACE_BYTES, Trace

#: What is said about each kind of decision, with its count.
_SENTENCES: dict[str, str] = {
    "last": "requests whose last token was never routed: {n:,}",
    "masked": "rows cut by the file's own mask: {n:,}",
    "surplus": "padding rows cut behind the last routed token: {n:,}",
    "leading": "rows without choices cut at the beginning (prefix not captured): {n:,}",
    "trailing": "rows without choices cut at the end (padding): {n:,}",
    "inside": "rows without choices left out between others: {n:,}",
    "unrecorded": "rows left out with requests that hold no choice: {n:,}",
    "unrecorded requests": "requests that hold no choice: {n:,}",
    "told start": "leading positions omitted, as the file says: {n:,}",
    "cached": "leading positions omitted, as many as the engine had cached: {n:,}",
    "generation": "positions of prompts omitted, only generated tokens were recorded: {n:,}",
    "generation, and the last token of the prompt": (
        "positions of prompts omitted, recorded are the rows that generated a token: {n:,}"
    ),
    "stale": "rows equal to the row before them in every layer, in runs of 10 (stale?): {n:,}",
    "repeated": "requests left out because they stand in the file twice: {n:,}",
    "equal": "requests equal to another in every token and choice, kept: {n:,}",
}


@dataclass(frozen=True, eq=False)
class CleanTrace:
    """The tokens of a trace: ``ids`` is (tokens, routers, slots), columns are -1 where not known.

    ``row`` is the row in the request, which is what is left of the position where the file does
    not say it.
    """

    routers: tuple[KnownRouter, ...]
    ids: Integer[np.ndarray, "tokens routers slots"]
    request: Int64[np.ndarray, "tokens"]
    row: Int32[np.ndarray, "tokens"]
    position: Int32[np.ndarray, "tokens"]
    token_id: Int32[np.ndarray, "tokens"]
    names: tuple[str, ...]
    notes: tuple[str, ...]


def clean(trace: Trace, known: Sequence[KnownRouter]) -> CleanTrace:
    """The tokens of ``trace``, held against all routers of the checkpoint.

    Raises
    ------
    RecordingError
        When the trace does not fit, with the numbers; nothing is guessed.
    """
    _refuse_whole(trace)
    routers = main_stack(known, trace.where)
    requests, axes = shaped_requests(trace, routers)
    found = [
        placed_rows(
            request, stacked(request.ids, axes), axes.routers, trace.last_is_routed, trace.where
        )
        for request in requests
    ]
    cut = sum((placed.cut for placed in found), Counter())
    placed = _without_repetitions(found, trace.where, cut)
    num_tokens = sum(len(one.ids) for one in placed)
    if not num_tokens:
        raise RecordingError(f"{trace.where}: no row of {len(found)} requests holds choices.")
    dtype = np.min_scalar_type(max(router.num_experts for router in routers) - 1)
    ids = np.empty((num_tokens, *placed[0].ids.shape[1:]), dtype)
    np.concatenate([one.ids for one in placed], out=ids, casting="unsafe")
    lengths = [len(one.ids) for one in placed]
    return CleanTrace(
        routers=axes.routers,
        ids=ids,
        request=np.repeat(np.arange(len(placed)), lengths),
        row=np.concatenate([one.row for one in placed]),
        position=np.concatenate([one.position for one in placed]),
        token_id=np.concatenate([one.token_id for one in placed]),
        names=tuple(one.name for one in placed),
        notes=(*_provenance(trace, placed), *trace.notes, *axes.notes, *_sentences(cut)),
    )


def trace_source(path: Path, trace: Trace, cleaned: CleanTrace) -> StoredSource:
    """The cleaned trace as a token source of stage ``ids``."""
    tensors = {
        router.name: {CHOSEN.name: ArrayRows(cleaned.ids[:, index], trace.where)}
        for index, router in enumerate(cleaned.routers)
    }
    columns = {
        "document": cleaned.request,
        "position": cleaned.position,
        "token_id": cleaned.token_id,
    }
    if not trace.has_documents:
        del columns["document"]
    facts = SourceFacts(
        name=path.resolve().name,
        stage="ids",
        num_tokens=len(cleaned.ids),
        routers=tuple(router.name for router in cleaned.routers),
        domains=(),
        has_documents=trace.has_documents,
        has_chosen=True,
        engine=trace.dialect,
        num_documents=len(cleaned.names) if trace.has_documents else None,
        size_bytes=_size(path),
        notes=cleaned.notes,
    )
    rows = {name: ArrayRows(values[:, None], trace.where) for name, values in columns.items()}
    return StoredSource(facts, tensors, RowColumns(rows))


def _refuse_whole(trace: Trace) -> None:
    """Raises RecordingError for what no cleaning can make a trace of tokens of."""
    if trace.ids_are == "physical":
        raise RecordingError(
            f"{trace.where}: ids are physical places of experts, which move with load balancing.",
            "Give the map of places (--expert-map), or record with expert load balancing off.",
        )
    if not trace.requests:
        raise RecordingError(f"{trace.where}: no request of it holds choices.")
    dtypes = {request.ids.dtype for request in trace.requests if request.ids.dtype.kind not in "iu"}
    if dtypes:
        raise RecordingError(f"{trace.where}: ids are {dtypes.pop()}; expected integers.")
    size = sum(request.ids.nbytes for request in trace.requests)
    if size > TRACE_BYTES:
        raise RecordingError(
            f"{trace.where}: {size:,} bytes of ids, more than the {TRACE_BYTES:,} allowed.",
            "Give the requests in several files.",
        )


def _without_repetitions(
    found: Sequence[PlacedRows], where: str, cut: Counter[str]
) -> list[PlacedRows]:
    """Every request once; one name for two contents is refused.

    Two names for one content are kept, since equal prompts may be answered equally, and counted.
    """
    seen: dict[str, bytes] = {}
    contents: set[bytes] = set()
    kept = []
    for placed in found:
        if not len(placed.ids):
            continue
        content = hashlib.sha256(np.ascontiguousarray(placed.ids).data)
        content.update(placed.position.data)
        content.update(placed.token_id.data)
        digest = content.digest()
        if placed.name not in seen:
            # a single token has nothing that could tell it from others
            cut["equal"] += digest in contents and len(placed.ids) > 1
            contents.add(digest)
            seen[placed.name] = digest
            kept.append(placed)
        elif seen[placed.name] == digest:
            cut["repeated"] += 1
        else:
            raise RecordingError(
                f"{where}: request {placed.name} stands twice in it, with different choices.",
                "Are these files of two runs? Give them one by one.",
            )
    return kept


def _provenance(trace: Trace, placed: Sequence[PlacedRows]) -> list[str]:
    said = [f"Trace of {trace.dialect}"]
    if trace.ids_are == "unknown":
        said.append("the file does not say whether ids are logical (without expert load balancing)")
    if trace.has_documents and any((one.position < 0).any() for one in placed):
        said.append(
            "no token ids and no counts of tokens: positions, and rows missing at an end, are "
            "not known"
        )
    return said


def _sentences(cut: Counter[str]) -> list[str]:
    return [text.format(n=cut[kind]) for kind, text in _SENTENCES.items() if cut[kind]]


def _size(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def of_routers(cleaned: CleanTrace, names: Sequence[str]) -> CleanTrace:
    """The same trace with only the routers that are asked for."""
    kept = [i for i, router in enumerate(cleaned.routers) if router.name in names]
    if len(kept) == len(cleaned.routers):
        return cleaned
    routers = tuple(cleaned.routers[i] for i in kept)
    return replace(cleaned, routers=routers, ids=cleaned.ids[:, kept])
