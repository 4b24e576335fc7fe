"""A place in a file that moves on; what lies behind it is fetched in pieces that grow."""

from __future__ import annotations

from struct import Struct
from typing import Any

from moegeom.checkpoint.reading import RangeFile
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import GGUF_HEADER_BYTES, GGUF_STRINGS

#: The first piece holds the header of a file without a vocabulary; each further one is twice as
#: long, so that few are needed and little is read in vain.
_FIRST_PIECE = 2**16
_LARGEST_PIECE = 2**22

_LENGTH = Struct("<Q")

AGAIN = "Download or copy this file again."


class Cursor:
    """Reads numbers, strings and gaps one after the other, from the beginning of a file."""

    def __init__(self, file: RangeFile) -> None:
        self.file = file
        self.file_size = file.size_bytes()
        self._window = b""
        self._window_start = 0
        self._at = 0
        self._piece = _FIRST_PIECE
        self._num_read = 0
        self._num_strings = 0

    @property
    def offset(self) -> int:
        """Position in the file."""
        return self._window_start + self._at

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        self._reach(size)
        start = self._at
        self._at += size
        return self._window[start : self._at]

    def numbers(self, layout: Struct) -> tuple[Any, ...]:
        """The next numbers, of fixed size."""
        self._reach(layout.size)
        found = layout.unpack_from(self._window, self._at)
        self._at += layout.size
        return found

    def length(self) -> int:
        """The next 64-bit count."""
        return self.numbers(_LENGTH)[0]

    def skip(self, size: int) -> None:
        """Move on; what is not fetched yet never is."""
        self._check_inside(size)
        self._at += size

    def skip_strings(self, count: int) -> None:
        """Move behind ``count`` strings, each of which follows its length."""
        self._num_strings += count
        if self._num_strings > GGUF_STRINGS:
            raise CheckpointError(
                f"{self.file.label}: the arrays of the header hold {self._num_strings} strings, "
                f"more than the {GGUF_STRINGS} allowed.",
                AGAIN,
            )
        while count:
            self._reach(_LENGTH.size)
            at, last = self._at, len(self._window) - _LENGTH.size
            while count and at <= last:
                at += _LENGTH.size + _LENGTH.unpack_from(self._window, at)[0]
                count -= 1
            self.skip(at - self._at)

    def _reach(self, size: int) -> None:
        """Have the next ``size`` bytes in the window."""
        if self._at + size <= len(self._window):
            return
        self._check_inside(size)
        start = self.offset
        kept = self._window[self._at :]
        wanted = min(max(self._piece, size), self.file_size - start) - len(kept)
        self._num_read += wanted
        if self._num_read > GGUF_HEADER_BYTES:
            raise CheckpointError(
                f"{self.file.label}: the header is longer than the {GGUF_HEADER_BYTES} bytes "
                "allowed.",
                AGAIN,
            )
        self._window = kept + self.file.read(start + len(kept), wanted)
        self._window_start, self._at = start, 0
        self._piece = min(2 * self._piece, _LARGEST_PIECE)

    def _check_inside(self, size: int) -> None:
        end = self.offset + size
        if end > self.file_size:
            raise truncated(self.file.label, end, self.file_size)


def truncated(file: str, expected: int, found: int) -> CheckpointError:
    """The error for a file that is shorter than its header says."""
    return CheckpointError(
        f"{file}: truncated, has {found} bytes and its header promises {expected}.", AGAIN
    )
