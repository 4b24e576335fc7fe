"""The operator and the scope that describe B's choices in the fewest bits.

The base is A's router as it is, with noise that fits. An operator is worth what it saves beside
the base, less the bits for its parameters, its routers and its scope.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.engine.flipping import engine_logits
from moegeom.geometry.set_code import FINEST, TIE_WAYS, SetDistances, contrast_bits, set_distances
from moegeom.studies.faults._bits import bits_by_chance
from moegeom.studies.faults.operator import AS_STORED, OPERATORS, Cause, Proposal, Site, Values
from moegeom.studies.faults.scope import Fault, TokenRegion, Where, best_region, found_by_chance
from moegeom.studies.faults.some_experts import of_some_experts
from moegeom.variants.emulated import Emulated, emulate

#: Noise scales that are tried, in median gaps between the last chosen score and the first other.
_SCALES = tuple(float(scale) for scale in 2.0 ** np.arange(-12.0, 4.0, 1.5))

#: The same from the largest, every second one: each is 8 times the next.
_LADDERS = _SCALES[::-2], _SCALES[-2::-2]

#: Noise scales of what B told beside its choices.
_TOLD_SCALES = FINEST * 4.0 ** np.arange(0.0, 8.0)


@dataclass(frozen=True, eq=False)
class Apart:
    """Distance of B from a candidate router: of its sets, and of its recorded values."""

    sets: SetDistances
    contrasts: Float64[np.ndarray, "tokens values"] | None

    def bits(self, scale: float, ties: str) -> Float64[np.ndarray, "tokens"]:
        """Bits of the sets under noise of so many gaps of these scores, one of ``_SCALES``."""
        if self.sets.is_tied is None or ties == "chance":
            return self._by_chance[scale]
        if (scale, ties) not in self._by_number:
            self._by_number[scale, ties] = self.sets.bits(scale * self.sets.spacing, ties)
        return self._by_number[scale, ties]

    @cached_property
    def _by_chance(self) -> dict[float, Float64[np.ndarray, "tokens"]]:
        """Bits at every scale: all of them are tried."""
        by_scale: dict[float, np.ndarray] = {}
        for ladder in _LADDERS:
            bits = bits_by_chance(self.sets, ladder[0] * self.sets.spacing, len(ladder))
            by_scale.update(zip(ladder, bits, strict=True))
        return by_scale

    @cached_property
    def _by_number(self) -> dict[tuple[float, str], Float64[np.ndarray, "tokens"]]:
        """Cache of bits by scale and tie-break."""
        return {}

    def at(self, rows: np.ndarray) -> Apart:
        """The distances of some tokens."""
        return Apart(self.sets.at(rows), None if self.contrasts is None else self.contrasts[rows])


@dataclass(frozen=True, eq=False)
class Coded:
    """Bits of sets, and of the recorded values."""

    sets: Float64[np.ndarray, "tokens"]
    values: Float64[np.ndarray, "tokens"]

    @property
    def both(self) -> Float64[np.ndarray, "tokens"]:
        return self.sets + self.values


@dataclass(frozen=True)
class Noise:
    """Noise of a router: its scale in gaps between scores, the way in which ties are broken, and
    the scale of the values beside the sets.
    """

    scale: float
    ties: str
    value_scale: float

    def code(self, apart: Apart) -> Coded:
        """Bits of what B did under noise of so many gaps of these scores."""
        sets = apart.bits(self.scale, self.ties)
        if apart.contrasts is None:
            return Coded(sets, np.zeros(len(sets)))
        return Coded(sets, contrast_bits(apart.contrasts, self.value_scale))


def fitted(
    apart: Apart,
    weight: np.ndarray | float,
    ties: Sequence[str] = TIE_WAYS,
    base: Coded | None = None,
) -> tuple[Noise, Noise]:
    """The noise under which B takes the fewest bits, ties broken in one of these ways, and that
    which fits best where each token may be coded by the base.
    """
    ways = ("chance",) if apart.sets.is_tied is None else ties
    of_sets = {(scale, way): apart.bits(scale, way) for scale in _SCALES for way in ways}
    of_values = {float(_TOLD_SCALES[0]): np.zeros(0)}
    if apart.contrasts is not None:
        of_values = {float(scale): contrast_bits(apart.contrasts, scale) for scale in _TOLD_SCALES}

    def best(bits: Mapping[Any, np.ndarray], beside: np.ndarray | None) -> Any:
        """The key of the fewest bits, each token coded by it or by the base."""

        def cost(one: Any) -> float:
            own = bits[one]
            return float((weight * (own if beside is None else np.minimum(own, beside))).sum())

        return min(bits, key=cost) if len(bits) > 1 else next(iter(bits))

    noises = []
    for beside in (None, base):
        scale, way = best(of_sets, None if beside is None else beside.sets)
        value_scale = best(of_values, None if beside is None else beside.values)
        noises.append(Noise(scale, way, value_scale))
    return noises[0], noises[1]


def as_it_is(own: Apart, base: Coded, noise: Noise) -> Coded:
    """Bits of the base, with its own noise or the candidate's: less noise is no fault."""
    other = dataclasses.replace(noise, ties="chance").code(own)
    return Coded(np.minimum(base.sets, other.sets), np.minimum(base.values, other.values))


