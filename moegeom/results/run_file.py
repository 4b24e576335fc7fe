"""What ``run.json`` holds, so that one that nobody vouches for is refused and not half believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

from msgspec import Meta

from moegeom.core.documents import DocumentError, record_of
from moegeom.core.router import RouterName, TokenTable
from moegeom.core.text import quoted

#: Share of the first recorded choices that must follow from a rule to verify it.
LEAST_SHARE = 0.99

# What is at each place. A key that may be absent is one of which there may be nothing to say, or
# that older versions did not write; keys that are not named here are not read.

_Trust = TypedDict(
    "_Trust",
    {
        "fingerprint": Literal["matches", "differs", "unknown"],
        "rms_median": float | None,
        "share_reproduced": float | None,
        "overridden": list[str],
    },
)
_Device = TypedDict("_Device", {"names": list[str]}, total=False)
_Skipped = TypedDict("_Skipped", {"tensor": str, "reason": str}, total=False)
_RunB = TypedDict(
    "_RunB", {"name": str, "engine": str, "num_tokens": int, "num_matched": int, "notes": list[str]}
)
_Refusal = TypedDict("_Refusal", {"code": str, "message": str, "hint": str})
_Unsaid = TypedDict("_Unsaid", {"key": str, "assumed": str, "others": str})
_Gating = TypedDict("_Gating", {"unsaid": list[_Unsaid]})
_Beyond = TypedDict("_Beyond", {"router": str, "text": str, "is_legal": bool, "beyond_dtype": str})
_Ranges = TypedDict("_Ranges", {"beyond": list[_Beyond]})
_Dense = TypedDict("_Dense", {"router": str, "key": str, "value": str})
_Plain = TypedDict(
    "_Plain", {"router": str, "module": str, "is_covered": bool, "is_unknown": NotRequired[bool]}
)
_Packed = TypedDict("_Packed", {"router": str, "module": str, "scheme": str, "is_left_out": bool})
_Quantisation = TypedDict(
    "_Quantisation",
    {
        "method": str,
        "key": str,
        "by_path": NotRequired[bool],
        "plain": list[_Plain],
        "packed": NotRequired[list[_Packed]],
    },
)
_Drawn = TypedDict(
    "_Drawn", {"router": str, "num_rows": int, "rows": list[int], "law": NotRequired[str]}
)
_Moments = TypedDict(
    "_Moments",
    {
        "router": str,
        "num_weights": int,
        "mean": float,
        "std": float,
        "kurtosis": float,
        "law": NotRequired[str | None],
    },
)
_Initialised = TypedDict(
    "_Initialised",
    {
        "initializer_range": NotRequired[Annotated[float, Meta(gt=0.0)]],
        "routers": list[_Moments],
        "groups": NotRequired[list[_Drawn]],
    },
)
_Size = TypedDict("_Size", {"scale": float, "is_relative": NotRequired[bool]})
_OfRecordings = TypedDict(
    "_OfRecordings",
    {
        "relative": float | None,
        "kappa": float | None,
        "systematic_share": float | None,
        "num_non_finite": NotRequired[int | None],
    },
)


class _Noise(dict[str, Any]):
    """What disturbs the inputs: of a size that was given, or what two recordings show by router."""

    @classmethod
    def parsed(cls, value: Any) -> _Noise:
        is_given = isinstance(value, dict) and "scale" in value
        return cls(record_of(_Size if is_given else dict[str, _OfRecordings], value))


class _CheckpointB(TypedDict):
    name: str
    rule: str
    has_same_rule: bool
    num_compared: int
    equal: list[str]
    regained: list[str]
    unknown_gain: list[str]


class _WhatIf(TypedDict, total=False):
    """A what-if at one router: what it reached, or why it was not tried."""

    refused: str
    figures: dict[str, float]
    notes: list[str]
    is_causal: bool
    is_token_local: bool
    has_fixed_size: bool
    num_sampled: int
    top_k: int | None
    reasons: dict[str, str]


class _Part(TypedDict, total=False):
    reasons: dict[str, str]
    what_ifs: dict[str, _WhatIf]
    num_non_finite: int
    recorded_effects: list[str]


class _Checkpoint(TypedDict):
    name: str
    family: str
    rule: str
    rule_origin: NotRequired[str]
    revision: NotRequired[str]
    fingerprint: str
    bytes_read: int
    bytes_total: int
    seconds: float
    num_routers: int
    num_expected: int | None
    notes: list[str]
    layer_notes: NotRequired[list[str]]
    skipped: list[_Skipped]


class _Flaw(TypedDict):
    """Something of the blocks behind routers that is not as it should be."""

    kind: Literal["missing", "surplus", "none", "lost", "alone", "differ"]
    routers: list[str]
    module: str
    experts: str
    count: int
    num_experts: int


_Modules = TypedDict("_Modules", {"routers": list[str], "modules": dict[str, str]})
_Blocks = TypedDict("_Blocks", {"has_experts": bool, "parts": list[_Modules], "flaws": list[_Flaw]})


class _Router(TypedDict):
    name: RouterName
    num_experts: int
    hidden_size: int
    top_k: int
    is_affine: bool
    is_linear: NotRequired[bool]
    pick: NotRequired[Literal["top_k", "threshold"]]
    selection_score_unit: NotRequired[str]
    stored_dtype: str
    bias_tensor: NotRequired[str]
    bias_dtype: NotRequired[str]
    score: str
    rule: NotRequired[str]
    weights_from: NotRequired[str]
    is_weight_one: NotRequired[bool]
    parts: NotRequired[dict[str, str]]
    has_logit_bias: bool
    has_selection_bias: bool
    num_groups: Annotated[int, Meta(ge=1)]
    num_kept_groups: NotRequired[int]
    group_fill: NotRequired[str | None]
    tensors: NotRequired[list[str]]
    file: NotRequired[str]
    num_non_finite_rows: NotRequired[int]


_Oddity = TypedDict("_Oddity", {"word": str, "text": str, "hint": str})


class _Tokens(TypedDict):
    name: str
    stage: str
    num_tokens: int
    routers: list[str]
    domains: NotRequired[list[str]]
    has_documents: NotRequired[bool]
    has_chosen: bool
    engine: NotRequired[str]
    fingerprint: NotRequired[str]
    num_documents: int | None
    size_bytes: int
    outputs: NotRequired[list[str]]
    notes: NotRequired[list[str]]
    oddities: NotRequired[list[_Oddity]]


class _Run(TypedDict, total=False):
    moegeom: str
    python: str
    seed: int
    seconds: Required[float]
    layers_requested: str | None
    exclude_first: int
    num_first: int
    reference: str | None
    next_command: str
    checks_not_judged: list[str]
    checks_inconclusive: list[str]
    column_versions: dict[str, str]
    libraries: dict[str, str]
    arithmetic: dict[str, str | int | None]
    checkpoint: Required[_Checkpoint]
    routers: Required[list[_Router]]
    tokens: Required[_Tokens | None]
    trust: Required[_Trust | None]
    parts: Required[dict[str, _Part]]
    noise: _Noise
    run_b: _RunB | None
    checkpoint_b: _CheckpointB | None
    device: _Device | None
    refused: _Refusal
    token_tables: list[TokenTable]
    initialised: _Initialised
    gating: _Gating
    ranges: _Ranges
    dense_elsewhere: list[_Dense]
    blocks: _Blocks
    quantisation: _Quantisation


#: What is empty where there is nothing to say.
_MAY_BE_EMPTY = frozenset(["initialised", "quantisation"])


def is_verified_here(run: Mapping[str, Any]) -> bool:
    """True when the choices recorded with the tokens of these results follow from the rule."""
    trust = run.get("trust") or {}
    share = trust.get("share_reproduced")
    return share is not None and share >= LEAST_SHARE and not trust.get("overridden")


def num_non_finite(run: Mapping[str, Any]) -> int:
    """Tokens that a scan left out as not finite, at the router with most of them."""
    return max((part.get("num_non_finite", 0) for part in run.get("parts", {}).values()), default=0)


def fault(run: Mapping[str, Any]) -> str:
    """What is wrong with the facts of a run, with its place; empty when nothing is."""
    facts = {key: value for key, value in run.items() if value != {} or key not in _MAY_BE_EMPTY}
    try:
        record_of(_Run, facts)
    except DocumentError as error:
        return str(error)
    for number, router in enumerate(run["routers"]):
        groups, fill = router["num_groups"], router.get("group_fill")
        if router["num_experts"] % groups:
            return f"routers[{number}].num_groups is {groups} for {router['num_experts']} experts"
        try:
            float("-inf" if fill is None else fill)
        except ValueError:
            return f"routers[{number}].group_fill is {quoted(fill, 40)}, expected a number"
    return ""
