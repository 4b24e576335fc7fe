"""``moegeom routes``: a trace is cleaned as it would be for the routers that it shows itself.

Files are read twice, piece by piece. The first time routers are made up of what they hold: one for
each layer with choices, with as many experts as its largest id asks for. The second time is the
first pass of a scan against these routers; what it cuts or refuses needs no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.files import reading
from moegeom.core.limits import TRACE_EXPERTS, TRACE_SLOTS
from moegeom.core.router import format_layers
from moegeom.core.shapes import Bool, Integer
from moegeom.core.text import number_of
from moegeom.core.tokens import Oddity
from moegeom.engine.sources import begun
from moegeom.pipeline import Watch
from moegeom.studies.routes.record import (
    Defect,
    FileOfRoutes,
    LayerOfTrace,
    Routes,
    RoutesRequest,
    State,
)
from moegeom.tokens.files import name_of, paths_of, refuse_damaged
from moegeom.tokens.source import Company, KnownRouter
from moegeom.tokens.sources.recorded import dialect_and_files, recognises
from moegeom.tokens.traces.axes import unset_value
from moegeom.tokens.traces.survey import CountsAlone, FileOf, first_pass
from moegeom.tokens.traces.trace import (
    BEGINNING,
    DIALECTS,
    Dialect,
    IdsAre,
    Notes,
    RequestTrace,
    Trace,
)

#: What no trace can tell by itself.
_OF_CHECKPOINT = (
    "how many experts there are",
    "how many the rule chooses",
    "which layers have routers",
)

#: Choices from which a slot that never changes is no accident.
_ENOUGH = 100

_WITHOUT_SHAPE = "layers, slots and rows, because the file stores no shape"


def routes(request: RoutesRequest, watch: Watch | None = None) -> Routes:
    """What each trace holds, and what is wrong with it that shows without a checkpoint.

    A folder, or the files of a pattern, are one trace.

    Raises
    ------
    RecordingError
        When a file is not there, or no trace that can be told.
    UsageError
        For a dialect that there is not, and for a file that may be of several.
    """
    progress = begun(watch.say if watch else None)
    return Routes(tuple(_trace(target, request.dialect, progress) for target in request.files))


def _trace(target: str, name: str | None, progress: Callable[[int], None] | None) -> FileOfRoutes:
    paths = paths_of(target)
    if not paths[0].exists():
        raise RecordingError(f"{paths[0].name}: no such file or directory.")
    with reading(paths[0], RecordingError):
        refuse_damaged(paths[0])
        if name is None and not recognises(paths[0]):
            raise RecordingError(
                f"{paths[0].name}: no trace that can be told ({', '.join(DIALECTS.names())}).",
                "Say whose it is with --dialect; recordings and arrays of logits are read by "
                "moegeom scan.",
            )
        dialect, files = dialect_and_files(paths, name)
    if progress is not None:
        progress(sum(file.stat().st_size for file in files))
    blank = FileOfRoutes(name_of(paths), target, dialect.name, "", "defective")
    try:
        sums = _TraceSums(blank.name)
        for file in files:
            for trace, _ in FileOf(file, dialect).pieces(BEGINNING):
                if trace.counts is not None:
                    if len(files) > 1:
                        raise CountsAlone(trace)
                    return _counts(trace, blank)
                sums.add(trace)
    except RecordingError as error:
        return replace(blank, defects=(_defect(error),))
    return _requests(sums, files, dialect, blank)


def _defect(error: RecordingError, request: str = "") -> Defect:
    return Defect(request, error.message, error.hint, getattr(error, "word", ""))


def _counts(trace: Trace, blank: FileOfRoutes) -> FileOfRoutes:
    """The record of a log of counts, which is sound once its reader accepts it."""
    assert trace.counts is not None, "a log of counts"
    counts = trace.counts.sum(axis=0)
    names = trace.layers or tuple(range(len(counts)))
    filled = counts.any(axis=1)
    return replace(
        blank,
        writer=trace.dialect,
        state="sound" if filled.any() else "defective",
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


class _TraceSums:
    """What pieces of a trace show of its routers, added up.

    ``seen`` are the different ids of each layer and slot; ``highest`` and ``lowest`` are those of
    each slot, of ``num_used`` choices.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.writer = ""
        self.names: tuple[int, ...] | None = None
        self.ids_are: IdsAre = "logical"
        self.notes = Notes()
        self.dtypes: set[str] = set()
        self.num_requests = self.num_rows = self.num_bare = self.num_used = 0
        self.most_rows = 0
        self.has_flat = False
        self.odd = ""
        self.seen: list[list[np.ndarray]] = []
        self.highest = self.lowest = np.zeros(0, np.int64)

    @property
    def num_layers(self) -> int:
        return len(self.seen)

    def add(self, trace: Trace) -> None:
        """Adds one piece of the trace to the sums.

        Raises
        ------
        RecordingError
            When it has more layers, slots or ids than any model.
        """
        self.writer = trace.dialect
        self.notes.add(trace.notes)
        if trace.ids_are != "logical":
            self.ids_are = trace.ids_are
        self.names = trace.layers if self.names is None else self.names
        shaped = []
        for request in trace.requests:
            self.dtypes.add(str(request.ids.dtype))
            if not request.first_row:
                self.num_requests += 1
                parts = (request.token_ids, request.num_tokens, request.mask)
                self.num_bare += all(one is None for one in parts)
            if request.ids.ndim == 1:
                self.has_flat = True
            elif (
                request.ids.ndim != 3
                or 0 in request.ids.shape[1:]
                or request.ids.dtype.kind not in "iu"
            ):
                self.odd = self.odd or (
                    f"{trace.where}: request {request.name} holds {request.ids.dtype} of shape "
                    f"{request.ids.shape}; expected integers (tokens, layers, k)."
                )
            else:
                self.num_rows += len(request.ids)
                self.most_rows = max(self.most_rows, request.first_row + len(request.ids))
                shaped.append(request)
        if shaped:
            self._add_ids(shaped)

    def _add_ids(self, requests: Sequence[RequestTrace]) -> None:
        num_layers, num_slots = requests[0].ids.shape[1:]
        if not self.seen:
            if num_layers * num_slots > TRACE_SLOTS:
                raise RecordingError(
                    f"{self.where}: rows of {num_layers:,} layers x {num_slots:,} slots; expected "
                    f"{TRACE_SLOTS:,} numbers at most."
                )
            none = np.zeros(0, np.int64)
            self.seen = [[none] * num_slots for _ in range(num_layers)]
            self.highest = np.full(num_slots, -1)
            self.lowest = np.full(num_slots, np.iinfo(np.int64).max)
        shape = (len(self.seen), len(self.highest))
        # another shape is refused by the first pass
        alike = [request.ids for request in requests if request.ids.shape[1:] == shape]
        if not alike:
            return
        ids = np.concatenate(alike)
        chosen = _chosen(ids)
        for place, slots in enumerate(self.seen):
            used = ids[chosen[:, place], place]
            self.num_used += len(used)
            for slot in range(shape[1] if len(used) else 0):
                numbers = np.unique(used[:, slot]).astype(np.int64)
                slots[slot] = np.union1d(slots[slot], numbers)
                if len(slots[slot]) > TRACE_EXPERTS:
                    raise RecordingError(
                        f"{self.where}: more than {TRACE_EXPERTS:,} different ids at one layer.",
                        "Damaged ids, or no ids of experts.",
                    )
                self.highest[slot] = max(self.highest[slot], numbers[-1])
                self.lowest[slot] = min(self.lowest[slot], numbers[0])

    def top_k(self) -> int:
        """Slots in front of those that hold one number above all others: fused shared experts."""
        top_k = len(self.highest)
        while (
            top_k > 2
            and self.num_used >= _ENOUGH
            and self.lowest[top_k - 1] == self.highest[top_k - 1] > self.highest[: top_k - 1].max()
        ):
            top_k -= 1
        return top_k

    def routers(self) -> tuple[tuple[KnownRouter, ...], tuple[LayerOfTrace, ...]]:
        """A router for each layer that holds choices or is named; for all where none does."""
        is_named = self.names is not None and len(self.names) == self.num_layers
        names = self.names if is_named and self.names else range(self.num_layers)
        top_k = self.top_k()
        layers: list[LayerOfTrace] = []
        for name, slots in zip(names, self.seen, strict=True):
            seen = np.unique(np.concatenate(slots[:top_k])) if top_k else np.zeros(0, np.int64)
            if len(seen):
                layers.append(LayerOfTrace(name, int(seen[-1]), len(seen)))
        layers.sort(key=lambda layer: layer.name)
        # a layer that the file names has a router, whether it holds choices or not
        empty = set(names) - {one.name for one in layers} if self.names or not layers else set()
        rows = sorted([*layers, *(LayerOfTrace(n, 0, 0) for n in empty)], key=lambda one: one.name)
        routers = tuple(
            KnownRouter(f"trace/{one.name}", "trace", one.name, max(one.largest + 1, top_k), top_k)
            for one in rows
        )
        return routers, tuple(layers)

    def unknown(self) -> Iterator[str]:
        """Facts that the file does not record."""
        if self.ids_are == "unknown":
            yield "whether ids are logical or physical"
        if self.num_bare and self.most_rows < self.num_layers:
            yield (
                f"which axis is that of the layers: {number_of(self.most_rows, 'row')} of "
                f"{self.num_layers:,} layers may be layers of tokens (np.swapaxes(ids, 0, 1))"
            )
        if self.num_bare:
            yield "rows that are missing at an end, where neither token ids nor counts are stored"