#: Tokens of each kind, with equal and with different sets, on which candidates are tried first,
#: how many go on to all tokens since they save most bits, and for the sets that they give.
_TRIED, _KEPT, _GIVING = 768, 8, 2

#: Bits that a candidate has to save there to go on, and the share of what the best one saves.
_WORTH, _SHARE = 20.0, 0.02

#: Bits that say which operator it is.
OPERATOR_BITS = 6.0

#: Bits of a token's recorded values, on average, from which they are more than rounding leaves.
_SOME_VALUES = 8.0


@dataclass(frozen=True, eq=False)
class Scored:
    """A candidate on all tokens of a router: sets it reproduces, and bits saved over ``as_is``.

    Bits, with the noise that fits if it is all tokens, and if it may be some of them; ``saved`` of
    all that B did, ``as_is`` and ``of_sets`` of its sets alone.
    """

    candidate: Proposal
    as_is: Sequence[float]
    saved: Float64[np.ndarray, "2 tokens"]
    of_sets: Float64[np.ndarray, "2 tokens"]
    is_met: Bool[np.ndarray, "tokens"]


@dataclass(frozen=True, eq=False)
class SiteScores:
    """One router: the bits of B's sets as it is, and the candidates that are worth a look.

    ``own_reproduced`` is the share of A's own choices that it gives, where A's inputs are routed;
    ``value_bits`` are those of B's recorded values as it is.
    """

    router: str
    base: Float64[np.ndarray, "tokens"]
    is_met: Bool[np.ndarray, "tokens"]
    decides: Bool[np.ndarray, "tokens"]
    scored: Mapping[str, Scored]
    num_tried: int
    own_reproduced: float = 1.0
    value_bits: float = 0.0


