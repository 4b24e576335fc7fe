"""How to go on without tokens: the command that records them, and how large that becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moegeom.core.tokens import Stage, best_stage, bytes_per_token, common_stage, enough_logits
from moegeom.document.header import size

#: Tokens that give usable errors for most layers.
_TOKENS = 16_384


def recording_hint(routers: Sequence[Mapping[str, Any]]) -> str:
    """What to type for these routers of ``run.json``; there is at least one."""
    stages: set[Stage] = {
        best_stage(r["is_affine"], r["has_selection_bias"], r["num_experts"], r["top_k"])
        for r in routers
    }
    stage = common_stage(stages)
    per_token = sum(
        bytes_per_token(
            stage, r["num_experts"], r["top_k"], r["hidden_size"], enough_logits(r["top_k"])
        )
        for r in routers
    )
    return (
        f"moegeom capture CKPT --text FILE --out REC ({size(_TOKENS * per_token)} and one forward "
        f"pass over {_TOKENS:,} tokens; from a loop of your own or an engine: docs/capture.md), "
        "then add --tokens REC."
    )
