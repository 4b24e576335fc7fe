r"""Certificates of cells and facets, and a check in integers that shares no code with the search.

A point x proves that the open cell of S is not empty where :math:`z_i(x) > z_j(x)` for all i in S
and j outside. Convex combinations prove that it is empty where

.. math:: \sum_{i \in S} \lambda_i z_i(x) \le \sum_{j \notin S} \mu_j z_j(x)

for every x of the (open) box, or of the whole space: some i then is not above some j. What a linear
function reaches in a box is read off its signs, so that sides of the box need no multipliers.
Source: Gordan's and Motzkin's theorems of the alternative; docs/theory.md G1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np

from moegeom.core.limits import CERTIFICATE_DIGITS, CERTIFICATE_DIGITS_IN_ALL
from moegeom.core.shapes import Float64

Weights = tuple[tuple[int, Fraction], ...]

_NUMBER = re.compile(r"-?0x[0-9a-f]+")


class _Written:
    """A certificate that can be written as JSON."""

    def as_json(self) -> dict[str, Any]:
        """Hexadecimal numerators, some with an expert, and the common denominator of all."""
        kind, paired = next((n, f) for n, (kind, f) in _KINDS.items() if kind is type(self))
        parts: dict[str, Sequence[Any]] = vars(self)
        numbers = [x[1] if paired[name] else x for name, part in parts.items() for x in part]
        common = lcm(*(number.denominator for number in numbers))

        def hexadecimal(number: Fraction) -> str:
            return hex(number.numerator * (common // number.denominator))

        record: dict[str, Any] = {"kind": kind, "denominator": hex(common)}
        for name, part in parts.items():
            record[name] = [
                [x[0], hexadecimal(x[1])] if paired[name] else hexadecimal(x) for x in part
            ]
        return record


@dataclass(frozen=True)
class CellPoint(_Written):
    """A point strictly inside a cell."""

    point: tuple[Fraction, ...]


@dataclass(frozen=True)
class NoCell(_Written):
    """Weights of chosen and of other experts, each of sum 1, whose mean logits prove no cell."""

    inside: Weights
    outside: Weights


@dataclass(frozen=True)
class FacetPoint(_Written):
    """A point at which the two experts of a swap tie and all others are strictly apart."""

    point: tuple[Fraction, ...]


@dataclass(frozen=True)
class NoFacet(_Written):
    r"""Weights of the other experts, and of out and into with any sign, that prove no facet.

    :math:`\sum \lambda_i z_i - \sum \mu_j z_j + \alpha z_{out} + \beta z_{into} \le 0` everywhere,
    with coefficients of sum 0, while at a facet it is positive.
    """

    inside: Weights
    outside: Weights
    tied: tuple[Fraction, Fraction]


Certificate = CellPoint | NoCell | FacetPoint | NoFacet

#: Fields of each kind, and whether its numbers belong to experts.
_KINDS: dict[str, tuple[Any, dict[str, bool]]] = {
    "cell_point": (CellPoint, {"point": False}),
    "no_cell": (NoCell, {"inside": True, "outside": True}),
    "facet_point": (FacetPoint, {"point": False}),
    "no_facet": (NoFacet, {"inside": True, "outside": True, "tied": False}),
}


def from_json(data: object) -> Certificate:
    """The certificate that ``as_json`` wrote, from data that may be anything.

    Raises ValueError that says what is wrong, numbers with too many digits among it.
    """
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise ValueError("a certificate is an object with a kind")
    kind, fields = _KINDS.get(data["kind"], (None, {}))
    if kind is None:
        raise ValueError(f"no certificate is of kind {data['kind'][:40]!r}: {', '.join(_KINDS)}")
    if set(data) != {"kind", "denominator", *fields}:
        expected = ", ".join(["denominator", *fields])
        raise ValueError(f"a certificate of kind {data['kind']} has {expected} and nothing else")
    reader = _Reader(data["denominator"])
    parts = []
    for name, is_paired in fields.items():
        if not isinstance(data[name], list):
            raise ValueError(f"{name} is not a list")
        read = reader.weight if is_paired else reader.number
        parts.append(tuple(read(entry, name) for entry in data[name]))
    if kind is NoFacet and len(parts[-1]) != 2:
        raise ValueError("tied has not two numbers, that of out and that of into")
    return kind(*parts)


class _Reader:
    """Reads fractions of a common denominator, within a limit of digits."""

    def __init__(self, denominator: object) -> None:
        self._left = CERTIFICATE_DIGITS_IN_ALL
        self._denominator = self._integer(denominator, "denominator")
        if self._denominator <= 0:
            raise ValueError("the denominator is not positive")

    def number(self, data: object, name: str) -> Fraction:
        return Fraction(self._integer(data, name), self._denominator)

    def weight(self, data: object, name: str) -> tuple[int, Fraction]:
        if not isinstance(data, list) or len(data) != 2 or type(data[0]) is not int:
            raise ValueError(f"{name} has an entry that is no pair of an expert and a number")
        return data[0], self.number(data[1], name)

    def _integer(self, data: object, name: str) -> int:
        if not isinstance(data, str):
            raise ValueError(f"{name} has a number that is no string")
        self._left -= len(data)
        if len(data) > CERTIFICATE_DIGITS or self._left < 0:
            most = f"{CERTIFICATE_DIGITS} in one number and {CERTIFICATE_DIGITS_IN_ALL} in all"
            raise ValueError(f"{name} has too many digits, at most {most}")
        if not _NUMBER.fullmatch(data):
            raise ValueError(f"{name} has {data[:40]!r}, which is no hexadecimal integer")
        return int(data, 16)


def check_certificate(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    expert_set: Sequence[int],
    certificate: Certificate,
    *,
    swap: tuple[int, int] | None = None,
    lower: Float64[np.ndarray, "dims"] | None = None,
    upper: Float64[np.ndarray, "dims"] | None = None,
) -> None:
    """Returns where the certificate proves what its kind says; raises ValueError otherwise.

    The statement is about the cell of the expert set, or with ``swap`` (out, into) about the facet
    over which ``into`` takes the place of ``out``, in the open box. Every sign is that of an
    integer: numbers are taken as they are, and nothing is rounded.
    """
    claim = _Claim(weight, bias, expert_set, swap, lower, upper)
    if (swap is None) != isinstance(certificate, CellPoint | NoCell):
        raise ValueError(f"{type(certificate).__name__} says nothing of this claim")
    if isinstance(certificate, CellPoint | FacetPoint):
        claim.check_point(certificate.point)
    else:
        tied = certificate.tied if isinstance(certificate, NoFacet) else ()
        claim.check_weights(certificate.inside, certificate.outside, tied)


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
        self,
        weight: np.ndarray,
        bias: np.ndarray | None,
        expert_set: Sequence[int],
        swap: tuple[int, int] | None,
        lower: np.ndarray | None,
        upper: np.ndarray | None,
    ) -> None:
        experts, self._dims = weight.shape
        offsets = np.zeros(experts) if bias is None else bias
        # the last column is that of the constant coordinate
        self._rows, _ = _integers(np.column_stack([weight, offsets]))
        self._inside = frozenset(int(i) for i in expert_set)
        if len(self._inside) != len(expert_set) or not self._inside <= set(range(experts)):
            raise ValueError(f"the expert set is no set of experts below {experts}")
        self._outside = frozenset(range(experts)) - self._inside
        self._swap = swap
        if swap is not None and not (swap[0] in self._inside and swap[1] in self._outside):
            raise ValueError(f"{swap[0]} and {swap[1]} are no expert of the expert set and another")
        self._lower = [-np.inf] * self._dims if lower is None else lower.tolist()
        self._upper = [np.inf] * self._dims if upper is None else upper.tolist()
        sides = list(zip(self._lower, self._upper, strict=True))
        if len(sides) != self._dims or not all(a < b for a, b in sides):
            raise ValueError("the box has a lower end that is not below the upper one")

    def check_point(self, point: Sequence[Fraction]) -> None:
        if len(point) != self._dims:
            raise ValueError(f"the point has {len(point)} coordinates, not {self._dims}")
        for m, (x, low, high) in enumerate(zip(point, self._lower, self._upper, strict=True)):
            if not low < x < high:
                raise ValueError(f"coordinate {m} is not inside the box")
        common = lcm(*(x.denominator for x in point))
        scaled = [x.numerator * (common // x.denominator) for x in point]
        terms = [(m, x) for m, x in enumerate([*scaled, common]) if x]
        value = [sum(row[m] * x for m, x in terms) for row in self._rows]
        if self._swap is None:
            inside, outside = self._inside, self._outside
            if inside and outside:
                low = min(inside, key=lambda i: value[i])
                high = max(outside, key=lambda j: value[j])
                if not value[low] > value[high]:
                    raise ValueError(f"expert {low} is not above expert {high} at the point")
            return
        out, into = self._swap
        if value[out] != value[into] or self._rows[out][:-1] == self._rows[into][:-1]:
            raise ValueError(f"experts {out} and {into} do not cross at the point")
        free = self.free_to_tie() | {out, into}
        for expert in set(range(len(value))) - free:
            if value[expert] == value[out] or (value[expert] > value[out]) != (
                expert in self._inside
            ):
                raise ValueError(f"expert {expert} is not on its side of the level at the point")

    def free_to_tie(self) -> frozenset[int]:
        """Proper mixtures of the pair, where all of them are chosen or none is.

        They tie wherever the pair does and are strictly between the two on either side. Mixtures on
        both sides of the level change places there themselves, so that there is no such facet.
        """
        assert self._swap is not None, "asked of facets"
        mixtures = frozenset(i for i in range(len(self._rows)) if self._is_between(i, *self._swap))
        return mixtures if mixtures <= self._inside or mixtures <= self._outside else frozenset()

    def _is_between(self, expert: int, out: int, into: int) -> bool:
        one, other, own = self._rows[out], self._rows[into], self._rows[expert]
        m = next((m for m in range(len(one)) if one[m] != other[m]), None)
        if m is None:
            return False
        whole, part = other[m] - one[m], own[m] - one[m]
        return 0 < part * whole < whole * whole and all(
            whole * (c - a) == part * (b - a) for c, a, b in zip(own, one, other, strict=True)
        )

    def check_weights(self, inside: Weights, outside: Weights, tied: Sequence[Fraction]) -> None:
        coefficients: dict[int, Fraction] = {}
        for weights, allowed, sign in ((inside, self._inside, 1), (outside, self._outside, -1)):
            for expert, value in weights:
                if expert in coefficients or expert not in allowed or not value > 0:
                    raise ValueError(f"the weight of expert {expert} is not allowed")
                coefficients[expert] = sign * value
            if self._swap is None and sum(value for _, value in weights) != 1:
                raise ValueError("the weights of a side do not sum to 1")
        if self._swap is not None:
            if any(expert in coefficients for expert in self._swap):
                raise ValueError("out and into have one weight each, apart from the others")
            tying = self.free_to_tie() & set(coefficients)
            if tying:
                raise ValueError(f"expert {min(tying)} may tie with the pair on its facet")
            coefficients.update(zip(self._swap, tied, strict=True))
            if sum(coefficients.values()) != 0 or not any(coefficients.values()):
                raise ValueError("the weights do not sum to 0, or are none")
        most = self._most(coefficients)
        if most is None:
            raise ValueError("the weights leave a difference that grows without end")
        if most > 0:
            raise ValueError("the weights leave a difference that is positive somewhere")

    def _most(self, coefficients: Mapping[int, Fraction]) -> Fraction | None:
        """The least upper bound of the combination of logits in the box; None where infinite."""
        common = lcm(*(value.denominator for value in coefficients.values()))
        terms = [
            (self._rows[i], value.numerator * (common // value.denominator))
            for i, value in coefficients.items()
        ]
        total = [sum(row[m] * factor for row, factor in terms) for m in range(self._dims + 1)]
        most = Fraction(total[-1])
        for value, low, high in zip(total[:-1], self._lower, self._upper, strict=True):
            if value:
                end = high if value > 0 else low
                if not np.isfinite(end):
                    return None
                most += value * Fraction(end)
        return most
