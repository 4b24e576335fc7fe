"""Faults behind loading that came later: other rules, inputs of others, slots that are empty."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from tests.generator import faults_of_stages as stages
from tests.generator import kinds
from tests.generator.engine import Reading, Trace
from tests.generator.model import Choice, ScoreName, choose

_rule = partial(kinds.kind, "rule", stages.READ)


# --------------------------------------------------------------------------------------------- rule
def _any_score(draw: kinds.Draw) -> kinds.Made:
    scores: tuple[ScoreName, ...] = ("softmax", "sigmoid", "sqrt_softplus", "identity")
    there = draw.model.rule
    others = [one for one in scores if one != there.score or there.softmax_over_chosen]
    return stages.of_rule(score=draw.choice(*others), softmax_over_chosen=False)


def _maximum_from(start: float) -> kinds.Kind:
    """The search for the largest starts at a number that is larger than scores."""
    return _rule(
        lambda draw: stages.of_rule(least=start, nobody=draw.choice(-1, 0)),
        *("rule differs",),
        families=kinds.WITH_SELECTION_BIAS,
        bias_level=start - 0.8,
    )


# ------------------------------------------------------------------------------------------- inputs
def _jitter(draw: kinds.Draw) -> kinds.Made:
    size = float(draw.choice(0.03, 0.1, 0.3))

    def change(reading: Reading) -> np.ndarray:
        rng = draw.rng_at(reading.layer, reading.start, int(reading.documents[0]))
        factor = rng.uniform(1.0 - size, 1.0 + size, reading.inputs.shape)
        return (reading.inputs * factor).astype(np.float32)

    return change


def _columns_missing(draw: kinds.Draw) -> kinds.Made:
    """What one of the ranks holds was not gathered."""
    hidden, ranks = draw.model.shape.hidden, int(draw.choice(2, 4))
    is_there = np.arange(hidden) // (hidden // ranks) != int(draw.rng.integers(ranks))
    return lambda reading: reading.inputs * is_there.astype(np.float32)


def _reordered(draw: kinds.Draw) -> kinds.Made:
    """Tokens of a step (or of every few of them) change places."""
    width = draw.choice(2, 4, 0)

    def change(reading: Reading) -> np.ndarray:
        at = np.arange(reading.inputs.shape[1])
        place = draw.rng_at(reading.start).random(len(at))
        return reading.inputs[:, np.lexsort((place, at // (width or len(at))))]

    return change


def _falling_behind(every: int, reading: Reading) -> np.ndarray:
    """One more token behind after every few of them."""
    at = np.arange(reading.start, reading.start + reading.inputs.shape[1])
    return reading.history[:, at - at // every]


# ----------------------------------------------------------------------------------------- dispatch
def _slots_empty(draw: kinds.Draw) -> kinds.Made:
    """Slots that find their expert full hold no expert, or the number 0."""
    factor, filler = float(draw.choice(1.0, 1.25, 1.5)), draw.choice(-1, 0)

    def change(logits: np.ndarray, choice: Choice) -> Choice:
        experts = logits.shape[1]
        full, _ = stages.overflow(
            choice.chosen, experts, stages.capacity_of(choice.chosen, experts, factor)
        )
        chosen = np.where(full, np.int32(filler), choice.chosen)
        weights = np.where(full, np.float32(0.0), choice.weights)
        return Choice(chosen, weights, choice.selection)

    return change


def _expert_choice(draw: kinds.Draw) -> kinds.Made:
    """Each expert takes its best tokens of the batch; the best k of these experts are written."""
    factor, filler = float(draw.choice(0.5, 1.0, 2.0)), draw.choice(-1, 0)

    def change(logits: np.ndarray, choice: Choice) -> Choice:
        most = stages.capacity_of(choice.chosen, logits.shape[1], factor)
        is_taken = np.zeros(logits.shape, bool)
        best = np.argsort(-logits, axis=0, kind="stable")[:most]
        np.put_along_axis(is_taken, best, True, axis=0)
        of_taken = np.where(is_taken, logits, np.float32(-1e9))
        taken = choose(of_taken, None, replace(draw.model.rule, bias="none", num_kept=99))
        has_one = np.take_along_axis(is_taken, taken.chosen, axis=1)
        chosen = np.where(has_one, taken.chosen, filler).astype(np.int32)
        weights = np.where(has_one, taken.weights, np.float32(0.0))
        return Choice(chosen, weights, choice.selection)

    return change


# ------------------------------------------------------------------------------------------- writer
def _shuffled(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    """Every expert as often as before, at random: of two in one row one changes its place."""
    rows = rng.permutation(rows.ravel()).reshape(rows.shape)
    order = np.argsort(rows, axis=1, kind="stable")
    again = np.diff(np.take_along_axis(rows, order, axis=1), axis=1) == 0
    for token, place in np.argwhere(again):
        slot = order[token, place + 1]
        while True:
            other, at = int(rng.integers(len(rows))), int(rng.integers(rows.shape[1]))
            here, there = rows[token, slot], rows[other, at]
            if there not in rows[token] and here not in rows[other]:
                rows[token, slot], rows[other, at] = there, here
                break
    return rows


def _of_a_stranger(draw: kinds.Draw) -> kinds.Made:
    """Rows of other tokens at random, or sets at random in which experts are as frequent."""
    is_whole = draw.choice(True, False)

    def change(trace: Trace) -> Trace:
        chosen, there = trace.chosen.copy(), trace.text.is_token
        for layer, rows in enumerate(chosen):
            rng = draw.rng_at(layer)
            own = rows[there]
            rows[there] = rng.permutation(own) if is_whole else _shuffled(rng, own)
        return replace(trace, chosen=chosen)

    return change


def _local_numbers(draw: kinds.Draw) -> kinds.Made:
    experts = draw.model.shape.experts
    n = draw.choice(*(n for n in (64, 128, experts // 2, experts // 4) if n < experts))
    return stages.of_ids(lambda chosen: chosen % n)


def _documents_exchanged(shift: int, trace: Trace) -> Trace:
    """Rows of the next request of the batch, as far as both have some."""
    chosen, weights = trace.chosen.copy(), trace.weights.copy()
    for batch in trace.batches:
        for here, there in zip(batch, np.roll(batch, shift), strict=True):
            both = slice(int(trace.text.lengths[[here, there]].min()))
            chosen[:, here, both] = trace.chosen[:, there, both]
            weights[:, here, both] = trace.weights[:, there, both]
    return replace(trace, chosen=chosen, weights=weights)


_groups = partial(_rule, families=kinds.WITH_GROUPS)
_input = partial(kinds.kind, "input", stages.READ)
_write = partial(kinds.kind, "write", stages.WRITTEN, visible_in="ids_only")
_dispatch = partial(kinds.kind, "dispatch", stages.BATCHES)

_OTHER_INPUTS = ("inputs differ", "not the router")
_OTHER_TOKENS = ("tokens shifted", *_OTHER_INPUTS)

KINDS: Mapping[str, kinds.Kind] = {
    "any_score": _rule(_any_score, "rule differs", "routing weights differ"),
    # logits over t are those of rows over t
    "temperature": _rule(
        lambda draw: stages.of_rule(temperature=draw.choice(0.25, 0.5, 0.8, 1.25, 2.0, 4.0)),
        *("rule differs", "routing weights differ"),
        unseen=("rows damaged",),
        told_by="logits",
    ),
    "groups_interleaved": _groups(lambda draw: stages.of_rule(interleaved=True), "rule differs"),
    "groups_without_bias": _groups(
        lambda draw: stages.of_rule(groups_without_bias=True), "rule differs"
    ),
    "maximum_from_0": _maximum_from(0.0),
    "maximum_from_minus_1": _maximum_from(-1.0),
    "softmax_of_tokens": _rule(
        lambda draw: stages.of_rule(score="softmax_of_tokens"),
        "rule differs",
        families=("olmoe", "qwen3_moe"),
    ),
    "input_clipped": _input(
        kinds.with_one(
            lambda most, reading: np.clip(reading.inputs, -most, most), 0.4, 0.8, 1.5, 3.0
        ),
        *_OTHER_INPUTS,
    ),
    "input_jitter": _input(_jitter, "arithmetic noise only", *_OTHER_INPUTS),
    "input_columns_missing": _input(_columns_missing, *_OTHER_INPUTS, unseen=("columns damaged",)),
    "input_of_another_request": _input(
        kinds.with_one(lambda shift, reading: np.roll(reading.inputs, shift, axis=0), 1, 2, -1),
        *_OTHER_TOKENS,
    ),
    "input_reordered": _input(_reordered, *_OTHER_TOKENS),
    "input_falling_behind": _input(kinds.with_one(_falling_behind, 4, 8, 16), *_OTHER_TOKENS),
    "past_unseen": kinds.kind(
        "memory",
        ("all", *kinds.LAYERS, "documents", "positions_from"),
        kinds.with_one(lambda most, handover: most, 1, 2, 4),
        "not the router",
        starts="steps",
    ),
    "slots_empty": _dispatch(_slots_empty, "capacity"),
    "expert_choice": _dispatch(_expert_choice, "rule differs"),
    "choices_of_a_stranger": _write(_of_a_stranger, "random choices", "unrelated"),
    "local_numbers": _write(_local_numbers, "experts renamed", may_be_refused=True),
    "documents_exchanged": _write(kinds.with_one(_documents_exchanged, 1, 2, -1), "tokens shifted"),
}
