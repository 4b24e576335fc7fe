"""One vector added to every row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.core.finding import Severity
from moegeom.core.router import Rule
from moegeom.geometry.rows import size
from moegeom.studies.changes.edit import Edit, Exported, Judgement, RowFit
from moegeom.studies.changes.record import Change
from moegeom.studies.changes.row_pair import RowPair, share

#: A vector is named where it is more than half of what is left: without it as little remains.
_EXPLAINS = 0.5


def _shifted(pair: RowPair) -> Iterator[RowFit]:
    length = float(np.linalg.norm(pair.shift))
    added = length * np.sqrt(len(pair.a))
    if not length or size(pair.left) > _EXPLAINS * np.hypot(size(pair.left), added):
        return
    of_rows = share(added, size(pair.a))
    yield RowFit(
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
    "common shift",
    "common shift of {size}",
    shifted_logits,
    judge_shift,
    of_rest=_shifted,
)
