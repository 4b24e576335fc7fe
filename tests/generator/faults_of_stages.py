"""Faults behind loading: what is read, kept between steps, decided, dispatched and written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from moegeom.studies.explain.record import Cause
from tests.generator import kinds
from tests.generator.engine import Handover, Reading, Trace, unit
from tests.generator.model import Choice, rounded, to_fp8


# ------------------------------------------------------------------------------------------- inputs
def _before(distance: int, reading: Reading) -> np.ndarray:
    """The inputs of the tokens ``distance`` earlier; the first tokens keep their own."""
    start, step = reading.start, reading.inputs.shape[1]
    at = np.arange(start, start + step)
    return reading.history[:, np.where(at >= distance, at - distance, at)]


def _normalised_twice(without_gain: int, reading: Reading) -> np.ndarray:
    return unit(reading.inputs) * (1.0 if without_gain else reading.gain)


def _fp8(draw: kinds.Draw) -> kinds.Made:
    name = draw.choice("e4m3", "e5m2")
    scales = draw.choice(None, "row", "tensor")

    def change(reading: Reading) -> np.ndarray:
        flat = reading.inputs.reshape(-1, reading.inputs.shape[-1])
        return to_fp8(flat, name, scales).reshape(reading.inputs.shape)

    return change


def _noise(draw: kinds.Draw) -> kinds.Made:
    size = float(draw.choice(0.01, 0.03, 0.1))

    def change(reading: Reading) -> np.ndarray:
        x = reading.inputs
        rng = draw.rng_at(reading.layer, reading.start, int(reading.documents[0]))
        rms = np.sqrt((x**2).mean(axis=-1, keepdims=True))
        return (x + size * rms * rng.standard_normal(x.shape)).astype(np.float32)

    return change


# -------------------------------------------------------------------------------------------- cache
def _cache(
    scopes: Sequence[str],
    change: Callable[[Handover], np.ndarray],
    *named: Cause,
    starts: str = "steps",
) -> kinds.Kind:
    return kinds.kind("cache", scopes, lambda draw: change, *named, starts=starts)


def _token_twice(handover: Handover) -> np.ndarray:
    """The chunk begins with the token with which the one before ended."""
    kept = handover.decay
    return kept * handover.state + (1.0 - kept) * handover.last


# --------------------------------------------------------------------------------------------- rule
def of_rule(**values: object) -> kinds.Made:
    return lambda rule: replace(rule, **values)


def _other_score(draw: kinds.Draw) -> kinds.Made:
    other = {"softmax": "sigmoid", "sigmoid": "softmax"}
    return of_rule(score=other[draw.model.rule.score])


def _softmax_moved(draw: kinds.Draw) -> kinds.Made:
    if draw.model.rule.softmax_over_chosen:
        return of_rule(score="softmax", softmax_over_chosen=False)
    return of_rule(softmax_over_chosen=True)


def _group_count(draw: kinds.Draw) -> kinds.Made:
    """Another number of groups, or of those that are kept, with room for the chosen ones."""
    rule, experts = draw.model.rule, draw.model.shape.experts
    pairs = [
        (groups, kept)
        for groups in (rule.num_groups // 2, rule.num_groups, rule.num_groups * 2)
        for kept in range(1, groups)
        if (groups, kept) != (rule.num_groups, rule.num_kept)
        and kept * (experts // groups) > rule.top_k
        and experts // groups >= 2
    ]
    groups, kept = draw.choice(*pairs) if pairs else (rule.num_groups * 2, rule.num_kept + 1)
    return of_rule(num_groups=groups, num_kept=kept)


def _more(draw: kinds.Draw) -> kinds.Made:
    by_index = bool(draw.rng.integers(2))
    return of_rule(num_run=draw.model.rule.top_k + 1, written_by_index=by_index)


def _scale(draw: kinds.Draw) -> kinds.Made:
    scale = draw.model.rule.scale
    return of_rule(scale=draw.choice(1.0, scale * scale, scale * 0.8) if scale != 1.0 else 2.5)


# ----------------------------------------------------------------------------------------- dispatch
def overflow(chosen: np.ndarray, experts: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Which slots find their expert full, first come first served, and how full experts are."""
    flat = chosen.ravel()
    order = np.argsort(flat, kind="stable")
    load = np.bincount(flat, minlength=experts)
    starts = np.concatenate([[0], np.cumsum(load)[:-1]])
    place = np.empty_like(flat)
    place[order] = np.arange(len(flat)) - starts[flat[order]]
    return (place >= capacity).reshape(chosen.shape), np.minimum(load, capacity)


def capacity_of(chosen: np.ndarray, experts: int, factor: float) -> int:
    return max(1, int(np.ceil(factor * chosen.size / experts)))


def _dropped(draw: kinds.Draw) -> kinds.Made:
    factor = float(draw.choice(1.0, 1.25, 1.5))

    def change(logits: np.ndarray, choice: Choice) -> Choice:
        experts = logits.shape[1]
        capacity = capacity_of(choice.chosen, experts, factor)
        full, _ = overflow(choice.chosen, experts, capacity)
        weights = np.where(full, np.float32(0.0), choice.weights)
        return Choice(choice.chosen, weights, choice.selection)

    return change


