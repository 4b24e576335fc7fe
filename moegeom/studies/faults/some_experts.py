"""An edit of the rows and biases of some experts, found from the nats that each saves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.engine.choice import group_masked
from moegeom.geometry.set_code import (
    FINEST,
    boundary,
    chosen_mask,
    contrast_bits,
    contrasts,
    log2_sets,
    set_distances,
)
from moegeom.studies.faults._bits import bits_by_chance
from moegeom.studies.faults.operator import Proposal, Site, is_stored_so
from moegeom.studies.faults.scope import listed
from moegeom.variants.emulated import Emulated, emulate


def of_some_experts(
    site: Site,
    candidate: Proposal,
    rows: Int64[np.ndarray, "rows"],
    logits: Float[np.ndarray, "rows experts"],
    weight: Float64[np.ndarray, "rows"],
) -> Iterator[Proposal]:
    """The same edit of the rows of some experts, where it is wrong for the others.

    As all tokens say, and as those say whose sets differ: outside its scope an edit is wrong.
    """
    edited = candidate.routed
    if edited is None or candidate.of_all_only or candidate.inputs is not None:
        return
    if is_stored_so(edited, site.router):
        return
    experts, masks = len(site.matching), []
    differs = site.differs[rows]
    ways = {"some": np.ones(len(rows), bool), "where_different": differs}
    for name, some in (way for way in ways.items() if way[1].any()):
        is_some = _experts(site, edited, rows[some], logits[some], weight[some])
        number = int(is_some.sum())
        if not 0 < number < experts or any(np.array_equal(is_some, other) for other in masks):
            continue
        masks.append(is_some)
        words = listed(np.flatnonzero(is_some))
        yield dataclasses.replace(
            candidate,
            name=f"{candidate.name}_{name}",
            text=f"{candidate.text}, {number} of {experts} experts ({words})",
            own_bits=candidate.own_bits + log2_sets(experts, number),
            routed=_mixed(site, edited, is_some),
        )


def _experts(
    site: Site,
    edited: Emulated,
    rows: Int64[np.ndarray, "rows"],
    logits: Float[np.ndarray, "rows experts"],
    weight: Float64[np.ndarray, "rows"],
) -> Bool[np.ndarray, "experts"]:
    """The experts for which the edit is right.

    Each takes the score, edited or not, under which its own choices take fewer bits beside the
    boundary of the token; the boundary follows, and so again. An edit that adds a number to each
    expert's score is held against fitted biases, too: small numbers beside large ones are seen
    there. Where groups are chosen first, what one expert scores changes what others may be chosen:
    blocks of experts are tried.
    """
    own, rule = site.scores[rows], site.router.rule
    with np.errstate(over="ignore", invalid="ignore"):
        other = edited.compared(logits).astype(own.dtype)
    theirs, experts = site.theirs[rows], own.shape[1]
    side = 1.0 - 2.0 * chosen_mask(theirs, experts)
    recorded = RecordedOfSome.of(site, edited.router, rows, logits)

    def costs(is_some: np.ndarray) -> list[np.ndarray]:
        mixed, _ = group_masked(rule, np.where(is_some, other, own), site.kernels)
        # an expert of a dropped group is not chosen, whatever its score
        sign = side * np.isfinite(mixed)
        middle, spacing = boundary(mixed, theirs.shape[1])
        cost = []
        for scores in (own, other):
            with np.errstate(invalid="ignore"):
                wrong = sign * (scores - middle[:, None]) / (_SOFT * spacing)
            bits = np.log1p(np.exp(np.clip(np.nan_to_num(wrong, nan=_FAR), -_FAR, _FAR)))
            cost.append(weight @ bits)
        return cost

    is_some = np.zeros(experts, bool)
    for _ in range(_ROUNDS):
        cost = costs(is_some)
        gained = cost[0] - cost[1]
        if recorded is not None:
            gained = gained + recorded.gained(is_some, weight)
        better = gained > _LEAST_BETTER
        if (better == is_some).all():
            break
        is_some = better
    guesses = [is_some, *_snapped(other, own, site.fitted_biases.values())]
    if rule.groups is not None:
        number = np.arange(experts)
        guesses += [number * parts // experts == part for parts in _PARTS for part in range(parts)]

    def total(one: np.ndarray) -> float:
        mixed, _ = group_masked(rule, np.where(one, other, own), site.kernels)
        distances = set_distances(mixed, theirs)
        (bits,) = bits_by_chance(distances, _SOFT * distances.spacing, 1)
        return float(weight @ (bits if recorded is None else bits + recorded.bits(one)))

    unlike = {guess.tobytes(): guess for guess in guesses}
    return is_some if len(unlike) == 1 else min(unlike.values(), key=total)


def _snapped(
    other: Float[np.ndarray, "rows experts"],
    own: Float[np.ndarray, "rows experts"],
    biases: Iterable[Float64[np.ndarray, "experts"]],
) -> Iterator[Bool[np.ndarray, "experts"]]:
    """For each fitted bias the experts whose own is nearer to what the edit adds than to nothing.

    None where the edit does not add the same to all tokens. Fitted biases are known up to a common
    number, which is the one that leaves least: then it fits one expert outright.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # a fault may leave the range of numbers
        change = other - own
        lowest, highest = change.min(axis=0), change.max(axis=0)
        most = np.maximum(np.abs(lowest), np.abs(highest)).max()
        # half of what lies between them is the least that any number may be off by
        is_same = (highest - lowest).max() <= 2.0 * (1.0 + _SAME) * _SAME * most
        if is_same:
            added = np.median(change, axis=0).astype(np.float64)
            is_same = np.abs(change - added).max() <= _SAME * np.abs(added).max()
            is_same &= np.isfinite(added).all()
    for fitted in biases:
        if not is_same:
            yield np.zeros(len(fitted), bool)
            continue
        common = np.concatenate([fitted, fitted - added])
        moved = fitted - common[:, None]
        left = np.minimum(np.abs(moved), np.abs(moved - added)).sum(axis=1)
        moved = fitted - common[left.argmin()]
        yield np.abs(moved - added) < np.abs(moved)


