"""``moegeom imbalance``: what makes loads uneven, by laws beside tokens, and what evening costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.files import write_whole
from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float64, Int32
from moegeom.engine.choice import compared_scores, group_masked
from moegeom.engine.plan import SAMPLE_TOKENS, SMALL_SAMPLE_TOKENS
from moegeom.engine.prepared import PreparedRouter, prepare, unavailable
from moegeom.engine.sample import Sample
from moegeom.geometry import balancing, load, reference_laws
from moegeom.geometry.set_code import chosen_mask
from moegeom.geometry.space import (
    blocked_moments,
    input_pull,
    participation_ratio_corrected,
    pull_of_random_rows,
)
from moegeom.kernels.batch import RUN_TOKENS
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import Watch
from moegeom.studies.imbalance import STUDY
from moegeom.studies.imbalance.record import (
    PARTS,
    Cause,
    Evening,
    Imbalance,
    ImbalanceRequest,
    Meaning,
    RouterImbalance,
)
from moegeom.studies.written import write_rows

#: Work of a router in tokens read: those that are drawn from laws, and a bias that evens all.
_SOLVED = 10
_WORK = 1 + 5 * reference_laws.SEEDS + 2 * _SOLVED


@dataclasses.dataclass
class _Work:
    """What is ``left`` of the work of a router, of which a listener is told."""

    watch: Watch | None
    left: int

    def advance(self, done: int) -> None:
        done = min(done, self.left)
        self.left -= done
        if self.watch:
            self.watch.advance(done)


#: Probability that a run over even routers calls any of them uneven; shared by its routers.
LEVEL = 0.05


def imbalance(request: ImbalanceRequest, watch: Watch | None = None) -> Imbalance:
    """What makes the loads of each router uneven, on a sample of its tokens, and the price of a
    bias that would even them.

    Raises
    ------
    RecordingError
        When the recording does not hold the scores of all experts, or records none of the routers.
    UsageError
        When ``out`` exists or cannot be written, and without tokens.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-collapsed"
    >>> imbalance = mg.imbalance(f"{sample}/step_1500", f"{sample}/rec/step_1500", layers=2)
    >>> [(router.cause, router.evening.meaning) for router in imbalance.value.routers]
    [('mean input', 'holds, no bias now')]
    """
    opened, source = STUDY.open(request)
    recorded = opened.recorded
    # a bias moves experts that were not chosen: their scores must be known
    for router in recorded:
        if (why := unavailable(router, source.facts).get("selection")) is not None:
            raise RecordingError(
                f"{source.facts.name}: cannot say what makes the loads uneven at router "
                f"{router.name}: {why}.",
                "A bias also brings in experts that were not chosen. Record router inputs, or all "
                "logits.",
            )
    most = min(source.facts.num_tokens, SAMPLE_TOKENS)
    if watch:
        watch.start(len(recorded) * most * _WORK)
    kernels, level = load_kernels(request.backend), LEVEL / len(recorded)
    routers, samples = [], []
    for router in recorded:
        if watch:
            watch.begin(router.name)
        work = _Work(watch, most * _WORK)
        sample = opened.sample(router, sampled(router), advance=work.advance)
        sample = sample.without_outliers()
        # without its inputs, the largest arrays there are: no more than one router's at a time
        counts = {name: getattr(sample, name) for name in ("num_non_finite", "num_outliers")}
        samples.append(Sample(token=sample.token, **counts))
        routers.append(router_imbalance(router, sample, kernels, level, request, work))
        work.advance(work.left)
    if request.out is not None and request.out.suffix == ".parquet":
        write_rows(request.out, (row for one in routers for row in _law_rows(one)), recorded)
    elif request.out is not None:
        write_biases(request.out, recorded, routers)
    has_documents = source.facts.has_documents and source.facts.num_documents != 1
    return Imbalance(
        run=opened.facts(recorded),
        routers=tuple(routers),
        left_out=opened.left_out,
        seeds=reference_laws.SEEDS,
        unit="document" if has_documents else f"run of {RUN_TOKENS} tokens",
        level=level,
        sample=opened.sample_counts(samples),
        seed=request.seed,
        written=None if request.out is None else request.out.name,
    )


# -------------------------------------------------------------------------------------------- files
def write_biases(out: Path, routers: Sequence[Router], records: Sequence[RouterImbalance]) -> None:
    """The change that evens the loads and the one that takes the mean away, ``centring_``.

    Each as ``change`` and as ``selection_bias`` (the stored one plus the change), in both
    precisions: ``<router>/change_float64``, ``<router>/centring_selection_bias_float32`` and so on.
    A file that is there at the end is whole.
    """
    arrays = {}
    for router, one in zip(routers, records, strict=True):
        for prefix, change in (("", one.evening.change), ("centring_", one.centring.change)):
            added = np.array(change)
            own = router.selection_bias
            stored = np.zeros(len(added)) if own is None else own
            for name, values in (("change", added), ("selection_bias", stored + added)):
                for dtype in ("float32", "float64"):
                    arrays[f"{router.name}/{prefix}{name}_{dtype}"] = values.astype(dtype)
    if out.suffix == ".npz":
        write_whole(out, lambda file: np.savez(file, allow_pickle=False, **arrays))
    else:
        from safetensors.numpy import save

        units = {f"{one.router}/unit": one.evening.score_unit for one in records}
        write_whole(out, save(arrays, metadata=units))


def _law_rows(one: RouterImbalance) -> Iterator[dict[str, Any]]:
    """One row for each law."""
    for law in one.laws:
        errors = {f"{name}_se": getattr(law.errors, name) for name in reference_laws.FIGURES}
        row = {"router": one.router, "law": law.law, **dataclasses.asdict(law.figures), **errors}
        yield row | {
            "log_effective_sets": law.log_effective_sets,
            "log_effective_sets_se": law.effective_sets_error,
        }


# --------------------------------------------------------------------------------------- one router
def sampled(router: Router) -> tuple[str, ...]:
    """What laws are fitted to and compared with."""
    names = ("logits", "selection", "chosen", "weights", "document", "block", "input")
    return names if router.rule.groups is None else (*names, "mapped")


def router_imbalance(
    router: Router,
    sample: Sample,
    kernels: Kernels,
    level: float,
    request: ImbalanceRequest,
    work: _Work | None = None,
) -> RouterImbalance:
    """The laws beside the tokens, what each makes of the figures, and what evening would cost.

    ``level`` is the probability with which an even router may be called uneven.
    """
    seed, prepared = request.seed, prepare(router)
    work = work or _Work(None, 0)
    rule = _Rule(prepared, kernels, work)
    tokens, experts, k = len(sample.token), router.num_experts, router.rule.top_k
    rows, bias, inputs = router.weight.astype(np.float64), _bias(router), _some_inputs(sample, seed)
    logits = sample.logits.astype(np.float64)
    draws = reference_laws.reference_laws(logits, bias, rows, inputs)
    laws = reference_laws.figures_of_laws(draws, rule.figures, tokens, seed)
    laws.append(reference_laws.figures_of_tokens(sample.chosen, experts, sample.block))
    parts = reference_laws.parted(laws)
    routed, unit = _routed(router, sample, kernels)
    before = routed.loads(chosen_mask(sample.chosen, experts))
    limit = load.max_vio_limit([before], level, seed)
    centring, max_vio = balancing.centring(routed), laws[-1].figures.max_vio
    cause = cause_of(max_vio, limit, tokens, router, parts, max_vio - centring.max_vio)
    pull_random = (None, None) if inputs is None else _pull_of_random(rows, inputs)
    return RouterImbalance(
        router=router.name,
        num_experts=experts,
        top_k=k,
        num_tokens=tokens,
        num_units=before.num_units,
        limit=limit,
        cv_floor=load.load_cv_floor(tokens, experts, k),
        max_vio_floor=load.max_vio_floor(tokens, experts, k),
        pull=input_pull(routed.scores.astype(np.float64)),
        pull_random=pull_random[0],
        pull_random_sd=pull_random[1],
        laws=tuple(laws),
        parts=parts,
        cause=cause,
        centring=centring,
        evening=_evening(router, routed, unit, cause, level, seed, work),
    )


def cause_of(
    max_vio: float,
    limit: float,
    tokens: int,
    router: Router,
    parts: Mapping[reference_laws.Parted, reference_laws.Attribution],
    fall: float,
) -> Cause:
    """The largest part of what makes the loads uneven, where neither chance nor whole tokens do.

    The mean makes no more than the ``fall`` of MaxVio when it is taken away. Few: where chance
    hides an expert with twice its share, or the most uneven loads there are.
    """
    fair = router.rule.top_k * tokens / router.num_experts
    if max_vio <= max(limit, np.ceil(fair) / fair - 1.0):
        most = router.num_experts / router.rule.top_k - 1.0
        return "few" if 0.0 < min(1.0, most) <= limit else "even"
    if "max_vio" not in parts:
        return "unknown"
    most = {"mean input": fall}
    part = parts["max_vio"]
    return max(PARTS, key=lambda name: min(getattr(part, PARTS[name]), most.get(name, math.inf)))


# --------------------------------------------------------------------------------------------- laws
@dataclasses.dataclass(frozen=True, eq=False)
class _Rule:
    """What the rule of a router makes of logits."""

    prepared: PreparedRouter
    kernels: Kernels
    work: _Work

    def figures(self, logits: Float[np.ndarray, "tokens experts"]) -> reference_laws.ChoiceFigures:
        own, rule = np.ascontiguousarray(logits, np.float32), self.prepared.router.rule
        compared, _ = compared_scores(self.prepared, own, own, self.kernels)
        chosen, _ = self.kernels["top_k"](compared, rule.top_k)
        self.work.advance(len(logits))
        return reference_laws.choice_figures(chosen, self.prepared.router.num_experts)


def _bias(router: Router) -> Float64[np.ndarray, "experts"]:
    """What the rule adds to logits whatever is read: of an affine rule both biases."""
    bias = router.affine_bias if router.rule.is_affine else router.logit_bias
    return np.zeros(router.num_experts) if bias is None else bias.astype(np.float64)


def _some_inputs(sample: Sample, seed: int) -> Float64[np.ndarray, "some hidden"] | None:
    """Inputs of as many tokens as pairs of them fit into memory; None without inputs."""
    if sample.input is None:
        return None
    inputs = sample.inputs
    if len(inputs) > SMALL_SAMPLE_TOKENS:
        random = np.random.default_rng(seed)
        inputs = inputs[np.sort(random.choice(len(inputs), SMALL_SAMPLE_TOKENS, replace=False))]
    return inputs.astype(np.float64)


# ------------------------------------------------------------------------- pull of the mean input
#: Inputs whose participation ratio is taken.
_FEW = 512


def _pull_of_random(
    rows: Float64[np.ndarray, "experts hidden"], inputs: Float64[np.ndarray, "some hidden"]
) -> tuple[float, float]:
    some = inputs[:: max(len(inputs) // _FEW, 1)]  # of the ratio no more than its size matters
    moments = blocked_moments(some, np.zeros(len(some), np.int32), 1)
    ratio = moments.of_blocks(np.ones(1, bool)).participation_ratio
    corrected = participation_ratio_corrected(ratio, len(some))
    return pull_of_random_rows(inputs, corrected, np.linalg.norm(rows, axis=1))


# ------------------------------------------------------------------------------------------ evening
def _routed(router: Router, sample: Sample, kernels: Kernels) -> tuple[balancing.TokensAtRule, str]:
    """The tokens at the rule, with the bias that the router has; and the unit of their scores."""
    rule = router.rule
    scores, unit = sample.selection, rule.selection_score_unit
    if rule.groups is not None:
        # before the mask; behind it a bias is one of the scores, also where the rule has none
        bias = router.selection_bias
        bias = np.zeros(router.num_experts, np.float32) if bias is None else bias
        scores = kernels["selection_scores"](sample.mapped, rule.score, bias)
        unit = dataclasses.replace(rule, groups=None, has_selection_bias=True).selection_score_unit

    def choose(biased: Float[np.ndarray, "some experts"]) -> Int32[np.ndarray, "some k"]:
        return kernels["top_k"](group_masked(rule, biased, kernels)[0], rule.top_k)[0]

    routed = balancing.TokensAtRule(
        scores, sample.chosen, sample.weights, sample.unit, sample.half, choose
    )
    return routed, unit


def _evening(
    router: Router,
    routed: balancing.TokensAtRule,
    unit: str,
    cause: Cause,
    level: float,
    seed: int,
    work: _Work,
) -> Evening:
    """The bias that evens the loads, what it does on these and other documents, and its price."""
    scores, has_groups = routed.scores, router.rule.groups is not None
    spread, slots = balancing.score_spread(scores), routed.chosen.size
    change, num_tied, gap = balancing.evening_bias(routed, has_groups)
    work.advance(_SOLVED * len(routed.scores))
    is_before = chosen_mask(routed.chosen, router.num_experts)
    is_after = routed.choose(change)
    after = routed.loads(is_after)
    bias = np.zeros(router.num_experts)
    if router.selection_bias is not None:
        bias = router.selection_bias.astype(np.float64)
    in_float32 = (bias + change).astype(np.float32).astype(np.float64) - bias
    fell = float((scores * (is_before.astype(np.float64) - is_after)).sum())
    fair = slots / router.num_experts
    evening = Evening(
        score_unit=unit,
        is_grouped=has_groups,
        has_selection_bias=router.rule.has_selection_bias and router.selection_bias is not None,
        after=balancing.Loads.of(after),
        max_vio_float32=float(load.max_vio(routed.choose(in_float32).sum(axis=0))),
        limit_after=load.max_vio_limit([after], level, seed),
        held_out=balancing.held_out(routed, has_groups, change, level, seed),
        change=tuple(change.tolist()),
        spread=spread,
        changed_share=float((is_before != is_after).any(axis=1).mean()),
        displaced_weight=routed.weight_moved(is_after),
        score_lost=fell / (slots * spread) if spread else 0.0,
        num_tied=num_tied,
        gap=gap,
        duplicates=_duplicates(router, scores),
        meaning="balanced",
    )
    meaning = meaning_of(evening, cause, np.ceil(fair) / fair - 1.0, level)
    return dataclasses.replace(evening, meaning=meaning)


def meaning_of(evening: Evening, cause: Cause, whole: float, level: float) -> Meaning:
    """Whether a bias evens the loads; every threshold is a limit of chance at this level.

    No bias: with it, MaxVio is above the limit for even routing, and above ``whole``, what whole
    tokens allow. Holds: on both halves the bias of the other half lowers the squared CV of the
    expected load (t test at the level), and MaxVio is not above the limit there. Documents only: on
    a half it does not lower it at all.
    """
    if cause in ("few", "even"):
        return "unknown" if cause == "few" else "balanced"
    if evening.after.max_vio > max(evening.limit_after, whole + 1e-12):
        return "none found" if evening.is_grouped else "none"
    if not evening.held_out or any(half.num_units < 2 for half in evening.held_out):
        return "few"
    if any(half.reduction is None or half.reduction <= 0.0 for half in evening.held_out):
        return "documents"
    if any(half.reduction_p > level for half in evening.held_out):
        return "few"
    if not all(half.is_within for half in evening.held_out):
        return "partly"
    return "holds" if evening.has_selection_bias else "holds, no bias now"


def _duplicates(
    router: Router, scores: Float[np.ndarray, "tokens experts"]
) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Experts that no bias tells apart, and why; with groups, those of one group only."""
    groups = router.rule.groups
    size = router.num_experts if groups is None else router.num_experts // groups.num_groups
    duplicates = []
    for alike in balancing.duplicate_experts(scores):
        for group in sorted({expert // size for expert in alike}):
            members = tuple(expert for expert in alike if expert // size == group)
            if len(members) > 1:
                rows = router.weight[list(members)]
                why = "equal rows" if (rows == rows[0]).all() else "equal scores"
                duplicates.append((members, why))
    return tuple(duplicates)
