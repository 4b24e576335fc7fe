"""The values of a GGUF header: numbers, strings, and arrays of either."""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Any

from moegeom.checkpoint.formats._gguf_cursor import Cursor
from moegeom.core.errors import CheckpointError

#: A name of a tensor has at most 64 bytes by the specification; the longest known key has 45.
_LONGEST_NAME = 256

#: Longer strings are chat templates, licences and whole tokenizers.
_LONGEST_TEXT = 4096

#: Longer arrays are vocabularies: an array of a setting has an element per layer.
_LONGEST_ARRAY = 256

_BOOL = 7
_STRING = 8
_ARRAY = 9

#: Value types by their number in the file.
_SCALARS: dict[int, Struct] = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: Struct("<I"),
    5: Struct("<i"),
    6: Struct("<f"),
    _BOOL: Struct("<B"),
    10: Struct("<Q"),
    11: Struct("<q"),
    12: Struct("<d"),
}

_TYPE = Struct("<I")
_ARRAY_HEAD = Struct("<IQ")


@dataclass(frozen=True)
class Unread:
    """A value that is too long for a setting: bytes of a string, elements of an array."""

    length: int


def read_name(cursor: Cursor, what: str) -> str:
    """The key of a setting, or the name of a tensor."""
    size = cursor.length()
    if size > _LONGEST_NAME:
        raise CheckpointError(f"{what} has {size} bytes, more than the {_LONGEST_NAME} allowed.")
    return _text(cursor.take(size), what)


def read_value(cursor: Cursor, what: str) -> Any:
    """A typed value: int, float, bool, str, a list of one of these, or ``Unread``."""
    (kind,) = cursor.numbers(_TYPE)
    if kind != _ARRAY:
        return _element(cursor, kind, what)
    element, length = cursor.numbers(_ARRAY_HEAD)
    if element == _ARRAY:
        raise CheckpointError(f"{what} is an array of arrays, expected numbers or strings.")
    if length <= _LONGEST_ARRAY:
        return [_element(cursor, element, what) for _ in range(length)]
    if element == _STRING:
        cursor.skip_strings(length)
    else:
        cursor.skip(length * _scalar(element, what).size)
    return Unread(length)


def _element(cursor: Cursor, kind: int, what: str) -> Any:
    if kind == _STRING:
        size = cursor.length()
        if size <= _LONGEST_TEXT:
            return _text(cursor.take(size), what)
        cursor.skip(size)
        return Unread(size)
    (value,) = cursor.numbers(_scalar(kind, what))
    if kind != _BOOL:
        return value
    if value > 1:
        raise CheckpointError(f"{what} is a bool with the value {value}, expected 0 or 1.")
    return bool(value)


def _scalar(kind: int, what: str) -> Struct:
    if kind not in _SCALARS:
        raise CheckpointError(f"{what} has the value type {kind}, expected 0 to 12.")
    return _SCALARS[kind]


def _text(raw: bytes, what: str) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{what} is not UTF-8 at byte {error.start}.") from None
