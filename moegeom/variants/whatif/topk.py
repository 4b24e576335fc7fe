"""Another number of experts a token: the K largest instead of the k that training had.

Weights are those of the rule over the new set, so that they are renormalised where the rule does
it. Hard limit: ``topk:k`` is the router itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moegeom.core.router import Router
from moegeom.core.text import number_of
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, WhatIf
from moegeom.variants.whatif._choices import need_top_k, refuse


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_top_k(router)
    rule, k = router.rule, values["k"]
    groups = rule.groups
    room = router.num_experts
    if groups is not None:
        room = room // groups.num_groups * groups.num_kept
    if k > room:
        raise refuse(router, f"a token can have {number_of(room, 'expert')} at most, not {k}")
    reached = {"flop_factor": k / rule.top_k}
    if k == rule.top_k:
        return FittedGate(router=router, reached=reached)
    return FittedGate(router=replace(router, rule=replace(rule, top_k=k)), reached=reached)


WHATIF = WhatIf(
    name="topk",
    text="The K best experts of each token instead of k.",
    parameters=(
        Parameter(
            "k",
            "experts of each token",
            least=1,
            most=100_000,
            is_whole=True,
            is_first=True,
            is_swept=True,
        ),
    ),
    make=_make,
    one_of=("k",),
)
