"""From a range of recorded tokens to quantities."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.core.errors import NonFiniteError
from moegeom.geometry.rounding import (
    UNIT_FLOAT32,
    bf16_noise_scale,
    logit_error_bound,
    score_resolution,
)
from moegeom.geometry.selection.score import LARGEST_SLOPE, SCORES
from moegeom.kernels.quantities import Quantities
from moegeom.scan.labels import block_of
from moegeom.scan.recorded import recorded_choice, recorded_ids, recorded_logits
from moegeom.scan.task import Task


@dataclass(frozen=True, eq=False)
class Measured:
    """Quantities of the finite tokens of a range, and the non-finite ones by number."""

    quantities: Quantities
    non_finite: tuple[int, ...]


def measure(task: Task, start: int, stop: int) -> Measured:
    """Quantities of tokens ``[start, stop)``; ``start`` is a multiple of the tile."""
    facts = task.source.facts
    columns = task.source.read_columns(start, stop)
    token = np.arange(start, stop, dtype=np.int64)
    population = task.populations.label(columns)
    block = block_of(columns, start)
    if facts.stage == "ids":
        quantities = Quantities(token, population, block, recorded_ids(task, start, stop))
        return Measured(quantities, ())
    found = recorded_logits(task, start, stop)
    logits, norm, direction = found.logits, found.norm, found.direction
    recorded = recorded_choice(task, start, stop)
    lost: tuple[int, ...] = ()
    # One sum tells whether all are finite: nan and infinities survive it, and if finite numbers
    # overflow it, the closer look finds nothing. A non-finite input makes every logit of its token
    # non-finite, even through a weight of 0.
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf
        total = logits.sum()
    if not np.isfinite(total):
        finite = np.isfinite(logits).all(axis=1)
        kept = np.flatnonzero(finite)
        lost = tuple((np.flatnonzero(~finite) + start).tolist())
        logits = np.ascontiguousarray(logits[kept])
        norm = None if norm is None else norm[kept]
        direction = None if direction is None else direction[kept]
        recorded = None if recorded is None else np.ascontiguousarray(recorded[kept])
        token, population, block = token[kept], population[kept], block[kept]
    quantities = _quantities(task, token, population, block, logits, norm, recorded)
    if direction is not None:
        quantities = dataclasses.replace(quantities, direction=direction)
    return Measured(quantities, lost)


def _float_bound(
    task: Task,
    norm: Float64[np.ndarray, "tokens"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    margin: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    """Margin below which two correct float32 engines may choose differently."""
    prepared, rule = task.prepared, task.prepared.router.rule
    bias = prepared.logit_bias
    largest = 0.0 if bias is None else float(np.abs(bias).max())
    bound = logit_error_bound(norm, prepared.router.hidden_size, prepared.longest_row, largest)
    if rule.is_affine:
        first, last = (
            np.take_along_axis(logits, chosen[:, [rank]], axis=1)[:, 0].astype(np.float64)
            for rank in (0, -1)
        )
        return 2.0 * bound + score_resolution(rule.score, first, last, last - margin)
    # A score and its bias are rounded a few times each, relative to their size.
    size = SCORES[rule.score](logits.max(axis=1, keepdims=True))[:, 0] + 1.0
    own_rounding = 8 * UNIT_FLOAT32 * (size + float(np.abs(prepared.selection_bias).max()))
    return 2.0 * LARGEST_SLOPE[rule.score] * bound + own_rounding


def _quantities(
    task: Task,
    token: np.ndarray,
    population: np.ndarray,
    block: np.ndarray,
    logits: Float[np.ndarray, "tokens experts"],
    norm: Float64[np.ndarray, "tokens"] | None,
    recorded: Int32[np.ndarray, "tokens k"] | None,
) -> Quantities:
    prepared, rule, kernels = task.prepared, task.prepared.router.rule, task.kernels
    compared, group_margin = logits, None
    if not rule.is_affine:
        compared = kernels["selection_scores"](logits, rule.score, prepared.selection_bias)
    if rule.groups is not None:
        compared, group_margin = kernels["group_mask"](compared, rule.groups)
    chosen, margin = kernels["top_k"](compared, rule.top_k)
    distance = pair = None
    has_all_logits = task.source.facts.stage != "top_logits"
    if prepared.rows is not None and has_all_logits and "distance" in task.wanted:
        distance, pair = kernels["boundary_distance"](
            logits, chosen, margin, prepared.rows, "pair" in task.wanted
        )
    return Quantities(
        token=token,
        population=population,
        block=block,
        chosen=chosen,
        margin=margin,
        group_margin=group_margin,
        distance=distance,
        pair=pair,
        weights=_weights(task, logits, chosen)
        if has_all_logits and "weights" in task.wanted
        else None,
        input_norm=norm,
        float_bound=None if norm is None else _float_bound(task, norm, logits, chosen, margin),
        noise_scale=None
        if norm is None or distance is None
        else bf16_noise_scale(norm, prepared.router.hidden_size),
        selection=compared if has_all_logits and "selection" in task.wanted else None,
        matches_recording=None if recorded is None else kernels["same_set"](chosen, recorded),
    )


def _weights(
    task: Task, logits: Float[np.ndarray, "tokens experts"], chosen: Int32[np.ndarray, "tokens k"]
) -> Float64[np.ndarray, "tokens k"]:
    """Routing weights; a bias that only selects is taken out of affine logits again."""
    router = task.prepared.router
    if router.rule.is_affine and router.selection_bias is not None:
        logits = logits - router.selection_bias
    return task.kernels["routing_weights"](logits, chosen, router.rule)


def refuse_non_finite(router: str, source: str, non_finite: tuple[int, ...], seen: int) -> None:
    """Raises NonFiniteError naming the first token, unless there is none."""
    if non_finite:
        raise NonFiniteError(
            f"{source}: {len(non_finite)} of {seen} tokens read so far at router {router} are not "
            f"finite or overflow (first: token {non_finite[0]}).",
            "Record again in float32, or leave them out with --non-finite skip.",
        )
