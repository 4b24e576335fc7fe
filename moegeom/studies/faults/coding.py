"""Bits of B's choices given a candidate router, under the noise that fits best."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.geometry.set_code import FINEST, TIE_WAYS, SetDistances, contrast_bits
from moegeom.studies.faults._bits import bits_by_chance

#: Noise scales that are tried, in median gaps between the last chosen score and the first other.
_SCALES = tuple(float(scale) for scale in 2.0 ** np.arange(-12.0, 4.0, 1.5))

#: The same from the largest, every second one: each is 8 times the next.
_LADDERS = _SCALES[::-2], _SCALES[-2::-2]

#: Noise scales of what B told beside its choices.
_TOLD_SCALES = FINEST * 4.0 ** np.arange(0.0, 8.0)


@dataclass(frozen=True, eq=False)
class Apart:
    """Distance of B from a candidate router: of its sets, and of its recorded values."""

    sets: SetDistances
    contrasts: Float64[np.ndarray, "tokens values"] | None

    def bits(self, scale: float, ties: str) -> Float64[np.ndarray, "tokens"]:
        """Bits of the sets under noise of so many gaps of these scores, one of ``_SCALES``."""
        if self.sets.is_tied is None or ties == "chance":
            return self._by_chance[scale]
        if (scale, ties) not in self._by_number:
            self._by_number[scale, ties] = self.sets.bits(scale * self.sets.spacing, ties)
        return self._by_number[scale, ties]

    @cached_property
    def _by_chance(self) -> dict[float, Float64[np.ndarray, "tokens"]]:
        """Bits at every scale: all of them are tried."""
        by_scale: dict[float, np.ndarray] = {}
        for ladder in _LADDERS:
            bits = bits_by_chance(self.sets, ladder[0] * self.sets.spacing, len(ladder))
            by_scale.update(zip(ladder, bits, strict=True))
        return by_scale

    @cached_property
    def _by_number(self) -> dict[tuple[float, str], Float64[np.ndarray, "tokens"]]:
        """Cache of bits by scale and tie-break."""
        return {}

    def at(self, rows: np.ndarray) -> Apart:
        """The distances of some tokens."""
        return Apart(self.sets.at(rows), None if self.contrasts is None else self.contrasts[rows])


@dataclass(frozen=True, eq=False)
class Coded:
    """Bits of sets, and of the recorded values."""

    sets: Float64[np.ndarray, "tokens"]
    values: Float64[np.ndarray, "tokens"]

    @property
    def both(self) -> Float64[np.ndarray, "tokens"]:
        return self.sets + self.values


@dataclass(frozen=True)
class Noise:
    """Noise of a router: its scale in gaps between scores, the way in which ties are broken, and
    the scale of the values beside the sets.
    """

    scale: float
    ties: str
    value_scale: float

    def code(self, apart: Apart) -> Coded:
        """Bits of what B did under noise of so many gaps of these scores."""
        sets = apart.bits(self.scale, self.ties)
        if apart.contrasts is None:
            return Coded(sets, np.zeros(len(sets)))
        return Coded(sets, contrast_bits(apart.contrasts, self.value_scale))


def fitted(apart: Apart, weight: np.ndarray | float = 1.0, ties: Sequence[str] = TIE_WAYS) -> Noise:
    """The noise under which B takes the fewest bits, ties broken in one of these ways."""
    return fitted_both(apart, weight, ties, None)[0]


def fitted_both(
    apart: Apart, weight: np.ndarray | float, ties: Sequence[str], base: Coded | None
) -> tuple[Noise, Noise]:
    """The same, and the noise that fits best where each token may be coded by the base."""
    ways = ("chance",) if apart.sets.is_tied is None else ties
    of_sets = {(scale, way): apart.bits(scale, way) for scale in _SCALES for way in ways}
    of_values = {float(_TOLD_SCALES[0]): np.zeros(0)}
    if apart.contrasts is not None:
        of_values = {float(scale): contrast_bits(apart.contrasts, scale) for scale in _TOLD_SCALES}

    def best(bits: Mapping[Any, np.ndarray], beside: np.ndarray | None) -> Any:
        """The key of the fewest bits, each token coded by it or by the base."""

        def cost(one: Any) -> float:
            own = bits[one]
            return float((weight * (own if beside is None else np.minimum(own, beside))).sum())

        return min(bits, key=cost) if len(bits) > 1 else next(iter(bits))

    noises = []
    for beside in (None, base):
        scale, way = best(of_sets, None if beside is None else beside.sets)
        value_scale = best(of_values, None if beside is None else beside.values)
        noises.append(Noise(scale, way, value_scale))
    return noises[0], noises[1]


def as_it_is(own: Apart, base: Coded, noise: Noise) -> Coded:
    """Bits of the base, with its own noise or the candidate's: less noise is no fault."""
    other = dataclasses.replace(noise, ties="chance").code(own)
    return Coded(np.minimum(base.sets, other.sets), np.minimum(base.values, other.values))
