"""Untrusted JSON text to a dict, or one sentence about what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from moegeom.checkpoint.reading import no_collection
from moegeom.core import limits
from moegeom.core.documents import DocumentError, json_value
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import INTEGER_DIGITS

#: Most bytes of Python objects that each of these characters can begin: a dict, a list, a key
#: with its entry, and a value.
_COSTS = {b"{": 72, b"[": 96, b":": 164, b",": 64}

#: Copies of a text, by bytes: as read, as decoded, and as parsed.
_PLAIN_COPIES = 3

#: One character of four bytes makes all others of its text as wide, and the parser's buffer too.
_WIDE_COPIES = 12

#: What no byte of a text takes more than.
_COST_OF_A_BYTE = _WIDE_COPIES + max(_COSTS.values())

#: Every digit as 0: a run of them is then found at the speed of memory.
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)


def _refuse_constant(token: str) -> NoReturn:
    raise DocumentError(f"holds the token {token}, which is not JSON")


def _short_integer(digits: str) -> int:
    """An integer; thousands of digits make sentences long, and overflow what is computed."""
    if len(digits) > INTEGER_DIGITS:
        raise DocumentError(f"holds an integer of {len(digits)} digits")
    return int(digits)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; a key given twice is refused: readers differ in which one wins."""
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise DocumentError(f"holds the key {twice[:100]!r} twice")
    return table


def most_memory(raw: bytes) -> int:
    """Bytes that a JSON text and what it describes take at most, without parsing it."""
    is_plain = raw.isascii() and b"\\u" not in raw
    copies = _PLAIN_COPIES if is_plain else _WIDE_COPIES
    return copies * len(raw) + sum(cost * raw.count(begin) for begin, cost in _COSTS.items())


def num_quotes(raw: bytes) -> int:
    """Quotes that begin or end a string of a JSON text; two for each string.

    Where a key stands twice, one string fewer is left in the parsed value.
    """
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return raw.count(b'"')


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

    Raises
    ------
    CheckpointError
        If it is anything else, or would take more than ``limits.JSON_MEMORY``.
    """
    is_short = len(raw) * _COST_OF_A_BYTE <= limits.JSON_MEMORY
    memory = 0 if is_short else most_memory(raw)
    if memory > limits.JSON_MEMORY:
        raise CheckpointError(
            f"{where}: has {len(raw)} bytes that describe up to {memory} bytes of objects, more "
            f"than the {limits.JSON_MEMORY} allowed."
        )
    constant = None if allow_constants else _refuse_constant
    # A hook for every integer takes time: few texts have many digits in a row.
    has_long = b"0" * INTEGER_DIGITS in raw.translate(_DIGITS)
    integer = _short_integer if has_long else None
    try:
        with no_collection():
            document = json_value(raw, parse_constant=constant, parse_int=integer)
            # A hook doubles the time: only a text of which a string got lost is parsed with it.
            if pairs_hook is not None and 2 * _num_strings(document) != num_quotes(raw):
                del document
                document = json_value(
                    raw, object_pairs_hook=pairs_hook, parse_constant=constant, parse_int=integer
                )
    except DocumentError as error:
        raise CheckpointError(f"{where}: {error}.") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{where}: holds a {type(document).__name__}, expected an object.")
    return document
