"""Which tensors of an unknown checkpoint are its routers, with the evidence: a question."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import CheckpointError
from moegeom.router.choice_bias import (
    has_one_number_for_each,
    name_regex,
    sounds_like_choice_bias,
)

#: A path component that says gate or router. ``gate_proj``, ``gate_up_proj`` (half of an expert),
#: ``shared_expert_gate`` (one row) and gates of attention are never routers.
_SOUNDS_LIKE = re.compile(r"(?:^|[._])(?:gate|router|router_gate|classifier|wg)(?:[._]|$)")
_NEVER = re.compile(
    r"gate_proj|gate_up_proj|shared_experts?_gate|experts\.[0-9]|lm_head|embed|norm|attn_gate"
    r"|(?:^|\.)(?:optim|optimizer)\."
)
_NUMBER = re.compile(r"(?<![^._])[0-9]+(?=\.)")
_LONGEST_NAME = 200

#: Keys of a config that count experts, hidden dimensions, chosen experts.
_EXPERTS = re.compile(r"(?:^|\.)(?:[a-z_]*experts?(?:_num)?|expert_count)$")
_HIDDEN = re.compile(r"(?:^|\.)(?:hidden_size|d_model|dim|n_embd|embedding_length)$")
_TOP_K = re.compile(r"top_?k(?!_group)|experts_per_tok|(?:^|\.)moe_k$|expert_used_count")
_DEEPEST = 6

_MOST_SHOWN = 3


@dataclass(frozen=True)
class Candidate:
    """Tensors of one name pattern (``{i}`` for numbers) that may be routers.

    ``evidence`` holds one phrase for each thing that speaks for them.
    """

    pattern: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    evidence: tuple[str, ...]

    @property
    def has_router_name(self) -> bool:
        """True when the name says gate or router."""
        return bool(_SOUNDS_LIKE.search(self.pattern))

    @property
    def regex(self) -> str:
        """A regular expression for the names, the layer number in a group."""
        return name_regex(self.names[0])


def propose_routers(store: TensorStore) -> list[Candidate]:
    """Candidates, most evidence first; reads the headers of a first, a middle and a last layer."""
    said = _numbers(store.config)
    experts = expert_counts(store)
    widths = {value for key, value in said if _HIDDEN.search(key)}
    names = [name for name in store.names() if len(name) <= _LONGEST_NAME]
    owners = {name.partition("experts")[0] for name in names if "experts" in name}
    found = []
    for pattern, group in _by_pattern(names).items():
        shape = _shape(store, group)
        if shape is None:
            continue
        evidence = list(_evidence(pattern, group, shape, experts, widths, owners))
        # matrices of a hidden size, the same in many layers, are most of a model
        speaks = _SOUNDS_LIKE.search(pattern) or min(shape) in experts
        if speaks and len(evidence) >= 2:
            found.append(Candidate(pattern, tuple(group), shape, tuple(evidence)))
    return sorted(found, key=lambda c: -len(c.evidence))


def describe_candidates(store: TensorStore) -> str:
    """A sentence on the tensors that look like routers."""
    found = propose_routers(store)
    named = [candidate for candidate in found if candidate.has_router_name]
    found = (named or found)[:_MOST_SHOWN]
    if not found:
        return f"No tensor of {len(store.names())} looks like a router."
    shown = "; ".join(f"{c.pattern} {c.shape} ({', '.join(c.evidence)})" for c in found)
    return f"Tensors that look like routers: {shown}."


def suggested_options(store: TensorStore) -> str:
    """Options that load the best candidate, with a question mark for what is not known."""
    found = propose_routers(store)
    if not found:
        return ""
    top_k = sorted({value for key, value in _numbers(store.config) if _TOP_K.search(key)})
    k = str(top_k[0]) if len(top_k) == 1 else "K"
    biases = "".join(f" {option} '{regex}'" for option, regex in _biases(store, found[0]))
    return f"--router-pattern '{found[0].regex}' --top-k {k} --score NAME{biases}"


def _biases(store: TensorStore, candidate: Candidate) -> Iterator[tuple[str, str]]:
    """An option and its regular expression for each bias of the routers that the names show."""
    stem = candidate.pattern.rpartition(".")[0] + "."
    layer = candidate.pattern.partition("{i}.")[0] + "{i}."
    for pattern, group in _by_pattern(store.names()).items():
        is_own = pattern == f"{stem}bias"
        if not pattern.startswith(layer) or not (is_own or sounds_like_choice_bias(pattern)):
            continue
        if has_one_number_for_each(store.info(group[0]), min(candidate.shape)):
            yield "--logit-bias" if is_own else "--selection-bias", name_regex(group[0])


def expert_counts(store: TensorStore) -> set[int]:
    """Every number of the config that counts experts."""
    return {v for key, v in _numbers(store.config) if _EXPERTS.search(key) and v > 1}


def _by_pattern(names: Collection[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        if not _NEVER.search(name):
            groups.setdefault(_NUMBER.sub("{i}", name), []).append(name)
    # one number is the layer; two are a layer and an expert or a block of a decoder
    return {p: group for p, group in groups.items() if 1 <= p.count("{i}") <= 2}


def _shape(store: TensorStore, names: list[str]) -> tuple[int, ...] | None:
    """Their shape, (few, many), when first, middle and last have the same; else None."""
    sample = {names[0], names[len(names) // 2], names[-1]}
    try:
        shapes = {store.info(name).shape for name in sample}
    except CheckpointError:
        return None  # this is evidence for another error, which must not be hidden
    shape = shapes.pop()
    is_matrix = len(shape) == 2 and 1 < min(shape) < max(shape)
    return shape if not shapes and is_matrix else None


def _evidence(
    pattern: str,
    names: list[str],
    shape: tuple[int, ...],
    experts: Collection[int],
    widths: Collection[int],
    owners: Collection[str],
) -> Iterator[str]:
    few, many = min(shape), max(shape)
    if _SOUNDS_LIKE.search(pattern):
        yield "its name"
    if few in experts:
        yield f"{few} experts in the config"
    if many in widths:
        yield f"hidden size {many} in the config"
    if len(names) > 1:
        yield f"the same in {len(names)} layers"
    if any(_is_beside(names[0], owner) for owner in owners):
        yield "experts beside it"


def _is_beside(name: str, owner: str) -> bool:
    """True when the experts lie in the module of the tensor, or in one around it."""
    return len(owner) > 0 and owner.count(".") >= 2 and name.startswith(owner)


def _numbers(config: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, int]]:
    """Every integer of the config by its dotted key; lists count by their first entry."""
    found: list[tuple[str, int]] = []
    for key, value in config.items():
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, Mapping) and depth < _DEEPEST:
            found += _numbers(value, f"{prefix}{key}.", depth + 1)
        elif type(value) is int:
            found.append((f"{prefix}{key}", value))
    return found
