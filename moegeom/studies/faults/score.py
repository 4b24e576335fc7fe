"""Which operator, on which scope, says B's choices in the fewest bits.

The base is A's router as it is, with noise that fits. An operator is worth what it saves beside
the base, less the bits for its parameters, its routers and its scope.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from moegeom.engine.choice import group_masked
from moegeom.geometry.set_code import (
    TIE_WAYS,
    SetDistances,
    boundary,
    chosen_mask,
    log2_sets,
    set_distances,
)
from moegeom.studies.faults.causes import Cause
from moegeom.studies.faults.operator import OPERATORS, Proposal, Site, Values
from moegeom.studies.faults.scope import TokenRegion, Where, best_region, listed
from moegeom.variants.emulated import Emulated, emulate

#: Noise scales that are tried, in median gaps between the last chosen score and the first other.
_SCALES = 2.0 ** np.arange(-12.0, 4.0, 1.5)

#: Tokens of each kind, with equal and with different sets, on which candidates are tried first,
#: and how many go on to all tokens.
_TRIED, _KEPT = 768, 8

#: Bits that a candidate has to save there to go on, and the share of what the best one saves.
_WORTH, _SHARE = 20.0, 0.02

#: Bits that say which operator it is.
OPERATOR_BITS = 6.0


@dataclass(frozen=True)
class Noise:
    """Noise of a router: its scale in gaps between scores, and the way in which ties are broken."""

    scale: float
    ties: str

    def bits(self, distances: SetDistances) -> Float64[np.ndarray, "tokens"]:
        """Bits of sets under noise of so many of their own gaps."""
        return distances.bits(self.scale * distances.spacing, self.ties)


@dataclass(frozen=True, eq=False)
class Scored:
    """A candidate on all tokens of a router: sets that it meets, and what it saves of ``as_is``.

    Bits, with the noise that fits if it is all tokens, and if it may be some of them.
    """

    candidate: Proposal
    as_is: tuple[float, float]
    saved: tuple[Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"]]
    is_met: Bool[np.ndarray, "tokens"]


@dataclass(frozen=True, eq=False)
class SiteScores:
    """One router: the bits of B's sets as it is, and the candidates that are worth a look."""

    router: str
    base: Float64[np.ndarray, "tokens"]
    is_met: Bool[np.ndarray, "tokens"]
    scored: Mapping[str, Scored]
    num_tried: int


@dataclass(frozen=True, eq=False)
class Fault:
    """An operator on its scope: ``bits`` saved in all, less what it costs to say.

    ``explained`` is the share of the base's bits at ``router``, the first of ``routers``, that it
    saves there; ``reproduced`` the share of equal sets in its scope, by router, and ``before`` the
    same as the router is. ``inherits`` where an earlier router differs as much for another reason.
    ``mended`` is the share of all sets that differ at its first router that it removes. ``way`` is
    the noise that fits best: 0 as for all tokens, 1 as for some. ``parts`` are the
    faults that it is composed of, each on tokens of its own; none for a single one.
    """

    name: str
    text: str
    cause: Cause
    region: TokenRegion
    routers: tuple[str, ...]
    bits: float
    explained: float
    reproduced: Mapping[str, float]
    before: Mapping[str, float]
    mended: float = 0.0
    of_other: bool = False
    is_fitted: bool = False
    inherits: bool = False
    way: int = 0
    parts: tuple[Fault, ...] = ()

    @property
    def repaired(self) -> float:
        """Share of the sets that differ in its scope that it removes, at its first router.

        All where it is about ties and none differs: a set that ties admit is met in any case.
        """
        missing = 1.0 - self.before[self.router]
        if missing == 0.0 and self.cause == "ties broken by number":
            return 1.0
        gained = self.reproduced[self.router] - self.before[self.router]
        return gained / missing if missing > 0.0 else 0.0

    @property
    def router(self) -> str:
        return self.routers[0]

    @property
    def share(self) -> float:
        """Share of the tokens that it is about."""
        return float(self.region.is_inside.mean())