@dataclass(frozen=True, eq=False)
class RecordedOfSome:
    """B's recorded values of some experts per token, and predictions with and without the edit."""

    values: Float[np.ndarray, "rows values"]
    expert: Int64[np.ndarray, "rows values"]
    own: Float[np.ndarray, "rows values"]
    edited: Float[np.ndarray, "rows values"]
    scale: float

    @staticmethod
    def of(
        site: Site,
        edited: Router,
        rows: Int64[np.ndarray, "rows"],
        logits: Float[np.ndarray, "rows experts"],
    ) -> RecordedOfSome | None:
        """B's values of these rows, or None; ``scale`` is that of the better prediction."""
        recorded = site.recorded
        if recorded is None:
            return None
        expert = recorded.experts(site.theirs[rows], logits.shape[1])
        own, other = (
            np.take_along_axis(recorded.of_each(router, each), expert, axis=1)
            for router, each in ((site.router, site.logits[rows]), (edited, logits))
        )
        values = recorded.values[rows]
        apart = [np.abs(contrasts(values, one)).max(axis=1) for one in (own, other)]
        near = np.minimum(*apart)
        finite = near[np.isfinite(near)]
        scale = max(FINEST, float(np.quantile(finite, _FITS)) if len(finite) else 0.0)
        return RecordedOfSome(values, expert, own, other, scale)

    def bits(self, is_some: Bool[np.ndarray, "experts"]) -> Float64[np.ndarray, "rows"]:
        """Bits of B's recorded values if these experts are edited."""
        return self._bits(np.where(is_some[self.expert], self.edited, self.own))

    def worth(self) -> float:
        """Bits saved if each token has all its experts edited, one of them, or none."""
        before = self._bits(self.own)
        least = np.minimum(before, self._bits(self.edited))
        for slot in range(self.own.shape[1]):
            one = self.own.copy()
            one[:, slot] = self.edited[:, slot]
            least = np.minimum(least, self._bits(one))
        return float((before - least).sum())

    def _bits(self, predicted: Float[np.ndarray, "rows values"]) -> Float64[np.ndarray, "rows"]:
        return contrast_bits(contrasts(self.values, predicted), self.scale)

    def gained(
        self, is_some: Bool[np.ndarray, "experts"], weight: Float64[np.ndarray, "rows"]
    ) -> Float64[np.ndarray, "experts"]:
        """Nats that each expert saves by being edited rather than not, the others as they are."""
        inside = is_some[self.expert]
        now = np.where(inside, self.edited, self.own)
        turned = np.where(inside, self.own, self.edited)
        saved = np.zeros(now.shape)
        if now.shape[1] < len(is_some):
            before = self._bits(now)
            for slot in range(now.shape[1]):
                other = now.copy()
                other[:, slot] = turned[:, slot]
                saved[:, slot] = before - self._bits(other)
        else:  # of so many the usual difference is that of the token
            usual = np.median(self.values - now, axis=1, keepdims=True)
            before, after = (
                np.log2(1.0 + ((self.values - one - usual) / self.scale) ** 2)
                for one in (now, turned)
            )
            saved = np.nan_to_num(before - after)
        saved = math.log(2.0) * weight[:, None] * np.where(inside, -saved, saved)
        return np.bincount(self.expert.ravel(), saved.ravel(), len(is_some))


#: Share of the tokens whose numbers fit the better of both to within the noise.
_FITS = 0.25

#: Part of the largest number added by which it may differ from token to token: rounding.
_SAME = 1e-3

#: Numbers of blocks of experts, of which one may be edited.
_PARTS = (2, 4)

#: Rounds in which experts take one of two scores; noise scale in gaps between scores, where a
#: distance in such scales no longer matters, and by how many nats the edited one has to be better.
_ROUNDS, _SOFT, _FAR, _LEAST_BETTER = 4, 1.0, 12.0, 3.0


def _mixed(site: Site, edited: Emulated, is_some: Bool[np.ndarray, "experts"]) -> Emulated:
    own, biases = site.router, {}
    rows = np.where(is_some[:, None], edited.router.weight, own.weight)
    for kind in ("selection_bias", "logit_bias"):
        bias, plain = getattr(edited, kind), getattr(own, kind)
        if bias is None and plain is None:
            continue
        none = np.zeros(len(is_some))
        biases[kind] = np.where(
            is_some, none if bias is None else bias, none if plain is None else plain
        )
    how = dataclasses.replace(edited.arithmetic, parameter="float32", bias="float32")
    return emulate(dataclasses.replace(edited.router, weight=rows, **biases), how)
