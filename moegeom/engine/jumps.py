"""What crossing the nearest boundary does to the output of a router's experts, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float, Float64, Int32, Int64
from moegeom.core.tokens import SourceFacts
from moegeom.engine.prepared import PreparedRouter, unavailable
from moegeom.geometry.boundary.curved import POINT
from moegeom.geometry.jump import (
    Mixture,
    NearestTie,
    curved_tie,
    exchanged,
    jump,
    jump_beside,
    linear_tie,
)
from moegeom.geometry.selection import (
    SCORES,
    group_mask,
    mapped_logits,
    routing_weights,
    score_sum,
    selection_scores,
    top_k,
)
from moegeom.geometry.whatif import same_sets, smooth_gate
from moegeom.kernels.reduction import Kernels

#: A step off the boundary by which the rule says who is chosen there, in rms lengths of the input.
_STEP = 1e-6


@dataclass(frozen=True, eq=False)
class ExactRouter:
    """A router that is not behind a projection, in float64: for inputs that nobody recorded."""

    router: Router

    @cached_property
    def _rows(self) -> Float64[np.ndarray, "hidden experts"]:
        return self.router.weight.astype(np.float64).T

    @property
    def _bias(self) -> Float[np.ndarray, "experts"] | None:
        is_affine = self.router.rule.is_affine
        return self.router.affine_bias if is_affine else self.router.logit_bias

    def logits(
        self, inputs: Float[np.ndarray, "points hidden"]
    ) -> Float64[np.ndarray, "points experts"]:
        """``W y + b``, with a bias on raw logits as in :attr:`Router.affine_bias`."""
        logits = inputs.astype(np.float64) @ self._rows
        return logits if self._bias is None else logits + self._bias.astype(np.float64)

    def mapped(
        self, logits: Float64[np.ndarray, "points experts"]
    ) -> Float64[np.ndarray, "points experts"]:
        """What scores are taken of: behind the logit map, without a bias that only selects."""
        rule, bias = self.router.rule, self.router.selection_bias
        if rule.is_affine and bias is not None:
            return logits - bias.astype(np.float64)
        return mapped_logits(logits, rule.logit_map)

    def selection(
        self, logits: Float64[np.ndarray, "points experts"]
    ) -> Float64[np.ndarray, "points experts"]:
        """What the experts are compared by, masked groups at their fill."""
        rule = self.router.rule
        bias = None if rule.is_affine else self.router.selection_bias
        scores = selection_scores(logits, rule, bias)
        return scores if rule.groups is None else group_mask(scores, rule.groups)

    def chosen(
        self, logits: Float64[np.ndarray, "points experts"]
    ) -> Int32[np.ndarray, "points k"]:
        """The chosen experts in descending selection score; of equal ones the lower number."""
        return top_k(self.selection(logits), self.router.rule.top_k)

    def weights(
        self,
        inputs: Float[np.ndarray, "points hidden"],
        logits: Float64[np.ndarray, "points experts"],
        chosen: Int32[np.ndarray, "points k"],
    ) -> Float64[np.ndarray, "points k"]:
        """Routing weights of these experts, whatever the rule would choose."""
        mapped, scale = self.mapped(logits), self.router.expert_scale
        scores, shared_sum = SCORES[self.router.rule.score](mapped), self._shared_sum(inputs)
        weights = routing_weights(mapped, scores, chosen, self.router.rule.weights, shared_sum)
        return weights if scale is None else weights * scale[chosen]

    def smooth_weights(
        self, inputs: Float[np.ndarray, "points hidden"], eps: float
    ) -> Float64[np.ndarray, "points experts"]:
        """Weights of the smoothed gate (:func:`~moegeom.geometry.whatif.smooth_gate`).

        ValueError for a rule whose weights depend on the order of experts (``sparsemixer``).
        """
        logits, rule, scale = self.logits(inputs), self.router.rule, self.router.expert_scale
        mapped, selection = self.mapped(logits), self.selection(logits)
        weights = smooth_gate(
            mapped,
            SCORES[rule.score](mapped),
            selection,
            rule.top_k,
            rule.weights,
            eps,
            shared_sum=self._shared_sum(inputs),
        )
        return weights if scale is None else weights * scale

    def _shared_sum(
        self, inputs: Float[np.ndarray, "points hidden"]
    ) -> Float64[np.ndarray, "points"] | None:
        """Sum of the scores of experts that always run; None where none count."""
        rows = self.router.shared_rows
        if rows is None:
            return None
        return score_sum(inputs.astype(np.float64) @ rows.astype(np.float64).T, self.router.rule)

    def output(
        self, inputs: Float64[np.ndarray, "points hidden"], mixed: Mixture
    ) -> Float64[np.ndarray, "points outputs"]:
        """What the chosen experts make of each input, without shared experts."""
        logits = self.logits(inputs)
        chosen = self.chosen(logits)
        return mixed(inputs, chosen, self.weights(inputs, logits, chosen))


@dataclass(frozen=True, eq=False)
class TokenJumps:
    """The nearest boundary of some tokens, and what crossing it does.

    ``height`` is the length of the jump, ``output`` that of the output of the routed experts at the
    token itself; height is nan where the nearest boundary point is not known. ``pair`` are the
    experts that change places there, ``after`` is the set behind it.
    """

    tie: NearestTie
    pair: Int32[np.ndarray, "tokens 2"]
    chosen: Int32[np.ndarray, "tokens k"]
    after: Int32[np.ndarray, "tokens k"]
    height: Float64[np.ndarray, "tokens"]
    output: Float64[np.ndarray, "tokens"]

    @property
    def is_known(self) -> Bool[np.ndarray, "tokens"]:
        return np.isfinite(self.height)

    @property
    def relative(self) -> Float64[np.ndarray, "tokens"]:
        """Height over output; nan where either is not known, inf over an output of zeros."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.height / self.output


