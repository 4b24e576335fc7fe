"""The tokens of several recordings in the order of documents and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int16, Int64

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import TokenColumns
from moegeom.tokens.recording.columns import DTYPES, ROW_GROUP_TOKENS
from moegeom.tokens.recording.facts import check_domains
from moegeom.tokens.recording.merge_parts import Part

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
                raise _contradiction(parts, columns, name, int(before[at]), int(here[at]))
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
            found = part.source.read_columns(start, stop)
            if min(found.document.min(), found.position.min()) < 0:
                raise RecordingError(
                    f"{part.path.name}: tokens without document or position; expected both, which "
                    "say where a token belongs.",
                    "Record with documents and positions.",
                )
            for name, column in columns.items():
                read = getattr(found, name)
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


def _contradiction(
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
