"""What the rule makes of logits: other biases, scores, groups, caps, ties."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Float64, Int64
from moegeom.core.text import number_of
from moegeom.engine.choice import group_masked
from moegeom.geometry.selection import group_scores, kept_groups, top_k
from moegeom.geometry.set_code import chosen_mask, log2_sets, set_distances
from moegeom.router.edits import BIASES
from moegeom.studies.faults.operator import AS_STORED, Proposal, Site, operator, routed
from moegeom.studies.faults.scope import listed
from moegeom.variants.emulated import emulate

#: Bits that say one fitted bias, and the share of B's sets that they give on its own inputs.
_BITS_PER_BIAS, _FITTED_MEETS = 10.0, 0.98


def _biases(site: Site) -> Iterator[tuple[str, str, np.ndarray]]:
    """The biases that the router has, by the name of their field, in words."""
    for words, kind in BIASES.items():
        own = getattr(site.router, kind)
        if own is not None and own.any():
            yield kind, words, own


@operator
def bias_cast(site: Site) -> Iterator[Proposal]:
    """Biases in a coarser format, or their sum with the scores."""
    cause, router = "bias rounded", site.router
    for kind, words, _ in _biases(site):
        is_of_logits = kind == "logit_bias"
        for form, word in (("bfloat16", "bf16"), ("float16", "fp16")):
            how = dataclasses.replace(AS_STORED, bias=form)
            yield from routed(
                site, f"bias_{word}", f"{words} cast to {word}", cause, router, how,
                needs_inputs=is_of_logits, only_stores=True, bits=1.6,
            )  # fmt: skip
        if not is_of_logits:
            how = dataclasses.replace(AS_STORED, bias="bfloat16", selection="bfloat16")
            name, text = "selection_bf16", "score + bias added up in bf16"
            yield from routed(site, name, text, cause, router, how, needs_inputs=False, bits=1.6)


@operator
def bias_scaled(site: Site) -> Iterator[Proposal]:
    """Biases times a factor, one of the usual ones or that which fits B's choices best."""
    for kind, words, own in _biases(site):
        factors = dict.fromkeys((0.5, 0.9, 1.5, 2.0, 10.0), 3.0)
        for change in site.fitted_biases.values():
            moved, base = change - np.median(change), own - np.median(own)
            if base.any():
                factors.setdefault(
                    round(1.0 + float(moved @ base / (base @ base)), 2), _BITS_PER_BIAS
                )
        for factor, bits in factors.items():
            edited = dataclasses.replace(site.router, **{kind: own * own.dtype.type(factor)})
            name, text = f"bias_times_{factor:g}", f"{words} times {factor:g}"
            yield from routed(
                site, name, text, "bias differs", edited,
                needs_inputs=kind == "logit_bias", bits=bits,
            )  # fmt: skip


@operator
def bias_fitted(site: Site) -> Iterator[Proposal]:
    """A free bias, fitted to all tokens or to those that differ; every number costs bits.

    Added to the bias that the router has; to its scores if it has none. So many numbers mend nearly
    any smooth change: where B's own inputs are routed, they have to give nearly all of its sets.
    """
    if not site.has_logits:
        return
    bits, cause = _BITS_PER_BIAS * site.scores.shape[1], "experts favoured otherwise"
    text = "a number added to each expert's score, fitted to B's choices"
    least_met = _FITTED_MEETS if site.is_of_b else 0.0
    for name, change in site.fitted_biases.items():
        if not np.abs(change).max() > 0.0:
            continue
        for kind, _, own in _biases(site):
            if kind == "selection_bias" or site.has_inputs:
                edited = dataclasses.replace(site.router, **{kind: own + change.astype(own.dtype)})
                how = {"needs_inputs": kind == "logit_bias", "own_bits": bits}
                biased = "another bias for each expert, fitted to B's choices"
                for one in routed(site, name, biased, "bias differs", edited, **how):
                    yield dataclasses.replace(one, least_met=least_met)
                break
        else:

            def scores(there: Site, rows: np.ndarray, change: np.ndarray = change) -> np.ndarray:
                moved = there.scores[rows] + change.astype(there.scores.dtype)
                return group_masked(there.router.rule, moved, there.kernels)[0]

            yield Proposal(name, text, cause, own_bits=bits, scores=scores, least_met=least_met)