def score_site(site: Site, values: Values) -> SiteScores:
    """The base, and every candidate that saves bits on a sample of tokens."""
    own = Apart(set_distances(site.selection, site.theirs), site.told_apart)
    share = share_of_equals(site)
    a_alone = Apart(set_distances(site.selection, site.mine), None)
    ties = fitted(a_alone, share)[0].ties  # as A breaks them
    noise, _ = fitted(own, share, (ties, "chance"))
    base = noise.code(own)
    differs, is_met = site.differs, own.sets.is_met
    facts = {
        "router": site.router.name,
        "base": share * base.sets,
        "is_met": is_met,
        "decides": site.decides,
        "own_reproduced": 1.0 if site.is_of_b else float(a_alone.sets.is_met.mean()),
        "value_bits": float((share * base.values).sum()),
    }
    # the router as it is gives every set, and nothing else is recorded that a fault could explain
    if own.contrasts is None and is_met.all() and own.sets.is_tied is None:
        return SiteScores(scored={}, num_tried=0, **facts)
    if not differs.any() and facts["value_bits"] < _SOME_VALUES * len(differs):
        return SiteScores(scored={}, num_tried=0, **facts)
    rows, weight = _sample(differs)
    weight = weight * share[rows]
    sample = values(rows) if site.has_inputs else None
    tried = _tried(site, rows, weight, own.at(rows), (ties, "chance"), sample)
    number = sum(one.candidate.stands_for for one in tried)
    worth = sorted(tried, key=lambda one: -one.saved)
    # many fit badly in one way: what gives most sets goes on, too
    giving = sorted(worth[_KEPT:], key=lambda one: -one.met)[:_GIVING]
    worth = [*worth[:_KEPT], *giving]
    trials = [one for one in worth if one.saved > max(_WORTH, _SHARE * worth[0].saved)]
    scored = _on_all(site, trials, (own, base), share, values)
    return SiteScores(scored=scored, num_tried=number, **facts)


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
    # a number for each row, the same for equal ones; for others too, once in 2^64 pairs
    draws = np.random.default_rng(0).integers(1, 2**63, near.shape[1], np.uint64)
    name = near.astype(np.uint64) @ draws
    _, place, count = np.unique(name, return_inverse=True, return_counts=True)
    return 1.0 / count[place]


#: Edits of all experts that save less than this share of the bits on every so many-th token of the
#: sample go no further.
_EVERY, _LEAST_FIRST = 6, 0.1


@dataclass(frozen=True, eq=False)
class _Tried:
    """A candidate on the sample: bits saved in whole parts of it, sets that it gives, its noise.

    The noise fits if it is all tokens, and if it may be some of them.
    """

    candidate: Proposal
    saved: float
    met: float
    noise: tuple[Noise, Noise]


def _tried(
    site: Site,
    rows: Int64[np.ndarray, "rows"],
    weight: Float64[np.ndarray, "rows"],
    own: Apart,
    ties: Sequence[str],
    sample: Float[np.ndarray, "rows hidden"] | None,
) -> list[_Tried]:
    """All candidates of all operators, and those whose rows concern some of the experts only."""
    noise, _ = fitted(own, weight, ties)
    base, groups = noise.code(own), _groups(site, rows)
    trials = []
    only_logits = site.is_of_logits
    plain = None
    if sample is not None and not only_logits:
        emulated = emulate(site.router, AS_STORED)
        plain = emulated, engine_logits(emulated, emulated.inputs(sample))
    first = np.arange(0, len(rows), _EVERY)
    own_first = own.at(first)
    base_first = noise.code(own_first)
    of_first = own_first, base_first, weight[first], _groups(site, rows[first])
    least = _LEAST_FIRST * float((weight[first] * base_first.both).sum())
    for operator in OPERATORS.all():
        for candidate in operator.candidates(site):
            if only_logits and not candidate.changes_logits(site):
                continue
            if candidate.is_whole and sample is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    logits = candidate.logits(site, rows[first], sample[first])
                apart = _apart(site, candidate, rows[first], logits)
                look = _compared(candidate, apart, *of_first)
                if look.saved <= least:
                    trials.append(look)
                    continue
            logits, some = None, iter(())
            if candidate.routed is not None:
                with np.errstate(over="ignore", invalid="ignore"):  # as below
                    logits = candidate.logits(site, rows, sample)
                some = of_some_experts(site, candidate, rows, logits, weight)
            if not candidate.of_some_only:
                apart = _apart(site, candidate, rows, logits)
                trials.append(_compared(candidate, apart, own, base, weight, groups))
            for part in some:
                with np.errstate(over="ignore", invalid="ignore"):
                    of_part = _of_part(site, part, candidate, logits, plain)
                    if of_part is None:
                        of_part = part.logits(site, rows, sample)
                apart = _apart(site, part, rows, of_part)
                trials.append(_compared(part, apart, own, base, weight, groups))
    return trials


