"""Family files: TOML to frozen records, listed by file name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib import resources
from string import Formatter
from typing import Any, TypeVar, get_args, get_type_hints

from moegeom.core import router as core
from moegeom.core.documents import DocumentError, parse_toml
from moegeom.core.errors import InternalError
from moegeom.core.registry import unknown_name
from moegeom.core.router import mantissa_bits
from moegeom.router.family import (
    RELU,
    Choice,
    ExpertsSpec,
    Family,
    GroupSpec,
    KeepsSpec,
    LayersSpec,
    NormSpec,
    ProjectionSpec,
    Setting,
    StackSpec,
    TensorName,
    Value,
    WeightsSpec,
)

T = TypeVar("T")

_PACKAGE = "moegeom.router.families"
_SUFFIX = ".toml"

#: Characters; the longest family here has 3700.
_MOST_TEXT = 1 << 16

#: Names of one tensor; families here have up to five.
_MOST_NAMES = 100

#: How a router weight can lie in its tensor.
LAYOUTS = ("rows", "transposed", "flat")


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


def family_of_text(name: str, text: str) -> Family:
    """As :func:`parse_family`; ``model_types`` may be left out."""
    return parse_family(name, text, {"model_types": [name], "source": "a file of one's own"})


def parse_family(name: str, text: str, defaults: Mapping[str, Any] | None = None) -> Family:
    """The family that a TOML file describes; an unknown key or value is an error."""
    where = f"{name}{_SUFFIX}"
    try:
        table = parse_toml(text, _MOST_TEXT)
    except DocumentError as error:
        raise InternalError(f"{where}: {error}.") from None
    family = _record(Family, {"name": name, **(defaults or {}), **table}, where)
    for stack in family.stacks:
        _check_patterns(stack, where)
        _check_names(stack, where)
        _check_text(family, stack, where)
    return family


def _short(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _record(cls: type[T], table: Any, where: str) -> T:
    """A record from a TOML table; its fields say which keys there are and what they hold."""
    if not isinstance(table, dict):
        raise InternalError(f"{where}: is {_short(table)}, expected a table.")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(table.keys() - known.keys())
    if unknown:
        raise InternalError(
            f"{where}: unknown key {_short(unknown[0])}.", f"Known: {', '.join(known)}."
        )
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
        raise InternalError(f"{where} is {_short(found)}, expected a string.")
    return found


def _texts(found: Any, where: str) -> tuple[str, ...]:
    if not isinstance(found, list) or not found:
        raise InternalError(f"{where} is {_short(found)}, expected a list of strings.")
    return tuple(_text(entry, where) for entry in found)


def _is_number(found: Any) -> bool:
    """True for a float, a truth value, or an integer of 64 bits, which is what TOML promises."""
    return isinstance(found, float) or (isinstance(found, int) and -(2**63) <= found < 2**63)


def _number(found: Any, where: str) -> float:
    if isinstance(found, bool) or not _is_number(found):
        raise InternalError(f"{where} is {_short(found)}, expected a number.")
    return float(found)


def _integer(found: Any, where: str) -> int:
    if type(found) is not int or not _is_number(found):
        raise InternalError(f"{where} is {_short(found)}, expected an integer.")
    return found


def _flag(found: Any, where: str) -> bool:
    if not isinstance(found, bool):
        raise InternalError(f"{where} is {_short(found)}, expected true or false.")
    return found


def _value(found: Any, where: str) -> Value:
    if not _is_number(found):
        raise InternalError(f"{where} is {_short(found)}, expected a number, true or false.")
    return found


def _default(found: Any, where: str) -> Value | tuple[int, ...]:
    if isinstance(found, list):
        return tuple(_integer(entry, where) for entry in found)
    return _value(found, where)


def _keys(found: Any, where: str) -> tuple[str, ...]:
    return (found,) if isinstance(found, str) else _texts(found, where)


def _setting(found: Any, where: str) -> Setting:
    if _is_number(found):
        return Setting(value=found)
    if isinstance(found, str | list):
        return Setting(keys=_keys(found, where))
    if not isinstance(found, dict):
        raise InternalError(f"{where} is {_short(found)}, expected a config key, some, or a value.")
    known: dict[str, Callable[[Any, str], Any]] = {
        "key": _keys, "default": _default, "plus": _text, "minus": _text, "over": _number,
        "zero": _number, "values": _meanings,
    }  # fmt: skip
    made = _entries(found, known, where)
    return Setting(keys=made.pop("key", ()), **made)


def _choice(found: Any, where: str) -> Choice:
    if isinstance(found, str):
        return Choice(step=found)
    if not isinstance(found, dict):
        raise InternalError(f"{where} is {_short(found)}, expected a string or a table.")
    known = {"key": _keys, "default": _text, "unset": _text, "values": _names}
    made = _entries(found, known, where)
    return Choice(keys=made.pop("key", ()), **made)


def _meanings(found: Any, where: str) -> dict[str, Value]:
    if not isinstance(found, dict):
        raise InternalError(f"{where} is {_short(found)}, expected a table.")
    return {key: _value(value, f"{where}.{key}") for key, value in found.items()}


def _names(found: Any, where: str) -> dict[str, str]:
    if not isinstance(found, dict):
        raise InternalError(f"{where} is {_short(found)}, expected a table.")
    return {key: _text(value, f"{where}.{key}") for key, value in found.items()}


def _entries(found: Any, known: dict[str, Callable[[Any, str], Any]], where: str) -> dict[str, Any]:
    """The values of a small inline table."""
    if not isinstance(found, dict) or not found.keys() <= known.keys():
        raise InternalError(f"{where} is {_short(found)}, expected a table of {', '.join(known)}.")
    return {key: known[key](value, f"{where}.{key}") for key, value in found.items()}


def _tensor_name(found: Any, where: str) -> TensorName:
    if isinstance(found, str):
        return TensorName(found)
    made = _entries(found, {"name": _text, "layout": _text, "row": _integer}, where)
    if made.get("layout", "rows") not in LAYOUTS:
        raise InternalError(
            f"{where}: {_short(made['layout'])} is no layout.", f"Known: {', '.join(LAYOUTS)}."
        )
    return TensorName(**made)


def _tensor_names(found: Any, where: str) -> tuple[TensorName, ...]:
    if not isinstance(found, list) or not found:
        raise InternalError(f"{where} is {_short(found)}, expected a list of names.")
    if len(found) > _MOST_NAMES:
        raise InternalError(f"{where} has {len(found)} names, more than {_MOST_NAMES}.")
    return tuple(_tensor_name(entry, where) for entry in found)


def _stacks(found: Any, where: str) -> tuple[StackSpec, ...]:
    if not isinstance(found, list) or not found:
        raise InternalError(f"{where}: expected at least one [[stacks]].")
    return tuple(_record(StackSpec, table, f"{where}[{i}]") for i, table in enumerate(found))


def _requirements(found: Any, where: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(found, dict):
        raise InternalError(f"{where} is {_short(found)}, expected a table.")
    return {key: _texts(value, f"{where}.{key}") for key, value in found.items()}


def _table(cls: type[T]) -> Callable[[Any, str], T]:
    return lambda found, where: _record(cls, found, where)


#: How a TOML value becomes a field, by the field's annotation.
_CONVERTERS: dict[str, Callable[[Any, str], Any]] = {
    "str": _text,
    "bool": _flag,
    "float": _number,
    "int": _integer,
    "Choice": _choice,
    "Setting": _setting,
    "tuple[TensorName, ...]": _tensor_names,
    "Setting | None": _setting,
    "WeightsSpec": _table(WeightsSpec),
    "GroupSpec | None": _table(GroupSpec),
    "KeepsSpec": _table(KeepsSpec),
    "ExpertsSpec": _table(ExpertsSpec),
    "NormSpec | None": _table(NormSpec),
    "ProjectionSpec | None": _table(ProjectionSpec),
    "LayersSpec | None": _table(LayersSpec),
    "tuple[str, ...]": _texts,
    "tuple[StackSpec, ...]": _stacks,
    "dict[str, tuple[str, ...]]": _requirements,
    "dict[str, str]": _names,
}


def _check_patterns(stack: StackSpec, where: str) -> None:
    norm = stack.norm.weight + stack.norm.bias if stack.norm else ()
    biases = stack.logit_bias + stack.selection_bias
    others = stack.beside + stack.token_table + stack.weights.expert_scale
    inner = stack.projection
    projection = inner.weight + inner.bias + inner.log_scale if inner else ()
    names = [tensor.name for tensor in stack.weight + biases + norm + projection + others]
    for name in (*names, *stack.mtp_layers):
        if name.count("{layer}.") != 1 or name.count("{") != 1:
            raise InternalError(f"{where}: pattern {_short(name)} must hold '{{layer}}.' once.")
    if inner and not inner.largest_scale > 0.0:
        raise InternalError(
            f"{where}: largest_scale is {inner.largest_scale}, expected more than 0."
        )
    if inner and inner.log_scale and stack.selection_bias:
        raise InternalError(f"{where}: a selection bias beside logits that are cosines.")


def _choices(cls: type, name: str) -> tuple[str, ...]:
    return get_args(get_type_hints(cls)[name])


def _check_names(stack: StackSpec, where: str) -> None:
    """Every step that the stack names exists in the core records."""
    sources = _choices(core.Weights, "source")
    scores = (*sorted(core.MONOTONE_SCORES), RELU)
    named = [("score", step, scores) for step in stack.score.steps]
    named += [("weights.source", step, sources) for step in stack.weights.source.steps]
    if stack.groups:
        named.append(
            ("groups.score", stack.groups.score, (*_choices(core.GroupMask, "score"), "topn_sum"))
        )
    if stack.norm:
        named.append(("norm.kind", stack.norm.kind, _choices(core.Norm, "kind")))
    for key, dtype in vars(stack.keeps).items():
        if dtype and mantissa_bits(dtype) is None:
            raise InternalError(f"{where}: keeps.{key} {_short(dtype)} is no float dtype.")
    for key, found, known in named:
        if found not in known:
            raise InternalError(
                f"{where}: {key} {_short(found)} is no step.", f"Known: {', '.join(known)}."
            )


def _check_text(family: Family, stack: StackSpec, where: str) -> None:
    """The sentences hold known placeholders, as they stand: a width could ask for any length."""
    texts = [(family.text, {"num_experts", "top_k", "groups", "score", "bias"})]
    texts += [(stack.groups.text, {"num_groups", "num_kept"})] if stack.groups else []
    for text, known in texts:
        try:
            found = [parts[1:] for parts in Formatter().parse(text) if parts[1] is not None]
        except ValueError as error:
            raise InternalError(f"{where}: text '{text[:60]}' is no sentence ({error}).") from None
        for name, width, conversion in found:
            if name not in known or width or conversion:
                raise InternalError(
                    f"{where}: text has an unknown placeholder ({name!r}).",
                    f"Known: {', '.join(sorted(known))}.",
                )
