"""From recorded inputs and a variant to what it changes about the choice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float, Float32, Float64, Int32, Int64
from moegeom.core.tokens import TILE
from moegeom.engine.choice import group_masked, tile_logits
from moegeom.geometry.boundary.linear import NEVER
from moegeom.geometry.noise import (
    certainly_differs,
    flip_prediction,
    nearest_flip,
    shares_expert,
    spacing,
    swapped_pairs,
    weight_moved,
)
from moegeom.geometry.number_formats import NUMBER_FORMATS
from moegeom.kernels.batch import Flip
from moegeom.kernels.reduction import Kernels
from moegeom.variants.emulated import Emulated

#: Sum of the sizes of products over the product of the lengths, below which it is not checked:
#: 2 / pi for normal numbers, less for a few large coordinates that both have.
_LEAST_SIZE = 0.5

#: Below this chance of crossing the nearest boundary the others are not checked.
_LEAST_CHANCE = 1e-4

#: Inputs that stay in the processor's cache while they are rounded; divides a tile.
_ROWS = 128


@dataclass(frozen=True, eq=False)
class ReferenceChoice:
    """The choice that a variant is compared with; ``pair`` is the nearest boundary, where known."""

    values: Float[np.ndarray, "tokens hidden"]
    logits: Float[np.ndarray, "tokens experts"]
    chosen: Int32[np.ndarray, "tokens k"]
    margin: Float64[np.ndarray, "tokens"]
    weights: Float64[np.ndarray, "tokens k"]
    pair: Int32[np.ndarray, "tokens 2"] | None


def flip_of(
    emulated: Emulated, reference: ReferenceChoice, kernels: Kernels, entered: Entered | None = None
) -> Flip:
    """What the variant changes; the tokens begin on a tile border. ``entered`` is of these tokens.

    The engine's logits are the float32 product of its own inputs and rows, rounded as it rounds
    them; where it adds in a known order and the order could matter, they are added in that order.
    """
    # an engine's logits may leave its range: infinite and undefined numbers prove nothing
    with np.errstate(over="ignore", invalid="ignore"):
        entered = entered or enter(emulated, reference.values, kernels)
        routed = _routed(emulated, reference.values, entered, kernels)
        chosen = routed.chosen
        flip = flip_to_ranked(chosen, reference.chosen, reference.weights)
        surely, tied = flip.differs.copy(), routed.margin == 0.0
        if tied.any():
            surely[tied] = certainly_differs(routed.compared[tied], reference.chosen[tied])
        return dataclasses.replace(
            flip,
            surely=surely,
            perhaps=flip.differs | tied,
            tied=tied & (reference.margin > 0.0),
            proved=_proved(emulated, reference, entered, kernels),
            predicted=_predicted(emulated, reference, entered),
        )


def flip_to(
    chosen: Int32[np.ndarray, "tokens k"],
    before: Int32[np.ndarray, "tokens k"],
    weights: Float64[np.ndarray, "tokens k"],
) -> Flip:
    """What a choice changes of which nothing else is known: its order means nothing."""
    differs = ~_same_set(before, chosen)
    moved, flipped = np.zeros(len(chosen)), np.flatnonzero(differs)
    moved[flipped] = weight_moved(weights[flipped], before[flipped], chosen[flipped])
    return Flip(differs, differs, differs, moved, swaps_of(before, chosen, flipped))


def swaps_of(
    before: Int32[np.ndarray, "tokens k"],
    chosen: Int32[np.ndarray, "tokens k"],
    flipped: Int64[np.ndarray, "flipped"],
) -> Int32[np.ndarray, "swaps 3"]:
    """Row, expert out and expert in, of the rows ``flipped``."""
    swaps = swapped_pairs(before[flipped], chosen[flipped])
    swaps[:, 0] = flipped[swaps[:, 0]]
    return swaps


def flip_to_ranked(
    chosen: Int32[np.ndarray, "tokens k"],
    before: Int32[np.ndarray, "tokens k"],
    weights: Float64[np.ndarray, "tokens k"],
) -> Flip:
    """The same for a choice whose experts stand best first."""
    flip = flip_to(chosen, before, weights)
    return dataclasses.replace(flip, reordered=~flip.differs & (before != chosen).any(axis=1))


@dataclass(frozen=True, eq=False)
class _Gap:
    """The unrounded choice, and how far the gap exceeds what an engine's rounding may close."""

    chosen: Int32[np.ndarray, "tokens k"]
    width: Float64[np.ndarray, "tokens"]
    largest: Float64[np.ndarray, "tokens"]
    extent: Float64[np.ndarray, "tokens"]
    last: Float64[np.ndarray, "tokens"]
    following: Float64[np.ndarray, "tokens"]

    def spare(
        self, emulated: Emulated, logit_error: Float64[np.ndarray, "tokens"]
    ) -> Float64[np.ndarray, "tokens"]:
        """Width of the gap beyond the one needed; positive: no rounding changes the choice."""
        needed = emulated.gap_needed(
            logit_error, self.largest, self.extent, self.last, self.following
        )
        return self.width - needed

    def at(self, rows: Int64[np.ndarray, "some"]) -> _Gap:
        """That of some tokens."""
        return _Gap(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


def _gap(emulated: Emulated, logits: Float[np.ndarray, "tokens experts"], kernels: Kernels) -> _Gap:
    compared, group_margin = group_masked(emulated.router.rule, emulated.unrounded(logits), kernels)
    chosen, margin = kernels["top_k"](compared, emulated.router.rule.top_k)
    last = np.take_along_axis(compared, chosen[:, -1:], axis=1)[:, 0].astype(np.float64)
    # a group score sums two selection scores at most, so its error is twice theirs
    width = margin if group_margin is None else np.minimum(margin, group_margin / 2.0)
    return _Gap(
        chosen=chosen,
        width=width,
        largest=logits.max(axis=1).astype(np.float64),
        extent=np.abs(logits).max(axis=1).astype(np.float64),
        last=last,
        following=last - margin,
    )


@dataclass(frozen=True, eq=False)
class Entered:
    """Of inputs as they enter the product of an engine: their length, how far each moved, and what
    follows before anything else is rounded, the float32 product and its gap.

    Engines that have the same entry (``Emulated.has_entry_of``) share it.
    """

    norm: Float64[np.ndarray, "tokens"]
    moved: Float64[np.ndarray, "tokens"]
    logits: Float[np.ndarray, "tokens experts"]
    gap: _Gap


def enter(
    emulated: Emulated, values: Float[np.ndarray, "tokens hidden"], kernels: Kernels
) -> Entered:
    """What enters the engine's product; the tokens begin on a tile border."""
    norm, moved = np.empty((2, len(values)))
    logits = np.empty((len(values), emulated.columns.shape[1]), emulated.columns.dtype)
    # rounded inputs of a tile at a time: of a whole batch they would be fresh memory, which is slow
    inputs = np.empty((TILE, values.shape[1]), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(values), TILE):
            tile = slice(start, start + TILE)
            entering = inputs[: len(values[tile])]
            norm[tile], moved[tile] = _round(emulated, values[tile], entering, kernels)
            logits[tile] = engine_logits(emulated, entering)
        return Entered(norm, moved, logits, _gap(emulated, logits, kernels))


def _round(
    emulated: Emulated,
    values: Float[np.ndarray, "tokens hidden"],
    out: Float32[np.ndarray, "tokens hidden"],
    kernels: Kernels,
) -> tuple[Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"]]:
    """Fills ``out`` with what enters; its length, and how far each token moved."""
    if emulated.lost and values.dtype == np.float32:
        return kernels["rounded_inputs"](values, emulated.lost, out)
    norm, moved = np.empty((2, len(values)))
    for start in range(0, len(values), _ROWS):
        rows = slice(start, start + _ROWS)
        part = values[rows]
        entering = emulated.inputs(part)
        norm[rows] = kernels["input_norm"](entering)
        moved[rows] = 0.0 if entering is part else kernels["input_norm"](entering - part)
        out[rows] = entering
    return norm, moved


@dataclass(frozen=True, eq=False)
class _Routed:
    """The engine's choice, and what it follows from."""

    logits: Float[np.ndarray, "tokens experts"]
    compared: Float[np.ndarray, "tokens experts"]
    chosen: Int32[np.ndarray, "tokens k"]
    margin: Float64[np.ndarray, "tokens"]


def emulated_choice(
    emulated: Emulated, values: Float[np.ndarray, "tokens hidden"], kernels: Kernels
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, chosen experts and margins of the engine; the tokens begin on a tile border."""
    with np.errstate(over="ignore", invalid="ignore"):
        routed = _routed(emulated, values, enter(emulated, values, kernels), kernels)
    return routed.logits, routed.chosen, routed.margin


def engine_logits(
    emulated: Emulated, inputs: Float[np.ndarray, "tokens hidden"]
) -> Float[np.ndarray, "tokens experts"]:
    """The engine's logits as a float32 product adds them up, of inputs as it holds them."""
    logits = tile_logits(inputs, emulated.columns, None)
    bias = emulated.logit_bias
    return logits if bias is None else logits + bias.astype(np.float32)


def _routed(
    emulated: Emulated,
    values: Float[np.ndarray, "tokens hidden"],
    entered: Entered,
    kernels: Kernels,
) -> _Routed:
    norm, logits, gap = entered.norm, entered.logits, entered.gap
    if emulated.has_known_order:
        # where no order could change the choice, this product's will do
        error = emulated.sum_error(norm, emulated.arithmetic.order) + emulated.sum_error(
            norm, "any"
        )
        rows = np.flatnonzero(~(gap.spare(emulated, error) > 0.0))
        if len(rows):
            logits = logits.copy()
            logits[rows] = emulated.ordered_logits(emulated.inputs(values[rows]))
    compared, _ = group_masked(emulated.router.rule, emulated.compared(logits), kernels)
    if compared is entered.logits:  # nothing is rounded, so that the gap is that of the choice
        return _Routed(logits, compared, gap.chosen, gap.width)
    chosen, margin = kernels["top_k"](compared, emulated.router.rule.top_k)
    return _Routed(logits, compared, chosen, margin)


def _proved(
    emulated: Emulated, reference: ReferenceChoice, entered: Entered, kernels: Kernels
) -> Bool[np.ndarray, "tokens"]:
    """Tokens whose set is proved to stay, whichever way the engine rounds and adds.

    The gap is that of the float32 product and the error that of the longest row; where this leaves
    it open by little, the gap is that of float64 sums, which have next to no error themselves, and
    where that does not do either, the error is that of the token's own products.
    """
    chosen, gap = reference.chosen, entered.gap
    if emulated.router.rule.num_chosen == emulated.router.num_experts:
        return np.ones(len(chosen), bool)  # there is no other set
    own = emulated.sum_error(entered.norm, emulated.arithmetic.order)
    product = emulated.sum_error(entered.norm, "any")
    spare = gap.spare(emulated, own + product)
    proved = (spare > 0.0) & _same_set(chosen, gap.chosen)
    # an exact gap is wider by the error of two logits at most; sizes are never far below lengths
    wider = gap.spare(emulated, _LEAST_SIZE * own) + 2.0 * emulated.slope * product
    rows = np.flatnonzero(~(spare > 0.0) & (wider > 0.0))
    if not len(rows):
        return proved
    own = own[rows]
    exact = _exact_gap(emulated, reference.values, entered, rows, product[rows], kernels)
    # their own error: one part in 2^53 of what the float32 sums allow in 2^24
    of_sums = product[rows] * 2.0**-28
    is_wide = exact.spare(emulated, own + of_sums) > 0.0
    is_left = ~is_wide & (exact.spare(emulated, _LEAST_SIZE * own) > 0.0)
    for start in range(0, len(spare), TILE):
        # tile by tile, so that a batch cannot change the shape of a product
        left = np.flatnonzero(is_left & (rows // TILE == start // TILE))
        if len(left):
            closer = emulated.closer_sum_error(emulated.inputs(reference.values[rows[left]]))
            is_wide[left] = exact.at(left).spare(emulated, closer + of_sums[left]) > 0.0
    proved[rows] = is_wide & _same_set(chosen[rows], exact.chosen)
    return proved


def _exact_gap(
    emulated: Emulated,
    values: Float[np.ndarray, "tokens hidden"],
    entered: Entered,
    rows: Int64[np.ndarray, "some"],
    error: Float64[np.ndarray, "some"],
    kernels: Kernels,
) -> _Gap:
    """The gap of float64 sums of some tokens, whose float32 product is off by ``error`` at most.

    A last chosen score and a first other one are within the error of those of the product, so that
    of logits that are compared one by one only those within twice the error of them are summed.
    """
    logits, near = entered.logits[rows], entered.gap.at(rows)
    rule = emulated.router.rule
    if not rule.is_affine or rule.logit_map is not None or rule.groups is not None:
        every = np.ones(logits.shape, bool)
        return _gap(emulated, emulated.wide_logits(values, rows, logits, every, kernels), kernels)
    compared = emulated.unrounded(logits)
    is_near = compared >= (near.following - 2.0 * error)[:, None]
    is_near &= compared <= (near.last + 2.0 * error)[:, None]
    gap = _gap(emulated, emulated.wide_logits(values, rows, logits, is_near, kernels), kernels)
    # the largest ones may be those of the product
    return dataclasses.replace(gap, largest=gap.largest + error, extent=gap.extent + error)


def _same_set(
    one: Int32[np.ndarray, "tokens k"], other: Int32[np.ndarray, "tokens k"]
) -> Bool[np.ndarray, "tokens"]:
    if one.shape != other.shape:
        return np.asarray(shares_expert(one, other).all(axis=1))
    same = np.asarray((one == other).all(axis=1))
    rest = np.flatnonzero(~same)  # few: nearly all stand in the same order, too
    same[rest] = shares_expert(one[rest], other[rest]).all(axis=1)
    return same


def _predicted(
    emulated: Emulated, reference: ReferenceChoice, entered: Entered
) -> Float64[np.ndarray, "tokens"] | None:
    """The noise model: input and rows move at random by as much as they moved; None without pair.

    The nearest boundary as exactly as it is known, times how much likelier the experts near it make
    it that one of them is overtaken. The output step is that of the logits; scores that are
    compared in a coarser format are not in the model.
    """
    if reference.pair is None:
        return None
    out, into = np.maximum(reference.pair, 0).T
    has_boundary = reference.pair[:, 0] >= 0
    token, width = np.arange(len(out)), emulated.router.hidden_size
    of_out, of_in = (reference.logits[token, expert].astype(np.float64) for expert in (out, into))
    of_input = entered.moved / np.sqrt(width)
    of_rows = entered.norm / np.sqrt(width)
    inverse = emulated.distances.inverse[out, into]
    is_boundary = (inverse > 0.0) & (inverse < NEVER)
    between = np.divide(1.0, inverse, out=np.zeros(len(token)), where=is_boundary)
    deviation = np.hypot(
        of_input * between, of_rows * np.hypot(emulated.shift[out], emulated.shift[into])
    )
    unit = NUMBER_FORMATS[emulated.arithmetic.output].unit
    coarse = unit > NUMBER_FORMATS["float32"].unit
    step = spacing(of_out, unit) if coarse else np.zeros(len(token))
    gap = of_out - of_in
    predicted = flip_prediction(gap, deviation, step)
    alone = flip_prediction(gap, deviation, np.zeros(len(token)))
    near = np.flatnonzero(has_boundary & (alone > _LEAST_CHANCE) & np.isfinite(deviation))
    each = np.hypot(
        of_input[near, None] * emulated.deviations, of_rows[near, None] * emulated.shift
    )
    among = nearest_flip(reference.logits[near], reference.chosen[near], each)
    stays = (1.0 - among) / np.maximum(1.0 - alone[near], _LEAST_CHANCE)
    predicted[near] = 1.0 - (1.0 - predicted[near]) * np.minimum(stays, 1.0)
    return np.where(has_boundary, predicted, 0.0)
