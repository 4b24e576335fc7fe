r"""Certificates of cells, and a check in integers that shares no code with the search.

A point x proves that the open cell of S is not empty where :math:`z_i(x) > z_j(x)` for all i in S
and j outside. Convex combinations prove that it is empty where

.. math:: \sum_{i \in S} \lambda_i z_i(x) \le \sum_{j \notin S} \mu_j z_j(x)

for every x of the (open) box, or of the whole space: some i then is not above some j. What a linear
function reaches in a box is read off its signs, so that sides of the box need no multipliers.
Source: Gordan's and Motzkin's theorems of the alternative; docs/theory.md G1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np

from moegeom.core.shapes import Float64

Weights = tuple[tuple[int, Fraction], ...]


@dataclass(frozen=True)
class CellPoint:
    """A point strictly inside a cell."""

    point: tuple[Fraction, ...]

    def as_json(self) -> dict[str, Any]:
        """Hexadecimal numerators and the common denominator of all."""
        common = lcm(*(x.denominator for x in self.point))
        point = [_hexadecimal(x, common) for x in self.point]
        return {"kind": "cell_point", "denominator": hex(common), "point": point}


@dataclass(frozen=True)
class NoCell:
    """Weights of chosen and of other experts, each of sum 1, whose mean logits prove no cell."""

    inside: Weights
    outside: Weights

    def as_json(self) -> dict[str, Any]:
        """Experts with hexadecimal numerators, and the common denominator of all."""
        common = lcm(*(value.denominator for _, value in (*self.inside, *self.outside)))
        inside, outside = (
            [[expert, _hexadecimal(value, common)] for expert, value in side]
            for side in (self.inside, self.outside)
        )
        kind = {"kind": "no_cell", "denominator": hex(common)}
        return {**kind, "inside": inside, "outside": outside}


def _hexadecimal(number: Fraction, common: int) -> str:
    return hex(number.numerator * (common // number.denominator))


Certificate = CellPoint | NoCell


def check_certificate(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    expert_set: Sequence[int],
    certificate: Certificate,
) -> None:
    """Returns where the certificate proves what its kind says; raises ValueError otherwise.

    Every sign is that of an integer: numbers are taken as they are, and nothing is rounded.
    """
    claim = _Claim(weight, bias, expert_set)
    if isinstance(certificate, CellPoint):
        claim.check_point(certificate.point)
    else:
        claim.check_weights(certificate.inside, certificate.outside)


def _integers(values: np.ndarray) -> tuple[list[Any], int]:
    """Float64 numbers as integers over a common power of two, and that power."""
    if not np.isfinite(values).all():
        raise ValueError("weights or biases are not all finite")
    ratios = [value.as_integer_ratio() for value in values.ravel().tolist()]
    scale = max((denominator for _, denominator in ratios), default=1)
    flat = [numerator * (scale // denominator) for numerator, denominator in ratios]
    width = values.shape[1]
    return [flat[r * width : (r + 1) * width] for r in range(len(values))], scale


class _Claim:
    """A statement about an expert set, with all numbers as integers."""

    def __init__(
        self, weight: np.ndarray, bias: np.ndarray | None, expert_set: Sequence[int]
    ) -> None:
        experts, self._dims = weight.shape
        offsets = np.zeros(experts) if bias is None else bias
        # the last column is that of the constant coordinate
        self._rows, _ = _integers(np.column_stack([weight, offsets]))
        self._inside = frozenset(int(i) for i in expert_set)
        if len(self._inside) != len(expert_set) or not self._inside <= set(range(experts)):
            raise ValueError(f"the expert set is no set of experts below {experts}")
        self._outside = frozenset(range(experts)) - self._inside

    def check_point(self, point: Sequence[Fraction]) -> None:
        if len(point) != self._dims:
            raise ValueError(f"the point has {len(point)} coordinates, not {self._dims}")
        common = lcm(*(x.denominator for x in point))
        scaled = [x.numerator * (common // x.denominator) for x in point]
        terms = [(m, x) for m, x in enumerate([*scaled, common]) if x]
        value = [sum(row[m] * x for m, x in terms) for row in self._rows]
        if self._inside and self._outside:
            low = min(self._inside, key=lambda i: value[i])
            high = max(self._outside, key=lambda j: value[j])
            if not value[low] > value[high]:
                raise ValueError(f"expert {low} is not above expert {high} at the point")

    def check_weights(self, inside: Weights, outside: Weights) -> None:
        coefficients: dict[int, Fraction] = {}
        for weights, allowed, sign in ((inside, self._inside, 1), (outside, self._outside, -1)):
            for expert, value in weights:
                if expert in coefficients or expert not in allowed or not value > 0:
                    raise ValueError(f"the weight of expert {expert} is not allowed")
                coefficients[expert] = sign * value
            if sum(value for _, value in weights) != 1:
                raise ValueError("the weights of a side do not sum to 1")
        most = self._most(coefficients)
        if most is None:
            raise ValueError("the weights leave a difference that grows without end")
        if most > 0:
            raise ValueError("the weights leave a difference that is positive somewhere")

    def _most(self, coefficients: Mapping[int, Fraction]) -> Fraction | None:
        """The combination of logits where it is constant; None where it is not."""
        common = lcm(*(value.denominator for value in coefficients.values()))
        terms = [
            (self._rows[i], value.numerator * (common // value.denominator))
            for i, value in coefficients.items()
        ]
        total = [sum(row[m] * factor for row, factor in terms) for m in range(self._dims + 1)]
        return None if any(total[:-1]) else Fraction(total[-1])
