"""JSON that nobody vouches for, one record at a time: lines, one object, or a list of objects."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.core.documents import DocumentError, json_value
from moegeom.core.errors import RecordingError
from moegeom.core.files import open_regular
from moegeom.core.limits import BLANK_LINES, RECORD_BYTES, RECORD_VALUES
from moegeom.tokens.traces.trace import BEGINNING, Place

#: What is looked at to recognise a file: past long texts and token ids of the first answers.
_LOOKED_AT = 8_000_000

_SUFFIXES = (".jsonl", ".ndjson", ".json")


def shows(path: Path, *patterns: bytes) -> bool:
    """Whether a JSON file has every one of ``patterns`` near its beginning."""
    if not path.name.endswith(_SUFFIXES) or not path.is_file():
        return False
    with open_regular(path, follows=True) as stream:
        beginning = stream.read(_LOOKED_AT)
    return all(re.search(pattern, beginning) for pattern in patterns)


@dataclass(frozen=True)
class JsonRecord:
    """An object, its place in the file in words, and where the one behind it begins."""

    where: str
    found: dict[str, Any]
    following: Place


def json_records(path: Path, place: Place = BEGINNING) -> Iterator[JsonRecord]:
    """Every record from ``place`` on, lines one by one, whatever the size of the file.

    Raises
    ------
    RecordingError
        When a record is too large, malformed, or no object.
    """
    with open_regular(path, follows=True) as stream:
        first = stream.readline(RECORD_BYTES + 1)
        stream.seek(place[0])
        if _is_object(first):
            yield from _lines(path.name, stream.readline, place)
        else:
            yield from _document(path.name, stream.read(RECORD_BYTES + 1))


def whole_number(record: Mapping[str, Any], key: str, where: str) -> int:
    """The number from 0 to 2^31 - 1 that a record holds under ``key``.

    Raises
    ------
    RecordingError
        When there is none.
    """
    value = record.get(key)
    if type(value) is not int or not 0 <= value < 2**31:
        raise RecordingError(f"{where}: '{key}' is {value!r:.40}; expected a whole number.")
    return value


def _lines(name: str, read: Callable[[int], bytes], place: Place) -> Iterator[JsonRecord]:
    offset, number = place
    left = BLANK_LINES
    while line := read(RECORD_BYTES + 1):
        number += 1
        offset += len(line)
        if line.strip():
            where = f"{name}: line {number}"
            yield JsonRecord(where, _object(_parse(line, where), where), (offset, number))
        elif (left := left - 1) < 0:
            raise RecordingError(f"{name}: has more than {BLANK_LINES:,} lines without anything.")


def _document(name: str, raw: bytes) -> Iterator[JsonRecord]:
    found = _parse(raw, name)
    for number, item in enumerate(found if isinstance(found, list) else [found], start=1):
        where = f"{name}: entry {number}" if isinstance(found, list) else name
        yield JsonRecord(where, _object(item, where), BEGINNING)


def _is_object(line: bytes) -> bool:
    """Whether a first line is a record of its own."""
    text = line.strip()
    return text.startswith(b"{") and text.endswith(b"}")


def _object(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise RecordingError(f"{where}: holds a {type(found).__name__}; expected an object.")
    return found


def _parse(raw: bytes, where: str) -> Any:
    if len(raw) > RECORD_BYTES:
        raise RecordingError(
            f"{where}: has more than the {RECORD_BYTES:,} bytes allowed for one record.",
            "Write one response per line (JSONL).",
        )
    values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values > RECORD_VALUES:
        raise RecordingError(
            f"{where}: has {values:,} values, more than the {RECORD_VALUES:,} allowed in one "
            "record.",
            "Write one response per line; newer engines write ids as base64.",
        )
    try:
        return json_value(raw.removeprefix(BOM_UTF8))
    except DocumentError as error:
        raise RecordingError(f"{where}: {error!s:.120}.", "Is it whole? Copy it again.") from None
