"""A batch of tokens: what is read from a recording, and what is computed of it when asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import numpy as np

from moegeom.core.errors import NonFiniteError
from moegeom.core.shapes import Bool, Float, Float32, Float64, Int32, Int64
from moegeom.core.tokens import TILE, InputNoise
from moegeom.engine.choice import (
    RecordedQuantities,
    chosen_by,
    compared_scores,
    float_bound,
    logits_of,
    recorded_choice,
    recorded_ids,
    recorded_logits,
    recorded_output,
    tile_logits,
)
from moegeom.engine.flipping import (
    Entered,
    ReferenceChoice,
    emulated_choice,
    enter,
    flip_of,
    flip_to,
    flip_to_ranked,
)
from moegeom.engine.plan import by_tile
from moegeom.engine.prepared import PreparedRouter
from moegeom.engine.task import OUTLIER_FACTOR, Task, block_of
from moegeom.geometry.boundary.curved import POINT
from moegeom.geometry.boundary.linear import RowDistances, angle_bound
from moegeom.geometry.noise import boundary_sigmas, flip_bounds, simulate_flip
from moegeom.geometry.paths import cell_quantiles
from moegeom.geometry.rounding import bf16_noise_scale
from moegeom.geometry.rows import ROWS_IN_CACHE, cosine_scale, unit_rows
from moegeom.geometry.selection import SCORES, fill_decides, mapped_logits, score_sum
from moegeom.geometry.whatif import packed, same_sets, threshold_distance
from moegeom.kernels.batch import Flip, NoisyFlip, TokenBatch
from moegeom.kernels.reduction import Kernels
from moegeom.variants.emulated import Emulated

#: Tokens of each tile that are simulated, and how often.
LOOKED_AT, DRAWS = 256, 8

#: Exit times are those of half of the paths.
_HALF = 0.5


def noisy_flip(
    noise: InputNoise,
    prepared: PreparedRouter,
    values: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    norm: Float64[np.ndarray, "tokens"],
    token: Int64[np.ndarray, "tokens"],
    seed: int,
) -> NoisyFlip:
    """What the noise does to some tokens; random numbers depend on seed, router and tile alone."""
    router = prepared.router
    scale = np.full(len(norm), noise.scale)
    if noise.is_relative:
        scale = noise.scale * norm / np.sqrt(router.hidden_size)
    rows, flipped = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start, of_this in by_tile(token):
        first = of_this[:LOOKED_AT]
        generator = np.random.Generator(
            np.random.PCG64([seed, router.layer, *router.name.encode(), start // TILE])
        )
        simulation = simulate_flip(
            values[first],
            router.weight,
            router.rule,
            scale[first, None],
            DRAWS,
            generator,
            router.logit_bias,
            router.selection_bias,
        )
        rows.append(first)
        flipped.append(simulation)
    row = np.concatenate(rows)
    if prepared.rows is None:
        return NoisyFlip(None, None, None, row, np.concatenate(flipped), DRAWS)
    bounds = flip_bounds(logits, chosen, prepared.rows, scale)
    early, late = _exit_times(logits[row], chosen[row], prepared.rows, scale[row])
    return NoisyFlip(
        bounds.lower,
        bounds.estimate,
        bounds.upper,
        row,
        np.concatenate(flipped),
        DRAWS,
        early,
        late,
    )


def _exit_times(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: RowDistances,
    scale: Float64[np.ndarray, "tokens"],
) -> tuple[Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"]]:
    """Bounds on the time by which half of the paths have left; no noise is never."""
    early, late = np.full((2, len(logits)), np.inf)
    moving = np.flatnonzero(scale > 0.0)
    sigmas = boundary_sigmas(logits[moving], chosen[moving], rows) / scale[moving, None]
    early[moving], late[moving] = cell_quantiles(sigmas, _HALF)
    return early, late


T = TypeVar("T")


class quantity(Generic[T]):  # noqa: N801 - written as a decorator
    """A quantity of a batch, computed once; None where router and source cannot give it.

    Without the lock of ``functools.cached_property``, which threads with batches of their own would
    wait for.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self._name = compute, compute.__name__

    @overload
    def __get__(self, batch: None, of: type) -> quantity[T]: ...

    @overload
    def __get__(self, batch: LazyBatch, of: type) -> T: ...

    def __get__(self, batch: LazyBatch | None, of: type) -> Any:
        if batch is None:
            return self
        array = None if self._name in batch.task.absent else self._compute(batch)
        vars(batch)[self._name] = array
        return array


