"""Hypotheses made ready for one router: what each would have B choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int32, Int64

from moegeom.core.router import Router
from moegeom.engine.choice import group_masked
from moegeom.engine.flipping import engine_logits
from moegeom.engine.prepared import PreparedRouter, prepare
from moegeom.geometry.selection import AdmittedSets, admitted_sets
from moegeom.kernels.reduction import Kernels
from moegeom.studies.explain.hypotheses import AS_STORED, HYPOTHESES
from moegeom.studies.explain.record import Cause
from moegeom.studies.explain.sides import Batch, Sides
from moegeom.variants.emulated import Emulated, emulate

#: Names of the two trials that change nothing about the router itself.
NOTHING, RENAMED = "nothing", "renamed"


@dataclass(frozen=True, eq=False)
class MatchedChoices:
    """What both sides chose at one router, and which tokens agreed at all earlier ones.

    ``matching`` is, for each expert of A, the number of B that fits its choices best, by how often
    one chose the one and the other the other, ``common``.
    """

    prepared: PreparedRouter
    mine: Int32[np.ndarray, "tokens k"]
    other: Int32[np.ndarray, "tokens k"]
    is_clean: Bool[np.ndarray, "tokens"]
    agrees: Bool[np.ndarray, "tokens"]
    matching: Int64[np.ndarray, "experts"]
    common: Int64[np.ndarray, "experts experts"]


@dataclass(frozen=True, eq=False)
class Trial:
    """One hypothesis at one router; ``numbers`` are A's numbers of B's experts."""

    name: str
    text: str
    cause: Cause
    emulated: Emulated
    numbers: Int32[np.ndarray, "experts"] | None = None

    def logits(
        self,
        values: Float[np.ndarray, "tokens hidden"] | None,
        logits: Float[np.ndarray, "tokens experts"],
    ) -> Float[np.ndarray, "tokens experts"]:
        """Logits under the hypothesis; those recorded where no inputs are."""
        if values is None:
            return logits
        return engine_logits(self.emulated, self.emulated.inputs(values))

    def reproduces(
        self,
        logits: Float[np.ndarray, "tokens experts"],
        theirs: Int32[np.ndarray, "tokens k"],
        kernels: Kernels,
    ) -> AdmittedSets:
        """Whether B's sets are ones that the hypothesis admits."""
        rule = self.emulated.router.rule
        selection, _ = group_masked(rule, self.emulated.compared(logits), kernels)
        return admitted_sets(selection, theirs if self.numbers is None else self.numbers[theirs])

    def prepared(self) -> PreparedRouter:
        """The router of the hypothesis, with its rows and biases as they would be stored."""
        router, bias = self.emulated.router, self.emulated.selection_bias
        return prepare(dataclasses.replace(router, selection_bias=bias))


def trials(choices: MatchedChoices, sides: Sides, against: Router | None) -> Iterator[Trial]:
    """Nothing changed, experts renamed, and every hypothesis that applies and can be tried.

    Each is made ready when it is asked for.
    """
    router, has_inputs = choices.prepared.router, sides.source.facts.stage != "logits"
    if not has_inputs and router.rule.is_affine:
        # recorded logits of an affine rule are read with the bias in them
        router = dataclasses.replace(router, selection_bias=None)
    plain = emulate(router, AS_STORED)
    numbers = np.argsort(choices.matching).astype(np.int32)
    yield Trial(NOTHING, "nothing changed", "no disagreement", plain)
    yield Trial(RENAMED, "experts renamed (best matching)", "experts renamed", plain, numbers)
    for hypothesis in HYPOTHESES:
        if hypothesis.needs_inputs and not has_inputs:
            continue
        edited = hypothesis.edit(router, against)
        if edited is None:
            continue
        emulated = emulate(edited, hypothesis.arithmetic)
        if not (hypothesis.only_stores and _is_stored_so(emulated, router)):
            yield Trial(hypothesis.name, hypothesis.text, hypothesis.cause, emulated)


def _is_stored_so(emulated: Emulated, router: Router) -> bool:
    """Whether rows and selection bias are what they were: already in the coarser format."""
    bias, own = emulated.selection_bias, router.selection_bias
    same_bias = bias is own or (bias is not None and own is not None and np.array_equal(bias, own))
    return same_bias and np.array_equal(emulated.router.weight, router.weight)


def inputs(
    choices: MatchedChoices, sides: Sides, rows: Int64[np.ndarray, "rows"]
) -> Iterator[tuple[slice, Batch, Float[np.ndarray, "tokens hidden"] | None]]:
    """Batches of A with their place among ``rows``, and the inputs that are routed again."""
    stop = 0
    for batch in sides.batches(choices.prepared, rows):
        there = slice(stop, stop := stop + len(batch.row))
        values = batch.values
        if sides.has_other_inputs and values is not None:
            values = sides.other_values(choices.prepared.router, batch.row)
        yield there, batch, values
