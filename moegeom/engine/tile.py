"""From a range of recorded tokens to quantities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int32, Int64

from moegeom.core.errors import NonFiniteError
from moegeom.core.input_noise import InputNoise
from moegeom.core.tokens import TILE
from moegeom.engine.choice import chosen_by, compared_scores, logits_of
from moegeom.engine.float_bound import float_bound
from moegeom.engine.labels import block_of, is_outlier
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.engine.prepared import PreparedRouter, unavailable
from moegeom.engine.products import tile_logits
from moegeom.engine.recorded import (
    RecordedLogits,
    recorded_choice,
    recorded_ids,
    recorded_logits,
    recorded_outputs,
)
from moegeom.engine.routed import Routed
from moegeom.engine.switching import (
    Reference,
    emulated_choice,
    switch_of,
    switch_to,
    switch_to_ranked,
)
from moegeom.engine.task import Task
from moegeom.geometry.arithmetic.rounding import bf16_noise_scale
from moegeom.geometry.boundary.linear import RowDistances
from moegeom.geometry.boundary.order_distance import order_distance
from moegeom.geometry.noise.noise_switch import simulate_switch, switch_bounds
from moegeom.geometry.noise.wall_sigmas import wall_sigmas
from moegeom.geometry.paths.exit_time import cell_quantiles
from moegeom.geometry.rows.norm import unit_rows
from moegeom.geometry.rows.pre_norm import angle_bound, boundary_angle
from moegeom.geometry.rows.projected_rows import cosine_scale
from moegeom.geometry.selection.logit_map import mapped_logits
from moegeom.geometry.selection.mask import fill_decides
from moegeom.geometry.selection.score import SCORES
from moegeom.kernels.quantities import ORDERS, OrderDistances, Quantities
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.switch import NoisySwitch, Switch


@dataclass(frozen=True, eq=False)
class Measured:
    """Quantities of the finite tokens of a range, and the non-finite ones by number."""

    quantities: Quantities
    non_finite: tuple[int, ...]


def measure(task: Task, start: int, stop: int, routed: Routed | None = None) -> Measured:
    """Quantities of tokens ``[start, stop)``; ``start`` is a multiple of the tile.

    What is ``routed`` is not computed again.
    """
    facts = task.source.facts
    columns = task.source.read_columns(start, stop) if routed is None else routed.columns
    labels = {
        "token": np.arange(start, stop, dtype=np.int64),
        "population": task.populations.label(columns),
        "block": block_of(columns, start),
        "document": columns.document,
        "position": columns.position,
        "token_id": columns.token_id,
    }
    kept = columns.is_behind(task.exclude_first)
    if task.other is not None:
        kept &= task.other.is_matched(start, stop)
    if facts.stage == "ids":
        labels["chosen"] = recorded_ids(task, start, stop)
        if "weights" in task.wanted and "routing_weights" in facts.outputs:
            name = task.prepared.router.name
            labels["weights"] = task.source.read_output(name, "routing_weights", start, stop)
        return Measured(Quantities(**_rows(labels, kept)), ())
    if routed is None:
        found, choice = recorded_logits(task, start, stop), {}
    else:
        found = RecordedLogits(routed.logits, routed.norm, routed.values)
        names = ("chosen", "margin", "group_margin", "distance", "pair")
        choice = {name: getattr(routed, name) for name in names}
    theirs = None if task.against is None else logits_of(task.against, found.values)
    # One sum tells whether all are finite: nan and infinities survive it, and if finite numbers
    # overflow it, the closer look finds nothing. A non-finite input makes every logit of its token
    # non-finite, even through a weight of 0.
    lost: tuple[int, ...] = ()
    finite = None if routed is None else ~routed.is_lost
    if routed is None:
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf
            total = found.logits.sum() + (0.0 if theirs is None else theirs.sum())
        if not np.isfinite(total):
            finite = np.isfinite(found.logits).all(axis=1)
            if theirs is not None:
                finite &= np.isfinite(theirs).all(axis=1)
    if finite is not None:
        lost = tuple((np.flatnonzero(~finite & kept) + start).tolist())
        kept &= finite
    arrays = {
        **labels,
        "logits": found.logits,
        "their_logits": theirs,
        "norm": found.norm,
        "values": found.values,
        "scale": _token_scale(task, found.values),
        "top_logits": found.top_logits,
        "top_expert": found.top_expert,
        "recorded": recorded_choice(task, start, stop),
        **recorded_outputs(task, start, stop),
        **choice,
    }
    quantities = _quantities(task, _Arrays(**_rows(arrays, kept)))
    return Measured(quantities, lost)


@dataclass(frozen=True, eq=False)
class _Arrays:
    """What was read about some finite tokens, row by row.

    ``logits`` are ``W y + b``, whose order is the choice and whose differences are distances;
    ``scale``, where there is one, takes them to the logits that scores are made of.
    ``their_logits`` are those of the router of a second checkpoint. ``chosen`` and what follows it
    are known where a device has routed the tokens.
    """

    token: np.ndarray
    population: np.ndarray
    block: np.ndarray
    document: np.ndarray
    position: np.ndarray
    token_id: np.ndarray
    logits: Float[np.ndarray, "tokens experts"]
    norm: Float64[np.ndarray, "tokens"] | None
    values: Float[np.ndarray, "tokens hidden"] | None
    recorded: Int32[np.ndarray, "tokens k"] | None
    top_logits: Float[np.ndarray, "tokens m"] | None = None
    top_expert: Int32[np.ndarray, "tokens m"] | None = None
    shared_output: np.ndarray | None = None
    routed_output: np.ndarray | None = None
    expert_output: np.ndarray | None = None
    scale: Float64[np.ndarray, "tokens"] | None = None
    their_logits: Float[np.ndarray, "tokens experts"] | None = None
    chosen: Int32[np.ndarray, "tokens k"] | None = None
    margin: Float64[np.ndarray, "tokens"] | None = None
    group_margin: Float64[np.ndarray, "tokens"] | None = None
    distance: Float64[np.ndarray, "tokens"] | None = None
    pair: Int32[np.ndarray, "tokens 2"] | None = None

    @property
    def scored_logits(self) -> Float[np.ndarray, "tokens experts"]:
        """The logits that scores are made of."""
        return self.logits if self.scale is None else self.logits * self.scale[:, None]


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


def _rows(arrays: Mapping[str, Any], kept: Bool[np.ndarray, "tokens"]) -> dict[str, Any]:
    """The kept rows of each array; the arrays themselves when all rows are kept."""
    if kept.all():
        return dict(arrays)
    row = np.flatnonzero(kept)
    return {
        name: None if array is None else np.ascontiguousarray(array[row])
        for name, array in arrays.items()
    }


def _quantities(task: Task, read: _Arrays) -> Quantities:
    prepared, rule, kernels = task.prepared, task.prepared.router.rule, task.kernels
    scored, norm = read.scored_logits, read.norm
    wanted = task.wanted.difference(unavailable(prepared.router, task.source.facts))
    compared, group_margin = None, read.group_margin
    if read.chosen is None or not _COMPARED.isdisjoint(wanted):
        compared, group_margin = compared_scores(prepared, read.logits, scored, kernels)
    if read.chosen is None or read.margin is None:
        chosen, margin = kernels["top_k"](compared, rule.top_k)
        distance, distance_upper, pair = _boundary(task, read, chosen, margin)
    else:
        chosen, margin = read.chosen, read.margin
        distance = distance_upper = read.distance
        pair = read.pair
    if rule.is_affine and read.scale is not None:
        compared, margin = scored, margin * read.scale
    population = read.population
    if norm is not None and task.typical_norm is not None:
        outlier = is_outlier(norm, task.typical_norm)
        population = np.where(outlier, task.populations.outliers, population).astype(np.int32)
    costly: dict[str, Any] = {
        name: compute(task, read, chosen) for name, compute in _ON_DEMAND.items() if name in wanted
    }
    if not _SCORES.isdisjoint(wanted):
        probability, entropy, log_sum_exp = kernels["score_statistics"](
            _scored(task, scored), rule.score
        )
        costly |= {"probability": probability, "entropy": entropy, "log_sum_exp": log_sum_exp}
    if "selection" in wanted:
        costly["selection"] = compared
    if "fill_decides" in wanted:
        assert compared is not None
        last = np.take_along_axis(compared, chosen[:, -1:], axis=1)[:, 0]
        fill = np.nan if rule.groups is None else rule.groups.fill  # nothing is filled: never
        costly["fill_decides"] = fill_decides(last, fill)
    return Quantities(
        token=read.token,
        population=population,
        block=read.block,
        document=read.document,
        position=read.position,
        token_id=read.token_id,
        chosen=chosen,
        margin=margin,
        group_margin=group_margin,
        distance=distance,
        distance_upper=distance_upper,
        pair=pair,
        input_norm=norm,
        float_bound=None
        if norm is None
        else float_bound(task.prepared, norm, scored, chosen, margin, read.scale),
        noise_scale=None
        if norm is None or distance is None or not rule.is_affine
        else bf16_noise_scale(norm, prepared.router.hidden_size),
        matches_recording=None
        if read.recorded is None
        else kernels["same_set"](chosen, read.recorded),
        shared_output=read.shared_output,
        routed_output=read.routed_output,
        expert_output=read.expert_output,
        switch=_switch(task, read, chosen, margin, pair) if "switch" in wanted else None,
        noise=_noise(task, read, chosen) if "noise" in wanted else None,
        order_distance=_order_distance(task, read) if "order_distance" in wanted else None,
        **costly,
    )


def _switch(
    task: Task,
    read: _Arrays,
    chosen: Int32[np.ndarray, "tokens k"],
    margin: Float64[np.ndarray, "tokens"],
    pair: Int32[np.ndarray, "tokens 2"] | None,
) -> Switch | None:
    if task.other is not None:
        router = task.prepared.router.name
        theirs = task.other.read_chosen(router, read.token)
        return switch_to(theirs, chosen, _weights(task, read, chosen))
    if task.against is not None and read.their_logits is not None:
        theirs = chosen_by(task.against, read.their_logits, task.kernels)
        return switch_to_ranked(theirs, chosen, _weights(task, read, chosen))
    if task.variant is None:
        return None
    values = _inputs(read)
    if not task.prepared.router.rule.is_affine:
        pair = None
    if task.reference is None:
        weights = _weights(task, read, chosen)
        reference = Reference(values, read.logits, chosen, margin, weights, pair)
    else:
        logits, chosen, margin = emulated_choice(task.reference, values, task.kernels)
        # walls are those of the router as stored: the noise model does not know another reference
        weights = _weights(task, dataclasses.replace(read, logits=logits), chosen)
        reference = Reference(values, logits, chosen, margin, weights, None)
    return switch_of(task.variant, reference, task.kernels)


def _noise(task: Task, read: _Arrays, chosen: np.ndarray) -> NoisySwitch | None:
    if task.noise is None or read.norm is None:
        return None
    values, token = _inputs(read), read.token
    return noisy_switch(
        task.noise, task.prepared, values, read.logits, chosen, read.norm, token, task.seed
    )


def _order_distance(task: Task, read: _Arrays) -> OrderDistances:
    num_tokens = task.source.facts.num_tokens
    return order_distances(task.prepared, read.logits, read.token, num_tokens, task.seed)


def _boundary(
    task: Task,
    read: _Arrays,
    chosen: Int32[np.ndarray, "tokens k"],
    margin: Float64[np.ndarray, "tokens"],
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Least and largest distance to the boundary, and the nearest wall where it is known."""
    rows, kernels = task.prepared.rows, task.kernels
    lacks_scale = task.prepared.router.has_cosine_logits and read.scale is None
    if task.prepared.curved is not None and "distance" in task.wanted:
        lower, upper, pair = kernels["curved_distance"](read.logits, chosen, task.prepared.curved)
        # a bracket as narrow as the kernel makes it is a distance
        return lower, np.where(upper <= lower * _POINT, lower, upper), pair
    if rows is None or "distance" not in task.wanted or lacks_scale:
        return None, None, None
    if read.top_expert is not None:
        return kernels["distance_bracket"](read.top_logits, read.top_expert, chosen, margin, rows)
    distance, pair = kernels["boundary_distance"](
        read.logits, chosen, margin, rows, "pair" in task.wanted
    )
    return distance, distance, pair