def _rerouted(draw: kinds.Draw) -> kinds.Made:
    """What finds its expert full goes to the best one that has room and is not chosen yet."""
    factor = float(draw.choice(1.0, 1.25, 1.5))

    def change(logits: np.ndarray, choice: Choice) -> Choice:
        experts = logits.shape[1]
        capacity = capacity_of(choice.chosen, experts, factor)
        full, load = overflow(choice.chosen, experts, capacity)
        chosen = choice.chosen.copy()
        for token, slot in np.argwhere(full):
            open_ones = load < capacity
            open_ones[chosen[token]] = False
            if open_ones.any():
                score = np.where(open_ones, choice.selection[token], -np.inf)
                score = score if np.isfinite(score).any() else np.where(open_ones, 0.0, -np.inf)
                chosen[token, slot] = np.argmax(score)
                load[chosen[token, slot]] += 1
        return Choice(chosen, choice.weights, choice.selection)

    return change


# ------------------------------------------------------------------------------------------- writer
def of_ids(change: Callable[[np.ndarray], np.ndarray]) -> kinds.Made:
    def changed(trace: Trace) -> Trace:
        return replace(trace, chosen=change(trace.chosen).astype(np.int32))

    return changed


def _renamed(draw: kinds.Draw) -> kinds.Made:
    """The map from the places of experts to their numbers is not applied."""
    name = np.arange(draw.model.shape.experts)
    name[draw.experts] = draw.rng.permutation(draw.experts)
    return of_ids(lambda chosen: name[chosen])


