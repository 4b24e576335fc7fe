"""Recordings of several ranks of one run as one, in the order of documents and positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import TokenColumns, TopLogits
from moegeom.tokens.columns import DTYPES
from moegeom.tokens.reader import open_recording
from moegeom.tokens.recording import RecordingFacts, read_facts, tensor_file_name
from moegeom.tokens.stages import CHOSEN, EXPERT_DTYPES, TOP_EXPERT, TOP_LOGITS
from moegeom.tokens.stored import StoredSource
from moegeom.tokens.tensor_file import open_tensor_file
from moegeom.tokens.writer import RecordingWriter

#: Tokens read at a time from one part, which bounds what is held of it.
_READ_TOKENS = 16_384


@dataclass(frozen=True)
class Merged:
    """The recording; ``num_duplicates`` tokens were in more than one part."""

    path: Path
    num_tokens: int
    num_duplicates: int


@dataclass(frozen=True, eq=False)
class _Keys:
    """Of every token of every part, in merged order: its part, and its row there."""

    part: Int64[np.ndarray, "tokens"]
    row: Int64[np.ndarray, "tokens"]
    is_first: np.ndarray

    def slice(self, start: int, stop: int) -> _Keys:
        return _Keys(self.part[start:stop], self.row[start:stop], self.is_first[start:stop])


def merge_recordings(parts: Sequence[Path], out: Path, shard_tokens: int = 65_536) -> Merged:
    """Writes ``out`` from ``parts``, which must be of one run; nothing of them is changed.

    Tokens are ordered by document and position, so that the number of parts and their order change
    no byte. A token that several parts hold must be the same in all, and is kept once. Held in
    memory: document and position of all tokens, and one shard.

    Raises
    ------
    RecordingError
        When parts are of different runs, a token has no document or position, or two parts
        disagree about a token.
    """
    facts = [read_facts(part) for part in parts]
    for path, other in zip(parts[1:], facts[1:], strict=True):
        _check_same(parts[0], facts[0], path, other)
    if facts[0].dtype == "float64":
        raise RecordingError(
            f"{parts[0].name}: float64 parts are not merged, for they are read as float32.",
            "Record float32.",
        )
    sources = [open_recording(part) for part in parts]
    keys = _ordered(parts, sources)
    domains = tuple(sorted({name for found in facts for name in found.domains}))
    first = facts[0]
    with RecordingWriter(
        out,
        first.stage,
        first.routers,
        checkpoint_name=first.checkpoint_name,
        fingerprint=first.fingerprint,
        engine=first.engine,
        created_by=first.created_by,
        dtype=first.dtype,
        domains=domains,
    ) as writer:
        for start, stop in _shards(keys, shard_tokens):
            _write(writer, keys.slice(start, stop), parts, sources, first, domains)
        num_tokens = writer.num_tokens
    return Merged(out, num_tokens, len(keys.row) - num_tokens)


def _check_same(path: Path, facts: RecordingFacts, other_path: Path, other: RecordingFacts) -> None:
    for what in ("stage", "dtype", "routers", "has_chosen", "outputs", "fingerprint", "engine"):
        mine, theirs = getattr(facts, what), getattr(other, what)
        if mine != theirs:
            raise RecordingError(
                f"{other_path.name}: {what} is {theirs!r}; that of {path.name} is {mine!r}.",
                "Merge parts of one run.",
            )


def _ordered(parts: Sequence[Path], sources: Sequence[StoredSource]) -> _Keys:
    document, position, part, row = [], [], [], []
    for number, source in enumerate(sources):
        for start in range(0, source.facts.num_tokens, _READ_TOKENS):
            stop = min(start + _READ_TOKENS, source.facts.num_tokens)
            columns = source.read_columns(start, stop)
            if columns.document.min() < 0 or columns.position.min() < 0:
                raise RecordingError(
                    f"{parts[number].name}: tokens without document or position; parts are merged "
                    "by them.",
                    "Say where documents begin when recording.",
                )
            document.append(columns.document)
            position.append(columns.position)
            part.append(np.full(stop - start, number))
            row.append(np.arange(start, stop))
    documents, positions = np.concatenate(document), np.concatenate(position)
    parts_of, rows = np.concatenate(part), np.concatenate(row)
    order = np.lexsort((rows, parts_of, positions, documents))
    documents, positions = documents[order], positions[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (documents[1:] != documents[:-1]) | (positions[1:] != positions[:-1])
    return _Keys(parts_of[order], rows[order], is_first)


def _shards(keys: _Keys, shard_tokens: int) -> list[tuple[int, int]]:
    """Ranges of the merged order with ``shard_tokens`` different tokens each."""
    firsts = np.flatnonzero(keys.is_first)
    edges = [*firsts[::shard_tokens].tolist(), len(keys.row)]
    return list(itertools.pairwise(edges))


def _write(
    writer: RecordingWriter,
    keys: _Keys,
    parts: Sequence[Path],
    sources: Sequence[StoredSource],
    facts: RecordingFacts,
    domains: tuple[str, ...],
) -> None:
    columns = _gathered_columns(keys, sources, domains)
    kept = keys.is_first

    def gathered(router: str, what: str) -> np.ndarray:
        rows = _gather(keys, sources, router, what)
        _check_duplicates(keys, rows, columns, parts, f"{what} of router {router}")
        return _as_stored(rows[kept], parts[0], router, what)

    values: dict[str, np.ndarray] | dict[str, TopLogits] | None = None
    if facts.stage == "top_logits":
        values = {
            router: TopLogits(gathered(router, TOP_LOGITS.name), gathered(router, TOP_EXPERT.name))
            for router in facts.routers
        }
    elif facts.stage != "ids":
        values = {router: gathered(router, "values") for router in facts.routers}
    chosen = None
    if facts.has_chosen:
        chosen = {router: gathered(router, CHOSEN.name) for router in facts.routers}
    outputs = {
        kind: {router: gathered(router, kind) for router in facts.routers} for kind in facts.outputs
    }
    own = TokenColumns(**{name: column[kept] for name, column in vars(columns).items()})
    writer.append(own, values, chosen, outputs=outputs or None)


def _read(source: StoredSource, router: str, what: str, start: int, stop: int) -> np.ndarray:
    if what == "values":
        return source.read_values(router, start, stop)
    if what in (TOP_LOGITS.name, TOP_EXPERT.name):
        return getattr(source.read_top_logits(router, start, stop), what)
    read = source.read_chosen if what == CHOSEN.name else None
    found = read(router, start, stop) if read else source.read_output(router, what, start, stop)
    assert found is not None, "recording.json says that it is held"
    return found


def _as_stored(rows: np.ndarray, part: Path, router: str, what: str) -> np.ndarray:
    """Numbers of experts in the integers of the parts: reading has made them int32."""
    tensor = {CHOSEN.name: CHOSEN, TOP_EXPERT.name: TOP_EXPERT}.get(what)
    if tensor is None:
        return rows
    file = open_tensor_file(part / tensor_file_name(tensor.file_prefix, router, 0))
    return rows.astype(file.rows(tensor.name, tuple(EXPERT_DTYPES.values())).dtype)


@dataclass(frozen=True, eq=False)
class _Window:
    """Rows ``rows`` of a part, all within ``[start, stop)``, and where they belong."""

    start: int
    stop: int
    rows: Int64[np.ndarray, "some"]
    target: Int64[np.ndarray, "some"]


def _windows(keys: _Keys, part: int) -> Iterator[_Window]:
    """The rows of one part, in ranges of at most ``_READ_TOKENS`` of its tokens."""
    own = np.flatnonzero(keys.part == part)
    target = own[np.argsort(keys.row[own], kind="stable")]
    rows = keys.row[target]
    begin = 0
    while begin < len(rows):
        start = int(rows[begin])
        end = int(np.searchsorted(rows, start + _READ_TOKENS))
        yield _Window(start, int(rows[end - 1]) + 1, rows[begin:end], target[begin:end])
        begin = end


def _gather(keys: _Keys, sources: Sequence[StoredSource], router: str, what: str) -> np.ndarray:
    """Rows of one router in the merged order."""
    out: np.ndarray | None = None
    for part, source in enumerate(sources):
        for window in _windows(keys, part):
            found = _read(source, router, what, window.start, window.stop)
            if out is None:
                out = np.empty((len(keys.row), *found.shape[1:]), found.dtype)
            out[window.target] = found[window.rows - window.start]
    assert out is not None, "a shard has tokens"
    return out


def _gathered_columns(
    keys: _Keys, sources: Sequence[StoredSource], domains: tuple[str, ...]
) -> TokenColumns:
    found = {name: np.empty(len(keys.row), dtype) for name, dtype in DTYPES.items()}
    for part, source in enumerate(sources):
        renamed = np.array([domains.index(name) for name in source.facts.domains] + [-1], np.int16)
        for window in _windows(keys, part):
            columns = source.read_columns(window.start, window.stop)
            for name, out in found.items():
                column = getattr(columns, name)[window.rows - window.start]
                out[window.target] = renamed[column] if name == "domain" else column
    return TokenColumns(**found)


def _check_duplicates(
    keys: _Keys, rows: np.ndarray, columns: TokenColumns, parts: Sequence[Path], what: str
) -> None:
    """Raises RecordingError at a token that two parts hold differently."""
    again = np.flatnonzero(~keys.is_first)
    if not len(again):
        return
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1)
    differs = (flat[again].view(np.uint8) != flat[again - 1].view(np.uint8)).any(axis=1)
    if differs.any():
        at = int(again[int(np.argmax(differs))])
        raise RecordingError(
            f"{what}, document {columns.document[at]}, position {columns.position[at]}: "
            f"{parts[keys.part[at - 1]].name} and {parts[keys.part[at]].name} hold different rows.",
            "Ranks that run different tokens must number their documents differently.",
        )
