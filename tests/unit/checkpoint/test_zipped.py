"""Oracle: the zipfile module writes the archives, or reads those made by hand."""

import io
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from moegeom.checkpoint import zipped
from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.checkpoint.zipped import Archive, read_archive
from moegeom.core.errors import CheckpointError

_FILE = "a.zip"
_ENTRIES = {"d/one": b"first", "d/two": b"", "d/three": b"\0" * 50}


def _archive(path: Path, raw: bytes) -> Archive:
    (path / _FILE).write_bytes(raw)
    return read_archive(CountingFile(path / _FILE, _FILE, ReadLog()))


def _refusal(path: Path, raw: bytes, name: str = "d/one") -> str:
    with pytest.raises(CheckpointError) as caught:
        _archive(path, raw).read(name, 100)
    assert caught.value.message.startswith(f"{_FILE}: ")
    return caught.value.message.removeprefix(f"{_FILE}: ")


def _zip(method: int = zipfile.ZIP_STORED) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", method) as archive:
        for name, content in _ENTRIES.items():
            archive.writestr(name, content)
    return raw.getvalue()


def _local(name: bytes, content: bytes, extra: bytes = b"", flags: int = 0) -> bytes:
    size = len(content)
    fields = (b"PK\3\4", 45, flags, 0, 0, 0, 0, size, size, len(name), len(extra))
    return struct.pack("<4sHHHHHIIIHH", *fields) + name + extra + content


def _central(name: bytes, size: int, header: int, extra: bytes = b"") -> bytes:
    crc = zlib.crc32(b"first")  # looked at by the oracle alone
    sizes = (crc, size, size, len(name), len(extra), 0, 0, 0, 0, header)
    return struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 45, 45, 0, 0, 0, 0, *sizes) + name + extra


def _end(start: int, size: int, count: int, comment: bytes = b"") -> bytes:
    fields = (b"PK\5\6", 0, 0, count, count, size, start, len(comment))
    return struct.pack("<4sHHHHIIH", *fields) + comment


def _end_64(start: int, size: int, count: int) -> bytes:
    record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    return record + locator + _end(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFF)


def _whole(local: bytes, central: bytes, count: int) -> bytes:
    return local + central + _end(len(local), len(central), count)


_ONE = _local(b"d/one", b"first")


def test_stored_entries_are_those_that_zipfile_wrote_and_a_header_is_read_once(tmp_path):
    archive = _archive(tmp_path, _zip())
    assert {name: archive.read(name, 50) for name in archive.entries} == _ENTRIES
    assert _archive(tmp_path, _end(0, 0, 0)).entries == {}
    log = ReadLog()
    (tmp_path / _FILE).write_bytes(_zip())
    archive = read_archive(CountingFile(tmp_path / _FILE, _FILE, log))
    opened = log.bytes_read
    archive.read("d/one", 5)
    archive.read("d/one", 5)
    assert log.bytes_read - opened == 30 + len("d/one") + 5 + 5


def test_padding_in_front_of_the_data_is_skipped_and_64_bit_records_are_read(tmp_path):
    local = _local(b"d/one", b"first", extra=b"FB\x04\0pads")
    raw = _whole(local, _central(b"d/one", 5, 0), 1)
    assert zipfile.ZipFile(io.BytesIO(raw)).read("d/one") == b"first"
    archive = _archive(tmp_path, raw)
    assert archive.read("d/one", 5) == b"first"
    assert archive.start("d/one") == len(local) - 5
    other = struct.pack("<HHI", 0xABCD, 4, 7)
    wide = struct.pack("<HHQQQ", 1, 24, 5, 5, 0)
    central = _central(b"d/one", 0xFFFFFFFF, 0xFFFFFFFF, other + wide)
    place_alone = _central(b"d/one", 5, 0xFFFFFFFF, struct.pack("<HHQ", 1, 8, 0))
    for raw in (
        _ONE + central + _end_64(len(_ONE), len(central), 1), _whole(_ONE, place_alone, 1)
    ):  # fmt: skip
        assert zipfile.ZipFile(io.BytesIO(raw)).read("d/one") == b"first"
        assert _archive(tmp_path, raw).read("d/one", 5) == b"first"


def test_entries_that_are_compressed_encrypted_or_large_and_cut_files_are_refused(tmp_path):
    sentence = "'d/three' is compressed or encrypted; torch stores entries as they are."
    assert _refusal(tmp_path, _zip(zipfile.ZIP_DEFLATED), "d/three") == sentence
    raw = bytearray(_zip())
    raw[raw.index(b"PK\1\2") + 8] |= 1
    assert "'d/one' is compressed or encrypted" in _refusal(tmp_path, bytes(raw))
    archive = _archive(tmp_path, _zip())
    with pytest.raises(CheckpointError, match="'d/three' has 50 bytes, more than the 49 allowed"):
        archive.read("d/three", 49)
    stream = io.BytesIO()
    np.save(stream, np.eye(2))
    assert _refusal(tmp_path, stream.getvalue()) == (
        "this is a .npy file, which holds one array without a name; expected an archive, as "
        "torch.save writes it."
    )
    for raw in (_zip()[:size] for size in (10, 30, 100, -1)):
        sentence = f"truncated, has {len(raw)} bytes and no zip directory at their end."
        assert _refusal(tmp_path, raw) == sentence


