"""The processes of a distributed run: which one this is, and how they add up what they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from moegeom.core.errors import RecordingError, UsageError

T = TypeVar("T")

_HINT = (
    "A rank ended with an error of its own, or left the block without the others: look at its log."
)


@dataclass(frozen=True)
class Ranks:
    """Process ``rank`` of ``num_ranks``; ``group`` is what connects them, None for nothing."""

    rank: int = 0
    num_ranks: int = 1
    group: Any = None

    def everywhere(self, value: T) -> list[T]:
        """``value`` of each rank, on all of them."""
        if self.num_ranks == 1:
            return [value]
        found: list[Any] = [None] * self.num_ranks
        _talking(lambda: torch.distributed.all_gather_object(found, value, self.group))
        return found

    def reduced(self, value: T, merge: Callable[[T, T], T]) -> T | None:
        """All ranks' values merged by pairs, on rank 0; None on the others."""
        step = 1
        while step < self.num_ranks:
            if self.rank % (2 * step):
                self._send(value, self.rank - step)
                return None
            if self.rank + step < self.num_ranks:
                value = merge(value, self._receive(self.rank + step))
            step *= 2
        return value

    def _send(self, value: Any, rank: int) -> None:
        to = torch.distributed.get_global_rank(self.group, rank)
        _talking(lambda: torch.distributed.send_object_list([value], to, self.group))

    def _receive(self, rank: int) -> Any:
        found: list[Any] = [None]
        sender = torch.distributed.get_global_rank(self.group, rank)
        _talking(lambda: torch.distributed.recv_object_list(found, sender, self.group))
        return found[0]


def _talking(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise RecordingError(
            f"the ranks could not put their tokens together: {first}", _HINT
        ) from (error)


def ranks_of(rank: int | None, num_ranks: int | None, group: Any = None) -> Ranks:
    """Those that were told, else those of ``torch.distributed`` where it is in use.

    Raises
    ------
    UsageError
        When one is told without the other, or there is no such rank.
    """
    if (rank is None) != (num_ranks is None):
        raise UsageError("rank and num_ranks are given together, or not at all.")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        group = group or distributed.group.WORLD
        own = Ranks(distributed.get_rank(group), distributed.get_world_size(group), group)
        if rank in (None, own.rank) and num_ranks in (None, own.num_ranks):
            return own
    told = Ranks(rank or 0, num_ranks or 1)
    if not 0 <= told.rank < told.num_ranks:
        raise UsageError(
            f"rank {told.rank} of {told.num_ranks}: expected 0 to {told.num_ranks - 1}."
        )
    return told
