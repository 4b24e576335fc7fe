"""What domain and token id tell of the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.core.metric import RouterFacts, Values, count, estimate, figure, metric
from moegeom.geometry.load import (
    corrected_information_share,
    expert_label_agreement,
    same_label_agreement,
)


@metric(
    needs=("expert_counts_by_domain",),
    columns={
        "layers": (
            estimate(
                "domain_information_nats",
                "mutual information of domain and chosen expert; missing below two domains",
                "domain_information",
                "nats",
            ),
            figure(
                "domain_information_floor_nats",
                "what unrelated domains show on as many independent tokens",
                "domain_information",
                "nats",
            ),
            estimate(
                "domain_information_share",
                "the information over the entropy of the chosen expert",
                "domain_information",
            ),
        )
    },
    invariances=("token_permutation", "expert_relabelling"),
)
def domain_specialisation(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Domain specialisation: how much the domain of a token tells about the experts it chooses.

    ``domain_information_nats`` is the mutual information of the domain and the expert of a slot, I
    = sum p(d, e) log(p(d, e) / (p(d) p(e))), plug-in; ``domain_information_floor_nats`` is what
    slots without any relation show on as many independent tokens, (D - 1)(E - 1) / (2 k T) to first
    order. ``domain_information_share`` divides by the entropy of the expert of a slot: 0 for
    experts that serve all domains alike, 1 when the domain decides. Dependent tokens show more than
    the floor; the standard error, by documents, is the better judge.

    How much more an expert is used in one domain is the column ``load`` of table ``experts`` in the
    rows of that domain: N_(e, domain) / N_domain over k / E.
    """
    counts = reductions["expert_counts_by_domain"].astype(np.float64)
    counts = counts[counts.sum(axis=1) > 0]
    if len(counts) < 2:
        return {"layers": {}}
    joint = counts / counts.sum()
    domain, expert = joint.sum(axis=1, keepdims=True), joint.sum(axis=0, keepdims=True)
    seen = joint > 0
    information = float((joint[seen] * np.log(joint[seen] / (domain * expert)[seen])).sum())
    of_expert = expert[expert > 0]
    entropy = float(-(of_expert * np.log(of_expert)).sum())
    experts = int((expert > 0).sum())
    return {
        "layers": {
            "domain_information_nats": information,
            "domain_information_floor_nats": (len(counts) - 1)
            * (experts - 1)
            / (2.0 * counts.sum()),
            "domain_information_share": information / entropy if entropy > 0 else None,
        }
    }


def _without_each(parts: Sequence[Mapping[str, Any]], facts: RouterFacts) -> Values:
    overlaps = [_overlaps(*_with_ids(part), facts) for part in parts]
    names = ("same_token_overlap", "same_token_overlap_chance")
    return {"layers": {name: [overlap.get(name) for overlap in overlaps] for name in names}}


@metric(
    needs=("token_sample",),
    columns={
        "layers": (
            count("num_token_ids", "different token ids in the sample", "ids"),
            estimate(
                "same_token_overlap",
                "mean share of chosen experts that another token of the same id chooses too",
                "same_token_overlap",
            ),
            estimate(
                "same_token_overlap_chance", "the same for any two tokens", "same_token_overlap"
            ),
        ),
        "experts": (
            count("expert", "expert number", "expert"),
            figure(
                "vocabulary_specialisation",
                "probability that another token of the same id chooses the expert too",
                "vocabulary_specialisation",
            ),
        ),
    },
    without_each=_without_each,
    invariances=("expert_relabelling",),
)
def token_identity(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Vocabulary specialisation: how much of the choice follows from which token it is.

    On a sample of about 16 384 tokens with known token ids. ``same_token_overlap`` is the
    probability that an expert chosen by a token is also chosen by another token of the same id,
    drawn at random; ``same_token_overlap_chance`` is the same for any two different tokens. Both
    are averages over pairs of different tokens, so rare ids do not push them up, and equal values
    mean that ids tell nothing.

    For each expert, ``vocabulary_specialisation`` is the probability that another token of the same
    id chooses it, given that one did; its chance level is the share of tokens that choose it.
    """
    label, chosen = _with_ids(reductions)
    experts = facts.router.num_experts
    specialisation = np.full(experts, np.nan)
    if len(label) > 1:
        specialisation = expert_label_agreement(label, chosen, experts)
    layers = {"num_token_ids": len(np.unique(label)) or None, **_overlaps(label, chosen, facts)}
    return {
        "layers": layers,
        "experts": {"expert": np.arange(experts), "vocabulary_specialisation": specialisation},
    }


def _with_ids(reductions: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    sample = reductions["token_sample"]
    has_id = sample["token_id"] >= 0
    return sample["token_id"][has_id], sample["chosen"][has_id]


def _overlaps(label: np.ndarray, chosen: np.ndarray, facts: RouterFacts) -> dict[str, float]:
    if len(label) < 2 or facts.router.rule.num_chosen is None:
        return {}
    labels = {"same_token_overlap": label, "same_token_overlap_chance": np.zeros_like(label)}
    experts = facts.router.num_experts
    return {name: same_label_agreement(own, chosen, experts) for name, own in labels.items()}


@metric(
    needs=("token_sample", "top1"),
    columns={
        "layers": (
            figure(
                "token_id_information_share",
                "mutual information of token id and first choice over the entropy of the latter, "
                "both less what shuffled ids show",
                "token_id_information",
            ),
        )
    },
    invariances=("expert_relabelling",),
)
def token_information(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Information of the token id about the first choice, corrected for chance.

    I(token id; first choice) over the entropy of the first choice, both less what the same ids
    shuffled among the tokens would show on average: 0 for ids that tell nothing, 1 when the id
    decides. Without that correction many rare ids give a large value by themselves. On a sample of
    about 16 384 tokens with known ids. First choices are those of the highest selection score; a
    recording of ids alone need not keep that order, so it has no value there.
    """
    sample = reductions["token_sample"]
    has_id = (sample["token_id"] >= 0) & (sample["chosen"][:, 0] >= 0)
    label, top1 = sample["token_id"][has_id], sample["chosen"][has_id][:, 0]
    if facts.is_random or len(label) < 2 or "top1" not in reductions:
        return {"layers": {}}
    return {"layers": {"token_id_information_share": corrected_information_share(label, top1)}}