def _scored(task: Task, logits: Float[np.ndarray, "tokens experts"]) -> np.ndarray:
    """What scores are taken of: logits behind the map, without the bias that only selects.

    An affine rule has added that bias to its logits.
    """
    router = task.prepared.router
    if router.rule.is_affine and router.selection_bias is not None:
        return logits - router.selection_bias.astype(logits.dtype)
    return mapped_logits(logits, router.rule.logit_map)


def _weights(task: Task, read: _Arrays, chosen: np.ndarray) -> Float64[np.ndarray, "tokens k"]:
    router = task.prepared.router
    shared_sum = None
    if router.shared_rows is not None:
        shared = _inputs(read).astype(np.float64) @ router.shared_rows.T.astype(np.float64)
        scores = SCORES[router.rule.score](mapped_logits(shared, router.rule.logit_map))
        shared_sum = scores.sum(axis=1)
    logits = _scored(task, read.scored_logits)
    found = task.kernels["routing_weights"](logits, chosen, router.rule, shared_sum)
    return found if router.expert_scale is None else found * router.expert_scale[chosen]


def _direction(
    task: Task, read: _Arrays, chosen: np.ndarray
) -> Float64[np.ndarray, "tokens hidden"]:
    return unit_rows(_inputs(read))


def _angle(task: Task, read: _Arrays, chosen: np.ndarray) -> Float64[np.ndarray, "tokens"]:
    values = _float32_inputs(read)
    return angle_before_norm(task.prepared, values, read.logits, chosen, task.kernels)


