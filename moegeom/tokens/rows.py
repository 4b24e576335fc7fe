"""Arrays read by ranges of rows into an array of the caller, and a source made of them.

Recordings, foreign files and traces are all opened as such a source.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from moegeom.core.errors import CheckpointError, InternalError, RecordingError
from moegeom.core.files import open_raw
from moegeom.core.registry import unknown_name
from moegeom.core.shapes import Float32, Int32, Int64, Shaped
from moegeom.core.tokens import SourceFacts, TokenColumns, TopLogits, gpu_of
from moegeom.tokens.stages import CHOSEN, TOP_EXPERT, TOP_LOGITS, VALUE_STAGES, check_output_kind

T = TypeVar("T")


@contextmanager
def as_recording_error() -> Iterator[None]:
    """A block in which what a reader of checkpoints refuses is refused as a file of tokens."""
    try:
        yield
    except CheckpointError as error:
        raise RecordingError(error.message, error.hint) from None


def check_range(facts: SourceFacts, start: int, stop: int) -> None:
    """Raise unless the source has tokens ``[start, stop)``; asking for others is a bug of ours."""
    if not 0 <= start <= stop <= facts.num_tokens:
        raise InternalError(
            f"{facts.name}: tokens [{start}, {stop}) were asked for; it has {facts.num_tokens}."
        )


def consecutive(numbers: Int64[np.ndarray, "numbers"]) -> Iterator[tuple[int, int]]:
    """Ranges ``[start, stop)`` of numbers that follow one another by one, in their order."""
    edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    for first, last in pairwise(edges):
        if last > first:
            yield int(numbers[first]), int(numbers[last - 1]) + 1


def shard_ranges(starts: tuple[int, ...], start: int, stop: int) -> list[tuple[int, int, int]]:
    """(shard, first, last) of every piece of ``[start, stop)``, in rows of that shard.

    ``starts`` has one entry more than there are shards: the total.
    """
    if start >= stop:
        return []
    pieces = []
    for shard in range(bisect_right(starts, start) - 1, len(starts) - 1):
        low, high = starts[shard], starts[shard + 1]
        if low >= stop:
            break
        if low < high:
            pieces.append((shard, max(start, low) - low, min(stop, high) - low))
    return pieces


class Cache(Generic[T]):
    """What was made last, by a key, as long as the sizes together are no more than ``most``.

    The last ``least`` stay whatever they take. Threads that want the same make it once.
    """

    def __init__(self, most: int, size: Callable[[T], int], least: int = 1) -> None:
        self._most, self._size, self._least = most, size, least
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()
        self._making: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, which ``make`` gives where it is not there."""
        with self._lock:
            making = self._making[key]
        with making:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
            value = make()
            with self._lock:
                self._values[key] = value
                total = sum(map(self._size, self._values.values()))
                while total > self._most and len(self._values) > self._least:
                    total -= self._size(self._values.popitem(last=False)[1])
        return value


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


def read_rows(
    rows: Rows, start: int, stop: int, dtype: type | np.dtype | None = None
) -> Shaped[np.ndarray, "rows *row"]:
    """Rows ``[start, stop)`` in memory, as stored where no dtype is named."""
    out = np.empty((max(stop - start, 0), rows.width), rows.dtype if dtype is None else dtype)
    rows.read_into(start, out)
    return out.reshape(len(out), *rows.row_shape)


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


@dataclass(frozen=True, eq=False)
class TensorRows:
    """A tensor [rows, width] of whatever library in the memory of a GPU.

    A GPU that routes takes it by DLPack; whoever reads gets a copy of the rows that are read.
    """

    tensor: Any
    where: str

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(dtype_name(self.tensor))

    @property
    def num_rows(self) -> int:
        return self.tensor.shape[0]

    @property
    def width(self) -> int:
        return self.tensor.shape[1]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (self.width,)

    def read_into(self, start: int, out: Shaped[np.ndarray, "rows width"]) -> None:
        assign_rows(out, as_array(self.tensor[start : start + len(out)]), self.where)


