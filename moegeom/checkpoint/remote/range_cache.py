"""Parts of remote files on the disk, so that they need not be fetched twice."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from moegeom.core.errors import OutputError
from moegeom.core.files import read_regular, write_whole

#: Reads longer than this are not kept: they would push everything else out.
_LONGEST = 64_000_000

_DIGEST_SIZE = 32


@dataclass
class RangeCache:
    """Files named by the hash of what they hold; each begins with the hash of its content.

    A disk that is full or may not be written to is no error: nothing is kept then. A file that is
    not whole is not there.
    """

    folder: Path
    limit: int
    _lock: Lock = field(default_factory=Lock, repr=False)
    _filled: int | None = None

    def get(self, key: tuple[str, ...]) -> bytes | None:
        """What was put under the key; None when that is gone."""
        path = self._path(key)
        try:
            raw = read_regular(path, _LONGEST + _DIGEST_SIZE)
            content = raw[_DIGEST_SIZE:]
            if hashlib.sha256(content).digest() != raw[:_DIGEST_SIZE]:
                return None
            os.utime(path)
        except OSError:
            return None
        return content

    def put(self, key: tuple[str, ...], content: bytes) -> None:
        """Keep the content, at the cost of the oldest."""
        if len(content) > min(_LONGEST, self.limit - _DIGEST_SIZE):
            return
        path = self._path(key)
        with suppress(OSError, OutputError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, hashlib.sha256(content).digest() + content, mode=0o600, follows=False)
            with self._lock:
                self._make_room(len(content) + _DIGEST_SIZE)

    def _path(self, key: tuple[str, ...]) -> Path:
        name = hashlib.sha256("\0".join(key).encode("utf-8", "surrogatepass")).hexdigest()
        return self.folder / name[:2] / name[2:]

    def _make_room(self, added: int) -> None:
        """Count the folder the first time, and when it is full; other processes write to it too."""
        if self._filled is not None and self._filled + added <= self.limit:
            self._filled += added
            return
        found = sorted(_files(self.folder))
        self._filled = sum(size for _, size, _ in found)
        for _, size, path in found:
            if self._filled <= self.limit:
                break
            path.unlink(missing_ok=True)
            self._filled -= size


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """Time, size and path of everything in the cache."""
    found = []
    for path in folder.glob("[0-9a-f][0-9a-f]/*"):
        with suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    return found