def why_no_jumps(router: Router, facts: SourceFacts) -> str:
    """Why nothing can be said of jumps of this router on these tokens; empty where it can."""
    if router.rule.top_k >= router.num_experts:
        return "every expert is chosen: there is no boundary"
    if not np.ptp(router.weight, axis=0).any():
        return "all rows are equal: no input is nearer to a boundary than another"
    if router.listed:
        return f"its choice does not follow from router and input: {router.listed}"
    if router.projection is not None:
        return "jumps of routers behind a projection are not known"
    if router.rule.score not in SCORES:
        return f"scores {router.rule.score!r} are not known of inputs that nobody recorded"
    absent = unavailable(router, facts)
    return next((absent[name] for name in ("input", "distance", "weights") if name in absent), "")


@dataclass(frozen=True, eq=False)
class TokenTies:
    """The nearest boundary point of some tokens, nan where it is not known, and both sets there."""

    exact: ExactRouter
    inputs: Float64[np.ndarray, "tokens hidden"]
    tie: NearestTie
    pair: Int32[np.ndarray, "tokens 2"]
    chosen: Int32[np.ndarray, "tokens k"]
    after: Int32[np.ndarray, "tokens k"]

    def sides(self, rows: Int64[np.ndarray, "some"]) -> tuple[Any, Any]:
        """Experts and weights before and behind the boundaries of some of the tokens."""
        at, chosen, after = self.tie.point[rows], self.chosen[rows], self.after[rows]
        return _both_sides(self.exact, at, chosen, after, self.pair[rows])

    def jumps(self, rows: Int64[np.ndarray, "some"], mixed: Mixture) -> TokenJumps:
        """Jumps of some of the known ones, and the length of their output."""
        y, chosen = self.inputs[rows], self.chosen[rows]
        tie = NearestTie(*(part[rows] for part in vars(self.tie).values()))
        own = chosen, self.exact.weights(y, self.exact.logits(y), chosen)
        height, output = jump_beside(tie.point, *self.sides(rows), y, own, mixed)
        return TokenJumps(tie, self.pair[rows], chosen, self.after[rows], height, output)

    def heights(
        self, rows: Int64[np.ndarray, "some"], mixed: Mixture
    ) -> Float64[np.ndarray, "some"]:
        """Jumps alone: but for the experts that both sides weigh alike none is read."""
        return jump(self.tie.point[rows], *self.sides(rows), mixed)


def token_ties(
    prepared: PreparedRouter,
    inputs: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    kernels: Kernels,
) -> TokenTies:
    """The nearest boundary points of inputs with the logits and the choice of a scan.

    The point is known where it is that of a single exchange: a step of 1e-6 rms lengths on either
    side of it, the rule chooses the set of the token, and that set with one expert exchanged. The
    nearest boundary of a grouped rule often is not known, nor is that of softmax scores with a
    bias, of equal rows, or of a token at a corner.
    """
    exact, y = ExactRouter(prepared.router), inputs.astype(np.float64)
    tie, pair = _nearest(prepared, y, logits, chosen, kernels)
    after = exchanged(chosen, pair)
    tie = _of_single_exchange(exact, tie, y, chosen, after)
    return TokenTies(exact, y, tie, pair, chosen, after)


