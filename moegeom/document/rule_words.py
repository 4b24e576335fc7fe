"""What headers say of a rule: how the routers choose, and whether that is verified or assumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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


def rule_brief(sentence: str, routers: Sequence[Mapping[str, Any]]) -> str:
    """``sentence``, that of the first router, where the others choose alike.

    Else what the routers choose and how many of them, the most frequent first:
    ``softmax, top 3 of 12 (2 of 3 routers), 2 of 12 (1)``. ``routers`` are those of
    ``run.json``.
    """
    kinds = Counter((_score(router), _choice(router)) for router in routers)
    if len(kinds) < 2:
        return sentence
    choices: dict[str, list[str]] = {}
    number = f" of {len(routers)} routers"
    for (score, choice), count in kinds.most_common():
        choices.setdefault(score, []).append(f"{choice} ({count}{number})")
        number = ""
    return "; ".join(f"{score}, top {', '.join(entries)}" for score, entries in choices.items())


def _score(router: Mapping[str, Any]) -> str:
    score = router.get("score", "")
    name = "logits" if score == "identity" else score.replace("_", "-")
    bias = " + selection bias" if router.get("has_selection_bias") else ""
    groups = ", groups" if router.get("num_groups", 1) > 1 else ""
    return name + bias + groups


def _choice(router: Mapping[str, Any]) -> str:
    number = "all above 0" if router.get("pick") == "threshold" else router["top_k"]
    return f"{number} of {router['num_experts']}"
