"""Recordings of several ranks of one run as one, in the order of documents and positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.shapes import Bool, Int16, Int64, Shaped
from moegeom.core.text import number_of
from moegeom.core.tokens import TokenColumns
from moegeom.tokens.recording.columns import DTYPES, ROW_GROUP_TOKENS
from moegeom.tokens.recording.facts import RecordingFacts, check_domains, read_facts
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.rows import FileRows, ShardedRows, StoredSource
from moegeom.tokens.sources.recorded import open_recording
from moegeom.tokens.stages import stored_tensors

# ------------------------------------------------------------------------------------------ parts

#: What parts of one run have in common.
_COMMON = (
    "stage",
    "dtype",
    "routers",
    "has_chosen",
    "outputs",
    "checkpoint.fingerprint",
    "engine",
    "checkpoint.name",
    "created_by",
)

#: Bytes read at a time. Rows that lie scattered cost as many bytes each, at worst.
_BLOCK_BYTES = 256 << 10


@dataclass(frozen=True, eq=False)
class Part:
    """One recording, opened: every file of it is checked."""

    path: Path
    facts: RecordingFacts
    source: StoredSource


def disagreement(
    parts: Sequence[Part], rows: tuple[int, int], values: str, document: int, position: int
) -> RecordingError:
    """The error for a token of which two rows, of the parts one after the other, differ."""
    ends = np.cumsum([part.facts.num_tokens for part in parts])
    one, other = (parts[int(np.searchsorted(ends, row, side="right"))].path.name for row in rows)
    return RecordingError(
        f"{one} and {other} hold different {values} for document {document}, position {position}; "
        "expected the same, for it is one token.",
        "Ranks that run different texts must number their documents differently.",
    )


def check_agreement(parts: Sequence[Part]) -> None:
    """RecordingError when a part cannot be of the same run as the first."""
    first = parts[0]
    for part in parts[1:]:
        for name in _COMMON:
            mine, its = map(attrgetter(name), (first.facts, part.facts))
            if mine != its:
                raise RecordingError(
                    f"{part.path.name}: {name} is {its!r:.100}; that of {first.path.name} is "
                    f"{mine!r:.100}.",
                    "Merge parts of one run.",
                )


@dataclass(frozen=True, eq=False)
class MergedRows:
    """One tensor of one router in all parts, as it is stored; experts in integers that fit all."""

    rows: ShardedRows
    dtype: np.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return self.rows.width * self.dtype.itemsize

    def gather(self, index: Int64[np.ndarray, "tokens"]) -> Shaped[np.ndarray, "tokens *row"]:
        """The rows ``index``, in that order."""
        out = np.empty((len(index), self.rows.width), self.dtype)
        sequence = np.argsort(index, kind="stable")
        ascending = index[sequence]
        step = max(1, _BLOCK_BYTES // self.row_bytes)
        start = 0
        while start < len(ascending):
            first = int(ascending[start])
            stop = int(np.searchsorted(ascending, first + step))
            block = np.empty((int(ascending[stop - 1]) + 1 - first, self.rows.width), self.dtype)
            self.rows.read_into(first, block)
            out[sequence[start:stop]] = block[ascending[start:stop] - first]
            start = stop
        return out.reshape(len(index), *self.rows.row_shape)


#: By router, then by name of the tensor.
PartRows = dict[str, dict[str, MergedRows]]


def part_rows(parts: Sequence[Part]) -> PartRows:
    """The rows of all parts one after the other; RecordingError when they differ in width."""
    facts = parts[0].facts
    tensors = stored_tensors(facts.stage, facts.has_chosen, facts.outputs)
    return {
        router: {tensor.name: _tensor_rows(parts, router, tensor.name) for tensor in tensors}
        for router in facts.routers
    }


def _tensor_rows(parts: Sequence[Part], router: str, tensor: str) -> MergedRows:
    shards: list[FileRows] = []
    for part in parts:
        recorded = part.source.rows(router, tensor)
        assert isinstance(recorded, ShardedRows), "a recording has shards"
        for rows in recorded.parts:
            if rows.row_shape != (shards or [rows])[0].row_shape:
                raise RecordingError(
                    f"{part.path.name}/{rows.path.name}: rows of shape {rows.row_shape}; those of "
                    f"{parts[0].path.name} have {shards[0].row_shape}.",
                    "Merge parts of one run.",
                )
            shards.append(rows)
    dtype = _common_dtype([rows.dtype for rows in shards])
    return MergedRows(ShardedRows.of(tuple(shards)), dtype)


def _common_dtype(dtypes: Sequence[np.dtype]) -> np.dtype:
    """Floats have one dtype already; beyond two bytes experts are stored as int32 anyway."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    narrow = all(dtype.itemsize < 4 for dtype in dtypes)
    return np.result_type(*dtypes) if narrow else np.dtype(np.int32)