def _two(second: bytes, size: int, header: int) -> bytes:
    """An archive of two entries, the second one described as given."""
    local = _ONE + _local(b"d/two", b"other")
    return _whole(local, _central(b"d/one", 5, 0) + _central(second, size, header), 2)


_LENGTH = len(_ONE)
_ENTRY = _central(b"d/one", 5, 0)
_NEIGHBOUR = "does not end before its neighbour"


def _first(local: bytes) -> bytes:
    """An archive of one entry, behind this header of its data."""
    return _whole(local, _ENTRY, 1)


_MALFORMED = {
    "the same data twice": (_two(b"d/two", 5, 0), f"'d/one' {_NEIGHBOUR}"),
    "data inside other data": (_two(b"d/two", 5, 9), f"'d/one' {_NEIGHBOUR}"),
    "data in the directory": (_two(b"d/two", 6, _LENGTH), f"'d/two' {_NEIGHBOUR}"),
    "data behind the file": (_two(b"d/two", 5, 10**6), f"'d/two' {_NEIGHBOUR}"),
    "a size of 4 GB": (_two(b"d/two", 0xFFFFFFFE, _LENGTH), f"'d/two' {_NEIGHBOUR}"),
    "a name twice": (_two(b"d/one", 5, _LENGTH), "'d/one' is in it twice"),
    "a way out": (_two(b"d/../../x", 5, _LENGTH), "it names 'd/../../x', which is outside of it"),
    "a root": (_two(b"/x", 5, _LENGTH), "it names '/x', which is outside of it"),
    "no name": (_two(b"", 5, _LENGTH), "it names '', which is outside of it"),
    "a name with NUL": (_two(b"a\0b", 5, _LENGTH), "it names 'a\\x00b', which is outside of it"),
    "a name that is not UTF-8": (_two(b"\xff", 5, _LENGTH), "the name b'\\xff' is not UTF-8"),
    "saturated, without sizes": (_two(b"d/two", 0xFFFFFFFF, 0), "'d/two' lacks its 64-bit sizes"),
    "bytes in front": (b"#!/bin/sh\n" + _zip(), "bytes 162 to 317 are not the end of the file"),
    "a comment": (
        _ONE + _ENTRY + _end(_LENGTH, 51, 1, b"PK\5\6" + bytes(18)),
        "bytes 0 to 0 are not the end of the file",
    ),
    "a directory too short": (_ONE + _end(_LENGTH, 0, 1), "1 entries do not fit into its 0 bytes"),
    "a directory too long": (_whole(_ONE, _ENTRY + b"more", 1), "4 bytes follow its last entry"),
    "another header": (_whole(_ONE, b"x" * 60, 1), "it breaks off at byte 0"),
    "an entry that breaks off": (_whole(_ONE, _ENTRY[:-1], 1), "it breaks off at byte 0"),
    "a promised entry": (_whole(_ONE, _central(b"d/one" * 20, 5, 0), 2), "breaks off at byte 146"),
    "a locator alone": (
        _ONE + struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1) + _end(0, 0, 0),
        "its 64-bit record is not in front of its locator",
    ),
    "another name": (_first(_local(b"d/0ne", b"first")), "'d/one' is not where its entry says"),
    "a longer name": (_first(_local(b"d/one2", b"first")), f"'d/one' {_NEIGHBOUR}"),
    "encrypted": (
        _first(_local(b"d/one", b"first", flags=1)),
        "'d/one' is not where its entry says",
    ),
    "padding over the neighbour": (
        _first(_local(b"d/one", b"fir", extra=b"xx")).replace(b"\5\0\2\0d", b"\5\0\3\0d"),
        f"'d/one' {_NEIGHBOUR}",
    ),
}


@pytest.mark.parametrize(("raw", "sentence"), _MALFORMED.values(), ids=_MALFORMED)
def test_a_malformed_directory_is_refused_in_a_sentence(raw, sentence, tmp_path):
    assert sentence in _refusal(tmp_path, raw).removeprefix("the zip directory is malformed: ")


@pytest.mark.parametrize(("size", "count"), [(46, 10**9), (10**9, 1)])
def test_a_directory_above_the_limits_is_not_read(size, count, tmp_path):
    with (tmp_path / _FILE).open("wb") as file:
        file.truncate(size)  # zeros that take no room on the disk
        file.seek(size)
        file.write(_end_64(0, size, count))
    log = ReadLog()
    with pytest.raises(CheckpointError) as caught:
        read_archive(CountingFile(tmp_path / _FILE, _FILE, log))
    assert caught.value.message == (
        f"{_FILE}: the zip directory claims {count} entries in {size} bytes, more than the "
        f"{zipped.ZIP_ENTRIES} in {zipped.ZIP_DIRECTORY_BYTES} allowed."
    )
    assert log.bytes_read < 100


def test_an_entry_behind_four_gigabytes_is_found(tmp_path):
    begin = 5 * 2**30
    central = _central(b"d/one", 5, 0xFFFFFFFF, struct.pack("<HHQ", 1, 8, begin))
    with (tmp_path / _FILE).open("wb") as file:
        file.truncate(begin)
        file.seek(begin)
        file.write(_ONE + central + _end_64(begin + len(_ONE), len(central), 1))
    with zipfile.ZipFile(tmp_path / _FILE) as oracle:
        assert oracle.read("d/one") == b"first"
    archive = read_archive(CountingFile(tmp_path / _FILE, _FILE, ReadLog()))
    assert archive.read("d/one", 5) == b"first"
