"""A common shift of rows or biases; biases scaled, of other experts, read as another dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.finding import Severity
from moegeom.core.router import Rule
from moegeom.geometry.description import number_bits
from moegeom.geometry.rows import size
from moegeom.router.edits import VECTOR_EDITS
from moegeom.studies.changes.edit import Edit, EditFit, Exported, Judgement, error
from moegeom.studies.changes.record import Change
from moegeom.studies.changes.row_pair import BiasPair, RowPair, share

#: A vector is named where it is more than half of what is left: without it as little remains.
_EXPLAINS = 0.5


def _shifted_rows(pair: RowPair) -> Iterator[EditFit]:
    length = float(np.linalg.norm(pair.shift))
    added = length * np.sqrt(len(pair.a))
    if not length or size(pair.left) > _EXPLAINS * np.hypot(size(pair.left), added):
        return
    of_rows = share(added, size(pair.a))
    yield EditFit(
        pair.a + pair.shift,
        0.0,
        detail=f"one vector of length {length:.3g} added to every row",
        size=of_rows,
        evidence={"length": length, "share": of_rows},
    )


def shifted_logits(rule: Rule) -> str:
    """What a common shift of all logits of a token changes."""
    if is_neutral(rule):
        return "every logit of a token moves by one number: neither choices nor weights change."
    if rule.is_affine:
        return "every logit of a token moves by one number: no choice changes."
    return f"every logit moves by one number, {rule.score} scores do not: choices can change."


def is_neutral(rule: Rule) -> bool:
    """Whether a number added to all logits of a token changes neither choices nor weights.

    Scores of a softmax do not see it, nor does a softmax over the chosen of scores that are logits.
    A cap on the logits does.
    """
    if rule.logit_map is not None and np.isfinite(rule.logit_map.soft_cap):
        return False
    if rule.score == "softmax":
        return True
    return rule.is_affine and rule.weights.source == "softmax_of_selected_logits"


def judge_shift(change: Change, pair: Exported) -> Judgement:
    """Passed where the shift changes neither choices nor routing weights."""
    return Judgement("passed" if is_neutral(pair.b.rule) else "failed", change.meaning)


def gate_shift(change: Change) -> Severity | None:
    """An error where choices can change, or weights."""
    return None if "neither choices" in change.meaning else "error"


SHIFTED = Edit(
    "common shift", "common shift of {size}", shifted_logits, judge_shift, of_rest=_shifted_rows
)


# ------------------------------------------------------------------------------------------ shifted
def _shifted(pair: BiasPair, kind: str) -> Iterator[EditFit]:
    if pair.kind != kind:
        return
    change = pair.b - pair.a
    shift = 0.5 * float(change.max() + change.min())
    left = max(float(np.abs(change - shift).max()), pair.finest)
    bits = number_bits(1, len(change), float(np.abs(change).max()), left)
    yield EditFit(pair.a + shift, bits, kind, f"by {shift:+.6g} each", {"shift": shift})


def _is_compared(rule: Rule) -> bool:
    """Whether dropped groups have a number that a shifted score is compared with."""
    return rule.groups is not None and rule.groups.fill != -np.inf


def _shifted_meaning(rule: Rule) -> str:
    groups = rule.groups
    if groups is not None and _is_compared(rule):
        return (
            f"dropped groups are filled with {groups.fill:g}, which a shifted score is compared "
            "with: choices can change."
        )
    masked = ", dropped groups are -inf" if groups is not None else ""
    return f"scores are compared with scores{masked}: a common shift changes no choice."


SELECTION_SHIFTED = Edit(
    "selection bias shifted",
    "{kind} shifted",
    _shifted_meaning,
    # routing weights are scores without the bias; only a filled mask is compared with it
    lambda change, pair: Judgement(
        "failed" if _is_compared(pair.b.rule) else "passed", change.meaning
    ),
    fit_bias=lambda pair: _shifted(pair, "selection bias"),
    gate=lambda change: "error" if "choices can change" in change.meaning else None,
)

LOGIT_SHIFTED = Edit(
    "logit bias shifted",
    "{kind} shifted",
    shifted_logits,
    judge_shift,
    fit_bias=lambda pair: _shifted(pair, "logit bias"),
    gate=gate_shift,
)


# ------------------------------------------------------------------------------------ other numbers
_PREFERRED = "experts are preferred differently: choices can change."


def _scaled(pair: BiasPair) -> Iterator[EditFit]:
    """Numbers that changed, times one factor; 0 and -1 have words of their own."""
    moved = pair.b != pair.a
    then, now = pair.a[moved], pair.b[moved]
    factors = {0.0: (f"{pair.kind} set to zero", 1.0), -1.0: (f"{pair.kind} negated", 1.0)}
    square = float(then @ then)
    if square > 0.0 and len(then) > 1:  # of a single number any change is a factor
        factor = float(then @ now) / square
        left = max(float(np.abs(now - factor * then).max()), pair.finest)
        bits = number_bits(1, len(then), float(np.abs(now - then).max()), left)
        factors.setdefault(factor, (f"{pair.kind} scaled by {factor:.3g}", bits + 1.0))
    for factor, (kind, bits) in factors.items():
        rows, evidence = factor * pair.a, {"factor": factor}
        yield EditFit(rows, bits, kind, evidence=evidence, allows_subset=True)


BIAS_SCALED = Edit("bias multiplied", "{kind}", _PREFERRED, fit_bias=_scaled, gate=error)


def _read_as(pair: BiasPair) -> Iterator[EditFit]:
    raw = np.ascontiguousarray(pair.stored[pair.place], np.float32)
    for name, edit in VECTOR_EDITS.items():
        if name.startswith("misread"):
            values, kind = edit.make(raw).astype(np.float64), f"{pair.kind}, {edit.text}"
            yield EditFit(values, edit.bits + 1.0, kind, evidence={"edit": name})


READ_AS = Edit(
    "bias read as another dtype",
    "{kind}",
    "the biases are other numbers: choices change.",
    fit_bias=_read_as,
    gate=error,
)


# ------------------------------------------------------------------------------------ other experts
def _left_behind(pair: BiasPair) -> Iterator[EditFit]:
    """Biases in A's order although rows were permuted, or cut after the last row."""
    own = np.arange(len(pair.b))
    if len(pair.stored) >= len(pair.b) and (pair.place != own).any():
        yield EditFit(pair.stored[own], 2.0, pair.kind)


