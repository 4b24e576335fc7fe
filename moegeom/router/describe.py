"""Routers and families in words and as plain data; measures nothing."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from moegeom.core.router import GroupMask, LogitMap, Projection, Router, RouterSet
from moegeom.router.family import DESCRIBED
from moegeom.router.family_file import families, load_family


def describe_router(router: Router) -> dict[str, Any]:
    """Shape, rule and storage of one router."""
    return {
        "router": router.name,
        "experts": router.num_experts,
        "top_k": router.rule.top_k,
        "hidden": router.hidden_size,
        "stored": router.provenance.stored_dtype.lower(),
        "selection": router.rule.selection_score_unit,
        "boundaries": "none"
        if router.listed
        else "linear"
        if router.rule.is_linear
        else "non-linear",
        "rule": rule_in_words(router),
        "finite": bool(np.isfinite(router.weight).all()),
        "tensor": router.provenance.tensors[0],
        "file": router.provenance.file,
    }


def rule_in_words(router: Router) -> str:
    """How the router chooses and weighs, step by step: ``sigmoid + bias, 4 of 8 groups, ...``."""
    rule, weights = router.rule, router.rule.weights
    if router.listed:
        return f"top {rule.top_k}, only counted: {router.listed}"
    steps = ["logits" if rule.score == "identity" else rule.score.replace("_", "-")]
    if rule.has_logit_bias:
        steps[0] += " of biased logits" if rule.score != "identity" else " + bias"
    if rule.has_selection_bias:
        steps[0] += " + selection bias"
    if router.projection is not None:
        steps.insert(0, _projection_in_words(router.projection))
    if rule.logit_map is not None:
        steps.insert(0, map_in_words(rule.logit_map))
    if rule.groups is not None:
        steps.append(groups_in_words(rule.groups))
    is_whole = rule.top_k == router.num_experts
    if rule.pick == "threshold":
        return f"ReLU of {steps[0]}, every expert above 0 (training aims at {rule.top_k})"
    steps.append(f"{'all' if is_whole else 'top'} {rule.top_k}")
    weighing = _WEIGHTS[weights.source]
    steps += [weighing] if weighing else []
    # a softmax over the chosen sums to 1 in any case
    is_news = weights.renormalise and weights.source != "softmax_of_selected_logits"
    steps += ["weights sum to 1"] if is_news else []
    steps += [f"x {weights.scale:g}"] if weights.scale != 1.0 else []
    return ", ".join(steps)


_WEIGHTS = {
    "scores": "",
    "softmax_of_selected_logits": "softmax over the chosen",
    "sigmoid_of_selected_logits": "sigmoid of each chosen",
    "sparsemixer": "sparsemixer",
}


def _projection_in_words(projection: Projection) -> str:
    size = len(projection.weight)
    if projection.scale is None:
        return f"unit rows on {size} projected dimensions"
    return f"cosines in {size} projected dimensions x {projection.scale:g}"


def groups_in_words(groups: GroupMask) -> str:
    """How many groups are kept: ``4 of 8 groups (fill -inf)``."""
    return f"{groups.num_kept} of {groups.num_groups} groups (fill {groups.fill:g})"


def map_in_words(logit_map: LogitMap) -> str:
    """What happens to every logit: ``logits x 0.5, soft cap 30``."""
    steps = [] if logit_map.multiplier == 1.0 else [f"logits x {logit_map.multiplier:g}"]
    steps += [] if np.isinf(logit_map.soft_cap) else [f"soft cap {logit_map.soft_cap:g}"]
    return ", ".join(steps)


def name_patterns(router_set: RouterSet) -> dict[str, int]:
    """Names of the router weights with ``{i}`` for the layer, and how many there are of each."""
    patterns: dict[str, int] = {}
    for router in router_set.routers:
        name = router.provenance.tensors[0]
        pattern = re.sub(rf"(?<![^._]){router.layer}(?=\.)", "{i}", name, count=1)
        patterns[pattern] = patterns.get(pattern, 0) + 1
    return patterns


def rule_origin(family: str) -> str:
    """What says how routers choose: ``options``, ``the family file``, or else ``config``.

    ``config`` is that of the checkpoint, read by a family that is known.
    """
    if family == DESCRIBED:
        return "options"
    return "config" if family in families() else "the family file"


def describe_routers(router_set: RouterSet) -> dict[str, Any]:
    """All routers of a checkpoint with totals, as plain data.

    ``rule_status`` is ``assumed``: only recorded choices verify a rule. ``rule_origin`` says from
    what.
    """
    facts = {
        field.name: getattr(router_set, field.name)
        for field in dataclasses.fields(router_set)
        if field.name not in ("routers", "skipped")
    }
    return facts | {
        "rule_status": "assumed",
        "rule_origin": rule_origin(router_set.family),
        "routers": [describe_router(router) for router in router_set.routers],
        "skipped": [dataclasses.asdict(skipped) for skipped in router_set.skipped],
    }


def describe_families() -> list[dict[str, Any]]:
    """Name, model types, rule and source of every family."""
    return [
        {
            "family": family.name,
            "model types": ", ".join(family.model_types),
            "rule": family.text.replace("{num_experts}", "E")
            .replace("{top_k}", "k")
            .replace("{groups}", "best g of G groups, ")
            .replace("{score}", "score by the config")
            .replace("{bias}", " + selection bias, if any"),
            "checked against": family.source,
        }
        for family in map(load_family, families())
    ]
