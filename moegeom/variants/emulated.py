"""A router as an engine with another arithmetic sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Literal

import numpy as np

from moegeom.core.documents import record_of_file, shipped_names, shipped_text
from moegeom.core.registry import unknown_name
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.core.text import quoted
from moegeom.geometry.boundary.linear import RowDistances, row_distances
from moegeom.geometry.noise import logit_deviations
from moegeom.geometry.number_formats import (
    NUMBER_FORMATS,
    WEIGHT_STORAGE,
    error_of_sizes,
    format_gap,
    map_gap,
    rounded_to,
    stored_as,
    sum_error,
)
from moegeom.geometry.rounding import (
    SUMMATION_ORDERS,
    UNIT_FLOAT32,
    gamma,
    ordered_sums,
    score_resolution,
)
from moegeom.geometry.selection import LARGEST_SLOPE, SCORES, mapped_logits
from moegeom.kernels.reduction import Kernels


@dataclass(frozen=True, eq=False)
class Emulated:
    """Rows and biases as the engine holds them, and the steps from inputs to selection scores.

    ``router`` holds the rows as stored by the engine, ``stored`` is the router that they were taken
    from; ``shift`` is how far each row moved.
    """

    arithmetic: Arithmetic
    router: Router
    stored: Router
    columns: Float[np.ndarray, "hidden experts"]
    logit_bias: Float64[np.ndarray, "experts"] | None
    selection_bias: Float64[np.ndarray, "experts"] | None
    shift: Float64[np.ndarray, "experts"]
    longest_row: float
    largest_bias: float

    @property
    def slope(self) -> float:
        """Largest change of an unrounded selection score per unit of a logit."""
        rule = self.router.rule
        own = 1.0 if rule.is_affine else LARGEST_SLOPE[rule.score]
        return own * (rule.logit_map.multiplier if rule.logit_map else 1.0)

    def has_entry_of(self, other: Emulated) -> bool:
        """Whether the same inputs meet the same rows and biases in the same product."""
        one, two = self.arithmetic, other.arithmetic
        same = ("parameter", "input", "operands", "bias")
        return self.stored is other.stored and all(
            getattr(one, name) == getattr(two, name) for name in same
        )

    def inputs(self, values: Float[np.ndarray, "tokens hidden"]) -> np.ndarray:
        """Router inputs as they enter the product, in float32."""
        how = self.arithmetic
        rounded = rounded_to(rounded_to(values, how.input), how.operands)
        return rounded.astype(np.float32, copy=False)

    def changes_nothing_of(self, values: Float[np.ndarray, "tokens hidden"]) -> bool:
        """Whether it rounds to 16 bits inputs and rows that are of these, and nothing else.

        What rounds less, such as tf32, is no effect that a recording of 16 bits can hold.
        """
        how = self.arithmetic
        narrow = {how.input, how.operands} & {"bfloat16", "float16"}
        rest = (how.output, how.score, how.selection)
        is_exact = all(NUMBER_FORMATS[name].unit <= UNIT_FLOAT32 for name in rest)
        if not (narrow and self.lost and is_exact) or self.shift.any():
            return False
        finite = values[np.isfinite(values).all(axis=1)]
        return bool(len(finite)) and np.array_equal(self.inputs(finite), finite)

    @property
    def lost(self) -> int:
        """Last bits of float32 inputs that are all that the product rounds off; 0 for others."""
        how, wide = self.arithmetic, NUMBER_FORMATS["float32"].unit
        narrow = {name for name in (how.input, how.operands) if NUMBER_FORMATS[name].unit > wide}
        return NUMBER_FORMATS[narrow.pop()].lost if len(narrow) == 1 else 0

    @cached_property
    def distances(self) -> RowDistances:
        """Those of its rows."""
        return row_distances(self.columns.T)

    @cached_property
    def deviations(self) -> Float64[np.ndarray, "experts"]:
        """Standard deviation of each logit for inputs with noise of size 1 per coordinate."""
        return logit_deviations(self.distances)

    @property
    def has_known_order(self) -> bool:
        """Whether logits can be added up in the engine's own order."""
        return SUMMATION_ORDERS[self.arithmetic.order].sums is not None

    def ordered_logits(self, inputs: Float[np.ndarray, "tokens hidden"]) -> np.ndarray:
        """Logits added up in the engine's own order, which must be known; slow."""
        sums = ordered_sums(inputs, self.columns.T, self.arithmetic.order)
        return sums if self.logit_bias is None else sums + self.logit_bias.astype(np.float32)

    def wide_logits(
        self,
        values: Float[np.ndarray, "tokens hidden"],
        rows: Int64[np.ndarray, "some"],
        logits: Float[np.ndarray, "some experts"],
        is_wanted: Bool[np.ndarray, "some experts"],
        kernels: Kernels,
    ) -> Float64[np.ndarray, "some experts"]:
        """Logits of some tokens in float64, before the output is rounded, where they are wanted;
        else the ``logits`` given.
        """
        lost = self.lost if values.dtype == np.float32 else 0
        if not lost:
            values, rows = self.inputs(values[rows]), np.arange(len(rows))
        sums = kernels["wide_logits"](values, rows, lost, self._rows, is_wanted, logits)
        return sums if self.logit_bias is None else sums + is_wanted * self.logit_bias

    def compared(self, logits: Float[np.ndarray, "tokens experts"]) -> np.ndarray:
        """What the engine's top-k looks at, before any group mask; every step rounded.

        Float32 where logits are compared, float64 else. A map of logits is taken in the format of
        the scores.
        """
        how, rule = self.arithmetic, self.router.rule
        z = rounded_to(logits, how.output)
        if rule.logit_map is not None:
            z = rounded_to(mapped_logits(z, rule.logit_map), how.score)
        if rule.is_affine:
            if self.selection_bias is not None:
                z = rounded_to(z + self.selection_bias, how.selection)
            if how.compared == "logits" or rule.score == "identity":
                return z
            return rounded_to(SCORES[rule.score](z), how.score)
        scores = rounded_to(SCORES[rule.score](z), how.score)
        if self.selection_bias is None:
            return scores
        return rounded_to(scores + self.selection_bias, how.selection)

    def unrounded(self, logits: Float[np.ndarray, "tokens experts"]) -> np.ndarray:
        """The same without rounding, but for the bias; of an affine rule the mapped logits."""
        rule = self.router.rule
        scores = mapped_logits(logits, rule.logit_map)
        if not rule.is_affine:
            scores = SCORES[rule.score](scores)
        return scores if self.selection_bias is None else scores + self.selection_bias

    def sum_error(self, input_norm: Float[np.ndarray, "tokens"], order: str) -> np.ndarray:
        """Largest error of a logit that is added up in ``order``."""
        width = self.router.hidden_size
        depth = SUMMATION_ORDERS[order].depth(width)
        return sum_error(input_norm, width, depth, self.longest_row, self.largest_bias)

    def closer_sum_error(
        self, inputs: Float[np.ndarray, "tokens hidden"]
    ) -> Float64[np.ndarray, "tokens"]:
        """The same in the engine's own order, from the sizes of the products: a sharper bound."""
        width = self.router.hidden_size
        # no product is negative, so that a float32 sum of them is off by a known share of itself
        with np.errstate(over="ignore"):
            sizes = (np.abs(inputs) @ self._column_sizes).max(axis=1).astype(np.float64)
        sizes /= 1.0 - gamma(width, UNIT_FLOAT32)
        sizes += float(np.finfo(np.float32).tiny)  # products that were too small for a float32
        depth = SUMMATION_ORDERS[self.arithmetic.order].depth(width)
        return error_of_sizes(sizes + self.largest_bias, width, depth)

    @cached_property
    def _rows(self) -> Float[np.ndarray, "experts hidden"]:
        return np.ascontiguousarray(self.columns.T)

    @cached_property
    def _column_sizes(self) -> Float[np.ndarray, "hidden experts"]:
        return np.abs(self.columns)

    def gap_needed(
        self,
        logit_error: Float64[np.ndarray, "tokens"],
        largest: Float64[np.ndarray, "tokens"],
        extent: Float64[np.ndarray, "tokens"],
        last: Float64[np.ndarray, "tokens"],
        following: Float64[np.ndarray, "tokens"],
    ) -> Float64[np.ndarray, "tokens"]:
        """Unrounded gap above which the engine keeps every chosen expert ahead of every other.

        ``logit_error`` is how far its logits may be from those of the gap; ``largest`` is the
        largest logit of the token and ``extent`` the largest absolute one, ``last`` and
        ``following`` the unrounded selection scores of the last chosen expert and the first other.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            gap = self._gap_of_roundings(logit_error, largest, extent, last, following)
            return np.where(self._stays_finite(extent + logit_error), gap, np.inf)

    def _stays_finite(self, reach: Float64[np.ndarray, "tokens"]) -> Bool[np.ndarray, "tokens"]:
        """Whether logits up to ``reach`` stay in the range of every format that they pass."""
        how, logit_map = self.arithmetic, self.router.rule.logit_map
        passed = reach if logit_map is None else np.maximum(reach, logit_map.multiplier * reach)
        names = [how.output] if logit_map is None else [how.output, how.score]
        if self.selection_bias is not None:
            passed = passed + float(np.abs(self.selection_bias).max())
            names.append(how.selection)
        largest = min(NUMBER_FORMATS[name].largest for name in (*names, "float32"))
        return passed * (1.0 + NUMBER_FORMATS[how.output].unit) < largest

    def _gap_of_roundings(
        self,
        logit_error: Float64[np.ndarray, "tokens"],
        largest: Float64[np.ndarray, "tokens"],
        extent: Float64[np.ndarray, "tokens"],
        last: Float64[np.ndarray, "tokens"],
        following: Float64[np.ndarray, "tokens"],
    ) -> Float64[np.ndarray, "tokens"]:
        """The same where nothing leaves its format."""
        how, rule = self.arithmetic, self.router.rule
        output, score_format = NUMBER_FORMATS[how.output], NUMBER_FORMATS[how.score]
        top = mapped_logits(largest, rule.logit_map)
        if rule.is_affine:
            if rule.logit_map is None:
                gap = 2.0 * logit_error + format_gap(last, following, how.output)
            else:
                before = logit_error + output.unit * extent + output.least
                gap = 2.0 * self.slope * before
                gap += map_gap(last, following, rule.logit_map, how.score)
            if self.selection_bias is not None:
                gap += format_gap(last, following, how.selection)
                # the output was rounded before the bias came in
                bias = float(np.abs(self.selection_bias).max())
                gap += 2.0 * output.unit * bias
            if how.compared == "scores":
                gap = gap + score_resolution(
                    rule.score,
                    top,
                    last,
                    following,
                    score_format.unit,
                    score_format.largest_exponent,
                )
            return gap
        # |z| times the slope stays below 1.1 times the largest slope for negative logits
        size = np.maximum(extent, 1.1)
        error = self.slope * (logit_error + output.unit * size + output.least)
        ends = mapped_logits(extent, rule.logit_map)
        if rule.logit_map is not None:
            own = LARGEST_SLOPE[rule.score]
            error += 0.5 * own * map_gap(ends, ends, rule.logit_map, how.score)
        # raw logits have a size on either side of 0
        score = ends if rule.score == "identity" else SCORES[rule.score](top[:, None])[:, 0]
        # an engine computes a score in a few roundings of its own
        error += 8.0 * score_format.unit * np.maximum(score, 1.0) + score_format.least
        if self.selection_bias is not None:
            form = NUMBER_FORMATS[how.selection]
            reach = np.maximum(score, 1.0) + float(np.abs(self.selection_bias).max())
            error += form.unit * reach + form.least
        return 2.0 * error


def emulate(router: Router, how: Arithmetic) -> Emulated:
    """The router in another arithmetic; the rule stays, rows and biases are stored anew."""
    stored = stored_as(router.weight, how.parameter)
    rows = rounded_to(stored, how.operands).astype(np.float32)
    shift = np.sqrt(((rows.astype(np.float64) - router.weight) ** 2).sum(axis=1))
    lengths = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1))
    bias, selection_bias = (
        None if values is None else rounded_to(values.astype(np.float64), how.bias)
        for values in (router.logit_bias, router.selection_bias)
    )
    return Emulated(
        arithmetic=how,
        router=dataclasses.replace(router, weight=stored),
        stored=router,
        columns=np.ascontiguousarray(rows.T),
        logit_bias=bias,
        selection_bias=selection_bias,
        shift=shift,
        longest_row=float(lengths.max()),
        largest_bias=0.0 if bias is None else float(np.abs(bias).max()),
    )


# ------------------------------------------------------------------------------------------ presets


_PACKAGE = "moegeom.variants.arithmetics"

#: What each step can be, in the order in which they happen.
_STEPS: Mapping[str, Collection[str]] = {
    "parameter": WEIGHT_STORAGE,
    "input": NUMBER_FORMATS,
    "operands": NUMBER_FORMATS,
    "order": SUMMATION_ORDERS,
    **dict.fromkeys(("output", "score", "bias", "selection"), NUMBER_FORMATS),
}

Compared = Literal["logits", "scores"]
Ties = Literal["lowest", "undetermined"]


@dataclass(frozen=True)
class Arithmetic:
    """Formats and orders of one engine's router, step by step; ``engine`` is what it copies.

    ``parameter`` is how the rows are stored, ``input`` what the router input is rounded to,
    ``operands`` what the product rounds both to, ``order`` how a logit is added up in float32,
    ``output`` the format of logits, ``score`` and ``selection`` those of scores and of their sum
    with the selection bias, which is stored as ``bias``. ``compared`` is what top-k of an affine
    rule looks at. ``ties`` says whether equal scores go to the lowest expert, or to any.
    """

    name: str
    text: str
    engine: str
    version: str
    source: str
    parameter: str = "float64"
    input: str = "float64"
    operands: str = "float32"
    order: str = "any"
    output: str = "float32"
    compared: Compared = "scores"
    score: str = "float32"
    bias: str = "float32"
    selection: str = "float32"
    ties: Ties = "lowest"

    def __post_init__(self) -> None:
        for step, legal in _STEPS.items():
            if (name := getattr(self, step)) not in legal:
                raise ValueError(f"{step} is {quoted(name)}, expected one of {', '.join(legal)}")


def arithmetic_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    return shipped_names(_PACKAGE)


@cache
def arithmetic(name: str) -> Arithmetic:
    """The preset of that name; UsageError with the nearest ones for an unknown name."""
    if name not in arithmetic_names():
        raise unknown_name("arithmetic", name, arithmetic_names())
    return record_of_file(Arithmetic, name, shipped_text(_PACKAGE, name))


def describe_arithmetics() -> list[dict[str, str]]:
    """A row for each preset, by name, with the steps that change something."""
    return [_row(arithmetic(name)) for name in arithmetic_names()]


def _row(how: Arithmetic) -> dict[str, str]:
    forms = {f: getattr(how, f.name) for f in fields(Arithmetic) if f.name in _STEPS}
    version = f" ({how.version})" if how.version else ""
    return {
        "name": how.name,
        "ties": how.ties,
        "engine": f"{how.engine}{version}",
        "text": how.text,
        "steps": ", ".join(f"{f.name} {form}" for f, form in forms.items() if form != f.default),
        "source": how.source,
    }