def _of_part(
    site: Site,
    part: Proposal,
    whole: Proposal,
    logits: Float[np.ndarray, "rows experts"] | None,
    plain: tuple[Emulated, Float[np.ndarray, "rows experts"]] | None,
) -> Float[np.ndarray, "rows experts"] | None:
    """Logits of an edit of some rows from those of the edit of all and of the router as it is.

    None where they have to be computed, or are those of the site.
    """
    if plain is None or not (part.can_share(site) and whole.can_share(site)):
        return None
    assert part.routed is not None
    assert whole.routed is not None
    assert logits is not None
    source = sources(part.routed, (whole.routed, plain[0]))
    return None if source is None else composed(source, (logits, plain[1]))


def _apart(
    site: Site,
    candidate: Proposal,
    rows: Int64[np.ndarray, "rows"],
    logits: Float[np.ndarray, "rows experts"] | None,
) -> Apart:
    """How far B is from the candidate, which has these logits if it routes again."""
    with np.errstate(over="ignore", invalid="ignore"):  # a fault may leave the range of numbers
        selection = candidate.selection(site, rows, logits)
        values = candidate.told_apart(site, rows, logits)
    return Apart(set_distances(selection, candidate.theirs(site, rows)), values)


def _compared(
    candidate: Proposal,
    apart: Apart,
    own: Apart,
    base: Coded,
    weight: Float64[np.ndarray, "rows"],
    groups: Sequence[Int64[np.ndarray, "rows"]],
) -> _Tried:
    """The noise under which the candidate takes the fewest bits, alone and with the base."""
    both = fitted(apart, weight, candidate.ties, base)
    saved = [weight * (as_it_is(own, base, one).both - one.code(apart).both) for one in both]
    worth = max(
        float(np.maximum(np.bincount(group, weights=one), 0.0).sum())
        for one in saved
        # what is routed again costs time, and a few positions of everything are found by chance
        for group in groups[: -2 if candidate.routed is not None else None]
    )
    return _Tried(candidate, worth, float(weight @ apart.sets.is_met), both)


def _groups(site: Site, rows: Int64[np.ndarray, "rows"]) -> list[Int64[np.ndarray, "rows"]]:
    """Partitions of the tokens: a fault on a scope saves bits in whole parts of one of them."""
    columns = site.columns.at(rows)
    document = np.unique(columns.document, return_inverse=True)[1].ravel()
    position = np.maximum(columns.position.astype(np.int64), 0)
    length = int(position.max()) + 1
    blocks = position * _BLOCKS // length
    turns = [number % ranks for number in (rows, position) for ranks in _TURNS]
    parts = document * _PARTS + position * _PARTS // length
    return [np.zeros(len(rows), np.int64), document, blocks, *turns, parts, position]


#: Blocks of positions, numbers of ranks, and parts of documents by which a sample is parted.
_BLOCKS, _TURNS, _PARTS = 16, (2, 3, 4, 5, 7, 8), 4


def _on_all(
    site: Site,
    trials: Sequence[_Tried],
    own: tuple[Apart, Coded],
    share: Float64[np.ndarray, "tokens"],
    values: Values,
) -> dict[str, Scored]:
    scored = []
    for one in trials:
        before = [as_it_is(*own, noise) for noise in one.noise]
        saved, of_sets = (
            share * np.stack([getattr(bits, kind) for bits in before]) for kind in ("both", "sets")
        )
        as_is, is_met = [float(bits.sum()) for bits in of_sets], np.zeros(len(share), bool)
        scored.append(Scored(one.candidate, as_is, saved, of_sets, is_met))
    needs = any(one.candidate.routed is not None for one in trials) and site.has_inputs
    routed, source = _shared(site, [one.candidate for one in trials]) if needs else ([], {})
    for start in range(0, len(share), _AT_ONCE):
        rows = np.arange(start, min(start + _AT_ONCE, len(share)))
        inputs = values(rows) if needs else None
        shared: dict[int, np.ndarray] = {}
        if inputs is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                distinct = [engine_logits(one, one.inputs(inputs)) for one in routed]
            shared = {number: composed(origin, distinct) for number, origin in source.items()}
        for number, (one, sums) in enumerate(zip(trials, scored, strict=True)):
            logits = shared.get(number)
            if one.candidate.routed is not None and logits is None:
                with np.errstate(over="ignore", invalid="ignore"):
                    logits = one.candidate.logits(site, rows, inputs)
            apart = _apart(site, one.candidate, rows, logits)
            sums.is_met[rows] = apart.sets.is_met
            for way, noise in enumerate(one.noise):
                bits = noise.code(apart)
                sums.saved[way, rows] -= share[rows] * bits.both
                sums.of_sets[way, rows] -= share[rows] * bits.sets
    return {one.candidate.name: one for one in scored}