LEFT_BEHIND = Edit(
    "bias left behind",
    "{kind} left behind",
    "rows changed places, or went, and their biases did not move along: choices change.",
    fit_bias=_left_behind,
)


def _of_others(pair: BiasPair) -> Iterator[EditFit]:
    order = np.argsort(pair.stored, kind="stable")
    sorted_values = pair.stored[order]
    source = order[np.minimum(np.searchsorted(sorted_values, pair.b), len(order) - 1)]
    if (pair.stored[source] != pair.b).any() or len(np.unique(sorted_values)) < len(sorted_values):
        return
    moved = np.flatnonzero(source != pair.place)
    bits = (1 + len(moved)) * math.log2(len(order))
    listing = ", ".join(f"{pair.unit} {one} has that of {source[one]}" for one in moved[:4])
    detail = f"{listing}{' ...' if len(moved) > 4 else ''}"
    yield EditFit(pair.stored[source], bits, pair.kind, detail, {"place": source.tolist()})


OF_OTHERS = Edit(
    "bias of other experts",
    "{kind} of other experts",
    "each bias belongs to another expert's row: choices change.",
    fit_bias=_of_others,
    gate=error,
)


# ----------------------------------------------------------------------------------------- the rest
def rest_of(pair: BiasPair) -> EditFit:
    """The residual change of biases that no pattern explains."""
    moved = pair.b - pair.a
    middle = float(np.median(moved))
    expert = int(np.abs(moved - middle).argmax())
    largest, spread = float(moved[expert] - middle), pair.spread
    ratio = f", {abs(largest) / spread:.2g} of the spread {spread:.2g}" if spread > 0.0 else ""
    common = f" beside a common {middle:+.3g}" if abs(middle) > 0.1 * abs(largest) else ""
    return EditFit(
        pair.b,
        0.0,
        pair.kind,
        f"most for {pair.unit} {expert}: {largest:+.3g}{ratio}{common}",
        {"largest_change": largest, "expert": expert, "spread": spread, "common": middle},
    )


CHANGED = Edit("bias changed", "{kind} changed", _PREFERRED)
