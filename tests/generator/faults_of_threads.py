"""Faults that people have reported of engines and trainers: of loading, norms, caches, rules, kernels,
experts and traces. Each is built from a report, and not from what explain can name.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy.linalg import hadamard

from tests.generator import engine, kinds, model

_WHOLE = ("all", *kinds.LAYERS)
_IN_TIME = (*_WHOLE, "documents", "positions_from")
_UNGROUPED = tuple(name for name in model.FAMILIES if name not in kinds.WITH_GROUPS)
_BY_LOGITS = ("olmoe", "qwen3_moe", "gpt_oss")


# ---------------------------------------------------------------------------------- what is loaded
def _with(**parts: Callable[[int, np.ndarray], np.ndarray]) -> kinds.Made:
    """Router tensors of which some are others, by layer."""

    def change(layer: int, tensors: model.RouterTensors) -> model.RouterTensors:
        made = {name: by(layer, getattr(tensors, name)) for name, by in parts.items()}
        return replace(tensors, **{name: x.astype(np.float32) for name, x in made.items()})

    return change


def _gain_shifted(draw: kinds.Draw) -> kinds.Made:
    """The gain is converted in place between g and g - 1 each time that weights are sent, and shifts."""
    shift = draw.choice(-2.0, -1.0, 1.0, 2.0)
    return _with(gain=lambda layer, gain: gain + shift)


def _adapter_misscaled(draw: kinds.Draw) -> kinds.Made:
    """The low-rank update that the checkpoint has in its router is merged with another factor."""
    rank, root = draw.choice(1, 2, 4), draw.choice(2.0, 4.0, 8.0)
    share, factor = draw.choice(0.2, 0.4, 0.8), draw.choice(1.0 / root, root)

    def update(layer: int, weight: np.ndarray) -> np.ndarray:
        rng = draw.rng_at(layer)
        delta = rng.standard_normal((len(weight), rank)) @ rng.standard_normal(
            (rank, weight.shape[1])
        )
        size = share * np.linalg.norm(weight) / np.linalg.norm(delta) / max(1.0, factor)
        return weight + (factor - 1.0) * size * delta

    return _with(weight=update)


def _rotated_and_rounded(draw: kinds.Draw) -> kinds.Made:
    """Rows are turned by a Hadamard matrix, rounded to few bits, and turned back when they are used."""
    size, bits = draw.choice(8, 16, 32), draw.choice(3, 4)
    form = draw.choice(
        model.Integers(bits, "block", 2.0 ** (bits - 1) - 1.0),
        model.Integers(bits, "block", 2.0 ** (bits - 1) - 0.5),
        model.Integers(bits, "block", 0.0, is_signed=False),
    )

    def stored(layer: int, weight: np.ndarray) -> np.ndarray:
        turn = np.kron(np.eye(weight.shape[1] // size), hadamard(size) / np.sqrt(size))
        return model.to_integers(weight @ turn, form) @ turn.T

    return _with(weight=stored)


def _stage_from_zero(draw: kinds.Draw) -> kinds.Made:
    """The second stage of a pipeline counts its layers from zero and loads those of the first."""
    first = min(draw.reach.layers)
    return lambda layer, tensors: draw.model.routers[layer - first]


def _bias_counts_padding(draw: kinds.Draw) -> kinds.Made:
    """The balancing steps of the bias count padding too, and push the experts down that it chose."""
    amount = draw.choice(0.05, 0.1, 0.2, 0.4)
    number = draw.model.rule.top_k * draw.choice(1, 2)

    def stepped(layer: int, bias: np.ndarray) -> np.ndarray:
        step = np.full(len(bias), amount * number / (len(bias) - number))
        step[draw.rng_at(layer).permutation(len(bias))[:number]] = -amount
        return bias + step

    return _with(bias=stepped)


# ---------------------------------------------------------------------------- inputs and the cache
def _input_summed(draw: kinds.Draw) -> kinds.Made:
    """Inputs that every rank already has in full are added up over the ranks once more."""
    ranks = draw.choice(2.0, 4.0, 8.0)
    return lambda reading: (ranks * reading.inputs).astype(np.float32)


def _input_normed_before(draw: kinds.Draw) -> kinds.Made:
    """The router norms what the norm in front of the experts has normed and scaled already."""
    other, source = draw.another_layer(), draw.choice("own", "other", "new")

    def change(reading: engine.Reading) -> np.ndarray:
        gains = {
            "own": reading.gain,
            "other": draw.model.routers[other(reading.layer)].gain,
            "new": 0.6
            * np.exp(0.35 * draw.rng_at(reading.layer).standard_normal(len(reading.gain))),
        }
        return (engine.unit(reading.inputs) * gains[source]).astype(np.float32)

    return change


def _state_of_rejected(draw: kinds.Draw) -> kinds.Made:
    """While decoding, the state holds the guessed tokens that were rejected."""
    number, begin = draw.choice(1, 2, 3, 4), draw.ground.schedule.decode_from

    def change(handover: engine.Handover) -> np.ndarray:
        state = handover.state
        if handover.start < begin:
            return state
        for guess in range(1, number + 1):
            put = np.roll(handover.last, guess, axis=0)
            state = handover.decay * state + (1.0 - handover.decay) * put
        return state.astype(np.float32)

    return change


def _state_before_accepted(draw: kinds.Draw) -> kinds.Made:
    """While decoding, every few steps go on from the state before the token that was accepted last."""
    every, begin = draw.choice(1, 2, 3, 4), draw.ground.schedule.decode_from

    def change(handover: engine.Handover) -> np.ndarray:
        since = handover.start - begin
        is_old = since >= 0 and since % every == 0
        return handover.before_last if is_old else handover.state

    return change


# ------------------------------------------------------------------------------------------ the rule
def _replaced(**parts: Any) -> kinds.Made:
    return lambda rule: replace(rule, **parts)


def _experts_unseen(draw: kinds.Draw) -> kinds.Made:
    """The kernel has a thread for each of the first experts, and the others are no candidates."""
    experts = draw.model.shape.experts
    return _replaced(num_seen=draw.choice(experts // 2, experts * 3 // 4, experts - experts // 8))


def _others_sampled(draw: kinds.Draw) -> kinds.Made:
    """The first expert is the best, and the others are sampled, which is for training alone."""
    return _replaced(is_sampled=True, seed=draw.seed)


def _logits_noised(draw: kinds.Draw) -> kinds.Made:
    """Noise is added to the logits, which is for training alone."""
    return _replaced(noise=draw.choice(0.1, 0.3, 1.0), seed=draw.seed)


def _mask_of_another_token(draw: kinds.Draw) -> kinds.Made:
    """A token chooses among the groups that were made out for a token near it: a race of two writes."""
    return _replaced(mask_shift=draw.choice(-1, 1, 2, 4))


def _scores_as_shares(draw: kinds.Draw) -> kinds.Made:
    """Sigmoid scores are divided by their sum over all experts before the bias is added."""
    return _replaced(score="sigmoid_share")


def _sums_in_bf16(draw: kinds.Draw) -> kinds.Made:
    """The product that makes the logits adds up in bfloat16."""
    return _replaced(sums_of=draw.choice(1, 2, 4, 8))


# ------------------------------------------------------------------------------------- the dispatch
def _weights_by_expert(draw: kinds.Draw) -> kinds.Made:
    """A factor of each expert, which its down projection has already, is in its routing weight too."""
    level, experts = draw.choice(0.1, 0.3, 0.6), draw.model.shape.experts
    factors = np.exp(level * draw.rng_at(0).standard_normal(experts)).astype(np.float32)

    def change(logits: np.ndarray, choice: model.Choice) -> model.Choice:
        return replace(choice, weights=choice.weights * factors[choice.chosen])

    return change


def _rows_past_limit(draw: kinds.Draw) -> kinds.Made:
    """Rows of a step behind the largest number that the kernel can take have infinite scores."""
    limit = draw.choice(16, 32, 64)

    def change(logits: np.ndarray, choice: model.Choice) -> model.Choice:
        chosen, weights = choice.chosen.copy(), choice.weights.copy()
        width = chosen.shape[1]
        chosen[limit:] = np.arange(width)
        weights[limit:] = draw.model.rule.scale / width
        return model.Choice(chosen, weights, choice.selection)

    return change


# ------------------------------------------------------------------------------------- the experts
def _weighted(running: engine.Running, weights: np.ndarray) -> np.ndarray:
    """What the experts give with other weights; a weight of zero leaves an expert out."""
    choice = replace(running.choice, weights=weights.astype(np.float32))
    return running.run(running.layer, running.inputs, choice)


def _partials_uncombined(draw: kinds.Draw) -> kinds.Made:
    """A token leaves with what the experts of its own rank gave; those of other ranks are not added."""
    ranks = draw.choice(2, 4)
    size = draw.model.shape.experts // ranks

    def change(running: engine.Running) -> np.ndarray:
        own = (np.arange(len(running.inputs)) % ranks)[:, None]
        is_own = running.choice.chosen // size == own
        return _weighted(running, np.where(is_own, running.choice.weights, 0.0))

    return change


def _scale_squared(draw: kinds.Draw) -> kinds.Made:
    """The factor of the routed experts is applied by the router and once more to what they give."""
    scale = draw.model.rule.scale
    factor = draw.choice(scale, 1.0 / scale)
    return lambda running: _weighted(running, factor * running.choice.weights)


def _experts_of_first_rank(draw: kinds.Draw) -> kinds.Made:
    """Every rank holds the experts of rank zero: ids are right, and other experts run."""
    ranks, experts = draw.choice(2, 4), draw.model.shape.experts
    order = np.arange(experts) % (experts // ranks)

    def change(running: engine.Running) -> np.ndarray:
        layer = running.layer
        layer = replace(layer, up=layer.up[order], down=layer.down[order])
        return running.run(layer, running.inputs, running.choice)

    return change


def _shared_replaced(draw: kinds.Draw) -> kinds.Made:
    """The slot of the shared expert is filled with one more routed expert, and the shared one is lost."""
    rule = draw.model.rule

    def change(running: engine.Running) -> np.ndarray:
        choice = running.choice
        left = choice.selection.copy()
        np.put_along_axis(left, choice.chosen, -np.inf, axis=1)
        chosen = np.hstack([choice.chosen, left.argmax(axis=1)[:, None]])
        scores = 0.5 * (1.0 + np.tanh(0.5 * np.take_along_axis(running.logits, chosen, axis=1)))
        weights = (rule.scale * scores / scores.sum(axis=1, keepdims=True)).astype(np.float32)
        alone = replace(running.layer, shared_up=None, shared_down=None)
        return running.run(alone, running.inputs, replace(choice, chosen=chosen, weights=weights))

    return change


def _experts_unweighted(draw: kinds.Draw) -> kinds.Made:
    """What the chosen experts give is added up as it is: routing weights choose and do not weigh."""
    return lambda running: _weighted(running, np.ones_like(running.choice.weights))


def _experts_read_nothing(draw: kinds.Draw) -> kinds.Made:
    """A replayed graph has the experts read a buffer that has been zero since it was captured."""
    return lambda running: _weighted(running, np.zeros_like(running.choice.weights))


def _experts_give_late(draw: kinds.Draw) -> kinds.Made:
    """What experts on another device give is copied before it is there: another request's is taken."""
    shift = draw.choice(1, -1, 2)

    def change(running: engine.Running) -> np.ndarray:
        gives = running.run(running.layer, running.inputs, running.choice)
        by_slot = gives.reshape(running.slots, -1, gives.shape[1])
        return np.roll(by_slot, shift, axis=0).reshape(gives.shape)

    return change


