"""What tells a file, or a folder of files, from another one that took its place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moegeom.core.digest import digest_of, digest_of_file
from moegeom.core.files import open_raw
from moegeom.core.limits import HASHED_BYTES

#: Places of a larger file that are looked at, and bytes of each.
_PLACES = 8
_PLACE_BYTES = 4096

#: Size, time of change in nanoseconds, a hash, and what tells a file that was written since.
Identity = tuple[int, int, str, str]


def identity_of(path: Path) -> Identity:
    """What tells a file from another one; OSError where it cannot be read.

    Of a folder the sum, the latest, and hashes of those of the files in it.

    Archives, copies and synchronised folders give files the same time and size. Up to 64 MB every
    byte is hashed. Hashing more would cost as much as measuring it: of larger files, and of files
    that are more together, eight places are, and beside them stand the inode and the time at which
    it changed, which whoever writes to a file cannot set. They differ as well where the same file
    was copied elsewhere: it is then measured again.
    """
    if not path.is_dir():
        return identities_of([path])[0]
    files = _inside(path)
    identities = identities_of(files)
    digests = [(file.name, one[2]) for file, one in zip(files, identities, strict=True)]
    stamps = [one[3] for one in identities if one[3]]
    return (*_of_stats(files), digest_of(digests), digest_of(stamps) if stamps else "")


def identities_of(files: Sequence[Path]) -> list[Identity]:
    """Those of files that are looked at together."""
    is_small = _of_stats(files)[0] <= HASHED_BYTES
    return [_hashed(file) if is_small else _at_places(file) for file in files]


def is_unchanged(path: Path, identity: Identity) -> bool:
    """Whether a file has the size and the time of change that it had."""
    try:
        return _of_stats(_inside(path) if path.is_dir() else [path]) == identity[:2]
    except OSError:
        return False


def _hashed(file: Path) -> Identity:
    digest = digest_of_file(file)
    return (*_of_stats([file]), digest, "")


def _at_places(path: Path) -> Identity:
    with open_raw(path, follows=True) as file:
        status = os.fstat(file.fileno())
        last, places = max(status.st_size - _PLACE_BYTES, 0), []
        for start in sorted({last * i // (_PLACES - 1) for i in range(_PLACES)}):
            file.seek(start)
            places.append(file.read(_PLACE_BYTES) or b"")
    stamp = f"{status.st_ino} {status.st_ctime_ns}"
    return status.st_size, status.st_mtime_ns, digest_of(places), stamp


def _inside(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def _of_stats(files: Sequence[Path]) -> tuple[int, int]:
    """Size and latest change of files together."""
    stats = [file.stat() for file in files]
    return sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)
