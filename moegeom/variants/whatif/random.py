"""A random router of the same shape: rows of random direction, lengths, biases and rule kept.

What differs from it is what training made of the rows. No limit of it is the model; the same seed
gives the same router.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.router import Router
from moegeom.variants.random_router import random_router
from moegeom.variants.what_if import FitSample, FittedGate, WhatIf
from moegeom.variants.whatif._choices import need_top_k


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_top_k(router)
    return FittedGate(router=random_router(router, sample.seed))


WHATIF = WhatIf(
    name="random",
    text="Rows of random direction, with the lengths, biases and rule of the router: chance.",
    parameters=(),
    make=_make,
)
