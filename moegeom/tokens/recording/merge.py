"""Recordings of several ranks of one run as one, in the order of documents and positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.text import number_of
from moegeom.core.tokens import TokenColumns
from moegeom.tokens.recording.merge_parts import (
    MergedRows,
    Part,
    PartRows,
    check_agreement,
    open_part,
    part_rows,
)
from moegeom.tokens.recording.token_order import TokenOrder, token_order
from moegeom.tokens.recording.writer import RecordingWriter

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
        checkpoint_name=facts.checkpoint_name,
        fingerprint=facts.fingerprint,
        engine=facts.engine,
        created_by=facts.created_by,
        domains=order.domains,
        dtype=facts.dtype,
    ) as writer:
        for shard in _shards(order, opened, _fitting(rows, shard_tokens)):
            tensors = {
                router: {name: _gather(shard, router, found) for name, found in by_name.items()}
                for router, by_name in rows.items()
            }
            writer.append_tensors(shard.columns, tensors, facts.outputs)
    return Merged(Path(out), len(order.first), len(order.source) - len(order.first))


def _fitting(rows: PartRows, shard_tokens: int) -> int:
    size = sum(found.row_bytes for tensors in rows.values() for found in tensors.values())
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
    kept = rows.gather(shard.source)
    for start in range(0, len(shard.again), shard.num_rows):
        again = shard.again[start : start + shard.num_rows]
        again_of = shard.again_of[start : start + shard.num_rows]
        differs = _differ(rows.gather(again), kept[again_of])
        if differs.any():
            at = int(np.argmax(differs))
            token = int(again_of[at])
            raise _contradiction(shard, token, (int(shard.source[token]), int(again[at])), router)
    return kept


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