def _shared(
    site: Site, candidates: Sequence[Proposal]
) -> tuple[list[Emulated], dict[int, Int64[np.ndarray, "experts"]]]:
    """Routers of whose rows candidates are made, and by candidate the router of each row.

    Empty where that saves no evaluation.
    """
    edits = {
        n: one.routed for n, one in enumerate(candidates) if one.can_share(site) and one.routed
    }
    routed, source = [emulate(site.router, AS_STORED)], {}
    # an edit of some rows takes more bits than that of all, which it is made of
    for number in sorted(edits, key=lambda n: candidates[n].own_bits):
        origin = sources(edits[number], routed)
        if origin is None:
            routed.append(edits[number])
            origin = np.full(edits[number].columns.shape[1], len(routed) - 1)
        source[number] = origin
    return (routed, source) if len(routed) < len(source) else ([], {})


def sources(router: Emulated, others: Sequence[Emulated]) -> Int64[np.ndarray, "experts"] | None:
    """For each expert the first of ``others`` that has its row and bias, and reads inputs alike.

    None where one expert has none.
    """
    source = np.full(router.columns.shape[1], -1)
    for number, one in enumerate(others):
        if _reads(one) != _reads(router) or (one.logit_bias is None) != (router.logit_bias is None):
            continue
        is_same = (one.columns == router.columns).all(axis=0)
        if one.logit_bias is not None and router.logit_bias is not None:
            is_same &= one.logit_bias == router.logit_bias
        source[(source < 0) & is_same] = number
    return source if (source >= 0).all() else None


def _reads(emulated: Emulated) -> tuple[str, str]:
    return emulated.arithmetic.input, emulated.arithmetic.operands


def composed(
    source: Int64[np.ndarray, "experts"], logits: Sequence[Float[np.ndarray, "tokens experts"]]
) -> Float[np.ndarray, "tokens experts"]:
    """The logits of each expert from those of its source.

    In products of one shape a column does not depend on the others, so that no bit changes.
    Oracle in tests: the product itself.
    """
    columns = np.empty_like(logits[0])
    for number in np.unique(source):
        columns[:, source == number] = logits[number][:, source == number]
    return columns


#: An earlier router with more than this share of the bits has a fault of its own. Heuristic.
_INHERITED = 0.25

#: Tokens that are routed again at once.
_AT_ONCE = 2048


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
    """Every operator where it saves most, on a scope or everywhere, the most valuable first."""
    every = []
    for name in dict.fromkeys(name for site in sites for name in site.scored):
        fits = (_fault(name, start, sites, where) for start in ("everywhere", *WAYS))
        best = max((fit for fit in fits if fit is not None), key=lambda fit: fit.bits, default=None)
        every += [] if best is None else [best]
    return sorted(every, key=lambda fault: -fault.bits)


#: How noise was fitted: as if the operator held for all tokens, or for some of them.
WAYS = (0, 1)


def _ways(
    sites: Sequence[SiteScores], name: str, inside: Bool[np.ndarray, "tokens"]
) -> dict[str, int]:
    """At each router the noise under which the operator saves most on these tokens."""
    return {
        site.router: max(WAYS, key=lambda way: float(site.scored[name].saved[way][inside].sum()))
        for site in sites
    }