def token_jumps(
    prepared: PreparedRouter,
    inputs: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    kernels: Kernels,
    mixed: Mixture,
) -> TokenJumps:
    """Jumps at the nearest boundary of all tokens, where :func:`token_ties` knows it."""
    ties = token_ties(prepared, inputs, logits, chosen, kernels)
    rows = np.flatnonzero(ties.tie.is_known)
    own = chosen, ties.exact.weights(ties.inputs, ties.exact.logits(ties.inputs), chosen)
    height = np.full(len(chosen), np.nan)
    height[rows], output = jump_beside(
        ties.tie.point[rows], *ties.sides(rows), ties.inputs, own, mixed
    )
    return TokenJumps(ties.tie, ties.pair, chosen, ties.after, height, output)


def set_change(
    router: Router,
    inputs: Float[np.ndarray, "tokens hidden"],
    chosen: Int32[np.ndarray, "tokens k"],
    others: Int32[np.ndarray, "tokens k"],
    mixed: Mixture,
) -> tuple[Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"]]:
    """How far the output moves when other experts are used for the same inputs, and its length.

    Both sets have the routing weights that the rule gives them; the length is that of ``chosen``.
    """
    exact, y = ExactRouter(router), inputs.astype(np.float64)
    logits = exact.logits(y)
    sides = [(experts, exact.weights(y, logits, experts)) for experts in (chosen, others)]
    return jump_beside(y, sides[0], sides[1], y, sides[0], mixed)


def _nearest(
    prepared: PreparedRouter,
    y: Float64[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    kernels: Kernels,
) -> tuple[NearestTie, Int32[np.ndarray, "tokens 2"]]:
    router = prepared.router
    if prepared.rows is not None:
        _, margin = kernels["top_k"](logits, router.rule.top_k)
        _, pair = kernels["boundary_distance"](logits, chosen, margin, prepared.rows)
        return linear_tie(y, pair, router.weight, router.affine_bias), pair
    # float32 logits move a near boundary by more than the point may be off
    logits = ExactRouter(router).logits(y)
    lower, upper, pair = kernels["curved_distance"](logits, chosen, prepared.curved)
    pair = np.where((upper <= lower * POINT)[:, None], pair, np.int32(-1))
    rule = prepared.curved.rule if prepared.curved is not None else router.rule
    biases = router.logit_bias, router.selection_bias
    tie = curved_tie(y, pair, router.weight, rule.score, rule.logit_map, *biases, upper)
    return tie, pair


def _of_single_exchange(
    exact: ExactRouter,
    tie: NearestTie,
    y: Float64[np.ndarray, "tokens hidden"],
    chosen: Int32[np.ndarray, "tokens k"],
    after: Int32[np.ndarray, "tokens k"],
) -> NearestTie:
    """The ties at which the rule itself exchanges one expert; nan for the others."""
    rows = np.flatnonzero(tie.is_known)
    step = _STEP * np.sqrt((y[rows] ** 2).mean(axis=1, keepdims=True)) * tie.normal[rows]
    is_exchange = np.ones(len(rows), bool)
    for sign, expected in ((1.0, chosen), (-1.0, after)):
        choice = exact.chosen(exact.logits(tie.point[rows] + sign * step))
        is_exchange &= same_sets(choice, expected[rows])
    lost = rows[~is_exchange]
    parts = [part.copy() for part in (tie.point, tie.normal, tie.distance)]
    for part in parts:
        part[lost] = np.nan
    return NearestTie(*parts)


def _both_sides(
    exact: ExactRouter,
    at: Float64[np.ndarray, "tokens hidden"],
    chosen: Int32[np.ndarray, "tokens k"],
    after: Int32[np.ndarray, "tokens k"],
    pair: Int32[np.ndarray, "tokens 2"],
) -> tuple[Any, Any]:
    """Experts and weights on both sides, slot by slot.

    The two logits of an affine rule are made equal, so that weights that do not change are equal to
    the last bit; experts are in the order of the boundary, by which some rules weigh them.
    """
    logits = exact.logits(at)
    if exact.router.rule.is_affine:
        token = np.arange(len(at))
        logits[token, pair[:, 1]] = logits[token, pair[:, 0]]
    order = np.argsort(-np.take_along_axis(logits, chosen.astype(np.int64), 1), 1, kind="stable")
    sides = [np.take_along_axis(experts, order, axis=1) for experts in (chosen, after)]
    before, behind = ((experts, exact.weights(at, logits, experts)) for experts in sides)
    return before, behind