@operator
def leaning(site: Site) -> Iterator[Proposal]:
    """Scores that lean to low or high numbers: a tie-break by number that outgrew the ties."""
    if not site.has_logits:
        return
    experts = site.selection.shape[1]
    number = np.arange(experts)
    spacing = set_distances(site.selection, site.theirs).spacing
    for power in range(-16, 1, 2):
        for sign, word in ((-1.0, "low"), (1.0, "high")):
            lean = sign * spacing * 2.0**power * number

            def scores(there: Site, rows: np.ndarray, lean: np.ndarray = lean) -> np.ndarray:
                return there.selection[rows].astype(np.float64) + lean

            name = f"leaning_{word}_{power}"
            text = f"scores that lean to {word} numbers, by {abs(lean[1]):.1g} each"
            yield Proposal(name, text, "ties broken by number", 4.0, scores=scores)


@operator
def ties(site: Site) -> Iterator[Proposal]:
    """Another tie-break for equal scores than A's; equal rows have equal scores."""
    if not site.has_logits:
        return
    kinds = [site.router.weight, *(bias[:, None] for _, _, bias in _biases(site))]
    _, first, group = np.unique(np.hstack(kinds), axis=0, return_index=True, return_inverse=True)
    same = first[group.ravel()]

    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        return there.selection[rows[:, None], same]

    for way in ("lowest", "highest"):
        name, text = f"ties_{way}", f"equal scores go to the {way} numbers"
        yield Proposal(name, text, "ties broken by number", 1.0, scores=scores, ties=(way,))


