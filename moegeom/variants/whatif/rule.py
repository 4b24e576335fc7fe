"""Other rules on the same logits: another temperature, number of experts or gate, fewer rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from moegeom.core.router import LogitMap, Router
from moegeom.core.shapes import Int64
from moegeom.core.text import number_of
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.selection import SCORES, group_margin, margin, selection_scores
from moegeom.geometry.whatif import (
    A,
    B,
    gaps,
    largest_slope,
    packed,
    relu_gate,
    smooth_activations,
    smoothing_budget,
    threshold_distance,
    threshold_for,
)
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, Values, WhatIfChoice, what_if
from moegeom.variants.whatif._choices import (
    OF_OTHER_SCORES,
    OF_SCORES,
    absent,
    admitted_scores,
    choice_of_scores,
    choice_of_sets,
    known,
    members,
    need_top_k,
    need_weights_of_sets,
    refuse,
    row_lengths,
    scored_logits,
    shared_sum,
)


@what_if(Parameter("tau", "temperature", least=1e-6, most=1e6, is_swept=True), one_of=("tau",))
def temperature(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """Scores of logits divided by a temperature: below 1 they are sharper.

    Weights and entropies change; sets only where a bias is added to the score, or groups are
    compared by sums of scores. A soft cap is divided too, so that the temperature acts on what
    comes out of it. Hard limit: ``temperature:1`` is the router itself, bit for bit.
    """
    need_top_k(router)
    tau, before = values["tau"], router.rule.logit_map or LogitMap()
    if tau == 1.0:
        return FittedGate(router=router)
    after = LogitMap(before.multiplier / tau, before.soft_cap / tau)
    return FittedGate(router=replace(router, rule=replace(router.rule, logit_map=after)))


@what_if(
    Parameter("k", "experts of each token", least=1, most=100_000, is_whole=True, is_swept=True),
    one_of=("k",),
)
def topk(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """The K best experts of each token instead of k.

    Weights are those of the rule over the new set, so that they are renormalised where the rule
    does it. Hard limit: ``topk:k`` is the router itself, bit for bit.
    """
    need_top_k(router)
    rule, k = router.rule, values["k"]
    groups = rule.groups
    room = router.num_experts
    if groups is not None:
        room = room // groups.num_groups * groups.num_kept
    if k > room:
        raise refuse(router, f"a token can have {number_of(room, 'expert')} at most, not {k}")
    reached = {"flop_factor": k / rule.top_k}
    if k == rule.top_k:
        return FittedGate(router=router, reached=reached)
    return FittedGate(router=replace(router, rule=replace(rule, top_k=k)), reached=reached)


@what_if(
    Parameter("eps", "width of the strip, in units of the selection score", least=0.0),
    Parameter("extra", "mean number of further experts that eps is found for", least=0.0),
    Parameter("a", "exponent at the lower end of the strip", A, least=1.0, most=1e3),
    Parameter("b", "exponent at the upper end of the strip", B, least=1.0, most=1e3),
    one_of=("eps", "extra"),
)
def smooth(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """Experts less than eps below the k-th run too, with a weight that fades to 0 there.

    ``extra`` finds the eps at which tokens run that many more experts in the mean. The whole
    transition happens in the first tenth of the strip, so it takes away the jitter of disturbances
    below about eps / 18 alone. With groups the strip lies inside the groups that a token keeps, and
    what another group would change still jumps. Hard limit: ``smooth:eps=0`` and ``smooth:extra=0``
    are the router itself, bit for bit.
    """
    need_weights_of_sets(router)
    eps, extra, a, b = (values[name] for name in ("eps", "extra", "a", "b"))
    k = router.rule.top_k
    gap_sizes = gaps(admitted_scores(router, sample.tokens), k)
    if eps is None:
        try:
            eps = smoothing_budget(gap_sizes, extra).eps
        except ValueError as error:
            raise refuse(router, f"no eps brings so many: {error}") from None
    reached = {
        "eps": eps,
        "calmed_below": eps / largest_slope(a, b),
        **_reached(gap_sizes, k, eps),
        **_discontinuous(router, sample.tokens),
    }
    if eps == 0.0:
        return FittedGate(router=router, reached=reached)

    kernels = sample.kernels

    def choose(batch: TokenBatch) -> WhatIfChoice:
        admitted = admitted_scores(router, batch)
        faded = smooth_activations(admitted, k, eps, a, b)
        return choice_of_sets(router, batch, faded > 0.0, admitted, kernels, faded)

    return FittedGate(
        choose=choose,
        has_fixed_size=False,
        reached=reached,
        absent=absent(OF_SCORES, "a smoothed gate has no boundary where its output jumps"),
        notes=(_note(router, largest_slope(a, b)),),
    )


def _note(router: Router, steepest: float) -> str:
    return (
        f"The transition fills the last tenth of the strip (slope {steepest:.3g} / eps): smoothing "
        f"takes away the jitter of disturbances below about eps / {steepest:.0f} alone "
        f"(calmed_below, {router.rule.selection_score_unit})."
    )


def _reached(gap_sizes: np.ndarray, k: int, eps: float) -> dict[str, float]:
    extra = (gap_sizes < eps).sum(axis=1)
    mean = float(extra.mean())
    return {
        "experts_mean": k + mean,
        "extra_experts_p99": float(np.quantile(extra, 0.99, method="higher")),
        "smoothed_share": float((extra > 0).mean()),
        "flop_factor": (k + mean) / k,
    }


def _discontinuous(router: Router, tokens: TokenBatch) -> dict[str, float]:
    """Share of tokens that are nearer to another choice of groups than of experts, by scores.

    A sum of two scores moves twice as far as one.
    """
    rule = router.rule
    if rule.groups is None:
        return {}
    scores = selection_scores(scored_logits(router, tokens), rule, router.selection_bias)
    times = 2.0 if rule.groups.score == "top2_sum" else 1.0
    within = margin(admitted_scores(router, tokens), rule.top_k)
    nearer = group_margin(scores, rule.groups) / times < within
    return {"still_discontinuous_share": float(nearer.mean())}


@what_if(Parameter("experts", "mean number of experts that the threshold is found for", least=0.0))
def relu(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """Every expert whose logit is above a threshold; the weight is what it is above it.

    The threshold is 0, or the one at which tokens have ``experts`` experts in the mean, over the
    tokens of the fit. A token may have none. Gates are continuous: a weight is 0 where its expert
    starts. Biases that only select and groups play no part. Hard limit: none is the router; weights
    are those of no softmax.
    """
    need_top_k(router)
    mean_experts, threshold = values["experts"], 0.0
    logits = known(sample.tokens.mapped)
    if mean_experts is not None:
        try:
            threshold = threshold_for(logits, mean_experts)
        except ValueError as error:
            raise refuse(router, f"no threshold gives the mean {error}") from None
    lengths, why = row_lengths(router), ""
    if router.has_cosine_logits or router.rule.logit_map is not None:
        why = "thresholds of mapped or divided logits have no known distance"
    notes = {
        "Groups play no part: an expert of any group runs if its logit is high enough.": (
            router.rule.groups is not None
        ),
        "The bias that only selects plays no part.": router.rule.has_selection_bias,
    }

    def choose(batch: TokenBatch) -> WhatIfChoice:
        z = known(batch.mapped)
        gate = relu_gate(z, threshold)
        chosen = packed(gate > 0.0, gate)
        slots = chosen.astype(np.int64)
        weights = np.where(slots < 0, 0.0, np.take_along_axis(gate, slots, axis=1))
        quantities = {"selection": z, "scores": gate}
        if not why:
            distance = threshold_distance(z, lengths, threshold)
            quantities |= {"distance": distance, "distance_upper": distance}
        return WhatIfChoice(chosen, weights, quantities)

    counts = (relu_gate(logits, threshold) > 0.0).sum(axis=1)
    mean = float(counts.mean())
    distances = () if why else ("distance", "distance_upper")
    return FittedGate(
        choose=choose,
        has_fixed_size=False,
        reached={
            "threshold": threshold,
            "experts_mean": mean,
            "no_expert_share": float((counts == 0).mean()),
            "flop_factor": mean / router.rule.top_k,
        },
        absent=absent(
            ("selection", "scores", *distances),
            "a gate with a threshold has no last chosen expert and no first other one",
            **dict.fromkeys(("distance", "distance_upper"), why),
            **dict.fromkeys(
                ("probability", "entropy"), "scores of a token without experts have no sum"
            ),
            log_sum_exp="nothing is the softmax of these logits",
        ),
        notes=tuple(note for note, applies in notes.items() if applies),
    )


#: Experts that inherit most from one that is gone, by name.
_HEIRS = 3

#: Scores of all experts, which those that are gone do not have.
_INFINITE = ("scores", "selection")

_DISTANCES = ("distance", "distance_upper", "pair")


@what_if(
    Parameter(
        "experts",
        "numbers of the experts that are taken away",
        least=0,
        most=1_000_000,
        is_whole=True,
        is_list=True,
    )
)
def without(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """Experts taken away: who inherits their tokens.

    The rule is that of a router without those rows: sums run over the experts that are left, groups
    keep their places. Hard limit: taking none away is the router itself, bit for bit.
    """
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
