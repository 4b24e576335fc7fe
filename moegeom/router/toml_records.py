"""TOML of files that ship with the package, as frozen records: fields say what a key holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib import resources
from typing import Any, TypeVar, cast

from moegeom.core.documents import DocumentError, parse_toml
from moegeom.core.errors import InternalError

T = TypeVar("T")

#: How a TOML value, of a place that errors name, becomes what a field holds.
Converter = Callable[[Any, str], Any]

SUFFIX = ".toml"


@cache
def names_in(package: str) -> tuple[str, ...]:
    """Names of the TOML files of a package, sorted."""
    files = (file.name for file in resources.files(package).iterdir())
    return tuple(sorted(f.removesuffix(SUFFIX) for f in files if f.endswith(SUFFIX)))


def text_in(package: str, name: str) -> str:
    """What the TOML file of that name holds."""
    return resources.files(package).joinpath(name + SUFFIX).read_text("utf-8")


def table_of(text: str, where: str, most: int) -> dict[str, Any]:
    """The table that a text of at most so many characters spells."""
    try:
        return parse_toml(text, most)
    except DocumentError as error:
        raise InternalError(f"{where}: {error}.") from None


def short(found: Any) -> str:
    """What was found, as an error repeats it."""
    text = repr(found)
    return text if len(text) <= 100 else f"{text[:97]}..."


def record_of(cls: type[T], table: Any, where: str, converters: Mapping[str, Converter]) -> T:
    """A record from a TOML table; its fields say which keys there are and what they hold.

    ``converters`` are by the annotation of a field.
    """
    if not isinstance(table, dict):
        raise InternalError(f"{where}: is {short(table)}, expected a table.")
    known = {f.name: f for f in fields(cast("Any", cls))}
    unknown = sorted(table.keys() - known.keys())
    if unknown:
        raise InternalError(
            f"{where}: unknown key {short(unknown[0])}.", f"Known: {', '.join(known)}."
        )
    missing = [
        f.name
        for f in known.values()
        if f.default is MISSING and f.default_factory is MISSING and f.name not in table
    ]
    if missing:
        raise InternalError(f"{where}: key '{missing[0]}' is missing.")
    made = {
        key: converters[str(known[key].type)](value, f"{where}: {key}")
        for key, value in table.items()
    }
    return cls(**made)


def as_text(found: Any, where: str) -> str:
    """A string."""
    if not isinstance(found, str):
        raise InternalError(f"{where} is {short(found)}, expected a string.")
    return found


def as_texts(found: Any, where: str) -> tuple[str, ...]:
    """A list of strings, one at least."""
    if not isinstance(found, list) or not found:
        raise InternalError(f"{where} is {short(found)}, expected a list of strings.")
    return tuple(as_text(entry, where) for entry in found)


def is_number(found: Any) -> bool:
    """True for a float, a truth value, or an integer of 64 bits, which is what TOML promises."""
    return isinstance(found, float) or (isinstance(found, int) and -(2**63) <= found < 2**63)


def as_number(found: Any, where: str) -> float:
    """A number, and no truth value."""
    if isinstance(found, bool) or not is_number(found):
        raise InternalError(f"{where} is {short(found)}, expected a number.")
    return float(found)


def as_integer(found: Any, where: str) -> int:
    """A whole number of 64 bits."""
    if type(found) is not int or not is_number(found):
        raise InternalError(f"{where} is {short(found)}, expected an integer.")
    return found


def as_flag(found: Any, where: str) -> bool:
    """True or false."""
    if not isinstance(found, bool):
        raise InternalError(f"{where} is {short(found)}, expected true or false.")
    return found


def as_texts_by_key(found: Any, where: str) -> dict[str, str]:
    """A table of strings."""
    if not isinstance(found, dict):
        raise InternalError(f"{where} is {short(found)}, expected a table.")
    return {key: as_text(value, f"{where}.{key}") for key, value in found.items()}
