"""What may differ on the other side: hypotheses, each one change to the router and its cause.

A hypothesis is tried by routing the inputs of one side again with that one thing changed, and
counting how many choices of the other side it reproduces (``moegeom explain``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moegeom.core.router import Router, RouterCause
from moegeom.variants.arithmetic import Arithmetic

#: The router with one thing changed, from it and that of the other checkpoint with rows for the
#: same inputs (None where none was named); None where the change does not apply.
Edit = Callable[[Router, Router | None], Router | None]


@dataclass(frozen=True)
class Hypothesis:
    """One thing changed; ``needs_inputs`` where logits alone cannot tell.

    ``only_stores`` where numbers are stored otherwise: of numbers that are stored so it changes
    nothing, and need not be tried.
    """

    name: str
    text: str
    cause: RouterCause
    arithmetic: Arithmetic
    edit: Edit
    needs_inputs: bool
    only_stores: bool = False


#: The router as stored, in float32; top-k of an affine rule compares logits.
AS_STORED = Arithmetic(name="", text="", engine="none", version="", source="", compared="logits")


def _same(router: Router, other: Router | None) -> Router:
    return router


def _with_curved_bias(router: Router, other: Router | None) -> Router | None:
    return None if router.selection_bias is None else router


def _curved(router: Router, other: Router | None) -> Router | None:
    """Of an affine rule scores are compared by their logits."""
    return None if router.rule.score == "identity" else router


def _without_selection_bias(router: Router, other: Router | None) -> Router | None:
    if router.selection_bias is None or not router.selection_bias.any():
        return None
    return replace(router, selection_bias=np.zeros_like(router.selection_bias))


def _without_logit_bias(router: Router, other: Router | None) -> Router | None:
    if router.logit_bias is None or not router.logit_bias.any():
        return None
    return replace(router, logit_bias=np.zeros_like(router.logit_bias))


def _with_bias_of_other(router: Router, other: Router | None) -> Router | None:
    if other is None or router.selection_bias is None or other.selection_bias is None:
        return None
    if np.array_equal(router.selection_bias, other.selection_bias):
        return None
    return replace(router, selection_bias=other.selection_bias)


def _with_gain_of_other(router: Router, other: Router | None) -> Router | None:
    """Its rows behind the norm of the other checkpoint: a gain that the rows did not follow."""
    if other is None or router.gain is None or other.gain is None or not router.gain.all():
        return None
    if np.array_equal(router.gain, other.gain):
        return None
    ratio = other.gain.astype(np.float64) / router.gain
    rows = (router.weight.astype(np.float64) * ratio).astype(router.weight.dtype)
    return replace(router, weight=rows)


def _with_rows_of_other(router: Router, other: Router | None) -> Router | None:
    if other is None or router.selection_bias is None:
        return None
    if np.array_equal(router.weight, other.weight):
        return None
    return replace(router, weight=other.weight)


def _other(router: Router, other: Router | None) -> Router | None:
    if other is None:
        return None
    return replace(
        router,
        weight=other.weight,
        logit_bias=other.logit_bias,
        selection_bias=other.selection_bias,
    )


def _without_gain(router: Router, other: Router | None) -> Router | None:
    if router.gain is None or not router.gain.all() or (router.gain == 1.0).all():
        return None
    return replace(router, weight=(router.weight / router.gain).astype(router.weight.dtype))


def _with_gain_twice(router: Router, other: Router | None) -> Router | None:
    if router.gain is None or (router.gain == 1.0).all():
        return None
    return replace(router, weight=(router.weight * router.gain).astype(router.weight.dtype))


def _without_groups(router: Router, other: Router | None) -> Router | None:
    if router.rule.groups is None:
        return None
    return replace(router, rule=replace(router.rule, groups=None))


def _with_other_fill(router: Router, other: Router | None) -> Router | None:
    groups = router.rule.groups
    if groups is None:
        return None
    fill = 0.0 if np.isneginf(groups.fill) else -np.inf
    return replace(router, rule=replace(router.rule, groups=replace(groups, fill=fill)))


def _with_other_group_score(router: Router, other: Router | None) -> Router | None:
    groups = router.rule.groups
    if groups is None:
        return None
    score = "max" if groups.score == "top2_sum" else "top2_sum"
    return replace(router, rule=replace(router.rule, groups=replace(groups, score=score)))


def _with_other_score(router: Router, other: Router | None) -> Router | None:
    """Sigmoid for softmax and the reverse: it matters where a bias or a mask follows."""
    swapped = {"sigmoid": "softmax", "softmax": "sigmoid"}.get(router.rule.score)
    if swapped is None or router.rule.is_affine:
        return None
    return replace(router, rule=replace(router.rule, score=swapped))


def _tried(
    name: str,
    text: str,
    cause: RouterCause,
    edit: Edit = _same,
    *,
    needs_inputs: bool = False,
    only_stores: bool = False,
    **steps: str,
) -> Hypothesis:
    """``steps`` are those of the arithmetic that are not as stored."""
    how = replace(AS_STORED, name=name, **steps)
    return Hypothesis(name, text, cause, how, edit, needs_inputs, only_stores)


def _rows_rounded(name: str, text: str, parameter: str) -> Hypothesis:
    return _tried(
        name, text, "weights rounded", needs_inputs=True, only_stores=True, parameter=parameter
    )


def _in_integers(name: str, text: str, parameter: str, largest: int) -> tuple[Hypothesis, ...]:
    """The other ways to make codes: another scale, unsigned, and each stored in bf16 after it."""
    other, unsigned = f"{parameter}_by_{largest}", f"u{parameter}"
    ways = {
        "_other_scale": (f"{text}, scale amax/{largest}", other),
        "_unsigned": (f"{text}, unsigned", unsigned),
        "_in_bf16": (f"{text}, then bf16", f"{parameter}_in_bfloat16"),
        "_other_scale_in_bf16": (f"{text}, amax/{largest}, then bf16", f"{other}_in_bfloat16"),
        "_unsigned_in_bf16": (f"{text}, unsigned, then bf16", f"{unsigned}_in_bfloat16"),
    }
    return tuple(_rows_rounded(f"{name}{key}", *way) for key, way in ways.items())


#: In the order in which equally good ones are believed: what is simpler comes first.
HYPOTHESES: tuple[Hypothesis, ...] = (
    _rows_rounded("weights_bf16", "router weights rounded to bf16", "bfloat16"),
    _rows_rounded("weights_fp16", "router weights rounded to fp16", "float16"),
    _rows_rounded("weights_int8", "router weights int8 by row", "int8_rows"),
    *_in_integers("weights_int8", "router weights int8 by row", "int8_rows", 127),
    _rows_rounded("weights_fp8", "router weights fp8, one scale", "fp8_tensor"),
    _rows_rounded("weights_fp8_blocks", "router weights fp8 by blocks", "fp8_blocks_of_128"),
    _rows_rounded("weights_int4", "router weights int4, groups of 128", "int4_groups_of_128"),
    *_in_integers("weights_int4", "router weights int4, groups of 128", "int4_groups_of_128", 7),
    _tried(
        "inputs_bf16",
        "router inputs rounded to bf16",
        "inputs rounded",
        needs_inputs=True,
        input="bfloat16",
    ),
    _tried(
        "inputs_weights_bf16",
        "inputs and weights rounded to bf16",
        "inputs rounded",
        needs_inputs=True,
        input="bfloat16",
        parameter="bfloat16",
    ),
    _tried("logits_bf16", "logits rounded to bf16", "logits rounded", output="bfloat16"),
    _tried(
        "bf16_throughout",
        "inputs, weights and logits in bf16",
        "logits rounded",
        needs_inputs=True,
        input="bfloat16",
        parameter="bfloat16",
        output="bfloat16",
    ),
    _tried("logits_fp16", "logits rounded to fp16", "logits rounded", output="float16"),
    _tried(
        "scores_bf16",
        "scores rounded to bf16",
        "logits rounded",
        _curved,
        score="bfloat16",
        compared="scores",
    ),
    _tried(
        "bias_bf16",
        "selection bias cast to bf16",
        "bias rounded",
        _with_curved_bias,
        only_stores=True,
        bias="bfloat16",
    ),
    _tried(
        "bias_fp16",
        "selection bias cast to fp16",
        "bias rounded",
        _with_curved_bias,
        only_stores=True,
        bias="float16",
    ),
    _tried(
        "selection_bf16",
        "score + bias added up in bf16",
        "bias rounded",
        _with_curved_bias,
        bias="bfloat16",
        selection="bfloat16",
    ),
    _tried("bias_missing", "selection bias left out", "bias missing", _without_selection_bias),
    _tried(
        "logit_bias_missing",
        "logit bias left out",
        "bias missing",
        _without_logit_bias,
        needs_inputs=True,
    ),
    _tried(
        "bias_of_other",
        "selection bias of the other checkpoint",
        "bias stale",
        _with_bias_of_other,
    ),
    _tried(
        "gain_of_other",
        "norm gain of the other checkpoint",
        "gain not folded",
        _with_gain_of_other,
        needs_inputs=True,
    ),
    _tried(
        "rows_of_other",
        "rows of the other checkpoint",
        "router stale",
        _with_rows_of_other,
        needs_inputs=True,
    ),
    _tried(
        "router_of_other",
        "router of the other checkpoint",
        "router stale",
        _other,
        needs_inputs=True,
    ),
    _tried(
        "gain_missing", "norm gain left out", "gain not folded", _without_gain, needs_inputs=True
    ),
    _tried(
        "gain_twice",
        "norm gain applied twice",
        "gain not folded",
        _with_gain_twice,
        needs_inputs=True,
    ),
    _tried("groups_ignored", "groups of experts ignored", "rule differs", _without_groups),
    _tried("other_fill", "dropped groups filled otherwise", "rule differs", _with_other_fill),
    _tried("other_group_score", "groups scored otherwise", "rule differs", _with_other_group_score),
    _tried("other_score", "sigmoid for softmax, or the reverse", "rule differs", _with_other_score),
)
