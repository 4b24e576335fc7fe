"""What every dialect of routing traces defines: how to see that a file is one, and how to parse it.

A dialect turns bytes into arrays and judges nothing; cleaning is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.errors import UsageError
from moegeom.core.registry import Rooms
from moegeom.tokens.traces.trace import Pieces, Place, Trace


@dataclass(frozen=True)
class Dialect:
    """One engine's or trainer's way to store choices.

    ``versions`` are those whose writer was looked at, ``source`` says where the layout stands.
    ``recognises`` must be strict: a file that it accepts is not offered to other readers.

    ``read`` gives a file whole. With ``pieces`` it may be of any size: they begin at a place that
    an earlier piece ended at, each holds some ``PIECE_BYTES`` of ids, and together they are what
    ``read`` gives. ``files`` are those of a folder that one run wrote. With ``copies``, which is
    what is said of them, files with the choices of an earlier one are left out.
    """

    name: str
    versions: str
    source: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path], Trace]
    pieces: Callable[[Path, Place], Pieces] | None = None
    files: Callable[[Path], Sequence[Path]] | None = None
    copies: str = ""

    def pieces_from(self, path: Path, place: Place) -> Pieces:
        """The pieces of a file from ``place`` on; of a dialect without pieces the whole file."""
        if self.pieces is not None:
            yield from self.pieces(path, place)
        else:
            yield self.read(path), None


DIALECTS = Rooms("dialect", "moegeom.tokens.traces.dialects", Dialect)


def find_dialect(path: Path, asked: str | None) -> Dialect | None:
    """The dialect asked for, else the one that the file itself shows; None if it shows none.

    Raises
    ------
    UsageError
        When there is no such dialect, or the file could be of several.
    """
    if asked is not None:
        return DIALECTS[asked]
    found = [dialect for dialect in DIALECTS.all() if dialect.recognises(path)]
    if len(found) > 1:
        names = ", ".join(dialect.name for dialect in found)
        raise UsageError(f"{path.name}: could be a trace of {names}.", "Say which with --dialect.")
    return found[0] if found else None
