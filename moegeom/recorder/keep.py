"""What to keep of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moegeom.core.errors import UsageError
from moegeom.core.router import Router
from moegeom.core.tokens import Stage, best_stage, bytes_per_token, common_stage, enough_logits

#: What people write for outputs of experts, which are kept beside what routers read, and the kinds.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "outputs": ("shared_output", "routed_output"),
    "outputs:every-expert": ("shared_output", "routed_output", "expert_output"),
}

#: What people write for sums over heads of attention, alone or before ":LAYERS".
ATTENTION = "attention"

#: What people write, and the stage of a recording that holds it.
STAGES: dict[str, Stage] = {
    "hidden": "router_input",
    "logits": "logits",
    "top-logits": "top_logits",
    "ids": "ids",
}


@dataclass(frozen=True)
class Keep:
    """The stage of the recording; ``num_logits`` counts for ``top_logits``.

    ``outputs`` are the kinds of outputs of experts that are kept beside.
    """

    stage: Stage
    num_logits: int = 0
    outputs: tuple[str, ...] = ()

    def bytes_per_token(self, router: Router, float_bytes: int) -> int:
        """Bytes of a token at a router; ``float_bytes`` is the size of a number of its input."""
        beside = sum(router.num_experts if kind == "expert_output" else 1 for kind in self.outputs)
        return beside * router.hidden_size * float_bytes + bytes_per_token(
            self.stage,
            router.num_experts,
            router.rule.top_k,
            router.hidden_size,
            self.num_logits,
            float_bytes,
        )


def parse_keep(text: str | None, routers: Sequence[Router]) -> Keep:
    """What ``text`` asks for; without text the largest logits, where they decide everything.

    Raises
    ------
    UsageError
        For another word, for fewer logits than the chosen experts and one, or where the largest
        logits do not decide.
    """
    if text is None:
        return _default(routers)
    if text in OUTPUTS:
        return Keep("router_input", outputs=OUTPUTS[text])
    word, _, count = text.partition(":")
    if word == ATTENTION:
        raise UsageError(
            f"keep {text!r}: attention is added up beside no router.",
            "AttentionRecorder, or moegeom capture CKPT --keep attention.",
        )
    if word not in STAGES or (count and word != "top-logits"):
        raise UsageError(
            f"keep {text!r}: expected hidden, logits, top-logits, top-logits:M, ids, outputs, "
            "outputs:every-expert or attention."
        )
    if word != "top-logits":
        return Keep(STAGES[word])
    if count and not (count.isascii() and count.isdigit()):
        raise UsageError(f"keep {text!r}: expected a number of logits, such as top-logits:24.")
    for router in routers:
        if not router.rule.is_affine or router.rule.has_selection_bias:
            raise UsageError(
                f"keep {text!r}: router {router.name} adds a bias to its {router.rule.score} "
                "scores or masks groups, so that the largest logits do not decide.",
                "Keep logits, or hidden.",
            )
    num_logits = int(count) if count else _enough(routers)
    least = max(router.rule.top_k for router in routers) + 1
    if num_logits < least:
        raise UsageError(
            f"keep {text!r}: {least} logits at least are needed, the chosen ones and the next."
        )
    return _capped(num_logits, routers)


def _default(routers: Sequence[Router]) -> Keep:
    stages: set[Stage] = {
        best_stage(
            router.rule.is_affine,
            router.rule.has_selection_bias,
            router.num_experts,
            router.rule.top_k,
        )
        for router in routers
    }
    if common_stage(stages) == "logits":
        return Keep("logits")
    return _capped(_enough(routers), routers)


def _enough(routers: Sequence[Router]) -> int:
    return max(enough_logits(router.rule.top_k) for router in routers)


def _capped(num_logits: int, routers: Sequence[Router]) -> Keep:
    if num_logits >= min(router.num_experts for router in routers):
        return Keep("logits")
    return Keep("top_logits", num_logits)