def dtype_name(array: Any) -> str:
    """The dtype of an array of any library as NumPy calls it: ``bfloat16`` for torch.bfloat16."""
    return str(array.dtype).rpartition(".")[2]


def as_array(value: Any) -> Shaped[np.ndarray, "..."]:
    """The numbers as NumPy has them; a tensor of a device is copied to the host.

    NumPy has no bfloat16 of its own: tensors of it are widened to float32, which changes none.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if dtype_name(value) == "bfloat16" else value
    elif gpu_of(value) is not None and hasattr(value, "get"):  # CuPy copies nothing unasked
        value = value.get()
    return np.asarray(value)


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
    """Arrays of one row shape in several files, one after the other."""

    parts: tuple[FileRows, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, parts: tuple[FileRows, ...]) -> ShardedRows:
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


class ColumnSource(Protocol):
    """Anything that has token columns for ranges of tokens."""

    def read(self, start: int, stop: int) -> TokenColumns: ...


class StoredSource:
    """Reads ranges of whatever ``tensors`` (by router, then by tensor name) hold."""

    def __init__(
        self,
        facts: SourceFacts,
        tensors: Mapping[str, Mapping[str, Rows]],
        columns: ColumnSource,
        flips: Mapping[str, Mapping[str, np.ndarray]] = MappingProxyType({}),
    ) -> None:
        self._facts, self._flips = facts, flips
        self._tensors = tensors
        self._columns = columns

    @property
    def facts(self) -> SourceFacts:
        return self._facts

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        check_range(self._facts, start, stop)
        return self._columns.read(start, stop)

    def read_values(
        self, router: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens width"]:
        if self._facts.stage not in VALUE_STAGES:
            raise self._absent("hidden states or logits of every expert")
        return self._read(router, self._facts.stage, start, stop, np.float32)

    def stored_dtype(self, router: str) -> np.dtype:
        return self.rows(router, self._facts.stage).dtype

    def read_stored(self, router: str, start: int, out: Shaped[np.ndarray, "tokens width"]) -> None:
        check_range(self._facts, start, start + len(out))
        self.rows(router, self._facts.stage).read_into(start, out)

    def tensor(self, router: str) -> Any:
        rows = self.rows(router, self._facts.stage)
        return rows.tensor if isinstance(rows, TensorRows) else None

    def made_flips(self, router: str) -> Mapping[str, np.ndarray] | None:
        return self._flips.get(router)

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        if self._facts.stage != "top_logits":
            raise self._absent("top logits")
        return TopLogits(
            logits=self._read(router, TOP_LOGITS.name, start, stop, np.float32),
            expert=self._read(router, TOP_EXPERT.name, start, stop, np.int32),
        )

    def read_chosen(
        self, router: str, start: int, stop: int
    ) -> Int32[np.ndarray, "tokens top_k"] | None:
        if not self._facts.has_chosen:
            return None
        return self._read(router, CHOSEN.name, start, stop, np.int32)

    def read_output(
        self, router: str, kind: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens *width"] | None:
        check_output_kind(kind)
        if kind not in self._facts.outputs:
            return None
        return self._read(router, kind, start, stop, np.float32)

    def _read(
        self, router: str, tensor: str, start: int, stop: int, dtype: type
    ) -> Shaped[np.ndarray, "tokens *width"]:
        check_range(self._facts, start, stop)
        return read_rows(self.rows(router, tensor), start, stop, dtype)

    def rows(self, router: str, tensor: str) -> Rows:
        """The rows of a tensor of a router, as they are stored."""
        if router not in self._tensors:
            error = unknown_name(f"router in {self._facts.name}", router, self._tensors)
            raise RecordingError(error.message, error.hint)
        return self._tensors[router][tensor]

    def _absent(self, numbers: str) -> RecordingError:
        return RecordingError(
            f"{self._facts.name} was recorded at stage {self._facts.stage}; "
            f"it does not hold {numbers}."
        )
