"""Family files: TOML to frozen records, listed by file name."""

from __future__ import annotations

import re
from functools import cache
from string import Formatter
from typing import Any, get_args, get_type_hints

from moegeom.core import router as core
from moegeom.core.documents import record_of_file, shipped_names, shipped_text
from moegeom.core.errors import InternalError
from moegeom.core.limits import FAMILY_CHARACTERS
from moegeom.core.registry import unknown_name
from moegeom.core.router import mantissa_bits
from moegeom.core.text import quoted
from moegeom.router.family import RELU, Family, StackSpec

_PACKAGE = "moegeom.router.families"


def families() -> tuple[str, ...]:
    """Names of all families, sorted."""
    return shipped_names(_PACKAGE)


@cache
def load_family(name: str) -> Family:
    """The family of that name."""
    if name not in families():
        raise unknown_name("family", name, families())
    return parse_family(name, shipped_text(_PACKAGE, name))


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
    return parse_family(name, text, model_types=[name], source="a file of one's own")


def parse_family(name: str, text: str, **defaults: Any) -> Family:
    """The family that a TOML file describes; an unknown key or value is an error."""
    family = record_of_file(Family, name, text, FAMILY_CHARACTERS, **defaults)
    where = f"{name}.toml"
    for stack in family.stacks:
        _check_patterns(stack, where)
        _check_names(stack, where)
        _check_text(family, stack, where)
    return family


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
            raise InternalError(f"{where}: pattern {quoted(name)} must hold '{{layer}}.' once.")
    if inner and not inner.largest_scale > 0.0:
        raise InternalError(
            f"{where}: largest_scale is {inner.largest_scale}, expected more than 0."
        )
    if inner and inner.log_scale and stack.selection_bias:
        raise InternalError(f"{where}: a selection bias beside logits that are cosines.")


@cache
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
            raise InternalError(f"{where}: keeps.{key} {quoted(dtype)} is no float dtype.")
    for key, step, steps in named:
        if step not in steps:
            raise InternalError(
                f"{where}: {key} {quoted(step)} is no step.", f"Known: {', '.join(steps)}."
            )


def _check_text(family: Family, stack: StackSpec, where: str) -> None:
    """The sentences hold known placeholders, as they stand: a width could ask for any length."""
    texts = [(family.text, {"num_experts", "top_k", "groups", "score", "bias"})]
    texts += [(stack.groups.text, {"num_groups", "num_kept"})] if stack.groups else []
    for text, placeholders in texts:
        try:
            fields = [parts[1:] for parts in Formatter().parse(text) if parts[1] is not None]
        except ValueError as error:
            raise InternalError(f"{where}: text '{text[:60]}' is no sentence ({error}).") from None
        for name, width, conversion in fields:
            if name not in placeholders or width or conversion:
                raise InternalError(
                    f"{where}: text has an unknown placeholder ({quoted(name, 40)}).",
                    f"Known: {', '.join(sorted(placeholders))}.",
                )
