"""A router made ready for the kernels, and what can be known about tokens at it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from moegeom.core.errors import RecordingError, RouterRuleError
from moegeom.core.router import Router
from moegeom.core.tokens import OUTPUT_KINDS, SourceFacts, Stage
from moegeom.geometry.boundary import RowDistances, row_distances

#: Quantities of router inputs, and quantities of the logits of all experts.
_OF_INPUTS = (
    "input_norm",
    "float_bound",
    "noise_scale",
    "direction",
    "angle",
    "rounding_sigmas",
    "input",
)
_OF_ALL_LOGITS = (
    "distance",
    "pair",
    "weights",
    "selection",
    "probability",
    "entropy",
    "log_sum_exp",
)

#: Why a quantity is not available, by stage of the recording.
_NEEDS_INPUT = "needs recorded router inputs; this recording holds {stage}"


@dataclass(frozen=True, eq=False)
class PreparedRouter:
    """Arrays in the layout that the loops want.

    ``weight_columns`` is the transposed weight [hidden, experts]; ``rows`` is None for a curved
    rule, or when no distance is wanted; ``selection_bias`` is zeros without one; ``longest_row`` is
    the largest Euclidean length of a row.
    """

    router: Router
    weight_columns: Float[np.ndarray, "hidden experts"]
    logit_bias: Float[np.ndarray, "experts"] | None
    selection_bias: Float64[np.ndarray, "experts"]
    rows: RowDistances | None
    longest_row: float


def prepare(router: Router, with_distances: bool = True) -> PreparedRouter:
    """The router with its row distances, if wanted; refuses rows that are not finite.

    Raises
    ------
    RouterRuleError
        When a weight or bias is not finite: nothing measured on tokens would mean anything.
    """
    for what, values in (
        ("row", router.weight),
        ("logit bias", router.logit_bias),
        ("selection bias", router.selection_bias),
    ):
        if values is not None and not np.isfinite(values).all():
            bad = np.unique(np.argwhere(~np.isfinite(values))[:, 0])
            raise RouterRuleError(
                f"router {router.name}: the {what} of expert {bad[0]} is not finite "
                f"({len(bad)} of {router.num_experts} experts); "
                f"tensor {router.provenance.tensors[0]}.",
                "The file is damaged or training diverged. `--layers` scans the other layers.",
            )
    affine = router.rule.is_affine
    bias = router.affine_bias if affine else router.logit_bias
    return PreparedRouter(
        router=router,
        weight_columns=np.ascontiguousarray(router.weight.T),
        logit_bias=None if bias is None else bias.astype(router.weight.dtype),
        selection_bias=np.zeros(router.num_experts)
        if affine or router.selection_bias is None
        else router.selection_bias.astype(np.float64),
        rows=row_distances(router.weight, bias) if affine and with_distances else None,
        longest_row=float(np.sqrt((router.weight.astype(np.float64) ** 2).sum(axis=1).max())),
    )


def unavailable(router: Router, facts: SourceFacts) -> dict[str, str]:
    """Quantities that this router and this source cannot give, each with the reason."""
    reasons: dict[str, str] = {}
    stage = facts.stage
    if not router.rule.is_affine:
        curved = (
            "walls of this rule are curved or grouped; exact distances exist for affine rules only"
        )
        reasons |= dict.fromkeys(("distance", "pair", "angle", "rounding_sigmas"), curved)
    if router.gain is None or router.norm is None or router.norm.kind != "rms":
        known = (
            "this is a layer norm" if router.norm and router.gain is not None else "none is known"
        )
        why = f"the angle before the norm is defined for RMS norms; {known}"
        reasons.setdefault("angle", why)
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
    if stage == "ids":
        why = "needs logits; this recording holds expert ids only"
        lost = ("margin", "group_margin", "fill_decides", *_OF_ALL_LOGITS)
        reasons |= dict.fromkeys(lost, why)
    if stage == "top_logits":
        why = "needs all logits; this recording holds the largest ones"
        reasons |= dict.fromkeys(_OF_ALL_LOGITS, why)
    if "distance" in reasons:
        reasons["noise_scale"] = reasons.get("noise_scale", reasons["distance"])
    if not facts.has_chosen or stage == "ids":
        reasons["matches_recording"] = "the recording does not say what the model chose"
    return reasons


def check_width(router: Router, stage: Stage, width: int, source: str) -> None:
    """Raises RecordingError when a recording's rows are not as wide as the router needs."""
    expected = {
        "router_input": router.hidden_size,
        "pre_norm": router.hidden_size,
        "logits": router.num_experts,
        "ids": router.rule.top_k,
    }.get(stage)
    if expected is not None and width != expected:
        raise RecordingError(
            f"{source}: {stage.replace('_', ' ')} of router {router.name} has {width} values a "
            f"token; the checkpoint expects {expected}.",
            "Is the recording of another model, or of another stage (`--stage`)?",
        )
