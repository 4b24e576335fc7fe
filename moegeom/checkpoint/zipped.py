"""A zip archive whose entries lie in it as they are, read by ranges.

torch stores without compressing, so that an entry is a range of the file. Nothing is decompressed,
and no two entries may share a range: they are never larger than the file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from moegeom.checkpoint.reading import AGAIN, RangeFile, no_collection
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import ZIP_DIRECTORY_BYTES, ZIP_ENTRIES

_LOCAL = struct.Struct("<4s2xHH16xHH")  # flags, method, lengths of name and extra
_CENTRAL = struct.Struct("<4s4xHH8xIIHHHH6xI")  # the same, sizes in between; the header's offset
_END = struct.Struct("<4s6xHIIH")  # entries, size and offset of the directory, comment
_END_64 = struct.Struct("<4s28xQQQ")
_LOCATOR_64 = struct.Struct("<4s4xQ4x")

#: How a file of one array of NumPy begins.
_NPY = b"\x93NUMPY"

_ENCRYPTED = 1
_STORED = 0
_SATURATED = 0xFFFF_FFFF
_EXTRA_64 = 1

#: Names that are empty, absolute, lead upwards, or mean something else on another system.
_OUTSIDE = re.compile(r"^$|^/|(^|/)\.\.(/|$)|[\\:\0]")


class ZipEntry(NamedTuple):
    """One entry: its header begins at ``header``, its ``size`` bytes of data end by ``behind``.

    A tuple, since there may be many.
    """

    name: str
    header: int
    size: int
    is_plain: bool
    behind: int = 0


@dataclass(frozen=True)
class Archive:
    """Entries by name; no two overlap and none lies outside the file."""

    file: RangeFile
    entries: Mapping[str, ZipEntry]
    _starts: dict[str, int] = field(default_factory=dict)

    def start(self, name: str) -> int:
        """Where the data of an entry begins in the file; its header is read the first time.

        An entry that is compressed or encrypted is an error.
        """
        if name not in self._starts:
            self._starts[name] = self._read_start(self.entries[name])
        return self._starts[name]

    def read(self, name: str, limit: int) -> bytes:
        """A whole entry, which may not be longer than ``limit``."""
        size = self.entries[name].size
        if size > limit:
            raise CheckpointError(
                f"{self.file.label}: {name!r} has {size} bytes, more than the {limit} allowed."
            )
        return self.file.read(self.start(name), size)

    def _read_start(self, entry: ZipEntry) -> int:
        """The header repeats the name, and has padding of which the directory does not know."""
        if not entry.is_plain:
            raise CheckpointError(
                f"{self.file.label}: {entry.name!r} is compressed or encrypted; torch stores "
                "entries as they are.",
                "Write the checkpoint again with torch.save.",
            )
        name = entry.name.encode()
        raw = self.file.read(entry.header, _LOCAL.size + len(name))
        signature, flags, method, name_length, extra = _LOCAL.unpack_from(raw)
        start = entry.header + _LOCAL.size + name_length + extra
        if signature != b"PK\3\4" or raw[_LOCAL.size :] != name or not _is_plain(flags, method):
            raise _contradiction(self.file, f"{entry.name!r} is not where its entry says")
        if name_length != len(name) or start + entry.size > entry.behind:
            raise _contradiction(self.file, f"{entry.name!r} does not end before its neighbour")
        return start


def read_archive(file: RangeFile, writer: str = "torch.save", most: int = ZIP_ENTRIES) -> Archive:
    """The entries of a file, of which there may be ``most``; reads the directory at its end.

    ``writer`` is what would have written such an archive, for whoever gives another file.

    Raises
    ------
    CheckpointError
        If the file is no zip archive, is truncated, or has an entry that is outside the file, in
        another one, named twice or named like a path out of a folder.
    """
    start, size, count = _find_directory(file, writer)
    most_bytes = ZIP_DIRECTORY_BYTES * most // ZIP_ENTRIES
    if count > most or size > most_bytes:
        raise CheckpointError(
            f"{file.label}: the zip directory claims {count} entries in {size} bytes, more than "
            f"the {most} in {most_bytes} allowed."
        )
    if size < count * _CENTRAL.size:
        raise _contradiction(file, f"{count} entries do not fit into its {size} bytes")
    with no_collection():
        return Archive(file, _read_entries(file, file.read(start, size), count, start))


def _read_entries(file: RangeFile, raw: bytes, count: int, start: int) -> Mapping[str, ZipEntry]:
    """Entries by name from the directory ``raw``, which begins at ``start``."""
    by_offset = sorted(_parse(file, raw, count), key=lambda entry: entry.header)
    entries: dict[str, ZipEntry] = {}
    ends = [*(entry.header for entry in by_offset[1:]), start]
    for entry, behind in zip(by_offset, ends, strict=False):  # an empty directory has one end
        name = entry.name
        if entry.header + _LOCAL.size + len(name.encode()) + entry.size > behind:
            raise _contradiction(file, f"{name!r} does not end before its neighbour")
        if name in entries:
            raise _contradiction(file, f"{name!r} is in it twice")
        entries[name] = entry._replace(behind=behind)
    return entries


def _find_directory(file: RangeFile, writer: str) -> tuple[int, int, int]:
    """Start, size in bytes and number of entries of the directory, which ends the file."""
    file_size = file.size_bytes()
    tail_size = min(file_size, _END_64.size + _LOCATOR_64.size + _END.size)
    tail = file.read(file_size - tail_size, tail_size)
    at = tail_size - _END.size
    if at < 0 or tail[at : at + 4] != b"PK\5\6":
        raise _no_directory(file, file_size, writer)
    _, count, size, start, comment = _END.unpack_from(tail, at)
    if at >= _LOCATOR_64.size and tail[at - _LOCATOR_64.size :].startswith(b"PK\6\7"):
        at -= _LOCATOR_64.size + _END_64.size
        if at < 0 or tail[at : at + 4] != b"PK\6\6":
            raise _contradiction(file, "its 64-bit record is not in front of its locator")
        _, count, size, start = _END_64.unpack_from(tail, at)
    if comment or start + size != file_size - tail_size + at:
        raise _contradiction(file, f"bytes {start} to {start + size} are not the end of the file")
    return start, size, count


def _no_directory(file: RangeFile, file_size: int, writer: str) -> CheckpointError:
    head = file.read(0, min(len(_NPY), file_size))
    if head.startswith(b"PK\3\4"):
        return CheckpointError(
            f"{file.label}: truncated, has {file_size} bytes and no zip directory at their end.",
            AGAIN,
        )
    if head == _NPY:
        return CheckpointError(
            f"{file.label}: this is a .npy file, which holds one array without a name; expected an "
            f"archive, as {writer} writes it."
        )
    return CheckpointError(f"{file.label}: is no zip archive, as {writer} writes it.")


def _parse(file: RangeFile, raw: bytes, count: int) -> Iterator[ZipEntry]:
    """Every entry, without its end."""
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(raw):
            raise _contradiction(file, f"it breaks off at byte {at}")
        row = _CENTRAL.unpack_from(raw, at)
        signature, flags, method, packed, size, name_length, extra, comment, _, header = row
        name_end = at + _CENTRAL.size + name_length
        behind = name_end + extra + comment
        if signature != b"PK\1\2" or behind > len(raw):
            raise _contradiction(file, f"it breaks off at byte {at}")
        name = _name(file, raw[at + _CENTRAL.size : name_end])
        wide = _widen([size, packed, header], raw[name_end : name_end + extra])
        if wide is None:
            raise _contradiction(file, f"{name!r} lacks its 64-bit sizes")
        size, packed, header = wide
        yield ZipEntry(name, header, packed, _is_plain(flags, method) and packed == size)
        at = behind
    if at != len(raw):
        raise _contradiction(file, f"{len(raw) - at} bytes follow its last entry")


def _is_plain(flags: int, method: int) -> bool:
    return method == _STORED and not flags & _ENCRYPTED


def _name(file: RangeFile, raw: bytes) -> str:
    try:
        name = str(raw, "utf-8")
    except UnicodeDecodeError:
        raise _contradiction(file, f"the name {raw[:80]!r} is not UTF-8") from None
    if _OUTSIDE.search(name):
        raise _contradiction(file, f"it names {name[:80]!r}, which is outside of it")
    return name


def _widen(sizes: list[int], extra: bytes) -> list[int] | None:
    """The sizes with each saturated one replaced by the next 64-bit one of the extra field."""
    if _SATURATED not in sizes:
        return sizes
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        values = [extra[i : i + 8] for i in range(at + 4, min(at + 4 + length, len(extra)), 8)]
        if kind == _EXTRA_64 and len(values) >= sizes.count(_SATURATED):
            wide = iter(values)
            return [int.from_bytes(next(wide), "little") if s == _SATURATED else s for s in sizes]
        at += 4 + length
    return None


def _contradiction(file: RangeFile, flaw: str) -> CheckpointError:
    return CheckpointError(f"{file.label}: the zip directory is malformed: {flaw}.", AGAIN)
