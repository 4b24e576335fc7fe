"""A router made ready for the kernels, and what can be known about tokens at it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moegeom.core.errors import OUT_OF_RANGE, RecordingError, RouterRuleError
from moegeom.core.metric import RULE_HAS_NO
from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float64
from moegeom.core.text import number_of
from moegeom.core.tokens import OUTPUT_KINDS, SourceFacts, Stage
from moegeom.geometry.boundary.curved import CurvedRows, curved_rows
from moegeom.geometry.boundary.linear import Cones, RowDistances, cones_of, row_distances
from moegeom.geometry.rounding import RowSpreads, row_spreads

#: Quantities of router inputs, of boundaries, and of the logits of all experts.
_OF_INPUTS = (
    "input_norm",
    "float_bound",
    "noise_scale",
    "direction",
    "angle",
    "rounding_sigmas",
    "input",
    "flip",
    "noise",
)
_OF_BOUNDARIES = ("distance", "distance_upper", "pair")
_OF_ALL_LOGITS = ("selection", "scores", "probability", "entropy", "log_sum_exp")

#: Why near-ties are not counted where tokens choose different numbers of experts.
NO_BORDER = "no k-th expert has a border where sets differ in size"

#: Quantities of rules that take the k best, whose border lies between two experts.
_OF_TOP_K = (
    *("pair", "angle", "rounding_sigmas", "noise_scale", "flip", "noise"),
    *("probability", "entropy", "log_sum_exp"),
)

#: Why a quantity is not available, by stage of the recording.
_NEEDS_INPUT = "needs recorded router inputs; this recording holds {stage}"


@dataclass(frozen=True, eq=False)
class PreparedRouter:
    """Arrays in the layout that the loops want.

    ``weight_columns`` is the transposed weight [hidden, experts]; ``selection_bias`` is zeros
    without one. What only some quantities need is made when it is first
    asked for; threads that ask at once may each make it, and get the same. ``longest_row``,
    ``largest_bias`` and ``num_terms`` bound what rounding does to a logit: the largest Euclidean
    length of a row, the largest bias, and the length of the sums; behind a projection, which
    engines multiply by first, the Frobenius norm of that, the length of its bias, and both sums.
    """

    router: Router
    weight_columns: Float[np.ndarray, "hidden experts"]
    logit_bias: Float[np.ndarray, "experts"] | None
    selection_bias: Float64[np.ndarray, "experts"]
    longest_row: float
    largest_bias: float
    num_terms: int

    @cached_property
    def rows(self) -> RowDistances | None:
        """Distances between the rows of an affine rule; None for others."""
        router = self.router
        return row_distances(router.weight, router.affine_bias) if router.rule.is_affine else None

    @cached_property
    def row_lengths(self) -> Float64[np.ndarray, "experts"]:
        """Euclidean length of each row."""
        return np.sqrt((self.router.weight.astype(np.float64) ** 2).sum(axis=1))

    @cached_property
    def curved(self) -> CurvedRows | None:
        """What curved or grouped distances need; None for linear and unknown rules."""
        return self._curved(self.router.weight)

    @cached_property
    def curved_before_norm(self) -> CurvedRows | None:
        """The same for inputs without the gain: rows times the gain."""
        if self.router.gain is None:
            return None
        return self._curved(self.router.weight.astype(np.float64) * self.router.gain)

    @cached_property
    def spreads(self) -> RowSpreads:
        """Rows with bounds on how far they are apart."""
        return row_spreads(self.router.weight)

    @cached_property
    def cones(self) -> Cones | None:
        """Where experts of an affine rule tie, for inputs without the gain; None for no gain."""
        router = self.router
        if router.gain is None:
            return None
        bias = np.zeros(router.num_experts) if router.affine_bias is None else router.affine_bias
        rows = router.weight.astype(np.float64) * router.gain.astype(np.float64)
        return cones_of(rows, bias.astype(np.float64))

    def _curved(self, rows: Float[np.ndarray, "experts hidden"]) -> CurvedRows | None:
        router = self.router
        if router.rule.is_linear or _unknown_boundaries(router):
            return None
        return curved_rows(rows, router.rule, router.logit_bias, router.selection_bias)


def prepare(router: Router) -> PreparedRouter:
    """The router in the layout of the loops; refuses rows that are not finite.

    Raises
    ------
    RouterRuleError
        When a weight or bias is not finite: nothing measured on tokens would mean anything.
    """
    if router.projection is not None and router.projection.scale is not None:
        _refuse_scale(router, router.projection.scale)
    refuse_non_finite_rows(router)
    affine = router.rule.is_affine
    bias = router.affine_bias if affine else router.logit_bias
    return PreparedRouter(
        router=router,
        weight_columns=np.ascontiguousarray(router.weight.T),
        logit_bias=None if bias is None else bias.astype(router.weight.dtype),
        selection_bias=np.zeros(router.num_experts)
        if affine or router.selection_bias is None
        else router.selection_bias.astype(np.float64),
        **_error_terms(router, bias),
    )


def refuse_non_finite_rows(router: Router, where: str = "") -> None:
    """Raises RouterRuleError, beginning with ``where``, for rows or biases that are not finite, or
    that engines load as infinity.
    """
    for what, values in (
        ("row", router.weight),
        ("logit bias", router.logit_bias),
        ("selection bias", router.selection_bias),
    ):
        if values is None:
            continue
        with np.errstate(over="ignore"):
            is_loaded = np.isfinite(values.astype(np.float32, copy=False))
        if not is_loaded.all():
            bad = np.unique(np.argwhere(~is_loaded)[:, 0])
            is_finite = bool(np.isfinite(values).all())
            raise RouterRuleError(
                f"{where}router {router.name}: the {what} of expert {bad[0]} is "
                f"{'beyond float32' if is_finite else 'not finite'} "
                f"({len(bad)} of {router.num_experts} experts); "
                f"tensor {router.provenance.tensors[0]}.",
                "The file is damaged or training diverged. `--layers` scans the other layers.",
                code=OUT_OF_RANGE if is_finite else "",
            )


def _unknown_boundaries(router: Router) -> str:
    """Why nothing is known about distances to the boundaries of a router; empty where it is."""
    rule = router.rule
    if rule.is_linear:
        return ""
    if router.has_cosine_logits:
        return "boundaries of scores of cosines have no known distance"
    if (
        rule.score == "softmax"
        and rule.logit_map is not None
        and np.isfinite(rule.logit_map.soft_cap)
    ):
        return "boundaries of softmax scores of soft-capped logits have no known distance"
    return ""


def _error_terms(router: Router, bias: Float[np.ndarray, "experts"] | None) -> dict[str, Any]:
    inner = router.projection
    rows = router.weight if inner is None else inner.weight.reshape(1, -1)
    lengths = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1))
    largest = 0.0 if bias is None else float(np.abs(bias).max())
    if inner is not None and inner.bias is not None:
        largest = float(np.sqrt((inner.bias.astype(np.float64) ** 2).sum()))
    return {
        "longest_row": float(lengths.max(initial=0.0)),
        "largest_bias": largest,
        "num_terms": router.hidden_size + (0 if inner is None else len(inner.weight)),
    }


def _refuse_scale(router: Router, scale: float) -> None:
    """Raises RouterRuleError for a scale that orders nothing."""
    if not 0.0 < scale < np.inf:
        raise RouterRuleError(
            f"router {router.name}: its logits are multiplied by {scale}, expected a positive "
            f"number; tensor {router.provenance.tensors[-1]}.",
            "The file is damaged or training diverged. `--layers` scans the other layers.",
        )


def unavailable(router: Router, facts: SourceFacts) -> dict[str, str]:
    """Quantities that this router and this source cannot give, each with the reason."""
    reasons: dict[str, str] = {}
    stage = facts.stage
    if router.rule.pick == "threshold":
        reasons |= dict.fromkeys(_OF_TOP_K, "this rule takes every expert above a threshold")
    elif not router.rule.is_affine:
        curved = "boundaries of this rule are curved or grouped; this is defined for straight ones"
        reasons |= dict.fromkeys(("rounding_sigmas", "noise_scale"), curved)
        unknown = _unknown_boundaries(router)
        if not unknown and stage == "top_logits":
            unknown = (
                "boundaries of this rule need all logits; this recording holds the largest ones"
            )
        if unknown:
            reasons |= dict.fromkeys((*_OF_BOUNDARIES, "angle"), unknown)
    if router.gain is None or router.norm is None or router.norm.kind != "rms":
        norm_text = (
            "this is a layer norm" if router.norm and router.gain is not None else "none is known"
        )
        why = f"the angle before the norm is defined for RMS norms; {norm_text}"
        reasons.setdefault("angle", why)
    if not _has_guarded_sum(router):
        reasons["weight_sum"] = f"{RULE_HAS_NO}sum of scores that could be as small as its guard"
    if router.rule.num_chosen is None:
        reasons["selection"] = NO_BORDER
    else:
        reasons["num_chosen"] = f"{RULE_HAS_NO}varying number of experts"
    if router.projection is not None:
        why = "arithmetics and noise of routers behind a projection are not known"
        reasons |= dict.fromkeys(("flip", "noise"), why)
    if not facts.has_documents:
        why = "the recording does not say where documents begin"
        reasons |= dict.fromkeys(("document", "position"), why)
    for kind in OUTPUT_KINDS:
        if kind not in facts.outputs:
            reasons[kind] = "the recording holds no outputs of experts"
    if stage in ("logits", "top_logits", "ids"):
        why = _NEEDS_INPUT.format(stage=stage.replace("_", " "))
        reasons |= dict.fromkeys(_OF_INPUTS, why)
        if router.shared_rows is not None:
            reasons["weights"] = (
                "weights of this rule are divided by a sum with the shared experts, whose logits "
                "need recorded router inputs"
            )
        if router.has_cosine_logits:
            why = (
                "logits of this rule are divided by the length of the projected input, which "
                "needs recorded router inputs"
            )
            reasons |= dict.fromkeys(_OF_BOUNDARIES, why)
    if "weights" in reasons:
        reasons.setdefault("weight_sum", reasons["weights"])
    if stage == "ids":
        why = "needs logits; this recording holds expert ids only"
        lost = (
            "margin",
            "group_margin",
            "fill_decides",
            "weights",
            "weight_sum",
            *_OF_BOUNDARIES,
            *_OF_ALL_LOGITS,
        )
        reasons |= dict.fromkeys(lost, why)
    if stage == "top_logits":
        why = "needs all logits; this recording holds the largest ones"
        reasons |= dict.fromkeys(_OF_ALL_LOGITS, why)
        if _weights_need_all_logits(router):
            reasons.setdefault("weights", why)
            reasons.setdefault("weight_sum", why)
    if "distance" in reasons:
        reasons["noise_scale"] = reasons.get("noise_scale", reasons["distance"])
    if stage == "ids":
        reasons["matches_recording"] = "the recording holds choices alone: nothing to follow from"
    elif not facts.has_chosen:
        reasons["matches_recording"] = "the recording does not say what the model chose"
    return reasons


def _has_guarded_sum(router: Router) -> bool:
    """Whether weights are divided by a sum, of chosen experts alone, that scores can leave at 0.

    The largest scores of a softmax are at least 1 / E: of these a guard may be a thousandth.
    """
    facts = router.rule.weights
    if not facts.renormalise or router.shared_rows is not None:
        return False
    is_bounded = facts.source == "scores" and router.rule.score == "softmax"
    return not is_bounded or 1e3 * max(facts.floor, facts.epsilon) * router.num_experts > 1.0


def _weights_need_all_logits(router: Router) -> bool:
    """Whether weights depend on logits that are not among the largest.

    The sum over all experts cancels out of renormalised softmax scores, unless something is added
    to their sum or bounds it; that sum is at least 1 / E.
    """
    rule = router.rule
    facts = rule.weights
    if facts.source != "scores" or rule.score != "softmax":
        return facts.source == "sparsemixer"
    noticed = max(facts.floor, facts.epsilon * 2.0**53)
    return not facts.renormalise or noticed * router.num_experts > 1.0


def check_width(router: Router, stage: Stage, width: int, source: str) -> None:
    """Raises RecordingError when a recording's rows are not as wide as the router needs."""
    expected = {
        "router_input": router.hidden_size,
        "pre_norm": router.hidden_size,
        "logits": router.num_experts,
        "ids": router.rule.num_chosen,
    }.get(stage)
    if expected is not None and width != expected:
        raise RecordingError(
            f"{source}: {stage.replace('_', ' ')} of router {router.name} has "
            f"{number_of(width, 'value')} a "
            f"token; the checkpoint expects {expected}.",
            other_number_hint(width)
            if stage == "ids"
            else "Is the recording of another model, or of another stage (`--stage`)?",
        )


def other_number_hint(recorded: int) -> str:
    """What to do where another number of experts is recorded than the rule chooses."""
    return (
        f"If the recorded model chose {recorded}, write that into config.json (of a copy), or into "
        "--top-k where --router-pattern is given; else it is a recording of another model."
    )
