"""The closed list of causes that an operator may name."""

from __future__ import annotations

from typing import Literal

Cause = Literal[
    "weights rounded",
    "inputs rounded",
    "logits rounded",
    "bias rounded",
    "bias missing",
    "bias stale",
    "bias differs",
    "router stale",
    "rows of another layer",
    "rows damaged",
    "inputs differ",
    "gain not folded",
    "rule differs",
    "ties broken by number",
    "experts renamed",
    "tokens shifted",
    "layers shifted",
    "padding counted",
    "rows repeated",
    "capacity",
    "unrelated",
]