def score_site(site: Site, values: Values) -> SiteScores:
    """The base, and every candidate that saves bits on a sample of tokens."""
    own = set_distances(site.selection, site.theirs)
    share = share_of_equals(site)
    ties = _fitted(set_distances(site.selection, site.mine), share).ties  # as A breaks them
    noise = _fitted(own, share, (ties, "chance"))
    base = noise.bits(own)
    differs = site.differs
    if not differs.any():
        return SiteScores(site.router.name, share * base, own.is_met, {}, 0)
    rows, weight = _sample(differs)
    weight = weight * share[rows]
    sample = values(rows) if site.has_inputs else None
    tried = _tried(site, rows, weight, own.at(rows), (ties, "chance"), sample)
    number = sum(one.candidate.stands_for for one in tried)
    worth = sorted(tried, key=lambda one: -one.saved)[:_KEPT]
    kept = [one for one in worth if one.saved > max(_WORTH, _SHARE * worth[0].saved)]
    scored = _on_all(site, kept, (own, base), share, values)
    return SiteScores(site.router.name, share * base, own.is_met, scored, number)


def share_of_equals(site: Site) -> Float64[np.ndarray, "tokens"]:
    """One over the number of tokens with the same logits, to a tenth of their spread.

    First tokens are the same in many documents: what happens to one happens to all of them, and
    is told once.
    """
    logits = site.logits.astype(np.float64)
    spread = float(np.nanstd(logits[np.isfinite(logits)])) if np.isfinite(logits).any() else 0.0
    if spread == 0.0 or not site.has_logits:
        return np.ones(len(logits))
    with np.errstate(invalid="ignore"):
        near = np.round(np.nan_to_num(logits) / (0.1 * spread)).astype(np.int32)
    _, place, count = np.unique(near, axis=0, return_inverse=True, return_counts=True)
    return 1.0 / count[place.ravel()]


@dataclass(frozen=True, eq=False)
class _Tried:
    """A candidate on the sample: bits saved in whole parts of it, and its noise.

    The noise fits if it is all tokens, and if it may be some of them.
    """

    candidate: Proposal
    saved: float
    noise: tuple[Noise, Noise]


def _tried(
    site: Site,
    rows: Int64[np.ndarray, "rows"],
    weight: Float64[np.ndarray, "rows"],
    own: SetDistances,
    ties: Sequence[str],
    sample: Float[np.ndarray, "rows hidden"] | None,
) -> list[_Tried]:
    """All candidates of all operators, and those whose rows concern some of the experts only."""
    noise = _fitted(own, weight, ties)
    base, groups = noise.bits(own), _groups(site, rows)
    found = []
    for operator in OPERATORS.all():
        for candidate in operator.candidates(site):
            some = None
            if candidate.needs_inputs:
                with np.errstate(over="ignore", invalid="ignore"):  # as below
                    scores = candidate.unmasked(site, rows, sample)
                    selection = candidate.masked(site, scores)
                distances = set_distances(selection, candidate.theirs(site, rows))
                some = _of_some_experts(site, candidate, rows, scores, weight)
            else:
                distances = _distances(site, candidate, rows, sample)
            if not candidate.of_some_only:
                found.append(_compared(candidate, distances, own, base, weight, groups))
            if some is not None:
                of_some = _distances(site, some, rows, sample)
                found.append(_compared(some, of_some, own, base, weight, groups))
    return found


def _distances(
    site: Site,
    candidate: Proposal,
    rows: Int64[np.ndarray, "rows"],
    values: Float[np.ndarray, "rows hidden"] | None,
) -> SetDistances:
    with np.errstate(over="ignore", invalid="ignore"):  # a fault may leave the range of numbers
        selection = candidate.selection(site, rows, values)
    return set_distances(selection, candidate.theirs(site, rows))


def _compared(
    candidate: Proposal,
    distances: SetDistances,
    own: SetDistances,
    base: Float64[np.ndarray, "rows"],
    weight: Float64[np.ndarray, "rows"],
    groups: Sequence[Int64[np.ndarray, "rows"]],
) -> _Tried:
    """The noise under which the candidate takes the fewest bits, alone and with the base."""
    bits = {noise: noise.bits(distances) for noise in _noises(distances, candidate.ties)}
    alone = min(bits, key=lambda one: float((weight * bits[one]).sum()))
    together = min(bits, key=lambda one: float((weight * np.minimum(base, bits[one])).sum()))
    saved = [weight * (_as_is(own, base, one) - bits[one]) for one in (alone, together)]
    worth = max(
        float(np.maximum(np.bincount(group, weights=one), 0.0).sum())
        for one in saved
        # what is routed again costs time, and a few positions of everything are found by chance
        for group in groups[: -2 if candidate.needs_inputs else None]
    )
    return _Tried(candidate, worth, (alone, together))