# --------------------------------------------------------------------------------------- the writer
def _of(trace: engine.Trace, document: np.ndarray, position: np.ndarray) -> engine.Trace:
    """A trace in which every place has the row of another."""
    parts = (rows[:, document, position] for rows in (trace.chosen, trace.weights))
    return engine.Trace(*parts, trace.text, trace.batches)


def _own(trace: engine.Trace) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.indices(trace.text.token_id.shape))


def _rows_batch_first(draw: kinds.Draw) -> kinds.Made:
    """Rows of a few documents are laid out document by document and read position by position."""
    size = draw.choice(2, 3, 4)

    def change(trace: engine.Trace) -> engine.Trace:
        document, position = _own(trace)
        lengths = trace.text.lengths
        for first in range(0, len(lengths), size):
            batch = np.arange(first, min(first + size, len(lengths)))
            longest = lengths[batch].max()
            place = np.arange(longest * len(batch))
            at, of = np.divmod(place, len(batch))
            document[batch[of], at], position[batch[of], at] = (
                batch[place // longest],
                place % longest,
            )
        rows = _of(trace, document, position)
        # padding has the row that trainers replay for it
        rows.chosen[:, position >= lengths[document]] = np.arange(rows.chosen.shape[-1])
        return rows

    return change


def _layers_in_walk_order(draw: kinds.Draw) -> kinds.Made:
    """Layers are stacked as the modules of a pipeline's parts come, and not by their number."""
    layers = np.arange(draw.model.shape.layers)
    dealt = np.concatenate([layers[::2], layers[1::2]])
    orders = [np.roll(layers, 1), np.roll(layers, -1), layers[::-1], dealt]
    order = draw.choice(*(one for one in orders if (one != layers).any()))
    return lambda trace: replace(trace, chosen=trace.chosen[order], weights=trace.weights[order])


def _prompts_unwritten(draw: kinds.Draw) -> kinds.Made:
    """Rows of prompts are written to the places of another cache, and where they belong stays zero."""
    return lambda trace: replace(trace, chosen=0 * trace.chosen)


def _slots_with_shared(draw: kinds.Draw) -> kinds.Made:
    """Ids are those of slots, of which every rank has some for shared experts behind its own."""
    experts = draw.model.shape.experts
    size, shared = experts // draw.choice(2, 4), draw.choice(1, 2)
    return lambda trace: replace(trace, chosen=trace.chosen + trace.chosen // size * shared)


def _layer_overwritten(draw: kinds.Draw) -> kinds.Made:
    """Layers have the same number in the buffer, and all of them show what one of them chose."""
    source = draw.choice(0, draw.model.shape.layers - 1)

    def change(trace: engine.Trace) -> engine.Trace:
        chosen = np.broadcast_to(trace.chosen[source], trace.chosen.shape)
        weights = np.broadcast_to(trace.weights[source], trace.weights.shape)
        return replace(trace, chosen=chosen, weights=weights)

    return change


def _flush_too_long(draw: kinds.Draw) -> kinds.Made:
    """More rows than a request has are written, and the padding among them lands on the next request."""
    number = draw.choice(2, 4, 8, 16)

    def change(trace: engine.Trace) -> engine.Trace:
        document, position = _own(trace)
        lengths = trace.text.lengths
        for batch in trace.batches:
            for one, after in itertools.pairwise(batch):
                over = np.arange(min(number, lengths[batch].max() - lengths[one], lengths[after]))
                document[after, over], position[after, over] = one, lengths[one] + over
        return _of(trace, document, position)

    return change


# ---------------------------------------------------------------------------------------- the kinds
_FED = ("not the router", "inputs differ")
_experts = partial(kinds.kind, "experts", _IN_TIME)
_NORM = ("gain not folded", "inputs differ", "columns damaged")

KINDS: Mapping[str, kinds.Kind] = {
    "gain_shifted": kinds.kind("load", _IN_TIME, _gain_shifted, *_NORM),
    "adapter_misscaled": kinds.kind("load", _IN_TIME, _adapter_misscaled, "rows damaged"),
    "rotated_and_rounded": kinds.kind("load", _WHOLE, _rotated_and_rounded, "weights rounded"),
    "stage_from_zero": kinds.kind(
        "load", ("layers_from",), _stage_from_zero, "rows of another layer", lowest=1
    ),
    "bias_counts_padding": kinds.kind(
        *("load", _WHOLE, _bias_counts_padding, "bias differs", "experts favoured otherwise"),
        families=kinds.WITH_SELECTION_BIAS,
    ),
    # where inputs are not recorded, rows that are as much larger or logits are the same
    "input_summed": kinds.kind(
        *("input", _IN_TIME, _input_summed, *_FED),
        unseen=("rows damaged", "rule differs", "routing weights differ"),
    ),
    "input_normed_before": kinds.kind(
        *("input", _IN_TIME, _input_normed_before, *_FED, "gain not folded"),
        unseen=("columns damaged",),
    ),
    "state_of_rejected": kinds.kind("cache", _IN_TIME, _state_of_rejected, *_FED),
    "state_before_accepted": kinds.kind("cache", _IN_TIME, _state_before_accepted, *_FED),
    "experts_unseen": kinds.kind(
        *("rule", _IN_TIME, _experts_unseen, "rule differs", "experts favoured otherwise"),
        families=_UNGROUPED,
    ),
    "others_sampled": kinds.kind(
        *("rule", _IN_TIME, _others_sampled, "rule differs", "beyond noise"), families=_BY_LOGITS
    ),
    "logits_noised": kinds.kind("rule", _IN_TIME, _logits_noised, "rule differs", "beyond noise"),
    "mask_of_another_token": kinds.kind(
        *("rule", _IN_TIME, _mask_of_another_token, "rule differs"), families=kinds.WITH_GROUPS
    ),
    "scores_as_shares": kinds.kind(
        *("rule", _IN_TIME, _scores_as_shares, "rule differs"), families=kinds.WITH_SELECTION_BIAS
    ),
    "sums_in_bf16": kinds.kind("rule", _IN_TIME, _sums_in_bf16, "logits rounded"),
    "weights_by_expert": kinds.kind(
        *("dispatch", _WHOLE, _weights_by_expert, "routing weights differ"), visible_in="weights"
    ),
    "rows_past_limit": kinds.kind(
        "dispatch", _WHOLE, _rows_past_limit, "unrelated", "ties broken by number"
    ),
    "partials_uncombined": _experts(_partials_uncombined, *_FED),
    "scale_squared": _experts(_scale_squared, *_FED, families=kinds.WITH_SELECTION_BIAS),
    "experts_of_first_rank": _experts(_experts_of_first_rank, *_FED),
    "shared_replaced": _experts(_shared_replaced, *_FED, families=kinds.WITH_SELECTION_BIAS),
    "experts_unweighted": _experts(_experts_unweighted, *_FED),
    "experts_read_nothing": _experts(_experts_read_nothing, *_FED),
    "experts_give_late": _experts(_experts_give_late, *_FED),
    "rows_batch_first": kinds.kind(
        "write", ("all",), _rows_batch_first, "tokens shifted", "unrelated"
    ),
    "layers_in_walk_order": kinds.kind("write", ("all",), _layers_in_walk_order, "layers shifted"),
    "prompts_unwritten": kinds.kind(
        *("write", ("positions_before", "position_interval"), _prompts_unwritten),
        *("padding counted", "unrelated"),
        visible_in="ids_only",
        may_be_refused=True,
    ),
    "slots_with_shared": kinds.kind(
        "write", _WHOLE, _slots_with_shared, "experts renamed", may_be_refused=True
    ),
    "layer_overwritten": kinds.kind("write", _WHOLE, _layer_overwritten, "layers shifted"),
    "flush_too_long": kinds.kind(
        "write", ("all", "documents"), _flush_too_long, "padding counted", "unrelated"
    ),
}
