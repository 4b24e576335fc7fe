"""JSON and TOML of others: plain values within bounds of size, depth and digits, then records."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import resources
from itertools import chain, compress
from types import GenericAlias
from typing import Any, TypeVar

from moegeom.core.errors import InternalError, MoeGeomError
from moegeom.core.limits import JSON_ENTRIES, MOST_DOTS, MOST_JSON, MOST_NESTED, MOST_TOML
from moegeom.core.registry import nearest_name
from moegeom.core.text import number_of, quoted

T = TypeVar("T")

#: What no integer in a document of ours is beyond; larger ones can neither be printed nor stored.
_BEYOND = 1 << 63

#: What begins or separates entries of a JSON text.
_ENTRIES = (b"{", b"[", b":", b",")


_SUFFIX = ".toml"


class DocumentError(ValueError):
    """What is wrong with a text, without the name of its file and without a full stop.

    ``hint`` is what to write instead; empty where nobody knows.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@contextmanager
def refused_as(kind: type[MoeGeomError], where: str, hint: str = "") -> Iterator[None]:
    """A block whose DocumentErrors are told as errors of ours about the file ``where``."""
    try:
        yield
    except DocumentError as error:
        raise kind(f"{where}: {error}.", error.hint or hint) from None


@cache
def shipped_names(package: str) -> tuple[str, ...]:
    """Names of the TOML files of a package of the program, sorted."""
    files = (file.name for file in resources.files(package).iterdir())
    return tuple(sorted(f.removesuffix(_SUFFIX) for f in files if f.endswith(_SUFFIX)))


def shipped_text(package: str, name: str, suffix: str = _SUFFIX) -> str:
    """What the TOML file of that name holds, or that with another suffix."""
    return resources.files(package).joinpath(name + suffix).read_text("utf-8")


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
        table = tomllib.loads(text)
    except ValueError as error:  # malformed, or an integer of thousands of digits
        raise DocumentError(f"is not TOML ({error})") from None
    except RecursionError:
        raise DocumentError("is nested too deeply") from None
    _check_integers(table)
    return table


def value_at(document: Any, path: str) -> Any:
    """The value at a dotted path of tables; None where there is none."""
    for key in path.split("."):
        if not isinstance(document, Mapping):
            return None
        document = document.get(key)
    return document


def _check_integers(document: Any) -> None:
    """Integers in base 16, 8 and 2 are read at any length."""
    left = [document]
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


def _check_depth(document: Any) -> None:
    """What is read must also be written again, by functions that call themselves."""
    level = _of_types(_NESTS, [document])
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
    import msgspec

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
        document = _decoded(raw) if not hooks else json.loads(str(raw, "utf-8"), **hooks)
        if raw.count(b"[") + raw.count(b"{") > MOST_NESTED:
            _check_depth(document)
        return document
    except DocumentError:
        raise
    except UnicodeDecodeError as error:
        raise DocumentError(f"is not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise DocumentError(f"is not JSON ({error})") from None
    except RecursionError:
        raise DocumentError("is nested too deeply") from None


# ------------------------------------------------------------------------------------------ records
def record_of_file(
    kind: type[T], name: str, text: str, most: int = MOST_TOML, **defaults: Any
) -> T:
    """The record in the TOML file of a name, which is its field ``name``.

    Raises
    ------
    InternalError
        As :func:`record_of`, with the name of the file: the program brings it.
    """
    with refused_as(InternalError, f"{name}{_SUFFIX}"):
        return record_of(kind, {"name": name, **defaults, **parse_toml(text, most)})


#: What msgspec's types, and what it says of values of a type, are called.
_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "bytes": "text in base64",
    "Number out of range": "a number of 64 bits",
    "Invalid base64 encoded string": "text in base64",
}

_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}

#: Characters of a value or a key that a message repeats.
_REPEATED = 60


def record_of(kind: type[T] | GenericAlias, document: Any) -> T:
    """The record that plain values of a document make: its annotations say what stands where.

    Values have to be of their types (a text is no number, true is no number), but for integers
    where a float is expected. A dataclass, and dataclasses within, have no keys but their fields,
    of which those that do not compare are none; nor has a Struct that forbids them. Other Structs,
    and a ``TypedDict``, may have more, which are left out. A class of one's own makes itself of a
    value by its method ``parsed``. A ValueError of that method, or of a ``__post_init__``, becomes
    an error with its place.

    Raises
    ------
    DocumentError
        Where the first value stands that the record cannot hold, what it is, what was expected.
    """
    import msgspec

    def converted() -> T:
        return msgspec.convert(document, kind, dec_hook=lambda own, value: own.parsed(value))

    def misfit() -> str:
        try:
            converted()
        except ValueError as error:
            return str(error)
        return ""

    try:
        record = converted()
    except msgspec.ValidationError as error:
        raise _refusal(str(error), document, kind, misfit) from None
    except UnicodeEncodeError as error:  # half of a pair, which JSON can spell
        half = quoted(error.object[error.start : error.end], _REPEATED)
        raise DocumentError(f"holds {half}, which is no character") from None
    if is_dataclass(record):
        for place, key, keys in _unknown_keys(record, document, ""):
            raise _unknown(place, key, keys)
    return record


def _unknown(place: str, key: str, keys: Collection[str]) -> DocumentError:
    guess = nearest_name(key[:_REPEATED], keys).strip()
    return DocumentError(
        f"{place}unknown key {quoted(key, _REPEATED)}", f"{guess} Known: {', '.join(keys)}.".strip()
    )


