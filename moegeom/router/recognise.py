"""Which family a checkpoint belongs to, or the evidence when none is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import RouterError
from moegeom.core.router import Skipped
from moegeom.core.text import number_of, quoted
from moegeom.router.family import Family
from moegeom.router.family_file import families, family_of, load_family
from moegeom.router.proposal import describe_candidates, suggest
from moegeom.router.settings import Settings

#: Tables of a config that describe the language model inside a larger one.
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
_DEEPEST = 4


def recognise_family(store: TensorStore) -> Family:
    """The family that ``model_type`` of the config names, or that of its language model.

    The type of the whole counts where it is known; the rule of an inner one is read in its table.
    """
    model_type = model_type_of(store.config)
    family = family_of(model_type) if isinstance(model_type, str) else None
    if family is not None:
        return family
    inner = {path: model for path, _, model in _inner(store.config) if model is not None}
    if len(inner) == 1:
        (path, model), *_ = inner.items()
        return _moved(model, path)
    if inner:
        models = " and ".join(f"{path} of family {model.name}" for path, model in inner.items())
        raise RouterError(
            f"{store.label}: config.json describes {len(inner)} language models, {models}; which "
            "tensors belong to which is not known.",
            f"--family {next(iter(inner.values())).name} loads the routers of one.",
        )
    if not isinstance(model_type, str):
        found_type = f"model_type {quoted(model_type)}" if store.config else "no config.json"
        raise RouterError(
            f"{store.label}: found {found_type}, expected a config.json with a model_type. "
            f"{describe_candidates(store)}",
            f"Put the model's config.json beside its weights.{_or(store)}",
        )
    types = [model_type, *(kind for _, kind, _ in _inner(store.config) if kind != model_type)]
    inside = f" (inside: {', '.join(repr(kind[:60]) for kind in types[1:])})" if types[1:] else ""
    raise RouterError(
        f"{store.label}: the selection rule of model_type {model_type[:60]!r}{inside} is not "
        f"known. {describe_candidates(store)}",
        f"{_relatives(types)}{_options(store)}`moegeom families` lists the {len(families())} "
        "families that are known.",
    )


def placed_family(family: Family, config: Mapping[str, Any]) -> Family:
    """A family that somebody names, reading the table of the config that counts experts chosen.

    Composites keep the settings of their language model in a table of their own.
    """
    spec = family.stacks[0]
    roots = spec.config_roots or family.config_roots
    if Settings(config, roots).has(spec.top_k):
        return family
    places = (_moved(family, path) for path in _tables(config))
    return next(
        (
            moved
            for moved in places
            if Settings(config, moved.stacks[0].config_roots or moved.config_roots).has(spec.top_k)
        ),
        family,
    )


def recognition_notes(config: Mapping[str, Any], family: Family) -> list[str]:
    """A sentence where the rule is that of a language model inside a type that is not known."""
    model_type = model_type_of(config)
    if not isinstance(model_type, str) or model_type in family.model_types:
        return []
    for path, kind, model in _inner(config):
        if model is not None and model.name == family.name:
            reason = f"model_type {model_type[:60]!r} is not known"
            return [f"{reason}: the rule is that of its {path}, {kind[:60]!r}"]
    return []


def _tables(config: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[str]:
    """Paths of the tables that describe a language model, outer ones first."""
    for key in _INNER:
        if isinstance(config.get(key), Mapping) and depth < _DEEPEST:
            yield path + key
            yield from _tables(config[key], f"{path}{key}.", depth + 1)


def _inner(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Family | None]]:
    """Path, type and family of language models inside; none inside of a family that is known."""
    outer_paths: list[str] = []
    for path in _tables(config):
        table: Any = config
        for key in path.split("."):
            table = table[key]
        kind = table.get("model_type")
        if not isinstance(kind, str) or any(path.startswith(f"{outer}.") for outer in outer_paths):
            continue
        family = family_of(kind)
        outer_paths += [path] if family is not None else []
        yield path, kind, family


def _moved(family: Family, path: str) -> Family:
    """The family reading its settings at a path of the config."""

    def roots(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{path}.{root}" if root else path for root in old)

    stacks = tuple(replace(s, config_roots=roots(s.config_roots)) for s in family.stacks)
    return replace(family, stacks=stacks, config_roots=roots(family.config_roots))


def _relatives(types: Sequence[str]) -> str:
    """Families whose types are spelled like one of these, as a question."""
    name_of_type = {kind: name for name in families() for kind in load_family(name).model_types}
    near = [
        kind
        for one in types
        for kind in (
            *sorted((t for t in name_of_type if one.startswith(f"{t}_")), key=len, reverse=True),
            *get_close_matches(one[:60], name_of_type, n=2, cutoff=0.75),
        )
    ]
    names = list(dict.fromkeys(name_of_type[kind] for kind in near))[:2]
    if not names:
        return ""
    listed = " or ".join(f"--family {name}" for name in names)
    return f"If it routes like a family of a similar name, say so: {listed}. "


#: Configs without a model type, by the keys that they have: original files of Mistral and Meta
#: (params.json) and of gpt-oss, and arguments of torchscale.
_UNNAMED = {
    frozenset({"moe", "dim"}): "params-moe",
    frozenset({"moe_args", "dim"}): "params-moe-args",
    frozenset({"experts_per_token", "num_experts", "swiglu_limit"}): "gpt-oss-original",
    frozenset({"use_xmoe", "moe_expert_count"}): "xmoe",
}


def model_type_of(config: Mapping[str, Any]) -> object:
    """The model type that families are found by; that of a GGUF file names its architecture."""
    model_type = config.get("model_type")
    if model_type is None:
        return next((name for keys, name in _UNNAMED.items() if keys <= config.keys()), None)
    architecture = config.get("architecture")
    is_gguf = model_type == "gguf" and isinstance(architecture, str)
    return f"gguf-{architecture}" if is_gguf else model_type


def no_routers(store: TensorStore, family: Family, listed: Sequence[Skipped] = ()) -> RouterError:
    """The error for a checkpoint of a known family in which no router was found.

    ``listed`` are routers whose choice does not follow from their input.
    """
    if listed:
        return RouterError(
            f"{store.label}: the {number_of(len(listed), 'router')} of family {family.name} "
            f"('{listed[0].tensor}' ...) cannot be measured: {listed[0].reason}.",
            "What the model chose can be counted: moegeom scan CKPT --tokens REC, a trace of "
            "an engine (docs/capture/engines.md) or ids that RecordingWriter wrote in a loop of "
            "your own (docs/recordings.md); moegeom capture does not record it.",
        )
    patterns = ", ".join(f"'{p.name}'" for stack in family.stacks for p in stack.weight)
    return RouterError(
        f"{store.label}: none of {len(store.names())} tensors is a router of family "
        f"{family.name} ({patterns}). {describe_candidates(store)}",
        "Is this a dense model, or a part of a checkpoint?",
    )


def _options(store: TensorStore) -> str:
    advice = suggest(store)
    return f"If that is what they are, say how they choose: {advice.text} " if advice else ""


def _or(store: TensorStore) -> str:
    advice = suggest(store)
    if advice is None:
        return " Or say which tensors are routers: --router-pattern REGEX --top-k K --score NAME"
    return f" Or say how the routers choose: {advice.text}"
