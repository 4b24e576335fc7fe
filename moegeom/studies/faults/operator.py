"""An operator: one kind of fault, and the choices that each router would then make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from moegeom.core.registry import Rooms, record_of_function
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float, Float32, Float64, Int32, Int64, Integer
from moegeom.core.tokens import TokenColumns
from moegeom.engine.choice import group_masked
from moegeom.engine.flipping import engine_logits
from moegeom.engine.plan import one_blas_thread
from moegeom.geometry.low_rank_fit import ChoicesOfScores, fitted_offsets
from moegeom.geometry.number_formats import rounded_to
from moegeom.geometry.selection import (
    SCORES,
    group_scores,
    mapped_logits,
    routing_weights,
    selection_scores,
)
from moegeom.geometry.set_code import TIE_WAYS, chosen_mask, contrasts, fitted_bias, set_distances
from moegeom.kernels.reduction import Kernels
from moegeom.variants.emulated import Arithmetic, Emulated, emulate

#: The router as stored, in float32; top-k of an affine rule compares logits.
AS_STORED = Arithmetic(name="", text="", engine="none", version="", source="", compared="logits")

#: What an operator names: one of ``VERDICTS`` of ``studies/explain/record.py``.
Cause = str

#: Inputs of a router for some tokens.
Values = Callable[[np.ndarray], Float[np.ndarray, "rows hidden"] | None]


@dataclass(frozen=True, eq=False)
class ChoiceValues:
    """Logits of all experts, or logarithms of the weights of those that B chose, in its order."""

    values: Float64[np.ndarray, "tokens values"]
    is_logits: bool

    @staticmethod
    def of_weights(weights: Float64[np.ndarray, "tokens k"]) -> ChoiceValues:
        """Logarithms of the weights; nan for tokens with a weight that is not positive."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return ChoiceValues(np.where(weights > 0.0, np.log(weights), np.nan), False)

    def apart(
        self,
        router: Router,
        rows: np.ndarray,
        logits: Float[np.ndarray, "rows experts"],
        chosen: Int32[np.ndarray, "rows k"],
    ) -> Float64[np.ndarray, "rows values"]:
        """Contrasts with a router of these logits; nan where either side is unknown."""
        if self.is_logits:
            return contrasts(self.values[rows], logits)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            predicted = np.log(weights_of(router, logits, chosen))
        return contrasts(self.values[rows], predicted)

    def experts(
        self, chosen: Int32[np.ndarray, "rows k"], number: int
    ) -> Int64[np.ndarray, "rows values"]:
        """The expert of each recorded value."""
        if self.is_logits:
            return np.broadcast_to(np.arange(number), (len(chosen), number))
        return chosen.astype(np.int64)

    def of_each(
        self, router: Router, logits: Float[np.ndarray, "rows experts"]
    ) -> Float[np.ndarray, "rows experts"]:
        """The values a router would record for each expert, up to a constant per token."""
        if self.is_logits:
            return logits
        weights, mapped = router.rule.weights, mapped_logits(logits, router.rule.logit_map)
        is_sigmoid = weights.source == "sigmoid_of_selected_logits"
        if weights.source == "scores":
            is_sigmoid = router.rule.score == "sigmoid"
        return -np.logaddexp(0.0, -mapped) if is_sigmoid else mapped


def weights_of(
    router: Router,
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    leaks: bool = False,
) -> Float64[np.ndarray, "tokens k"]:
    """Weights of the chosen experts; with the selection bias in their scores if it leaks."""
    rule = router.rule
    mapped = mapped_logits(logits, rule.logit_map)
    scores = SCORES[rule.score](mapped)
    if leaks:
        scores = selection_scores(logits, rule, router.selection_bias)
    weights = routing_weights(mapped, scores, chosen, rule.weights)
    return weights if router.expert_scale is None else weights * router.expert_scale[chosen]


