"""Whether the rule of some results is verified or assumed, for every header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from moegeom.results.run_file import is_verified_here

Status = Literal["verified", "assumed"]

#: Where the rules of a family come from that is none of the known ones: options described it.
_ORIGINS = {"described": "options"}


def rule_status(run: Mapping[str, Any]) -> Status | None:
    """``verified`` by the choices recorded with the tokens, or ``assumed``.

    None where no router could be read.
    """
    if "refused" in run:
        return None
    return "verified" if is_verified_here(run) else "assumed"


def assumed(origin: str = "config") -> str:
    """The sentence about a rule that no recorded choices have verified."""
    return f"assumed from {origin}"


def rule_trust(run: Mapping[str, Any]) -> str:
    """That recorded choices verified the rule, or what it was assumed from."""
    if is_verified_here(run):
        return "verified by recorded choices"
    checkpoint = run["checkpoint"]
    origin = checkpoint.get("rule_origin") or _ORIGINS.get(checkpoint.get("family", ""), "config")
    return assumed(origin)


def rule_facts(run: Mapping[str, Any]) -> dict[str, str | None]:
    """The same as plain data: ``rule_status``, and ``rule_trust`` in words."""
    status = rule_status(run)
    return {"rule_status": status, "rule_trust": rule_trust(run) if status else None}
