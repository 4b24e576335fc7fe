"""Expert capacity: tokens that no expert runs, because theirs had its fill of the sequence.

With the model's own capacity C, counted over each document as over a sequence of its own: of c
tokens of a document that choose an expert it runs C, and drops max(0, c - C), whatever their order.
A model that packs several documents into a sequence, or counts padding, drops more. Missing where
the model has no capacity, or counts it over a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.load import dropped_slot_share
from moegeom.kernels.reductions.sketches import DOCUMENTS


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts, capacity = reductions["document_counts"], facts.router.rule.capacity
    assert capacity is not None, "unavailable() asks for a capacity"
    return {
        "layers": {
            "expert_capacity": capacity,
            "capacity_dropped_share": dropped_slot_share(counts.ravel(), capacity),
        }
    }


METRIC = Metric(
    name="expert_capacity",
    version=1,
    text="Choices that the model drops because an expert has its fill of the sequence, on at most "
    f"{DOCUMENTS} documents.",
    scope="router",
    needs=("document_counts",),
    columns={
        "layers": (
            Column("expert_capacity", "tokens of a sequence that an expert takes", "tokens", "int"),
            Column(
                "capacity_dropped_share",
                "share of slots beyond the model's own capacity, each document a sequence",
                formula="capacity_dropped_share",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
