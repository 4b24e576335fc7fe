"""A serving engine in NumPy: chunked prefill, then decoding, a cache, slots, and a trace.

Faults enter at the stages that an engine has, while it runs: what a rank loads, what the router
reads, what the cache holds when a step begins, the rule, the dispatch, the writer. What they do to
a token goes on to later layers and later tokens as it does in a model.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from tests.generator import model as models
from tests.generator.model import Text

#: Features of a partial sum of the arithmetic that adds in another order.
_BLOCK = 24


@dataclass(frozen=True)
class Arithmetic:
    """In bfloat16 or float32, and the order of sums; routers keep their rows as loaded."""

    is_bf16: bool = False
    is_reversed: bool = False

    def kept(self, x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """What is left of numbers when a kernel writes them."""
        return models.rounded(x) if self.is_bf16 else x.astype(np.float32)

    def dot(
        self, x: Float[np.ndarray, "*rows inner"], w: Float[np.ndarray, "inner outer"]
    ) -> Float[np.ndarray, "*rows outer"]:
        return self.kept(_in_blocks(x, w) if self.is_reversed else x @ w)

    def logits(
        self, x: Float[np.ndarray, "rows hidden"], weight: Float[np.ndarray, "experts hidden"]
    ) -> Float[np.ndarray, "rows experts"]:
        """X @ W^T as float32; rows that are equal have equal logits unless sums are reversed."""
        if self.is_reversed:
            return _in_blocks(x, weight.T)
        return (x.astype(np.float64) @ weight.T.astype(np.float64)).astype(np.float32)


def _in_blocks(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    total = np.zeros((*x.shape[:-1], w.shape[1]), np.float32)
    for start in reversed(range(0, len(w), _BLOCK)):
        total += x[..., start : start + _BLOCK] @ w[start : start + _BLOCK]
    return total


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which documents are served together, and the steps: chunks of a prefill, then one by one."""

    batches: tuple[Int[np.ndarray, "slots"], ...]
    chunk: int
    decode_from: int

    def steps(self, length: int) -> Iterator[tuple[int, int]]:
        bounds = [*range(0, min(self.decode_from, length), self.chunk)]
        bounds += [*range(self.decode_from, length), length]
        yield from itertools.pairwise(bounds)


# ------------------------------------------------------------------------------------------- faults
Stage = Literal["load", "input", "cache", "memory", "rule", "dispatch", "experts", "write"]


@dataclass(frozen=True, eq=False)
class Reach:
    """Where a fault acts by itself; ``experts`` are the rows that it touches, None for all."""

    layers: frozenset[int]
    tokens: Bool[np.ndarray, "documents length"]
    experts: Int[np.ndarray, "some"] | None = None


@dataclass(frozen=True, eq=False)
class Fault:
    """A change of one stage.

    What ``change`` takes and gives depends on the stage: ``load`` (layer, RouterTensors) to
    RouterTensors, ``input`` a :class:`Reading` to inputs, ``cache`` a :class:`Handover` to a state,
    ``memory`` a Handover to the number of tokens of the step that do not see what was before it,
    ``rule`` a Rule to a Rule, ``dispatch`` (logits, Choice) to a Choice, ``experts`` a
    :class:`Running` to what the experts give, ``write`` a :class:`Trace` to a Trace.
    """

    stage: Stage
    reach: Reach
    change: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Reading:
    """What a router is about to read, and buffers beside it; ``below`` are of lower layers."""

    layer: int
    start: int
    documents: Int[np.ndarray, "slots"]
    inputs: Float[np.ndarray, "slots step hidden"]
    history: Float[np.ndarray, "slots length hidden"]
    below: Sequence[Float[np.ndarray, "slots step hidden"]]
    gain: Float[np.ndarray, "hidden"]


@dataclass(frozen=True, eq=False)
class Handover:
    """The cache when a step begins, and what is near it; ``left`` is of the last occupants."""

    layer: int
    start: int
    state: Float[np.ndarray, "slots rank"]
    before_last: Float[np.ndarray, "slots rank"]
    last: Float[np.ndarray, "slots rank"]
    decay: Float[np.ndarray, "rank"]
    left: Float[np.ndarray, "slots rank"]


