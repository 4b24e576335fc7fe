"""What an engine or a trainer wrote about its choices, in one form for all dialects.

A trace is what the file says, parsed and not yet believed: padding, rows of layers without a
router and rows that are missing are all still there. ``trace_source`` decides about them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Bool, Integer

#: Bytes of ids that are held together where a file is read piece by piece.
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
        Above 0 for what follows of a request of which rows were given already. No length of its
        sequence may be known, and no mask.
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
        Slots by step, layer and expert, where that is all that was kept.
    counts_zeros
        False where experts that were never chosen are left out of the counts, at their end too.
    layers
        What the file calls its layers, where it says so.
    has_documents
        False where requests are batches of tokens from several sequences.
    last_is_routed
        True where the last token of a sequence goes through the routers too. An engine never
        forwards the last token that it sampled.
    notes
        What the reader left out already, each with a count behind a colon: ``ranks left out: 3``.
        Counts of the same words add up over files.
    """

    where: str
    dialect: str
    requests: tuple[RequestTrace, ...] = ()
    counts: Integer[np.ndarray, "steps layers experts"] | None = None
    counts_zeros: bool = True
    layers: tuple[int, ...] | None = None
    ids_are: IdsAre = "unknown"
    has_documents: bool = True
    last_is_routed: bool = False
    notes: tuple[str, ...] = ()


#: Where the next piece of a file begins: a place in it, and what has been counted up to there.
Place = tuple[int, int]

BEGINNING: Place = (0, 0)

#: A piece, and where the one behind it begins; None behind the last.
Pieces = Iterator[tuple[Trace, Place | None]]


def whole(pieces: Pieces) -> Trace:
    """All pieces as one trace, in memory."""
    parts = [trace for trace, _ in pieces]
    requests: list[RequestTrace] = []
    for request in (request for part in parts for request in part.requests):
        if request.first_row:
            ids = np.concatenate([requests[-1].ids, request.ids])
            requests[-1] = replace(requests[-1], ids=ids)
        else:
            requests.append(request)
    notes = Notes()
    for part in parts:
        notes.add(part.notes)
    return replace(parts[0], requests=tuple(requests), notes=notes.texts)


_COUNTED = re.compile(r"(.*): ([0-9,]{1,20})", re.DOTALL)


class Notes:
    """Notes of several pieces: counts behind the same words add up, other notes stand once."""

    def __init__(self) -> None:
        self._counts: dict[str, int | None] = {}

    def add(self, notes: Iterable[str]) -> None:
        """Those of one more piece."""
        for note in notes:
            counted = _COUNTED.fullmatch(note)
            if counted is None:
                self._counts[note] = None
            else:
                count = int(counted[2].replace(",", ""))
                self._counts[counted[1]] = (self._counts.get(counted[1]) or 0) + count

    @property
    def texts(self) -> tuple[str, ...]:
        """The notes in the order in which they came first."""
        said = self._counts.items()
        return tuple(text if count is None else f"{text}: {count:,}" for text, count in said)
