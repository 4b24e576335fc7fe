"""One router: the bias that balances a sample of tokens, and how it does on other documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float, Float64, Int32, Int64
from moegeom.core.tokens import TokenSource
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import Sample, draw_sample
from moegeom.geometry import load
from moegeom.geometry.input_pull import input_pull
from moegeom.geometry.load import Scatter, cv_squared_reduction, max_vio_limit, scatter, unit_counts
from moegeom.kernels.reduction import Kernels
from moegeom.studies.balance.program.bias import balancing_bias, duplicate_experts, score_spread
from moegeom.studies.balance.program.passes import balance_by_updates
from moegeom.studies.balance.record import HeldOut, Loads, Meaning, RouterBalance

#: First step of the updates of a rule with groups, in spreads of the selection scores.
_FIRST_STEP = 0.2

#: Where they end: this share of the MaxVio that even routing shows by chance (docs/theory.md D3).
_OF_FLOOR = 0.1


def read_sample(
    router: Router,
    source: TokenSource,
    options: ComputeOptions,
    advance: Callable[[int], None] | None = None,
) -> Sample:
    """A sample with what was chosen, and the selection scores before any mask."""
    names = ("selection", "chosen", "weights", "document", "block")
    drawn = draw_sample(router, source, options, names, advance=advance)
    if router.rule.groups is not None:
        unmasked = draw_sample(_without_mask(router), source, options, ("selection",))
        drawn.selection = unmasked.selection
    return drawn


def _without_mask(router: Router) -> Router:
    """The router whose selection scores are those of the rule before its groups are masked.

    A bias of 0 keeps the score in the comparison where the rule has none: without groups and
    without bias logits would be compared, and the bias sought would be in another unit.
    """
    rule = dataclasses.replace(router.rule, groups=None, has_selection_bias=True)
    bias = np.zeros(router.num_experts, dtype=np.float32)
    kept = bias if router.selection_bias is None else router.selection_bias
    return dataclasses.replace(router, rule=rule, selection_bias=kept)


def balance_router(
    router: Router, sample: Sample, kernels: Kernels, level: float, seed: int
) -> RouterBalance:
    """The bias, what it achieves on these and on other documents, and what that means.

    ``level`` is the probability with which an even router may be called uneven.
    """
    rule, scores = router.rule, sample.selection
    tokens, experts = scores.shape
    choice = _Choice(router, kernels)
    spread = score_spread(scores)
    is_before = _mask(sample.chosen, experts)
    change, num_tied, gap = _solve(choice, scores, spread)
    is_after = choice(scores, change)
    before, after = (scatter(unit_counts(m, sample.unit)) for m in (is_before, is_after))
    biased = rule.has_selection_bias and router.selection_bias is not None
    halves = [sample.half == number for number in (0, 1)]
    held_out: tuple[HeldOut, ...] = ()
    if all(half.any() for half in halves):
        made = [_solve(choice, scores[half], spread, change)[0] for half in halves]
        held_out = tuple(
            _held_out(choice, sample, is_before, made[1 - n], halves[n], halves[1 - n], level, seed)
            for n in (0, 1)
        )
    limit, limit_after = (max_vio_limit([s], level, seed) for s in (before, after))
    loads = _loads(before), _loads(after)
    lost = ~np.take_along_axis(is_after, sample.chosen.astype(np.int64), axis=1)
    whole = sample.weights.sum(axis=1)
    moved = (sample.weights * lost).sum(axis=1)
    displaced = np.divide(moved, whole, out=np.zeros(tokens), where=whole > 0.0)
    stored = np.zeros(experts) if router.selection_bias is None else router.selection_bias
    rounding = (stored + change).astype(np.float32).astype(np.float64) - stored - change
    in_float32 = choice(scores, change + rounding).sum(axis=0)
    found = RouterBalance(
        router=router.name,
        num_experts=experts,
        top_k=rule.top_k,
        num_tokens=tokens,
        num_units=before.num_units,
        score_unit=_without_mask(router).rule.selection_score_unit
        if rule.groups is not None
        else rule.selection_score_unit,
        is_grouped=rule.groups is not None,
        has_selection_bias=bool(biased),
        before=loads[0],
        after=loads[1],
        max_vio_float32=float(load.max_vio(in_float32)),
        limit=limit,
        limit_after=limit_after,
        cv_floor=load.load_cv_floor(tokens, experts, rule.top_k),
        max_vio_floor=load.max_vio_floor(tokens, experts, rule.top_k),
        held_out=held_out,
        change=tuple(change.tolist()),
        spread=spread,
        changed_share=float((is_before != is_after).any(axis=1).mean()),
        displaced_weight=float(displaced.mean()),
        num_tied=num_tied,
        gap=gap,
        duplicates=_duplicates(router, scores),
        pull=input_pull(scores.astype(np.float64)),
        meaning="balanced",
    )
    return dataclasses.replace(found, meaning=meaning_of(found, level))


def meaning_of(found: RouterBalance, level: float) -> Meaning:
    """What the figures mean; every threshold is a limit of chance at this level.

    Unknown: even routing on these documents may show the largest MaxVio there is, E/k - 1.
    Balanced: MaxVio is not above the limit for even routing. No bias: with it,
    MaxVio is above that limit, and above what whole tokens allow. Holds: on both halves the bias
    of the other half lowers the squared CV of the expected load (t test at the level), and MaxVio
    is not above the limit there. Documents only: on a half it does not lower it at all.
    """
    quota = found.top_k * found.num_tokens / found.num_experts
    whole = np.ceil(quota) / quota - 1.0
    if found.limit >= found.num_experts / found.top_k - 1.0 > 0.0:
        return "unknown"
    if found.before.max_vio <= max(found.limit, whole):
        return "balanced"
    if found.after.max_vio > max(found.limit_after, whole + 1e-12):
        return "none found" if found.is_grouped else "none"
    if not found.held_out or any(half.num_units < 2 for half in found.held_out):
        return "few"
    if any(half.reduction is None or half.reduction <= 0.0 for half in found.held_out):
        return "documents"
    if any(half.reduction_p > level for half in found.held_out):
        return "few"
    if not all(half.is_within for half in found.held_out):
        return "partly"
    return "holds" if found.has_selection_bias else "holds, no bias now"


class _Choice:
    """Which experts the rule of a router chooses when a bias is added to its selection scores."""

    def __init__(self, router: Router, kernels: Kernels) -> None:
        self.rule, self._kernels = router.rule, kernels

    def __call__(
        self, scores: Float[np.ndarray, "tokens experts"], bias: Float64[np.ndarray, "experts"]
    ) -> Bool[np.ndarray, "tokens experts"]:
        biased = scores + bias
        if self.rule.groups is not None:
            biased = self._kernels["group_mask"](biased, self.rule.groups)[0]
        return _mask(self._kernels["top_k"](biased, self.rule.top_k)[0], scores.shape[1])


def _mask(
    chosen: Int32[np.ndarray, "tokens k"], num_experts: int
) -> Bool[np.ndarray, "tokens experts"]:
    mask = np.zeros((len(chosen), num_experts), dtype=bool)
    np.put_along_axis(mask, chosen.astype(np.int64), True, axis=1)
    return mask


def _solve(
    choice: _Choice,
    scores: Float[np.ndarray, "tokens experts"],
    spread: float,
    start: Float64[np.ndarray, "experts"] | None = None,
) -> tuple[Float64[np.ndarray, "experts"], int | None, float | None]:
    """The bias, and without groups the tied tokens and the gap of the linear program."""
    if choice.rule.groups is None:
        found = balancing_bias(scores, choice.rule.top_k, start)
        return found.bias, found.num_tied, found.gap
    starts = [np.zeros(scores.shape[1])]
    starts.append(balancing_bias(scores, choice.rule.top_k).bias if start is None else start)

    def count(bias: Float64[np.ndarray, "experts"]) -> Int64[np.ndarray, "experts"]:
        return choice(scores, bias).sum(axis=0)

    floor = load.max_vio_floor(len(scores), scores.shape[1], choice.rule.top_k)
    bias = balance_by_updates(count, starts, _FIRST_STEP * spread, _OF_FLOOR * floor)
    return bias, None, None


def _held_out(
    choice: _Choice,
    sample: Sample,
    is_before: Bool[np.ndarray, "tokens experts"],
    bias: Float64[np.ndarray, "experts"],
    here: Bool[np.ndarray, "tokens"],
    there: Bool[np.ndarray, "tokens"],
    level: float,
    seed: int,
) -> HeldOut:
    """The tokens ``here`` with the bias that was made on those ``there``."""
    before = scatter(unit_counts(is_before[here], sample.unit[here]))
    after, made_on = (
        scatter(unit_counts(choice(sample.selection[part], bias), sample.unit[part]))
        for part in (here, there)
    )
    reduction, probability = cv_squared_reduction(before, after)
    tokens, experts, top_k = int(here.sum()), is_before.shape[1], choice.rule.top_k
    return HeldOut(
        num_tokens=tokens,
        num_units=after.num_units,
        before=_loads(before),
        after=_loads(after),
        # both halves must stay below: each has half of the level
        limit=max_vio_limit([after, made_on], level / 2.0, seed),
        cv_floor=load.load_cv_floor(tokens, experts, top_k),
        max_vio_floor=load.max_vio_floor(tokens, experts, top_k),
        reduction=reduction if np.isfinite(reduction) else None,
        reduction_p=probability,
    )


def _loads(found: Scatter) -> Loads:
    return Loads(float(found.load.max() - 1.0), float(found.load.std()))


def _duplicates(
    router: Router, scores: Float[np.ndarray, "tokens experts"]
) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Experts that no bias tells apart, and why; with groups, those of one group only."""
    groups = router.rule.groups
    size = router.num_experts if groups is None else router.num_experts // groups.num_groups
    found = []
    for alike in duplicate_experts(scores):
        for group in sorted({expert // size for expert in alike}):
            members = tuple(expert for expert in alike if expert // size == group)
            if len(members) > 1:
                rows = router.weight[list(members)]
                found.append((members, "equal rows" if (rows == rows[0]).all() else "equal scores"))
    return tuple(found)
