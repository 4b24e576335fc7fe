"""Logits, choices and ids from a recording, whatever its stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.limits import OUTPUT_BYTES
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float, Float64, Int32
from moegeom.core.text import number_of
from moegeom.core.tokens import SourceFacts, TokenColumns, TokenSource, TopLogits
from moegeom.engine.choice import tile_logits
from moegeom.engine.prepared import PreparedRouter, check_width
from moegeom.engine.task import Task
from moegeom.geometry.boundary.linear import spread
from moegeom.geometry.rows import normed


@dataclass(frozen=True, eq=False)
class RecordedQuantities:
    """What is known about all tokens of a range, by name of the quantity; None where nobody looked.

    ``values`` are the router inputs; a device hands them on in the dtype that they are stored in,
    in memory that the next batch will be read into. ``top_logits`` and ``top_expert`` are what is
    known where not all logits are. ``is_lost`` marks tokens with a logit that is not finite, of
    which the rest means nothing.
    """

    logits: Float[np.ndarray, "tokens experts"]
    values: Float[np.ndarray, "tokens hidden"] | None = None
    top_logits: Float[np.ndarray, "tokens m"] | None = None
    top_expert: Int32[np.ndarray, "tokens m"] | None = None
    columns: TokenColumns | None = None
    is_lost: Bool[np.ndarray, "tokens"] | None = None
    chosen: Int32[np.ndarray, "tokens k"] | None = None
    margin: Float64[np.ndarray, "tokens"] | None = None
    group_margin: Float64[np.ndarray, "tokens"] | None = None
    distance: Float64[np.ndarray, "tokens"] | None = None
    pair: Int32[np.ndarray, "tokens 2"] | None = None
    input_norm: Float64[np.ndarray, "tokens"] | None = None


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
    return None if chosen is None else np.ascontiguousarray(chosen)


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
            f"the checkpoint has {router.num_experts}.",
            "Padding must be cut off before the ids are used.",
        )
    ordered = np.sort(ids, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        row = int(np.argmax(twice))
        raise RecordingError(
            f"{source}: token {start + row} of router {router.name} names an expert twice: "
            f"{ids[row].tolist()}.",
            "Padding, or rows of layers without router, must be cut off before the ids are used.",
        )
