"""``moegeom routes``: a trace is cleaned as it would be for the routers that it shows itself.

Routers are made up of what the trace holds: one for each layer with choices, with as many experts
as its largest id asks for. What the cleaning then cuts or refuses needs no checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from moegeom.core.errors import CheckpointError, MoeGeomError, RecordingError
from moegeom.core.files import reading
from moegeom.core.router import format_layers
from moegeom.studies.routes.record import Defect, FileOfRoutes, LayerOfTrace, Routes, RoutesRequest
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.dialect import DIALECTS, Dialect, find_dialect
from moegeom.tokens.traces.source import CleanTrace, clean
from moegeom.tokens.traces.trace import RequestTrace, Trace

#: What no trace can tell by itself.
_OF_CHECKPOINT = (
    "how many experts there are",
    "how many the rule chooses",
    "which layers have routers",
)

#: Choices from which a slot that never changes is no accident.
_ENOUGH = 100

_WITHOUT_SHAPE = "layers, slots and rows, because the file stores no shape"


def routes(request: RoutesRequest) -> Routes:
    """What each file holds, and what is wrong with it that shows without a checkpoint.

    Raises
    ------
    RecordingError
        When a file is not there, or no trace that can be told.
    UsageError
        For a dialect that there is not, and for a file that may be of several.
    """
    return Routes(tuple(_file(Path(file), request.dialect) for file in request.files))


def _file(path: Path, asked: str | None) -> FileOfRoutes:
    if not path.exists():
        raise RecordingError(f"{path.name}: no such file or directory.")
    with reading(path, RecordingError):
        dialect = find_dialect(path, asked)
    if dialect is None:
        raise RecordingError(
            f"{path.name}: no trace that can be told ({', '.join(DIALECTS.names())}).",
            "Say whose it is with --dialect; recordings and arrays of logits are read by "
            "moegeom scan.",
        )
    try:
        with reading(path, RecordingError):
            trace = dialect.read(path)
    except (CheckpointError, RecordingError) as error:
        defect = Defect("", error.message, error.hint)
        return FileOfRoutes(path.name, dialect.name, "", "defective", defects=(defect,))
    found = _counts if trace.counts is not None else _requests
    return found(trace, dialect)


def _counts(trace: Trace, dialect: Dialect) -> FileOfRoutes:
    """A log of counts: what its reader did not refuse is sound."""
    assert trace.counts is not None, "a log of counts"
    counts = trace.counts.sum(axis=0)
    names = trace.layers or tuple(range(len(counts)))
    filled = counts.any(axis=1)
    return FileOfRoutes(
        trace.where,
        dialect.name,
        trace.dialect,
        "sound" if filled.any() else "defective",
        num_layers=len(counts),
        layers=tuple(
            LayerOfTrace(name, int(np.flatnonzero(row)[-1]), int((row > 0).sum()))
            for name, row in zip(names, counts, strict=True)
            if row.any()
        ),
        ids_are=trace.ids_are,
        notes=trace.notes,
        defects=() if filled.any() else (Defect("", f"{trace.where}: every count is 0.", ""),),
        not_looked_at=(*_OF_CHECKPOINT, "single tokens, because the file holds counts alone"),
    )


def _requests(trace: Trace, dialect: Dialect) -> FileOfRoutes:
    described = FileOfRoutes(
        trace.where,
        dialect.name,
        trace.dialect,
        "not judged",
        num_requests=len(trace.requests),
        dtypes=tuple(sorted({str(request.ids.dtype) for request in trace.requests})),
        ids_are=trace.ids_are,
        notes=trace.notes,
        not_looked_at=(*_OF_CHECKPOINT, *_unknown_of(trace)),
    )
    if any(request.ids.ndim == 1 for request in trace.requests):
        return replace(described, not_looked_at=(_WITHOUT_SHAPE, *described.not_looked_at))
    odd = next((r for r in trace.requests if r.ids.ndim != 3 or r.ids.dtype.kind not in "iu"), None)
    if odd is not None or not trace.requests:
        text = (
            f"{trace.where}: no request of it holds choices."
            if odd is None
            else f"{trace.where}: request {odd.name} holds {odd.ids.dtype} of shape "
            f"{odd.ids.shape}; expected integers (tokens, layers, k)."
        )
        return replace(described, state="defective", defects=(Defect("", text, ""),))
    return _judged(trace, described)


def _judged(trace: Trace, described: FileOfRoutes) -> FileOfRoutes:
    routers, layers = _shown_routers(trace)
    cleaned, defects = _cleaned(trace, routers)
    shape = Counter(request.ids.shape[1:] for request in trace.requests).most_common(1)[0][0]
    said = trace.notes if cleaned is None else cleaned.notes
    notes = [note for note in said if note != f"Trace of {trace.dialect}"]
    gaps = _gaps([layer.name for layer in layers])
    return replace(
        described,
        state="defective" if defects else "sound",
        num_rows=sum(len(request.ids) for request in trace.requests),
        num_tokens=0 if cleaned is None else len(cleaned.ids),
        top_k=routers[0].top_k,
        num_layers=shape[0],
        layers=layers,
        notes=(*notes, *gaps),
        defects=tuple(defects),
    )


def _cleaned(
    trace: Trace, routers: Sequence[KnownRouter]
) -> tuple[CleanTrace | None, list[Defect]]:
    """The tokens of all requests that can be read, and why the others cannot."""
    try:
        return clean(trace, routers), []
    except RecordingError as error:
        whole = error
    kept, defects = [], []
    for request in trace.requests:
        try:
            # a request that holds nothing is counted beside others, and refused by itself
            if _chosen(request).any():
                clean(replace(trace, requests=(request,)), routers)
            kept.append(request)
        except RecordingError as error:
            defects.append(Defect(request.name, error.message, error.hint))
    if not defects:
        return None, [Defect("", whole.message, whole.hint)]
    try:
        return clean(replace(trace, requests=tuple(kept)), routers), defects
    except MoeGeomError as error:
        return None, [*defects, Defect("", error.message, error.hint)] if kept else defects


def _shown_routers(
    trace: Trace,
) -> tuple[tuple[KnownRouter, ...], tuple[LayerOfTrace, ...]]:
    """A router for each layer that holds choices or is named; for all where none does."""
    shape = Counter(request.ids.shape[1:] for request in trace.requests).most_common(1)[0][0]
    alike = [request for request in trace.requests if request.ids.shape[1:] == shape]
    names = trace.layers if trace.layers and len(trace.layers) == shape[0] else range(shape[0])
    found: list[LayerOfTrace] = []
    top_k = _slots(alike, shape[1])
    for place, name in enumerate(names):
        used = [r.ids[_chosen(r)[:, place], place, :top_k].ravel() for r in alike]
        seen = np.unique(np.concatenate(used))
        if len(seen):
            found.append(LayerOfTrace(name, int(seen[-1]), len(seen)))
    layers = sorted(found, key=lambda layer: layer.name)
    # a layer that the file names has a router, whether it holds choices or not
    empty = set(names) - {layer.name for layer in layers} if trace.layers or not layers else set()
    shown = sorted([*layers, *(LayerOfTrace(n, 0, 0) for n in empty)], key=lambda one: one.name)
    routers = tuple(
        KnownRouter(f"trace/{one.name}", "trace", one.name, max(one.largest + 1, top_k), top_k)
        for one in shown
    )
    return routers, tuple(layers)


def _slots(requests: Sequence[RequestTrace], num_slots: int) -> int:
    """Slots in front of those that hold one number above all others: fused shared experts."""
    highest, lowest = np.full(num_slots, -1), np.full(num_slots, np.iinfo(np.int64).max)
    num_used = 0
    for request in requests:
        used = request.ids[_chosen(request)]
        num_used += len(used)
        if used.size:
            highest = np.maximum(highest, used.max(axis=0))
            lowest = np.minimum(lowest, used.min(axis=0))
    top_k = num_slots
    while (
        top_k > 2
        and num_used >= _ENOUGH
        and lowest[top_k - 1] == highest[top_k - 1] > highest[: top_k - 1].max()
    ):
        top_k -= 1
    return top_k


def _chosen(request: RequestTrace) -> Bool[np.ndarray, "rows layers"]:
    """Where a row names more than one expert; with a single slot, anything but 0 and -1."""
    ids = request.ids
    if ids.shape[2] > 1:
        return (ids != ids[:, :, :1]).any(axis=2)
    unset = -1 if ids.dtype.kind == "i" else np.iinfo(ids.dtype).max
    return ((ids != 0) & (ids != unset))[:, :, 0] if ids.shape[2] else np.zeros(ids.shape[:2], bool)


def _unknown_of(trace: Trace) -> Iterator[str]:
    if trace.ids_are == "unknown":
        yield "whether ids are logical or physical"
    bare = sum(
        request.token_ids is None and request.num_tokens is None and request.mask is None
        for request in trace.requests
    )
    if bare:
        yield "rows that are missing at an end, where neither token ids nor counts are stored"


def _gaps(names: Sequence[int]) -> Iterator[str]:
    """Layers without choices between those with some, unless these stand at equal distances."""
    if len(names) > 2 and len(set(np.diff(names).tolist())) > 1:
        missing = set(range(names[0], names[-1])) - set(names)
        yield f"layers without choices between others: {format_layers(missing)}"
