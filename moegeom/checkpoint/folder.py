"""Where a checkpoint lies: files by name, read by ranges, on a disk or behind a URL."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from moegeom.checkpoint.reading import CountingFile, RangeFile, ReadLog


class Folder(Protocol):
    """A folder of files, by name. Listing it reads no file."""

    @property
    def label(self) -> str:
        """A name to print, without the path to it."""
        ...

    @property
    def log(self) -> ReadLog:
        """What was read of any file in it."""
        ...

    @property
    def parsed(self) -> dict[str, Any]:
        """Objects that were parsed from files of it, by name: a config and an index count once."""
        ...

    @property
    def num_parallel(self) -> int:
        """Reads that are worth making at the same time: 1 where a read costs no waiting."""
        ...

    def files(self) -> Sequence[str]:
        """Names of everything directly in it, sorted."""
        ...

    def has(self, name: str) -> bool:
        """True when the file ``name`` (which may hold ``/``) exists."""
        ...

    def file(self, name: str) -> RangeFile:
        """The file of that name, which need not exist until it is read."""
        ...

    def revision_of(self, names: Collection[str]) -> str:
        """What names this state of the files; "" on a disk, and where nothing tells."""
        ...

    def held(self, name: str, offset: int, size: int) -> AbstractContextManager[None]:
        """While it is open, reads of these bytes cost one request; nothing to do on a disk."""
        ...


@dataclass(frozen=True)
class Location:
    """What somebody pointed at: a folder, or one file in it."""

    folder: Folder
    file: str | None = None

    @property
    def label(self) -> str:
        """The file's name, or the folder's."""
        return self.file or self.folder.label

    @property
    def files(self) -> Sequence[str]:
        """The file alone, or everything in the folder."""
        return self.folder.files() if self.file is None else [self.file]


@dataclass(frozen=True)
class LocalFolder:
    """A folder on a disk."""

    path: Path
    log: ReadLog = field(default_factory=ReadLog)
    num_parallel: int = 1
    parsed: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        return self.path.resolve().name or "checkpoint"

    def files(self) -> Sequence[str]:
        return sorted(entry.name for entry in self.path.iterdir())

    def has(self, name: str) -> bool:
        try:
            return (self.path / name).exists()
        except (OSError, ValueError):  # too long for the file system, or one it cannot spell
            return False

    def file(self, name: str) -> CountingFile:
        return CountingFile(self.path / name, name, self.log)

    def revision_of(self, names: Collection[str]) -> str:
        return ""

    def held(self, name: str, offset: int, size: int) -> AbstractContextManager[None]:
        return nullcontext()

    def beside(self, name: str) -> LocalFolder:
        """Another folder, by its path from this one; its reads are counted here too."""
        return LocalFolder(self.path.resolve() / name, self.log)


def local(path: Path) -> Location:
    """The location of a path that exists."""
    if path.is_dir():
        return Location(LocalFolder(path))
    return Location(LocalFolder(path.parent), path.name)
