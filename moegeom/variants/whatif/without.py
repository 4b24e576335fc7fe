"""Experts taken away: who inherits their tokens, with weights that follow exactly from the logits.

The rule is that of a router without those rows: sums run over the experts that are left, groups
keep their places. Hard limit: taking none away is the router itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Int64
from moegeom.core.text import number_of
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.selection import SCORES
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, WhatIf, WhatIfChoice
from moegeom.variants.whatif._choices import (
    OF_OTHER_SCORES,
    absent,
    choice_of_scores,
    known,
    members,
    need_top_k,
    refuse,
    shared_sum,
)

#: Experts that inherit most from one that is gone, by name.
_HEIRS = 3

#: Scores of all experts, which those that are gone do not have.
_INFINITE = ("scores", "selection")

_DISTANCES = ("distance", "distance_upper", "pair")


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_top_k(router)
    gone = np.unique(np.array(values["experts"] or (), dtype=np.int64))
    if not len(gone):
        return FittedGate(router=router)
    experts = router.num_experts
    if gone[-1] >= experts:
        raise refuse(router, f"there is no expert {gone[-1]}: they are 0 to {experts - 1}")
    _need_enough(router, gone)
    left = np.setdiff1d(np.arange(experts), gone)
    nearest = _nearest(router, left, sample.kernels)

    def choose(batch: TokenBatch) -> WhatIfChoice:
        mapped = known(batch.mapped).astype(np.float64)
        selection = _selection(router, batch)
        mapped[:, gone] = selection[:, gone] = -np.inf
        choice = choice_of_scores(router, selection, mapped, shared_sum(router, batch))
        kept_ones = {n: v for n, v in choice.quantities.items() if n not in _INFINITE}
        choice = replace(choice, quantities=kept_ones)
        if nearest is None:
            return choice
        logits = np.ascontiguousarray(known(batch.logits)[:, left])
        place = np.searchsorted(left, choice.chosen).astype(np.int32)
        lower, upper, pair = nearest(logits, place, choice.quantities["margin"])
        pair = np.where(pair < 0, -1, left[np.maximum(pair, 0)]).astype(np.int32)
        distances = {"distance": lower, "distance_upper": upper, "pair": pair}
        return replace(choice, quantities={**choice.quantities, **distances})

    return FittedGate(
        choose=choose,
        measure=lambda sample: _inherited(choose, sample, gone, experts),
        absent=absent(
            (
                *(name for name in OF_OTHER_SCORES if name not in _INFINITE),
                *(() if nearest is None else _DISTANCES),
            ),
            "not known for a router without some of its rows",
        ),
    )


def _nearest(
    router: Router, left: Int64[np.ndarray, "kept"], kernels: Kernels
) -> Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]] | None:
    """Least and largest distance and pair, of logits, chosen experts and margin among the kept.

    None where it is not known: cosines, groups, and softmax scores with a bias.
    """
    rule = router.rule
    if router.has_cosine_logits:
        return None
    if rule.is_affine:
        bias = router.affine_bias
        rows = row_distances(router.weight[left], None if bias is None else bias[left])

        def linear(logits: Any, chosen: Any, margin: Any) -> Any:
            distance, pair = kernels["boundary_distance"](logits, chosen, margin, rows)
            return distance, distance, pair

        return linear
    if rule.groups is not None or rule.score == "softmax":
        return None
    biases = (None if b is None else b[left] for b in (router.logit_bias, router.selection_bias))
    curved = curved_rows(router.weight[left], rule, *biases)
    return lambda logits, chosen, margin: kernels["curved_distance"](logits, chosen, curved)


def _selection(router: Router, batch: TokenBatch) -> np.ndarray:
    """Selection scores of all experts, before the group mask."""
    rule = router.rule
    if rule.groups is None:
        return known(batch.selection).astype(np.float64)
    scores = SCORES[rule.score](known(batch.mapped))
    bias = router.selection_bias
    return scores if bias is None else scores + bias.astype(np.float64)


def _need_enough(router: Router, gone: Int64[np.ndarray, "gone"]) -> None:
    """Raises RouterRuleError unless k experts are left, whichever groups a token keeps."""
    rule, left = router.rule, np.ones(router.num_experts, dtype=np.int64)
    left[gone] = 0
    fewest = int(left.sum())
    where = ""
    if rule.groups is not None:
        sizes = np.sort(left.reshape(rule.groups.num_groups, -1).sum(axis=1))
        fewest = int(sizes[: rule.groups.num_kept].sum())
        where = " in some groups that a token may keep"
    if fewest < rule.top_k:
        raise refuse(
            router,
            f"{number_of(fewest, 'expert is', 'experts are')} left{where}, and a token takes "
            f"{rule.top_k}",
        )


def _inherited(
    choose: Any, sample: FitSample, gone: Int64[np.ndarray, "gone"], experts: int
) -> dict[str, float]:
    """For each expert that is gone: its share of tokens, and the shares of who takes them over.

    ``chose_G_share`` of all tokens; ``G_to_H_share`` of those, the slots that go to H: a token that
    loses several experts spreads each over all its new ones. The largest three.
    """
    after = choose(sample.tokens)
    had = members(WhatIfChoice(sample.tokens.chosen, known(sample.tokens.weights)), experts)
    new = members(after, experts) & ~had
    each = new / np.maximum(new.sum(axis=1, keepdims=True), 1)
    rates: dict[str, float] = {}
    for expert in gone.tolist():
        rates[f"chose_{expert}_share"] = float(had[:, expert].mean())
        if not had[:, expert].any():
            continue
        share = each[had[:, expert]].mean(axis=0)
        heirs = np.argsort(-share, kind="stable")[:_HEIRS]
        rates |= {f"{expert}_to_{h}_share": float(share[h]) for h in heirs.tolist() if share[h] > 0}
    return rates


WHATIF = WhatIf(
    name="without",
    text="Experts taken away: who inherits their tokens.",
    parameters=(
        Parameter(
            "experts",
            "numbers of the experts that are taken away",
            least=0,
            most=1_000_000,
            is_whole=True,
            is_first=True,
            is_list=True,
        ),
    ),
    make=_make,
)
