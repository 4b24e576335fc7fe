"""Logits of a router, what it chooses by them, and how far rounding may put them apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.limits import OUTPUT_BYTES
from moegeom.core.router import LogitMap, Router, Rule
from moegeom.core.shapes import Bool, Float, Float64, Int32
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, SourceFacts, TokenColumns, TokenSource, TopLogits
from moegeom.engine.prepared import PreparedRouter, check_width
from moegeom.engine.task import Task
from moegeom.geometry.boundary.linear import spread
from moegeom.geometry.number_formats import map_gap
from moegeom.geometry.rounding import UNIT_FLOAT32, logit_error_bound, score_resolution
from moegeom.geometry.rows import normed
from moegeom.geometry.selection import LARGEST_SLOPE, SCORES, mapped_logits
from moegeom.kernels.reduction import Kernels


def tile_logits(
    values: Float[np.ndarray, "tokens hidden"],
    weight_columns: Float[np.ndarray, "hidden experts"],
    bias: Float[np.ndarray, "experts"] | None,
) -> Float[np.ndarray, "tokens experts"]:
    """Logits W y + b of tokens that begin on a tile border.

    One product per tile, the last one filled with zeros: each token meets the same
    product, of the same shape and at the same row, whatever batch it came in. The dtype is that of
    the weights (float32, or float64 where they are stored so), and so is the accumulation.
    """
    tokens = len(values)
    logits = np.empty((-(-tokens // TILE) * TILE, weight_columns.shape[1]), weight_columns.dtype)
    for start in range(0, tokens, TILE):
        tile = values[start : start + TILE]
        if len(tile) < TILE or tile.dtype != logits.dtype:
            padded = np.zeros((TILE, values.shape[1]), dtype=logits.dtype)
            padded[: len(tile)] = tile
            tile = padded
        np.matmul(tile, weight_columns, out=logits[start : start + TILE])
    if bias is not None:
        logits += bias
    return logits[:tokens]


def logits_of(
    prepared: PreparedRouter, values: Float[np.ndarray, "tokens hidden"] | None
) -> Float[np.ndarray, "tokens experts"] | None:
    """``W y + b`` of tokens that begin on a tile border; None where no inputs were recorded."""
    if values is None:
        return None
    with np.errstate(invalid="ignore", over="ignore"):  # non-finite tokens are counted apart
        return tile_logits(values, prepared.weight_columns, prepared.logit_bias)


def compared_scores(
    prepared: PreparedRouter,
    logits: Float[np.ndarray, "tokens experts"],
    scored: Float[np.ndarray, "tokens experts"],
    kernels: Kernels,
) -> tuple[Float[np.ndarray, "tokens experts"], Float64[np.ndarray, "tokens"] | None]:
    """What top-k looks at, masked groups at their fill, and the group margin (None without groups).

    ``logits`` are ``W y + b``; ``scored`` are those that scores are made of.
    """
    rule, compared = prepared.router.rule, logits
    if not rule.is_affine:
        compared = kernels["selection_scores"](
            mapped_logits(scored, rule.logit_map), rule.score, prepared.selection_bias
        )
    return group_masked(rule, compared, kernels)


def group_masked(
    rule: Rule, compared: Float[np.ndarray, "tokens experts"], kernels: Kernels
) -> tuple[Float[np.ndarray, "tokens experts"], Float64[np.ndarray, "tokens"] | None]:
    """Selection scores with masked groups at their fill, and the group margin; None without."""
    return (compared, None) if rule.groups is None else kernels["group_mask"](compared, rule.groups)


def chosen_by(
    prepared: PreparedRouter, logits: Float[np.ndarray, "tokens experts"], kernels: Kernels
) -> Int32[np.ndarray, "tokens k"]:
    """The chosen experts of a router that is not behind a projection, best first."""
    compared, _ = compared_scores(prepared, logits, logits, kernels)
    chosen, _ = kernels["top_k"](compared, prepared.router.rule.top_k)
    return chosen


def float_bound(
    prepared: PreparedRouter,
    norm: Float64[np.ndarray, "tokens"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    margin: Float64[np.ndarray, "tokens"],
    scale: Float64[np.ndarray, "tokens"] | None,
) -> Float64[np.ndarray, "tokens"]:
    """Margin below which two correct float32 engines may choose differently."""
    rule, logit_map = prepared.router.rule, prepared.router.rule.logit_map
    bound = logit_error_bound(norm, prepared.num_terms, prepared.longest_row, prepared.largest_bias)
    if scale is not None:
        bound = bound * scale
    if rule.is_affine:
        ends = (chosen[:, :1], chosen[:, -1:])
        first, last = (
            np.take_along_axis(logits, end, axis=1)[:, 0].astype(np.float64) for end in ends
        )
        if logit_map is not None:
            return _behind_map(rule.score, logit_map, bound, first, last, margin)
        return 2.0 * bound + score_resolution(rule.score, first, last, last - margin)
    # A score and its bias are rounded a few times each, relative to their size.
    if rule.score == "identity":  # the size of a logit, whatever its sign
        size = prepared.longest_row * norm + prepared.largest_bias
    else:
        largest_logit = mapped_logits(logits.max(axis=1, keepdims=True), logit_map)
        size = SCORES[rule.score](largest_logit)[:, 0]
    slope = LARGEST_SLOPE[rule.score]
    own_rounding = 8 * UNIT_FLOAT32 * (size + 1.0 + float(np.abs(prepared.selection_bias).max()))
    if logit_map is not None:
        farthest = np.abs(logits).max(axis=1).astype(np.float64)
        ends = mapped_logits(farthest, logit_map)
        own_rounding += slope * map_gap(ends, ends, logit_map, "float32")
        slope *= logit_map.multiplier
    return 2.0 * slope * bound + own_rounding


def _behind_map(
    score: str,
    logit_map: LogitMap,
    bound: Float64[np.ndarray, "tokens"],
    first: Float64[np.ndarray, "tokens"],
    last: Float64[np.ndarray, "tokens"],
    margin: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    """The margin of logits whose image is as wide as engines need it; inf where a cap leaves none.

    In proportion: a margin is below it exactly where its image is below what is needed.
    """
    following = last - margin
    largest, one, other = (mapped_logits(z, logit_map) for z in (first, last, following))
    needed = 2.0 * logit_map.multiplier * bound + map_gap(one, other, logit_map, "float32")
    needed += score_resolution(score, largest, one, other)
    image = one - other
    with np.errstate(divide="ignore", invalid="ignore"):
        needed_margin = np.where(image > 0.0, margin * (needed / image), np.inf)
    return np.where(np.isneginf(following), 2.0 * bound, needed_margin)


# --------------------------------------------------------------------------------- from a recording


@dataclass(frozen=True, eq=False)
class RecordedQuantities:
    """What is known about all tokens of a range, by name of the quantity; None where nobody looked.

    ``values`` are the router inputs; ``top_logits`` and ``top_expert`` are what is known where not
    all logits are.
    """

    logits: Float[np.ndarray, "tokens experts"]
    values: Float[np.ndarray, "tokens hidden"] | None = None
    top_logits: Float[np.ndarray, "tokens m"] | None = None
    top_expert: Int32[np.ndarray, "tokens m"] | None = None


class ChoicesAlone:
    """A recording of which nothing but the choices is read, as if it were one of ids."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        outputs = tuple(kind for kind in source.facts.outputs if kind == "routing_weights")
        self.facts: SourceFacts = replace(source.facts, stage="ids", outputs=outputs)

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return self._source.read_columns(start, stop)

    def read_values(self, router: str, start: int, stop: int) -> np.ndarray:
        raise InternalError(f"values of router {router} were asked for, of which choices are read")

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        raise InternalError(f"logits of router {router} were asked for, of which choices are read")

    def read_chosen(
        self, router: str, start: int, stop: int
    ) -> Int32[np.ndarray, "tokens k"] | None:
        return self._source.read_chosen(router, start, stop)

    def read_output(
        self, router: str, kind: str, start: int, stop: int
    ) -> Float[np.ndarray, "tokens *width"] | None:
        return self._source.read_output(router, kind, start, stop)