@dataclass(frozen=True, eq=False)
class Running:
    """What the experts of a layer are about to read, all tokens of a step; ``run`` runs them."""

    layer: models.Layer
    inputs: Float[np.ndarray, "tokens hidden"]
    logits: Float[np.ndarray, "tokens experts"]
    choice: models.Choice
    slots: int
    run: Callable[[models.Layer, np.ndarray, models.Choice], np.ndarray]


@dataclass(frozen=True, eq=False)
class Trace:
    chosen: Int[np.ndarray, "layers documents length k"]
    weights: Float[np.ndarray, "layers documents length k"]
    text: Text
    batches: tuple[Int[np.ndarray, "slots"], ...]


@dataclass(frozen=True, eq=False)
class Run:
    """What a run leaves: for each layer what its router read, its logits and its choices."""

    inputs: tuple[Float[np.ndarray, "tokens hidden"], ...]
    logits: tuple[Float[np.ndarray, "tokens experts"], ...]
    chosen: tuple[Int[np.ndarray, "tokens k"], ...]
    weights: tuple[Float[np.ndarray, "tokens k"], ...]


def unit(x: Float[np.ndarray, "*rows hidden"]) -> Float[np.ndarray, "*rows hidden"]:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + np.float32(models.NORM_EPS))


# ------------------------------------------------------------------------------------------- engine
def serve(
    model: models.Model,
    text: Text,
    arithmetic: Arithmetic,
    schedule: Schedule,
    faults: Sequence[Fault] = (),
) -> Run:
    return _Server(model, text, arithmetic, schedule, faults).run()


