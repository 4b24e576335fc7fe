"""Rows W diag(g), and biases, of two routers beside each other, and how far rounding moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moegeom.core.metric import NUM_PROJECTIONS
from moegeom.core.router import Router, Rule, mantissa_bits
from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.geometry.description import common_vector
from moegeom.geometry.number_formats import CASTS
from moegeom.geometry.rows import projected, size
from moegeom.router.edits import BIASES, Subject

#: What is left is rounding up to this share of the largest that rounding can leave, both rms.
#: Rounding leaves .42 of it (docs/theory.md E4), at most .58.
WITHIN = 0.6

#: ... and no single value is further off than this many half steps.
FARTHEST = 6.0

#: Rows this close, beside their length, are equal: effective rows and projections carry float64.
EQUAL = 1e-12

#: A row moved as others did where it moved by this part of their median.
_AS_FAR = 0.25

#: Rows of one router, in full or projected.
Rows = Float64[np.ndarray, "experts dimension"]


@dataclass(frozen=True, eq=False)
class OtherRows:
    """Projected rows of all routers of A by name, and a router's rows in full behind B's gain."""

    projections: Callable[[], Mapping[str, Rows]]
    rows: Callable[[str], Mapping[str, Rows]]
    project: Callable[[Rows], Rows] = lambda rows: rows
    routers: Sequence[Router] = ()


@dataclass(frozen=True, eq=False)
class RowPair:
    """Rows of B, and those of A with the edits found so far applied; both with their means.

    Row i of ``a`` was row ``place[i]`` of A. ``half_step`` bounds the rounding of each value of the
    two together. ``first`` and ``second`` are the routers, None where only projections are known.
    ``lengths`` are the true ones of projected rows of A, ``new_lengths`` those of B. ``named`` is
    what was found, ``is_stored`` while the rows are still those that A stores.
    """

    a: Float64[np.ndarray, "experts dimension"]
    b: Float64[np.ndarray, "experts dimension"]
    half_step: Float64[np.ndarray, "experts dimension"]
    rule: Rule
    place: Int64[np.ndarray, "experts"]
    first: Router | None = None
    second: Router | None = None
    name: str = ""
    others: OtherRows | None = None
    lengths: Float64[np.ndarray, "experts"] | None = None
    new_lengths: Float64[np.ndarray, "experts"] | None = None
    named: tuple[str, ...] = ()
    is_stored: bool = True

    @property
    def is_projected(self) -> bool:
        return self.first is None

    @property
    def routers(self) -> tuple[Router, Router]:
        """Both; only where rows are known in full."""
        assert self.first is not None
        assert self.second is not None
        return self.first, self.second

    @cached_property
    def finest(self) -> Float64[np.ndarray, "experts"]:
        """Lengths that rounding leaves of each row."""
        rounding = WITHIN * np.linalg.norm(self.half_step, axis=1)
        return np.maximum(rounding, EQUAL * np.linalg.norm(self.b, axis=1))

    @cached_property
    def shift(self) -> Float64[np.ndarray, "dimension"]:
        """The vector that was added to all rows of A, zeros where there is none."""
        return common_vector(self.b - self.a, self.finest)

    @cached_property
    def left(self) -> Float64[np.ndarray, "experts dimension"]:
        """What is not explained: ``b - a``, less a common vector."""
        return self.b - self.a - self.shift

    def left_of(
        self, rows: Float64[np.ndarray, "experts dimension"]
    ) -> Float64[np.ndarray, "experts dimension"]:
        """``left`` if the rows of A were these."""
        change = self.b - rows
        return change - common_vector(change, self.finest)

    @cached_property
    def centred(self) -> tuple[np.ndarray, np.ndarray]:
        """Both less their means; as they are where there is a single row."""
        if len(self.a) == 1:
            return self.a, self.b
        return self.a - self.a.mean(axis=0), self.b - self.b.mean(axis=0)

    @property
    def length(self) -> float:
        """The length of the centred rows of A, which every size is a share of."""
        return size(self.centred[0])

    @property
    def change_size(self) -> float:
        r"""The size of a change: :math:`|B - A - s| / |A - \bar A|`, s the common vector."""
        return share(size(self.left), self.length)

    @property
    def is_rounding(self) -> bool:
        """Whether what is left is no more than rounding leaves."""
        left = np.abs(self.left)
        finest = max(WITHIN * size(self.half_step), EQUAL * size(self.b))
        if size(left) > finest:
            return False
        # the fitted numbers carry rounding of whole rows and columns: no value is judged without it
        usual = size(self.half_step) / np.sqrt(max(left.size, 1))
        allowed = FARTHEST * (self.half_step + usual) + EQUAL * np.abs(self.b).max(initial=0.0)
        return bool((left <= allowed).all())

    @cached_property
    def is_settled(self) -> bool:
        """Whether nothing is unexplained: equal rows, or only rounding after the edits found.

        Of rows as A stores them, in whatever order, rounding is no part.
        """
        if not self.left.any():
            return True
        is_shifted = bool(self.shift.any())
        is_exact = self.is_stored and not self.is_projected and not is_shifted
        return (bool(self.named) or is_shifted) and not is_exact and self.is_rounding

    @cached_property
    def least(self) -> Float64[np.ndarray, "experts"]:
        """Lengths of changes that rounding may be; none where both sides are stored alike."""
        if self.is_projected or not self.is_stored or self.shift.any():
            return self.finest
        first, second = self.routers
        kinds = [(one.provenance.stored_dtype, held_bits(one.weight)) for one in self.routers]
        gains = [one.gain if one.gain is not None else np.ones(1) for one in (first, second)]
        is_alike = kinds[0] == kinds[1] and np.array_equal(gains[0], gains[1])
        return np.zeros(len(self.a)) if is_alike else self.finest

    @cached_property
    def has_moved(self) -> Bool[np.ndarray, "experts"]:
        """Rows that moved by more than rounding, or as far as those and not by rounding."""
        lengths = np.linalg.norm(self.left, axis=1)
        beyond = lengths > self.finest
        usual = float(np.median(lengths[beyond])) if beyond.any() else 0.0
        return beyond | ((lengths > self.least) & (lengths >= _AS_FAR * usual))

    def row_sizes(self, is_shift_free: bool = True) -> Float64[np.ndarray, "experts"]:
        r"""The change of each row over the length of the row, centred: :math:`|l_i| / |a_i|`.

        With the common vector unless the pair is to be ``is_shift_free``; 0 within rounding.
        Of projections only what lies across the old row is estimated: what lies along it is a
        multiple of a row whose true length is known.
        """
        before, left = self.centred[0], self.left if is_shift_free else self.b - self.a
        lengths = np.linalg.norm(before, axis=1)
        if self.lengths is None:
            moved = np.linalg.norm(left, axis=1)
        else:
            squares = np.einsum("ij,ij->i", before, before)
            products = np.einsum("ij,ij->i", left, before)
            along = np.divide(products, squares, np.zeros(len(left)), where=squares > 0.0)
            across = np.linalg.norm(left - along[:, None] * before, axis=1)
            moved, lengths = np.hypot(along * self.lengths, across), self.lengths
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(np.linalg.norm(left, axis=1) > self.least, moved / lengths, 0.0)


def share(part: float, of: float) -> float:
    """``part / of`` with 0 / 0 = 0, and infinite for any other division by 0."""
    return part / of if of > 0.0 else float("inf") if part > 0.0 else 0.0


def row_pair(
    a: Router, b: Router, place: Int64[np.ndarray, "experts"], others: OtherRows | None = None
) -> RowPair:
    """Rows of both, row i of ``b`` beside row ``place[i]`` of ``a``; values must be finite."""
    steps = _half_steps(a)[place] + _half_steps(b)
    return RowPair(
        effective_rows_of(a)[place],
        effective_rows_of(b),
        steps,
        b.rule,
        place,
        a,
        b,
        b.name,
        others,
    )


def effective_rows_of(
    router: Router, rows: Int64[np.ndarray, "rows"] | None = None
) -> Float64[np.ndarray, "rows hidden"]:
    """W diag(g) in float64: of all experts, or of these ``rows``."""
    weight = (router.weight if rows is None else router.weight[rows]).astype(np.float64)
    return weight if router.gain is None else weight * router.gain.astype(np.float64)


def _half_steps(router: Router) -> Float64[np.ndarray, "experts hidden"]:
    """Largest error of each effective value when weight and gain were rounded to what they are."""
    weight = np.abs(router.weight.astype(np.float64))
    bits = min(stored_bits(router.provenance.stored_dtype), held_bits(router.weight))
    error = weight * 2.0 ** -(bits + 1)
    if router.gain is None:
        return error
    gain = router.gain.astype(np.float64)
    norm = router.norm
    # what is rounded is the gain without its scale and its offset
    stored = np.abs(gain if norm is None else gain / norm.gain_scale - norm.gain_offset)
    error *= np.abs(gain)
    scale = 1.0 if norm is None else norm.gain_scale
    return error + weight * stored * scale * 2.0 ** -(held_bits(stored.astype(np.float32)) + 1)


def stored_bits(dtype: str) -> int:
    """Mantissa bits of a stored dtype; those of float32 where it is no plain float."""
    bits = mantissa_bits(dtype)
    return 23 if bits is None else bits


def held_bits(values: Float[np.ndarray, "*shape"]) -> int:
    """Mantissa bits that the values need: 7 for bfloat16 values stored as float32."""
    flat = values.reshape(1, -1)
    for cast, bits in (("bf16", 7), ("fp16", 10)):
        with np.errstate(over="ignore"):
            if np.array_equal(CASTS[cast](flat.astype(np.float32)), flat):
                return bits
    return 23


#: Which bias: the one that is added for the selection only, or to every logit.
KINDS = tuple(BIASES)


@dataclass(frozen=True, eq=False)
class Biases:
    """The biases of one router by kind, None where it has none, and how they are stored."""

    values: Mapping[str, Float[np.ndarray, "experts"] | None]
    dtype: str
    rule: Rule

    @staticmethod
    def of(router: Router) -> Biases:
        """The biases of a router; only the dtype of the selection bias is known."""
        values = {kind: getattr(router, field) for kind, field in BIASES.items()}
        return Biases(values, router.provenance.bias_dtype, router.rule)


@dataclass(frozen=True, eq=False)
class BiasPair:
    """Biases of B, and those of A with the edits found so far applied, in B's order.

    ``stored`` are all of A's in A's order; those of the rows are at ``place``. ``others`` are those
    of A's other routers by name. ``unit`` is what each number belongs to.
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
    unit: str = "expert"

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


