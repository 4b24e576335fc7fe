"""Files or folders of several ranks, each of which holds a copy of the tensors that are not cut."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.checkpoint.reading import CountingFile, Folder, LocalFolder, Location
from moegeom.checkpoint.shards import CheckpointShard, ShardedStore, join_shards
from moegeom.core.errors import RouterError
from moegeom.core.shapes import Shaped
from moegeom.core.text import number_of

#: The integrity check that such copies break (moegeom/checks/catalogue).
COPIES_DIFFER = "MGI114"

#: The number of a rank in the name of a file: ``model-rank-0``, ``mp_rank_01_model``, ``tp1``.
_RANK = re.compile(r"(?<![a-z])((?:[a-z]{2}_)?rank|tp|ep|mp)([._-]?)[0-9]+", re.IGNORECASE)


def are_ranks(files: Collection[str]) -> bool:
    """True where each name holds the number of a rank, and is there for two ranks or more, for as
    many as every other.
    """
    plain = Counter(_RANK.sub(r"\1\2#", name) for name in files)
    counts = set(plain.values())
    return len(counts) == 1 and min(counts) > 1 and all("#" in name for name in plain)


@dataclass(frozen=True)
class RankFolders(LocalFolder):
    """A folder with a folder for each of ``ranks``, seen as one that holds ``rank_0/FILE``.

    What lies beside weights, such as the config, may lie above them or in the first of them.
    """

    ranks: tuple[str, ...] = ()

    def files(self) -> Sequence[str]:
        return [f"{rank}/{name}" for rank in self.ranks for name in self.beside(rank).files()]

    def has(self, name: str) -> bool:
        return super().has(self._place(name))

    def file(self, name: str) -> CountingFile:
        return super().file(self._place(name))

    def _place(self, name: str) -> str:
        return name if super().has(name) else f"{self.ranks[0]}/{name}"


def of_rank_folders(location: Location) -> Iterator[Location]:
    """The same place with the files of its ranks, where it holds a folder for each."""
    whole = location.folder
    if location.file is None and isinstance(whole, LocalFolder):
        ranks = [n for n in whole.files() if _RANK.search(n) and (whole.path / n).is_dir()]
        if are_ranks(ranks):
            yield Location(RankFolders(**vars(whole), ranks=tuple(ranks)))


def open_files(folder: Folder, shards: Mapping[str, CheckpointShard]) -> ShardedStore:
    """The checkpoint of files without an index; those of ranks may hold copies of one tensor."""
    if not are_ranks(shards):
        return ShardedStore(folder, shards, join_shards(shards, folder.num_parallel))
    copies: dict[str, list[str]] = {}
    shard_of = join_shards(shards, folder.num_parallel, copies)
    return RankedStore(folder, shards, shard_of, copies)


class RankedStore(ShardedStore):
    """A ``TensorStore`` over files of ranks: what is read is the same in every file that holds it.

    ``copies`` names the further files of a tensor. ``read_bytes`` looks at the first one alone.
    """

    def __init__(
        self,
        folder: Folder,
        shards: Mapping[str, CheckpointShard],
        shard_of: Mapping[str, str],
        copies: Mapping[str, Sequence[str]],
    ) -> None:
        super().__init__(folder, shards, shard_of)
        self._copies = copies

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        """The tensor, where all its copies are equal bit for bit.

        Raises
        ------
        RouterError
            Where they are not: no rule says which copy an engine takes.
        """
        values = super().read(name)
        for file in self._copies.get(name, ()):
            other = self._shards[file].read(name)
            if difference := difference_of(values, other):
                raise copies_differ(
                    f"tensor {name!r} is in {self.shard_of[name]} and in {file}", difference
                )
        return values


def difference_of(values: Shaped[np.ndarray, "*shape"], other: Shaped[np.ndarray, "*other"]) -> str:
    """How two copies of a tensor differ; empty when they are equal bit for bit."""
    if (values.dtype, values.shape) != (other.dtype, other.shape):
        return "with other shapes or dtypes"
    one, two = (np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in (values, other))
    if np.array_equal(one, two):
        return ""
    if values.ndim < 2:
        return "with other numbers"
    size = len(one) // len(values)
    rows = (one != two).reshape(len(values), size).any(axis=1).sum()
    return f"with other numbers in {number_of(rows, 'row')} of {len(values):,}"


def copies_differ(where: str, difference: str) -> RouterError:
    """The refusal of a router whose copies are not one."""
    return RouterError(
        f"{where}, {difference}.",
        "Replicas that drifted apart, or slices: join them with the tool that wrote them.",
        code=COPIES_DIFFER,
    )
