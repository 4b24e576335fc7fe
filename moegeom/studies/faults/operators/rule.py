"""What the rule makes of logits: other biases, scores, groups, caps, ties."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from moegeom.engine.choice import group_masked
from moegeom.geometry.set_code import set_distances
from moegeom.router.edits import BIASES
from moegeom.studies.faults.operator import AS_STORED, Proposal, Site, operator, routed

#: Bits that say one fitted bias.
_BITS_PER_BIAS = 10.0


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
def bias_fitted(site: Site) -> Iterator[Proposal]:
    """A free bias, fitted to all tokens or to those that differ; every number costs bits.

    Added to the bias that the router has; to its scores if it has none.
    """
    if not site.has_logits:
        return
    bits, cause = _BITS_PER_BIAS * site.scores.shape[1], "bias differs"
    text = "another bias for each expert, fitted to B's choices"
    for name, change in site.fitted_biases.items():
        if not np.abs(change).max() > 0.0:
            continue
        for kind, _, own in _biases(site):
            if kind == "selection_bias" or site.has_inputs:
                edited = dataclasses.replace(site.router, **{kind: own + change.astype(own.dtype)})
                how = {"needs_inputs": kind == "logit_bias", "own_bits": bits}
                yield from routed(site, name, text, cause, edited, **how)
                break
        else:

            def scores(there: Site, rows: np.ndarray, change: np.ndarray = change) -> np.ndarray:
                moved = there.scores[rows] + change.astype(there.scores.dtype)
                return group_masked(there.router.rule, moved, there.kernels)[0]

            yield Proposal(name, text, cause, own_bits=bits, scores=scores)


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
def negative_lost(site: Site) -> Iterator[Proposal]:
    """Negative logits replaced by the zeros of padding, so that they tie."""
    few = (site.logits > 0.0).sum(axis=1) < site.theirs.shape[1]
    if site.has_logits and site.router.rule.groups is None and few.any():
        yield Proposal(
            "negative_lost", "negative logits lost (taken as 0)", "rule differs", 2.0,
            scores=lambda there, rows: np.maximum(there.logits[rows], 0.0),
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
