"""What a dialect of routing traces is, and what it yields: requests with ids, as the file has them.

A dialect turns bytes into arrays and judges nothing. Padding, rows of layers without a router and
rows that are missing are all still there; cleaning is the same for all dialects.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.registry import Rooms
from moegeom.core.shapes import Bool, Integer

#: Bytes of ids that are in memory together where a file is read piece by piece.
PIECE_BYTES = 16_000_000

IdsAre = Literal["logical", "physical", "unknown"]


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """The choices of one request: ``ids`` is (rows, layers, k), or flat where no shape is stored.

    Parameters
    ----------
    name
        What the file calls it; else its place in the file.
    ids
        Experts, in the dtype of the file.
    token_ids
        The whole sequence, prompt and generation; with a ``mask``, one per row.
    num_tokens
        Length of the whole sequence where the file counts it without listing it.
    num_prompt
        How many of them are the prompt.
    start
        Position of the first row, where the file says it.
    num_omitted
        Leading positions that the engine was free to leave out because it had them cached.
    mask
        Which rows are tokens, where the file says it.
    is_place
        True where the name is the place in the file and no more: two files may have the same.
    batch
        What other files of the run call the same batch, where several ranks may write it.
    first_row
        Above 0 for what follows of a request whose first rows are in an earlier piece. No length of
        its sequence may be known, and no mask.
    """

    name: str
    ids: Integer[np.ndarray, "..."]
    token_ids: Integer[np.ndarray, "tokens"] | None = None
    num_tokens: int | None = None
    num_prompt: int | None = None
    start: int | None = None
    num_omitted: int | None = None
    mask: Bool[np.ndarray, "rows"] | None = None
    is_place: bool = False
    batch: str = ""
    first_row: int = 0


@dataclass(frozen=True, eq=False)
class Trace:
    """What a file, or a piece of one, holds.

    Parameters
    ----------
    where
        Its name in messages.
    dialect
        Which engine or trainer wrote it.
    requests
        In the order of the file; empty for a log of counts.
    counts
        Slots by step, layer and expert, where that is all that was recorded.
    layers
        What the file calls its layers, where it says so.
    has_documents
        False where requests are batches of tokens from several sequences.
    notes
        What the reader left out already, each with a count behind a colon: ``ranks left out: 3``.
        Counts of the same words add up over files.
    """

    where: str
    dialect: str
    requests: tuple[RequestTrace, ...] = ()
    counts: Integer[np.ndarray, "steps layers experts"] | None = None
    layers: tuple[int, ...] | None = None
    ids_are: IdsAre = "unknown"
    has_documents: bool = True
    notes: tuple[str, ...] = ()


#: Where the next piece of a file begins: a place in it, and what has been counted up to there.
Place = tuple[int, int]

BEGINNING: Place = (0, 0)

#: A piece, and where the one behind it begins; None behind the last.
Pieces = Iterator[tuple[Trace, Place | None]]


@dataclass(frozen=True)
class Dialect:
    """One engine's or trainer's way to store choices.

    ``versions`` are those whose writer was read, ``source`` says where the layout stands.
    ``recognises`` must be strict: a file that it accepts is not offered to other readers.

    A file is read by ``read``, whole, or by ``pieces``, and then may be of any size: pieces begin
    at a place that an earlier piece ended at, and each holds some ``PIECE_BYTES`` of ids.
    ``files`` are those of a folder that one run wrote. With ``copies``, the words of the note about
    them, files with the choices of an earlier one are left out.
    """

    name: str
    versions: str
    source: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path], Trace] | None = None
    pieces: Callable[[Path, Place], Pieces] | None = None
    files: Callable[[Path], Sequence[Path]] | None = None
    copies: str = ""

    def pieces_from(self, path: Path, place: Place) -> Pieces:
        """The pieces of a file from ``place`` on; of a dialect without pieces the whole file."""
        if self.pieces is not None:
            yield from self.pieces(path, place)
        else:
            assert self.read is not None, "a dialect reads whole files or pieces"
            yield self.read(path), None


DIALECTS: Rooms[Dialect] = Rooms("dialect", "moegeom.tokens.traces.dialects", Dialect)


def find_dialect(path: Path, name: str | None) -> Dialect | None:
    """The dialect ``name``, else the one that the file itself shows; None if it shows none.

    Raises
    ------
    UsageError
        When there is no such dialect, or the file could be of several.
    """
    if name is not None:
        return DIALECTS[name]
    candidates = [dialect for dialect in DIALECTS.all() if dialect.recognises(path)]
    if len(candidates) > 1:
        names = ", ".join(dialect.name for dialect in candidates)
        raise UsageError(f"{path.name}: could be a trace of {names}.", "Say which with --dialect.")
    return candidates[0] if candidates else None


#: How words end that count what should hold choices, and does not.
WITHOUT_IDS = "without routed experts"

_COUNTED = re.compile(r"(.*): ([0-9,]{1,20})", re.DOTALL)


def counted_notes(counts: Mapping[str, int]) -> tuple[str, ...]:
    """A note for each count that is not 0, behind its words."""
    return tuple(f"{words}: {count:,}" for words, count in counts.items() if count)


#: Requests that stand together in a file, the place where they begin, and what was left out there:
#: counts by the words of their notes.
Entry = tuple[Place, Sequence[RequestTrace], Mapping[str, int]]

#: What a request takes beside its ids.
_REQUEST_BYTES = 1000


def in_pieces(where: str, dialect: str, entries: Iterable[Entry]) -> Pieces:
    """The entries of a file as pieces of some ``PIECE_BYTES``.

    Entries at ``BEGINNING`` have no place of their own, and stand in one piece.
    """
    requests: list[RequestTrace] = []
    counts, size = Counter[str](), 0
    for place, of_entry, left_out in entries:
        if size >= PIECE_BYTES and place != BEGINNING:
            yield Trace(where, dialect, tuple(requests), notes=counted_notes(counts)), place
            requests, counts, size = [], Counter(), 0
        requests += of_entry
        counts.update(left_out)
        size += sum(request.ids.nbytes + _REQUEST_BYTES for request in of_entry)
    yield Trace(where, dialect, tuple(requests), notes=counted_notes(counts)), None


def rows_of_piece(row_bytes: int) -> int:
    """Rows of some ``PIECE_BYTES``; one at least."""
    return max(1, PIECE_BYTES // max(1, row_bytes))


class Notes:
    """Notes of several pieces: counts behind the same words add up, other notes stand once."""

    def __init__(self) -> None:
        self._counts: dict[str, int | None] = {}

    def add(self, notes: Iterable[str]) -> None:
        """Those of one more piece."""
        for note in notes:
            match = _COUNTED.fullmatch(note)
            if match is None:
                self._counts[note] = None
            else:
                count = int(match[2].replace(",", ""))
                self._counts[match[1]] = (self._counts.get(match[1]) or 0) + count

    def ending(self, end: str) -> Iterator[tuple[str, int]]:
        """Words that end so, with their counts."""
        return ((w, count) for w, count in self._counts.items() if count and w.endswith(end))

    @property
    def texts(self) -> tuple[str, ...]:
        """The notes in the order in which they came first."""
        return tuple(
            words if count is None else f"{words}: {count:,}"
            for words, count in self._counts.items()
        )
