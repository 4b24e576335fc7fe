"""JSON and TOML of others as plain Python values, within bounds of size, depth and digits."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Sequence
from itertools import chain, compress
from typing import Any

from moegeom.core.limits import JSON_ENTRIES, MOST_DOTS, MOST_JSON, MOST_NESTED, MOST_TOML

#: What no integer in a document of ours is beyond; larger ones can neither be printed nor stored.
_BEYOND = 1 << 63

#: What begins or separates entries of a JSON text.
_ENTRIES = (b"{", b"[", b":", b",")


class DocumentError(ValueError):
    """What is wrong with a text, without the name of its file and without a full stop."""


def parse_toml(text: str, most: int = MOST_TOML) -> dict[str, Any]:
    """The table that a TOML text spells.

    Raises
    ------
    DocumentError
        When it is no TOML, longer than ``most`` characters, nested too deeply, or when it holds
        a line of too many dots or an integer beyond 64 bits.
    """
    if len(text) > most:
        raise DocumentError(f"has {len(text)} characters, more than {most}")
    dots, line = max((line.count("."), i) for i, line in enumerate(text.split("\n"), start=1))
    if dots > MOST_DOTS:
        raise DocumentError(f"line {line} has {dots} dots, more than {MOST_DOTS}")
    try:
        found = tomllib.loads(text)
    except ValueError as error:  # malformed, or an integer of thousands of digits
        raise DocumentError(f"is not TOML ({error})") from None
    except RecursionError:
        raise DocumentError("is nested too deeply") from None
    _check_integers(found)
    return found


def _check_integers(found: Any) -> None:
    """Integers in base 16, 8 and 2 are read at any length."""
    left = [found]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, int):
            _checked(value)


#: What a parser of JSON nests; its types themselves are told faster than what is like them.
_NESTS = frozenset((dict, list))


def _of_types(types: Collection[type], values: Sequence[Any]) -> list[Any]:
    # no step of it is taken by the interpreter: headers hold a million values
    return list(compress(values, map(types.__contains__, map(type, values))))


def _check_depth(found: Any) -> None:
    """What is read must also be written again, by functions that call themselves."""
    level = _of_types(_NESTS, [found])
    for _ in range(MOST_NESTED):
        of_dicts = map(dict.values, _of_types({dict}, level))
        inner = chain.from_iterable(chain(of_dicts, _of_types({list}, level)))
        level = _of_types(_NESTS, list(inner))
        if not level:
            return
    raise DocumentError("is nested too deeply")


def _checked(value: int) -> int:
    if not -_BEYOND <= value < _BEYOND:
        raise DocumentError("holds an integer beyond 64 bits")
    return value


def _integer(digits: str) -> int:
    return _checked(int(digits) if len(digits) < 32 else _BEYOND)


def parse_json(raw: bytes, most: int = MOST_JSON) -> Any:
    """What a JSON text spells.

    Raises
    ------
    DocumentError
        When it is no JSON in UTF-8, longer than ``most`` bytes, nested too deeply, or when it
        holds more values than any document of ours, or an integer beyond 64 bits.
    """
    if len(raw) > most:
        raise DocumentError(f"has {len(raw)} bytes, more than {most}")
    if sum(map(raw.count, _ENTRIES)) > JSON_ENTRIES:
        raise DocumentError(f"holds more than {JSON_ENTRIES} values")
    return json_value(raw, parse_int=_integer)


def _decoded(raw: bytes) -> Any:
    import msgspec  # which a check of weights does without

    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):  # Python's own takes more, and says what is wrong
        return json.loads(str(raw, "utf-8"))


def json_value(raw: bytes, **hooks: Any) -> Any:
    """What a JSON text spells whose size its reader has bounded already; ``hooks`` are Python's.

    Raises
    ------
    DocumentError
        When it is no JSON in UTF-8, or nested too deeply; and what a hook raises.
    """
    try:
        found = _decoded(raw) if not hooks else json.loads(str(raw, "utf-8"), **hooks)
        if raw.count(b"[") + raw.count(b"{") > MOST_NESTED:
            _check_depth(found)
        return found
    except DocumentError:
        raise
    except UnicodeDecodeError as error:
        raise DocumentError(f"is not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise DocumentError(f"is not JSON ({error})") from None
    except RecursionError:
        raise DocumentError("is nested too deeply") from None