def _offset(draw: kinds.Draw) -> kinds.Made:
    """Every rank adds the first expert of another rank to its local numbers."""
    experts = draw.model.shape.experts
    ranks = int(draw.choice(2, 4))
    shift = int(draw.rng.integers(1, ranks)) * (experts // ranks)
    return of_ids(lambda chosen: (chosen + shift) % experts)


def _replicas(draw: kinds.Draw) -> kinds.Made:
    """Every second token finds the replicas of a few experts, whose numbers come after all."""
    experts = draw.model.shape.experts
    some = draw.rng.permutation(experts)[: max(2, experts // 8)]

    def change(chosen: np.ndarray) -> np.ndarray:
        name = np.arange(experts)
        name[some] = experts + np.arange(len(some))
        odd = (np.arange(chosen.shape[2]) % 2 == 1)[:, None]
        return np.where(odd, name[chosen], chosen)

    return of_ids(change)


def _padding(draw: kinds.Draw) -> kinds.Made:
    """Documents of a batch are padded behind, and the writer cuts what stands in front."""

    def change(trace: Trace) -> Trace:
        chosen, weights = trace.chosen.copy(), trace.weights.copy()
        for batch in trace.batches:
            longest = int(trace.text.lengths[batch].max())
            for document in batch:
                there = int(trace.text.lengths[document])
                kept = slice(longest - there, longest)
                chosen[:, document, :there] = trace.chosen[:, document, kept]
                weights[:, document, :there] = trace.weights[:, document, kept]
        return replace(trace, chosen=chosen, weights=weights)

    return change


def _rows(
    index: Callable[[int, np.ndarray], np.ndarray], *options: int
) -> Callable[[kinds.Draw], kinds.Made]:
    def change(one: int, trace: Trace) -> Trace:
        at = index(one, np.arange(trace.chosen.shape[2]))
        return replace(trace, chosen=trace.chosen[:, :, at], weights=trace.weights[:, :, at])

    return kinds.with_one(change, *options)


def _layers_shifted(draw: kinds.Draw) -> kinds.Made:
    def change(trace: Trace) -> Trace:
        order = np.roll(np.arange(len(trace.chosen)), 1)
        return replace(trace, chosen=trace.chosen[order], weights=trace.weights[order])

    return change


READ = ("all", *kinds.LAYERS, *kinds.TOKENS)
_SERVED = ("all", *kinds.LAYERS, "documents", "positions_from")
BATCHES = ("all", *kinds.LAYERS)
WRITTEN = ("all", *kinds.LAYERS, *kinds.POSITIONS, "documents", "ranks")

_input = partial(kinds.kind, "input", READ)
_rule = partial(kinds.kind, "rule", READ)
_rule_of_groups = partial(_rule, families=kinds.WITH_GROUPS)
_dispatch = partial(kinds.kind, "dispatch", BATCHES)
_write = partial(kinds.kind, "write", visible_in="ids_only")

KINDS: Mapping[str, kinds.Kind] = {
    "input_of_another_token": _input(
        kinds.with_one(_before, 1, 2, 4), "tokens shifted", "inputs differ", "not the router"
    ),
    # the buffer still holds the step before: a chunk of the prefill, or the last token
    "input_stale": _input(
        lambda draw: lambda reading: _before(reading.inputs.shape[1], reading),
        *("tokens shifted", "inputs differ", "not the router"),
    ),
    "input_of_another_layer": _input(
        lambda draw: lambda reading: reading.below[-1], "inputs differ", "not the router", lowest=1
    ),
    "input_normalised_twice": _input(
        kinds.with_one(_normalised_twice, 1, 0),
        "inputs differ",
        "gain not folded",
        "not the router",
    ),
    "input_bf16": _input(
        lambda draw: lambda reading: rounded(reading.inputs),
        *("inputs rounded", "logits rounded", "not the router"),
        is_exact=True,
    ),
    "input_fp8": _input(_fp8, "inputs rounded", "not the router"),
    "input_noise": _input(_noise, "arithmetic noise only", "not the router"),
    "cache_left_over": _cache(
        ("all", *kinds.LAYERS, "documents"),
        lambda handover: handover.left,
        "not the router",
        starts="requests",
    ),
    "cache_lost": _cache(_SERVED, lambda handover: np.zeros_like(handover.state), "not the router"),
    "cache_token_twice": _cache(_SERVED, _token_twice, "not the router"),
    "cache_token_skipped": _cache(_SERVED, lambda handover: handover.before_last, "not the router"),
    "cache_of_another_request": _cache(
        _SERVED, lambda handover: np.roll(handover.state, 1, axis=0), "not the router"
    ),
    "cache_fp8": _cache(
        _SERVED,
        lambda handover: to_fp8(handover.state, "e4m3", "row"),
        *("not the router", "arithmetic noise only"),
    ),
    "other_score": _rule(
        _other_score,
        *("rule differs", "routing weights differ"),
        families=("olmoe", "qwen3_moe", *kinds.WITH_SELECTION_BIAS),
    ),
    "softmax_moved": _rule(
        _softmax_moved, "rule differs", "routing weights differ", families=("olmoe", "gpt_oss")
    ),
    "group_score": _rule_of_groups(lambda draw: of_rule(group_score="max"), "rule differs"),
    "group_count": _rule_of_groups(_group_count, "rule differs"),
    "groups_ignored": _rule_of_groups(
        lambda draw: of_rule(num_groups=1, num_kept=1), "rule differs"
    ),
    "group_fill": _rule_of_groups(lambda draw: of_rule(fill=0.0), "rule differs", bias_level=-0.6),
    "top_k_more": _rule(_more, "rule differs", "routing weights differ"),
    "top_k_fewer": _rule(
        lambda draw: of_rule(num_run=draw.model.rule.top_k - 1),
        *("rule differs", "routing weights differ"),
    ),
    "bias_in_weights": _rule(
        lambda draw: of_rule(bias_in_weights=True),
        "bias in routing weights",
        families=kinds.WITH_SELECTION_BIAS,
    ),
    "bias_not_in_selection": _rule(
        lambda draw: of_rule(bias_selects=False), "bias missing", families=kinds.WITH_SELECTION_BIAS
    ),
    "renormalisation_flipped": _rule(
        lambda draw: of_rule(renormalise=not draw.model.rule.renormalise),
        "routing weights differ",
        families=("olmoe", "qwen3_moe", *kinds.WITH_SELECTION_BIAS),
    ),
    "other_scale": _rule(_scale, "routing weights differ"),
    "soft_cap": _rule(
        lambda draw: of_rule(soft_cap=float(draw.choice(2.0, 5.0, 15.0))),
        *("rule differs", "routing weights differ"),
    ),
    "ties_to_high_index": _rule(
        lambda draw: of_rule(ties_to_high_index=True),
        "ties broken by number",
        equal_rows=True,
        is_exact=True,
    ),
    "capacity_dropped": _dispatch(_dropped, "capacity"),
    "capacity_rerouted": _dispatch(_rerouted, "capacity"),
    "experts_renamed": _write((*WRITTEN, *kinds.EXPERTS), _renamed, "experts renamed"),
    "experts_offset": _write(WRITTEN, _offset, "experts renamed"),
    "replica_ids": _write(WRITTEN, _replicas, "experts renamed", may_be_refused=True),
    "ids_int8": _write(
        BATCHES,
        lambda draw: of_ids(lambda chosen: chosen & 0x7F),
        "experts renamed",
        bend="beyond_127",
        may_be_refused=True,
    ),
    "ids_uint8": _write(
        BATCHES,
        lambda draw: of_ids(lambda chosen: chosen & 0xFF),
        "experts renamed",
        bend="beyond_255",
        may_be_refused=True,
    ),
    "ids_sorted": _write(
        WRITTEN,
        lambda draw: of_ids(lambda chosen: np.sort(chosen, axis=-1)),
        *("no disagreement", "routing weights differ", "arithmetic noise only"),
        visible_in="weights",
    ),
    "padding_rows": _write(("all", "documents"), _padding, "padding counted", "tokens shifted"),
    "written_rows_shifted": _write(
        WRITTEN, _rows(lambda shift, at: np.maximum(at - shift, 0), 1, 2, 3), "tokens shifted"
    ),
    # a slot of the buffer is refreshed once in a while; until then it holds an old row
    "written_rows_stale": _write(
        WRITTEN, _rows(lambda every, at: at - at % every, 8, 16), "rows repeated"
    ),
    "written_layers_shifted": _write(BATCHES, _layers_shifted, "layers shifted"),
}
