"""Where two selection rules differ, step by step, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.router.describe import groups_in_words, map_in_words

#: What the fields of a rule and of its weights are called, in the order in which they are told.
_NAMES = {
    "top_k": "experts chosen",
    "score": "score",
    "has_selection_bias": "selection bias",
    "has_logit_bias": "logit bias",
    "groups": "groups",
    "logit_map": "map of the logits",
    "capacity": "expert capacity",
    "source": "weights from",
    "renormalise": "weights divided by their sum",
    "epsilon": "added to that sum",
    "floor": "least sum",
    "power": "power inside the sum",
    "scale": "factor of the weights",
    "jitter": "jitter of the weights",
}


def rule_differences(a: Rule, b: Rule) -> list[str]:
    """``experts chosen 3 in A, 4 in B`` for every step that is not the same; empty when all are."""
    first, second = dict(_steps(a)), dict(_steps(b))
    return [
        f"{name} {_said(first[step])} in A, {_said(second[step])} in B"
        for step, name in _NAMES.items()
        if first[step] != second[step]
    ]


def _steps(rule: Rule) -> Iterator[tuple[str, Any]]:
    for part in (rule, rule.weights):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if not isinstance(value, Weights):
                yield field.name, value


def _said(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, GroupMask):
        return f"{groups_in_words(value)} by {value.score.replace('_', ' ')}"
    if isinstance(value, LogitMap):
        return map_in_words(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value).replace("_", " ")
