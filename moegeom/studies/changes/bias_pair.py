"""Biases of one kind of two routers beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from moegeom.core.router import Router, Rule, mantissa_bits
from moegeom.core.shapes import Float, Float64, Int64

#: Which bias: the one that is added for the selection only, or to every logit.
KINDS = ("selection bias", "logit bias")


@dataclass(frozen=True, eq=False)
class Biases:
    """The biases of one router by kind, None where it has none, and how they are stored."""

    values: Mapping[str, Float[np.ndarray, "experts"] | None]
    dtype: str
    rule: Rule

    @staticmethod
    def of(router: Router) -> Biases:
        """The biases of a router; only the dtype of the selection bias is known."""
        values = (router.selection_bias, router.logit_bias)
        return Biases(
            dict(zip(KINDS, values, strict=True)), router.provenance.bias_dtype, router.rule
        )


@dataclass(frozen=True, eq=False)
class BiasPair:
    """Biases of B, and those of A with the edits found so far applied, in B's order.

    ``stored`` are all of A's in A's order; those of the rows are at ``place``. ``others`` are those
    of A's other routers by name.
    """

    kind: str
    a: Float64[np.ndarray, "experts"]
    b: Float64[np.ndarray, "experts"]
    rule: Rule
    stored: Float64[np.ndarray, "before"]
    place: Int64[np.ndarray, "experts"]
    dtype: str = ""
    others: Mapping[str, Float[np.ndarray, "before"]] = field(default_factory=dict)
    named: tuple[str, ...] = ()

    @property
    def finest(self) -> float:
        """Largest difference that the rounding of both sides leaves."""
        bits = mantissa_bits(self.dtype)
        half_step = 2.0 ** -((23 if bits is None else min(bits, 23)) + 1)
        return float(2.0 * half_step * (np.abs(self.b).max() + np.abs(self.a).max()))

    @property
    def spread(self) -> float:
        """Standard deviation of the biases of A."""
        return float(self.stored.std())
