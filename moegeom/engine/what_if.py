"""What-ifs on the road of a scan: fitted to a sample, then tried on every batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.core.errors import NonFiniteError, RouterRuleError
from moegeom.core.tokens import TILE
from moegeom.engine.batch import LazyBatch
from moegeom.engine.flipping import engine_logits
from moegeom.engine.prepared import prepare, unavailable
from moegeom.engine.recorded import Known, recorded_logits
from moegeom.engine.task import MadeWhatIf, Task
from moegeom.geometry.noise import swapped_pairs
from moegeom.geometry.number_formats import rounded_to
from moegeom.geometry.whatif.moved import dense_weights, same_sets, weight_distance
from moegeom.kernels.batch import Flip, TokenBatch
from moegeom.kernels.reduction import REDUCTIONS
from moegeom.tokens.stages import INPUT_STAGES
from moegeom.variants.arithmetic import Arithmetic
from moegeom.variants.emulated import emulate
from moegeom.variants.what_if import AskedWhatIf, FitSample, FittedGate

#: Quantities of a batch that are labels of its tokens, whatever is chosen.
_LABELS = ("token", "population", "block", "document", "position", "token_id")

#: What every choice comes with.
_OF_CHOICE = ("chosen", "weights", "flip")

#: What a kind may look at, beside labels; of these an input needs a recording that holds it.
_SEEN = ("logits", "mapped", "selection", "scores", "chosen", "weights", "margin", "input")

#: Quantities of inputs alone, of recorded facts, or that cost more than a what-if is worth.
_OF_STORED = frozenset(
    [
        *("input", "direction", "angle", "rounding_sigmas", "noise", "noise_scale", "input_norm"),
        *("float_bound", "matches_recording", "order_distance", "fill_decides", "capacity"),
        *("shared_output", "routed_output", "expert_output"),
    ]
)


# ---------------------------------------------------------------------------------------- the fit
def read_sample(task: Task, tiles: Sequence[int], batch: int) -> FitSample:
    """The tokens of some tiles, with what a kind may look at, in memory."""
    last = task.source.facts.num_tokens
    parts = [LazyBatch(task, tile * TILE, min((tile + 1) * TILE, last)) for tile in tiles]
    names = [n for n in (*_LABELS, *_SEEN) if getattr(parts[0], n) is not None]
    known = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return FitSample(TokenBatch(**known), task.kernels, batch, task.seed)


def make_what_if(asked: AskedWhatIf, task: Task, sample: FitSample) -> MadeWhatIf:
    """The what-if for the router of the task, fitted to the sample.

    Raises
    ------
    RouterRuleError
        Where it means nothing for the rule, or needs what the recording does not hold.
    """
    router, facts = task.prepared.router, task.source.facts
    for need in asked.kind.needs:
        if getattr(sample.tokens, need) is None:
            why = task.absent.get(need, f"needs '{need}', which {facts.name} does not hold")
            raise RouterRuleError(f"{asked.name}: router {router.name}: {why}.")
    if not len(sample.tokens.token):
        raise RouterRuleError(
            f"{asked.name}: router {router.name}: no token that it could be fitted to is finite."
        )
    gate = asked.kind.make(router, asked.values, sample)
    _need_its_logits(asked, gate, task)
    figures = dict(gate.reached) | ({} if gate.measure is None else dict(gate.measure(sample)))
    absent = dict.fromkeys(_OF_STORED, "measured of the router as stored alone")
    if gate.router is not None:
        other = prepare(gate.router)
        return MadeWhatIf(
            name=asked.name,
            gate=gate,
            router=gate.router,
            other=other,
            batch=sample.batch,
            given=frozenset(),
            absent=unavailable(gate.router, facts) | absent,
            figures=figures,
            num_sampled=len(sample.tokens.token),
        )
    assert gate.choose is not None
    first = next(batches_of(sample.tokens, sample.batch))
    pick = router.rule.pick if gate.has_fixed_size else "varying"
    return MadeWhatIf(
        name=asked.name,
        gate=gate,
        router=dataclasses.replace(router, rule=dataclasses.replace(router.rule, pick=pick)),
        other=None,
        batch=sample.batch,
        given=frozenset(gate.choose(first).quantities),
        absent=absent | dict(gate.absent),
        figures=figures,
        num_sampled=len(sample.tokens.token),
    )


def _need_its_logits(asked: AskedWhatIf, gate: FittedGate, task: Task) -> None:
    """Raises RouterRuleError for a router with other rows where no inputs are recorded."""
    router = task.prepared.router
    if gate.router is None or task.source.facts.stage in INPUT_STAGES:
        return
    if not np.array_equal(gate.router.weight, router.weight):
        raise RouterRuleError(
            f"{asked.name}: router {router.name}: other rows need recorded router inputs; "
            f"{task.source.facts.name} holds {task.source.facts.stage}."
        )


def why_missing(made: MadeWhatIf, reduction: str) -> str:
    """Why a reduction cannot be had of a what-if; empty where it can."""
    for need in REDUCTIONS[reduction].needs:
        if need == "num_chosen" and made.router.rule.num_chosen is not None:
            return "every token chooses as many experts"
        if need == "selection" and made.router.rule.num_chosen is None:
            return "no k-th expert has a border where sets differ in size"
        if need in (*_LABELS, *_OF_CHOICE, "num_chosen") or need in made.given:
            continue
        if made.other is None or need in made.absent:
            return made.absent.get(need, f"not defined for {made.name.partition(':')[0]}")
    return ""


# ------------------------------------------------------------------------------------------ batches
def take(tokens: TokenBatch, rows: Int64[np.ndarray, "rows"]) -> TokenBatch:
    """Some rows of a batch whose quantities are all known."""
    return TokenBatch(**{name: values[rows] for name, values in vars(tokens).items()})


def batches_of(tokens: TokenBatch, size: int) -> Iterator[TokenBatch]:
    """Tokens of known quantities, ``size`` neighbours of the stream at a time."""
    number = tokens.token // size
    borders = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(number)]
    for start, stop in pairwise(borders):
        yield take(tokens, np.arange(start, stop))


def what_if_batch(task: Task, start: int, stop: int, known: Known | None = None) -> TokenBatch:
    """Tokens ``[start, stop)`` as the what-if of the task chooses, beside the router as stored."""
    made, base = task.what_if, LazyBatch(task.as_stored, start, stop, known)
    assert made is not None, "the task has one"
    batch: TokenBatch
    if made.other is not None:
        batch = other_batch(task, start, stop)
        if not np.array_equal(batch.token, base.token):
            raise NonFiniteError(
                f"{made.name}: other tokens than at the router as stored are not finite."
            )
    else:
        batch = chosen_batch(made, base)
    vars(batch).update(flip=_flip(made, base, batch), non_finite=base.non_finite)
    return batch


def other_batch(task: Task, start: int, stop: int) -> LazyBatch:
    """Tokens ``[start, stop)`` at the router that the what-if of the task is.

    Recorded logits hold the bias of the router as stored: that of the other takes its place.
    """
    if task.source.facts.stage in INPUT_STAGES:
        return LazyBatch(task.by_other, start, stop)
    known = recorded_logits(task.by_other, start, stop)
    before, after = (
        0.0 if router.logit_bias is None else router.logit_bias.astype(np.float64)
        for router in (task.prepared.router, task.by_other.prepared.router)
    )
    if not np.array_equal(before, after):
        moved = (known.logits + (after - before)).astype(known.logits.dtype)
        known = dataclasses.replace(known, logits=moved)
    return LazyBatch(task.by_other, start, stop, known)


def chosen_batch(made: MadeWhatIf, base: TokenBatch) -> TokenBatch:
    """What a what-if that is no router chooses for a batch of the router as stored."""
    choose, names = made.gate.choose, [n for n in (*_LABELS, *_SEEN) if _is_known(base, n)]
    assert choose is not None
    tokens = TokenBatch(**{name: getattr(base, name) for name in names})
    if made.gate.is_token_local or not len(base.token):
        choices = [choose(tokens)]
    else:
        choices = [choose(part) for part in batches_of(tokens, made.batch)]
    chosen, weights = (
        np.concatenate(
            [_widened(getattr(choice, name), made.router.num_slots, fill) for choice in choices]
        )
        for name, fill in (("chosen", -1), ("weights", 0.0))
    )
    quantities = {
        name: np.concatenate([choice.quantities[name] for choice in choices]) for name in made.given
    }
    labels = {name: getattr(base, name) for name in _LABELS if _is_known(base, name)}
    sizes = (chosen >= 0).sum(axis=1, dtype=np.int32)
    batch = TokenBatch(**labels, chosen=chosen, weights=weights, **quantities)
    if made.router.rule.num_chosen is None:
        vars(batch)["num_chosen"] = sizes
    return batch


def _is_known(batch: TokenBatch, name: str) -> bool:
    return getattr(batch, name) is not None


def _widened(values: np.ndarray, slots: int, fill: float) -> np.ndarray:
    missing = slots - values.shape[1]
    if missing < 0:  # slots that no token of the batch takes
        assert (values[:, slots:] == fill).all()
        return values[:, :slots]
    return np.pad(values, ((0, 0), (0, missing)), constant_values=fill)


def _flip(made: MadeWhatIf, base: TokenBatch, batch: TokenBatch) -> Flip:
    """What the what-if changes about the choice of the router as stored."""
    experts = made.router.num_experts
    assert base.weights is not None and batch.weights is not None
    differs = ~same_sets(base.chosen, batch.chosen)
    moved = weight_distance(
        dense_weights(base.chosen, base.weights, experts),
        dense_weights(batch.chosen, batch.weights, experts),
    )
    swaps = np.empty((0, 3), np.int32)
    row = np.flatnonzero(differs)
    if base.chosen.shape == batch.chosen.shape and made.router.rule.num_chosen is not None:
        swaps = swapped_pairs(base.chosen[row], batch.chosen[row])
        swaps[:, 0] = row[swaps[:, 0]]
    return Flip(differs, differs, differs, moved, swaps)


# ------------------------------------------------------------------------------------- arithmetics
def moved_under(
    made: MadeWhatIf, task: Task, arithmetic: Arithmetic, tiles: Sequence[int]
) -> dict[str, float]:
    """How much routing weight an arithmetic moves: of the router as stored, and of the what-if.

    Mean over the tokens of ``tiles``, whose inputs are recorded. Logits are those of the engine,
    rounded as its output is; what follows from them is computed exactly for both.
    """
    router, last = task.prepared.router, task.source.facts.num_tokens
    by_other = None if made.other is None else dataclasses.replace(task, prepared=made.other)
    moved = []
    for tile in tiles:
        start, stop = tile * TILE, min((tile + 1) * TILE, last)
        stored = _exact_and_rounded(task, arithmetic, start, stop)
        if by_other is None:
            tried = tuple(chosen_batch(made, batch) for batch in stored)
        else:
            tried = _exact_and_rounded(by_other, arithmetic, start, stop)
        dense = [[_dense(batch, router.num_experts) for batch in pair] for pair in (stored, tried)]
        moved.append(np.stack([weight_distance(*pair) for pair in dense]))
    as_stored, what_if = np.concatenate(moved, axis=1).mean(axis=1).tolist()
    name = arithmetic.name
    return {f"weight_moved_by_{name}_as_stored": as_stored, f"weight_moved_by_{name}": what_if}


def _exact_and_rounded(
    task: Task, arithmetic: Arithmetic, start: int, stop: int
) -> tuple[TokenBatch, TokenBatch]:
    """Tokens ``[start, stop)`` at the router of a task, with its logits and those of an engine.

    Raises
    ------
    NonFiniteError
        Where the engine has logits that are not finite.
    """
    router = task.prepared.router
    emulated = emulate(router, arithmetic)
    known = recorded_logits(task, start, stop)
    assert known.values is not None
    with np.errstate(over="ignore", invalid="ignore"):
        logits = engine_logits(emulated, emulated.inputs(known.values))
        rounded = rounded_to(logits, emulated.arithmetic.output)
        if router.rule.is_affine and router.selection_bias is not None:
            rounded = rounded + router.selection_bias
    exact = LazyBatch(task, start, stop, known)
    beside = LazyBatch(task, start, stop, dataclasses.replace(known, logits=rounded))
    if not np.array_equal(exact.token, beside.token):
        raise NonFiniteError(
            f"router {router.name}: logits of some tokens are not finite under {arithmetic.name}.",
            "Leave that arithmetic out.",
        )
    return exact, beside


def _dense(batch: TokenBatch, experts: int) -> Float64[np.ndarray, "tokens experts"]:
    assert batch.weights is not None
    return dense_weights(batch.chosen, batch.weights, experts)
