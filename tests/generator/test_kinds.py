"""Each kind of fault that was added when explain stood does what it says: against its definition. So
does each that people have reported, and it changes choices where it acts and nowhere else.
"""

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.generator import engine, kinds
from tests.generator.cases import differences, draw
from tests.generator.engine import Arithmetic, Fault, Reach, Reading, Schedule, Trace, serve
from tests.generator.faults import KINDS, NEW, THREADS, draw_fault, may_differ, step_starts
from tests.generator.faults_of_stages import KINDS as STAGES
from tests.generator.kinds import Draw, Ground
from tests.generator.model import SHAPES, Choice, Model, Text, choose, draw_model, draw_text

HIDDEN, EXPERTS = SHAPES["small"].hidden, SHAPES["small"].experts


@cache
def world(family: str, bias_level: float | None) -> tuple[Model, Text, Schedule]:
    rng, shape = np.random.default_rng(3), SHAPES["small"]
    model = draw_model(rng, family, shape, "bfloat16", bias_level=bias_level)
    text = draw_text(rng, shape.documents, shape.length, shape.vocabulary)
    batches = np.array_split(rng.permutation(shape.documents), 3)
    return model, text, Schedule(tuple(batches), 8, 26)


def draw_for(operator: str, seed: int, layer: int = 0) -> Draw:
    kind = KINDS[operator]
    family = kind.families[seed % len(kind.families)]
    model, text, schedule = world(family, kind.bias_level)
    ground = Ground(np.random.default_rng(seed), model, text, schedule)
    return Draw(ground, Reach(frozenset({layer}), text.is_token), seed)


# ------------------------------------------------------------------------------------ what is loaded
def columns(draw: Draw, change: Any) -> np.ndarray:
    """What is done to the columns, as a matrix: W' = W M."""
    here = draw.model.routers[0]
    by = change(0, replace(here, weight=np.eye(HIDDEN, dtype=np.float32))).weight
    np.testing.assert_allclose(change(0, here).weight, here.weight @ by, atol=1e-5)
    return by


def factors(draw: Draw, change: Any) -> np.ndarray:
    by = columns(draw, change)
    np.testing.assert_array_equal(by, np.diag(np.diag(by)))
    return np.diag(by)


def same_columns(draw: Draw, change: Any) -> np.ndarray:
    """For each column the one that stands there."""
    by = columns(draw, change)
    np.testing.assert_array_equal(np.sort(by, axis=0)[-2:], [[0.0] * HIDDEN, [1.0] * HIDDEN])
    return by.argmax(axis=0)


def columns_repeated(draw, change):
    order = same_columns(draw, change)
    (moved,) = np.nonzero(order != np.arange(HIDDEN))
    return (order[moved] == moved - len(moved)).all() and (np.diff(moved) == 1).all()


