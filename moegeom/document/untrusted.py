"""Untrusted names and messages, made fit to print."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

#: Runners of workflows look for these at the beginning of a line, or anywhere in it.
_COMMAND = re.compile(r"::(?=[A-Za-z])|##\[")

#: What holds no text.
_NUMBERS = frozenset([bool, int, float, type(None)])


def printable(value: T) -> T:
    r"""The same value with every text in it on one line and without unprintable characters.

    A tensor may be named after an escape sequence of terminals, after half a surrogate pair that no
    file can hold, or so that it reads backwards: such characters are written as ``\x1b``. What
    begins a command of a workflow, ``::error`` or ``##[error]``, is taken apart in the same way.
    """
    return _mapped(value)


def _mapped(value: Any) -> Any:
    if isinstance(value, str):
        if value.isprintable() and "::" not in value and "##[" not in value:
            return value
        text = value if value.isprintable() else "".join(map(_shown, value))
        return _COMMAND.sub(_taken_apart, text)
    if isinstance(value, dict):  # a kind of dict of its own stays that, with what it answers
        copied = copy.copy(value)
        copied.clear()
        copied.update((_mapped(key), _mapped(entry)) for key, entry in value.items())
        return copied
    if isinstance(value, Mapping):
        return {_mapped(key): _mapped(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        if _NUMBERS.issuperset(map(type, value)):  # as the long lists of a figure are
            return value
        return type(value)(_mapped(entry) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return dataclasses.replace(
            value, **{f.name: _mapped(getattr(value, f.name)) for f in fields}
        )
    return value


def _taken_apart(match: re.Match[str]) -> str:
    return f"{match[0][:1]}\\x{ord(match[0][1]):02x}{match[0][2:]}"


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode("ascii")
