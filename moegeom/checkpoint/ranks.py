"""What several ranks saved: tensors in pieces, checked to be whole and put together, and copies of
those that are not cut, in files or folders of several ranks.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np

from moegeom.checkpoint.dtypes import empty_array, numpy_dtype
from moegeom.checkpoint.reading import CountingFile, Folder, LocalFolder, Location
from moegeom.checkpoint.shards import CheckpointShard, ShardedStore, join_shards
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.limits import SLICE_CELLS
from moegeom.core.shapes import Shaped
from moegeom.core.text import number_of

# ------------------------------------------------------------------------------------------- copies
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
        if are_ranks(ranks) or ranks == ["mp_rank_00"]:  # of Megatron, on one rank
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


# ------------------------------------------------------------------------------------------- pieces
_ALL_FILES = "Copy the files of all ranks into one folder, from every node."


class SliceSource(Protocol):
    """A piece as it is stored."""

    def read(self) -> Shaped[np.ndarray, "*shape"]:
        """The piece in the dtype it is stored in."""
        ...

    def read_bytes(self, start: int, size: int) -> bytes:
        """``size`` bytes of the piece in C order, from byte ``start`` of it."""
        ...


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: ``info`` is its own dtype, shape and place, ``offsets`` its corner."""

    offsets: tuple[int, ...]
    info: TensorInfo
    source: SliceSource

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(o, e) for o, e in zip(self.offsets, self.ends, strict=True))


@dataclass(frozen=True)
class SlicedTensor:
    """A tensor and the pieces that tile it. ``info`` places it where its first piece lies."""

    info: TensorInfo
    pieces: tuple[Piece, ...]

    def read(self) -> Shaped[np.ndarray, "*shape"]:
        """The whole tensor."""
        where = f"{self.info.file}: tensor {self.info.name!r}"
        dtype = numpy_dtype(self.info.dtype, where)
        if len(self.pieces) == 1 and self.pieces[0].sizes == self.info.shape:
            return self.pieces[0].source.read()
        whole = empty_array(dtype, self.info.shape, where)
        for piece in self.pieces:
            whole[piece.box] = piece.source.read()
        return whole

    def read_bytes(self, start: int, size: int) -> bytes:
        """``size`` bytes in C order from byte ``start``; of each piece, what lies between."""
        info = self.info
        width = numpy_dtype(info.dtype, f"{info.file}: tensor {info.name!r}").itemsize
        start = min(max(start, 0), info.size_bytes)
        stop = min(start + max(size, 0), info.size_bytes)
        first, last = start // width, -(-stop // width)
        content = bytearray((last - first) * width)
        for piece in self.pieces:
            begin, end = (_num_before(piece, info.shape, at) for at in (first, last))
            raw = (
                piece.source.read_bytes(begin * width, (end - begin) * width)
                if end > begin
                else b""
            )
            for source, target, length in _runs(piece, info.shape, begin, end):
                at, to = (source - begin) * width, (target - first) * width
                content[to : to + length * width] = raw[at : at + length * width]
        return bytes(content[start - first * width : stop - first * width])


@dataclass(frozen=True)
class SlicedShard:
    """A ``Shard`` over every file that holds pieces; a tensor is checked when it is asked for."""

    label: str
    tensor_names: Collection[str]
    tensor: Callable[[str], SlicedTensor]
    file_sizes: Callable[[], Mapping[str, int]]

    @property
    def size_bytes(self) -> int:
        return sum(self.file_sizes().values())

    def names(self) -> Collection[str]:
        return self.tensor_names

    def info(self, name: str) -> TensorInfo:
        return self.tensor(name).info

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        return self.tensor(name).read()

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        return self.tensor(name).read_bytes(start, size)


def join_pieces(
    where: str, name: str, dtype: str, shape: tuple[int, ...], pieces: Sequence[Piece]
) -> SlicedTensor:
    """The tensor that the pieces tile.

    Raises ``CheckpointError`` unless every element lies in exactly one piece and no two pieces
    share stored bytes, so that a tensor is never larger than its files.
    """
    what = f"{where}: tensor {name!r}"
    for piece in pieces:
        _check_piece(what, dtype, shape, piece)
    filled = tuple(piece for piece in pieces if prod(piece.sizes))
    _check_tiling(what, shape, filled)
    stored = sorted(filled, key=lambda p: (p.info.file, p.info.offset))
    for one, next_one in pairwise(stored):
        end = one.info.offset + one.info.size_bytes
        if one.info.file == next_one.info.file and end > next_one.info.offset:
            raise CheckpointError(
                f"{what} has two pieces in the same bytes of {one.info.file}, at {one.offsets} and "
                f"at {next_one.offsets}."
            )
    size_bytes = sum(piece.info.size_bytes for piece in filled)
    first = min(filled or pieces, key=lambda p: p.offsets, default=None)
    at = (first.info.file, first.info.offset) if first else (where, 0)
    return SlicedTensor(TensorInfo(name, dtype, shape, *at, size_bytes), tuple(stored))


