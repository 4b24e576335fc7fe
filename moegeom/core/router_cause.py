"""What about a router can make two runs of one text choose differently."""

from __future__ import annotations

from typing import Literal

RouterCause = Literal[
    "weights rounded",
    "inputs rounded",
    "logits rounded",
    "bias rounded",
    "bias missing",
    "bias stale",
    "router stale",
    "gain not folded",
    "rule differs",
]
