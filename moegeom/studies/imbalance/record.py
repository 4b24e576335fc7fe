"""The cause of an imbalance and the price of evening it: the records and their closed lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moegeom.checks.measured import MeanPull
from moegeom.core.option import option
from moegeom.core.tokens import SampleCounts
from moegeom.engine.request import StudyRequest
from moegeom.geometry.balancing import Centring, HeldOut, Loads
from moegeom.geometry.reference_laws import Attribution, ChoiceFigures, LawFigures, Parted


@dataclass(frozen=True)
class ImbalanceRequest(StudyRequest):
    """The options of ``imbalance``, each with what it means."""

    out: Path | None = option(
        "Write the laws, FILE.parquet, or the biases that even the loads and those that take the "
        "mean away, FILE.npz or FILE.safetensors."
    )


Cause = Literal["mean input", "covariance", "rows", "rest", "unknown", "few", "even"]

#: What makes the loads of routers uneven, in the order in which the screen lists it, of the ranges
#: of MaxVio, of its largest part, and of ``units``: documents, or runs of tokens.
CAUSES: Mapping[Cause, str] = {
    "mean input": "the mean input adds most to MaxVio {whole}: without it {left}",
    "covariance": "the directions in which tokens differ add most to MaxVio {whole}: {part}",
    "rows": "rows and biases alone make MaxVio {part}, whatever directions inputs have ({whole} on "
    "these tokens)",
    "rest": "how tokens cluster adds most to MaxVio {whole}: {part}",
    "unknown": "MaxVio {whole} is more than chance; its cause needs recorded router inputs",
    "few": "not judged: with so few tokens or {units} chance alone may double a fair share",
    "even": "loads are even within chance",
}

Meaning = Literal[
    "none",
    "none found",
    "documents",
    "partly",
    "few",
    "holds",
    "holds, no bias now",
    "unknown",
    "balanced",
]

#: Whether a bias evens the loads, and the ``share`` of the tokens whose expert sets that changes,
#: worst first. Nothing where there is nothing to even, or nothing was judged.
MEANINGS: Mapping[Meaning, str] = {
    "none": "No bias evens these tokens: too many are ties that no bias can divide.",
    "none found": "No bias was found that evens these tokens; with groups one may exist.",
    "documents": "A bias evens these {units} only, and reroutes {share} of the tokens: loads "
    "differ between domains or {units}.",
    "partly": "A bias evens other {units} in part, and reroutes {share} of the tokens: the rest is "
    "between domains or {units}.",
    "few": "A bias evens these tokens, but reroutes {share} of them; too few {units} to say "
    "whether it holds on others.",
    "holds": "A bias evens the load, on other {units} too, but reroutes {share} of the tokens: "
    "look at its update before the router.",
    "holds, no bias now": "A bias would even the load, on other {units} too, but reroutes {share} "
    "of the tokens: look first at what balances the load in training.",
    "unknown": "",
    "balanced": "",
}


#: Causes that are a part of MaxVio, and which part.
PARTS: Mapping[Cause, str] = {
    "mean input": "mean",
    "covariance": "covariance",
    "rows": "rows",
    "rest": "rest",
}


@dataclass(frozen=True)
class Evening:
    """What evening one router by a bias would take, and what it would achieve and cost.

    ``change`` is added to the selection bias that the router has, expert by expert, mean 0, in
    ``score_unit``; ``spread`` the standard deviation of the selection scores across experts.
    ``changed_share`` is the share of tokens whose expert set changes, ``displaced_weight`` that of
    the routing weight on experts no longer chosen, ``score_lost`` by how much the selection scores
    of the chosen experts fall, in spreads; means over tokens. ``limit_after`` is the MaxVio that
    even routing stays below, with the bias. ``duplicates`` are experts that no bias tells apart,
    with the reason. ``gap`` and ``num_tied`` are missing for a rule with groups.
    """

    score_unit: str
    is_grouped: bool
    has_selection_bias: bool
    after: Loads
    max_vio_float32: float
    limit_after: float
    held_out: tuple[HeldOut, ...]
    change: tuple[float, ...]
    spread: float
    changed_share: float
    displaced_weight: float
    score_lost: float
    num_tied: int | None
    gap: float | None
    duplicates: tuple[tuple[tuple[int, ...], str], ...]
    meaning: Meaning

    @property
    def largest_change(self) -> float:
        return max(map(abs, self.change))

    @property
    def largest_in_spreads(self) -> float:
        """The largest change in spreads of the scores; nan where these do not differ."""
        return self.largest_change / self.spread if self.spread else math.nan

    @property
    def worst(self) -> HeldOut | None:
        """The half on which the bias of the other half does worse."""
        return max(self.held_out, key=lambda half: half.after.max_vio, default=None)

    def pushes(self, most: int = 2) -> list[tuple[int, float]]:
        """The experts that are pushed up most, then those that are pushed down most."""
        order = sorted(range(len(self.change)), key=lambda e: self.change[e])
        up = [e for e in reversed(order[-most:]) if self.change[e] > 0.0]
        down = [e for e in order[:most] if self.change[e] < 0.0]
        return [(expert, self.change[expert]) for expert in (*up, *down)]


@dataclass(frozen=True)
class RouterImbalance:
    """One router: ``laws`` end with the tokens; ``parts`` by figure, empty where a law is missing.

    ``limit`` is the MaxVio that even routing stays below on such documents, of which there are
    ``num_units``; the floors are those of as many independent tokens. ``pull`` is that of the mean
    input on what is compared, ``pull_random`` and its deviation those of rows in random directions;
    None without inputs.
    """

    router: str
    num_experts: int
    top_k: int
    num_tokens: int
    num_units: int
    limit: float
    cv_floor: float
    max_vio_floor: float
    pull: float
    pull_random: float | None
    pull_random_sd: float | None
    laws: tuple[LawFigures, ...]
    parts: Mapping[Parted, Attribution]
    cause: Cause
    centring: Centring
    evening: Evening

    @property
    def tokens(self) -> ChoiceFigures:
        return self.laws[-1].figures

    @property
    def token_law(self) -> LawFigures:
        return self.laws[-1]

    @property
    def is_pulled(self) -> bool:
        """Whether the mean input pulls more than it would rows of random directions, which a mean
        that tokens have in common makes uneven too: not whether it is the cause.
        """
        if self.pull_random is None or self.pull_random_sd is None:
            return False
        return MeanPull(self.pull, self.pull_random, self.pull_random_sd).is_above(0.0)


@dataclass(frozen=True)
class Imbalance:
    """Every router that could be looked at, and the facts of the run as in ``run.json``.

    ``left_out`` are routers with the reason; ``seeds`` is the number of draws of each law. ``unit``
    is what the documents are: "document", or "run of 256 tokens" where none are recorded.
    ``level`` is the level of each router: 5 % for all of them together.
    """

    run: Mapping[str, Any]
    routers: tuple[RouterImbalance, ...]
    left_out: tuple[tuple[str, str], ...]
    seeds: int
    unit: str
    level: float
    sample: SampleCounts
    seed: int
    written: str | None = None