def _fault(
    name: str, start: Literal["everywhere", 0, 1], sites: Sequence[SiteScores], where: Where
) -> Fault | None:
    """The operator on all tokens, or on the scope that its savings with one noise begin with."""
    having = [site for site in sites if name in site.scored]
    every = TokenRegion(np.ones(len(where.document), bool), "", 0.0)
    is_whole = start == "everywhere"

    def saved(site: SiteScores) -> Float64[np.ndarray, "tokens"]:
        return site.scored[name].saved[ways[site.router]]

    ways = dict.fromkeys((site.router for site in having), 0 if start == "everywhere" else start)
    first = max(having, key=lambda site: float(np.maximum(saved(site), 0.0).sum()))
    region = every if is_whole else best_region(saved(first), where)
    of_all = saved(first)
    for _ in range(1 if is_whole else 2):  # the routers for the scope, the scope for the routers
        inside = region.is_inside
        ways = _ways(having, name, inside)
        having = [
            site
            for site in having
            if saved(site)[inside].sum() > site.scored[name].candidate.own_bits
        ]
        if not having:
            return None
        of_all = np.sum([saved(site) for site in having], axis=0)
        region = every if is_whole else best_region(of_all, where)
    if bool(region.text) == is_whole:
        return None  # no scope is worth its bits: that is the fit of all tokens
    inside, lead = region.is_inside, having[0].scored[name]
    candidate = lead.candidate
    gained = _decisive(name, having, ways, inside)
    cost = OPERATOR_BITS + candidate.bits + region.bits + _router_bits(having, sites)
    if region.text and gained - cost >= LEAST_BITS:
        cost += found_by_chance(of_all, where)
        if gained <= cost:
            return None
    met, before = equal_sets(name, having, inside)
    if met[having[0].router] < candidate.least_met or (
        candidate.everywhere and len(having) < len(sites)
    ):
        return None
    way = ways[having[0].router]
    base = lead.as_is[way]
    own = float(lead.of_sets[way][inside].sum())
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
        of_values=_of_values(having[0], lead, way, inside),
        of_other=candidate.of_other,
        is_fitted=candidate.own_bits > 0.0,
        is_estimate=candidate.is_estimate,
        inherits=any(float(site.base.sum()) > _INHERITED * base for site in earlier),
        ways=ways,
    )


def _of_values(
    site: SiteScores, lead: Scored, way: int, inside: Bool[np.ndarray, "tokens"]
) -> float:
    """Share of the bits of B's recorded values that an operator saves."""
    saved = float((lead.saved[way] - lead.of_sets[way])[inside].sum())
    return saved / site.value_bits if site.value_bits > 0.0 else 0.0


def _decisive(
    name: str,
    having: Sequence[SiteScores],
    ways: Mapping[str, int],
    inside: Bool[np.ndarray, "tokens"],
) -> float:
    """Bits that decide between operators, less those of their numbers at each router.

    Of tokens that differ at an earlier router what B's router read is not known: there an operator
    shows that it holds, and no more.
    """
    gained = 0.0
    for number, site in enumerate(having):
        scored = site.scored[name]
        of_site = float(scored.saved[ways[site.router]][inside & site.decides].sum())
        own = of_site - scored.candidate.own_bits
        gained += max(own, 0.0) if number else own
    return gained


def equal_sets(
    name: str, having: Sequence[SiteScores], inside: Bool[np.ndarray, "tokens"]
) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of sets of a scope that are met, by router: under an operator, and as it is."""
    under = {site.router: float(site.scored[name].is_met[inside].mean()) for site in having}
    return under, {site.router: float(site.is_met[inside].mean()) for site in having}


def mended(before: Bool[np.ndarray, "tokens"], after: Bool[np.ndarray, "tokens"]) -> float:
    """Share of the wrong sets that the fault corrects, less those that it breaks.

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

#: ... of what is fitted, such as the experts that it is about, on some of the tokens alone: with so
#: much freedom an operator fits a part of what another one did.
_FITTED_BITS = 250.0

#: ... or this share of all sets that differ there.
_MENDS = 0.8

#: Share of the sets that differ which what leads an estimate removes, and that of an estimate which
#: leads what removes less. Heuristic.
_OUTRIGHT, _FORETELLS = 0.8, 0.6

