"""What-ifs on the road of a scan: fitted to a sample, then tried on every batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from moegeom.core.errors import NonFiniteError, RouterRuleError
from moegeom.core.shapes import Float64
from moegeom.core.tokens import TILE
from moegeom.engine.batch import LazyBatch
from moegeom.engine.choice import recorded_logits
from moegeom.engine.flipping import engine_logits, swaps_of
from moegeom.engine.prepared import NO_BORDER, prepare, unavailable
from moegeom.engine.task import MadeWhatIf, Task
from moegeom.geometry.number_formats import rounded_to
from moegeom.geometry.whatif import dense_weights, same_sets, weight_distance
from moegeom.kernels.batch import Flip, TokenBatch
from moegeom.kernels.reduction import REDUCTIONS
from moegeom.tokens.stages import INPUT_STAGES
from moegeom.variants.emulated import Arithmetic, Emulated, emulate
from moegeom.variants.what_if import AskedWhatIf, FitSample, FittedGate

#: Quantities of a batch that are labels of its tokens, whatever is chosen.
_LABELS = ("token", "population", "block", "document", "position")

#: What every choice comes with.
_OF_CHOICE = ("chosen", "weights", "flip")

#: What a kind may look at, beside labels; of these an input needs a recording that holds it.
_SEEN = ("logits", "mapped", "selection", "scores", "chosen", "weights", "margin", "input")

#: Quantities of inputs alone, of recorded facts, or that cost more than a what-if is worth.
_OF_STORED = frozenset(
    [
        *("input", "direction", "angle", "rounding_sigmas", "noise", "noise_scale", "input_norm"),
        *("float_bound", "matches_recording", "fill_decides"),
        "weight_sum",
        *("shared_output", "routed_output", "expert_output"),
    ]
)


# ---------------------------------------------------------------------------------------- the fit
def read_sample(task: Task, tiles: Sequence[int], batch: int) -> FitSample:
    """The tokens of some tiles, with what a kind may look at, in memory."""
    last = task.source.facts.num_tokens
    parts = [LazyBatch(task, tile * TILE, min((tile + 1) * TILE, last)) for tile in tiles]
    names = [n for n in (*_LABELS, *_SEEN) if getattr(parts[0], n) is not None]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return FitSample(TokenBatch(**columns), task.kernels, batch, task.options.seed)


def make_what_if(request: AskedWhatIf, task: Task, sample: FitSample) -> MadeWhatIf:
    """The what-if for the router of the task, fitted to the sample.

    Raises
    ------
    RouterRuleError
        Where it means nothing for the rule, or needs what the recording does not hold.
    """
    router, facts = task.prepared.router, task.source.facts
    for need in request.kind.needs:
        if getattr(sample.tokens, need) is None:
            why = task.absent.get(need, f"needs '{need}', which {facts.name} does not hold")
            raise RouterRuleError(f"{request.name}: router {router.name}: {why}.")
    if not len(sample.tokens.token):
        raise RouterRuleError(
            f"{request.name}: router {router.name}: no token that it could be fitted to is finite."
        )
    gate = request.kind.make(router, request.values, sample)
    _need_its_logits(request, gate, task)
    figures = dict(gate.reached) | ({} if gate.measure is None else dict(gate.measure(sample)))
    of_stored = dict.fromkeys(_OF_STORED, "measured of the router as stored alone")
    if gate.router is not None:
        new_router, names = gate.router, frozenset[str]()
        absent = unavailable(new_router, facts) | of_stored
    else:
        assert gate.choose is not None, "a gate is a router, or chooses"
        pick = router.rule.pick if gate.has_fixed_size else "varying"
        new_router = dataclasses.replace(router, rule=dataclasses.replace(router.rule, pick=pick))
        names = frozenset(gate.choose(next(batches_of(sample.tokens, sample.batch))).quantities)
        absent = of_stored | dict(gate.absent)
    if new_router.rule.num_chosen is None:
        names, absent = names - {"selection"}, absent | {"selection": NO_BORDER}
    else:
        absent |= {"num_chosen": "every token chooses as many experts"}
    return MadeWhatIf(
        name=request.name,
        gate=gate,
        router=new_router,
        other=None if gate.router is None else prepare(gate.router),
        batch=sample.batch,
        quantities=names,
        absent=absent,
        figures=figures,
        num_sampled=len(sample.tokens.token),
    )


def _need_its_logits(request: AskedWhatIf, gate: FittedGate, task: Task) -> None:
    """Raises RouterRuleError for a router with other rows where no inputs are recorded."""
    router = task.prepared.router
    if gate.router is None or task.source.facts.stage in INPUT_STAGES:
        return
    if not np.array_equal(gate.router.weight, router.weight):
        raise RouterRuleError(
            f"{request.name}: router {router.name}: other rows need recorded router inputs; "
            f"{task.source.facts.name} holds {task.source.facts.stage}."
        )


def why_missing(made: MadeWhatIf, reduction: str) -> str:
    """Why a reduction cannot be had of a what-if; empty where it can."""
    for need in REDUCTIONS[reduction].needs:
        if need in (*_LABELS, *_OF_CHOICE) or need in made.quantities:
            continue
        if need in made.absent:
            return made.absent[need]
        if made.other is None and need != "num_chosen":
            return f"not defined for {made.name.partition(':')[0]}"
    return ""


# ------------------------------------------------------------------------------------------ batches
def batches_of(tokens: TokenBatch, size: int) -> Iterator[TokenBatch]:
    """Tokens of known quantities, ``size`` neighbours of the stream at a time."""
    number = tokens.token // size
    borders = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(number)]
    for start, stop in pairwise(borders):
        yield TokenBatch(**{name: values[start:stop] for name, values in vars(tokens).items()})


def what_if_batch(task: Task, start: int, stop: int) -> TokenBatch:
    """Tokens ``[start, stop)`` as the what-if of the task chooses, beside the router as stored."""
    made, base = task.what_if, LazyBatch(task.as_stored, start, stop)
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
    record = recorded_logits(task.by_other, start, stop)
    before, after = (
        0.0 if router.logit_bias is None else router.logit_bias.astype(np.float64)
        for router in (task.prepared.router, task.by_other.prepared.router)
    )
    if not np.array_equal(before, after):
        moved = (record.logits + (after - before)).astype(record.logits.dtype)
        record = dataclasses.replace(record, logits=moved)
    return LazyBatch(task.by_other, start, stop, record)


def chosen_batch(made: MadeWhatIf, base: TokenBatch) -> TokenBatch:
    """What a what-if that is no router chooses for a batch of the router as stored."""
    choose = made.gate.choose
    names = [name for name in (*_LABELS, *_SEEN) if getattr(base, name) is not None]
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
        name: np.concatenate([one.quantities[name] for one in choices]) for name in made.quantities
    }
    if made.router.rule.num_chosen is None:
        quantities["num_chosen"] = (chosen >= 0).sum(axis=1, dtype=np.int32)
    labels = {name: getattr(tokens, name) for name in _LABELS if name in names}
    return TokenBatch(**labels, chosen=chosen, weights=weights, **quantities)


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
    if base.chosen.shape == batch.chosen.shape and made.router.rule.num_chosen is not None:
        swaps = swaps_of(base.chosen, batch.chosen, np.flatnonzero(differs))
    return Flip(differs, differs, differs, moved, swaps)


# ------------------------------------------------------------------------------------- arithmetics
def moved_under(
    made: Sequence[MadeWhatIf], task: Task, arithmetic: Arithmetic, tiles: Sequence[int]
) -> list[dict[str, float]]:
    """How much routing weight an arithmetic moves: of the router as stored, and of each what-if.

    Mean over the tokens of ``tiles``, whose inputs are recorded. Logits are those of the engine,
    rounded as its output is; what follows from them is computed exactly for both.

    Raises
    ------
    NonFiniteError
        Where the engine has logits that are not finite.
    """
    router, last = task.prepared.router, task.source.facts.num_tokens
    tasks = {
        one.name: dataclasses.replace(task, prepared=one.other)
        for one in made
        if one.other is not None
    }
    emulated = {name: emulate(by.prepared.router, arithmetic) for name, by in tasks.items()}
    of_stored, moved = emulate(router, arithmetic), []
    for tile in tiles:
        start, stop = tile * TILE, min((tile + 1) * TILE, last)
        stored = _exact_and_rounded(task, of_stored, start, stop)
        tried = [
            _exact_and_rounded(tasks[one.name], emulated[one.name], start, stop)
            if one.name in tasks
            else [chosen_batch(one, batch) for batch in stored]
            for one in made
        ]
        dense = ([_dense(batch, router.num_experts) for batch in pair] for pair in (stored, *tried))
        moved.append(np.stack([weight_distance(*pair) for pair in dense]))
    as_stored, *each = np.concatenate(moved, axis=1).mean(axis=1).tolist()
    names = f"weight_moved_by_{arithmetic.name}_as_stored", f"weight_moved_by_{arithmetic.name}"
    return [dict(zip(names, (as_stored, what_if), strict=True)) for what_if in each]


def _exact_and_rounded(
    task: Task, emulated: Emulated, start: int, stop: int
) -> tuple[TokenBatch, TokenBatch]:
    """Tokens ``[start, stop)`` at the router of a task, with its logits and those of an engine.

    Raises
    ------
    NonFiniteError
        Where the engine has logits that are not finite.
    """
    router = task.prepared.router
    record = recorded_logits(task, start, stop)
    assert record.values is not None
    with np.errstate(over="ignore", invalid="ignore"):
        logits = engine_logits(emulated, emulated.inputs(record.values))
        rounded = rounded_to(logits, emulated.arithmetic.output)
        if router.rule.is_affine and router.selection_bias is not None:
            rounded = rounded + router.selection_bias
    exact = LazyBatch(task, start, stop, record)
    beside = LazyBatch(task, start, stop, dataclasses.replace(record, logits=rounded))
    if not np.array_equal(exact.token, beside.token):
        raise NonFiniteError(
            f"router {router.name}: logits of some tokens are not finite under "
            f"{emulated.arithmetic.name}.",
            "Leave that arithmetic out.",
        )
    return exact, beside


def _dense(batch: TokenBatch, experts: int) -> Float64[np.ndarray, "tokens experts"]:
    assert batch.weights is not None
    return dense_weights(batch.chosen, batch.weights, experts)
