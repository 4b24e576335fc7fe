"""Reachability: which experts some input can choose at all.

An expert is unreachable when k others beat it for every input that the norm can give; it is
reachable when an input is found that chooses it, or when the rows are affinely independent. Both
are proofs; what is neither is counted as open. An expert that every input chooses is certain.
Nothing here depends on tokens: an expert can be reachable and yet dead on all text that comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.boundary.reachability import Proof, num_decided, reachability
from moegeom.geometry.number_formats import to_bfloat16

#: Experts of a certificate that are listed; k suffice, and k is at most this in known families.
_MOST_LISTED = 32


def _finish(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
    router = facts.router
    experts = np.arange(router.num_experts)
    if router.norm is not None and router.norm.kind != "rms":
        # a layer norm reaches a slice of the ball only: nothing is derived for it
        return {"layers": {}, "experts": {"expert": experts}}
    if router.rule.pick == "threshold":
        # no expert competes: whatever reaches its half-space reaches it
        return {"layers": {}, "experts": {"expert": experts}}
    if router.has_cosine_logits and not router.rule.is_affine:
        # W y + b are divided by a length before they are scored: their range is another one
        return {"layers": {}, "experts": {"expert": experts}}
    radius = np.inf if router.norm is None else float(np.sqrt(router.hidden_size))
    biases = (router.logit_bias, router.selection_bias)
    if any(bias is not None and not np.isfinite(bias).all() for bias in biases):
        return {"layers": {}, "experts": {"expert": experts}}
    found = reachability(quantities["effective_rows"], router.rule, radius, *biases)
    after_cast: tuple[int | None, int | None] = (None, None)
    if router.selection_bias is not None:
        cast = (router.logit_bias, to_bfloat16(router.selection_bias))
        after_cast = num_decided(quantities["effective_rows"], router.rule, radius, *cast)
    proofs = np.array([proof.value for proof in found.proofs])
    reached = np.isin(proofs, (Proof.point.value, Proof.independence.value))
    return {
        "layers": {
            "num_reachable": int(reached.sum()),
            "num_unreachable": int((proofs == Proof.beaten.value).sum()),
            "num_reach_open": int((proofs == Proof.open.value).sum()),
            "num_certain": int(found.is_certain.sum()),
            "num_unreachable_bf16": after_cast[0],
            "num_certain_bf16": after_cast[1],
        },
        "experts": {
            "expert": experts,
            "reach": proofs,
            "is_certain": found.is_certain,
            "num_beaten_by": np.array([len(others) for others in found.beaten_by]),
            "beaten_by": [others[:_MOST_LISTED].astype(np.int32) for others in found.beaten_by],
        },
    }


METRIC = Metric(
    name="reachability",
    version=1,
    text="Whether an expert can be chosen at all, by any input that the norm in front can give.",
    scope="weights",
    needs=("effective_rows",),
    columns={
        "layers": (
            Column("num_reachable", "experts proved reachable", "experts", "int", "reachability"),
            Column(
                "num_unreachable",
                "experts proved unreachable: k others beat them everywhere",
                "experts",
                "int",
                "reachability",
            ),
            Column("num_reach_open", "experts not decided", "experts", "int", "reachability"),
            Column(
                "num_certain",
                "experts that every input chooses",
                "experts",
                "int",
                "reachability",
            ),
            Column(
                "num_certain_bf16",
                "the same after a cast of the bias to bfloat16",
                "experts",
                "int",
                "reachability",
            ),
            Column(
                "num_unreachable_bf16",
                "experts that would be unreachable after a cast of the bias to bfloat16",
                "experts",
                "int",
                "reachability",
            ),
        ),
        "experts": (
            Column("expert", "expert number", "expert", "int"),
            Column(
                "reach",
                "point, affine independence, beaten everywhere, or open",
                "",
                "str",
                "reachability",
            ),
            Column("is_certain", "every input chooses it", "", "bool", "reachability"),
            Column(
                "num_beaten_by",
                "experts that beat it for every input",
                "experts",
                "int",
                "reachability",
            ),
            Column("beaten_by", "those experts, at most 32", "", "list", "reachability"),
        ),
    },
    finish=_finish,
    invariances=("expert_relabelling", "gain_folding"),
)
