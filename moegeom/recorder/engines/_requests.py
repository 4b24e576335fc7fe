"""Which request, which position and which phase each row of a pass is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int32, Int64

#: Populations of a recording: tokens of prompts, and tokens that the engine generated.
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class RequestSlice:
    """Consecutive rows of one request: positions ``start``, ``start + 1`` and so on.

    ``num_prompt`` is the number of tokens of its prompt.
    """

    request: str
    start: int
    num_rows: int
    num_prompt: int


@dataclass(frozen=True, eq=False)
class PassRows:
    """The rows of one pass, padding left out; ``kept`` is False for those not to be recorded."""

    document: Int64[np.ndarray, "rows"]
    position: Int32[np.ndarray, "rows"]
    is_prompt: Bool[np.ndarray, "rows"]
    kept: Bool[np.ndarray, "rows"]

    @property
    def phases(self) -> list[str]:
        """The phase of each row, by name."""
        return [PHASES[0] if prompt else PHASES[1] for prompt in self.is_prompt]


@dataclass
class _Seen:
    """A request: the number of its document, and the positions that have been run.

    Those are ``first`` to ``next``, and what was run of the cached ones in front when the request
    lost its cache: up to ``front``.
    """

    document: int
    num_prompt: int
    first: int
    next: int
    front: int = 0
    num_run: int = 0
    num_recorded: int = 0

    def run(self, places: Int64[np.ndarray, "rows"]) -> Bool[np.ndarray, "rows"]:
        """Which of these positions are run for the first time; they count as run from now on."""
        is_new = (places >= self.next) | ((places >= self.front) & (places < self.first))
        end = int(places[-1]) + 1
        if places[0] < self.first:
            self.front = max(self.front, min(end, self.first))
        self.next = max(self.next, end)
        self.num_run += int(is_new.sum())
        return is_new


@dataclass
class Requests:
    """All requests of a recording; documents are numbered as they come, in steps of ``stride``.

    A position counts once: an engine runs tokens again after it has taken a request's cache away.
    Behind ``num_tokens`` recorded tokens nothing more is kept.
    """

    first_document: int = 0
    stride: int = 1
    num_tokens: int | None = None
    num_recorded: int = 0
    num_again: int = 0
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def rows(self, slices: Sequence[RequestSlice]) -> PassRows:
        """The rows of a pass, in the order in which its slices stand."""
        total = sum(one.num_rows for one in slices)
        document, position = np.empty(total, np.int64), np.empty(total, np.int32)
        is_prompt, kept = np.empty(total, bool), np.empty(total, bool)
        first = 0
        for one in slices:
            here = slice(first, first + one.num_rows)
            seen = self._of(one)
            places = np.arange(one.start, one.start + one.num_rows)
            is_new = seen.run(places)
            room = np.cumsum(is_new) <= self._room()
            document[here], position[here] = seen.document, places
            is_prompt[here], kept[here] = places < one.num_prompt, is_new & room
            num_kept = int(kept[here].sum())
            seen.num_recorded += num_kept
            self.num_recorded += num_kept
            self.num_again += int((~is_new).sum())
            first += one.num_rows
        return PassRows(document, position, is_prompt, kept)

    def _of(self, one: RequestSlice) -> _Seen:
        if one.request not in self._seen:
            number = self.first_document + len(self._seen) * self.stride
            self._seen[one.request] = _Seen(number, one.num_prompt, one.start, one.start)
        return self._seen[one.request]

    def _room(self) -> int:
        if self.num_tokens is None:
            return np.iinfo(np.int64).max
        return self.num_tokens - self.num_recorded

    @property
    def is_full(self) -> bool:
        """Whether all tokens that were asked for have come."""
        return self._room() <= 0

    @property
    def num_not_run(self) -> int:
        """Positions that no pass had: cached prefixes, or run before the recording began."""
        return sum(seen.next - seen.num_run for seen in self._seen.values())

    def as_json(self) -> list[dict[str, int | str]]:
        """One record for each request, in the order of documents."""
        return [
            {
                "request": name,
                "document": seen.document,
                "num_prompt_tokens": seen.num_prompt,
                "first_position": seen.first,
                "num_recorded": seen.num_recorded,
            }
            for name, seen in self._seen.items()
        ]
