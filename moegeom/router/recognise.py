"""Which family a checkpoint belongs to, or the evidence when none is known."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.router import Skipped
from moegeom.router.family import Family
from moegeom.router.family_file import families, family_of

#: A path component that says gate or router. ``gate_proj``, ``gate_up_proj`` (half of an expert)
#: and ``shared_expert_gate`` (one row) are never routers.
_SOUNDS_LIKE = re.compile(r"(?:^|[._])(?:gate|router)(?:\.|_weight$|$)")
_NEVER = re.compile(r"gate_proj|gate_up_proj|shared_experts?_gate|experts\.[0-9]")
_LAYER = re.compile(r"[0-9]+")

_MOST_SHOWN = 5


def recognise_family(store: TensorStore) -> Family:
    """The family that ``model_type`` of the config names."""
    model_type = store.config.get("model_type")
    if not isinstance(model_type, str):
        found = f"model_type {model_type!r}" if store.config else "no config.json"
        raise RouterError(
            f"{store.label}: found {found}, expected a config.json with a model_type. "
            f"{describe_candidates(store)}",
            "Put the model's config.json beside its weights.",
        )
    family = family_of(model_type)
    if family is None:
        raise RouterError(
            f"{store.label}: the selection rule of model_type {model_type[:60]!r} is not known. "
            f"{describe_candidates(store)}",
            f"`moegeom families` lists the {len(families())} families that are known.",
        )
    return family


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


def describe_candidates(store: TensorStore) -> str:
    """A sentence on the tensors that look like routers: wide matrices, the same in every layer."""
    candidates = find_candidates(store)
    if not candidates:
        return f"No tensor of {len(store.names())} looks like a router."
    return f"Tensors that look like routers: {'; '.join(candidates)}."


def find_candidates(store: TensorStore) -> list[str]:
    """Up to five name patterns with their shape, which is the same in the layers looked at."""
    found = []
    for pattern, names in _by_pattern(store.names()).items():
        # First, middle and last layer: enough to see a constant shape, and few headers to read.
        sample = {names[0], names[len(names) // 2], names[-1]}
        try:
            shapes = {store.info(name).shape for name in sample}
        except CheckpointError:
            continue  # this is evidence for another error, which must not be hidden
        shape = shapes.pop()
        if not shapes and len(shape) == 2 and 1 < shape[0] < shape[1]:
            found.append(f"{pattern} {shape} in {len(names)} layers")
        if len(found) == _MOST_SHOWN:
            break
    return found


def _by_pattern(names: Collection[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        # Names come from a file that nobody vouches for: long ones are no evidence.
        if len(name) <= 200 and _SOUNDS_LIKE.search(name) and not _NEVER.search(name):
            groups.setdefault(_LAYER.sub("{i}", name), []).append(name)
    return groups
