"""Scores of logits divided by a temperature.

Weights and entropies change; sets only where a bias is added to the score, or groups are compared
by sums of scores. A soft cap is divided too, so that the temperature acts on what comes out of it.
Hard limit: ``temperature:1`` is the router itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moegeom.core.router import LogitMap, Router
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, WhatIf
from moegeom.variants.whatif._choices import need_top_k


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_top_k(router)
    temperature = values["tau"]
    if temperature == 1.0:
        return FittedGate(router=router)
    before = router.rule.logit_map or LogitMap()
    after = LogitMap(before.multiplier / temperature, before.soft_cap / temperature)
    return FittedGate(router=replace(router, rule=replace(router.rule, logit_map=after)))


WHATIF = WhatIf(
    name="temperature",
    text="Scores of logits divided by a temperature: below 1 they are sharper.",
    parameters=(
        Parameter(
            "tau",
            "temperature",
            least=1e-6,
            most=1e6,
            is_first=True,
            is_swept=True,
        ),
    ),
    make=_make,
    one_of=("tau",),
)