def _groups(site: Site, rows: Int64[np.ndarray, "rows"]) -> list[Int64[np.ndarray, "rows"]]:
    """Ways to part tokens: a fault on some scope saves bits in whole parts of one of them."""
    columns = site.columns.at(rows)
    document = np.unique(columns.document, return_inverse=True)[1].ravel()
    position = np.maximum(columns.position.astype(np.int64), 0)
    length = int(position.max()) + 1
    blocks = position * _BLOCKS // length
    turns = [rows % ranks for ranks in _TURNS]
    parts = document * _PARTS + position * _PARTS // length
    return [np.zeros(len(rows), np.int64), document, blocks, *turns, parts, position]


#: Blocks of positions, numbers of ranks, and parts of documents by which a sample is parted.
_BLOCKS, _TURNS, _PARTS = 16, (2, 3, 4, 5, 7, 8), 4


def _as_is(
    own: SetDistances, base: Float64[np.ndarray, "rows"], noise: Noise
) -> Float64[np.ndarray, "rows"]:
    """Bits of the base, with its own noise or that of a candidate: less noise is no operator."""
    return np.minimum(base, Noise(noise.scale, "chance").bits(own))


def _of_some_experts(
    site: Site,
    candidate: Proposal,
    rows: Int64[np.ndarray, "rows"],
    scores: Float[np.ndarray, "rows experts"],
    weight: Float64[np.ndarray, "rows"],
) -> Proposal | None:
    """The same edit of the rows of some experts, where it is wrong for the others.

    Each expert takes the score, edited or not, under which its own choices take fewer bits beside
    the boundary of the token; the boundary follows, and so again.
    """
    edited = candidate.routed
    if edited is None or candidate.of_all_only or candidate.inputs is not None:
        return None
    if _is_same_for_each(site, edited):
        return None
    own, rule = site.scores[rows], site.router.rule
    other = scores.astype(own.dtype)
    theirs, experts = site.theirs[rows], own.shape[1]
    is_some, is_chosen = np.zeros(experts, bool), chosen_mask(theirs, experts)
    for _ in range(_ROUNDS):
        mixed, _ = group_masked(rule, np.where(is_some, other, own), site.kernels)
        found = set_distances(mixed, theirs)
        # an expert of a dropped group is not chosen, whatever its score
        sign = np.where(is_chosen, -1.0, 1.0) * np.isfinite(mixed)
        middle = boundary(mixed, theirs.shape[1])[:, None]
        cost = []
        for scores in (own, other):
            with np.errstate(invalid="ignore"):
                wrong = sign * (scores - middle) / (_SOFT * found.spacing)
            bits = np.log1p(np.exp(np.clip(np.nan_to_num(wrong, nan=_FAR), -_FAR, _FAR)))
            cost.append(weight @ bits)
        better = cost[1] < cost[0] - _LEAST_BETTER
        if (better == is_some).all():
            break
        is_some = better
    number = int(is_some.sum())
    if not 0 < number < experts:
        return None
    chosen = np.flatnonzero(is_some)
    text = f"{candidate.text}, {number} of {experts} experts ({listed(chosen)})"
    return dataclasses.replace(
        candidate,
        name=f"{candidate.name}_some",
        text=text,
        own_bits=candidate.own_bits + log2_sets(experts, number),
        routed=_mixed(site, edited, is_some),
    )


#: Rounds in which experts take one of two scores; noise scale in gaps between scores, where a
#: distance in such scales no longer matters, and by how many nats the edited one has to be better.
_ROUNDS, _SOFT, _FAR, _LEAST_BETTER = 4, 1.0, 12.0, 3.0


def _is_same_for_each(site: Site, edited: Emulated) -> bool:
    """Whether neither rows nor biases of the experts are others."""
    bias, own = edited.selection_bias, site.router.selection_bias
    same = bias is own or (bias is not None and own is not None and np.array_equal(bias, own))
    return same and np.array_equal(edited.router.weight, site.router.weight)


def _mixed(site: Site, edited: Emulated, is_some: Bool[np.ndarray, "experts"]) -> Emulated:
    rows = np.where(is_some[:, None], edited.router.weight, site.router.weight)
    bias, own = edited.selection_bias, site.router.selection_bias
    if bias is not None and own is not None:
        bias = np.where(is_some, bias, own)
    plain = dataclasses.replace(edited.arithmetic, parameter="float32", bias="float32")
    router = dataclasses.replace(edited.router, weight=rows, selection_bias=bias)
    return emulate(router, plain)


