"""Names and messages that come from files of others, made fit to print."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def printable(value: T) -> T:
    r"""The same value with every text in it on one line and without unprintable characters.

    A tensor may be named after an escape sequence of terminals, after half a surrogate pair that no
    file can hold, or so that it reads backwards: such characters are written as ``\x1b``.
    """
    return _mapped(value)


def _mapped(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isprintable() else "".join(map(_shown, value))
    if isinstance(value, Mapping):
        return {_mapped(key): _mapped(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(entry) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return dataclasses.replace(
            value, **{f.name: _mapped(getattr(value, f.name)) for f in fields}
        )
    return value


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode("ascii")