#: Share of all sets that differ by which an estimate, or two faults, may do better than what is
#: right.
NEAR = 0.02

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


def explaining(candidates: Sequence[Fault]) -> list[Fault]:
    """Faults that save enough bits and most of those in their scope; the most credible first."""
    enough = [one for one in candidates if not one.inherits and _explains(one)]
    if enough and enough[0].cause == "unrelated":
        lead = enough[0]
        met = lead.reproduced[lead.router]
        # what gives as many of the choices from what a token reads says more
        better = [one for one in enough if one.reproduced.get(lead.router, 0.0) > met]
        enough = [*better, *(one for one in enough if one not in better)]
    if enough and enough[0].repaired < _OUTRIGHT:
        # what leaves much does not lead what foretells more
        more = [one for one in enough if one.is_estimate and one.repaired > _FORETELLS]
        more = [one for one in more if one.repaired > enough[0].repaired]
        enough = [*more, *(one for one in enough if one not in more)]
    if enough and enough[0].is_estimate:
        lead = enough[0]
        # what is near any change of rows leads nothing that gives as many sets outright
        right = [one for one in enough if not one.is_estimate and one.repaired >= _OUTRIGHT]
        exact = [one for one in right if one.mended >= lead.mended - NEAR]
        enough = [*exact, *(one for one in enough if one not in exact)]
    if not enough or not (enough[0].of_other or enough[0].is_fitted):
        return enough
    most = enough[0].bits
    return sorted(
        enough, key=lambda one: one.of_other or one.is_fitted or one.bits < _NEARLY * most
    )


def _explains(one: Fault) -> bool:
    """Whether it saves enough; rounding need not, where noise hides it and it is everywhere."""
    if one.bits < (_FITTED_BITS if one.is_fitted and one.region.text else LEAST_BITS):
        return False
    if one.cause in _ROUNDING and not one.region.text and not one.is_fitted:
        # where every set is met, ties tell them apart, and a coarser format only makes more of them
        return one.bits >= _PARTLY_BITS and one.explained >= _PARTLY and one.mended > 0.0
    if one.before[one.router] == 1.0 and one.cause != "ties broken by number":
        return one.of_values >= _MENDS  # no set differs: what B recorded beside them does
    # beside a fault of some tokens the noise that fits all of them takes bits everywhere
    is_most = one.explained >= _EXPLAINS or one.mended >= _MENDS
    return is_most and one.repaired >= REPAIRS


def rival(best: Fault, candidates: Sequence[Fault]) -> Fault | None:
    """The best fault of another cause, where it explains most of its scope too.

    Edits of one bias that fit alike are one cause: the simplest is said. An estimate is near
    whatever is right.
    """
    kind = best.cause.split()[0]
    others = [
        one
        for one in explaining(candidates)
        if one.cause != best.cause
        and not (kind == "bias" == one.cause.split()[0])
        and not (one.is_estimate and not best.is_estimate)
        and not (best.is_estimate and one.repaired < min(best.repaired, _OUTRIGHT))
        # rows of zeros are not chosen, too
        and (best.cause, one.cause) != ("rows damaged", "experts favoured otherwise")
    ]
    return max(others, key=lambda one: one.bits, default=None)


def margin(best: Fault, other: Fault | None) -> float:
    """Bits by which the best leads what else could be meant: all that it saves, if nothing can."""
    is_plain = not best.of_other and not best.is_fitted
    if other is None or (is_plain and (other.of_other or other.is_fitted)):
        return best.bits
    return best.bits - other.bits


def believed(candidates: Sequence[Fault]) -> Fault | None:
    """The fault that leads; None where none explains enough, or two causes are as good."""
    best = next(iter(explaining(candidates)), None)
    if best is None or margin(best, rival(best, candidates)) < _LEADS:
        return None
    return best


# ------------------------------------------------------------------------------- several faults
#: Faults in one composition, and those that save most alone, of which the others are taken.
_MOST_PARTS, _LEADING = 3, 12