def _rounding_sigmas(
    task: Task, read: _Arrays, chosen: np.ndarray
) -> Float64[np.ndarray, "tokens"]:
    weight = task.prepared.router.weight
    return task.kernels["rounding_sigmas"](_float32_inputs(read), read.logits, chosen, weight)


def _inputs(read: _Arrays) -> Float[np.ndarray, "tokens hidden"]:
    assert read.values is not None, "unavailable() asks for router inputs"
    return read.values


def _float32_inputs(read: _Arrays) -> Float32[np.ndarray, "tokens hidden"]:
    """For kernels, which know no bfloat16; an engine of devices hands on what is stored."""
    return _inputs(read).astype(np.float32, copy=False)


#: Upper over lower bound of a distance that is known as well as floats know it: the bracket of a
#: curved wall is closed to 1e-6.
_POINT = 1.0 + 2e-6

#: Quantities that are computed only when somebody asks for them.
_ON_DEMAND: Mapping[str, Callable[[Task, _Arrays, np.ndarray], np.ndarray]] = {
    "weights": _weights,
    "direction": _direction,
    "angle": _angle,
    "rounding_sigmas": _rounding_sigmas,
    "input": lambda task, read, chosen: _inputs(read),
}

#: Those that are made of what is compared.
_COMPARED = frozenset({"selection", "fill_decides"})

