"""``moegeom explain``: two runs route the same tokens differently; which one thing explains it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

import numpy as np

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Int32, Int64
from moegeom.core.text import percent_of_all
from moegeom.core.tokens import MadeFlips, TokenSource
from moegeom.engine.checkpoint_b import routers_of_b
from moegeom.engine.jumps import set_change, why_no_jumps
from moegeom.engine.plan import on_all_cores, one_blas_thread
from moegeom.engine.prepared import prepare
from moegeom.engine.run_facts import run_b_facts
from moegeom.engine.session import Session
from moegeom.engine.sources import known_routers, open_choices
from moegeom.geometry.rows import (
    common_choices,
    completed_sets,
    expert_matching,
    overlap_beyond_chance,
)
from moegeom.geometry.set_code import chosen_mask
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import Watch
from moegeom.router.expert_functions import CountedExperts, open_expert_functions
from moegeom.router.load import load_routers
from moegeom.studies.announced import announce_experts
from moegeom.studies.explain.layer import (
    MatchedChoices,
    ReadySite,
    Sides,
    layer_evidence,
    look,
    note_under,
    routed_choices,
    sides_of,
)
from moegeom.studies.explain.record import (
    Differing,
    Evidence,
    ExplainRequest,
    Explanation,
    LayerEvidence,
    OutputChange,
)
from moegeom.studies.explain.verdict import verdict
from moegeom.studies.faults.behind import with_later
from moegeom.studies.faults.exchangeable import LEAST, FlippedRouter, Spread, spread
from moegeom.studies.faults.operator import Site
from moegeom.studies.faults.scope import Where, listed, region_of
from moegeom.studies.faults.score import (
    Fault,
    SiteScores,
    believed,
    faults,
    met_under,
    score_site,
    with_composed,
)
from moegeom.studies.log_probs import log_probs
from moegeom.studies.study import watched
from moegeom.tokens.source import Company
from moegeom.tokens.traces.alignment import RunB, match_run_b
from moegeom.tokens.traces.ids import empty_slots
from moegeom.tokens.traces.source import CountedSource
from moegeom.tokens.validity import fingerprint_test


def explain(request: ExplainRequest, watch: Watch | None = None) -> Explanation:
    """Which of the closed list of verdicts fits, and the evidence.

    Raises
    ------
    MoeGeomError
        As ``scan``; RecordingError where the two sides cannot be matched, with counts; UsageError
        when more than 2 GB of experts are to be read without ``yes``.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-balanced"
    >>> rec = mg.recording(f"{sample}/rec/step_1500")
    >>> mg.explain(f"{sample}/step_1500", rec, run_b=rec).value.verdict.cause
    'no disagreement'
    """
    if request.run_b is None:
        raise UsageError(
            "explain needs --run-b: what another run of the same text chose.",
            "A recording, or the trace of an engine: add --run-b RUN_B.",
        )
    opened = Session.open(request)
    routers, chosen, source = opened.routers, opened.chosen, opened.source
    if source is None or isinstance(source, CountedSource):
        raise UsageError(
            "explain needs tokens: what A's routers read, and what they chose.",
            "moegeom capture CKPT --text FILE --keep hidden --out REC, then add --tokens REC.",
        )
    run_b, routed = _open_run_b(request, source, routers.routers)
    shared = [
        router
        for router in chosen
        if router.name in source.facts.routers and router.name in run_b.source.facts.routers
    ]
    if not shared:
        raise RecordingError(
            f"{source.facts.name} and {run_b.source.facts.name} have none of the routers in common."
        )
    sides = sides_of(source, run_b, [router.name for router in shared], request)
    elsewhere: Mapping[str, Router] = {}  # of what B may have loaded, made to read A's inputs
    if request.checkpoint_b is not None:
        loaded = load_routers(
            open_checkpoint(request.checkpoint_b, request.remote),
            requested_family=request.requested_family,
        )
        elsewhere = routers_of_b(loaded, shared).routers
    if request.experts:
        announce_experts(opened, request.yes, watch)
    choices = _choices(shared, sides, routed)
    num_flipped = np.sum([~causes.agrees for causes in choices], axis=0)
    joined = None
    if request.log_probs is not None:
        joined = log_probs(request.log_probs, sides.columns, num_flipped)
    rows = sides.examined(len(choices))
    with one_blas_thread():  # small products gain nothing from more
        layers, causes, how, differing = _layers(choices, sides, elsewhere, rows, watch)
    recorded = run_b.source.facts.fingerprint
    evidence = Evidence(
        run=opened.facts(shared),
        other=run_b_facts(run_b),
        against="" if request.checkpoint_b is None else request.checkpoint_b,
        inputs_of="B" if sides.has_other_inputs else "A",
        num_matched=sides.num_matched,
        num_examined=len(sides.token),
        num_non_finite=sides.num_non_finite,
        any_share=float((num_flipped > 0).mean()),
        layers=tuple(layers),
        faults=causes,
        spread=how,
        log_probs=joined,
        not_looked_at=tuple(_not_looked_at(request, chosen, layers, sides, len(rows))),
        differing=differing,
        is_of_another=fingerprint_test(recorded, routers.fingerprint) == "differs",
        costs=tuple(_flip_cost(one, sides, opened) for one in choices) if request.experts else (),
        harm=_harm(source, shared),
    )
    return Explanation(**vars(evidence), verdict=verdict(evidence))


def _choices(
    routers: Sequence[Router], sides: Sides, routed: Mapping[str, Int32[np.ndarray, "tokens k"]]
) -> list[MatchedChoices]:
    """What both chose at every router, and which tokens had agreed until then.

    ``routed`` are choices of A for all tokens of its recording, where they are known already.
    """
    clean, choices = np.ones(len(sides.token), dtype=bool), []
    for router in routers:
        prepared = prepare(router)
        if router.name in routed:
            mine = routed[router.name][sides.token]
        else:
            with one_blas_thread():  # the arithmetic of the scan
                mine = sides.chosen(prepared)
        other = sides.other.read_chosen(router.name, sides.token)
        is_empty = empty_slots(other, router.num_experts, mine)
        if is_empty.any():
            other = completed_sets(other, mine, is_empty)
        agrees = sides.kernels["same_set"](mine, other)
        common = common_choices(mine, other, router.num_experts)
        matching = expert_matching(common)
        sets = (prepared, mine, other, clean, agrees, matching, common, is_empty)
        choices.append(MatchedChoices(*sets))
        clean = clean & agrees
    return choices


#: Experts, one of so many at most, that take part in all but this share of the differing sets.
_FEW_EXPERTS, _REST = 8, 0.05


def _layers(
    choices: Sequence[MatchedChoices],
    sides: Sides,
    elsewhere: Mapping[str, Router],
    rows: Int64[np.ndarray, "rows"],
    watch: Watch | None,
) -> tuple[list[LayerEvidence], list[Fault], Spread, Differing | None]:
    """Evidence of every router, the faults on their scopes, how the remaining flips spread, and
    where what differs is.
    """
    sites: list[ReadySite] = []

    def ready(number: int) -> ReadySite:
        of_b = elsewhere.get(choices[number].prepared.router.name)
        return look(choices, number, sides, of_b, rows, lambda place: sites[place].values)

    sites += on_all_cores(ready, range(len(choices)))
    names = [one.site.router.name for one in sites]
    # closed here, and not whenever it is collected: it holds threads, and the limit of BLAS
    with closing(on_all_cores(lambda one: score_site(one.site, one.values), sites)) as scored:
        scores = list(watched(scored, names, watch))
    where = Where.of(sides.columns.at(rows), sides.token[rows])
    causes = with_composed(faults(scores, where), scores, where)
    causes = with_later(
        causes, {one.site.router.name: (one.site, one.values) for one in sites}, scores, where
    )
    best = believed(causes)
    parts = () if best is None else best.parts or (best,)
    begins = next((one for one in choices[1:] if not one.agrees[one.is_clean].all()), None)

    def evidence(
        choice: MatchedChoices, one: ReadySite, score: SiteScores
    ) -> tuple[LayerEvidence, FlippedRouter | None]:
        is_met, is_told = met_under(parts, score), choice.is_clean[rows]
        for part in parts:
            if score.router in part.routers:
                candidate = score.scored[part.operator].candidate
                inside = part.region.is_inside
                note_under(one, candidate, inside & choice.is_clean[rows], sides)
                if candidate.rows is not None:  # what stands beyond its document nothing can tell
                    is_told = is_told & ~(inside & (candidate.rows < 0))
        is_open = best is None and choice is begins
        layer = layer_evidence(choice, sides, one, score, rows, is_met, is_open)
        return layer, FlippedRouter(one.site, ~is_met, is_told) if one.site.has_logits else None

    pairs = list(on_all_cores(lambda of: evidence(*of), zip(choices, sites, scores, strict=True)))
    flips = [flipped for _, flipped in pairs if flipped is not None]
    return [layer for layer, _ in pairs], causes, spread(flips), _differing(sites, where)


def _differing(sites: Sequence[ReadySite], where: Where) -> Differing | None:
    """Which tokens, and which experts, hold what differs at the first router where enough does."""
    for site in (one.site for one in sites):
        differs = site.differs & site.decides
        if differs.sum() < LEAST:
            continue
        region, share = region_of(differs, where)
        parts = [f"{percent_of_all(share)} of it in {region.text}"] if region.text else []
        inside, own = region.is_inside, np.arange(len(site.matching))
        common = common_choices(site.mine[inside], site.theirs[inside], len(own))
        number = int(inside.sum())
        few = _taking_part(site, differs)
        if few:
            parts.append(
                f"nearly always with {listed(np.array(few))} among the experts that change"
            )
        return Differing(
            site.router.name,
            ", ".join(parts),
            few,
            number,
            overlap_beyond_chance(common, own, number),
        )
    return None


def _taking_part(site: Site, differs: Bool[np.ndarray, "tokens"]) -> tuple[int, ...]:
    """The few experts, if so, of which one comes or goes in nearly every set that differs."""
    experts = len(site.matching)
    mine, theirs = (chosen_mask(sets[differs], experts) for sets in (site.mine, site.theirs))
    left, chosen = mine != theirs, []
    while len(chosen) < experts // _FEW_EXPERTS:
        best = int(left.sum(axis=0).argmax())
        chosen.append(best)
        left = left[~left[:, best]]
        if len(left) < _REST * int(differs.sum()):
            return tuple(sorted(chosen))
    return ()


def _open_run_b(
    request: ExplainRequest, source: TokenSource, whole: Sequence[Router]
) -> tuple[RunB, Mapping[str, Int32[np.ndarray, "tokens k"]]]:
    """B matched with A, and the choices of A's routers that matching computed."""
    assert request.run_b is not None
    routers = known_routers(whole)
    opened = open_choices(request.run_b, request, routers, Company(may_be_empty=True))
    by_name, kernels = {router.name: router for router in whole}, load_kernels("cpu")
    choices: dict[str, Int32[np.ndarray, "tokens k"]] = {}

    def routed(name: str) -> np.ndarray:
        if name not in choices:
            with one_blas_thread():  # the arithmetic of the scan
                choices[name] = routed_choices(source, prepare(by_name[name]), kernels)
        return choices[name]

    can_route = source.facts.stage != "ids" and not source.facts.has_chosen
    own = routed if can_route else None
    return match_run_b(source, opened, routers, must_fit=False, own=own, may_be_empty=True), choices


