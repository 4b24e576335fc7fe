"""Untrusted JSON text to a dict, or one sentence about what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from moegeom.core.errors import CheckpointError


class _Refused(ValueError):
    """JSON that Python reads and that no checkpoint may contain."""


def _refuse_constant(token: str) -> NoReturn:
    raise _Refused(f"holds the token {token}, which is not JSON")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; a key given twice is refused: readers differ in which one wins."""
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise _Refused(f"holds the key {twice!r} twice")
    return table


def _has_unique_keys(text: str, found: Any) -> bool:
    """True when no key came twice: without escapes, each string that is left has two quotes."""
    return "\\" not in text and 2 * _num_strings(found) == text.count('"')


def _num_strings(value: Any) -> int:
    """Strings in a parsed value, keys included."""
    if isinstance(value, dict):
        if set(map(type, value.values())) <= {str}:
            return 2 * len(value)
        return len(value) + sum(map(_num_strings, value.values()))
    if isinstance(value, list):
        return sum(map(_num_strings, value))
    return int(isinstance(value, str))


def parse_object(
    raw: bytes,
    where: str,
    pairs_hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = unique_keys,
    allow_constants: bool = False,
) -> dict[str, Any]:
    """The JSON object that ``raw`` spells in UTF-8.

    ``allow_constants`` admits NaN and Infinity, which transformers writes into ``config.json``.
    """
    constant = None if allow_constants else _refuse_constant
    try:
        text = str(raw, "utf-8")
        found = json.loads(text, parse_constant=constant)
        if pairs_hook is not None and not _has_unique_keys(text, found):
            found = json.loads(text, object_pairs_hook=pairs_hook, parse_constant=constant)
    except _Refused as error:
        raise CheckpointError(f"{where}: {error}.") from None
    except RecursionError:
        raise CheckpointError(f"{where}: is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: is not UTF-8 at byte {error.start}.") from None
    except ValueError as error:  # malformed JSON, or an integer of thousands of digits
        raise CheckpointError(f"{where}: is not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: holds a {type(found).__name__}, expected an object.")
    return found