#: Those that one kernel gives together.
_SCORES = frozenset({"probability", "entropy", "log_sum_exp"})


def refuse_non_finite(router: str, source: str, non_finite: tuple[int, ...], seen: int) -> None:
    """Raises NonFiniteError naming the first token, unless there is none."""
    if non_finite:
        raise NonFiniteError(
            f"{source}: {len(non_finite)} of {seen} tokens read so far at router {router} are not "
            f"finite or overflow (first: token {non_finite[0]}).",
            "Record again in float32, or leave them out with --non-finite skip.",
        )


def angle_before_norm(
    prepared: PreparedRouter,
    values: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    kernels: Kernels,
) -> Float64[np.ndarray, "tokens"]:
    """Exact behind straight walls, a certified lower bound behind curved and grouped ones."""
    router = prepared.router
    assert router.gain is not None, "unavailable() asks for a norm"
    gain = router.gain.astype(np.float64)
    length = np.full(len(values), np.sqrt(router.hidden_size))
    if gain.all():  # else a coordinate is lost, and the norm of the input stands for all of them
        length = np.sqrt(((values / gain) ** 2).sum(axis=1))
    if not router.rule.is_affine:
        lower, _, _ = kernels["curved_distance"](logits, chosen, prepared.curved_before_norm)
        return angle_bound(lower, length)
    bias = np.zeros(router.num_experts) if router.affine_bias is None else router.affine_bias
    rows = router.weight.astype(np.float64) * gain
    return boundary_angle(logits, chosen, rows, bias.astype(np.float64), length)


