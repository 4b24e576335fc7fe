"""Options of the command line that are fields of a request."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from moegeom.checkpoint.remote.url import RemoteOptions
from moegeom.engine.parameters import hints_of, kinds_of, option_of, request_of, typed_parameters
from moegeom.tokens.files import TokenFiles
from moegeom_cli.streams import parse_map, parse_numbers

#: What a value is typed as, by what its field may hold: the first of these.
_TYPED = (bool, int, float, Path, str)


def options_of(record: type) -> list[inspect.Parameter]:
    """What the parser is given for a request, its arguments among them."""
    hints = hints_of(record)
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field, hints[name]),
            annotation=_annotation(name, field.metadata, hints[name]),
        )
        for name, field in typed_parameters(record).items()
    ]


def request_typed(record: type, typed: Mapping[str, Any]) -> Any:
    """The request of what was typed.

    Raises
    ------
    UsageError
        For what a field cannot hold.
    """
    hints = hints_of(record)
    return request_of(record, **{name: _value(name, typed[name], hints[name]) for name in typed})


def _items(hint: Any) -> Any:
    """Of what a field holds several; None of one."""
    several = [
        get_args(kind)[0] for kind in kinds_of(hint) if get_origin(kind) in (tuple, Sequence)
    ]
    return several[0] if several else None


def _has(hint: Any, *kinds: Any) -> bool:
    return any((get_origin(kind) or kind) in kinds for kind in kinds_of(hint))


def _annotation(name: str, facts: Mapping[str, Any], hint: Any) -> Any:
    kind: Any = next((one for one in _TYPED if one in kinds_of(_items(hint) or hint)), str)
    if _has(hint, RemoteOptions):
        kind = bool
    elif _is_listed(facts, hint):
        kind = list[str]
    elif _items(hint) is int:
        kind = str
    if facts.get("is_argument"):
        return Annotated[kind, typer.Argument(help=facts["help"], metavar=facts.get("metavar"))]
    also = [f"--{facts['also']}"] if "also" in facts else ["-o"] * (name == "out")
    option = typer.Option(
        option_of(name),
        *also,
        help=facts["help"],
        min=facts.get("min"),
        metavar=facts.get("metavar"),
        rich_help_panel=facts.get("panel"),
    )
    return Annotated[kind if kind is bool else kind | None, option]


def _is_listed(facts: Mapping[str, Any], hint: Any) -> bool:
    """Whether an option may be given several times; numbers and lists in one text may not."""
    if not facts.get("is_list", True):
        return False
    is_map = _has(hint, Mapping) and not _has(hint, str)
    is_several = _items(hint) is not None and _items(hint) is not int
    return is_several or is_map or _has(hint, TokenFiles)


def _default(field: dataclasses.Field[Any], hint: Any) -> Any:
    if _has(hint, RemoteOptions):
        return False
    if field.default_factory is not dataclasses.MISSING:
        return None
    if field.default is dataclasses.MISSING:
        return inspect.Parameter.empty
    if isinstance(field.default, tuple):
        return ",".join(map(str, field.default)) or None
    return field.default


def _value(name: str, typed: Any, hint: Any) -> Any:
    """What was typed, as its field may hold it."""
    if typed is None:
        return None
    if _has(hint, RemoteOptions):
        return RemoteOptions(cache_folder=None) if typed else None
    if _has(hint, Mapping) and not _has(hint, str):
        return parse_map(typed)
    return parse_numbers(option_of(name), typed) if _items(hint) is int else typed