def _not_looked_at(
    request: ExplainRequest,
    routers: Sequence[Router],
    layers: Sequence[LayerEvidence],
    sides: Sides,
    num_routed: int,
) -> list[str]:
    gaps = []
    if left := len(routers) - len(layers):
        gaps.append(f"{left} of {len(routers)} routers (not recorded on both sides)")
    if untried := sum(bool(layer.reason) for layer in layers):
        gaps.append(f"rows, inputs and rule in {untried} of {len(layers)} routers")
    elif sides.source.facts.stage == "logits":
        gaps.append("rows and inputs (A holds logits only)")
    if left := len(sides.token) - num_routed:
        gaps.append(f"operators on {left:,} of {len(sides.token):,} matched tokens (only counted)")
    if request.checkpoint_b is None:
        gaps.append("another checkpoint that B may have loaded (--checkpoint-b)")
    if not sides.has_other_inputs:
        gaps.append("what B's routers read (not recorded)")
    if "routing_weights" not in sides.other.source.facts.outputs:
        gaps.append("B's routing weights (not recorded)")
    if request.log_probs is None:
        gaps.append("log-probs (--logprobs FILE)")
    return [*gaps, "expert weights" + " of B" * request.experts]


def _harm(source: TokenSource, routers: Sequence[Router]) -> dict[str, float]:
    """Mean KL of flips that were made in A's model, at the token and behind it, by router."""
    if not isinstance(source, MadeFlips):
        return {}
    made = {router.name: source.made_flips(router.name) for router in routers}
    return {
        name: float((flips["kl"] + flips["kl_later"]).mean())
        for name, flips in made.items()
        if flips is not None
    }


