"""The processes of a distributed run: which one this is, how they add up what they have, and how
what each wrote becomes one recording.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from moegeom.core.errors import RecordingError, UsageError
from moegeom.tokens.recording.facts import FACTS_FILE
from moegeom.tokens.recording.merge import merge_recordings

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
        values: list[Any] = [None] * self.num_ranks
        _talking(lambda: torch.distributed.all_gather_object(values, value, self.group))
        return values

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
        values: list[Any] = [None]
        sender = torch.distributed.get_global_rank(self.group, rank)
        _talking(lambda: torch.distributed.recv_object_list(values, sender, self.group))
        return values[0]


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
    ranks = Ranks(rank or 0, num_ranks or 1)
    if not 0 <= ranks.rank < ranks.num_ranks:
        raise UsageError(
            f"rank {ranks.rank} of {ranks.num_ranks}: expected 0 to {ranks.num_ranks - 1}."
        )
    return ranks


_PART = re.compile(r"(\d{5})-of-(\d{5})")


def part_path(out: Path, rank: int, num_ranks: int) -> Path:
    """Where a rank writes: ``out`` itself when it is alone."""
    if num_ranks == 1:
        return out
    return parts_folder(out) / f"{rank:05d}-of-{num_ranks:05d}"


def parts_folder(out: Path) -> Path:
    """The folder with the parts of a recording."""
    return out.with_name(f"{out.name}.parts")


def merge_when_complete(out: Path, num_ranks: int) -> None:
    """Merges the parts of all ranks into ``out`` once the last of them is there.

    Whichever rank ends last does it. No rank waits for another, so that one that failed leaves
    the parts of the others as they are (``merge_parts`` says which are missing).
    """
    if num_ranks == 1:
        return
    folder = parts_folder(out)
    if len(_parts(folder)) < num_ranks or out.exists():
        return
    mark = folder / "merging"
    try:
        # of two ranks that end at the same time, one makes the folder
        mark.mkdir()
    except FileExistsError:
        return
    try:
        merge_parts(out)
    finally:
        shutil.rmtree(mark, ignore_errors=True)


def merge_parts(out: Path) -> Path:
    """The recording ``out`` from its parts, which are removed; for ranks that share no disk.

    Raises
    ------
    RecordingError
        When a part is missing, or two parts do not agree.
    """
    folder = parts_folder(out)
    parts = _parts(folder)
    counts = {int(part.name[-5:]) for part in parts}
    if len(counts) != 1:
        runs = "no parts" if not counts else f"parts of runs of {sorted(counts)} ranks"
        raise RecordingError(
            f"{folder.name}: {runs}; expected the parts of one run.",
            "Remove those of the other run.",
        )
    (num_ranks,) = counts
    there = {int(part.name[:5]) for part in parts}
    missing = sorted(set(range(num_ranks)) - there)
    if missing:
        raise RecordingError(
            f"{folder.name}: the parts of ranks {', '.join(map(str, missing))} of {num_ranks} are "
            "missing.",
            "Copy them here, or record again.",
        )
    merge_recordings(parts, out)
    shutil.rmtree(folder)
    return out


def _parts(folder: Path) -> list[Path]:
    """Complete parts, by rank."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if _PART.fullmatch(path.name) and (path / FACTS_FILE).is_file()
    )
