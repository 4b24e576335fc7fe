"""How a search goes on: progress, an estimate before a minute, and the budget that ends it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from moegeom.core.text import number_of
from moegeom.engine.request import Watch

T = TypeVar("T")

#: Seconds of a search that are announced before.
_LONG = 60.0


@dataclass
class SearchPace:
    """The pace of one search, ``what`` of which router; ``budget`` are seconds from when it was
    made, None for no end.
    """

    watch: Watch | None
    budget: float | None
    what: str = ""
    begun: float = field(default_factory=time.perf_counter)

    def parts(
        self, parts: Sequence[T], size: Callable[[T], int], is_whole: bool = False
    ) -> Iterator[T]:
        """The parts in turn, the first in any case, others while the budget lasts; all of them
        where what they are for needs the whole.
        """
        done, total, quickest = 0, sum(map(size, parts)), math.inf
        for number, part in enumerate(parts):
            started = time.perf_counter()
            over = started + quickest * size(part) - self.begun
            if number and not is_whole and self.budget is not None and over > self.budget:
                break
            left = quickest * (total - done)
            if number == 2 and self.watch and left > _LONG:  # a first part is slower
                minutes = number_of(round(left / 60.0), "minute")
                self.watch.say(f"{self.what} take about {minutes}")
            yield part
            done += size(part)
            quickest = min(quickest, (time.perf_counter() - started) / max(size(part), 1))
            if self.watch:
                self.watch.advance(size(part))
        if self.watch and done < total:
            self.watch.advance(total - done)

    def begin(self, what: str) -> None:
        """Tells what is done now."""
        if self.watch:
            self.watch.begin(what)

    def share(self, total: int, parts: int) -> Iterator[None]:
        """``total`` of the work in so many parts, each of which is done when it is asked for."""
        for part in range(parts):
            if self.watch:
                self.watch.advance(total * (part + 1) // parts - total * part // parts)
            yield
