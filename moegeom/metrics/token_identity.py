"""Vocabulary specialisation: how much of the choice follows from which token it is.

On a sample of about 16 384 tokens with known token ids. ``same_token_overlap`` is the probability
that an expert chosen by a token is also chosen by another token of the same id, drawn at random;
``same_token_overlap_chance`` is the same for any two different tokens. Both are averages over pairs
of different tokens, so rare ids do not push them up, and equal values mean that ids tell nothing.

For each expert, ``vocabulary_specialisation`` is the probability that another token of the
same id chooses it, given that one did; its chance level is the share of tokens that choose it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.consistency import expert_label_agreement, same_label_agreement
from moegeom.kernels.reductions.samples import NUM_IDS


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    label, chosen = _known(reductions)
    experts = facts.router.num_experts
    specialisation = np.full(experts, np.nan)
    if len(label) > 1:
        specialisation = expert_label_agreement(label, chosen, experts)
    layers = {"num_token_ids": len(np.unique(label)) or None, **_overlaps(label, chosen, facts)}
    return {
        "layers": layers,
        "experts": {"expert": np.arange(experts), "vocabulary_specialisation": specialisation},
    }


def _known(reductions: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    sample = reductions["token_sample"]
    known = sample["token_id"] >= 0
    return sample["token_id"][known], sample["chosen"][known]


def _overlaps(label: np.ndarray, chosen: np.ndarray, facts: RouterFacts) -> dict[str, float]:
    if len(label) < 2 or facts.router.rule.num_chosen is None:
        return {}
    labels = {"same_token_overlap": label, "same_token_overlap_chance": np.zeros_like(label)}
    experts = facts.router.num_experts
    return {name: same_label_agreement(own, chosen, experts) for name, own in labels.items()}


def _without_each(parts: Sequence[Mapping[str, Any]], facts: RouterFacts) -> Values:
    found = [_overlaps(*_known(part), facts) for part in parts]
    names = ("same_token_overlap", "same_token_overlap_chance")
    return {"layers": {name: [overlap.get(name) for overlap in found] for name in names}}


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
    without_each=_without_each,
    invariances=("expert_relabelling",),
)
