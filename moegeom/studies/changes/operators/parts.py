"""Parts that are neither rows, gain nor bias: scales of experts, gate and rows of shared ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.core.router import EXPERT_SCALE, Router
from moegeom.core.shapes import Float, Int64
from moegeom.core.text import percent
from moegeom.studies.changes.edit import Edit, error
from moegeom.studies.changes.record import Change

PART = Edit(
    "part changed",
    "{kind}",
    "rows do not tell it: what experts add to the output changes, and where it is in front of the "
    "router, choices.",
    gate=error,
)

#: Share of the largest number within which a part is a multiple of another.
_WITHIN = 2.0**-7


def part_changes(a: Router, b: Router, place: Int64[np.ndarray, "experts"]) -> Iterator[Change]:
    """Parts that are not the same numbers; scales of experts belong to the rows at ``place``."""
    before, after = dict(a.other_parts), b.other_parts
    scale = before.get(EXPERT_SCALE)
    if scale is not None and len(scale) == a.num_experts:
        before[EXPERT_SCALE] = scale[place]
    for name in {**before, **after}:
        one, other = before.get(name), after.get(name)
        if one is None or other is None:
            there = "is in B alone" if one is None else "is not in B"
            yield PART.change(b.rule, kind=f"{name} {there}", subject=name)
        elif not np.array_equal(one, other, equal_nan=True):
            detail = "" if one.shape != other.shape else _detail(one, other)
            yield PART.change(
                b.rule, kind=f"{name} {_word(one, other)}", subject=name, detail=detail
            )


def _word(one: Float[np.ndarray, "*shape"], other: Float[np.ndarray, "*others"]) -> str:
    """What happened to the numbers of a part."""
    if one.shape != other.shape:
        return "of another shape"
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return "not finite"
    if not other.any():
        return "set to zero"
    before, after = one.astype(np.float64).ravel(), other.astype(np.float64).ravel()
    square = float(before @ before)
    factor = float(before @ after) / square if square else 0.0
    if factor and np.abs(after - factor * before).max() <= _WITHIN * np.abs(after).max():
        return f"scaled by {factor:.4g}" if abs(factor - 1.0) > _WITHIN else "rounded"
    if np.array_equal(np.sort(before), np.sort(after)):
        return "in another order"
    return "changed"


def _detail(one: Float[np.ndarray, "*shape"], other: Float[np.ndarray, "*shape"]) -> str:
    with np.errstate(invalid="ignore"):
        moved = np.abs(other.astype(np.float64) - one)
    number, largest = int((moved != 0.0).sum()), float(np.abs(one).max(initial=0.0))
    most = f", at most by {percent(float(moved.max()) / largest)} of the largest" if largest else ""
    return f"{number:,} of {moved.size:,} numbers{most}"
