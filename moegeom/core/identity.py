"""What tells a file, or a folder of files, from another one that took its place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moegeom.core.digest import digest_of
from moegeom.core.files import open_raw

#: Places of a file that are looked at, and bytes of each.
_PLACES = 8
_PLACE_BYTES = 4096

#: Size, time of change in nanoseconds, and a hash of a few places.
Identity = tuple[int, int, str]


def identity_of(path: Path) -> Identity:
    """Size, time of change, and a hash of a few places of a file; OSError where it cannot be read.

    Of a folder the sum, the latest, and a hash of those of the files in it.

    Archives, copies and synchronised folders give files the same time and size, and recordings of
    two runs differ everywhere. Inodes and times of the inode are left out: they change when the
    same files are copied or mounted elsewhere. One place changed by hand under the old time of
    change can go unnoticed.
    """
    if path.is_dir():
        files = _inside(path)
        identities = [identity_of(file) for file in files]
        digests = [(f.name, digest) for f, (_, _, digest) in zip(files, identities, strict=True)]
        return (*_of_stats(files), digest_of(digests))
    with open_raw(path, follows=True) as file:
        status = os.fstat(file.fileno())
        last, places = max(status.st_size - _PLACE_BYTES, 0), []
        for start in sorted({last * i // (_PLACES - 1) for i in range(_PLACES)}):
            file.seek(start)
            places.append(file.read(_PLACE_BYTES) or b"")
    return status.st_size, status.st_mtime_ns, digest_of(places)


def is_unchanged(path: Path, identity: Identity) -> bool:
    """Whether a file has the size and the time of change that it had."""
    try:
        return _of_stats(_inside(path) if path.is_dir() else [path]) == identity[:2]
    except OSError:
        return False


def _inside(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def _of_stats(files: Sequence[Path]) -> tuple[int, int]:
    """Size and latest change of files together."""
    stats = [file.stat() for file in files]
    return sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)
