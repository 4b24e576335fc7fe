"""The selection rule of a router, from what the family says and what the config says."""

from __future__ import annotations

from typing import Any, cast

from moegeom.core.errors import RouterError
from moegeom.core.router import GroupMask, Norm, Rule, Weights
from moegeom.router.family import Family, GroupSpec, LayersSpec, NormSpec, Setting, StackSpec
from moegeom.router.integrity import CONFIG_CONTRADICTED
from moegeom.router.settings import Settings


def build_rule(stack: StackSpec, settings: Settings, num_experts: int, router: str) -> Rule:
    """The rule of one router with ``num_experts`` rows."""
    top_k = settings.integer(stack.top_k, least=1)
    if top_k > num_experts:
        raise RouterError(
            f"{router}: config.json says that {top_k} experts are chosen; "
            f"the router has {num_experts}.",
            code=CONFIG_CONTRADICTED,
        )
    return Rule(
        top_k=top_k,
        score=stack.score,
        weights=Weights(
            source=cast(Any, stack.weights.source),
            renormalise=settings.flag(stack.weights.renormalise),
            epsilon=stack.weights.epsilon,
            scale=settings.number(stack.weights.scale),
        ),
        has_selection_bias=bool(stack.selection_bias),
        has_logit_bias=bool(stack.logit_bias),
        groups=stack.groups and _build_groups(stack.groups, settings, num_experts, top_k, router),
    )


def _build_groups(
    spec: GroupSpec, settings: Settings, num_experts: int, top_k: int, router: str
) -> GroupMask | None:
    """The group mask, or None when it keeps everything (one group, or all groups kept)."""
    num_groups = settings.integer(spec.num_groups)
    if num_groups <= 1:
        return None
    num_kept = settings.integer(spec.num_kept, least=1)
    if num_kept > num_groups:
        raise RouterError(f"{router}: {num_kept} of {num_groups} groups cannot be kept.")
    if num_experts % num_groups:
        raise RouterError(
            f"{router}: {num_experts} experts do not divide into {num_groups} groups.",
            code=CONFIG_CONTRADICTED,
        )
    size = num_experts // num_groups
    if spec.score == "top2_sum" and size < 2:
        raise RouterError(f"{router}: groups of {size} have no sum of two largest scores.")
    if num_kept * size < top_k:
        raise RouterError(
            f"{router}: {num_kept} groups of {size} experts are kept, "
            f"fewer than the {top_k} experts to choose."
        )
    if num_kept == num_groups:
        return None
    return GroupMask(num_groups, num_kept, cast(Any, spec.score), spec.fill)


def build_norm(spec: NormSpec, settings: Settings, tensor: str) -> Norm:
    """The norm in front of a router."""
    return Norm(cast(Any, spec.kind), settings.number(spec.eps), tensor, spec.gain_offset)


def check_required(family: Family, settings: Settings) -> None:
    """Raise if the config asks for another rule than the family's."""
    for key, allowed in family.require.items():
        if not settings.has(Setting((key,))):
            continue
        name, value = settings.get(Setting((key,)))
        if value not in allowed:
            raise RouterError(
                f"config.json: {name} is {str(value)[:60]!r}; the rule of family {family.name} is "
                f"known for {' or '.join(repr(a) for a in allowed)}."
            )


def expected_layers(spec: LayersSpec | None, settings: Settings) -> frozenset[int] | None:
    """Layers that should have a router, or None if neither family nor config says."""
    if spec is None or not all(settings.has(s) for s in (spec.count, spec.first, spec.step)):
        return None
    first = settings.integer(spec.first)
    step = settings.integer(spec.step, least=1)
    dense = settings.layer_list(spec.dense)
    layers = range(first, settings.layer_count(spec.count))
    return frozenset(i for i in layers if (i + 1) % step == 0 and i not in dense)


def rule_text(family: Family, rule: Rule, num_experts: int, stack: StackSpec) -> str:
    """The family's sentence with the numbers of one router."""
    groups = ""
    if rule.groups and stack.groups:
        groups = stack.groups.text.format(
            num_groups=rule.groups.num_groups, num_kept=rule.groups.num_kept
        )
    return family.text.format(num_experts=num_experts, top_k=rule.top_k, groups=groups)