def _unknown_keys(record: Any, value: Any, place: str) -> Iterator[tuple[str, str, list[str]]]:
    """Keys of tables that the records made of them do not have: the place of the table, the key,
    and the keys that there are.
    """
    inner: Iterable[tuple[str, Any, Any]] = ()
    if isinstance(value, list) and isinstance(record, tuple | list):
        inner = ((f"[{i}]", *pair) for i, pair in enumerate(zip(record, value, strict=True)))
    elif isinstance(value, dict) and is_dataclass(record):
        keys = [f.name for f in fields(record) if f.compare]
        yield from ((place and f"{place}: ", key, keys) for key in value if key not in keys)
        inner = ((f".{key}", getattr(record, key), value[key]) for key in value)
    elif isinstance(value, dict) and isinstance(record, dict):
        inner = ((f".{key}", record[key], value[key]) for key in value if key in record)
    for step, made, entry in inner:
        if isinstance(entry, dict | list):
            yield from _unknown_keys(made, entry, f"{place}{step}".lstrip("."))


def _refusal(message: str, document: Any, kind: Any, misfit: Callable[[], str]) -> DocumentError:
    """What msgspec says of values that make no record (``... - at `$.a[2].b```), in our words."""
    from msgspec.inspect import type_info

    words, _, path = message.rpartition(" - at `$")
    place, value, kinds = _at(document, type_info(kind), path if words else "", misfit)
    words = words or message
    at = place and f"{place}: "
    keys = [f.encode_name for option in kinds for f in getattr(option, "fields", ())]
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", words, re.DOTALL):
        return _unknown(at, unknown[1], keys)
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", words):
        # A key that is spelled otherwise is missing and unknown: this says more.
        is_closed = any(type(option).__name__ == "DataclassType" for option in kinds)
        foreign = [key for key in value if is_closed and key not in keys]
        missed = DocumentError(f"{at}key '{missing[1]}' is missing")
        return _unknown(at, foreign[0], keys) if foreign else missed
    types = re.match(r"Expected `([^`]*)`(?:, got `\w+`)?(.*)", words)
    choices = [choice for option in kinds for choice in getattr(option, "values", ())]
    guess = nearest_name(value[:_REPEATED], choices) if isinstance(value, str) else ""
    if choices and (types or words.startswith("Invalid enum value")):
        choices += ["null"] * any(type(option).__name__ == "NoneType" for option in kinds)
        expected = f"{'one of ' if len(choices) > 1 else ''}{', '.join(choices)}"
    elif types:
        *others, last = (_WORDS.get(word, word) for word in types[1].split(" | "))
        expected = f"{', '.join(others)} or {last}" if others else last
        if bound := re.fullmatch(r"( of length)? (>=|<=|>|<) (\S+)", types[2]):
            unit = ("character",) if "text" in expected else ("entry", "entries")
            amount = number_of(int(bound[3]), *unit) if bound[1] else f"{float(bound[3]):g}"
            expected += f" {_BOUNDS[bound[2]]} {amount}"
        if "float" in types[1] and isinstance(value, float) and not math.isfinite(value):
            expected = "a finite number"
    elif words in _WORDS:
        expected = _WORDS[words]
    else:  # of a record's own
        return DocumentError(f"{at}{words}")
    if isinstance(value, dict) and expected == "a list":
        guess = f"A list of tables begins with [[{place}]]."
    what = f"{place or 'it'} is {_described(value)}, expected {expected}"
    return DocumentError(what, guess.strip())


def _described(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else f"a list of {len(value)}"
    spelled = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    return spelled[value] if is_word else quoted(value, _REPEATED)


def _at(
    document: Any, kind: Any, path: str, misfit: Callable[[], str]
) -> tuple[str, Any, Sequence[Any]]:
    """Which place a path such as ``.a[2].b`` means, what stands there, and msgspec's types of it.

    Entries of a mapping are ``[...]`` in paths: the mapping is halved until one entry is left with
    which the document is refused as before.
    """
    message, halved = misfit(), []
    place, value, kinds = "", document, _options(kind)
    for name, number in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        key: Any = name or number
        if isinstance(value, list) and number.isdigit() and int(number) < len(value):
            place, key = f"{place}[{number}]", int(number)
        elif isinstance(value, dict) and (key in value or (value and number == "...")):
            if number == "...":
                halved.append((value, dict(value)))
                key = _refused_key(value, message, misfit)
            place = f"{place}.{quoted(key, _REPEATED)[1:-1]}".lstrip(".")
        else:  # a text of the document that reads like a path
            break
        value = value[key]
        kinds = [inner for option in kinds for inner in _options(_inner(option, key))]
    for mapping, entries in halved:
        mapping.clear()
        mapping.update(entries)
    return place, value, kinds


def _options(kind: Any) -> Sequence[Any]:
    """The types of a union; those of no type are none."""
    return getattr(kind, "types", (kind,) if kind else ())


def _refused_key(mapping: dict[str, Any], message: str, misfit: Callable[[], str]) -> str:
    """The key of the entry that is refused; it alone is left in the mapping."""
    entries = list(mapping.items())
    while len(entries) > 1:
        half = entries[: len(entries) // 2]
        mapping.clear()
        mapping.update(half)
        entries = half if misfit() == message else entries[len(half) :]
    mapping.clear()
    mapping.update(entries)
    return entries[0][0]


def _inner(kind: Any, key: str | int) -> Any:
    """msgspec's type of what stands at a key of a value of that type; None for other types."""
    if hasattr(kind, "fields"):
        return next((f.type for f in kind.fields if f.encode_name == key), None)
    return getattr(kind, "item_type" if isinstance(key, int) else "value_type", None)
