"""How the routers of a checkpoint choose, in one sentence that is true of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


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