def _chosen(ids: Integer[np.ndarray, "rows layers slots"]) -> Bool[np.ndarray, "rows layers"]:
    """Whether rows hold choices: several experts, or one slot with ids other than 0 and -1."""
    if ids.shape[2] > 1:
        return (ids != ids[:, :, :1]).any(axis=2)
    if not ids.shape[2]:
        return np.zeros(ids.shape[:2], bool)
    return ((ids != 0) & (ids != unset_value(ids.dtype)))[:, :, 0]


def _requests(
    sums: _TraceSums, files: Sequence[Path], dialect: Dialect, blank: FileOfRoutes
) -> FileOfRoutes:
    described = replace(
        blank,
        writer=sums.writer,
        state="not judged",
        num_requests=sums.num_requests,
        dtypes=tuple(sorted(sums.dtypes)),
        ids_are=sums.ids_are,
        notes=sums.notes.texts,
        not_looked_at=(*_OF_CHECKPOINT, *sums.unknown()),
    )
    if sums.has_flat:
        return replace(described, not_looked_at=(_WITHOUT_SHAPE, *described.not_looked_at))
    if sums.odd or not sums.num_requests:
        text = sums.odd or f"{blank.name}: no request of it holds choices."
        return replace(described, state="defective", defects=(Defect("", text, ""),))
    routers, layers = sums.routers()
    defects: list[Defect] = []
    heard = Company(refused=lambda name, error: defects.append(_defect(error, name)))
    notes, num_tokens, oddities = described.notes, 0, [*_lost_layers(layers)]
    try:
        parts = [FileOf(file, dialect) for file in files]
        first = first_pass(parts, routers, blank.name, heard, dialect.copies)
        notes, num_tokens = first.notes[1:], first.num_tokens
        oddities += first.oddities
    except RecordingError as error:
        if not defects or len(defects) < sums.num_requests:
            defects.append(_defect(error))
    return replace(
        described,
        state="defective" if defects else _state(oddities, sums),
        num_rows=sums.num_rows,
        num_tokens=num_tokens,
        top_k=routers[0].top_k,
        num_layers=sums.num_layers,
        layers=layers,
        notes=notes,
        oddities=tuple(oddities),
        defects=tuple(defects),
    )


def _state(oddities: Sequence[Oddity], sums: _TraceSums) -> State:
    """Complete, or not; not known where layers and tokens may have changed places."""
    if oddities:
        return "incomplete"
    return "not judged" if sums.num_bare and sums.most_rows < sums.num_layers else "sound"


def _lost_layers(layers: Sequence[LayerOfTrace]) -> Iterator[Oddity]:
    """Layers without choices between those with some, unless these stand in a pattern of a model:
    at equal distances, or never side by side.
    """
    names = [layer.name for layer in layers]
    steps = np.diff(names)
    if len(names) > 2 and (steps == 1).any() and (steps > 1).sum() == 1:
        missing = set(range(names[0], names[-1])) - set(names)
        yield Oddity(
            "layers lack choices",
            f"between others, of all tokens: {format_layers(missing)}.",
            "A rank, or a stage of a pipeline, was not gathered; or these layers have no router.",
        )
