"""Which bias would balance each router: the record and its closed list of meanings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moegeom.core.option import option
from moegeom.core.tokens import SampleCounts
from moegeom.engine.request import StudyRequest


@dataclass(frozen=True)
class BalanceRequest(StudyRequest):
    """What was asked for; ``out`` is a file for the biases."""

    out: Path | None = option("Write the biases: FILE.npz or FILE.safetensors.")


Meaning = Literal[
    "none",
    "none found",
    "documents",
    "partly",
    "few",
    "unknown",
    "holds",
    "holds, no bias now",
    "balanced",
]

#: What a router's figures mean, in the order in which the screen tells it: worst first.
SENTENCES: Mapping[Meaning, str] = {
    "none": "no bias balances these tokens: too many of them are ties that no bias can divide.",
    "none found": "no bias was found that balances these tokens; one may exist, because a mask of "
    "groups leaves no guarantee.",
    "documents": "it balances these documents only: the imbalance is between domains or documents.",
    "partly": "a bias exists and removes a part of the imbalance on other documents; the rest is "
    "between domains or documents.",
    "few": "a bias exists; too few documents to say whether it holds on others.",
    "unknown": "too few documents to tell these loads from even ones.",
    "holds": "a bias exists and holds on other documents: look at its update before the router.",
    "holds, no bias now": "a bias exists and holds on other documents: look at what balances the "
    "loads in training before the router (it has no selection bias now).",
    "balanced": "already balanced within what chance shows.",
}

#: Added where no guarantee is given.
NO_GUARANTEE = "groups: found by updates of the bias, no guarantee of optimality"


@dataclass(frozen=True)
class Loads:
    """How even the loads are: MaxVio and CV (ddof 0), over all tokens in question."""

    max_vio: float
    cv: float


@dataclass(frozen=True)
class HeldOut:
    """The tokens of one half of the documents with the bias that was made on the other half.

    ``limit`` is the MaxVio that even routing stays below on such documents, at the level of the
    whole run; it holds the chance of both halves. The floors are those of as many independent
    tokens (docs/theory.md D3), without that of the half that the bias was made on. ``reduction`` is
    by how much the squared CV of the expected load fell, ``reduction_p`` the probability of that by
    chance.
    """

    num_tokens: int
    num_units: int
    before: Loads
    after: Loads
    limit: float
    cv_floor: float
    max_vio_floor: float
    reduction: float | None
    reduction_p: float

    @property
    def is_within(self) -> bool:
        return self.after.max_vio <= self.limit


@dataclass(frozen=True)
class RouterBalance:
    """What balancing one router would take, and what it would achieve.

    ``change`` is added to the selection bias that the router has, expert by expert, mean 0, in
    ``score_unit``; ``spread`` the standard deviation of the selection scores across experts.
    ``displaced_weight`` is the share of the routing weight that lies on experts no longer chosen,
    mean over tokens. ``limit`` and the floors are those of all tokens as they are routed now,
    ``limit_after`` the limit with the bias. ``duplicates`` are experts that no bias tells apart,
    with the reason. ``gap`` and ``num_tied`` are missing for a rule with groups. ``pull`` is that
    of the mean input on the selection scores.
    """

    router: str
    num_experts: int
    top_k: int
    num_tokens: int
    num_units: int
    score_unit: str
    is_grouped: bool
    has_selection_bias: bool
    before: Loads
    after: Loads
    max_vio_float32: float
    limit: float
    limit_after: float
    cv_floor: float
    max_vio_floor: float
    held_out: tuple[HeldOut, ...]
    change: tuple[float, ...]
    spread: float
    changed_share: float
    displaced_weight: float
    num_tied: int | None
    gap: float | None
    duplicates: tuple[tuple[tuple[int, ...], str], ...]
    pull: float
    meaning: Meaning

    @property
    def largest_change(self) -> float:
        return max(map(abs, self.change))

    @property
    def worst(self) -> HeldOut | None:
        """The half on which the bias of the other half does worse."""
        return max(self.held_out, key=lambda half: half.after.max_vio, default=None)

    def pushes(self, most: int = 2) -> list[tuple[int, float]]:
        """The experts that are pushed up most, then those that are pushed down most."""
        order = sorted(range(self.num_experts), key=lambda e: self.change[e])
        up = [e for e in reversed(order[-most:]) if self.change[e] > 0.0]
        down = [e for e in order[:most] if self.change[e] < 0.0]
        return [(expert, self.change[expert]) for expert in (*up, *down)]


@dataclass(frozen=True)
class Balance:
    """Every router that could be looked at, and the facts of the run as in ``run.json``.

    ``unit`` is what the documents are: "document", or "run of 256 tokens" where none are recorded.
    ``left_out`` are routers with the reason. ``level`` is the level of each router: 5 % for all of
    them together.
    """

    run: Mapping[str, Any]
    routers: tuple[RouterBalance, ...]
    left_out: tuple[tuple[str, str], ...]
    num_tokens: int
    unit: str
    level: float
    sample: SampleCounts
    seed: int
    written: str | None = None
