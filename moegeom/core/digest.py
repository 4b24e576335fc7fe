"""SHA-256 of values and files: whatever is kept, and believed later, is known again by it.

Keys are forged where their hash can be: two checkpoints of one fingerprint would be one checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.files import open_raw, open_regular
from moegeom.core.limits import HASHED_BYTES

_BLOCK = 1 << 20


def digest_of(*values: Any) -> str:
    """SHA-256, in hex, of values of any kinds that JSON has, arrays, bytes, paths and records.

    Each value goes in with its kind and its length, so that no two lists of values are one text.
    The order of mappings and sets does not count. 64 characters; TypeError for other kinds.
    """
    return sha256_of(*values).hexdigest()


def digits_of(fingerprint: str) -> str:
    """The hex digits of ``sha256:...``."""
    return fingerprint.rpartition(":")[2]


def sha256_of(*values: Any) -> hashlib._Hash:
    """The same as the object of hashlib, for its bytes."""
    state = hashlib.sha256()
    for value in values:
        _add(state, value)
    return state


def digest_of_file(path: Path) -> str:
    """SHA-256, in hex, of what a file holds; OSError where it cannot be read."""
    state = hashlib.sha256()
    with open_regular(path, follows=True) as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return state.hexdigest()


def _add(state: hashlib._Hash, value: Any) -> None:
    if isinstance(value, np.ndarray):
        state.update(f"array {value.dtype.name} {value.dtype.str} {value.shape}\n".encode())
        state.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    elif isinstance(value, str | bytes | Path):
        raw = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
        state.update(f"{'bytes' if isinstance(value, bytes) else 'text'} {len(raw)}\n".encode())
        state.update(raw)
    elif isinstance(value, np.generic):
        _add(state, value.item())
    elif isinstance(value, int | float | None):
        state.update(f"number {value!r}\n".encode())
    elif isinstance(value, Mapping):
        state.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=str):
            _add(state, key)
            _add(state, value[key])
    elif isinstance(value, Sequence | Set):
        state.update(f"list {len(value)}\n".encode())
        for one in sorted(value, key=str) if isinstance(value, Set) else value:
            _add(state, one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _add(state, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    else:
        raise TypeError(f"{type(value).__name__}: no value that has a digest")


# -------------------------------------------------------------------------------------------- files
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
    return [
        (*_of_stats([file]), digest_of_file(file), "") if is_small else _at_places(file)
        for file in files
    ]


def is_unchanged(path: Path, identity: Identity) -> bool:
    """Whether a file has the size and the time of change that it had."""
    try:
        return _of_stats(_inside(path) if path.is_dir() else [path]) == identity[:2]
    except OSError:
        return False


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