def recorded_logits(task: Task, start: int, stop: int) -> RecordedQuantities:
    """Logits of tokens ``[start, stop)`` from whatever stage was recorded."""
    router, stage = task.prepared.router, task.source.facts.stage
    if stage == "top_logits":
        top = task.source.read_top_logits(router.name, start, stop)
        logits = _spread(top, task.prepared, task.source.facts.name, start)
        return RecordedQuantities(logits, top_logits=top.logits, top_expert=top.expert)
    # kernels and products expect rows that lie one after the other, however a source keeps them
    values = np.ascontiguousarray(task.source.read_values(router.name, start, stop))
    check_width(router, stage, values.shape[1], task.source.facts.name)
    if stage == "logits":
        # Recorded logits hold the logit bias; a bias that only selects is added here.
        extra = router.selection_bias if router.rule.is_affine else None
        return RecordedQuantities(np.ascontiguousarray(values if extra is None else values + extra))
    if stage == "pre_norm":
        values = through_norm(values, router, task.source.facts.name)
    with np.errstate(invalid="ignore", over="ignore"):  # non-finite tokens are counted apart
        logits = tile_logits(values, task.prepared.weight_columns, task.prepared.logit_bias)
    return RecordedQuantities(logits, values)


def recorded_output(
    task: Task, kind: str, start: int, stop: int
) -> Float[np.ndarray, "tokens *width"] | None:
    """Recorded outputs of one kind; None where there are none."""
    source, router = task.source, task.prepared.router
    if kind == "expert_output" and kind in source.facts.outputs:
        _check_size(router, stop - start, source.facts.name)
    values = source.read_output(router.name, kind, start, stop)
    if values is not None:
        _check_output(router, kind, values.shape[1:], source.facts.name)
    return values


