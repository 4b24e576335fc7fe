"""One router: a sample of tokens, the laws beside it, what makes its loads uneven."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float, Float32, Float64
from moegeom.engine.choice import group_masked
from moegeom.engine.prepared import prepare
from moegeom.engine.sample import Sample
from moegeom.geometry import load
from moegeom.geometry.input_pull import input_pull, pull_of_random_rows
from moegeom.geometry.load import max_vio_limit, scatter, unit_counts
from moegeom.geometry.reference_laws import (
    Attribution,
    InputSizes,
    reference_laws,
)
from moegeom.geometry.set_code import chosen_mask
from moegeom.geometry.space import blocked_moments
from moegeom.kernels.reduction import Kernels
from moegeom.studies.space.laws import Choosing, drawn, of_tokens, parted
from moegeom.studies.space.measure import (
    BALL,
    ball_law,
    balls,
    bias_of,
    measured_shares,
    near_boundaries,
)
from moegeom.studies.space.reach import cone_shares, dimension_range, reach
from moegeom.studies.space.record import (
    Centring,
    Meaning,
    RouterSpace,
)

#: Share of the recorded tokens that count as near a boundary: the distance is what is compared.
NEAR = 0.1


def sampled(router: Router) -> tuple[str, ...]:
    """What laws are fitted to and compared with; distances behind linear boundaries alone."""
    prepared = prepare(router)
    is_linear = prepared.rows is not None and prepared.curved is None
    names = ("logits", "scores", "chosen", "weights", "document", "block", "input")
    return (*names, "distance") if is_linear else names


def router_space(
    router: Router,
    sample: Sample,
    kernels: Kernels,
    level: float,
    seed: int,
    near: float | None = None,
    radius: float | None = None,
    is_measured: bool = False,
) -> RouterSpace:
    """The laws beside the tokens, what each makes of the figures, and centring.

    ``near`` is the distance that counts as near a boundary; that of the nearest tenth of the tokens
    where it is None. ``is_measured`` asks for shares near ties at every width, of balls of this
    radius, or of the rms length of the inputs.
    """
    prepared = prepare(router)
    if sample.distance is not None and np.isinf(sample.distance).all():
        sample = Sample(**vars(sample) | {"distance": None})  # no other choice, and no boundary
    if near is None and sample.distance is not None:
        near = float(np.quantile(sample.distance, NEAR))
    choose = Choosing(prepared, kernels, near)
    rows = sizes = None
    if sample.input is not None:
        rows, sizes = router.weight.astype(np.float64), _sizes(sample.inputs)
    laws = reference_laws(sample.logits.astype(np.float64), bias_of(router), rows, sizes)
    tokens = len(sample.logits)
    told = [drawn(name, law.draw, choose, tokens, seed) for name, law in laws.items()]
    of_inputs = balls(router, sample, radius)
    if of_inputs is not None:
        told.append(drawn(BALL, ball_law(router, of_inputs, "origin"), choose, tokens, seed))
    told.append(of_tokens(choose, sample))
    parts = parted({one.law: one.figures for one in told})
    found = scatter(unit_counts(chosen_mask(sample.chosen, router.num_experts), sample.unit))
    limit = max_vio_limit([found], level, seed)
    bias = router.selection_bias
    selection = sample.scores + (0.0 if bias is None else bias.astype(np.float64))
    random, dimension = _pull_of_random(router, sample), dimension_range(sample, seed)
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
        reach=reach(prepared, dimension),
        cones=cone_shares(prepared, sample, seed),
        near=near_boundaries(router, near, of_inputs, seed),
        meaning=_meaning(told[-1].figures.max_vio, limit, router, parts),
        measured=measured_shares(choose, laws, sample, of_inputs, seed) if is_measured else (),
    )


def _meaning(
    max_vio: float, limit: float, router: Router, parts: dict[str, Attribution]
) -> Meaning:
    """The largest part of what makes the loads uneven, where chance does not."""
    if max_vio <= limit:
        # what chance hides: an expert with twice its share, or the most uneven loads there are
        most = router.num_experts / router.rule.top_k - 1.0
        return "few" if 0.0 < min(1.0, most) <= limit else "even"
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


def _sizes(inputs: Float32[np.ndarray, "tokens hidden"]) -> InputSizes:
    values = inputs.astype(np.float64)
    return InputSizes(float(values.var(axis=0).mean()), float((values**2).mean()))


def _pull_of_random(router: Router, sample: Sample) -> tuple[float, float] | None:
    if sample.input is None:
        return None
    inputs = sample.inputs.astype(np.float64)
    moments = blocked_moments(inputs, np.zeros(len(inputs), np.int32), 1)
    ratio = moments.of_blocks(np.ones(1, bool)).participation_ratio
    lengths = np.linalg.norm(router.weight.astype(np.float64), axis=1)
    return pull_of_random_rows(inputs, ratio, lengths)


# ----------------------------------------------------------------------------------------- centring
def _centred(
    router: Router,
    sample: Sample,
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
    sample: Sample,
) -> Iterator[tuple[Bool[np.ndarray, "tokens"], Bool[np.ndarray, "tokens"]]]:
    """Tokens of one half of the documents, and of the other; none where one is empty."""
    is_odd = sample.block % 2 == 1
    if is_odd.any() and not is_odd.all():
        yield is_odd, ~is_odd
        yield ~is_odd, is_odd