@operator
def groups_otherwise(site: Site) -> Iterator[Proposal]:
    """Groups of every G-th expert instead of runs, and groups that are chosen without the bias."""
    rule, groups = site.router.rule, site.router.rule.groups
    if groups is None or not site.has_logits:
        return
    experts = len(site.matching)
    order = np.arange(experts).reshape(-1, groups.num_groups).T.ravel()
    place = np.argsort(order)

    def in_turn(there: Site, rows: np.ndarray) -> np.ndarray:
        mixed = np.ascontiguousarray(there.scores[rows][:, order])
        return group_masked(rule, mixed, there.kernels)[0][:, place]

    number = groups.num_groups
    text = f"expert e in group e modulo {number} instead of e divided by {experts // number}"
    yield Proposal("groups_in_turn", text, "rule differs", 2.0, scores=in_turn)
    if site.router.selection_bias is None:
        return
    plain = emulate(dataclasses.replace(site.router, selection_bias=None), AS_STORED)

    def unbiased(there: Site, rows: np.ndarray) -> np.ndarray:
        scores = plain.compared(there.logits[rows])
        best = kept_groups(group_scores(scores, groups), groups.num_kept)
        is_allowed = np.repeat(best, experts // number, axis=1)
        return np.where(is_allowed, there.scores[rows], groups.fill)

    text = "groups chosen by scores without the bias"
    yield Proposal("groups_unbiased", text, "rule differs", 2.0, scores=unbiased)


@operator
def groups_of_another(site: Site) -> Iterator[Proposal]:
    """The best experts of other groups than A's, whatever chose these; to say which costs bits."""
    groups = site.router.rule.groups
    if groups is None or not site.has_logits:
        return
    size = len(site.matching) // groups.num_groups
    is_theirs, is_mine = (
        chosen_mask(sets // size, groups.num_groups) for sets in (site.theirs, site.mine)
    )
    others = int((is_theirs & ~is_mine).any(axis=1).sum())
    if others < _OTHERS * len(is_theirs):
        return  # noise changes a group now and then

    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        is_open = np.repeat(is_theirs[rows], size, axis=1)
        return np.where(is_open, there.scores[rows], -np.inf)

    text = "the best experts of other groups than those with the best scores"
    yield Proposal(
        "groups_of_another", text, "rule differs", scores=scores, is_estimate=True,
        least_met=_FITTED_MEETS,
        own_bits=others * log2_sets(groups.num_groups, groups.num_kept),
    )  # fmt: skip


@operator
def scores_as_shares(site: Site) -> Iterator[Proposal]:
    """A bias is added to scores that were made to sum to 1 first."""
    rule, bias = site.router.rule, site.router.selection_bias
    if not site.has_logits or bias is None or not bias.any() or rule.score == "softmax":
        return
    plain = emulate(dataclasses.replace(site.router, selection_bias=None), AS_STORED)

    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        own = plain.compared(there.logits[rows])
        total = own.sum(axis=1, keepdims=True)
        shares = np.divide(own, total, out=np.zeros_like(own), where=total > 0.0)
        return group_masked(rule, shares + bias.astype(own.dtype), there.kernels)[0]

    text = f"{rule.score} scores divided by their sum before the bias is added"
    yield Proposal("shares", text, "rule differs", 2.0, scores=scores)


@operator
def never_chosen(site: Site) -> Iterator[Proposal]:
    """Experts that A chooses and B never does, of all tokens or of those that differ."""
    if not site.has_logits:
        return
    experts, unlike = len(site.matching), []
    for some in (np.ones(len(site.theirs), bool), site.differs):
        mine, theirs = (
            np.bincount(sets[some].ravel(), minlength=experts) for sets in (site.mine, site.theirs)
        )
        lost = np.flatnonzero((mine >= _OFTEN) & (theirs == 0))
        if not len(lost) or any(np.array_equal(lost, other) for other in unlike):
            continue
        unlike.append(lost)

        def scores(there: Site, rows: np.ndarray, lost: np.ndarray = lost) -> np.ndarray:
            own = there.selection[rows].copy()
            own[:, lost] = -np.inf
            return own

        text = f"experts {listed(lost)} are never chosen"
        yield Proposal(
            text, text, "experts favoured otherwise", 8.0, log2_sets(experts, len(lost)),
            scores=scores, least_met=_FITTED_MEETS,
        )  # fmt: skip


#: Tokens for which A chooses an expert that B never does; share of those with another group.
_OFTEN, _OTHERS = 20, 0.05


@operator
def batch_scores(site: Site) -> Iterator[Proposal]:
    """Scores that are compared among the tokens of a batch: a softmax over the wrong axis, or each
    expert takes its best tokens.

    A batch is all tokens, a document, or the same positions of all documents. Those that give most
    of B's sets are tried.
    """
    if not site.has_logits or not site.differs.any():
        return
    rows = np.flatnonzero(site.differs)
    rows = rows[:: max(1, len(rows) // _LOOKED)]

    def proposal(text: str, scores: Float64[np.ndarray, "tokens experts"]) -> Proposal:
        return Proposal(
            text, text, "rule differs", 5.0, is_estimate=True,  # which tokens nobody recorded
            scores=lambda there, some: group_masked(
                there.router.rule, scores[some], there.kernels
            )[0],
        )  # fmt: skip

    def share(scores: Float64[np.ndarray, "some experts"]) -> float:
        """The share of the sets that these scores give."""
        selection = group_masked(site.router.rule, scores, site.kernels)[0]
        chosen = top_k(selection, site.theirs.shape[1])
        return float(site.kernels["same_set"](chosen, site.theirs[rows]).mean())

    logits, batches = site.logits.astype(np.float64), _batches(site)
    highest = logits.max(axis=0)
    numbers = np.exp(logits - highest)
    sums_of = {words: _sums(numbers, batch) for words, batch in batches.items()}

    def over_tokens(words: str, some: Int64[np.ndarray, "some"]) -> np.ndarray:
        return logits[some] - highest - np.log(sums_of[words][some] + _TINY)

    best = sorted(batches, key=lambda words: -share(over_tokens(words, rows)))[:_BEST]
    for words in best:
        over = f"softmax over the tokens of {words} instead of the experts"
        yield proposal(over, over_tokens(words, site.place))
    if site.differs.mean() < _CHOOSING:
        return
    for words in best:
        part = _places(logits, batches[words]) * logits.shape[1] / site.theirs.shape[1]
        taken = {times: np.where(part <= times, logits, logits + _UNTAKEN) for times in _SHARES}
        times = max(taken, key=lambda times: share(taken[times][rows]))
        text = f"each expert takes {times:g} times its share of the tokens of {words}"
        yield proposal(text, taken[times])


#: Tokens by which batches are chosen, batches that are tried, how many times its share of the
#: tokens an expert takes, and what others are behind; the least sum of exponentials.
_LOOKED, _BEST, _SHARES, _UNTAKEN, _TINY = 512, 2, (0.5, 1.0, 1.25, 1.5, 2.0), -1e9, 1e-300

#: Share of the sets that differ where experts choose their tokens. Heuristic.
_CHOOSING = 0.1


def _batches(site: Site) -> dict[str, Int64[np.ndarray, "tokens"]]:
    """Tokens that may have been routed together, by number of the batch."""
    document, position = site.document, site.columns.position.astype(np.int64)
    batches = {"everything": np.zeros_like(document), "a document": document}
    if (position >= 0).all():
        size, longest = 1, int(position.max(initial=0)) + 1
        while size < longest:
            batches[f"{number_of(size, 'position')} of all documents"] = position // size
            size *= 2
    return batches


def _sums(
    numbers: Float64[np.ndarray, "tokens experts"], batch: Int64[np.ndarray, "tokens"]
) -> Float64[np.ndarray, "tokens experts"]:
    """The sum of each expert over the batch of each token."""
    order = np.argsort(batch, kind="stable")
    start = np.flatnonzero(np.diff(batch[order], prepend=-1))
    sums = np.add.reduceat(numbers[order], start, axis=0)
    return sums[np.unique(batch, return_inverse=True)[1].ravel()]


def _places(
    logits: Float64[np.ndarray, "tokens experts"], batch: Int64[np.ndarray, "tokens"]
) -> Float64[np.ndarray, "tokens experts"]:
    """The place of each token in its batch by what an expert thinks of it: 1 / n is the best."""
    places = np.empty_like(logits)
    for number in np.unique(batch):
        rows = np.flatnonzero(batch == number)
        order = (-logits[rows]).argsort(axis=0, kind="stable")
        own = np.empty(order.shape)
        np.put_along_axis(own, order, np.arange(1.0, len(rows) + 1.0)[:, None] / len(rows), axis=0)
        places[rows] = own
    return places


@operator
def low_ones_lost(site: Site) -> Iterator[Proposal]:
    """Low scores that tie: negative ones replaced by zeros of padding, or all those below the
    number that a running maximum begins with.
    """
    if not site.has_logits:
        return
    grids = {"logits": site.logits, "scores": site.selection}
    for words, grid in grids.items():
        for start in (0.0, -1.0):
            few = (grid > start).sum(axis=1) < site.theirs.shape[1]
            if not few.any() or (words == "scores" and np.array_equal(grid, site.logits)):
                continue
            text = f"{words} below {start:g} lost (a maximum that begins at {start:g})"
            yield Proposal(
                f"{words}_below_{start:g}", text, "rule differs", 2.0,
                scores=lambda there, rows, grid=grid, start=start: np.maximum(grid[rows], start),
            )  # fmt: skip


@operator
def logits_misread(site: Site) -> Iterator[Proposal]:
    """A buffer of bfloat16 logits read as float32: each value is two of theirs."""
    logits = site.logits
    if not site.has_logits or len(logits) < 2:
        return
    halves = (np.ascontiguousarray(logits, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    pairs = halves.ravel()[: halves.size - halves.size % 2].view(np.float32)
    numbers = np.zeros(logits.size, np.float32)
    numbers[: len(pairs)] = np.where(np.isfinite(pairs), pairs, 0.0)
    grid, text = numbers.reshape(logits.shape), "bf16 logits, their bytes read as float32"
    name, cause = "logits_misread", "rule differs"
    yield Proposal(name, text, cause, 2.0, scores=lambda there, rows: grid[rows])
