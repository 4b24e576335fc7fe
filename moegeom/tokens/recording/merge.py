"""Recordings of several ranks of one run as one, in the order of documents and positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.shapes import Bool, Int16, Int64, Shaped
from moegeom.core.text import number_of
from moegeom.core.tokens import TokenColumns
from moegeom.tokens.recording.columns import DTYPES, ROW_GROUP_TOKENS
from moegeom.tokens.recording.facts import check_domains
from moegeom.tokens.recording.merge_parts import (
    MergedRows,
    Part,
    PartRows,
    check_agreement,
    open_part,
    part_rows,
)
from moegeom.tokens.recording.writer import RecordingWriter

# The tokens of several recordings in the order of documents and positions.

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
                raise _different_values(parts, columns, name, int(before[at]), int(here[at]))
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


def _different_values(
    parts: Sequence[Part], columns: Columns, name: str, one: int, other: int
) -> RecordingError:
    starts = np.cumsum([0, *(part.facts.num_tokens for part in parts)])
    labels = [
        parts[int(np.searchsorted(starts, row, side="right")) - 1].path.name for row in (one, other)
    ]
    return RecordingError(
        f"{labels[0]} and {labels[1]} hold different values of {name} for document "
        f"{columns['document'][one]}, position {columns['position'][one]}; expected the same, for "
        "it is one token.",
        "Ranks that run different texts must number their documents differently.",
    )


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
    opened = [open_part(Path(path)) for path in parts]
    check_agreement(opened)
    rows = part_rows(opened)
    order = token_order(opened)
    facts = opened[0].facts
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
        for shard in _shards(order, opened, _fitting(rows, shard_tokens)):
            tensors = {
                router: {name: _gather(shard, router, merged) for name, merged in by_name.items()}
                for router, by_name in rows.items()
            }
            writer.append_tensors(shard.columns, tensors, facts.outputs)
    return Merged(Path(out), len(order.first), len(order.source) - len(order.first))


def _fitting(rows: PartRows, shard_tokens: int) -> int:
    size = sum(merged.row_bytes for tensors in rows.values() for merged in tensors.values())
    return min(shard_tokens, max(_LEAST_TOKENS, _SHARD_BYTES // size))


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
            raise _contradiction(shard, token, (int(shard.source[token]), int(again[at])), router)
    return shard_rows


def _differ(
    a: Shaped[np.ndarray, "tokens ..."], b: Shaped[np.ndarray, "tokens ..."]
) -> Bool[np.ndarray, "tokens"]:
    """Whether the bytes of each row differ: NaN is the same as NaN, and 0 another than -0."""
    one, other = (np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8) for x in (a, b))
    return np.asarray((one != other).any(axis=1))


def _contradiction(
    shard: _Shard, token: int, sources: tuple[int, int], router: str
) -> RecordingError:
    starts = np.cumsum([0, *(part.facts.num_tokens for part in shard.parts)])
    one, other = (
        shard.parts[int(np.searchsorted(starts, source, side="right")) - 1].path.name
        for source in sources
    )
    return RecordingError(
        f"{one} and {other} hold different rows of router {router} for document "
        f"{shard.columns.document[token]}, position {shard.columns.position[token]}; expected the "
        "same, for it is one token.",
        "Ranks that run different texts must number their documents differently.",
    )
