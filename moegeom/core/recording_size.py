"""How large a recording becomes, and what is enough of each token."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from moegeom.core.tokens import Stage

#: Logits kept beyond the chosen ones, and at least in all: the boundary distance of 99.9 % of the
#: tokens and more is then exact (docs/capture.md).
_BEYOND, _AT_LEAST = 16, 24


def expert_bytes(num_experts: int) -> int:
    """Bytes of the number of an expert."""
    return 1 if num_experts <= 256 else 2 if num_experts <= 32768 else 4


def enough_logits(top_k: int) -> int:
    """How many of the largest logits decide the boundary distance of nearly all tokens."""
    return max(_AT_LEAST, top_k + _BEYOND)


def best_stage(is_affine: bool, has_selection_bias: bool, num_experts: int, top_k: int) -> Stage:
    """The smallest stage from which load, margins and distances follow.

    The largest logits do not decide behind a bias on scores or a mask of groups, and where there
    are no more experts than logits to keep they are all of them.
    """
    decide = is_affine and not has_selection_bias and enough_logits(top_k) < num_experts
    return "top_logits" if decide else "logits"


def common_stage(stages: AbstractSet[Stage]) -> Stage:
    """The stage of a recording of several routers, from the best of each: it has only one."""
    return "logits" if "logits" in stages else "top_logits"


def bytes_per_token(
    stage: Stage,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    num_logits: int = 0,
    float_bytes: int = 4,
) -> int:
    """Bytes of one token at one router, its choice included.

    ``num_logits`` counts for stage ``top_logits``, ``float_bytes`` for hidden states.
    """
    expert = expert_bytes(num_experts)
    values: dict[Stage, int] = {
        "router_input": hidden_size * float_bytes,
        "pre_norm": hidden_size * float_bytes,
        "logits": 4 * num_experts,
        "top_logits": num_logits * (4 + expert),
        "ids": 0,
    }
    return values[stage] + top_k * expert