class LazyBatch(TokenBatch):
    """Tokens ``[start, stop)`` of a source at one router, less those that are not finite.

    ``start`` is a multiple of the tile. Labels and logits are read at once, everything else when it
    is first asked for; what is on ``record`` is not computed again. A batch belongs to one thread.
    """

    def __init__(
        self, task: Task, start: int, stop: int, record: RecordedQuantities | None = None
    ) -> None:
        self.task = task
        self.start = start
        self.stop = stop
        #: Numbers of the tokens that are not finite.
        self.non_finite: tuple[int, ...] = ()
        columns = task.source.read_columns(start, stop)
        is_counted = task.options.counted(columns)
        if task.run_b is not None:
            is_counted &= task.run_b.is_matched(start, stop)
        if task.source.facts.stage == "ids":
            read: dict[str, np.ndarray | None] = {"chosen": recorded_ids(task, start, stop)}
            if "routing_weights" in task.source.facts.outputs:
                name = task.prepared.router.name
                read["weights"] = task.source.read_output(name, "routing_weights", start, stop)
        else:
            record = record or recorded_logits(task, start, stop)
            theirs = (
                None if task.checkpoint_b is None else logits_of(task.checkpoint_b, record.values)
            )
            finite = _finite(record, theirs)
            if finite is not None:
                self.non_finite = tuple((np.flatnonzero(~finite & is_counted) + start).tolist())
                is_counted &= finite
            scale = _token_scale(task, record.values)
            read = {**vars(record), "their_logits": theirs, "scale": scale}
        read |= {
            "token": np.arange(start, stop, dtype=np.int64),
            "label": task.populations.label(columns),
            "block": block_of(columns, start, task.source.facts.num_documents),
            "document": columns.document,
            "position": columns.position,
            "token_id": columns.token_id,
        }
        self._row = None if is_counted.all() else np.flatnonzero(is_counted)
        known_rows = {name: self._kept(rows) for name, rows in read.items() if rows is not None}
        vars(self).update(known_rows)

    def beside(self, task: Task) -> LazyBatch:
        """The same tokens for a task that has the same batches; what is computed by now is known.

        For the thread of this batch.
        """
        other = copy.copy(self)
        vars(other).pop("flip", None)  # the only quantity that variants change
        other.task = task
        return other

    def _kept(self, array: np.ndarray) -> np.ndarray:
        """The kept rows; the array itself when all are."""
        return array if self._row is None else np.ascontiguousarray(array[self._row], like=array)

    def _recorded_choice(self) -> Int32[np.ndarray, "tokens k"] | None:
        recorded = recorded_choice(self.task, self.start, self.stop)
        return None if recorded is None else self._kept(recorded)

    def _output(self, kind: str) -> np.ndarray | None:
        output = recorded_output(self.task, kind, self.start, self.stop)
        return None if output is None else self._kept(output)

    #: The last variant of these tokens, with what entered its product.
    _entered: tuple[Emulated, Entered] | None = None

    # -------------------------------------------------------------------------- what is read
    #: ``W y + b``, whose order is the choice and whose differences are distances.
    logits: Float[np.ndarray, "tokens experts"]
    #: What takes ``logits`` to those that scores are made of; None for nothing.
    scale: Float64[np.ndarray, "tokens"] | None = None
    #: Router inputs.
    values: Float[np.ndarray, "tokens hidden"] | None = None
    top_logits: Float[np.ndarray, "tokens m"] | None = None
    top_expert: Int32[np.ndarray, "tokens m"] | None = None
    #: Logits of the router of a second checkpoint.
    their_logits: Float[np.ndarray, "tokens experts"] | None = None
    #: Population without regard to outliers.
    label: Int32[np.ndarray, "tokens"]

    @quantity
    def input(self) -> Float[np.ndarray, "tokens hidden"] | None:
        return self.values

    @quantity
    def input_norm(self) -> Float64[np.ndarray, "tokens"] | None:
        if self.values is None:
            return None
        is_narrow = self.values.dtype.itemsize == 2
        return self.task.kernels["input_norm"](self._float32() if is_narrow else self.values)

    @quantity
    def population(self) -> Int32[np.ndarray, "tokens"]:
        if self.task.typical_norm is None or self.input_norm is None:
            return self.label
        norm, typical = self.input_norm, self.task.typical_norm
        outlier = (norm > OUTLIER_FACTOR * typical) | (norm * OUTLIER_FACTOR < typical)
        return np.where(outlier, self.task.populations.outliers, self.label).astype(np.int32)

    @quantity
    def shared_output(self) -> Float32[np.ndarray, "tokens output"] | None:
        return self._output("shared_output")

    @quantity
    def routed_output(self) -> Float32[np.ndarray, "tokens output"] | None:
        return self._output("routed_output")

    @quantity
    def expert_output(self) -> Float32[np.ndarray, "tokens experts expert_width"] | None:
        return self._output("expert_output")

    @quantity
    def matches_recording(self) -> Bool[np.ndarray, "tokens"] | None:
        recorded = self._recorded_choice()
        if recorded is None:
            return None
        if self._has_threshold:
            return same_sets(self.chosen, recorded)
        return self.task.kernels["same_set"](self.chosen, recorded)

    # ---------------------------------------------------------------------------- the choice
    @quantity
    def _scored(self) -> Float[np.ndarray, "tokens experts"]:
        """The logits that scores are made of."""
        return self.logits if self.scale is None else self.logits * self.scale[:, None]

    @quantity
    def _compared(
        self,
    ) -> tuple[Float[np.ndarray, "tokens experts"], Float64[np.ndarray, "tokens"] | None]:
        """What top-k looks at, masked groups at their fill, and the group margin."""
        return compared_scores(self._prepared, self.logits, self._scored, self.task.kernels)

    @quantity
    def _choice(self) -> tuple[Int32[np.ndarray, "tokens k"], Float64[np.ndarray, "tokens"]]:
        """The chosen experts and the margin of what is compared."""
        if self._has_threshold:
            z = self.mapped
            slots = self._prepared.router.num_slots
            return packed(z > 0.0, z, slots), np.abs(z.astype(np.float64)).min(axis=1)
        return self.task.kernels["top_k"](self._compared[0], self._prepared.router.rule.top_k)

    @quantity
    def chosen(self) -> Int32[np.ndarray, "tokens k"]:
        return self._choice[0]

    @quantity
    def num_chosen(self) -> Int32[np.ndarray, "tokens"] | None:
        return (self.chosen >= 0).sum(axis=1, dtype=np.int32)

    @quantity
    def margin(self) -> Float64[np.ndarray, "tokens"] | None:
        margin = self._choice[1]
        if self._prepared.router.rule.is_affine and self.scale is not None:
            return margin * self.scale
        return margin

    @quantity
    def group_margin(self) -> Float64[np.ndarray, "tokens"] | None:
        return None if self._prepared.router.rule.groups is None else self._compared[1]

    @quantity
    def selection(self) -> Float[np.ndarray, "tokens experts"] | None:
        is_scaled = self._prepared.router.rule.is_affine and self.scale is not None
        return self._scored if is_scaled else self._compared[0]

    @quantity
    def scores(self) -> Float[np.ndarray, "tokens experts"] | None:
        rule = self._prepared.router.rule
        return self.mapped if rule.is_linear else SCORES[rule.score](self.mapped)

    @quantity
    def fill_decides(self) -> Bool[np.ndarray, "tokens"] | None:
        groups = self._prepared.router.rule.groups
        return fill_decides(self.last_score, np.nan if groups is None else groups.fill)

    @quantity
    def last_score(self) -> Float[np.ndarray, "tokens"]:
        """What the last chosen expert was compared by."""
        return np.take_along_axis(self._compared[0], self.chosen[:, -1:], axis=1)[:, 0]

    @quantity
    def float_bound(self) -> Float64[np.ndarray, "tokens"] | None:
        norm, margin = self.input_norm, self.margin
        if norm is None or margin is None:
            return None
        return float_bound(self._prepared, norm, self._scored, self.chosen, margin, self.scale)

    # ------------------------------------------------------------------ scores and weights
    @quantity
    def mapped(self) -> Float[np.ndarray, "tokens experts"]:
        """What scores are taken of: logits behind the map, without the bias that only selects.

        An affine rule has added that bias to its logits.
        """
        return self._mapped_of(self._scored)

    def _mapped_of(
        self, logits: Float[np.ndarray, "tokens experts"]
    ) -> Float[np.ndarray, "tokens experts"]:
        router = self._prepared.router
        if router.rule.is_affine and router.selection_bias is not None:
            return logits - np.asarray(router.selection_bias, logits.dtype, like=logits)
        return mapped_logits(logits, router.rule.logit_map)

    @quantity
    def _statistics(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        score = self._prepared.router.rule.score
        return self.task.kernels["score_statistics"](self.mapped, score)

    @quantity
    def probability(self) -> Float[np.ndarray, "tokens experts"] | None:
        return self._statistics[0]

    @quantity
    def entropy(self) -> Float64[np.ndarray, "tokens"] | None:
        return self._statistics[1]

    @quantity
    def log_sum_exp(self) -> Float64[np.ndarray, "tokens"] | None:
        return self._statistics[2]

    @quantity
    def weights(self) -> Float64[np.ndarray, "tokens k"] | None:
        return self._of_choice

    @quantity
    def weight_sum(self) -> Float64[np.ndarray, "tokens"] | None:
        """1 but for what guards the division against a sum of 0, or what shared experts take."""
        return self._of_choice_alike.sum(axis=1) / self._prepared.router.rule.weights.scale

    @quantity
    def _of_choice(self) -> Float64[np.ndarray, "tokens k"]:
        """Weights of the chosen experts, though some logits be bounds alone."""
        return self._scaled(self._of_choice_alike, self.chosen)

    @quantity
    def _of_choice_alike(self) -> Float64[np.ndarray, "tokens k"]:
        """The same without the factors of experts."""
        return self._plain_weights(self.mapped, self.chosen)

    def _weights(
        self, mapped: Float[np.ndarray, "tokens experts"], chosen: Int32[np.ndarray, "tokens k"]
    ) -> Float64[np.ndarray, "tokens k"]:
        return self._scaled(self._plain_weights(mapped, chosen), chosen)

    def _scaled(
        self, weights: Float64[np.ndarray, "tokens k"], chosen: Int32[np.ndarray, "tokens k"]
    ) -> Float64[np.ndarray, "tokens k"]:
        """Weights times the factors of their experts."""
        scale = self._prepared.router.expert_scale
        return weights if scale is None else weights * np.asarray(scale, like=weights)[chosen]

    def _plain_weights(
        self, mapped: Float[np.ndarray, "tokens experts"], chosen: Int32[np.ndarray, "tokens k"]
    ) -> Float64[np.ndarray, "tokens k"]:
        """Weights without the factors of experts."""
        router = self._prepared.router
        if self._has_threshold:
            gate = np.take_along_axis(mapped, np.maximum(chosen, 0), axis=1).astype(np.float64)
            return np.where(chosen >= 0, router.rule.weights.scale * gate, 0.0)
        shared_sum = None
        if router.shared_rows is not None:
            shared = self._inputs.astype(np.float64) @ router.shared_rows.T.astype(np.float64)
            shared_sum = score_sum(shared, router.rule)
        return self.task.kernels["routing_weights"](mapped, chosen, router.rule, shared_sum)

    # -------------------------------------------------------------------------- boundaries
    @quantity
    def _boundary(self) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """Least and largest distance to the nearest boundary, and its pair where it is known."""
        prepared, kernels = self._prepared, self.task.kernels
        if self._has_threshold:
            distance = threshold_distance(self.mapped, prepared.row_lengths, 0.0)
            return distance, distance, None
        if prepared.curved is not None:
            lower, upper, pair = kernels["curved_distance"](
                self.logits, self.chosen, prepared.curved
            )
            # a bracket as narrow as the kernel makes it is a distance
            return lower, np.where(upper <= lower * POINT, lower, upper), pair
        lacks_scale = prepared.router.has_cosine_logits and self.scale is None
        if prepared.rows is None or lacks_scale:
            return None, None, None
        chosen, rows = self.chosen, prepared.rows
        margin = self.margin if self.scale is None else self._choice[1]
        if self.top_expert is not None:
            top = self.top_logits, self.top_expert
            return kernels["distance_bracket"](*top, chosen, margin, rows)
        distance, pair = kernels["boundary_distance"](self.logits, chosen, margin, rows)
        return distance, distance, pair

    @quantity
    def distance(self) -> Float64[np.ndarray, "tokens"] | None:
        return self._boundary[0]

    @quantity
    def distance_upper(self) -> Float64[np.ndarray, "tokens"] | None:
        return self._boundary[1]

    @quantity
    def pair(self) -> Int32[np.ndarray, "tokens 2"] | None:
        return self._boundary[2]

    @quantity
    def noise_scale(self) -> Float64[np.ndarray, "tokens"] | None:
        if self.input_norm is None or self.distance is None:
            return None
        return bf16_noise_scale(self.input_norm, self._prepared.router.hidden_size)

    @quantity
    def rounding_sigmas(self) -> Float64[np.ndarray, "tokens"] | None:
        return self.task.kernels["rounding_sigmas"](
            self._float32(), self.logits, self.chosen, self._prepared.spreads
        )

    @quantity
    def angle(self) -> Float64[np.ndarray, "tokens"] | None:
        prepared, kernels = self._prepared, self.task.kernels
        return angle_before_norm(prepared, self._float32(), self.logits, self.chosen, kernels)

    @quantity
    def direction(self) -> Float64[np.ndarray, "tokens hidden"] | None:
        return unit_rows(self._inputs)

    # ------------------------------------------------------------------------- other choices
    @quantity
    def flip(self) -> Flip | None:
        task, kernels = self.task, self.task.kernels
        if task.run_b is not None:
            theirs = task.run_b.read_chosen(self._prepared.router.name, self.token)
            return flip_to(theirs, self.chosen, self._of_choice)
        if task.checkpoint_b is not None and self.their_logits is not None:
            theirs = chosen_by(task.checkpoint_b, self.their_logits, kernels)
            return flip_to_ranked(theirs, self.chosen, self._of_choice)
        if task.variant is None:
            return None
        if task.reference is not None:
            logits, chosen, margin = emulated_choice(task.reference, self._inputs, kernels)
            # boundaries are those of the router as stored: the noise model knows no other reference
            weights = self._weights(self._mapped_of(logits), chosen)
            reference = ReferenceChoice(self._inputs, logits, chosen, margin, weights, None)
        else:
            pair = self.pair if self._prepared.router.rule.is_affine else None
            weights, margin = self._of_choice, self.margin
            assert margin is not None, "unavailable() asks for router inputs"
            reference = ReferenceChoice(
                self._inputs, self.logits, self.chosen, margin, weights, pair
            )
        return flip_of(task.variant, reference, kernels, self._enter(task.variant))

    def _enter(self, variant: Emulated) -> Entered:
        """What the variant before, if it has the same entry, left here."""
        if self._entered is None or not variant.has_entry_of(self._entered[0]):
            self._entered = variant, enter(variant, self._inputs, self.task.kernels)
        return self._entered[1]

    @quantity
    def noise(self) -> NoisyFlip | None:
        task = self.task
        if task.noise is None or self.input_norm is None:
            return None
        return noisy_flip(
            task.noise,
            self._prepared,
            self._inputs,
            self.logits,
            self.chosen,
            self.input_norm,
            self.token,
            task.options.seed,
        )

    # --------------------------------------------------------------------------------- parts
    @property
    def _has_threshold(self) -> bool:
        return self._prepared.router.rule.pick == "threshold"

    @property
    def _prepared(self) -> PreparedRouter:
        return self.task.prepared

    @property
    def _inputs(self) -> Float[np.ndarray, "tokens hidden"]:
        assert self.values is not None, "unavailable() asks for router inputs"
        return self.values

    def _float32(self) -> Float32[np.ndarray, "tokens hidden"]:
        """For kernels, which know no bfloat16."""
        return self._inputs.astype(np.float32, copy=False)


def _finite(
    record: RecordedQuantities, theirs: Float[np.ndarray, "tokens experts"] | None
) -> Bool[np.ndarray, "tokens"] | None:
    """Which tokens have finite logits; None where all have.

    One sum tells whether all are finite: nan and infinities survive it, and if finite numbers
    overflow it, the closer look finds nothing. A non-finite input makes every logit of its token
    non-finite, even through a weight of 0.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf
        total = record.logits.sum() + (0.0 if theirs is None else theirs.sum())
    if np.isfinite(total):
        return None
    finite = np.isfinite(record.logits).all(axis=1)
    if theirs is not None:
        finite &= np.isfinite(theirs).all(axis=1)
    return np.asarray(finite)


def _token_scale(
    task: Task, values: Float[np.ndarray, "tokens hidden"] | None
) -> Float64[np.ndarray, "tokens"] | None:
    """What ``W y + b`` is multiplied by; None for nothing, and for logits of a recording.

    The tokens begin on a tile border.
    """
    inner = task.prepared.router.projection
    if inner is None or inner.scale is None or values is None:
        return None
    columns = np.ascontiguousarray(inner.weight.T.astype(np.float64))
    with np.errstate(invalid="ignore", over="ignore"):  # non-finite tokens are counted apart
        projected = tile_logits(values, columns, inner.bias)
        return cosine_scale(np.sqrt((projected**2).sum(axis=1)), inner.scale)


def refuse_non_finite(router: str, source: str, non_finite: tuple[int, ...], seen: int) -> None:
    """Raises NonFiniteError naming the first token, unless there is none."""
    if non_finite:
        raise NonFiniteError(
            f"{source}: {len(non_finite)} of {seen} tokens read so far at router {router} are not "
            f"finite or overflow (first: token {non_finite[0]}).",
            "Record again in float32, or leave them out: --non-finite skip.",
        )


def angle_before_norm(
    prepared: PreparedRouter,
    values: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    kernels: Kernels,
) -> Float64[np.ndarray, "tokens"]:
    """Exact behind linear boundaries, a certified lower bound behind curved and grouped ones."""
    router = prepared.router
    assert router.gain is not None, "unavailable() asks for a norm"
    gain = router.gain.astype(np.float64)
    length = np.full(len(values), np.sqrt(router.hidden_size))
    if gain.all():  # else a coordinate is lost, and the norm of the input stands for all of them
        length = _lengths(values, gain)
    if not router.rule.is_affine:
        curved = prepared.curved_before_norm
        lower, _, _ = kernels["curved_distance"](logits, chosen, curved, on_rays=False)
        return angle_bound(lower, length)
    assert prepared.cones is not None, "there is a gain"
    return kernels["boundary_angle"](logits, chosen, prepared.cones, length)


def _lengths(
    values: Float[np.ndarray, "tokens hidden"], gain: Float64[np.ndarray, "hidden"]
) -> Float64[np.ndarray, "tokens"]:
    """Euclidean length of each row over the gain."""
    length = np.empty(len(values))
    for start in range(0, len(values), ROWS_IN_CACHE):
        there = slice(start, start + ROWS_IN_CACHE)
        length[there] = np.sqrt(((values[there] / gain) ** 2).sum(axis=1))
    return length