def _check_piece(what: str, dtype: str, shape: tuple[int, ...], piece: Piece) -> None:
    if piece.info.dtype != dtype:
        raise CheckpointError(
            f"{what} is {dtype}, and its piece at {piece.offsets} in {piece.info.file} is "
            f"{piece.info.dtype}."
        )
    is_box = len(piece.offsets) == len(piece.sizes) == len(shape)
    is_box = is_box and min(piece.offsets, default=0) >= 0
    if not is_box or any(e > n for e, n in zip(piece.ends, shape, strict=True)):
        raise CheckpointError(
            f"{what} has shape {shape}, and its piece in {piece.info.file} has offsets "
            f"{piece.offsets} and sizes {piece.sizes}, which lie outside."
        )


def _check_tiling(what: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    """Raise unless each element is in one piece, on the grid that the borders of pieces draw.

    A cell is marked at most once before an overlap is found: the cost is the number of cells.
    """
    cuts = [
        sorted({0, n, *(p.offsets[axis] for p in pieces), *(p.ends[axis] for p in pieces)})
        for axis, n in enumerate(shape)
    ]
    grid = [len(cut) - 1 for cut in cuts]
    if prod(grid) > SLICE_CELLS:
        raise CheckpointError(
            f"{what} is cut into {len(pieces)} pieces whose borders draw {prod(grid)} cells, more "
            f"than the {SLICE_CELLS} allowed."
        )
    is_covered = np.zeros(grid, bool)
    for piece in pieces:
        borders = zip(cuts, piece.offsets, piece.ends, strict=True)
        cells = tuple(slice(bisect_left(cut, o), bisect_left(cut, e)) for cut, o, e in borders)
        if is_covered[cells].any():
            raise CheckpointError(
                f"{what} has overlapping pieces: others reach into "
                f"{_region(piece.offsets, piece.ends, shape)} of {piece.info.file}.",
                "Does the folder hold the files of two checkpoints?",
            )
        is_covered[cells] = True
    if not is_covered.all():
        begin, end = _first_gap(is_covered)
        begins = tuple(cut[i] for cut, i in zip(cuts, begin, strict=True))
        ends = tuple(cut[i] for cut, i in zip(cuts, end, strict=True))
        raise CheckpointError(
            f"{what} is not whole: {_region(begins, ends, shape)} are missing.", _ALL_FILES
        )


def _first_gap(is_covered: Shaped[np.ndarray, "*grid"]) -> tuple[list[int], list[int]]:
    """A box of cells that nothing covers, grown from the first one."""
    begin = [int(i) for i in np.unravel_index(int(np.argmin(is_covered)), is_covered.shape)]
    end = [i + 1 for i in begin]
    for axis in reversed(range(len(begin))):
        while end[axis] < is_covered.shape[axis]:
            slab = [slice(b, e) for b, e in zip(begin, end, strict=True)]
            slab[axis] = slice(end[axis], end[axis] + 1)
            if is_covered[tuple(slab)].any():
                break
            end[axis] += 1
    return begin, end


def _region(begins: Sequence[int], ends: Sequence[int], shape: tuple[int, ...]) -> str:
    """A box in words: "rows 8..16 of 64", or every axis where others are cut too."""
    inner = zip(begins[1:], ends[1:], shape[1:], strict=True)
    if shape and all(b == 0 and e == n for b, e, n in inner):
        return f"rows {begins[0]}..{ends[0]} of {shape[0]}"
    axes = ", ".join(f"{b}..{e}" for b, e in zip(begins, ends, strict=True))
    return f"elements [{axes}] of shape {shape}"


def _num_before(piece: Piece, shape: tuple[int, ...], at: int) -> int:
    """Elements of a piece that stand before element ``at`` of the tensor, in C order.

    A piece keeps the order of the tensor: elements between two bounds are one run of the piece.
    """
    if at >= prod(shape):
        return prod(piece.sizes)
    num = 0
    for axis, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
        index, at = divmod(at, prod(shape[axis + 1 :]))
        num += min(max(index - offset, 0), size) * prod(piece.sizes[axis + 1 :])
        if not offset <= index < offset + size:
            break
    return num


def _runs(
    piece: Piece, shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """Elements [begin, end) of a piece as runs: (index in the piece, in the tensor, length)."""
    axis = len(shape)  # the axes from here on are uncut
    while axis and piece.sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    length = prod(piece.sizes[max(axis - 1, 0) :])
    while begin < end:
        rest, target = begin, 0
        for d, offset in enumerate(piece.offsets):
            index, rest = divmod(rest, prod(piece.sizes[d + 1 :]))
            target += (offset + index) * prod(shape[d + 1 :])
        num = min(length - begin % length, end - begin)
        yield begin, target, num
        begin += num
