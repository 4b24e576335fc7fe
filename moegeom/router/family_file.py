"""Family files: TOML to frozen records, listed by file name."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from importlib import resources
from typing import Any, TypeVar, get_args, get_type_hints

from moegeom.core import router as core
from moegeom.core.errors import InternalError
from moegeom.core.precision import mantissa_bits
from moegeom.core.registry import unknown_name
from moegeom.router.family import (
    Family,
    GroupSpec,
    KeepsSpec,
    LayersSpec,
    NormSpec,
    Setting,
    StackSpec,
    WeightsSpec,
)

T = TypeVar("T")

_PACKAGE = "moegeom.router.families"
_SUFFIX = ".toml"


@cache
def families() -> tuple[str, ...]:
    """Names of all families, sorted."""
    files = (f.name for f in resources.files(_PACKAGE).iterdir())
    return tuple(sorted(f.removesuffix(_SUFFIX) for f in files if f.endswith(_SUFFIX)))


@cache
def load_family(name: str) -> Family:
    """The family of that name."""
    if name not in families():
        raise unknown_name("family", name, families())
    text = resources.files(_PACKAGE).joinpath(name + _SUFFIX).read_text("utf-8")
    return parse_family(name, text)


@cache
def family_of(model_type: str) -> Family | None:
    """The family whose rule a ``model_type`` of ``config.json`` follows, if one is known."""
    # The file of that name first: most types have one, and the others need not be parsed.
    for name in sorted(families(), key=lambda n: n != model_type):
        if model_type in load_family(name).model_types:
            return load_family(name)
    return None


def parse_family(name: str, text: str) -> Family:
    """The family that a TOML file describes; an unknown key or value is an error."""
    where = f"{name}{_SUFFIX}"
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InternalError(f"{where}: is not TOML ({error}).") from None
    family = _record(Family, {"name": name, **table}, where)
    for stack in family.stacks:
        _check_patterns(stack, where)
        _check_names(stack, where)
        _check_text(family, stack, where)
    return family


def _record(cls: type[T], table: Any, where: str) -> T:
    """A record from a TOML table; its fields say which keys there are and what they hold."""
    if not isinstance(table, dict):
        raise InternalError(f"{where}: is {table!r}, expected a table.")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(table.keys() - known.keys())
    if unknown:
        raise InternalError(f"{where}: unknown key '{unknown[0]}'.", f"Known: {', '.join(known)}.")
    missing = [
        f.name
        for f in known.values()
        if f.default is MISSING and f.default_factory is MISSING and f.name not in table
    ]
    if missing:
        raise InternalError(f"{where}: key '{missing[0]}' is missing.")
    made = {
        key: _CONVERTERS[str(known[key].type)](value, f"{where}: {key}")
        for key, value in table.items()
    }
    return cls(**made)


def _text(found: Any, where: str) -> str:
    if not isinstance(found, str):
        raise InternalError(f"{where} is {found!r}, expected a string.")
    return found


def _texts(found: Any, where: str) -> tuple[str, ...]:
    if not isinstance(found, list) or not found:
        raise InternalError(f"{where} is {found!r}, expected a list of strings.")
    return tuple(_text(entry, where) for entry in found)


def _number(found: Any, where: str) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise InternalError(f"{where} is {found!r}, expected a number.")
    return float(found)


def _setting(found: Any, where: str) -> Setting:
    if isinstance(found, str):
        return Setting(keys=(found,))
    if isinstance(found, list):
        return Setting(keys=_texts(found, where))
    if isinstance(found, bool | int | float):
        return Setting(value=found)
    raise InternalError(f"{where} is {found!r}, expected a config key, a list of them, or a value.")


def _stacks(found: Any, where: str) -> tuple[StackSpec, ...]:
    if not isinstance(found, list) or not found:
        raise InternalError(f"{where}: expected at least one [[stacks]].")
    return tuple(_record(StackSpec, table, f"{where}[{i}]") for i, table in enumerate(found))


def _requirements(found: Any, where: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(found, dict):
        raise InternalError(f"{where} is {found!r}, expected a table.")
    return {key: _texts(value, f"{where}.{key}") for key, value in found.items()}


def _table(cls: type[T]) -> Callable[[Any, str], T]:
    return lambda found, where: _record(cls, found, where)


#: How a TOML value becomes a field, by the field's annotation.
_CONVERTERS: dict[str, Callable[[Any, str], Any]] = {
    "str": _text,
    "float": _number,
    "Setting": _setting,
    "Setting | None": _setting,
    "WeightsSpec": _table(WeightsSpec),
    "GroupSpec | None": _table(GroupSpec),
    "KeepsSpec": _table(KeepsSpec),
    "NormSpec | None": _table(NormSpec),
    "LayersSpec | None": _table(LayersSpec),
    "tuple[str, ...]": _texts,
    "tuple[StackSpec, ...]": _stacks,
    "dict[str, tuple[str, ...]]": _requirements,
}


def _check_patterns(stack: StackSpec, where: str) -> None:
    norm = stack.norm.weight if stack.norm else ()
    for pattern in stack.weight + stack.logit_bias + stack.selection_bias + norm:
        if pattern.count("{layer}.") != 1 or pattern.count("{") != 1:
            raise InternalError(f"{where}: pattern '{pattern}' must hold '{{layer}}.' once.")
    if len({pattern.rpartition(".")[2] for pattern in stack.weight}) > 1:
        raise InternalError(f"{where}: the spellings of 'weight' must end in the same word.")


def _choices(cls: type, name: str) -> tuple[str, ...]:
    return get_args(get_type_hints(cls)[name])


def _check_names(stack: StackSpec, where: str) -> None:
    """Every step that the stack names exists in the core records."""
    named = [
        ("score", stack.score, tuple(sorted(core.MONOTONE_SCORES))),
        ("weights.source", stack.weights.source, _choices(core.Weights, "source")),
    ]
    if stack.groups:
        named.append(("groups.score", stack.groups.score, _choices(core.GroupMask, "score")))
    if stack.norm:
        named.append(("norm.kind", stack.norm.kind, _choices(core.Norm, "kind")))
    for key, dtype in vars(stack.keeps).items():
        if dtype and mantissa_bits(dtype) is None:
            raise InternalError(f"{where}: keeps.{key} '{dtype}' is no float dtype.")
    for key, found, known in named:
        if found not in known:
            raise InternalError(
                f"{where}: {key} '{found}' is no step.", f"Known: {', '.join(known)}."
            )


def _check_text(family: Family, stack: StackSpec, where: str) -> None:
    try:
        family.text.format(num_experts=0, top_k=0, groups="")
        if stack.groups:
            stack.groups.text.format(num_groups=0, num_kept=0)
    except (KeyError, IndexError, ValueError) as error:
        raise InternalError(f"{where}: text has an unknown placeholder ({error}).") from None
