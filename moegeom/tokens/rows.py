"""Rows of arrays on disk, read range by range into an array of the caller."""

from __future__ import annotations

from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Shaped

from moegeom.core.errors import RecordingError
from moegeom.core.files import open_raw
from moegeom.tokens.ranges import shard_ranges

#: Bytes converted at a time: the scratch stays in cache, and memory does not depend on the range.
SCRATCH_BYTES = 1 << 20


class Rows(Protocol):
    """An array that can be read by ranges of rows, from several threads at once.

    ``row_shape`` is the shape of one row, ``width`` the count of its numbers: a row of more
    dimensions is read flat, the last dimension running fastest.
    """

    @property
    def dtype(self) -> np.dtype:
        """As stored; float32 where parts differ."""
        ...

    @property
    def num_rows(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def row_shape(self) -> tuple[int, ...]: ...

    def read_into(self, start: int, out: Shaped[np.ndarray, "rows width"]) -> None:
        """Fill ``out`` (float32, int32 or as stored) with rows ``[start, start + len(out))``."""
        ...


def assign_rows(out: Shaped[np.ndarray, "rows width"], stored: np.ndarray, where: str) -> None:
    """Convert ``stored`` into ``out``; an integer that does not fit is an error."""
    if stored.dtype.kind in "iu" and stored.size and not np.can_cast(stored.dtype, out.dtype):
        limits = np.iinfo(out.dtype)
        low, high = int(stored.min()), int(stored.max())
        if low < limits.min or high > limits.max:
            raise RecordingError(f"{where}: holds {low} to {high}; expected {out.dtype} numbers.")
    # A float64 beyond float32 becomes inf, which the scan counts as not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = stored


@dataclass(frozen=True, eq=False)
class ArrayRows:
    """An array that is in memory already."""

    array: Shaped[np.ndarray, "rows *row"]
    where: str

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def num_rows(self) -> int:
        return self.array.shape[0]

    @property
    def width(self) -> int:
        return prod(self.row_shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.array.shape[1:]

    def read_into(self, start: int, out: Shaped[np.ndarray, "rows width"]) -> None:
        stored = self.array[start : start + len(out)]
        assign_rows(out, stored.reshape(out.shape), self.where)


@dataclass(frozen=True)
class FileRows:
    """A C-ordered array lying in one file. Each read opens the file anew, so threads share none."""

    path: Path
    offset: int
    dtype: np.dtype
    num_rows: int
    row_shape: tuple[int, ...]

    @property
    def width(self) -> int:
        return prod(self.row_shape)

    def read_into(self, start: int, out: Shaped[np.ndarray, "rows width"]) -> None:
        row_bytes = self.width * self.dtype.itemsize
        try:
            with open_raw(self.path, follows=True) as file:
                file.seek(self.offset + start * row_bytes)
                if out.dtype == self.dtype and out.flags.c_contiguous:
                    self._fill(file, out)
                else:
                    self._convert(file, out, max(1, SCRATCH_BYTES // row_bytes))
        except OSError as error:
            raise RecordingError(
                f"{self.path.name}: cannot be read ({error.strerror}).",
                "It was there when it was opened; was it moved?",
            ) from None

    def _convert(self, file: FileIO, out: Shaped[np.ndarray, "rows width"], step: int) -> None:
        scratch = np.empty((min(step, len(out)), self.width), self.dtype)
        for first in range(0, len(out), step):
            part = scratch[: min(step, len(out) - first)]
            self._fill(file, part)
            assign_rows(out[first : first + step], part, self.path.name)

    def _fill(self, file: FileIO, array: Shaped[np.ndarray, "rows width"]) -> None:
        view = memoryview(array.reshape(-1).view(np.uint8).data)
        while view:
            count = file.readinto(view)
            if not count:
                raise RecordingError(
                    f"{self.path.name}: the file ends {len(view)} bytes too early.",
                    "It was cut off or changed while it was read; copy it again.",
                )
            view = view[count:]


@dataclass(frozen=True)
class ShardedRows:
    """Several arrays of one row shape, one after the other."""

    parts: tuple[Rows, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, parts: tuple[Rows, ...]) -> ShardedRows:
        """The concatenation of ``parts``."""
        return cls(parts, tuple(accumulate((part.num_rows for part in parts), initial=0)))

    @property
    def dtype(self) -> np.dtype:
        dtypes = {part.dtype for part in self.parts}
        return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    @property
    def width(self) -> int:
        return self.parts[0].width

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.parts[0].row_shape

    def read_into(self, start: int, out: Shaped[np.ndarray, "rows width"]) -> None:
        for shard, first, last in shard_ranges(self.starts, start, start + len(out)):
            where = self.starts[shard] + first - start
            self.parts[shard].read_into(first, out[where : where + last - first])