def _check_output(router: Router, kind: str, shape: tuple[int, ...], source: str) -> None:
    """Raises RecordingError for outputs that do not fit the checkpoint."""
    is_of_experts = kind == "expert_output"
    expected = router.num_experts if is_of_experts else router.hidden_size
    if shape[0] != expected:
        raise RecordingError(
            f"{source}: {kind} of router {router.name} has {shape[0]} "
            f"{'experts' if is_of_experts else 'columns'}; the checkpoint has {expected}.",
            "It was recorded from another model or another layer.",
        )


def _check_size(router: Router, tokens: int, source: str) -> None:
    """Raises RecordingError when the outputs of all experts would not fit into memory."""
    size = 4 * tokens * router.num_experts * router.hidden_size
    if size > OUTPUT_BYTES:
        raise RecordingError(
            f"{source}: the outputs of {number_of(router.num_experts, 'expert')} at "
            f"{number_of(tokens, 'token')} take "
            f"{size / 2**30:.1f} GiB; at most {OUTPUT_BYTES >> 30} GiB are held at a time.",
            "Record outputs of fewer tokens (a recording of 128 tokens is one range).",
        )


def through_norm(
    values: Float[np.ndarray, "tokens hidden"], router: Router, source: str
) -> Float[np.ndarray, "tokens hidden"]:
    """What the router reads of inputs of its norm; RecordingError where that is not known."""
    if router.norm is None or router.gain is None:
        raise RecordingError(
            f"{source}: recorded before the norm, but the norm in front of router {router.name} "
            "is not known.",
            "Record what the router reads (stage router_input).",
        )
    return normed(values, router.norm.kind, router.norm.eps, router.gain, router.norm_bias)