@dataclass(frozen=True, eq=False)
class Site:
    """One router, and what both sides chose there for the same tokens.

    ``logits`` are those of the inputs at hand, ``scores`` what is selected by, and ``selection``
    the same with dropped groups at their fill, which top-k compares.
    ``previous`` is for each token the row of the one before it in its document, -1 for none.
    ``routers`` are all that are looked at, this one at ``number``; ``other`` is that of the
    checkpoint that B may have loaded. ``has_inputs`` where the rows can be routed again, and
    ``has_logits`` is False when only expert sets were recorded: ``scores`` then mark A's sets.
    ``recorded`` are values that B stored beside its choices; ``chosen_at`` gives A's choices at
    another of the routers, ``values_at`` its inputs there. ``is_of_b`` where the inputs are B's
    own; of others those of the tokens that ``decides`` marks are B's but for arithmetic: they
    agreed at all earlier routers.
    """

    router: Router
    number: int
    routers: Sequence[Router]
    other: Router | None
    logits: Float[np.ndarray, "tokens experts"]
    scores: Float[np.ndarray, "tokens experts"]
    selection: Float[np.ndarray, "tokens experts"]
    mine: Int32[np.ndarray, "tokens k"]
    theirs: Int32[np.ndarray, "tokens k"]
    columns: TokenColumns
    matching: Int64[np.ndarray, "experts"]
    kernels: Kernels
    has_inputs: bool
    has_logits: bool
    recorded: ChoiceValues | None
    chosen_at: Callable[[int], Int32[np.ndarray, "tokens k"]]
    values_at: Callable[[int], Values]
    is_of_b: bool
    decides: Bool[np.ndarray, "tokens"]

    @cached_property
    def differs(self) -> Bool[np.ndarray, "tokens"]:
        """Tokens with different sets."""
        return ~self.kernels["same_set"](self.mine, self.theirs)

    @cached_property
    def told_apart(self) -> Float64[np.ndarray, "tokens values"] | None:
        """Contrasts of B's recorded values with this router as it is."""
        if self.recorded is None:
            return None
        return self.recorded.apart(self.router, self.place, self.logits, self.theirs)

    @cached_property
    def is_of_logits(self) -> bool:
        """True when this router's rule applied to B's recorded logits reproduces B's choices."""
        recorded = self.recorded
        if recorded is None or not recorded.is_logits or not self.differs.any():
            return False
        share = self.met_by_own_logits(np.flatnonzero(self.differs))
        return share is not None and share >= _BY_LOGITS

    def met_by_own_logits(self, rows: np.ndarray) -> float | None:
        """The share of B's choices that A's rule makes of B's recorded logits; None of none."""
        recorded = self.recorded
        if recorded is None or not recorded.is_logits:
            return None
        plain = emulate(self.router, AS_STORED)
        scores = plain.compared(recorded.values[rows].astype(self.logits.dtype))
        selection, _ = group_masked(self.router.rule, scores, self.kernels)
        return float(set_distances(selection, self.theirs[rows]).is_met.mean())

    @cached_property
    def document(self) -> Int64[np.ndarray, "tokens"]:
        """The document of each token, counted from 0 without gaps."""
        return np.unique(self.columns.document, return_inverse=True)[1].ravel().astype(np.int64)

    @cached_property
    def pulls(self) -> Float64[np.ndarray, "hidden"] | None:
        r"""How each column pulls at some of the choices that differ, in standard errors.

        :math:`\sum_t x_{td} \sum_e (b_{te} - a_{te}) W_{ed}`, b and a the sets of B and A; their
        mean square is 1 where noise makes the choices differ. None of few tokens, or without
        inputs.
        """
        rows, experts = np.flatnonzero(self.differs), len(self.matching)
        if not self.has_inputs or len(rows) < _LEAST_PULLED:
            return None
        rows = rows[:: math.ceil(len(rows) / _PULLED)]
        values = self.values_at(self.number)(rows)
        assert values is not None
        gained = chosen_mask(self.theirs[rows], experts).astype(np.float32)
        gained -= chosen_mask(self.mine[rows], experts)
        with one_blas_thread():
            each = values * (gained @ self.router.weight.astype(np.float32))
        size = np.sqrt((each.astype(np.float64) ** 2).sum(axis=0))
        total = each.sum(axis=0, dtype=np.float64)
        return np.divide(total, size, out=np.zeros_like(total), where=size > 0.0)

    @cached_property
    def place(self) -> Int64[np.ndarray, "tokens"]:
        """Row of each token: the token s further on is at ``place[row] + s``, if it is there."""
        return np.arange(len(self.columns.document))

    @cached_property
    def fitted_biases(self) -> dict[str, Float64[np.ndarray, "experts"]]:
        """Biases that give each expert its load in B, keyed by the tokens they are fitted to."""
        # of a token for which B chose other groups, its experts say nothing of each other
        chosen = np.take_along_axis(self.selection, self.theirs.astype(np.int64), axis=1)
        is_known = np.isfinite(chosen).all(axis=1)
        ways = {"bias_fitted": is_known, "bias_fitted_where_different": is_known & self.differs}
        return {
            name: self._between_groups(fitted_bias(self.selection[rows], self.theirs[rows]))
            for name, rows in ways.items()
            if rows.any()
        }

    def _between_groups(
        self, bias: Float64[np.ndarray, "experts"]
    ) -> Float64[np.ndarray, "experts"]:
        """The bias with a number added for each group, which those that B chose of tell."""
        groups = self.router.rule.groups
        if groups is None:
            return bias
        size = len(bias) // groups.num_groups
        scores = group_scores(self.scores[:_OF_GROUPS] + bias, groups)
        chosen = self.theirs[:_OF_GROUPS] // size
        number = 1 if groups.score == "max" or size == 1 else 2  # experts that a score sums
        offsets = fitted_offsets(ChoicesOfScores(scores, chosen)) / number
        return bias + np.repeat(offsets, size)

    def choices_of(self, rows: np.ndarray, with_values: bool = False) -> ChoicesOfScores:
        """B's choices for some tokens, by which a fit is made, and what B recorded beside them.

        Experts of groups that B did not choose of lost by their groups, whatever their own scores.
        """
        logits, groups = self.logits[rows].astype(np.float64), self.router.rule.groups
        recorded, values, are_log_sigmoids = self.recorded, None, False
        if with_values and recorded is not None and np.isfinite(logits).all():
            values = np.full(logits.shape, np.nan)
            expert = recorded.experts(self.theirs[rows], logits.shape[1])
            np.put_along_axis(values, expert, recorded.values[rows], axis=1)
            are_log_sigmoids = not np.array_equal(recorded.of_each(self.router, logits), logits)
        if groups is not None:
            size = logits.shape[1] // groups.num_groups
            is_open = chosen_mask(self.theirs[rows] // size, groups.num_groups)
            logits = np.where(np.repeat(is_open, size, axis=1), logits, -np.inf)
        how = {"is_sigmoid": not self.router.rule.is_affine, "are_log_sigmoids": are_log_sigmoids}
        bias = self.router.selection_bias
        return ChoicesOfScores(logits, self.theirs[rows], bias, values=values, **how)

    def shifted(self, by: int) -> Int64[np.ndarray, "tokens"]:
        """Row of the token ``by`` positions later in the same document; -1 for none."""
        return self.shifted_by(np.asarray(by, np.int64))

    def shifted_by(self, by: Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "tokens"]:
        """The same for a number of each token."""
        document, position = self.columns.document, self.columns.position
        row = self.place + by
        inside = (row >= 0) & (row < len(row))
        there = np.clip(row, 0, len(row) - 1)
        same = inside & (document[there] == document)
        fits = (position[there] - position == by) | (position < 0)
        return np.where(same & fits, row, -1)


#: Tokens that tell how groups are favoured.
_OF_GROUPS = 4096

#: Tokens with other sets that tell how columns pull, at least and at most.
_LEAST_PULLED, _PULLED = 24, 512

#: Share of the sets that differ which B's own logits have to give, to be all that differs.
_BY_LOGITS = 0.9


#: What enters a product in place of a router's own inputs, for some tokens.
Inputs = Callable[[Site, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Proposal:
    """An operator with its parameters at one router; ``name`` says which on all routers.

    One of three tells what would be chosen: a ``routed`` router (with the rows, biases and rule
    that it would have, behind ``inputs`` if they are changed too), the scores of other ``rows``
    (-1: nothing is predicted), or ``scores`` as they stand, with the ``values`` that would stand
    beside them if those are not the router's as it is; ``moves_logits`` where the scores are those
    of other logits. ``numbers`` are A's numbers of B's experts; ``of_other`` where the
    other checkpoint is needed to say it. It counts only where it reproduces ``least_met`` of the
    sets in its scope and, if it is one of all routers (``everywhere``), at each of them; with
    ``of_some_only`` never for all experts together, with ``of_all_only`` never for some.
    An ``is_estimate`` is near the truth: what it leaves is its own error. ``ties`` are the ways in
    which equal scores may be told apart; ``stands_for`` counts those that were tried before it and
    went no further.
    ``bits`` say which parameters these are, ``own_bits`` those of this router alone.
    """

    name: str
    text: str
    cause: Cause
    bits: float = 0.0
    own_bits: float = 0.0
    routed: Emulated | None = None
    inputs: Inputs | None = None
    rows: Int64[np.ndarray, "tokens"] | None = None
    scores: Callable[[Site, np.ndarray], Float[np.ndarray, "rows experts"]] | None = None
    values: Callable[[Site, np.ndarray], Float64[np.ndarray, "rows values"]] | None = None
    moves_logits: bool = False
    numbers: Int32[np.ndarray, "experts"] | None = None
    of_other: bool = False
    least_met: float = 0.0
    everywhere: bool = False
    of_some_only: bool = False
    of_all_only: bool = False
    is_estimate: bool = False
    ties: tuple[str, ...] = TIE_WAYS
    stands_for: int = 1

    def selection(
        self, site: Site, rows: np.ndarray, logits: Float[np.ndarray, "rows experts"] | None
    ) -> Float[np.ndarray, "rows experts"]:
        """Scores that top-k would compare, for some tokens; of a ``routed`` router with these."""
        if self.routed is not None:
            assert logits is not None
            scores = self.routed.compared(logits)
            return group_masked(self.routed.router.rule, scores, site.kernels)[0]
        if self.rows is not None:
            there = self.rows[rows]
            selection = site.selection[np.maximum(there, 0)].copy()
            selection[there < 0] = np.nan
            return selection
        if self.scores is not None:
            return self.scores(site, rows)
        return site.selection[rows]

    def logits(
        self, site: Site, rows: np.ndarray, values: Float[np.ndarray, "rows hidden"] | None
    ) -> Float[np.ndarray, "rows experts"]:
        """Logits of a ``routed`` router; recorded ones stand for them where there are no inputs."""
        assert self.routed is not None
        if values is None or self.has_logits_of(site):
            return site.logits[rows]
        seen = values if self.inputs is None else self.inputs(site, rows, values)
        return engine_logits(self.routed, self.routed.inputs(seen))

    @property
    def is_whole(self) -> bool:
        """Whether it routes again, for all experts together or not at all."""
        return self.routed is not None and (self.of_all_only or self.inputs is not None)

    def can_share(self, site: Site) -> bool:
        """Whether logits have to be computed, of the inputs as they are."""
        return self.routed is not None and self.inputs is None and not self.has_logits_of(site)

    def changes_logits(self, site: Site) -> bool:
        """Whether the predicted logits differ from those of the router as it is."""
        if self.routed is not None:
            return not self.has_logits_of(site)
        return self.moves_logits or self.rows is not None or self.numbers is not None

    def has_logits_of(self, site: Site) -> bool:
        """Whether a ``routed`` router makes the logits of the site: another rule or bias alone."""
        routed, own = self.routed, site.router
        assert routed is not None
        how = routed.arithmetic
        is_exact = (how.input, how.operands) == (AS_STORED.input, AS_STORED.operands)
        return (
            self.inputs is None
            and is_exact
            and same_bias(routed.logit_bias, own.logit_bias)
            and np.array_equal(routed.router.weight, own.weight)
        )

    def told_apart(
        self, site: Site, rows: np.ndarray, logits: Float[np.ndarray, "rows experts"] | None
    ) -> Float64[np.ndarray, "rows values"] | None:
        """Contrasts of B's recorded values with these ``logits`` of a ``routed`` router.

        As the router is where nothing else is predicted.
        """
        as_is = site.told_apart
        if as_is is None or site.recorded is None:
            return None
        if self.values is not None:
            apart = contrasts(site.recorded.values[rows], self.values(site, rows))
            return np.where(np.isnan(apart), as_is[rows], apart)
        if self.scores is not None:
            return as_is[rows]
        router = site.router
        if self.routed is not None and logits is not None:
            router, logits = self.routed.router, rounded_to(logits, self.routed.arithmetic.output)
        if logits is None:
            there = rows if self.rows is None else self.rows[rows]
            logits = site.logits[np.maximum(there, 0)].copy()
            logits[there < 0] = np.nan
        if self.numbers is not None and site.is_of_logits:  # rows have other places, and so logits
            logits = logits[:, self.numbers]
        apart = site.recorded.apart(router, rows, logits, self.theirs(site, rows))
        return np.where(np.isnan(apart), as_is[rows], apart)

    def theirs(self, site: Site, rows: np.ndarray) -> Int32[np.ndarray, "rows k"]:
        """B's choices, in A's numbering of experts."""
        chosen = site.theirs[rows]
        return chosen if self.numbers is None else self.numbers[chosen]


@dataclass(frozen=True)
class Operator:
    """A kind of fault: from a router, the candidates that apply there, simplest first."""

    name: str
    page: str
    candidates: Callable[[Site], Iterator[Proposal]]


#: The decorator that makes an operator of a function, under its name.
operator: Final = record_of_function(Operator)()

OPERATORS: Rooms[Operator] = Rooms("operator", "moegeom.studies.faults.operators", Operator)


def routed(
    site: Site,
    name: str,
    text: str,
    cause: Cause,
    router: Router | None,
    how: Arithmetic = AS_STORED,
    *,
    needs_inputs: bool = True,
    only_stores: bool = False,
    bits: float = 0.0,
    own_bits: float = 0.0,
    inputs: Inputs | None = None,
) -> Iterator[Proposal]:
    """The candidate of an edited router; none where the edit does not apply, or nothing changes.

    ``needs_inputs`` where logits alone cannot tell, ``only_stores`` where numbers are stored
    otherwise: of numbers that are stored so it changes nothing.
    """
    if router is None or not site.has_logits or (needs_inputs and not site.has_inputs):
        return
    emulated = emulate(router, dataclasses.replace(how, name=name))
    if only_stores and is_stored_so(emulated, site.router):
        return
    yield Proposal(
        name, text, cause, bits, own_bits, emulated, inputs, of_other=name.endswith("_of_other")
    )


def of_sets(
    sets: Integer[np.ndarray, "tokens k"],
    experts: int,
    is_known: Bool[np.ndarray, "tokens"] | None = None,
) -> Float32[np.ndarray, "tokens experts"]:
    """Scores 1 for the experts of these sets, else 0; nan where nothing is predicted."""
    scores = np.zeros((len(sets), experts), np.float32)
    np.put_along_axis(scores, np.maximum(sets, 0).astype(np.int64), np.float32(1.0), axis=1)
    if is_known is not None:
        scores[~is_known] = np.nan
    return scores


def is_stored_so(emulated: Emulated, router: Router) -> bool:
    """Whether rows and selection bias are what they were: already in the coarser format."""
    return (
        same_bias(emulated.selection_bias, router.selection_bias)
        and same_bias(emulated.logit_bias, router.logit_bias)
        and np.array_equal(emulated.router.weight, router.weight)
    )


def same_bias(bias: np.ndarray | None, own: np.ndarray | None) -> bool:
    """Whether there is none on either side, or the same numbers."""
    return bias is own or (bias is not None and own is not None and np.array_equal(bias, own))