def _on_all(
    site: Site,
    kept: Sequence[_Tried],
    own: tuple[SetDistances, Float64[np.ndarray, "tokens"]],
    share: Float64[np.ndarray, "tokens"],
    values: Values,
) -> dict[str, Scored]:
    saved = [tuple(_as_is(*own, noise) for noise in one.noise) for one in kept]
    as_is = [tuple(float((share * bits).sum()) for bits in ways) for ways in saved]
    is_met = [np.zeros(len(share), bool) for _ in kept]
    needs = any(one.candidate.needs_inputs for one in kept) and site.has_inputs
    for start in range(0, len(share), _AT_ONCE):
        rows = np.arange(start, min(start + _AT_ONCE, len(share)))
        inputs = values(rows) if needs else None
        for number, one in enumerate(kept):
            distances = _distances(site, one.candidate, rows, inputs)
            is_met[number][rows] = distances.is_met
            for bits, noise in zip(saved[number], one.noise, strict=True):
                bits[rows] -= noise.bits(distances)
    return {
        one.candidate.name: Scored(
            one.candidate,
            (before[0], before[1]),
            (share * ways[0], share * ways[1]),
            met,
        )
        for one, before, ways, met in zip(kept, as_is, saved, is_met, strict=True)
    }


#: An earlier router with more than this share of the bits has a fault of its own. Heuristic.
_INHERITED = 0.25

#: Tokens that are routed again at once.
_AT_ONCE = 2048


def _noises(distances: SetDistances, ties: Sequence[str] = TIE_WAYS) -> Iterator[Noise]:
    ways = ("chance",) if distances.is_tied is None else ties
    for scale in _SCALES:
        for ties in ways:
            yield Noise(float(scale), ties)


def _fitted(
    distances: SetDistances,
    weight: np.ndarray | float = 1.0,
    ties: Sequence[str] = TIE_WAYS,
) -> Noise:
    """The noise under which the sets take the fewest bits, ties broken in one of these ways."""
    return min(
        _noises(distances, ties),
        key=lambda noise: float((weight * noise.bits(distances)).sum()),
    )


def _sample(
    differs: Bool[np.ndarray, "tokens"],
) -> tuple[Int64[np.ndarray, "rows"], Float64[np.ndarray, "rows"]]:
    """Tokens evenly spread, as many with different as with equal sets, and how many each is for."""
    rows, weight = [], []
    for some in (np.flatnonzero(differs), np.flatnonzero(~differs)):
        step = max(1, math.ceil(len(some) / _TRIED))
        rows.append(some[::step])
        weight.append(np.full(len(rows[-1]), len(some) / max(len(rows[-1]), 1)))
    order = np.argsort(np.concatenate(rows), kind="stable")
    return np.concatenate(rows)[order], np.concatenate(weight)[order]


def faults(sites: Sequence[SiteScores], where: Where) -> list[Fault]:
    """Every operator on the scope where it saves most, the one that saves most in all first."""
    names = dict.fromkeys(name for site in sites for name in site.scored)
    found = [fault for name in names if (fault := _on_its_scope(name, sites, where)) is not None]
    return sorted(found, key=lambda fault: -fault.bits)


def _on_its_scope(name: str, sites: Sequence[SiteScores], where: Where) -> Fault | None:
    """The better of both: with noise as for all tokens, and as for some of them."""
    found = [fault for way in (0, 1) if (fault := _fault(name, way, sites, where)) is not None]
    return max(found, key=lambda fault: fault.bits, default=None)


def _fault(name: str, way: int, sites: Sequence[SiteScores], where: Where) -> Fault | None:
    scored = {id(site): site.scored[name] for site in sites if name in site.scored}
    saved = {key: one.saved[way] for key, one in scored.items()}
    having = [site for site in sites if id(site) in scored]
    first = max(having, key=lambda site: float(np.maximum(saved[id(site)], 0.0).sum()))
    region = best_region(saved[id(first)], where)
    for _ in range(2):  # the routers for the scope, the scope for the routers
        inside = region.is_inside
        having = [
            site
            for site in having
            if saved[id(site)][inside].sum() > scored[id(site)].candidate.own_bits
        ]
        if not having:
            return None
        region = best_region(np.sum([saved[id(site)] for site in having], axis=0), where)
    inside, lead = region.is_inside, scored[id(having[0])]
    candidate = lead.candidate
    gained = sum(float(saved[id(site)][inside].sum()) for site in having)
    cost = OPERATOR_BITS + candidate.bits + region.bits + _router_bits(having, sites)
    cost += sum(scored[id(site)].candidate.own_bits for site in having)
    met, before = equal_sets(name, having, inside)
    if met[having[0].router] < candidate.least_met or (
        candidate.everywhere and len(having) < len(sites)
    ):
        return None
    base = lead.as_is[way]
    own = float(lead.saved[way][inside].sum())
    earlier = sites[: sites.index(having[0])]
    return Fault(
        name=name,
        text=candidate.text,
        cause=candidate.cause,
        region=region,
        routers=tuple(site.router for site in having),
        bits=gained - cost,
        explained=own / base if base > 0.0 else 0.0,
        reproduced=met,
        before=before,
        mended=mended(having[0].is_met, np.where(inside, lead.is_met, having[0].is_met)),
        of_other=candidate.of_other,
        is_fitted=candidate.own_bits > 0.0,
        inherits=any(float(site.base.sum()) > _INHERITED * base for site in earlier),
        way=way,
    )