class RoutersOfA:
    """All routers of A. Projections are made when a router is first far from its own."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = {router.name: router for router in routers}

    @cached_property
    def _projected(self) -> Mapping[str, Float64[np.ndarray, "experts count"]]:
        return {
            name: projected(effective_rows_of(router), NUM_PROJECTIONS)
            for name, router in self._routers.items()
            if not router.non_finite_rows.size
        }

    def beside(self, b: Router) -> OtherRows:
        """The other routers of A for one of B, their rows with their own gain and with B's."""

        def rows(name: str) -> Mapping[str, Float64[np.ndarray, "experts dimension"]]:
            other = self._routers[name]
            projections = {"": effective_rows_of(other)}
            if b.gain is not None and other.gain is not None:
                with_gain = other.weight.astype(np.float64) * b.gain.astype(np.float64)
                projections[", behind its own gain"] = with_gain
            return projections

        routers = tuple(self._routers.values())
        return OtherRows(
            lambda: self._projected, rows, lambda of: projected(of, NUM_PROJECTIONS), routers
        )

    def biases(self, kind: Subject, of: str) -> Mapping[str, Float[np.ndarray, "experts"]]:
        """The biases of one kind of all routers but one."""
        by_router = {
            n: getattr(router, BIASES[kind]) for n, router in self._routers.items() if n != of
        }
        return {n: values for n, values in by_router.items() if values is not None}
