"""What each variant flips, over all layers of a results directory."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from moegeom.core.errors import ResultsError
from moegeom.core.option import argument, option
from moegeom.core.row_keys import ALL, is_random, under_random
from moegeom.core.tokens import InputNoise
from moegeom.document.study import mean_of
from moegeom.document.summary import Summary, summarise
from moegeom.engine.request import MeasureOptions, ScanRequest
from moegeom.results.reader import Results


@dataclass(frozen=True)
class BoundaryRequest(ScanRequest):
    """A scan request; no ``arithmetics`` means the usual ones."""

    ENDING: ClassVar[str] = "boundary"

    PYTHON_ONLY: ClassVar[tuple[str, ...]] = (
        *(*MeasureOptions.PYTHON_ONLY, "batch_tokens", "per_token", "what_ifs", "what_if_batch"),
    )

    checkpoint: str = argument(
        "Checkpoint, or results of an earlier boundary-report.", outside_plan="a path"
    )
    _: dataclasses.KW_ONLY
    noise: str | InputNoise | Mapping[str, InputNoise] | None = option(
        "Noise on the inputs: share of their rms, or a second recording."
    )
    yes: bool = option(
        "Read more than 2 GB of experts.", False, outside_plan="a consent, no request"
    )


Row = Mapping[str, Any]

#: Share of the tokens, those with the least margin, that ``flipped_near_share`` is about.
NEAR = 0.1


@dataclass(frozen=True)
class VariantFlips:
    """One variant: ``rows`` of its routers in checkpoint order; ``facts`` says what it copies.

    ``swaps`` are the pairs that exchange most tokens, over all routers, and ``random`` the same
    variant of random routers of the same shape.
    """

    name: str
    facts: Row
    rows: Sequence[Row]
    swaps: Sequence[Row] = ()
    random: VariantFlips | None = None

    def mean(self, column: str) -> float | None:
        """Mean over routers; None where no router has a value."""
        return mean_of(self.rows, column)

    @property
    def flipped(self) -> float:
        """Mean share of the choices that flip; 0 where no router has one."""
        return self.mean("flipped_share") or 0.0

    @property
    def worst(self) -> Row:
        """The router that flips most."""
        return max(self.rows, key=lambda row: row["flipped_share"])

    @property
    def any_share(self) -> float | None:
        """Share of tokens that flip at one router at least."""
        tokens = self.facts.get("num_tokens_all_layers")
        return self.facts["num_flipped_any_layer"] / tokens if tokens else None

    @property
    def near(self) -> tuple[int, float, float] | None:
        """Number of flips at all routers where margins are known, the share of them among the
        tokens with the least margin, and the largest possible: below 1 where more tokens flip than
        are near. None without margins.
        """
        rows = [row for row in self.rows if row.get("flipped_near_share") is not None]
        if not rows:
            return None
        flips = [row["flipped_share"] * row["num_tokens"] for row in rows]
        near, most = (
            sum(map(operator.mul, flips, shares)) / sum(flips)
            for shares in (
                [row["flipped_near_share"] for row in rows],
                [min(1.0, NEAR / row["flipped_share"]) for row in rows],
            )
        )
        return round(sum(flips)), near, most

    @property
    def num_disproved(self) -> int:
        """Tokens, over all routers, that flipped although they were proved stable."""
        return sum(row["num_disproved"] or 0 for row in self.rows)

    @property
    def is_tied(self) -> bool:
        """Whether exact ties, which an engine may break either way, leave a range."""
        return any(row["flipped_share_least"] != row["flipped_share_most"] for row in self.rows)


@dataclass(frozen=True)
class BoundaryReport:
    """All variants of ``results``, in the order of their table.

    ``recorded`` are arithmetics whose effect the recording holds already, and at which routers.
    """

    summary: Summary
    variants: tuple[VariantFlips, ...]
    results: Results
    recorded: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def most_flipped(self) -> VariantFlips:
        """The variant that flips most; of a report that has some."""
        return max(self.variants, key=lambda variant: variant.flipped)

    def place(self, router: str) -> str:
        """The name of a router in words."""
        return self.summary.places([router])

    def column(self, name: str) -> dict[str, float]:
        """A column of the routers as stored, by router, where it has a value."""
        rows = self.summary.layers
        return {row["router"]: row[name] for row in rows if row.get(name) is not None}

    def mean(self, name: str) -> float | None:
        """Its mean over routers; None where no router has a value."""
        return mean_of(self.summary.layers, name)


def boundary_report_of(results: Results) -> BoundaryReport:
    """What the results say of their variants.

    Raises
    ------
    ResultsError
        When they hold none: a scan without ``--arith``.
    """
    whole = [row for row in results.rows("layers") if row["population"] == ALL]
    measured = [row for row in whole if row.get("flipped_share") is not None]
    facts = {row["variant"]: row for row in results.rows("variants")}
    names = [name for name in facts if not is_random(name)]
    present = [name for name in names if any(row["variant"] == name for row in measured)]
    parts = results.run.get("parts", {})
    recorded: dict[str, list[str]] = {}
    for router, part in parts.items():
        for name in part.get("recorded_effects", ()):
            recorded.setdefault(name, []).append(router)
    if not present and not recorded:
        reasons = [why for part in parts.values() if (why := part.get("reasons", {}).get("flips"))]
        raise ResultsError(
            f"{results.name}: holds no variants"
            + (f": {reasons[0]}." if reasons else "; expected results of boundary-report."),
            "moegeom boundary-report CKPT --tokens REC measures them.",
        )
    swaps = results.rows("swaps") if "swaps" in results.tables() else []

    def rows(variant: str) -> list[Row]:
        return [row for row in measured if row["variant"] == variant]

    variants = []
    for name in present:
        other = under_random(name)
        random = VariantFlips(other, facts.get(other, {}), rows(other))
        variants.append(VariantFlips(name, facts[name], rows(name), _most(swaps, name), random))
    return BoundaryReport(summarise(results), tuple(variants), results, recorded)


def _most(swaps: Sequence[Row], variant: str) -> list[Row]:
    """The pairs with the largest share of the exchanges at their router, both ways together."""
    shares: dict[tuple[str, int, int], float] = {}
    for row in swaps:
        if row["variant"] == variant and row["population"] == ALL:
            pair = row["router"], *sorted((row["expert_out"], row["expert_in"]))
            shares[pair] = shares.get(pair, 0.0) + row["share"]
    return [
        {"router": router, "first": first, "second": second, "share": share}
        for (router, first, second), share in sorted(shares.items(), key=lambda pair: -pair[1])
    ]