#: Flipped tokens of a router whose experts are applied: evenly spread over all of them.
_MOST_FLIPS = 512


def _flip_cost(choice: MatchedChoices, sides: Sides, opened: Session) -> OutputChange:
    """The change of the output where B's experts take the place of A's, for A's inputs.

    The weights of both are A's; so are the inputs, which B may not have had. ``reason`` says why
    nothing is known.
    """
    router = choice.prepared.router
    flipped = np.flatnonzero(~choice.agrees & (choice.other >= 0).all(axis=1))
    reason = why_no_jumps(router, sides.source.facts)
    if choice.other.shape[1] != choice.mine.shape[1]:
        reason = "B chooses another number of experts"
    if reason or not len(flipped):
        return OutputChange(router.name, len(flipped), reason=reason)
    experts = CountedExperts(open_expert_functions(opened.store, router))
    some = np.linspace(0, len(flipped) - 1, min(len(flipped), _MOST_FLIPS)).astype(np.int64)
    row = flipped[some]
    with one_blas_thread():  # the arithmetic of the scan
        inputs = [batch.values for batch in sides.batches(choice.prepared, row)]
    values = np.concatenate([part for part in inputs if part is not None])
    mine, theirs = choice.mine[row], choice.other[row]
    change, length = set_change(router, values, mine, theirs, experts.mixed)
    seen = length > 0.0
    over = change[seen] / length[seen]
    return OutputChange(
        router=router.name,
        num_flipped=len(flipped),
        num_looked=int(seen.sum()),
        over_output=float(over.mean()) if seen.any() else None,
        share=len(flipped) / len(choice.agrees),
        experts_read=experts.facts["experts_read"],
        expert_bytes=experts.facts["expert_bytes"],
    )
