"""How to go on without tokens: what to record, and how large it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moegeom.report.header import size

#: Tokens that give usable errors for most layers.
_TOKENS = 16_384


def recording_hint(routers: Sequence[Mapping[str, Any]]) -> str:
    """What to record for these routers of ``run.json``; there is at least one."""
    per_token = sum(4 * router["hidden_size"] for router in routers)
    return (
        f"record the inputs of these {len(routers)} routers "
        "(moegeom.tokens.writer.RecordingWriter, docs/recordings.md) and add --tokens: "
        f"{size(_TOKENS * per_token)} for {_TOKENS:,} tokens of "
        f"{routers[0]['hidden_size']} float32."
    )
