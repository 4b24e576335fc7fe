"""The closed list of what can have happened to a router, and what each word means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moegeom.core.router import Rule
from moegeom.studies.diff.record import Change

Meaning = Callable[[Rule], str]


@dataclass(frozen=True)
class Word:
    """``phrase`` may hold ``{kind}`` (a qualifier) and ``{size}`` (a share, as a percentage).

    ``meaning`` is a sentence for routers of a rule: whether tokens choose other experts.
    """

    phrase: str
    meaning: Meaning

    def change(
        self,
        word: str,
        rule: Rule,
        kind: str,
        size: float | None,
        detail: str,
        evidence: Mapping[str, Any],
    ) -> Change:
        phrase = self.phrase.replace("{kind}", kind).strip()
        return Change(word, phrase, self.meaning(rule), size, detail, evidence)


def _always(sentence: str) -> Meaning:
    return lambda rule: sentence


def _scaled(rule: Rule) -> str:
    if rule.is_affine and not rule.has_logit_bias and not rule.has_selection_bias:
        return "a common factor changes no choice; routing weights change with it (temperature)."
    return "beside a bias, or with groups, a common factor changes choices."


def _shifted_logits(rule: Rule) -> str:
    """Every logit of a token moves by one number."""
    if rule.score == "softmax":
        return "every logit of a token moves by one number: neither choices nor weights change."
    if rule.is_affine:
        return "every logit of a token moves by one number: no choice changes."
    return f"every logit moves by one number, {rule.score} scores do not: choices can change."


def _shifted_bias(rule: Rule) -> str:
    groups = rule.groups
    if groups is not None and groups.fill != float("-inf"):
        return (
            f"dropped groups are filled with {groups.fill:g}, which a shifted score is compared "
            "with: choices can change."
        )
    masked = ", dropped groups are -inf" if groups is not None else ""
    return f"scores are compared with scores{masked}: a common shift changes no choice."


#: The closed list. A router to which none of this happened is identical.
WORDS: dict[str, Word] = {
    "rounded": Word(
        "{kind}",
        _always(
            "tokens within rounding of a boundary may flip; bf16_flip_share of a scan says how "
            "many."
        ),
    ),
    "gain folded": Word(
        "gain folded",
        _always(
            "the gain of the norm and the columns of the router changed inversely, W diag(g) is "
            "the same within rounding: no choice changes."
        ),
    ),
    "gain not compensated": Word(
        "gain changed, router not compensated by {size}",
        _always("the router reads other inputs than before: choices change."),
    ),
    "columns scaled": Word(
        "columns scaled by {size}, gain not compensated",
        _always("the effective router weighs its inputs differently: choices change."),
    ),
    "rotated": Word(
        "rotated",
        _always(
            "W diag(g)^2 W^T is the same: the same function if the hidden states were rotated "
            "alike, which only the Gram matrix can tell and this checkpoint alone cannot."
        ),
    ),
    "permuted": Word(
        "permuted {kind}",
        _always("the rows stand in another order; harmless where everything else moved along."),
    ),
    "experts left behind": Word(
        "experts left behind",
        _always("rows changed places and experts did not: tokens go to other experts."),
    ),
    "experts moved alone": Word(
        "experts moved alone",
        _always("experts changed places and rows did not: tokens go to other experts."),
    ),
    "scaled": Word("scaled {kind}", _scaled),
    "rows scaled": Word(
        "{kind}",
        _always("tokens that point their way choose these experts more, or less, than before."),
    ),
    "rows copied": Word(
        "{kind}",
        _always(
            "logits of equal rows are equal for every token: a copy is chosen where the other row "
            "is, and ties decide between them; what the row chose before is lost."
        ),
    ),
    "negated": Word("negated {kind}", _always("every preference is turned round.")),
    "common shift": Word("common shift of {size}", _shifted_logits),
    "noise": Word(
        "{kind} changed by {size}, no pattern",
        _always(
            "no factor, common vector or rotation explains it, as after training or quantisation: "
            "tokens near a boundary flip; how many only tokens can tell."
        ),
    ),
    "another layer": Word(
        "{kind}",
        _always("these routers are those of other layers of A: tokens go to other experts."),
    ),
    "unrelated": Word(
        "unrelated {kind}",
        _always("rows are no more alike than those of different experts: another router."),
    ),
    "selection bias shifted": Word("selection bias shifted", _shifted_bias),
    "logit bias shifted": Word("logit bias shifted", _shifted_logits),
    "bias changed": Word(
        "{kind} changed", _always("experts are preferred differently: choices can change.")
    ),
    "bias left behind": Word(
        "{kind} left behind",
        _always("rows changed places and their biases did not: choices change."),
    ),
    "not compared": Word("not compared: {kind}", _always("nothing is known about these routers.")),
}


def change(
    word: str,
    rule: Rule,
    *,
    kind: str = "",
    size: float | None = None,
    detail: str = "",
    **evidence: Any,
) -> Change:
    """A change in the words of the list, for routers of ``rule``; KeyError for another word."""
    return WORDS[word].change(word, rule, kind, size, detail, evidence)
