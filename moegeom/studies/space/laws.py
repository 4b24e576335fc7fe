"""Laws of logits through the rule of a router, and the figures of what they choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float32, Float64, Int32
from moegeom.engine.choice import compared_scores
from moegeom.engine.prepared import PreparedRouter
from moegeom.engine.sample import Sample
from moegeom.geometry import load
from moegeom.geometry.reference_laws import (
    LAWS,
    Attribution,
    attributed,
)
from moegeom.geometry.statistics import jackknife_error
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.reduction import Kernels
from moegeom.studies.space.record import (
    FIGURES,
    LawFigures,
    LawValues,
)

#: Draws of each law.
SEEDS = 8

#: Laws in the order of their random streams.
_STREAMS = (*LAWS, "ball")


@dataclass(frozen=True, eq=False)
class Choosing:
    """What the rule of a router makes of logits; ``near`` is the distance that counts as near."""

    prepared: PreparedRouter
    kernels: Kernels
    near: float | None

    def __call__(self, logits: Float64[np.ndarray, "tokens experts"]) -> LawValues:
        own = np.ascontiguousarray(logits, np.float32)
        chosen, margin = self._chosen(own)
        distance = None if self.near is None else self._distances(own, chosen, margin)
        return self.figures(chosen, distance)

    def distances(
        self, logits: Float64[np.ndarray, "tokens experts"]
    ) -> Float64[np.ndarray, "tokens"]:
        """Distances to the boundary, of linear rules."""
        own = np.ascontiguousarray(logits, np.float32)
        return self._distances(own, *self._chosen(own))

    def _chosen(
        self, own: Float32[np.ndarray, "tokens experts"]
    ) -> tuple[Int32[np.ndarray, "tokens k"], np.ndarray]:
        compared, _ = compared_scores(self.prepared, own, own, self.kernels)
        return self.kernels["top_k"](compared, self.prepared.router.rule.top_k)

    def _distances(
        self,
        own: Float32[np.ndarray, "tokens experts"],
        chosen: Int32[np.ndarray, "tokens k"],
        margin: np.ndarray,
    ) -> Float64[np.ndarray, "tokens"]:
        return self.kernels["boundary_distance"](own, chosen, margin, self.prepared.rows)[0]

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


def drawn(
    name: str,
    draw: Callable[[int, np.random.Generator], np.ndarray],
    choose: Choosing,
    tokens: int,
    seed: int,
) -> LawFigures:
    """Means over the draws of a law, and their standard errors."""
    streams = np.random.SeedSequence([seed, _STREAMS.index(name)]).spawn(SEEDS)
    drawn = [choose(draw(tokens, np.random.default_rng(stream))) for stream in streams]
    mean, error = _over(drawn, lambda values: float(np.std(values, ddof=1) / np.sqrt(len(values))))
    return LawFigures(name, mean, error)


def of_tokens(choose: Choosing, sample: Sample) -> LawFigures:
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

    error = _over(without, lambda values: float(jackknife_error(values)))[1]
    return LawFigures("tokens", whole, error)


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


def parted(figures: dict[str, LawValues]) -> dict[str, Attribution]:
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
