"""Biases lost, cast, negated, permuted, read as another dtype, or replaced."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from moegeom.core.shapes import Float, Float64
from moegeom.engine.choice import group_masked
from moegeom.geometry.set_code import set_distances
from moegeom.studies.faults.causes import Cause
from moegeom.studies.faults.operator import AS_STORED, Operator, Proposal, Site, routed

#: Bits that say one fitted bias.
_BITS_PER_BIAS = 10.0


#: What a bias may be added to, and the words for it.
_KINDS = {"selection_bias": "selection bias", "logit_bias": "logit bias"}


def _biases(site: Site) -> Iterator[tuple[str, str, np.ndarray]]:
    """The biases that the router has, by the name of their field, in words."""
    for kind, words in _KINDS.items():
        own = getattr(site.router, kind)
        if own is not None and own.any():
            yield kind, words, own


def _cast(site: Site) -> Iterator[Proposal]:
    for kind, words, _ in _biases(site):
        for name, how, text in (
            ("bias_bf16", {"bias": "bfloat16"}, f"{words} cast to bf16"),
            ("bias_fp16", {"bias": "float16"}, f"{words} cast to fp16"),
            (
                "selection_bf16",
                {"bias": "bfloat16", "selection": "bfloat16"},
                "score + bias added up in bf16",
            ),
        ):
            only_stores = "selection" not in how
            if kind == "logit_bias" and not only_stores:
                continue
            yield from routed(
                site,
                name,
                text,
                "bias rounded",
                site.router,
                dataclasses.replace(AS_STORED, **how),
                needs_inputs=kind == "logit_bias",
                only_stores=only_stores,
                bits=1.6,
            )


BIAS_CAST = Operator("bias_cast", _cast)


def _edited(site: Site) -> Iterator[Proposal]:
    for kind, words, own in _biases(site):
        edits: list[tuple[str, str, Cause, np.ndarray, float]] = [
            ("bias_missing", f"{words} left out", "bias missing", np.zeros_like(own), 0.0),
            ("bias_negated", f"{words} subtracted", "bias differs", -own, 1.0),
        ]
        text = f"{words}, its float32 bytes read as bf16"
        edits.append(("bias_misread", text, "bias differs", _read_as_bfloat16(own), 2.0))
        text = f"{words}, its bf16 bytes read as float32"
        edits.append(("bias_misread_wide", text, "bias differs", _read_as_float32(own), 2.0))
        for by in (-2, -1, 1, 2, len(own) // 4):
            text = f"{words} moved along by {by:+d}"
            edits.append((f"bias_rolled{by:+d}", text, "bias differs", np.roll(own, by), 2.0))
        bits = math.log2(max(len(site.routers), 2))
        for number, other in enumerate(site.routers):
            bias, apart = getattr(other, kind), number - site.number
            if not apart or bias is None or bias.shape != own.shape:
                continue
            text = f"{words} of the layer {_beside(apart)}"
            edits.append((f"bias_of_layer{apart:+d}", text, "bias stale", bias, bits))
        if site.other is not None and getattr(site.other, kind) is not None:
            text = f"{words} of the other checkpoint"
            bias = getattr(site.other, kind)
            edits.append(("bias_of_other", text, "bias stale", bias, 0.0))
        names = set()
        for name, text, cause, bias, cost in edits:
            if name in names or np.array_equal(bias, own):
                continue
            names.add(name)
            edited = dataclasses.replace(site.router, **{kind: bias})
            is_of_logits = kind == "logit_bias"
            yield from routed(site, name, text, cause, edited, needs_inputs=is_of_logits, bits=cost)


BIAS_EDITED = Operator("bias_edited", _edited)


def _beside(apart: int) -> str:
    return f"{abs(apart)} {'further on' if apart > 0 else 'before'}"


def _read_as_bfloat16(bias: Float[np.ndarray, "experts"]) -> Float[np.ndarray, "experts"]:
    """The first bytes of the float32 numbers read as bfloat16; 0 where not finite."""
    halves = np.ascontiguousarray(bias, np.float32).view(np.uint16)[: len(bias)]
    numbers = (halves.astype(np.uint32) << 16).view(np.float32)
    return np.where(np.isfinite(numbers), numbers, np.float32(0.0))


def _read_as_float32(bias: Float[np.ndarray, "experts"]) -> Float[np.ndarray, "experts"]:
    """Pairs of bfloat16 numbers read as float32, padded with zeros; 0 where not finite."""
    halves = bias.astype(ml_dtypes.bfloat16).view(np.uint16)
    numbers = np.concatenate([halves, np.zeros_like(halves)]).view(np.float32)
    return np.where(np.isfinite(numbers), numbers, np.float32(0.0))


def _fitted(site: Site) -> Iterator[Proposal]:
    """A free bias, fitted to all tokens or to those that differ; every number costs bits."""
    if not site.has_logits:
        return
    experts = site.scores.shape[1]
    for name, change in site.fitted_biases.items():
        if not np.abs(change).max() > 0.0:
            continue
        text = "another bias for each expert, fitted to B's choices"
        yield from _moved(site, name, text, change, _BITS_PER_BIAS * experts)


def _moved(
    site: Site, name: str, text: str, change: Float64[np.ndarray, "experts"], bits: float
) -> Iterator[Proposal]:
    """These numbers added to the bias that the router has; to its scores if it has none."""
    for kind, _, own in _biases(site):
        if kind == "selection_bias" or site.has_inputs:
            edited = dataclasses.replace(site.router, **{kind: own + change.astype(own.dtype)})
            how = {"needs_inputs": kind == "logit_bias", "own_bits": bits}
            yield from routed(site, name, text, "bias differs", edited, **how)
            return

    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        moved = there.scores[rows] + change.astype(there.scores.dtype)
        return group_masked(there.router.rule, moved, there.kernels)[0]

    yield Proposal(name, text, "bias differs", own_bits=bits, scores=scores)


BIAS_FITTED = Operator("bias_fitted", _fitted)


def _rounded_sum(site: Site) -> Iterator[Proposal]:
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


LEANING = Operator("leaning", _rounded_sum)


def _tied(site: Site) -> Iterator[Proposal]:
    """Another tie-break for equal scores than A's; equal rows have equal scores."""
    if not site.has_logits:
        return
    router = site.router
    kinds = [router.weight, *(bias[:, None] for _, _, bias in _biases(site))]
    _, first, group = np.unique(np.hstack(kinds), axis=0, return_index=True, return_inverse=True)
    same = first[group.ravel()]

    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        return there.selection[rows[:, None], same]

    for way in ("lowest", "highest"):
        text = f"equal scores go to the {way} numbers"
        yield Proposal(
            f"ties_{way}", text, "ties broken by number", 1.0, scores=scores, ties=(way,)
        )


TIES = Operator("ties", _tied)
