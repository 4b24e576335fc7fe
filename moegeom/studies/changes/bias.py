"""What happened to the biases of a router: rounded, shifted, left behind or changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64

from moegeom.core.router import Router, Rule, mantissa_bits
from moegeom.geometry.number_formats import cast_of
from moegeom.studies.changes.words import change
from moegeom.studies.diff.record import Change


@dataclass(frozen=True, eq=False)
class Biases:
    """The biases of one router by name, None where it has none, and how they are stored."""

    values: Mapping[str, Float[np.ndarray, "experts"] | None]
    dtype: str
    rule: Rule

    @staticmethod
    def of(router: Router) -> Biases:
        """Those of a router; the selection bias is the one whose dtype is known."""
        values = {"selection bias": router.selection_bias, "logit bias": router.logit_bias}
        return Biases(values, router.provenance.bias_dtype, router.rule)


def bias_changes(a: Biases, b: Biases, place: Int64[np.ndarray, "experts"]) -> list[Change]:
    """Changes of the selection bias and of the logit bias; none where one side has no such bias.

    Bias ``place[i]`` of ``a`` is compared with bias i of ``b``: it belongs to the row.
    """
    found = []
    for name, before in a.values.items():
        after = b.values.get(name)
        if before is None or after is None or before.shape != after.shape:
            continue
        if (changed := _change(name, before, after, place, b)) is not None:
            found.append(changed)
    return found


def _change(
    name: str,
    before: Float[np.ndarray, "experts"],
    after: Float[np.ndarray, "experts"],
    place: Int64[np.ndarray, "experts"],
    b: Biases,
) -> Change | None:
    moved = before[place]
    if np.array_equal(moved, after, equal_nan=True):
        return None
    if not (np.isfinite(moved).all() and np.isfinite(after).all()):
        return change("not compared", b.rule, kind=f"{name} that is not finite")
    is_permuted = bool((place != np.arange(len(place))).any())
    if is_permuted and _shift(before, after, b) is not None:
        return change("bias left behind", b.rule, kind=name)
    for finer, coarser, names in ((moved, after, "B is A"), (after, moved, "A is B")):
        cast = cast_of(finer[None], coarser[None])
        if cast is not None:
            largest = float(np.abs(after.astype(np.float64) - moved).max())
            return change(
                "rounded",
                b.rule,
                kind=f"{names}, {name} rounded to {cast}",
                detail=f"largest change {largest:.2g}, spread of the bias {_spread(moved):.2g}",
                largest_change=largest,
                spread=_spread(moved),
            )
    shift = _shift(moved, after, b)
    if shift is not None:
        return change(f"{name} shifted", b.rule, detail=f"by {shift:+.6g} each", shift=shift)
    return _changed(name, moved, after, b)


def _changed(
    name: str, before: Float[np.ndarray, "experts"], after: Float[np.ndarray, "experts"], b: Biases
) -> Change:
    moved = after.astype(np.float64) - before
    middle = float(np.median(moved))
    expert = int(np.abs(moved - middle).argmax())
    largest, spread = float(moved[expert] - middle), _spread(before)
    ratio = f", {abs(largest) / spread:.2g} of the spread {spread:.2g}" if spread > 0.0 else ""
    common = f" beside a common {middle:+.3g}" if abs(middle) > 0.1 * abs(largest) else ""
    return change(
        "bias changed",
        b.rule,
        kind=name,
        detail=f"most for expert {expert}: {largest:+.3g}{ratio}{common}",
        largest_change=largest,
        expert=expert,
        spread=spread,
        common=middle,
    )


def _shift(
    before: Float[np.ndarray, "experts"], after: Float[np.ndarray, "experts"], b: Biases
) -> float | None:
    """The number added to every bias, within the rounding of both; None when there is none.

    0 for equal biases.
    """
    first, second = before.astype(np.float64), after.astype(np.float64)
    moved = second - first
    middle = 0.5 * float(moved.max() + moved.min())
    bits = mantissa_bits(b.dtype)
    half_step = 2.0 ** -((23 if bits is None else min(bits, 23)) + 1)
    allowed = 2.0 * half_step * (np.abs(second).max() + np.abs(first).max())
    return middle if np.abs(moved - middle).max() <= allowed else None


def _spread(bias: Float[np.ndarray, "experts"]) -> float:
    return float(bias.astype(np.float64).std())
