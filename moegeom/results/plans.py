"""Plans of two runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Parts of a plan whose names are not what a person would say.
_PARTS = {"checkpoint": "router weights", "token_files": "tokens"}


def differing_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two plans: its parts by name, of the options each."""
    found = _differing(before, now)
    if "options" in found:
        options = (before.get("options"), now.get("options"))
        one, other = (option if isinstance(option, Mapping) else {} for option in options)
        found = [*(key for key in found if key != "options"), *_differing(one, other)]
    return list(dict.fromkeys(_PARTS.get(part, part) for part in found))


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
