"""What every storage format offers to the stages above it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

import numpy as np

from moegeom.checkpoint.reading import Location
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from moegeom.core.shapes import Shaped


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. ``dtype`` is spelled as in safetensors (``"BF16"``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    size_bytes: int


def is_count(number: object) -> bool:
    """Whether a value of a file is a whole number that elements, bytes or offsets can have."""
    return type(number) is int and 0 <= number <= limits.LARGEST_COUNT


def check_apart(
    spans: Iterable[tuple[int, int, str]], file: str, what: str = "tensors", hint: str = ""
) -> None:
    """Raise if two of the spans (begin, end, name) of a file share a byte.

    What is read of a file without shared bytes is never more than the file.
    """
    last, last_end = "", 0
    for begin, end, name in sorted(spans):
        if begin >= end:
            continue
        if begin < last_end:
            raise CheckpointError(
                f"{file}: the {what} {last!r} and {name!r} both claim the bytes {begin} to "
                f"{min(end, last_end)}.",
                hint,
            )
        last, last_end = name, end


class TensorStore(Protocol):
    """A checkpoint: named tensors that are read one at a time.

    Opening reads names; ``info`` may read the header of one shard; ``read`` reads one tensor.
    """

    @property
    def label(self) -> str:
        """A name to print, without the path to it."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """``config.json`` as it stands; empty when the checkpoint has none."""
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes read so far: index, config, headers and tensors."""
        ...

    @property
    def bytes_total(self) -> int:
        """Size of all that there is to read: the weight files, their index and the config."""
        ...

    @property
    def revision(self) -> str:
        """What names this state of a remote checkpoint: a commit or a digest of ETags; else ""."""
        ...

    def names(self) -> Collection[str]:
        """Names of all tensors; asking whether one is in it takes constant time."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies, checked against the size of its file."""
        ...

    def is_open(self, name: str) -> bool:
        """Whether ``info`` of a tensor reads no further byte."""
        ...

    def are_alike(self, names: Collection[str]) -> bool:
        """Whether open headers give all one dtype and shape, as far as that is known at once."""
        ...

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        """The tensor in the dtype it is stored in."""
        ...

    def prepare(self, names: Iterable[str]) -> None:
        """Open what ``info`` of these tensors needs, at the same time where that saves waiting."""
        ...

    def read_many(self, names: Iterable[str]) -> Iterator[tuple[str, Shaped[np.ndarray, "*shape"]]]:
        """Names and tensors, each once, in the order of file, offset and name."""
        ...

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        """``size`` bytes of a tensor as stored, from byte ``start`` of it."""
        ...


@dataclass(frozen=True, eq=False)
class StoreOver:
    """A ``TensorStore`` over another one, ``store``, which answers what a kind of it does not."""

    store: TensorStore

    @property
    def label(self) -> str:
        return self.store.label

    @property
    def config(self) -> Mapping[str, Any]:
        return self.store.config

    @property
    def bytes_read(self) -> int:
        return self.store.bytes_read

    @property
    def bytes_total(self) -> int:
        return self.store.bytes_total

    @property
    def revision(self) -> str:
        return self.store.revision

    def names(self) -> Collection[str]:
        return self.store.names()

    def is_open(self, name: str) -> bool:
        return self.store.is_open(name)

    def are_alike(self, names: Collection[str]) -> bool:
        return False

    def prepare(self, names: Iterable[str]) -> None:
        self.store.prepare(names)


@dataclass(frozen=True)
class Format:
    """One storage format: how to see that a location holds one, and how to open it."""

    name: str
    recognises: Callable[[Location], bool]
    open: Callable[[Location], TensorStore]


# -------------------------------------------------------------------------------------------- names
def check_names(names: Collection[str], where: str) -> None:
    """Raise if there are more tensors than any checkpoint has, or one has a longer name."""
    if len(names) > limits.TENSORS:
        raise CheckpointError(
            f"{where} describes {len(names)} tensors, more than the {limits.TENSORS} allowed."
        )
    longest = max(map(len, names), default=0)
    if longest > limits.NAME_LENGTH:
        raise CheckpointError(
            f"{where} has a name of {longest} characters, more than the {limits.NAME_LENGTH} "
            "allowed."
        )


def is_inside(file: str) -> bool:
    """True for a path that stays in its folder, on every system."""
    path = PurePosixPath(file)
    leads_out = not path.parts or path.is_absolute() or ".." in path.parts
    return not leads_out and not any(c in file for c in "\\:\0")
