"""Family files: TOML to frozen records, listed by file name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from string import Formatter
from typing import Any, TypeVar, get_args, get_type_hints

from moegeom.core import router as core
from moegeom.core.errors import InternalError
from moegeom.core.limits import FAMILY_CHARACTERS
from moegeom.core.registry import unknown_name
from moegeom.core.router import mantissa_bits
from moegeom.router.family import (
    RELU,
    Choice,
    ExpertsSpec,
    Family,
    GroupSpec,
    KeepsSpec,
    LatentSpec,
    LayersSpec,
    NormSpec,
    ProjectionSpec,
    Setting,
    StackSpec,
    TensorName,
    Value,
    WeightsSpec,
)
from moegeom.router.toml_records import (
    SUFFIX,
    as_flag,
    as_integer,
    as_number,
    as_text,
    as_texts,
    as_texts_by_key,
    is_number,
    names_in,
    record_of,
    short,
    table_of,
    text_in,
)

T = TypeVar("T")

_PACKAGE = "moegeom.router.families"

#: Names of one tensor; families here have up to five.
_MOST_NAMES = 100

#: How a router weight can lie in its tensor.
LAYOUTS = ("rows", "transposed", "flat")


def families() -> tuple[str, ...]:
    """Names of all families, sorted."""
    return names_in(_PACKAGE)


@cache
def load_family(name: str) -> Family:
    """The family of that name."""
    if name not in families():
        raise unknown_name("family", name, families())
    return parse_family(name, text_in(_PACKAGE, name))


@cache
def family_of_class(name: str, model_type: str) -> Family | None:
    """The family of a class such as ``Qwen3MoeForCausalLM``, named for one of its model types;
    that of ``model_type`` where the class is named for it, or for the text part of it.
    """
    stem = _plain(re.sub(r"(For[A-Z][A-Za-z]*|LMHeadModel|Model)$", "", name))
    if _plain(model_type) in (stem, f"{stem}text"):
        return family_of(model_type)
    each = map(load_family, sorted(families()))
    return next((one for one in each if stem in map(_plain, one.model_types)), None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


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
    where = f"{name}{SUFFIX}"
    table = {"name": name, **(defaults or {}), **table_of(text, where, FAMILY_CHARACTERS)}
    family = record_of(Family, table, where, _CONVERTERS)
    for stack in family.stacks:
        _check_patterns(stack, where)
        _check_names(stack, where)
        _check_text(family, stack, where)
    return family


def _value(found: Any, where: str) -> Value:
    if not is_number(found):
        raise InternalError(f"{where} is {short(found)}, expected a number, true or false.")
    return found


def _default(found: Any, where: str) -> Value | tuple[int, ...]:
    if isinstance(found, list):
        return tuple(as_integer(entry, where) for entry in found)
    return _value(found, where)


def _keys(found: Any, where: str) -> tuple[str, ...]:
    return (found,) if isinstance(found, str) else as_texts(found, where)


def _setting(found: Any, where: str) -> Setting:
    if is_number(found):
        return Setting(value=found)
    if isinstance(found, str | list):
        return Setting(keys=_keys(found, where))
    if not isinstance(found, dict):
        raise InternalError(f"{where} is {short(found)}, expected a config key, some, or a value.")
    known: dict[str, Callable[[Any, str], Any]] = {
        "key": _keys, "default": _default, "plus": as_text, "minus": as_text, "over": as_number,
        "zero": as_number, "values": _meanings,
    }  # fmt: skip
    made = _entries(found, known, where)
    return Setting(keys=made.pop("key", ()), **made)


def _choice(found: Any, where: str) -> Choice:
    if isinstance(found, str):
        return Choice(step=found)
    if not isinstance(found, dict):
        raise InternalError(f"{where} is {short(found)}, expected a string or a table.")
    known = {"key": _keys, "default": as_text, "unset": as_text, "values": as_texts_by_key}
    made = _entries(found, known, where)
    return Choice(keys=made.pop("key", ()), **made)


def _meanings(found: Any, where: str) -> dict[str, Value]:
    if not isinstance(found, dict):
        raise InternalError(f"{where} is {short(found)}, expected a table.")
    return {key: _value(value, f"{where}.{key}") for key, value in found.items()}


def _entries(found: Any, known: dict[str, Callable[[Any, str], Any]], where: str) -> dict[str, Any]:
    """The values of a small inline table."""
    if not isinstance(found, dict) or not found.keys() <= known.keys():
        raise InternalError(f"{where} is {short(found)}, expected a table of {', '.join(known)}.")
    return {key: known[key](value, f"{where}.{key}") for key, value in found.items()}


def _tensor_name(found: Any, where: str) -> TensorName:
    if isinstance(found, str):
        return TensorName(found)
    made = _entries(found, {"name": as_text, "layout": as_text, "row": as_integer}, where)
    if made.get("layout", "rows") not in LAYOUTS:
        raise InternalError(
            f"{where}: {short(made['layout'])} is no layout.", f"Known: {', '.join(LAYOUTS)}."
        )
    return TensorName(**made)


def _tensor_names(found: Any, where: str) -> tuple[TensorName, ...]:
    if not isinstance(found, list) or not found:
        raise InternalError(f"{where} is {short(found)}, expected a list of names.")
    if len(found) > _MOST_NAMES:
        raise InternalError(f"{where} has {len(found)} names, more than {_MOST_NAMES}.")
    return tuple(_tensor_name(entry, where) for entry in found)


def _stacks(found: Any, where: str) -> tuple[StackSpec, ...]:
    if not isinstance(found, list) or not found:
        raise InternalError(f"{where}: expected at least one [[stacks]].")
    return tuple(_table(StackSpec)(table, f"{where}[{i}]") for i, table in enumerate(found))


def _requirements(found: Any, where: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(found, dict):
        raise InternalError(f"{where} is {short(found)}, expected a table.")
    return {key: as_texts(value, f"{where}.{key}") for key, value in found.items()}


def _table(cls: type[T]) -> Callable[[Any, str], T]:
    return lambda found, where: record_of(cls, found, where, _CONVERTERS)


#: How a TOML value becomes a field, by the field's annotation.
_CONVERTERS: dict[str, Callable[[Any, str], Any]] = {
    "str": as_text,
    "bool": as_flag,
    "float": as_number,
    "int": as_integer,
    "Choice": _choice,
    "Setting": _setting,
    "tuple[TensorName, ...]": _tensor_names,
    "Setting | None": _setting,
    "WeightsSpec": _table(WeightsSpec),
    "GroupSpec | None": _table(GroupSpec),
    "KeepsSpec": _table(KeepsSpec),
    "ExpertsSpec": _table(ExpertsSpec),
    "LatentSpec | None": _table(LatentSpec),
    "NormSpec | None": _table(NormSpec),
    "ProjectionSpec | None": _table(ProjectionSpec),
    "LayersSpec | None": _table(LayersSpec),
    "tuple[str, ...]": as_texts,
    "tuple[StackSpec, ...]": _stacks,
    "dict[str, tuple[str, ...]]": _requirements,
    "dict[str, str]": as_texts_by_key,
}


def _check_patterns(stack: StackSpec, where: str) -> None:
    norm = stack.norm.weight + stack.norm.bias if stack.norm else ()
    biases = stack.logit_bias + stack.selection_bias
    others = stack.beside + stack.token_table + stack.weights.expert_scale
    inner = stack.projection
    projection = inner.weight + inner.bias + inner.log_scale if inner else ()
    experts = stack.experts.gain
    if latent := stack.experts.latent:
        experts += latent.into + latent.out_of
        experts += tuple(n for s in (latent.norm, latent.output_norm) if s for n in s.weight)
    tensors = stack.weight + biases + norm + projection + others + experts
    names = [tensor.name for tensor in tensors]
    for name in (*names, *stack.mtp_layers):
        if name.count("{layer}.") != 1 or name.count("{") != 1:
            raise InternalError(f"{where}: pattern {short(name)} must hold '{{layer}}.' once.")
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
            raise InternalError(f"{where}: keeps.{key} {short(dtype)} is no float dtype.")
    for key, found, known in named:
        if found not in known:
            raise InternalError(
                f"{where}: {key} {short(found)} is no step.", f"Known: {', '.join(known)}."
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
