"""One router: a sample of tokens, the laws beside it, what makes its loads uneven."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int32, Int64
from threadpoolctl import threadpool_limits

from moegeom.core.errors import NonFiniteError
from moegeom.core.router import Router
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, TokenSource
from moegeom.engine.batch import LazyBatch
from moegeom.engine.choice import compared_scores, group_masked
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS, sample_tiles
from moegeom.engine.prepared import PreparedRouter, prepare
from moegeom.engine.task import Task
from moegeom.geometry import load
from moegeom.geometry.capacity.cell_bounds import expected_diagram, most_cells
from moegeom.geometry.capacity.hypersimplex import log10_count
from moegeom.geometry.input_pull import input_pull, pull_of_random_rows
from moegeom.geometry.load import max_vio_limit, scatter, unit_counts
from moegeom.geometry.reference_laws import (
    LAWS,
    Attribution,
    InputSizes,
    attributed,
    reference_laws,
)
from moegeom.geometry.set_code import chosen_mask
from moegeom.geometry.space import blocked_moments, dimension_estimates, distinct_rows
from moegeom.geometry.thickening import (
    ball_logits,
    log_half_binomial,
    log_order_bound,
    pair_border_shares,
)
from moegeom.kernels.batch import NUM_BLOCKS, RUN_TOKENS
from moegeom.kernels.reduction import Kernels
from moegeom.studies.space.record import (
    FIGURES,
    Centring,
    LawFigures,
    LawValues,
    Meaning,
    NearBoundaries,
    Reach,
    RouterSpace,
)

#: Draws of each law.
SEEDS = 8

#: The law of uniform points of a ball of the rms length of the inputs.
BALL = "ball"

#: Boundaries that are looked at, at most, and draws of each.
_PAIRS, _DRAWS = 1024, 1000

#: Experts more than one that tie, of which bounds are told.
_ORDERS = (1, 2, 3)

#: Share of the recorded tokens that count as near a boundary: the distance is what is compared.
NEAR = 0.1

#: Inputs of which neighbours are looked for.
_NEIGHBOURS_OF = 2048


@dataclass(frozen=True, eq=False)
class SpaceSample:
    """Tokens at one router: logits as the rule takes them, scores without bias and mask, inputs
    where they are recorded, what was chosen, the document (or run of 256 tokens), and its block.
    """

    logits: Float[np.ndarray, "tokens experts"]
    scores: Float[np.ndarray, "tokens experts"]
    inputs: Float32[np.ndarray, "tokens hidden"] | None
    chosen: Int32[np.ndarray, "tokens k"]
    weights: Float64[np.ndarray, "tokens k"]
    distance: Float64[np.ndarray, "tokens"] | None
    unit: Int64[np.ndarray, "tokens"]
    block: Int32[np.ndarray, "tokens"]


def read_sample(
    router: Router,
    source: TokenSource,
    kernels: Kernels,
    seed: int,
    advanced: Callable[[int], None] = lambda tokens: None,
) -> SpaceSample:
    """A seeded sample of at most 4096 tokens, whole tiles.

    Raises
    ------
    NonFiniteError
        When a token of the sample is not finite at this router.
    """
    prepared = prepare(router)
    task = Task(prepared, source, kernels)
    is_linear = prepared.rows is not None and prepared.curved is None
    total = source.facts.num_tokens
    parts, inputs, distances = [], [], []
    with threadpool_limits(1, user_api="blas"):  # the arithmetic of the scan
        for tile in sample_tiles(total, seed, SMALL_SAMPLE_TOKENS):
            start, stop = tile * TILE, min((tile + 1) * TILE, total)
            q = LazyBatch(task, start, stop)
            if lost := q.non_finite:
                raise NonFiniteError(
                    f"{source.facts.name}: {number_of(len(lost), 'token')} at router "
                    f"{router.name} are not finite (first: token {lost[0]}).",
                    "Record again in float32; laws cannot be fitted to scores that overflow.",
                )
            columns = (q.chosen, q.weights, q.document, q.token, q.block)
            parts.append((q.logits, q.scores, *columns))
            inputs.append(q.input)
            distances.append(q.distance if is_linear else None)
            advanced(stop - start)
    logits, scores, chosen, weights, document, token, block = map(
        np.concatenate, zip(*parts, strict=True)
    )
    unit = np.where(document >= 0, document, -1 - token // RUN_TOKENS)
    return SpaceSample(
        logits, scores, _joined(inputs), chosen, weights, _joined(distances), unit, block
    )


def _joined(parts: list[Any]) -> Any:
    """All parts; None where they are not known."""
    return None if any(part is None for part in parts) else np.concatenate(parts)


def router_space(
    router: Router,
    sample: SpaceSample,
    kernels: Kernels,
    level: float,
    seed: int,
    near: float | None = None,
) -> RouterSpace:
    """The laws beside the tokens, what each makes of the figures, and centring.

    ``near`` is the distance that counts as near a boundary; that of the nearest tenth of the tokens
    where it is None.
    """
    prepared = prepare(router)
    if near is None and sample.distance is not None:
        near = float(np.quantile(sample.distance, NEAR))
    choose = _Choosing(prepared, kernels, near)
    rows = sizes = None
    if sample.inputs is not None:
        rows, sizes = router.weight.astype(np.float64), _sizes(sample.inputs)
    laws = reference_laws(sample.logits.astype(np.float64), _bias(router), rows, sizes)
    tokens = len(sample.logits)
    told = [_drawn(name, law.draw, choose, tokens, seed) for name, law in laws.items()]
    if rows is not None and sizes is not None:
        radius = math.sqrt(sizes.about_zero * rows.shape[1])
        ball = functools.partial(ball_logits, rows, _bias(router), radius)
        told.append(_drawn(BALL, ball, choose, tokens, seed))
    told.append(_of_tokens(choose, sample))
    parts = _parted({one.law: one.figures for one in told})
    found = scatter(unit_counts(chosen_mask(sample.chosen, router.num_experts), sample.unit))
    limit = max_vio_limit([found], level, seed)
    bias = router.selection_bias
    selection = sample.scores + (0.0 if bias is None else bias.astype(np.float64))
    random, dimension = _pull_of_random(router, sample), _dimension(sample, seed)
    return RouterSpace(
        router=router.name,
        num_experts=router.num_experts,
        top_k=router.rule.top_k,
        num_tokens=len(sample.logits),
        limit=limit,
        pull=input_pull(selection.astype(np.float64)),
        pull_random=None if random is None else random[0],
        pull_random_sd=None if random is None else random[1],
        laws=tuple(told),
        parts=parts,
        centring=_centred(router, sample, selection, kernels),
        dimension=dimension,
        reach=_reach(prepared, dimension),
        near=_near(prepared, near, sizes, seed),
        meaning=_meaning(told[-1].figures.max_vio, limit, parts),
    )


def _meaning(max_vio: float, limit: float, parts: dict[str, Attribution]) -> Meaning:
    """The largest part of what makes the loads uneven, where chance does not."""
    if max_vio <= limit:
        return "even"
    if "max_vio" not in parts:
        return "unknown"
    part = parts["max_vio"]
    of_each: dict[Meaning, float] = {
        "mean input": part.mean,
        "covariance": part.covariance,
        "rows": part.rows,
        "rest": part.rest,
    }
    return max(of_each, key=lambda name: of_each[name])


def _bias(router: Router) -> Float64[np.ndarray, "experts"]:
    """What the rule adds to logits whatever is read: of an affine rule both biases."""
    found = np.zeros(router.num_experts)
    if router.logit_bias is not None:
        found = found + router.logit_bias
    if router.rule.is_affine and router.selection_bias is not None:
        found = found + router.selection_bias
    return found.astype(np.float64)


def _sizes(inputs: Float32[np.ndarray, "tokens hidden"]) -> InputSizes:
    values = inputs.astype(np.float64)
    return InputSizes(float(values.var(axis=0).mean()), float((values**2).mean()))


def _pull_of_random(router: Router, sample: SpaceSample) -> tuple[float, float] | None:
    if sample.inputs is None:
        return None
    inputs = sample.inputs.astype(np.float64)
    moments = blocked_moments(inputs, np.zeros(len(inputs), np.int32), 1)
    ratio = moments.of_blocks(np.ones(1, bool)).participation_ratio
    lengths = np.linalg.norm(router.weight.astype(np.float64), axis=1)
    return pull_of_random_rows(inputs, ratio, lengths)


def _dimension(sample: SpaceSample, seed: int) -> tuple[float, float] | None:
    """The range of the intrinsic dimension of the inputs; None where nothing can be said."""
    if sample.inputs is None:
        return None
    order = np.random.default_rng(seed).permutation(len(sample.inputs))[:_NEIGHBOURS_OF]
    rows = sample.inputs[order].astype(np.float64)
    found = dimension_estimates(rows[np.sort(distinct_rows(rows))])
    values = [value for _, _, value in found if np.isfinite(value)]
    return (min(values), max(values)) if values else None


def _reach(prepared: PreparedRouter, dimension: tuple[float, float] | None) -> tuple[Reach, ...]:
    """Cells on affine sets of the least and of the largest dimension, of linear boundaries."""
    if dimension is None or prepared.rows is None or prepared.curved is not None:
        return ()
    experts, k = prepared.router.num_experts, prepared.router.rule.top_k
    found = []
    for dims in sorted({math.ceil(end) for end in dimension}):
        mean = expected_diagram(experts, k, dims, is_central=False).cells
        random = math.log10(mean) if 0.0 < mean < math.inf else None
        most = most_cells(experts, k, dims, is_central=False)
        found.append(Reach(dims, log10_count(most), random))
    return tuple(found)


def _near(
    prepared: PreparedRouter, width: float | None, sizes: InputSizes | None, seed: int
) -> NearBoundaries | None:
    """What the number of boundaries alone makes of the share near one, of linear boundaries."""
    if width is None or sizes is None or width == 0.0:
        return None
    rows = prepared.router.weight.astype(np.float64)
    (experts, hidden), k = rows.shape, prepared.router.rule.top_k
    radius = math.sqrt(sizes.about_zero * hidden)
    random = np.random.default_rng([seed, experts])
    pairs = np.stack(np.triu_indices(experts, 1), axis=1)
    number = len(pairs)
    if number > _PAIRS:
        pairs = pairs[random.choice(number, _PAIRS, replace=False)]
    shares = pair_border_shares(rows @ rows.T, k, pairs, _DRAWS, random)
    borders = float(np.nanmean(shares)) * number if np.isfinite(shares).any() else 0.0
    slab = math.exp(log_half_binomial(hidden, 1)) * width / radius
    bounds = (log_order_bound(experts, n, hidden, width / radius) / math.log(10.0) for n in _ORDERS)
    return NearBoundaries(width, radius, borders, number, borders * slab, tuple(bounds))


# --------------------------------------------------------------------------------------------- laws
@dataclass(frozen=True, eq=False)
class _Choosing:
    """What the rule of a router makes of logits; ``near`` is the distance that counts as near."""

    prepared: PreparedRouter
    kernels: Kernels
    near: float | None

    def __call__(self, logits: Float64[np.ndarray, "tokens experts"]) -> LawValues:
        own = np.ascontiguousarray(logits, np.float32)
        compared, _ = compared_scores(self.prepared, own, own, self.kernels)
        chosen, margin = self.kernels["top_k"](compared, self.prepared.router.rule.top_k)
        distance = None
        if self.near is not None:
            distance, _ = self.kernels["boundary_distance"](own, chosen, margin, self.prepared.rows)
        return self.figures(chosen, distance)

    def figures(
        self, chosen: Int32[np.ndarray, "tokens k"], distance: Float64[np.ndarray, "tokens"] | None
    ) -> LawValues:
        """Figures of these choices."""
        experts = self.prepared.router.num_experts
        counts = np.bincount(chosen.ravel(), minlength=experts)
        _, of_sets = np.unique(np.sort(chosen, axis=1), axis=0, return_counts=True)
        near = None
        if distance is not None and self.near is not None:
            near = float((distance < self.near).mean())
        return LawValues(
            max_vio=float(load.max_vio(counts)),
            cv=float(load.load_cv(counts)),
            num_sets=float(len(of_sets)),
            log_effective_sets=load.expert_set_entropy_nats(of_sets),
            modal_share=float(of_sets.max() / len(chosen)),
            near_share=near,
            median_distance=None if distance is None else float(np.median(distance)),
        )


def _drawn(
    name: str,
    draw: Callable[[int, np.random.Generator], np.ndarray],
    choose: _Choosing,
    tokens: int,
    seed: int,
) -> LawFigures:
    """Means over the draws of a law, and their standard errors."""
    streams = np.random.SeedSequence([seed, (*LAWS, BALL).index(name)]).spawn(SEEDS)
    drawn = [choose(draw(tokens, np.random.default_rng(stream))) for stream in streams]
    mean, error = _over(drawn, lambda values: float(np.std(values, ddof=1) / np.sqrt(len(values))))
    return LawFigures(name, mean, error)


def _of_tokens(choose: _Choosing, sample: SpaceSample) -> LawFigures:
    """The tokens themselves, with errors from leaving out blocks of documents."""
    whole = choose.figures(sample.chosen, sample.distance)
    without = []
    for block in range(NUM_BLOCKS):
        kept = sample.block != block
        if kept.any() and not kept.all():
            distance = None if sample.distance is None else sample.distance[kept]
            without.append(choose.figures(sample.chosen[kept], distance))
    if len(without) < 2:
        return LawFigures("tokens", whole, LawValues(*[float("nan")] * len(FIELDS)))

    def jackknife(values: np.ndarray) -> float:
        return float(np.sqrt((len(values) - 1) * np.var(values)))

    return LawFigures("tokens", whole, _over(without, jackknife)[1])


#: Names of the figures of a law.
FIELDS = tuple(field.name for field in dataclasses.fields(LawValues))


def _over(
    many: list[LawValues], error: Callable[[np.ndarray], float]
) -> tuple[LawValues, LawValues]:
    """Mean and error of each figure; None where it is not known."""
    means, errors = [], []
    for name in FIELDS:
        values = [getattr(one, name) for one in many]
        is_known = all(value is not None for value in values)
        means.append(float(np.mean(values)) if is_known else None)
        errors.append(error(np.array(values)) if is_known else None)
    return LawValues(*means), LawValues(*errors)


def _parted(figures: dict[str, LawValues]) -> dict[str, Attribution]:
    """What each law makes of the figures that can be parted; nothing where a law is missing."""
    if any(name not in figures for name in LAWS):
        return {}
    found = {}
    for name in FIGURES:
        values = {law: getattr(figures[law], name) for law in LAWS}
        tokens = getattr(figures["tokens"], name)
        if tokens is not None and all(value is not None for value in values.values()):
            found[name] = attributed(values, tokens)
    return found


# ----------------------------------------------------------------------------------------- centring
def _centred(
    router: Router,
    sample: SpaceSample,
    selection: Float[np.ndarray, "tokens experts"],
    kernels: Kernels,
) -> Centring:
    """The mean of each expert's score taken away, on all tokens and on each half by the other."""

    def chosen(rows: Bool[np.ndarray, "tokens"], change: np.ndarray) -> np.ndarray:
        compared, _ = group_masked(router.rule, selection[rows] + change, kernels)
        return kernels["top_k"](compared, router.rule.top_k)[0]

    def change(rows: Bool[np.ndarray, "tokens"]) -> Float64[np.ndarray, "experts"]:
        mean = selection[rows].astype(np.float64).mean(axis=0)
        return mean.mean() - mean

    def max_vio(found: np.ndarray) -> float:
        return float(load.max_vio(np.bincount(found.ravel(), minlength=router.num_experts)))

    every = np.ones(len(selection), bool)
    whole = change(every)
    after = chosen(every, whole)
    _, of_sets = np.unique(np.sort(after, axis=1), axis=0, return_counts=True)
    is_after = chosen_mask(after, router.num_experts)
    lost = ~np.take_along_axis(is_after, sample.chosen.astype(np.int64), axis=1)
    total = sample.weights.sum(axis=1)
    moved = (sample.weights * lost).sum(axis=1)
    return Centring(
        change=tuple(whole.tolist()),
        max_vio=max_vio(after),
        other_documents=max(
            (max_vio(chosen(here, change(there))) for here, there in _halves(sample)), default=None
        ),
        effective_sets=float(np.exp(load.expert_set_entropy_nats(of_sets))),
        weight_moved=float(np.divide(moved, total, np.zeros_like(total), where=total > 0.0).mean()),
    )


def _halves(
    sample: SpaceSample,
) -> Iterator[tuple[Bool[np.ndarray, "tokens"], Bool[np.ndarray, "tokens"]]]:
    """Tokens of one half of the documents, and of the other; none where one is empty."""
    is_odd = sample.block % 2 == 1
    if is_odd.any() and not is_odd.all():
        yield is_odd, ~is_odd
        yield ~is_odd, is_odd