#: Tokens that are looked at, times experts: a search takes about as long as there are experts, so
#: that every router takes a second or two.
_TOKENS_TIMES_EXPERTS = 4096
_LEAST_TOKENS, _MOST_TOKENS = 8, 64

#: Steps of one search; nearly all end by themselves after two for each expert.
_MOST_NODES = 1000


def order_distances(
    prepared: PreparedRouter,
    logits: Float[np.ndarray, "tokens experts"],
    token: Int64[np.ndarray, "tokens"],
    num_tokens: int,
    seed: int,
) -> OrderDistances:
    """Brackets for some tokens of a stream of ``num_tokens``, drawn from seed and tile alone.

    The router is affine and was prepared with coordinates.
    """
    rows, k = prepared.coordinates, prepared.router.rule.top_k
    assert rows is not None, "prepared with coordinates where these distances are wanted"
    looked_at = _rows_looked_at(token, tokens_of_tile(logits.shape[1], num_tokens), seed)
    found = [
        [order_distance(of_token, rows, k, order, _MOST_NODES) for order in ORDERS]
        for of_token in logits[looked_at].astype(np.float64)
    ]
    shape = (len(looked_at), len(ORDERS))
    return OrderDistances(
        looked_at,
        np.array([[bracket.lower for bracket in of_token] for of_token in found]).reshape(shape),
        np.array([[bracket.upper for bracket in of_token] for of_token in found]).reshape(shape),
    )


def tokens_of_tile(num_experts: int, num_tokens: int) -> int:
    """How many tokens of each tile are looked at; a stream has the same number in all at most."""
    wanted = min(max(_TOKENS_TIMES_EXPERTS // num_experts, _LEAST_TOKENS), _MOST_TOKENS)
    tiles = min(-(-num_tokens // TILE), SMALL_SAMPLE_TOKENS // TILE)
    return -(-wanted // tiles)


def _rows_looked_at(
    token: Int64[np.ndarray, "tokens"], of_tile: int, seed: int
) -> Int64[np.ndarray, "looked_at"]:
    """Rows of ``of_tile`` tokens of each tile, or of all that it holds; ascending."""
    rows = [np.empty(0, np.int64)]
    for tile in np.unique(token // TILE):
        held = np.flatnonzero(token // TILE == tile)
        generator = np.random.Generator(np.random.PCG64([seed, int(tile)]))
        drawn = generator.choice(len(held), min(of_tile, len(held)), replace=False)
        rows.append(held[np.sort(drawn)])
    return np.concatenate(rows)


#: Tokens of each tile that are simulated, and how often.
LOOKED_AT, DRAWS = 256, 8

#: Exit times are those of half of the paths.
_HALF = 0.5


def noisy_switch(
    noise: InputNoise,
    prepared: PreparedRouter,
    values: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    norm: Float64[np.ndarray, "tokens"],
    token: Int64[np.ndarray, "tokens"],
    seed: int,
) -> NoisySwitch:
    """What the noise does to some tokens; random numbers depend on seed, router and tile alone."""
    router = prepared.router
    scale = np.full(len(norm), noise.scale)
    if noise.is_relative:
        scale = noise.scale * norm / np.sqrt(router.hidden_size)
    rows, switched = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for tile in np.unique(token // TILE):
        first = np.flatnonzero(token // TILE == tile)[:LOOKED_AT]
        generator = np.random.Generator(
            np.random.PCG64([seed, router.layer, *router.name.encode(), int(tile)])
        )
        found = simulate_switch(
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
        switched.append(found.switched)
    row = np.concatenate(rows)
    if prepared.rows is None:
        return NoisySwitch(None, None, None, row, np.concatenate(switched), DRAWS)
    bounds = switch_bounds(logits, chosen, prepared.rows, scale)
    early, late = _exit_times(logits[row], chosen[row], prepared.rows, scale[row])
    return NoisySwitch(
        bounds.lower,
        bounds.estimate,
        bounds.upper,
        row,
        np.concatenate(switched),
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
    sigmas = wall_sigmas(logits[moving], chosen[moving], rows) / scale[moving, None]
    early[moving], late[moving] = cell_quantiles(sigmas, _HALF)
    return early, late
