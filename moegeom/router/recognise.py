"""Which family a checkpoint belongs to, or the evidence when none is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import RouterError
from moegeom.core.router import Skipped
from moegeom.router.family import Family
from moegeom.router.family_file import families, family_of
from moegeom.router.proposal import describe_candidates, suggested_options


def recognise_family(store: TensorStore) -> Family:
    """The family that ``model_type`` of the config names."""
    model_type = model_type_of(store.config)
    if not isinstance(model_type, str):
        found = f"model_type {model_type!r}" if store.config else "no config.json"
        raise RouterError(
            f"{store.label}: found {found}, expected a config.json with a model_type. "
            f"{describe_candidates(store)}",
            f"Put the model's config.json beside its weights.{_or(store)}",
        )
    family = family_of(model_type)
    if family is None:
        raise RouterError(
            f"{store.label}: the selection rule of model_type {model_type[:60]!r} is not known. "
            f"{describe_candidates(store)}",
            f"{_options(store)}`moegeom families` lists the {len(families())} families that are "
            "known.",
        )
    return family


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
            f"{store.label}: the {len(listed)} routers of family {family.name} "
            f"('{listed[0].tensor}' ...) cannot be measured: {listed[0].reason}.",
            "Record what the model chose (stage ids) and compare loads there.",
        )
    patterns = ", ".join(f"'{p.name}'" for stack in family.stacks for p in stack.weight)
    return RouterError(
        f"{store.label}: none of {len(store.names())} tensors is a router of family "
        f"{family.name} ({patterns}). {describe_candidates(store)}",
        "Is this a dense model, or a part of a checkpoint?",
    )


def _options(store: TensorStore) -> str:
    options = suggested_options(store)
    if not options:
        return ""
    return f"If that is what they are, say how they choose: {options}; --family FILE says more. "


def _or(store: TensorStore) -> str:
    options = suggested_options(store)
    return f" Or say how the routers choose: {options}." if options else ""