def _spread(
    top: TopLogits, prepared: PreparedRouter, source: str, start: int
) -> Float[np.ndarray, "tokens experts"]:
    """Logits with the unrecorded experts below every recorded one of their token.

    They stand just below the least recorded logit: the chosen set is right whenever more than
    top_k are recorded, and the margin is right because its two logits are among the recorded.
    """
    router, num_logits = prepared.router, top.logits.shape[1]
    if not router.rule.is_affine or router.rule.has_selection_bias:
        raise RecordingError(
            f"{source}: the largest logits do not decide router {router.name}, which adds a bias "
            f"to its {router.rule.score} scores or masks groups.",
            "Record router inputs or all logits.",
        )
    if num_logits <= router.rule.top_k and num_logits < router.num_experts:
        raise RecordingError(
            f"{source}: {num_logits} logits a token are recorded for router "
            f"{router.name}; its {router.rule.top_k} chosen experts and the next one are needed.",
            f"Record at least {router.rule.top_k + 1}.",
        )
    _check_experts(top.expert, router, source, start)
    with np.errstate(over="ignore"):  # below the least float32 is none: not finite, counted apart
        below = np.nextafter(top.logits.min(axis=1), np.float32(-np.inf))
    return spread(top.logits, top.expert, below, router.num_experts)


def recorded_choice(task: Task, start: int, stop: int) -> Int32[np.ndarray, "tokens k"] | None:
    """What the recorded engine chose; None where that is not recorded."""
    if not task.source.facts.has_chosen:
        return None
    chosen = task.source.read_chosen(task.prepared.router.name, start, stop)
    if chosen is None:
        return None
    _refuse_twice(chosen, task.prepared.router, task.source.facts.name, start)
    return np.ascontiguousarray(chosen)


def recorded_ids(task: Task, start: int, stop: int) -> Int32[np.ndarray, "tokens k"]:
    """The chosen experts of a recording of ids; refuses what cannot be a choice."""
    router, name = task.prepared.router, task.source.facts.name
    ids = task.source.read_chosen(router.name, start, stop)
    assert ids is not None, "stage ids holds ids"
    check_width(router, "ids", ids.shape[1], name)
    _check_experts(ids, router, name, start)
    return np.ascontiguousarray(ids)


def _check_experts(
    ids: Int32[np.ndarray, "tokens width"], router: Router, source: str, start: int
) -> None:
    """Raises RecordingError for numbers that are no experts, or stand twice in one token."""
    is_empty = (ids == -1) & (router.rule.num_chosen is None)
    wrong = ((ids < 0) & ~is_empty) | (ids >= router.num_experts)
    if wrong.any():
        row, slot = np.argwhere(wrong)[0]
        raise RecordingError(
            f"{source}: token {start + row} of router {router.name} names expert {ids[row, slot]}; "
            f"the checkpoint has {router.num_experts}{_beside(wrong.any(axis=1))}.",
            "Padding must be cut off before the ids are used.",
        )
    _refuse_twice(ids, router, source, start)


def _refuse_twice(
    ids: Int32[np.ndarray, "tokens width"], router: Router, source: str, start: int
) -> None:
    """Raises RecordingError where a token names an expert twice."""
    ordered = np.sort(ids, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        row = int(np.argmax(twice))
        raise RecordingError(
            f"{source}: token {start + row} of router {router.name} names an expert twice: "
            f"{ids[row].tolist()}{_beside(twice)}.",
            "Padding, or rows of layers without router, must be cut off before the ids are used.",
        )


def _beside(is_wrong: Bool[np.ndarray, "tokens"]) -> str:
    """In how many tokens that were read together the same is wrong."""
    number = int(is_wrong.sum())
    of = f"of the {len(is_wrong):,} tokens that were read with it"
    return f"; so do {number - 1:,} {of}" if number > 2 else ""
