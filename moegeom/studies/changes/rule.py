"""Differences of two selection rules, step by step, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from moegeom.core.router import GroupMask, LogitMap, Norm, Rule, Weights
from moegeom.router.rule import groups_in_words, map_in_words

#: What the fields of a rule and of its weights are called, in the order in which they are told.
_NAMES = {
    "top_k": "experts chosen",
    "score": "score",
    "has_selection_bias": "selection bias",
    "has_logit_bias": "logit bias",
    "groups": "groups",
    "logit_map": "map of the logits",
    "capacity": "expert capacity",
    "pick": "experts picked by",
    "source": "weights from",
    "renormalise": "weights divided by their sum",
    "epsilon": "added to that sum",
    "floor": "least sum",
    "power": "power inside the sum",
    "scale": "factor of the weights",
    "jitter": "jitter of the weights",
}


#: What guards the sum of the weights against 0, up to these numbers: of chosen experts the sum is
#: larger by far, and formats of files have guards of their own.
_GUARDS = {"epsilon": 1e-6, "floor": 1e-4}


def rule_differences(a: Rule, b: Rule) -> list[str]:
    """``experts chosen 3 in A, 4 in B`` for every step that is not the same; empty when all are.

    Numbers are the same where float32 does not tell them apart, and so are guards against a sum of
    0: a format may keep its settings in float32 and have another guard.
    """
    first, second = dict(_steps(a)), dict(_steps(b))
    return [
        f"{name} {_said(first[step])} in A, {_said(second[step])} in B"
        for step, name in _NAMES.items()
        if not _is_same(step, first[step], second[step])
    ]


def is_same_norm(a: Norm | None, b: Norm | None) -> bool:
    """Whether kind and epsilon are the same; the offset with which a gain is stored may differ."""
    if a is None or b is None:
        return a is b
    return a.kind == b.kind and _is_same_number(a.eps, b.eps)


def _is_same_number(a: float, b: float) -> bool:
    """Whether the two are equal as float32."""
    return bool(np.float32(a) == np.float32(b))


def _is_same(step: str, a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return _is_same_number(a, b) or max(a, b) <= _GUARDS.get(step, 0.0)
    return a == b


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