def equal_sets(
    name: str, having: Sequence[SiteScores], inside: Bool[np.ndarray, "tokens"]
) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of sets of a scope that are met, by router: under an operator, and as it is."""
    under = {site.router: float(site.scored[name].is_met[inside].mean()) for site in having}
    return under, {site.router: float(site.is_met[inside].mean()) for site in having}


def mended(before: Bool[np.ndarray, "tokens"], after: Bool[np.ndarray, "tokens"]) -> float:
    """Share of the sets that are not met before that are met after, less those that no longer are.

    0 where all are met before.
    """
    missing = int((~before).sum())
    return (int(after.sum()) - int(before.sum())) / missing if missing else 0.0


def _router_bits(having: Sequence[SiteScores], sites: Sequence[SiteScores]) -> float:
    """Bits that say which routers: none for all, those of two ends for a run of them."""
    number = len(sites)
    if len(having) == number:
        return 0.0
    places = [i for i, site in enumerate(sites) if site in having]
    is_run = places[-1] - places[0] + 1 == len(places)
    return min(2.0 * math.log2(number) if is_run else math.inf, float(number))


#: Bits that a fault has to save in all, the share of all bits at its first router that it has to
#: explain, that of the sets in its scope which differ that it has to remove, and the bits by which
#: it has to lead everything of another cause.
LEAST_BITS, _EXPLAINS, REPAIRS, _LEADS = 50.0, 0.4, 0.4, 10.0

#: ... or this share of all sets that differ there.
_MENDS = 0.8

#: Rounding that changes fewer sets than noise does: bits and share of all that it has to save.
_ROUNDING: tuple[Cause, ...] = (
    "weights rounded",
    "inputs rounded",
    "logits rounded",
    "bias rounded",
)
_PARTLY_BITS, _PARTLY = 50.0, 0.1

#: What can be said without the other checkpoint goes first where it saves this share of the bits.
_NEARLY = 0.85


def explaining(found: Sequence[Fault]) -> list[Fault]:
    """Those that save enough bits, and most of those in their scope; what is believed first."""
    enough = [one for one in found if not one.inherits and _explains(one)]
    if not enough or not enough[0].of_other:
        return enough
    most = enough[0].bits
    return sorted(
        enough, key=lambda one: one.of_other or one.is_fitted or one.bits < _NEARLY * most
    )


def _explains(one: Fault) -> bool:
    """Whether it saves enough; rounding need not, where noise hides it and it is everywhere."""
    if one.bits < LEAST_BITS:
        return False
    if one.cause in _ROUNDING and not one.region.text and not one.is_fitted:
        return one.bits >= _PARTLY_BITS and one.explained >= _PARTLY
    # beside a fault of some tokens the noise that fits all of them takes bits everywhere
    is_most = one.explained >= _EXPLAINS or one.mended >= _MENDS
    return is_most and one.repaired >= REPAIRS


def rival(best: Fault, found: Sequence[Fault]) -> Fault | None:
    """The fault of another cause that saves most, where it explains most of its scope too."""
    others = [one for one in explaining(found) if one.cause != best.cause]
    return max(others, key=lambda one: one.bits, default=None)


def margin(best: Fault, other: Fault | None) -> float:
    """Bits by which the best leads what else could be meant: all that it saves, if nothing can."""
    if other is None or (other.of_other and not best.of_other and not best.is_fitted):
        return best.bits
    return best.bits - other.bits


def believed(found: Sequence[Fault]) -> Fault | None:
    """The fault that leads; None where none explains enough, or two causes are as good."""
    best = next(iter(explaining(found)), None)
    if best is None or margin(best, rival(best, found)) < _LEADS:
        return None
    return best
