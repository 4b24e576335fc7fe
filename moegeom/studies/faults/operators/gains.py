"""The gain of the norm in front: left out, applied twice, one too much, or of another router."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.router import Router
from moegeom.studies.faults.operator import Operator, Proposal, Site, routed


def _times(router: Router, factor: np.ndarray | None) -> Router | None:
    """Rows with a gain multiplied by this factor; None where that changes nothing."""
    if factor is None or (factor == 1.0).all() or not np.isfinite(factor).all():
        return None
    rows = (router.weight.astype(np.float64) * factor).astype(router.weight.dtype)
    return dataclasses.replace(router, weight=rows)


def _gains(site: Site) -> Iterator[Proposal]:
    router, gain = site.router, site.router.gain
    if gain is None:
        return
    own = gain.astype(np.float64)
    inverse = 1.0 / own if own.all() else None
    edits = [
        ("gain_missing", "norm gain left out", inverse, 0.0),
        ("gain_twice", "norm gain applied twice", own, 0.0),
        ("gain_and_one", "norm gain taken as 1 + g", _ratio(1.0 + own, own), 1.0),
        ("gain_less_one", "norm gain taken as g - 1", _ratio(own - 1.0, own), 1.0),
    ]
    if site.other is not None and site.other.gain is not None:
        ratio = _ratio(site.other.gain.astype(np.float64), own)
        edits.append(("gain_of_other", "norm gain of the other checkpoint", ratio, 0.0))
    bits = math.log2(max(len(site.routers), 2))
    for number, other in enumerate(site.routers):
        if number != site.number and other.gain is not None and other.gain.shape == own.shape:
            ratio = _ratio(other.gain.astype(np.float64), own)
            text = f"norm gain of layer {other.layer} for {router.layer}"
            edits.append((f"gain_of_layer{number - site.number:+d}", text, ratio, bits))
    for name, text, factor, cost in edits:
        edited = _times(router, factor)
        for one in routed(site, name, text, "gain not folded", edited, bits=cost):
            yield dataclasses.replace(one, of_all_only=True)  # a gain is that of all experts


def _ratio(gain: np.ndarray, own: np.ndarray) -> np.ndarray | None:
    return gain / own if own.all() else None


GAINS = Operator("gains", _gains)
