"""Vocabulary specialisation: how much of the choice follows from which token it is.

On a sample of about 16 384 tokens with known token ids. ``same_token_overlap`` is the probability
that an expert chosen by a token is also chosen by another token of the same id, drawn at random;
``same_token_overlap_chance`` is the same for any two different tokens. Both are averages over pairs
of different tokens, so rare ids do not push them up, and equal values mean that ids tell nothing.

For each expert, ``vocabulary_specialisation`` is the probability that another token of the
same id chooses it, given that one did; its chance level is the share of tokens that choose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.consistency import expert_label_agreement, same_label_agreement
from moegeom.kernels.reductions.samples import NUM_IDS


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    sample = reductions["token_sample"]
    known = sample["token_id"] >= 0
    label, chosen = sample["token_id"][known], sample["chosen"][known]
    experts = facts.router.num_experts
    specialisation = np.full(experts, np.nan)
    layers: dict[str, Any] = {"num_token_ids": len(np.unique(label)) or None}
    if len(label) > 1:
        specialisation = expert_label_agreement(label, chosen, experts)
    if len(label) > 1 and facts.router.rule.num_chosen is not None:
        layers |= {
            "same_token_overlap": same_label_agreement(label, chosen, experts),
            "same_token_overlap_chance": same_label_agreement(
                np.zeros_like(label), chosen, experts
            ),
        }
    return {
        "layers": layers,
        "experts": {"expert": np.arange(experts), "vocabulary_specialisation": specialisation},
    }


METRIC = Metric(
    name="token_identity",
    version=1,
    text=(
        f"How much of the choice follows from the token id, on a sample of about {NUM_IDS} tokens."
    ),
    scope="router",
    needs=("token_sample",),
    columns={
        "layers": (
            Column("num_token_ids", "different token ids in the sample", "ids", "int"),
            Column(
                "same_token_overlap",
                "mean share of chosen experts that another token of the same id chooses too",
                formula="same_token_overlap",
                has_se=True,
            ),
            Column(
                "same_token_overlap_chance",
                "the same for any two tokens",
                formula="same_token_overlap",
                has_se=True,
            ),
        ),
        "experts": (
            Column("expert", "expert number", "expert", "int"),
            Column(
                "vocabulary_specialisation",
                "probability that another token of the same id chooses the expert too",
                formula="vocabulary_specialisation",
            ),
        ),
    },
    finish=_finish,
    invariances=("expert_relabelling",),
)