# ------------------------------------------------------------------------------------------ order

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Tokens in order, those of several parts one after the other.

    ``source`` is the row of each in the parts one after the other, and ``first`` are the places in
    ``source`` where another token begins: the same one may stand there several times.
    """

    source: Int64[np.ndarray, "rows"]
    first: Int64[np.ndarray, "tokens"]
    domains: tuple[str, ...]
    unordered: Columns

    def columns(self, places: Int64[np.ndarray, "some"]) -> TokenColumns:
        """The columns of the tokens at ``places``."""
        rows = self.source[places]
        return TokenColumns(**{name: column[rows] for name, column in self.unordered.items()})


def token_order(parts: Sequence[Part]) -> TokenOrder:
    """All tokens by document and position.

    Raises
    ------
    RecordingError
        When a token has no document or position, or two parts differ about the token id or the
        domain of a token.
    """
    names = tuple(dict.fromkeys(name for part in parts for name in part.facts.domains))
    check_domains(names, f"{len(parts)} parts")
    columns = _read_columns(parts, names)
    source = np.lexsort((columns["position"], columns["document"]))
    is_first = np.zeros(len(source), bool)
    is_first[0] = True
    for start, stop in _steps(1, len(source)):
        here, before = source[start:stop], source[start - 1 : stop - 1]
        for name in ("document", "position"):
            is_first[start:stop] |= columns[name][here] != columns[name][before]
        for name in ("token_id", "domain"):
            differs = columns[name][here] != columns[name][before]
            differs &= ~is_first[start:stop]
            if differs.any():
                at = int(np.argmax(differs))
                document, position = columns["document"][here[at]], columns["position"][here[at]]
                rows = (int(before[at]), int(here[at]))
                raise disagreement(parts, rows, f"values of {name}", int(document), int(position))
    first = np.flatnonzero(is_first)
    used = _in_order(columns["domain"], source)
    number = np.full(len(names) + 1, -1, np.int16)
    number[used] = np.arange(len(used))
    columns["domain"] = number[columns["domain"]]
    return TokenOrder(source, first, tuple(names[old] for old in used), columns)


def _read_columns(parts: Sequence[Part], names: tuple[str, ...]) -> Columns:
    total = sum(part.facts.num_tokens for part in parts)
    columns = {name: np.empty(total, dtype) for name, dtype in DTYPES.items()}
    numbers = {name: number for number, name in enumerate(names)}
    offset = 0
    for part in parts:
        # -1 is the last entry: unknown stays unknown
        number = np.array([*(numbers[name] for name in part.facts.domains), -1], np.int16)
        for start, stop in _steps(0, part.facts.num_tokens):
            part_columns = part.source.read_columns(start, stop)
            if min(part_columns.document.min(), part_columns.position.min()) < 0:
                raise RecordingError(
                    f"{part.path.name}: tokens without document or position; expected both, which "
                    "say where a token belongs.",
                    "Record with documents and positions.",
                )
            for name, column in columns.items():
                read = getattr(part_columns, name)
                into = slice(offset + start, offset + stop)
                column[into] = number[read] if name == "domain" else read
        offset += part.facts.num_tokens
    return columns


def _in_order(domain: Int16[np.ndarray, "rows"], source: Int64[np.ndarray, "rows"]) -> list[int]:
    """Known domains in the order of their first tokens."""
    seen: dict[int, None] = {}
    for start, stop in _steps(0, len(source)):
        numbers, places = np.unique(domain[source[start:stop]], return_index=True)
        seen.update(dict.fromkeys(numbers[np.argsort(places)].tolist()))
    return [number for number in seen if number >= 0]


def _steps(start: int, stop: int) -> list[tuple[int, int]]:
    edges = range(start, stop, ROW_GROUP_TOKENS)
    return [(first, min(first + ROW_GROUP_TOKENS, stop)) for first in edges]


#: A shard of wide rows holds fewer tokens, so that it fits in memory: but not fewer than these.
_SHARD_BYTES, _LEAST_TOKENS = 128 << 20, 1024


@dataclass(frozen=True)
class Merged:
    """The recording; ``num_duplicates`` tokens were left out, since another part had them too."""

    path: Path
    num_tokens: int
    num_duplicates: int


def merge_recordings(parts: Sequence[Path], out: Path, shard_tokens: int = 65_536) -> Merged:
    """Writes ``out`` from ``parts``, which are recordings of one run; they stay as they are.

    Tokens are ordered by document and position and domains by their first token, so that neither
    the number of parts nor their order changes a byte; a domain without tokens is left out. A
    token that several parts hold must be the same in all, and is kept once. In memory are the
    columns of all tokens (40 bytes each) and one shard.

    Parameters
    ----------
    shard_tokens
        Tokens of a shard, where they fit into 128 MiB; of wider rows as many as fit, 1024 at
        least.

    Raises
    ------
    UsageError
        When there are no parts, or ``out`` exists.
    RecordingError
        When parts are of different runs, a token has no document or position, or two parts hold
        different rows for a token.
    """
    if not parts or shard_tokens < 1:
        raise UsageError(
            f"{len(parts)} parts, {number_of(shard_tokens, 'token')} a shard; expected 1 or more."
        )
    opened = [Part(path, read_facts(path), open_recording(path)) for path in map(Path, parts)]
    check_agreement(opened)
    rows = part_rows(opened)
    order = token_order(opened)
    facts = opened[0].facts
    row_bytes = sum(merged.row_bytes for tensors in rows.values() for merged in tensors.values())
    shard_tokens = min(shard_tokens, max(_LEAST_TOKENS, _SHARD_BYTES // row_bytes))
    with RecordingWriter(
        out,
        facts.stage,
        facts.routers,
        checkpoint_name=facts.checkpoint.name,
        fingerprint=facts.checkpoint.fingerprint,
        engine=facts.engine,
        created_by=facts.created_by,
        domains=order.domains,
        dtype=facts.dtype,
    ) as writer:
        for shard in _shards(order, opened, shard_tokens):
            tensors = {
                router: {name: _gather(shard, router, merged) for name, merged in by_name.items()}
                for router, by_name in rows.items()
            }
            writer.append_tensors(shard.columns, tensors, facts.outputs)
    return Merged(Path(out), len(order.first), len(order.source) - len(order.first))


@dataclass(frozen=True, eq=False)
class _Shard:
    """Tokens that become a shard.

    ``source`` is the row of each in the parts one after the other. ``again`` are rows that must be
    the same as those of the tokens at ``again_of``. ``num_rows`` is how many of these are looked at
    together.
    """

    columns: TokenColumns
    source: Int64[np.ndarray, "tokens"]
    again: Int64[np.ndarray, "duplicates"]
    again_of: Int64[np.ndarray, "duplicates"]
    parts: Sequence[Part]
    num_rows: int


def _shards(order: TokenOrder, parts: Sequence[Part], shard_tokens: int) -> Iterator[_Shard]:
    edges = np.append(order.first, len(order.source))
    for start in range(0, len(order.first), shard_tokens):
        stop = min(start + shard_tokens, len(order.first))
        firsts = order.first[start:stop]
        places = np.arange(edges[start], edges[stop])
        again = np.setdiff1d(places, firsts, assume_unique=True)
        yield _Shard(
            columns=order.columns(firsts),
            source=order.source[firsts],
            again=order.source[again],
            again_of=np.searchsorted(firsts, again) - 1,
            parts=parts,
            num_rows=shard_tokens,
        )


def _gather(shard: _Shard, router: str, rows: MergedRows) -> Shaped[np.ndarray, "tokens *row"]:
    """Rows of the shard; RecordingError when a part holds another row for one of its tokens."""
    shard_rows = rows.gather(shard.source)
    for start in range(0, len(shard.again), shard.num_rows):
        again = shard.again[start : start + shard.num_rows]
        again_of = shard.again_of[start : start + shard.num_rows]
        differs = _differ(rows.gather(again), shard_rows[again_of])
        if differs.any():
            at = int(np.argmax(differs))
            token = int(again_of[at])
            columns = shard.columns
            raise disagreement(
                shard.parts,
                (int(shard.source[token]), int(again[at])),
                f"rows of router {router}",
                int(columns.document[token]),
                int(columns.position[token]),
            )
    return shard_rows


def _differ(
    a: Shaped[np.ndarray, "tokens ..."], b: Shaped[np.ndarray, "tokens ..."]
) -> Bool[np.ndarray, "tokens"]:
    """Whether the bytes of each row differ: NaN is the same as NaN, and 0 another than -0."""
    one, other = (np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8) for x in (a, b))
    return np.asarray((one != other).any(axis=1))
