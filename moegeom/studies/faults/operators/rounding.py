"""Coarser number formats of rows, inputs, logits or scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moegeom.engine.choice import group_masked
from moegeom.geometry.number_formats import (
    FLOATS,
    Code,
    decoded,
    in_eight_bits,
    largest_of,
    rounded_to,
)
from moegeom.geometry.set_code import set_distances
from moegeom.studies.faults.operator import AS_STORED, Inputs, Proposal, Site, operator, routed
from moegeom.studies.faults.some_experts import RecordedOfSome
from moegeom.variants.emulated import emulate

#: Entries that share a scale, rows and columns, in words; 0 for all there are.
_GROUPS = {
    (0, 0): "one scale",
    (1, 0): "by row",
    (0, 1): "by column",
    (1, 16): "groups of 16",
    (1, 32): "groups of 32",
    (1, 64): "groups of 64",
    (1, 128): "groups of 128",
    (128, 128): "blocks of 128",
}

#: Scales of integers: the largest value is this code.
_LARGEST = {"int8": (127.5, 127.0, 128.0), "int4": (7.5, 7.0, 8.0)}

#: Groups of codes that are kept in bfloat16 afterwards, too.
_STORED = ((0, 0), (1, 0), (1, 128))

#: Tokens with other sets on which codes are tried first, and how many go on.
_FIRST, _GO_ON = 256, 6

_PLAIN_BITS, _CODE_BITS = 3.0, 7.0


@operator
def rows_rounded(site: Site) -> Iterator[Proposal]:
    """Rows cast to 16 bits."""
    for form, word in (("bfloat16", "bf16"), ("float16", "fp16")):
        how = dataclasses.replace(AS_STORED, parameter=form)
        name, text = f"weights_{word}", f"router weights rounded to {word}"
        yield from routed(
            site, name, text, "weights rounded", site.router, how,
            only_stores=True, bits=_PLAIN_BITS,
        )  # fmt: skip


def _codes() -> Iterator[tuple[str, Code]]:
    """Every code in words."""
    for (rows, columns), group in _GROUPS.items():
        ways: list[tuple[str, str, float | None]] = []
        for form, largest in _LARGEST.items():
            ways += [(f"{form} {group}, scale amax/{most:g}", form, most) for most in largest]
            ways.append((f"{form} {group}, unsigned", f"u{form}", None))
        ways += [(f"fp8 {form} {group}", form, float(largest_of(form))) for form in FLOATS]
        for text, form, most in ways:
            yield text, Code(form, rows, columns, most)
            if (rows, columns) in _STORED:
                yield f"{text}, then bf16", Code(form, rows, columns, most, True)
    for form in FLOATS:
        yield f"fp8 {form} without a scale", Code(form, 0, 0, None)


@operator
def rows_coded(site: Site) -> Iterator[Proposal]:
    """The number formats that reproduce most of B's choices."""
    rows = np.flatnonzero(site.differs)
    if not site.has_inputs or not len(rows):
        return
    if site.recorded is not None:  # which speaks of every token
        rows = np.arange(len(site.mine))
    rows = rows[:: max(1, math.ceil(len(rows) / _FIRST))]
    values = site.values_at(site.number)(rows)
    assert values is not None
    weight = np.ascontiguousarray(site.router.weight, np.float32)
    codes, plain = list(_codes()), emulate(site.router, AS_STORED)
    worth = []
    for _, code in codes:
        # the float32 product of all, to choose those that are worth an engine's own
        logits = values @ decoded(weight, code).T
        if plain.logit_bias is not None:
            logits += plain.logit_bias.astype(np.float32)
        scores, _ = group_masked(site.router.rule, plain.compared(logits), site.kernels)
        met = float(set_distances(scores, site.theirs[rows]).is_met.sum())
        recorded = RecordedOfSome.of(site, site.router, rows, logits)
        worth.append(met if recorded is None else recorded.worth())
    best = np.argsort(-np.array(worth), kind="stable")[:_GO_ON]
    stands = len(codes) - len(best) + 1
    for number in best.tolist():
        text, code = codes[number]
        edited = dataclasses.replace(site.router, weight=decoded(weight, code))
        name = f"weights {text}".replace(" ", "_").replace(",", "")
        text, cause = f"router weights {text}", "weights rounded"
        for one in routed(site, name, text, cause, edited, bits=_CODE_BITS):
            yield dataclasses.replace(one, stands_for=stands if number == best[0] else 1)


_BF16 = "bfloat16"


@operator
def inputs_rounded(site: Site) -> Iterator[Proposal]:
    """Inputs cast to bfloat16, alone, with the rows, and with the logits."""
    if not site.has_inputs:
        return
    values = site.values_at(site.number)(np.arange(min(len(site.mine), _FIRST)))
    if values is not None and np.array_equal(rounded_to(values, _BF16), values):
        return  # what is rounded already is rounded no further
    how = dataclasses.replace(AS_STORED, input=_BF16)
    inputs = "router inputs rounded to bf16"
    yield from routed(site, "inputs_bf16", inputs, "inputs rounded", site.router, how, bits=1.0)
    how = dataclasses.replace(how, parameter=_BF16)
    both = "inputs and weights rounded to bf16"
    yield from routed(site, "inputs_weights_bf16", both, "inputs rounded", site.router, how, bits=2)
    how = dataclasses.replace(how, output=_BF16)
    text = "inputs, weights and logits in bf16"
    yield from routed(site, "bf16_throughout", text, "logits rounded", site.router, how, bits=2)


@operator
def inputs_in_eight_bits(site: Site) -> Iterator[Proposal]:
    """Inputs in eight bits: as they are, and with a scale for each token."""
    router, cause = site.router, "inputs rounded"
    for form in FLOATS:
        for way, scaled in (("plain", ""), ("by token", ", a scale for each token")):
            name, text = f"inputs_{form}_{way}", f"router inputs rounded to fp8 {form}{scaled}"
            inputs = _cast_inputs(form, way == "by token")
            yield from routed(site, name, text, cause, router, bits=3.0, inputs=inputs)


def _cast_inputs(form: str, is_scaled: bool) -> Inputs:
    def inputs(site: Site, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        values = values.astype(np.float32, copy=False)
        if not is_scaled:
            return in_eight_bits(values, form)
        most = np.abs(values).max(axis=1, keepdims=True)
        scale = np.where(most > 0.0, most / largest_of(form), np.float32(1.0))
        return in_eight_bits(values / scale, form) * scale

    return inputs


@operator
def logits_rounded(site: Site) -> Iterator[Proposal]:
    """Logits cast to 16 bits, or scores."""
    router, cause = site.router, "logits rounded"
    ways = {
        "logits_bf16": ("logits rounded to bf16", {"output": _BF16}),
        "logits_fp16": ("logits rounded to fp16", {"output": "float16"}),
        "scores_bf16": ("scores rounded to bf16", {"score": _BF16, "compared": "scores"}),
    }
    for name, (text, steps) in ways.items():
        if "score" not in steps or router.rule.score != "identity":
            how = dataclasses.replace(AS_STORED, **steps)
            yield from routed(site, name, text, cause, router, how, needs_inputs=False, bits=1)