@dataclass(eq=False)
class _Server:
    model: models.Model
    text: Text
    arithmetic: Arithmetic
    schedule: Schedule
    faults: Sequence[Fault]

    def __post_init__(self) -> None:
        model, size = self.model, (self.model.shape.layers, *self.text.token_id.shape)
        self.read = np.zeros((*size, model.shape.hidden), np.float32)
        self.logits = np.zeros((*size, model.shape.experts), np.float32)
        self.chosen = np.zeros((*size, model.rule.top_k), np.int32)
        self.weights = np.zeros((*size, model.rule.top_k), np.float32)
        self.loaded: dict[tuple[int, int], models.RouterTensors] = {}

    def run(self) -> Run:
        slots = max(map(len, self.schedule.batches))
        left = [np.zeros((slots, len(layer.decay)), np.float32) for layer in self.model.layers]
        for batch in self.schedule.batches:
            states = self._run_batch(batch, [state[: len(batch)] for state in left])
            for old, new in zip(left, states, strict=True):
                old[: len(new)] = new
        trace = Trace(self.chosen, self.weights, self.text, self.schedule.batches)
        for fault in self._of("write"):
            trace = _where_reached(fault.reach, fault.change(trace), trace)
        there = self.text.is_token

        def flat(x: np.ndarray) -> tuple[np.ndarray, ...]:
            return tuple(layer[there] for layer in x)

        return Run(flat(self.read), flat(self.logits), flat(trace.chosen), flat(trace.weights))

    def _of(self, stage: Stage) -> list[Fault]:
        return [fault for fault in self.faults if fault.stage == stage]

    def _run_batch(self, batch: np.ndarray, left: list[np.ndarray]) -> list[np.ndarray]:
        states = [np.zeros_like(state) for state in left]
        before = [np.zeros_like(state) for state in left]
        last = [np.zeros_like(state) for state in left]
        length = int(self.text.lengths[batch].max())
        shape = (self.model.shape.layers, len(batch), length, self.model.shape.hidden)
        history = np.zeros(shape, np.float32)
        for start, stop in self.schedule.steps(length):
            h = self.model.embedding[self.text.token_id[batch, start:stop]]
            below: list[np.ndarray] = []
            for at, layer in enumerate(self.model.layers):
                handover = Handover(
                    at, start, states[at], before[at], last[at], layer.decay, left[at]
                )
                mixed, states[at], before[at], last[at] = self._mix(layer, h, batch, handover)
                h = self.arithmetic.kept(h + mixed)
                h = self._experts(at, h, batch, (start, stop), history[at], below)
        return states

    def _mix(
        self, layer: models.Layer, h: np.ndarray, batch: np.ndarray, handover: Handover
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """s_t = a s_(t-1) + (1 - a) u_t, and the states from which the next step goes on."""
        state = handover.state
        for fault in self._of("cache"):
            hit = fault.reach.tokens[batch, handover.start]
            if handover.layer in fault.reach.layers and hit.any():
                state = np.where(hit[:, None], fault.change(handover), state)
        put = self.arithmetic.dot(self.arithmetic.kept(unit(h)), layer.into)
        states = np.empty_like(put)
        before, past = state, state[:, None]
        for step in range(h.shape[1]):
            before = state
            state = layer.decay * state + (1.0 - layer.decay) * put[:, step]
            states[:, step] = state
        for fault in self._of("memory"):
            hit = fault.reach.tokens[batch, handover.start]
            if handover.layer in fault.reach.layers and hit.any():
                blind = np.arange(1, min(fault.change(handover), h.shape[1]) + 1)[:, None]
                states[hit, : len(blind)] -= (layer.decay**blind * past)[hit]
        return self.arithmetic.dot(states, layer.out), state, before, put[:, -1]

    def _experts(
        self,
        at: int,
        h: np.ndarray,
        batch: np.ndarray,
        step: tuple[int, int],
        history: np.ndarray,
        below: list[np.ndarray],
    ) -> np.ndarray:
        """H plus what the experts give that the router chooses."""
        start, stop = step
        rows = (batch, slice(start, stop))
        load = self._marks("load", at, rows).ravel()
        gained = unit(h)
        for mark in np.unique(load):
            chosen = (load == mark).reshape(gained.shape[:2])
            gained[chosen] *= self._tensors(at, int(mark)).gain
        x = self.arithmetic.kept(gained)
        history[:, start:stop] = x
        gain = self.model.routers[at].gain
        reading = Reading(at, start, batch, x, history[:, :stop], tuple(below), gain)
        below.append(x)
        read = x
        for fault in self._of("input"):
            hit = fault.reach.tokens[rows]
            if at in fault.reach.layers and hit.any():
                read = np.where(hit[:, :, None], fault.change(reading), read)
        flat = read.reshape(-1, read.shape[-1])
        logits, choice = self._route(at, flat, load, self._marks("rule", at, rows).ravel())
        for fault in self._of("dispatch"):
            if at in fault.reach.layers:
                choice = fault.change(logits, choice)
        k = self.model.rule.top_k
        self.read[at][rows] = read
        self.logits[at][rows] = logits.reshape(*h.shape[:2], -1)
        self.chosen[at][rows] = choice.chosen[:, :k].reshape(*h.shape[:2], k)
        self.weights[at][rows] = choice.weights[:, :k].reshape(*h.shape[:2], k)
        layer, x = self.model.layers[at], x.reshape(flat.shape)
        gives = self._run_experts(layer, x, choice)
        for fault in self._of("experts"):
            hit = fault.reach.tokens[rows].reshape(-1, 1)
            if at in fault.reach.layers and hit.any():
                running = Running(layer, x, logits, choice, len(h), self._run_experts)
                gives = np.where(hit, fault.change(running), gives)
        return self.arithmetic.kept(h + gives.reshape(h.shape))

    def _marks(self, stage: Stage, at: int, rows: tuple[Any, Any]) -> np.ndarray:
        """Which faults of a stage act on each token, one bit each."""
        marks = np.zeros(self.text.token_id[rows].shape, np.int64)
        for bit, fault in enumerate(self._of(stage)):
            if at in fault.reach.layers:
                marks |= fault.reach.tokens[rows].astype(np.int64) << bit
        return marks

    def _tensors(self, at: int, mark: int) -> models.RouterTensors:
        if (at, mark) not in self.loaded:
            tensors = self.model.routers[at]
            for bit, fault in enumerate(self._of("load")):
                if mark >> bit & 1:
                    tensors = _in_rows(tensors, fault.change(at, tensors), fault.reach.experts)
            self.loaded[at, mark] = tensors
        return self.loaded[at, mark]

    def _rule(self, mark: int) -> models.Rule:
        rule = self.model.rule
        for bit, fault in enumerate(self._of("rule")):
            if mark >> bit & 1:
                rule = fault.change(rule)
        return rule

    def _route(
        self, at: int, x: np.ndarray, load: np.ndarray, ruled: np.ndarray
    ) -> tuple[np.ndarray, models.Choice]:
        """Logits and choice of all tokens of a step; those under one fault are routed together."""
        rules = {int(mark): self._rule(int(mark)) for mark in np.unique(ruled)}
        run = max(max(rule.num_run or 0, rule.top_k) for rule in rules.values())
        experts = self.model.shape.experts
        logits = np.zeros((len(x), experts), np.float32)
        selection = np.zeros((len(x), experts))
        chosen = np.zeros((len(x), run), np.int32)
        weights = np.zeros((len(x), run), np.float32)
        for pair in {(int(a), int(b)) for a, b in zip(load, ruled, strict=True)}:
            some = (load == pair[0]) & (ruled == pair[1])
            tensors, rule = self._tensors(at, pair[0]), rules[pair[1]]
            if rule.sums_of:
                z = models.summed_in_bf16(x[some], tensors.weight, rule.sums_of)
            else:
                z = self.arithmetic.logits(x[some], tensors.weight)
            if rule.bias == "logit" and tensors.bias is not None:
                z = z + tensors.bias
            choice = models.choose(z, tensors.bias, rule)
            width = choice.chosen.shape[1]
            logits[some], selection[some] = z, choice.selection
            chosen[some, :width], weights[some, :width] = choice.chosen, choice.weights
        return logits, models.Choice(chosen, weights, selection)

    def _run_experts(self, layer: models.Layer, x: np.ndarray, choice: models.Choice) -> np.ndarray:
        """sum_i w_i down_i relu(up_i x)^2, tokens of one expert together, and the shared expert."""
        width = choice.chosen.shape[1]
        order = np.argsort(choice.chosen, axis=None, kind="stable")
        starts = np.searchsorted(choice.chosen.ravel()[order], np.arange(len(layer.up) + 1))
        gives = np.zeros_like(x)
        for expert in range(len(layer.up)):
            pairs = order[starts[expert] : starts[expert + 1]]
            # slots that are named and not run; one of them may name an expert of another slot
            pairs = pairs[choice.weights.ravel()[pairs] != 0.0]
            if len(pairs):
                token = pairs // width
                inner = self._activated(x[token], layer.up[expert])
                weight = choice.weights.ravel()[pairs, None]
                gives[token] += weight * self.arithmetic.dot(inner, layer.down[expert])
        if layer.shared_up is not None and layer.shared_down is not None:
            gives += self.arithmetic.dot(self._activated(x, layer.shared_up), layer.shared_down)
        return gives

    def _activated(self, x: np.ndarray, up: np.ndarray) -> np.ndarray:
        return self.arithmetic.kept(np.maximum(self.arithmetic.dot(x, up), 0.0))


def _where_reached(reach: Reach, changed: Trace, trace: Trace) -> Trace:
    chosen, weights = trace.chosen.copy(), trace.weights.copy()
    for layer in reach.layers:
        chosen[layer][reach.tokens] = changed.chosen[layer][reach.tokens]
        weights[layer][reach.tokens] = changed.weights[layer][reach.tokens]
    return Trace(chosen, weights, trace.text, trace.batches)


def _in_rows(
    before: models.RouterTensors, after: models.RouterTensors, experts: np.ndarray | None
) -> models.RouterTensors:
    if experts is None:
        return after
    weight = before.weight.copy()
    weight[experts] = after.weight[experts]
    bias = before.bias
    if bias is not None and after.bias is not None:
        bias = bias.copy()
        bias[experts] = after.bias[experts]
    return models.RouterTensors(weight, bias, after.gain)
