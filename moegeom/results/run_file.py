"""What ``run.json`` holds, so that one that nobody vouches for is refused and not half believed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moegeom.core.router import ROUTER_NAME
from moegeom.core.text import quoted

_TEXT, _TRUTH, _COUNT, _NUMBER, _NONE = (str,), (bool,), (int,), (int, float), (type(None),)

#: Share of the first recorded choices that must follow from a rule to verify it.
LEAST_SHARE = 0.99

#: What disturbs the inputs: a number that was given, or what two recordings show.
_INPUT_NOISE = {
    "scale": _NUMBER,
    "is_relative": _TRUTH,
    "relative": (*_NUMBER, *_NONE),
    "kappa": (*_NUMBER, *_NONE),
    "systematic_share": (*_NUMBER, *_NONE),
    "num_non_finite": (*_COUNT, *_NONE),
}

#: A what-if at one router: what it reached, or why it was not tried.
_WHAT_IF = {
    "refused": _TEXT,
    "figures": {"*": _NUMBER},
    "notes": [_TEXT],
    "is_causal": _TRUTH,
    "is_token_local": _TRUTH,
    "has_fixed_size": _TRUTH,
    "num_sampled": _COUNT,
    "top_k": (*_COUNT, *_NONE),
    "reasons": {"*": _TEXT},
}

#: What is at each place: types, or a list or mapping of something. A place that is absent is one of
#: an older version, unless it is among those that every version has written. A mapping with the
#: key "*" has keys of any name.
_RUN: Mapping[str, Any] = {
    "moegeom": _TEXT,
    "python": _TEXT,
    "seed": _COUNT,
    "seconds": _NUMBER,
    "layers_requested": (*_TEXT, *_NONE),
    "exclude_first": _COUNT,
    "num_first": _COUNT,
    "reference": (*_TEXT, *_NONE),
    "next_command": _TEXT,
    "checks_not_judged": [_TEXT],
    "checks_inconclusive": [_TEXT],
    "column_versions": {"*": _TEXT},
    "libraries": {"*": _TEXT},
    "arithmetic": {"*": (*_TEXT, *_COUNT, *_NONE)},
    "checkpoint": {
        "name": _TEXT,
        "family": _TEXT,
        "rule": _TEXT,
        "rule_origin": _TEXT,
        "revision": _TEXT,
        "fingerprint": _TEXT,
        "bytes_read": _COUNT,
        "bytes_total": _COUNT,
        "seconds": _NUMBER,
        "num_routers": _COUNT,
        "num_expected": (*_COUNT, *_NONE),
        "notes": [_TEXT],
        "layer_notes": [_TEXT],
        "skipped": [{"tensor": _TEXT, "reason": _TEXT}],
    },
    "routers": [
        {
            "name": ROUTER_NAME,
            "num_experts": _COUNT,
            "hidden_size": _COUNT,
            "top_k": _COUNT,
            "is_affine": _TRUTH,
            "is_linear": _TRUTH,
            "pick": frozenset(["top_k", "threshold"]),
            "selection_score_unit": _TEXT,
            "stored_dtype": _TEXT,
            "bias_tensor": _TEXT,
            "bias_dtype": _TEXT,
            "score": _TEXT,
            "rule": _TEXT,
            "weights_from": _TEXT,
            "has_logit_bias": _TRUTH,
            "has_selection_bias": _TRUTH,
            "num_groups": _COUNT,
            "num_kept_groups": _COUNT,
            "group_fill": (*_TEXT, *_NONE),
            "tensors": [_TEXT],
            "file": _TEXT,
            "num_non_finite_rows": _COUNT,
        }
    ],
    "tokens": {
        "name": _TEXT,
        "stage": _TEXT,
        "num_tokens": _COUNT,
        "routers": [_TEXT],
        "domains": [_TEXT],
        "has_documents": _TRUTH,
        "has_chosen": _TRUTH,
        "engine": _TEXT,
        "fingerprint": _TEXT,
        "num_documents": (*_COUNT, *_NONE),
        "size_bytes": _COUNT,
        "is_synthetic": _TRUTH,
        "outputs": [_TEXT],
        "notes": [_TEXT],
    },
    "trust": {
        "fingerprint": frozenset(["matches", "differs", "unknown"]),
        "rms_median": (*_NUMBER, *_NONE),
        "share_reproduced": (*_NUMBER, *_NONE),
        "overridden": [_TEXT],
    },
    "parts": {
        "*": {"reasons": {"*": _TEXT}, "what_ifs": {"*": _WHAT_IF}, "num_non_finite": _COUNT}
    },
    "noise": {**_INPUT_NOISE, "*": _INPUT_NOISE},  # of all routers, or of each that is named
    "run_b": {
        "name": _TEXT,
        "engine": _TEXT,
        "num_tokens": _COUNT,
        "num_matched": _COUNT,
        "notes": [_TEXT],
    },
    "checkpoint_b": {
        "name": _TEXT,
        "rule": _TEXT,
        "has_same_rule": _TRUTH,
        "num_compared": _COUNT,
        "equal": [_TEXT],
        "regained": [_TEXT],
        "unknown_gain": [_TEXT],
    },
    "device": {"names": [_TEXT]},
    "refused": {"code": _TEXT, "message": _TEXT, "hint": _TEXT},
    "token_tables": [
        {
            "router": _TEXT,
            "tensor": _TEXT,
            "dtype": _TEXT,
            "num_tokens": _COUNT,
            "top_k": _COUNT,
            "num_experts": _COUNT,
            "largest": _NUMBER,
            "num_outside": _COUNT,
            "num_repeated": _COUNT,
            "num_used": _COUNT,
            "num_large": _COUNT,
            "num_large_odd": _COUNT,
            "reason": _TEXT,
        }
    ],
    "initialised": {
        "initializer_range": _NUMBER,
        "routers": [
            {
                "router": _TEXT,
                "num_weights": _COUNT,
                "mean": _NUMBER,
                "std": _NUMBER,
                "kurtosis": _NUMBER,
            }
        ],
        "groups": [{"router": _TEXT, "num_rows": _COUNT, "rows": [_COUNT]}],
    },
    "gating": {"unsaid": [{"key": _TEXT, "assumed": _TEXT, "others": _TEXT}]},
    "ranges": {
        "beyond": [
            {"router": _TEXT, "text": _TEXT, "is_legal": _TRUTH, "beyond_dtype": _TEXT},
        ],
    },
    "dense_elsewhere": [{"router": _TEXT, "key": _TEXT, "value": _TEXT}],
    "quantisation": {
        "method": _TEXT,
        "key": _TEXT,
        "packed": [{"router": _TEXT, "module": _TEXT, "scheme": _TEXT, "is_left_out": _TRUTH}],
        "plain": [{"router": _TEXT, "module": _TEXT, "is_covered": _TRUTH, "is_unknown": _TRUTH}],
    },
}


def is_verified_here(run: Mapping[str, Any]) -> bool:
    """True when the choices recorded with the tokens of these results follow from the rule."""
    trust = run.get("trust") or {}
    share = trust.get("share_reproduced")
    return share is not None and share >= LEAST_SHARE and not trust.get("overridden")


def num_non_finite(run: Mapping[str, Any]) -> int:
    """Tokens that a scan left out as not finite, at the router with most of them."""
    return max((part.get("num_non_finite", 0) for part in run.get("parts", {}).values()), default=0)


#: Mappings that are missing where there is nothing to say.
_MAY_BE_NULL = frozenset(["tokens", "trust", "run_b", "checkpoint_b", "device"])

#: Mappings that are empty there.
_MAY_BE_EMPTY = frozenset(["initialised", "quantisation"])

#: What is in them wherever they are, and readers rely on.
_NEEDED: Mapping[str, str] = {
    "": "seconds checkpoint routers tokens trust parts",
    "checkpoint": "name family rule fingerprint bytes_read bytes_total seconds num_routers "
    "num_expected notes skipped",
    "routers[]": "name num_experts hidden_size top_k is_affine stored_dtype score has_logit_bias "
    "has_selection_bias num_groups",
    "tokens": "name stage num_tokens routers num_documents size_bytes is_synthetic has_chosen",
    "trust": "fingerprint rms_median share_reproduced overridden",
    "noise.*": "relative kappa systematic_share",
    "run_b": "name engine num_tokens num_matched notes",
    "checkpoint_b": "name rule has_same_rule num_compared equal regained unknown_gain",
    "refused": "code message hint",
    "token_tables[]": "router tensor dtype",
    "initialised": "initializer_range routers",
    "initialised.routers[]": "router num_weights mean std kurtosis",
    "initialised.groups[]": "router num_rows rows",
    "gating": "unsaid",
    "gating.unsaid[]": "key assumed others",
    "ranges": "beyond",
    "ranges.beyond[]": "router text is_legal beyond_dtype",
    "dense_elsewhere[]": "router key value",
    "quantisation": "method key plain",
    "quantisation.plain[]": "router module is_covered",
    "quantisation.packed[]": "router module scheme is_left_out",
}


def fault(run: Mapping[str, Any]) -> str:
    """What is wrong with the facts of a run, with its place; empty when nothing is."""
    wrong = _fault(run, _RUN, "", "")
    if not wrong and run.get("initialised") and not run["initialised"]["initializer_range"] > 0:
        return "'initialised.initializer_range' is not above 0"
    return wrong or _fault_of_groups(run)


def _fault_of_groups(run: Mapping[str, Any]) -> str:
    """Groups of experts that cannot be, or a fill that is no number."""
    for facts in run["routers"]:
        groups, fill = facts["num_groups"], facts.get("group_fill")
        if groups < 1 or facts["num_experts"] % groups:
            return f"'routers[].num_groups' is {groups} for {facts['num_experts']} experts"
        try:
            float("-inf" if fill is None else fill)
        except ValueError:
            return f"'routers[].group_fill' is {fill!r:.40}, expected a number"
    return ""


def _fault(found: Any, expected: Any, place: str, kind: str) -> str:
    """``kind`` is the place with stars for names: what ``_NEEDED`` and others speak of."""
    if isinstance(expected, frozenset):
        is_known = isinstance(found, str) and found in expected
        words = " or ".join(sorted(expected))
        return "" if is_known else f"{quoted(place)} is {_kind(found)}, expected {words}"
    if isinstance(expected, re.Pattern):
        is_name = isinstance(found, str) and expected.fullmatch(found)
        return "" if is_name else f"{quoted(place)} is {_kind(found)}, expected a router's name"
    if isinstance(expected, tuple):
        is_right = type(found) in expected
        return "" if is_right else f"{quoted(place)} is {_kind(found)}, expected {_words(expected)}"
    if (found is None and kind in _MAY_BE_NULL) or (found == {} and kind in _MAY_BE_EMPTY):
        return ""
    if isinstance(expected, list):
        if not isinstance(found, list):
            return f"{quoted(place)} is {_kind(found)}, expected a list"
        each = (_fault(item, expected[0], f"{place}[]", f"{kind}[]") for item in found)
        return next((wrong for wrong in each if wrong), "")
    if not isinstance(found, Mapping):
        return f"{quoted(place)} is {_kind(found)}, expected an object"
    for key in _NEEDED.get(kind, "").split():
        if key not in found:
            return f"{quoted(f'{place}.{key}'.lstrip('.'))} is missing"
    return _fault_within(found, expected, place, kind)


def _fault_within(found: Mapping[str, Any], expected: Any, place: str, kind: str) -> str:
    for key, value in found.items():
        star = key if key in expected else "*"
        if star in expected:
            at, below = f"{place}.{key}".lstrip("."), f"{kind}.{star}".lstrip(".")
            wrong = _fault(value, expected[star], at, below)
            if wrong:
                return wrong
    return ""


def _kind(found: Any) -> str:
    return {dict: "an object", list: "a list", type(None): "null"}.get(
        type(found), f"{str(found)!r:.40}"
    )


def _words(types: tuple[type, ...]) -> str:
    names = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
    return " or ".join(dict.fromkeys(names.get(kind, "null") for kind in types))