def rows_rotated(draw, change):
    by = columns(draw, change)
    size = (by[0] != 0.0).sum()
    is_inside = np.kron(np.eye(HIDDEN // size), np.ones((size, size)))
    np.testing.assert_allclose(by @ by.T, np.eye(HIDDEN), atol=1e-6)
    return size > 1 and np.allclose(np.abs(by), is_inside / np.sqrt(size))


def rows_times_gain(draw, change):
    by, gains = factors(draw, change), [router.gain for router in draw.model.routers]
    return any(np.allclose(by, g**p) for g, p in itertools.product(gains, (1.0, -1.0, 0.5)))


def buffer_transposed(draw, change):
    place = np.arange(EXPERTS * HIDDEN)
    there = replace(draw.model.routers[0], weight=place.reshape(EXPERTS, HIDDEN))
    read = change(0, there).weight
    one = place % EXPERTS * HIDDEN + place // EXPERTS
    return (read.ravel() == one).all() or (read[place % EXPERTS, place // EXPERTS] == place).all()


def block_scales_exchanged(draw, change):
    """Blocks of W and of what is read are the same integers, to half a unit, of other scales."""
    pair = draw.model.routers[0].weight, change(0, draw.model.routers[0]).weight
    for tall, wide in itertools.product((1, 2, 4), (4, 8, 16)):
        blocks = [np.stack(np.split(x.reshape(-1, tall, HIDDEN), HIDDEN // wide, 2)) for x in pair]
        here, there = (np.abs(block).max(axis=(2, 3), keepdims=True) for block in blocks)
        is_same = np.abs(blocks[0] / here - blocks[1] / there).max() <= 0.501 / 127
        if is_same and np.allclose(np.sort(here, axis=None), np.sort(there, axis=None)):
            return not np.allclose(here, there)
    return False


def gain_moved(draw, change):
    here, there = draw.model.routers[0], change(0, draw.model.routers[0])
    same = (np.sort(there.gain) == np.sort(here.gain)).all() and (there.gain != here.gain).any()
    return same and (there.weight == here.weight).all()


def bias_is(*changed: Any) -> Any:
    """The bias is one of what it is changed to."""

    def holds(draw: Draw, change: Any) -> bool:
        bias, read = draw.model.routers[0].bias, change(0, draw.model.routers[0]).bias
        return any(np.allclose(read, to(draw, bias), rtol=1e-6) for to in changed)

    return holds


def cast(dtype: Any, largest: float = 0.0) -> Any:
    def to(draw: Draw, bias: np.ndarray) -> np.ndarray:
        scale = np.abs(bias).max() / largest if largest else 1.0
        return (bias / scale).astype(dtype).astype(np.float32) * scale

    return to


SCALED = bias_is(*(lambda draw, bias, f=f: f * bias for f in (0.5, 0.9, 1.5, 2.0, 10.0)))


# ------------------------------------------------------------------------------------------ the rule
def by_hand(z: np.ndarray, bias: Any, rule: Any) -> tuple[list[int], list[float]]:
    """Of the first token what is chosen, and its scores."""
    z = z / rule.temperature
    score = {
        "softmax": lambda e: np.exp(z[0, e]) / np.exp(z[0]).sum(),
        "softmax_of_tokens": lambda e: np.exp(z[0, e]) / np.exp(z[:, e]).sum(),
        "sigmoid": lambda e: 1.0 / (1.0 + np.exp(-z[0, e])),
        "sqrt_softplus": lambda e: np.log1p(np.exp(z[0, e])) ** 0.5,
        "identity": lambda e: z[0, e],
    }[rule.score]
    scores = [score(e) for e in range(EXPERTS)]
    with_bias = [s + b for s, b in zip(scores, bias, strict=True)]
    groups, size = rule.num_groups, EXPERTS // rule.num_groups
    members = [
        [e for e in range(EXPERTS) if (e % groups if rule.interleaved else e // size) == g]
        for g in range(groups)
    ]
    worth = scores if rule.groups_without_bias else with_bias
    best = sorted(members, key=lambda group: -sum(sorted(worth[e] for e in group)[-2:]))
    left = {e for group in best[: rule.num_kept] for e in group}
    chosen, values = [], []
    for _ in range(rule.top_k):
        most, winner = rule.least, None
        for e in left:
            if with_bias[e] > most:
                most, winner = with_bias[e], e
        left -= {winner}
        chosen.append(rule.nobody if winner is None else winner)
        values.append(0.0 if winner is None else scores[winner])
    return chosen, values


def is_rule(draw, change):
    rule, bias = change(draw.model.rule), draw.model.routers[0].bias
    assert rule != draw.model.rule
    offset = bias if rule.bias == "selection" else np.zeros(EXPERTS)
    z = 1.5 * np.random.default_rng(draw.seed).standard_normal((40, EXPERTS))
    for at in range(len(z)):
        here = np.roll(z, -at, axis=0)
        routed, (chosen, values) = choose(here, bias, rule), by_hand(here, offset, rule)
        if rule.softmax_over_chosen:
            values = np.exp(values) / np.exp(values).sum()
        total = sum(values) if rule.renormalise and any(values) else 1.0
        np.testing.assert_array_equal(routed.chosen[0], chosen)
        np.testing.assert_allclose(
            routed.weights[0], rule.scale * np.array(values) / total, rtol=1e-5
        )
    return True


# ---------------------------------------------------------------------------------------- the inputs
def reads(holds: Any) -> Any:
    """A theorem on the last eight of twenty tokens of three requests."""

    def of_reading(draw: Draw, change: Any) -> bool:
        history = 2.0 * np.random.default_rng(draw.seed).standard_normal((3, 20, HIDDEN))
        inputs = history[:, 12:].astype(np.float32)
        reading = Reading(0, 12, np.arange(3), inputs, history, (), np.ones(HIDDEN))
        return bool(holds(inputs, change(reading), history))

    return of_reading


def is_columns_missing(x, read, history):
    is_gone = (read == 0.0).all(axis=(0, 1))
    one_run = (np.diff(np.flatnonzero(is_gone)) == 1).all()
    return one_run and is_gone.sum() in (8, 16) and (read == np.where(is_gone, 0.0, x)).all()


def is_reordered(x, read, history):
    order = np.array([np.flatnonzero((x[0] == row).all(axis=1))[0] for row in read[0]])
    is_near = any((order // width == np.arange(8) // width).all() for width in (2, 4, 8))
    return (np.sort(order) == np.arange(8)).all() and is_near and (read == x[:, order]).all()


def past_unseen(draw, change):
    """The first tokens of a step are read as after a cache that was lost, all others as ever."""
    model, text, schedule = draw.model, draw.ground.text, draw.ground.schedule
    starts = step_starts(schedule, text.token_id.shape[1])
    reach = Reach(frozenset({0}), text.is_token & np.isin(text.position, starts))
    lost = STAGES["cache_lost"].make(draw)
    runs = [
        serve(model, text, Arithmetic(), schedule, faults).inputs[0]
        for faults in ([], [Fault("memory", reach, change)], [Fault("cache", reach, lost)])
    ]
    most, position = change(None), text.position[text.is_token]
    since = np.min(np.where(position >= starts[:, None], position - starts[:, None], 99), axis=0)
    expected = np.where((since < most)[:, None], runs[2], runs[0])
    # decoded tokens see all: only the step that begins to decode is blind, for one token
    is_prefill = position <= schedule.decode_from
    np.testing.assert_allclose(runs[1][is_prefill], expected[is_prefill], atol=1e-5)
    return (np.abs(runs[1] - runs[0]).max(axis=1) > 1e-3).sum() > 20


# -------------------------------------------------------------------------- dispatch and the writer
def dispatched(draw: Draw, change: Any) -> tuple[np.ndarray, Choice, Choice]:
    z = np.random.default_rng(draw.seed).standard_normal((30, EXPERTS)) + np.arange(EXPERTS) / 4
    choice = choose(z, draw.model.routers[0].bias, draw.model.rule)
    return z, choice, change(z, choice)


def slots_empty(draw, change):
    _, choice, left = dispatched(draw, change)
    for factor, filler in itertools.product((1.0, 1.25, 1.5), (-1, 0)):
        load, chosen = np.zeros(EXPERTS), choice.chosen.copy()
        for slot in np.ndindex(chosen.shape):
            expert = chosen[slot]
            is_full = load[expert] >= np.ceil(factor * chosen.size / EXPERTS)
            load[expert] += not is_full
            chosen[slot] = filler if is_full else expert
        is_empty = chosen != choice.chosen
        if (chosen == left.chosen).all() and is_empty.any():
            return (left.weights == np.where(is_empty, 0.0, choice.weights)).all()
    return False


def expert_choice(draw, change):
    z, choice, left = dispatched(draw, change)
    k = draw.model.rule.top_k
    for factor, filler in itertools.product((0.5, 1.0, 2.0), (-1, 0)):
        most = int(np.ceil(factor * choice.chosen.size / EXPERTS))
        takers = [[e for e in np.argsort(-row) if (z[:, e] > row[e]).sum() < most] for row in z]
        if np.array_equal([(ids + [filler] * k)[:k] for ids in takers], left.chosen):
            has_one = np.arange(k) < np.array([[len(ids)] for ids in takers])
            return (left.weights[~has_one] == 0.0).all() and left.weights[has_one].all()
    return False


def written(holds: Any) -> Any:
    def of_trace(draw: Draw, change: Any) -> bool:
        text, schedule = draw.ground.text, draw.ground.schedule
        rng, size = np.random.default_rng(draw.seed), (2, *text.token_id.shape)
        chosen = np.argsort(rng.random((*size, EXPERTS)) - np.arange(EXPERTS) / 9)[..., :2]
        trace = Trace(chosen.astype(np.int32), rng.random((*size, 2)), text, schedule.batches)
        return bool(holds(trace, change(trace)))

    return of_trace


def is_a_stranger(trace, read):
    there = trace.text.is_token
    for own, other in zip(trace.chosen[:, there], read.chosen[:, there], strict=True):
        loads = [np.bincount(rows.ravel()) for rows in (own, other)]
        shared = (own[:, :, None] == other[:, None]).sum()
        by_chance = (loads[0] / len(own)) @ (loads[0] / len(own)) * len(own)
        if (loads[0] != loads[1]).any() or (np.diff(np.sort(other)) == 0).any():
            return False
        if abs(shared / by_chance - 1.0) > 0.1:
            return False
    return (read.weights == trace.weights).all()


def is_exchanged(trace, read):
    lengths, place = trace.text.lengths, trace.text.position
    for shift in (1, 2, -1):
        other, own = np.empty_like(lengths), np.arange(len(lengths))
        for batch in trace.batches:
            other[batch] = np.roll(batch, shift)
        both = np.minimum(lengths, lengths[other])
        source = np.where(place < both[:, None], other[:, None], own[:, None])
        if (read.chosen == trace.chosen[:, source, place]).all():
            return (read.weights == trace.weights[:, source, place]).all()
    return False


NAMED = (columns_repeated, rows_rotated, rows_times_gain, buffer_transposed, block_scales_exchanged,
         gain_moved, past_unseen, slots_empty, expert_choice)  # fmt: skip

DEFINITIONS = {
    **{one.__name__: one for one in NAMED},
    "columns_permuted": lambda *made: (
        sorted(same_columns(*made)) == [*range(HIDDEN)] != [*same_columns(*made)]
    ),
    "columns_zeroed": lambda *made: (factors(*made) == 0.0).sum() in (4, 8, 16),
    "columns_scaled": lambda *made: {*factors(*made)} - {1.0} < {2.0, 0.5, -1.0, 1.5},
    "bias_part_zeroed": bias_is(lambda draw, bias: 0.0 * bias),
    "bias_part_negated": bias_is(lambda draw, bias: -bias),
    "bias_part_stale": bias_is(lambda draw, bias: draw.model.older[0].bias),
    "bias_part_reversed": bias_is(lambda draw, bias: bias[::-1]),
    **dict.fromkeys(["bias_part_scaled", "bias_scaled"], SCALED),
    "bias_part_cast": bias_is(
        *(cast(ml_dtypes.bfloat16), cast(np.int32), cast(ml_dtypes.float8_e4m3fn)),
        cast(ml_dtypes.float8_e5m2, 57344.0),
    ),
    **dict.fromkeys([name for name, kind in NEW.items() if kind.stage == "rule"], is_rule),
    "input_clipped": reads(
        lambda x, read, history: any(
            np.allclose(read, np.sign(x) * np.minimum(np.abs(x), most))
            for most in (0.4, 0.8, 1.5, 3.0)
        )
    ),
    "input_jitter": reads(lambda x, read, history: 0.01 < np.abs(read / x - 1.0).max() < 0.31),
    "input_columns_missing": reads(is_columns_missing),
    "input_of_another_request": reads(
        lambda x, read, history: any((read == x[[*to]]).all() for to in ((2, 0, 1), (1, 2, 0)))
    ),
    "input_reordered": reads(is_reordered),
    "input_falling_behind": reads(
        lambda x, read, history: any(
            all((read[:, p - 12] == history[:, p - p // n]).all() for p in range(12, 20))
            for n in (4, 8, 16)
        )
    ),
    "choices_of_a_stranger": written(is_a_stranger),
    "local_numbers": written(
        lambda trace, read: any(
            (trace.chosen - read.chosen == n * (trace.chosen // n)).all() for n in (2, 4)
        )
    ),
    "documents_exchanged": written(is_exchanged),
}


@pytest.mark.parametrize("operator", NEW)
def test_a_kind_does_what_it_says(operator):
    for seed in range(3 if operator == "past_unseen" else 12):
        draw = draw_for(operator, seed)
        assert DEFINITIONS[operator](draw, NEW[operator].make(draw)), seed


def test_a_kind_in_part_touches_some_experts_and_leaves_the_others():
    parts = [kinds.draw_part(draw_for("bias_part_zeroed", seed).ground) for seed in range(40)]
    assert {len(part) for part in parts} == {1, 2, 4}
    injected = draw_fault("bias_part_zeroed", draw_for("bias_part_zeroed", 0).ground)
    assert injected.fault.reach.experts is not None


# ----------------------------------------------------------------------------- what people reported
def is_shifted(draw, change):
    here, there = draw.model.routers[0], change(0, draw.model.routers[0])
    shift = there.gain - here.gain
    return np.ptp(shift) < 1e-6 and abs(shift[0]) > 0.9 and there.weight is here.weight


def is_of_low_rank(draw, change):
    here, there = draw.model.routers[0], change(0, draw.model.routers[0])
    sizes = np.linalg.svd(there.weight - here.weight, compute_uv=False)
    return sizes[0] > 1e-2 and (sizes > 1e-4 * sizes[0]).sum() in (1, 2, 4)


def is_rounded_when_turned(draw, change):
    """In some block of Hadamard features, parts of 16 have few values; they are near what they were."""
    here, there = draw.model.routers[0].weight, change(0, draw.model.routers[0]).weight
    numbers = []
    for size in (8, 16, 32):
        turn = np.kron(np.eye(HIDDEN // size), hadamard_features(size))
        parts = (there @ turn).reshape(-1, 16)
        numbers.append(max(len(np.unique(part.round(4))) for part in parts))
    is_near = np.linalg.norm(there - here) < 0.35 * np.linalg.norm(here)
    return min(numbers) <= 16 and is_near and not np.allclose(there, here)


def hadamard_features(size: int) -> np.ndarray:
    place = np.arange(size)
    common = np.array([[(i & j).bit_count() for j in place] for i in place])
    return (-1.0) ** common / np.sqrt(size)


def is_pushed_down(draw, change):
    step = change(0, draw.model.routers[0]).bias - draw.model.routers[0].bias
    pushed, top_k = (step < 0).sum(), draw.model.rule.top_k
    return pushed in (top_k, 2 * top_k) and abs(step.sum()) < 1e-5


def is_summed(x, read, history):
    return any(np.allclose(read, ranks * x) for ranks in (2, 4, 8))


def is_normed_twice(x, read, history):
    factors = read / engine.unit(x)
    return np.ptp(factors.reshape(-1, HIDDEN), axis=0).max() < 1e-4 and not np.allclose(read, x)


def handed_over(draw: Draw, change: Any, start: int) -> tuple[engine.Handover, np.ndarray]:
    rng = np.random.default_rng(draw.seed)
    states = [rng.standard_normal((3, 8)).astype(np.float32) for _ in range(4)]
    decay = rng.uniform(0.5, 0.97, 8).astype(np.float32)
    handover = engine.Handover(0, start, states[0], states[1], states[2], decay, states[3])
    return handover, change(handover)


def holds_rejected(draw, change):
    begin = draw.ground.schedule.decode_from
    before, left = handed_over(draw, change, begin - 1)
    at, state = handed_over(draw, change, begin + 2)
    for number in (1, 2, 3, 4):
        powers = at.decay ** np.arange(number, -1, -1)[:, None]
        guesses = [np.roll(at.last, one, axis=0) for one in range(1, number + 1)]
        puts = sum(p * (1 - at.decay) * put for p, put in zip(powers[1:], guesses, strict=True))
        if np.allclose(state, powers[0] * at.state + puts, atol=1e-5):
            return (left == before.state).all()
    return False


def is_before_last(draw, change):
    begin = draw.ground.schedule.decode_from
    is_old = []
    for start in range(begin - 5, begin + 12):
        at, state = handed_over(draw, change, start)
        is_old.append(bool((state == at.before_last).all()))
        assert is_old[-1] or (state == at.state).all()
    steps = np.flatnonzero(is_old)
    return steps[0] == 5 and len({*np.diff(steps)}) == 1 and np.diff(steps)[0] in (1, 2, 3, 4)


def routed(draw: Draw, change: Any, rows: int = 60) -> tuple[np.ndarray, Choice, Choice]:
    z = 1.5 * np.random.default_rng(draw.seed).standard_normal((rows, EXPERTS))
    bias, rule = draw.model.routers[0].bias, draw.model.rule
    return z, choose(z, bias, rule), choose(z, bias, change(rule))


def is_among_the_first(draw, change):
    _, choice, other = routed(draw, change)
    limit = change(draw.model.rule).num_seen
    free = (choice.chosen < limit).all(axis=1)
    assert (other.chosen[free] == choice.chosen[free]).all()
    return EXPERTS // 2 <= limit < EXPERTS and (other.chosen < limit).all() and not free.all()


def is_sampled_behind_the_first(draw, change):
    z, choice, other = routed(draw, change, 4000)
    assert (other.chosen[:, 0] == choice.chosen[:, 0]).all()
    first = choice.chosen[:, :1]
    powers = np.exp(z)
    np.put_along_axis(powers, first, 0.0, axis=1)
    expected = (powers / powers.sum(axis=1, keepdims=True)).mean(axis=0)
    share = np.bincount(other.chosen[:, 1], minlength=EXPERTS) / len(z)
    return np.abs(share - expected).max() < 0.03


def is_noisy(draw, change):
    size = change(draw.model.rule).noise
    _, choice, other = routed(draw, change, 2000)
    again = routed(draw, change, 2000)[2]
    moved = (np.sort(choice.chosen) != np.sort(other.chosen)).any(axis=1).mean()
    return (again.chosen == other.chosen).all() and 0.2 * size < moved < 2.0 * size + 0.1


def obeys_another(draw, change):
    rule, shift = draw.model.rule, change(draw.model.rule).mask_shift
    _, choice, other = routed(draw, change)
    masks = [set(np.flatnonzero(np.isfinite(row))) for row in choice.selection]
    size = EXPERTS // rule.num_groups
    for at, row in enumerate(other.chosen):
        assert {*row} <= masks[(at - shift) % len(masks)]
    return shift in (-1, 1, 2, 4) and all(len(mask) == rule.num_kept * size for mask in masks)


def is_divided(draw, change):
    z, _, other = routed(draw, change)
    rule, bias = draw.model.rule, draw.model.routers[0].bias
    scores = 1.0 / (1.0 + np.exp(-z))
    shares = replace(rule, score="identity")
    expected = choose(scores / scores.sum(axis=1, keepdims=True), bias, shares)
    return (other.chosen == expected.chosen).all()


def is_summed_in_bf16(draw, change):
    model, text, schedule = draw.model, draw.ground.text, draw.ground.schedule
    reach = Reach(frozenset({0}), text.is_token)
    faults = [Fault("rule", reach, change)]
    run, twin = (serve(model, text, Arithmetic(), schedule, one) for one in (faults, []))
    bias = model.routers[0].bias if model.rule.bias == "logit" else None
    sums = run.logits[0] - (0.0 if bias is None else bias)
    is_bf16 = np.abs(sums - sums.astype(ml_dtypes.bfloat16).astype(np.float32)).max() < 1e-5
    gap = np.abs(run.logits[0] - twin.logits[0])
    return is_bf16 and 1e-4 < gap.mean() < 0.1


def is_weighed_by_expert(draw, change):
    _, choice, left = dispatched(draw, change)
    factors = left.weights / choice.weights
    per = [
        np.ptp(factors[choice.chosen == e]) for e in range(EXPERTS) if (choice.chosen == e).any()
    ]
    return (left.chosen == choice.chosen).all() and max(per) < 1e-5 < np.ptp(factors)


def is_cut_off(draw, change):
    z = np.random.default_rng(draw.seed).standard_normal((90, EXPERTS))
    choice = choose(z, draw.model.routers[0].bias, draw.model.rule)
    left = change(z, choice)
    same = (left.chosen == choice.chosen).all(axis=1)
    limit = max(n for n in (16, 32, 64) if same[:n].all())
    return (left.chosen[limit:] == np.arange(choice.chosen.shape[1])).all()


def ran(holds: Any) -> Any:
    """A theorem on what experts give, whose ``run`` is that of the engine."""

    def of_running(draw: Draw, change: Any) -> bool:
        rng, model = np.random.default_rng(draw.seed), draw.model
        server = engine._Server(model, draw.ground.text, Arithmetic(), draw.ground.schedule, ())
        x = rng.standard_normal((12, HIDDEN)).astype(np.float32)
        z = (x @ model.routers[0].weight.T).astype(np.float32)
        choice = choose(z, model.routers[0].bias, model.rule)
        running = engine.Running(model.layers[0], x, z, choice, 3, server._run_experts)
        return bool(holds(draw, running, change(running)))

    return of_running


def parts_of(running: Any) -> tuple[np.ndarray, np.ndarray]:
    """What each slot gives with weight one, and the shared expert."""
    layer, x, choice = running.layer, running.inputs, running.choice
    shared = np.zeros_like(x)
    if layer.shared_up is not None:
        shared = np.maximum(x @ layer.shared_up, 0.0) @ layer.shared_down
    slots = [
        [np.maximum(x[t] @ layer.up[e], 0.0) @ layer.down[e] for e in row]
        for t, row in enumerate(choice.chosen)
    ]
    return np.array(slots), shared


def near(one: np.ndarray, other: np.ndarray) -> bool:
    return np.allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())


def is_partial(draw, running, gives):
    slots, shared = parts_of(running)
    weights, chosen = running.choice.weights, running.choice.chosen
    own = np.arange(len(slots))[:, None]
    sums = [
        ((weights * (chosen // (EXPERTS // n) == own % n))[:, :, None] * slots).sum(axis=1)
        for n in (2, 4)
    ]
    return any(near(gives, one + shared) for one in sums)


def is_scaled_again(draw, running, gives):
    slots, shared = parts_of(running)
    routed_part = (running.choice.weights[:, :, None] * slots).sum(axis=1)
    return any(near(gives, f * routed_part + shared) for f in (2.5, 0.4))


def is_of_first_rank(draw, running, gives):
    _, shared = parts_of(running)
    sums = []
    for n in (2, 4):
        choice = replace(running.choice, chosen=running.choice.chosen % (EXPERTS // n))
        slots, _ = parts_of(replace(running, choice=choice))
        sums.append((running.choice.weights[:, :, None] * slots).sum(axis=1))
    return any(near(gives, one + shared) for one in sums)


def is_without_shared(draw, running, gives):
    wide = choose(running.logits, draw.model.routers[0].bias, replace(draw.model.rule, num_run=3))
    assert draw.model.rule.top_k == 2
    slots, _ = parts_of(replace(running, choice=wide))
    return near(gives, (wide.weights[:, :, None] * slots).sum(axis=1))


def is_unweighted(draw, running, gives):
    slots, shared = parts_of(running)
    return near(gives, slots.sum(axis=1) + shared)


def is_of_another_slot(draw, running, gives):
    own = running.run(running.layer, running.inputs, running.choice).reshape(3, 4, HIDDEN)
    return any(
        (gives.reshape(own.shape) == own[[*order]]).all() for order in ((2, 0, 1), (1, 2, 0))
    )


def is_in_another_layout(trace, read):
    """Place i of the order by positions holds row i of the order by documents."""
    lengths = trace.text.lengths
    for size in (2, 3, 4):
        ends = []
        for first in range(0, len(lengths), size):
            batch = range(first, min(first + size, len(lengths)))
            longest = max(lengths[one] for one in batch)
            rows = [(one, at) for one in batch for at in range(longest)]
            for place, (own, at) in enumerate((o, a) for a in range(longest) for o in batch):
                document, position = rows[place]
                row = trace.chosen[:, document, position]
                if position >= lengths[document]:
                    row = np.broadcast_to([0, 1], row.shape)
                ends.append((read.chosen[:, own, at] == row).all())
        if all(ends):
            return True
    return False


def is_overlaid(trace, read):
    there = trace.text.is_token
    changed = (read.chosen != trace.chosen).any(axis=(0, 3)) & there
    firsts = changed.argmin(axis=1)
    lengths = trace.text.lengths
    for batch in trace.batches:
        assert not changed[batch[0]].any()
        for one, after in itertools.pairwise(batch):
            over = slice(lengths[one], lengths[one] + firsts[after])
            same = read.chosen[:, after, : firsts[after]] == trace.chosen[:, one, over]
            assert same.all()
    return changed.any() and (np.flatnonzero(changed.any(axis=0)) < 16).all()


REPORTED = {
    "gain_shifted": is_shifted,
    "adapter_misscaled": is_of_low_rank,
    "rotated_and_rounded": is_rounded_when_turned,
    "stage_from_zero": lambda draw, change: (
        change(1, draw.model.routers[1]) is draw.model.routers[0]
    ),
    "bias_counts_padding": is_pushed_down,
    "input_summed": reads(is_summed),
    "input_normed_before": reads(is_normed_twice),
    "state_of_rejected": holds_rejected,
    "state_before_accepted": is_before_last,
    "experts_unseen": is_among_the_first,
    "others_sampled": is_sampled_behind_the_first,
    "logits_noised": is_noisy,
    "mask_of_another_token": obeys_another,
    "scores_as_shares": is_divided,
    "sums_in_bf16": is_summed_in_bf16,
    "weights_by_expert": is_weighed_by_expert,
    "rows_past_limit": is_cut_off,
    "partials_uncombined": ran(is_partial),
    "scale_squared": ran(is_scaled_again),
    "experts_of_first_rank": ran(is_of_first_rank),
    "shared_replaced": ran(is_without_shared),
    "experts_unweighted": ran(is_unweighted),
    "experts_read_nothing": ran(lambda draw, running, gives: near(gives, parts_of(running)[1])),
    "experts_give_late": ran(is_of_another_slot),
    "rows_batch_first": written(is_in_another_layout),
    "layers_in_walk_order": written(lambda trace, read: (read.chosen == trace.chosen[::-1]).all()),
    "prompts_unwritten": written(lambda trace, read: (read.chosen == 0).all()),
    "slots_with_shared": written(
        lambda trace, read: any(
            (read.chosen == trace.chosen + trace.chosen // size * shared).all()
            for size, shared in itertools.product((EXPERTS // 2, EXPERTS // 4), (1, 2))
        )
    ),
    "layer_overwritten": written(
        lambda trace, read: any((read.chosen == trace.chosen[[one, one]]).all() for one in (0, 1))
    ),
    "flush_too_long": written(is_overlaid),
}


@pytest.mark.parametrize("operator", THREADS)
def test_a_reported_kind_does_what_it_says(operator):
    for seed in range(3 if operator == "sums_in_bf16" else 12):
        draw = draw_for(operator, seed, layer=int(operator == "stage_from_zero"))
        assert REPORTED[operator](draw, THREADS[operator].make(draw)), seed


@pytest.mark.parametrize("seed", range(len(THREADS)))
def test_a_reported_kind_changes_choices_where_it_acts_and_nowhere_else(seed):
    case = draw(seed, "small", "threads")
    (injected,), (truth,) = case.injected, case.truths
    assert injected.operator == [*THREADS][seed]
    assert truth.effect.sets + truth.effect.weights + truth.effect.later_sets > 0
    possible = may_differ(injected.fault, case.text, case.model.shape.layers)
    for layer in range(case.model.shape.layers):
        moved, weighed = differences(case.b, case.twin, layer)
        outside = (moved | weighed)[~possible[layer][case.text.is_token]]
        assert outside.sum() <= 0.01 * case.text.num_tokens  # products of other shapes round anew
