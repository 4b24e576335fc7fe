"""What every storage format offers to the stages above it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moegeom.checkpoint.folder import Location
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


@dataclass(frozen=True)
class Format:
    """One storage format: how to see that a location holds one, and how to open it."""

    name: str
    recognises: Callable[[Location], bool]
    open: Callable[[Location], TensorStore]