def with_composed(pool: Sequence[Fault], sites: Sequence[SiteScores], where: Where) -> list[Fault]:
    """The faults, and one composed of the leading and others on other tokens, if it saves bits."""
    first = next((one for one in pool if one.bits >= LEAST_BITS and one.repaired >= REPAIRS), None)
    if first is None:
        return list(pool)
    parts = [first]
    while len(parts) < _MOST_PARTS:
        taken = np.any([part.region.is_inside for part in parts], axis=0)
        more = [
            part
            for fault in pool[:_LEADING]
            if fault.name not in {one.name for one in parts}
            and (part := _rest(fault, ~taken, sites, where)) is not None
        ]
        if not more:
            break
        parts.append(max(more, key=lambda part: part.bits))
    if len(parts) == 1:
        return list(pool)
    whole = _whole(parts, sites)
    return sorted([*pool, whole], key=lambda fault: -fault.bits)


def _rest(
    fault: Fault, is_left: Bool[np.ndarray, "tokens"], sites: Sequence[SiteScores], where: Where
) -> Fault | None:
    """The fault on tokens that are left; None where it is not worth its bits, or repairs little."""
    having = [site for site in sites if site.router in fault.routers]
    name, ways = fault.name, fault.ways
    saved = [site.scored[name].saved[ways[site.router]] for site in having]
    of_all = np.where(is_left, np.sum(saved, axis=0), 0.0)
    region = best_region(of_all, where)
    inside = region.is_inside & is_left
    bits = _decisive(name, having, ways, inside) - region.bits - OPERATOR_BITS
    bits -= having[0].scored[name].candidate.bits
    if bits >= LEAST_BITS and region.text:
        bits -= found_by_chance(of_all, where)
    if bits < LEAST_BITS:
        return None
    met, before = equal_sets(fault.name, having, inside)
    part = dataclasses.replace(
        fault,
        region=TokenRegion(inside, region.text or "all others", region.bits),
        bits=bits,
        reproduced=met,
        before=before,
        mended=0.0,
    )
    return part if part.repaired >= REPAIRS else None


def _whole(parts: Sequence[Fault], sites: Sequence[SiteScores]) -> Fault:
    """All parts as one fault, named by the part that saves most."""
    inside = np.any([part.region.is_inside for part in parts], axis=0)
    having = [site for site in sites if any(site.router in part.routers for part in parts)]
    met = {site.router: met_under(parts, site) for site in having}
    first = having[0]
    there = [(first.scored[p.name], p) for p in parts if first.router in p.routers]
    base = min(scored.as_is[part.ways[first.router]] for scored, part in there)
    own = [
        float(scored.of_sets[part.ways[first.router]][part.region.is_inside].sum())
        for scored, part in there
    ]
    most = max(parts, key=lambda part: part.bits)
    scopes = " and ".join(part.region.text or "all" for part in parts)
    return dataclasses.replace(
        most,
        name="+".join(part.name for part in parts),
        text=" and ".join(part.text for part in parts),
        region=TokenRegion(inside, f"{scopes} respectively", sum(p.region.bits for p in parts)),
        routers=tuple(site.router for site in having),
        bits=sum(part.bits for part in parts),
        explained=sum(own) / base if base > 0.0 else 0.0,
        reproduced={site.router: float(met[site.router][inside].mean()) for site in having},
        before={site.router: float(site.is_met[inside].mean()) for site in having},
        mended=mended(first.is_met, met[first.router]),
        of_other=any(part.of_other for part in parts),
        is_fitted=any(part.is_fitted for part in parts),
        inherits=any(part.inherits for part in parts),
        parts=tuple(parts),
    )


def met_under(parts: Sequence[Fault], site: SiteScores) -> Bool[np.ndarray, "tokens"]:
    """Whether each set is reproduced: by the fault of its token, else by A's router."""
    is_met = site.is_met
    for part in parts:
        if site.router in part.routers:
            under = part.met.get(site.router)
            under = site.scored[part.operator].is_met if under is None else under
            is_met = np.where(part.region.is_inside, under, is_met)
    return is_met
