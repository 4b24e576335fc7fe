"""Fields of a request: what each means, how it is typed, whether it changes results."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def option(text: str, default: Any = None, **facts: Any) -> Any:
    """A field of a request, which is a parameter in Python and an option on the command line.

    ``text`` is its line of help. ``default`` may be a type, of which each request gets a new value.
    ``facts`` say how the command line takes it: ``min`` is the least value, ``metavar`` stands for
    the value in the help, ``also`` is a second spelling, ``panel`` the heading that it stands
    under, ``is_list`` false where it is given once. ``in_python`` is the line of help of programs,
    where theirs is another.

    A field with the fact ``outside_plan`` stands in no plan, for this reason; every other does, so
    that what changes results cannot be forgotten when a field is added.
    """
    facts = {"help": text, **facts}
    if isinstance(default, type):
        return field(default_factory=default, metadata=facts)
    return field(default=default, metadata=facts)


def argument(text: str, default: Any = MISSING, **facts: Any) -> Any:
    """As :func:`option`, of a field that is typed without its name; needed without a default."""
    return option(text, default, is_argument=True, **facts)
