"""Biases that were lost, cast, turned round, exchanged, read as another dtype, or simply others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Float64

from moegeom.core.router import Router
from moegeom.geometry.set_code import last_and_next, set_distances
from moegeom.studies.faults.operator import AS_STORED, Operator, Proposal, Site, routed

#: Bits that say one fitted bias.
_BITS_PER_BIAS = 6.0

#: Tokens that biases are fitted to, steps, and the noise scale in gaps between scores.
_FITTED, _STEPS, _SOFT = 4096, 20, (0.5, 0.12, 0.03)


def _cast(site: Site) -> Iterator[Proposal]:
    if site.router.selection_bias is None:
        return
    for name, how, text in (
        ("bias_bf16", {"bias": "bfloat16"}, "selection bias cast to bf16"),
        ("bias_fp16", {"bias": "float16"}, "selection bias cast to fp16"),
        (
            "selection_bf16",
            {"bias": "bfloat16", "selection": "bfloat16"},
            "score + bias added up in bf16",
        ),
    ):
        only_stores = "selection" not in how
        yield from routed(
            site,
            name,
            text,
            "bias rounded",
            site.router,
            dataclasses.replace(AS_STORED, **how),
            needs_inputs=False,
            only_stores=only_stores,
            bits=1.6,
        )


BIAS_CAST = Operator("bias_cast", _cast)


def _with_bias(router: Router, bias: np.ndarray) -> Router | None:
    own = router.selection_bias
    if own is not None and np.array_equal(own, bias):
        return None
    return dataclasses.replace(router, selection_bias=bias)


def _edited(site: Site) -> Iterator[Proposal]:
    own = site.router.selection_bias
    if own is not None and own.any():
        without = _with_bias(site.router, np.zeros_like(own))
        yield from routed(
            site, "bias_missing", "selection bias left out", "bias missing", without,
            needs_inputs=False,
        )  # fmt: skip
        negated = _with_bias(site.router, -own)
        yield from routed(
            site, "bias_negated", "selection bias subtracted", "bias differs", negated,
            needs_inputs=False, bits=1.0,
        )  # fmt: skip
        misread = _with_bias(site.router, _read_as_bfloat16(own))
        text = "selection bias, its float32 bytes read as bf16"
        yield from routed(
            site, "bias_misread", text, "bias differs", misread, needs_inputs=False, bits=2.0
        )
        for by in (-2, -1, 1, 2):
            rolled = _with_bias(site.router, np.roll(own, by))
            text = f"selection bias moved along by {by:+d}"
            yield from routed(
                site, f"bias_rolled{by:+d}", text, "bias differs", rolled,
                needs_inputs=False, bits=2.0,
            )  # fmt: skip
        for other in _of_other_layers(site):
            yield from other
    logit_bias = site.router.logit_bias
    if logit_bias is not None and logit_bias.any():
        without = dataclasses.replace(site.router, logit_bias=None)
        yield from routed(
            site, "logit_bias_missing", "logit bias left out", "bias missing", without
        )


BIAS_EDITED = Operator("bias_edited", _edited)


def _of_other_layers(site: Site) -> Iterator[Iterator[Proposal]]:
    own = site.router.selection_bias
    bits = math.log2(max(len(site.routers), 2))
    for number, other in enumerate(site.routers):
        bias = other.selection_bias
        if number == site.number or bias is None or own is None or bias.shape != own.shape:
            continue
        apart = number - site.number
        text = f"selection bias of the layer {_beside(apart)}"
        yield routed(
            site, f"bias_of_layer{apart:+d}", text, "bias stale", _with_bias(site.router, bias),
            needs_inputs=False, bits=bits,
        )  # fmt: skip


def _beside(apart: int) -> str:
    return f"{abs(apart)} {'further on' if apart > 0 else 'before'}"


def _read_as_bfloat16(bias: Float[np.ndarray, "experts"]) -> Float[np.ndarray, "experts"]:
    """The first bytes of the float32 numbers as bfloat16; what is not finite as 0."""
    halves = np.ascontiguousarray(bias, np.float32).view(np.uint16)[: len(bias)]
    found = (halves.astype(np.uint32) << 16).view(np.float32)
    return np.where(np.isfinite(found), found, np.float32(0.0))


def _fitted(site: Site) -> Iterator[Proposal]:
    """Any bias at all, fitted to all tokens or to those that differ: each number is paid for."""
    if not site.has_logits or site.router.rule.groups is not None:
        return
    differs = np.flatnonzero(site.differs)
    ways = {"bias_fitted": slice(None), "bias_fitted_where_different": differs}
    for name, rows in ways.items():
        change = fitted_bias(site.selection[rows], site.theirs[rows])
        if not np.abs(change).max() > 0.0:
            continue

        def scores(there: Site, change: np.ndarray = change) -> np.ndarray:
            return there.selection + change.astype(there.selection.dtype)

        bits = _BITS_PER_BIAS * len(change)
        text = "another bias for each expert, fitted to B's choices"
        yield Proposal(name, text, "bias differs", own_bits=bits, scores=scores)


BIAS_FITTED = Operator("bias_fitted", _fitted)


def fitted_bias(
    selection: Float[np.ndarray, "tokens experts"], theirs: np.ndarray
) -> Float64[np.ndarray, "experts"]:
    r"""Offsets under which each expert is chosen as often as B chose it, soft by the usual gap.

    Solves :math:`\sum_t \sigma((s_{te} + b_e - \mu_t)/T) = n_e` by damped steps in the log odds;
    :math:`\mu_t` is the boundary of the token under the offsets so far.
    """
    step = max(1, len(selection) // _FITTED)
    scores, chosen = selection[::step].astype(np.float64), theirs[::step].astype(np.int64)
    finite = np.where(np.isfinite(scores), scores, np.nan)
    experts, k = scores.shape[1], chosen.shape[1]
    wanted = np.bincount(chosen.ravel(), minlength=experts).astype(np.float64)
    spacing = set_distances(scores, chosen).spacing
    bias = np.zeros(experts)
    for soft in _SOFT:
        scale = soft * spacing
        for _ in range(_STEPS):
            moved = finite + bias
            middle = 0.5 * np.sum(last_and_next(moved, k), axis=0)
            with np.errstate(over="ignore"):
                chance = 1.0 / (1.0 + np.exp(-(moved - middle[:, None]) / scale))
            expected = np.nansum(chance, axis=0)
            slope = np.nansum(chance * (1.0 - chance), axis=0) / scale
            change = (wanted - expected) / np.maximum(slope, 1e-3 * slope.max() + 1e-12)
            bias += np.clip(change, -4.0 * scale, 4.0 * scale)
            bias -= np.median(bias)
    return bias


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

            def scores(there: Site, lean: np.ndarray = lean) -> np.ndarray:
                return there.selection.astype(np.float64) + lean

            name = f"leaning_{word}_{power}"
            text = f"scores that lean to {word} numbers, by {abs(lean[1]):.1g} each"
            yield Proposal(name, text, "ties broken by number", 4.0, scores=scores)


LEANING = Operator("leaning", _rounded_sum)


def _tied(site: Site) -> Iterator[Proposal]:
    """Equal scores, told apart in another way than A does."""
    if not site.has_logits:
        return
    for way in ("lowest", "highest"):
        text = f"equal scores go to the {way} numbers"
        yield Proposal(f"ties_{way}", text, "ties broken by number", 1.0, ties=(way,))


TIES = Operator("ties", _tied)


def _inherited(site: Site) -> Iterator[Proposal]:
    own, other = site.router.selection_bias, site.other
    if own is None or other is None or other.selection_bias is None:
        return
    edited = _with_bias(site.router, other.selection_bias)
    yield from routed(
        site, "bias_of_other", "selection bias of the other checkpoint", "bias stale", edited,
        needs_inputs=False,
    )  # fmt: skip


BIAS_OF_OTHER = Operator("bias_of_other", _inherited)
