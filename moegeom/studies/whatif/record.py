"""What each what-if chooses, over all routers of a results directory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moegeom.core.errors import ResultsError
from moegeom.core.option import argument, option
from moegeom.core.row_keys import ALL, AS_STORED
from moegeom.document.study import mean_of
from moegeom.document.summary import Summary, summarise
from moegeom.engine.request import OF_RUN_B, MeasureOptions, ScanRequest
from moegeom.results.reader import Results
from moegeom.variants.what_if import parse_what_ifs

Row = Mapping[str, Any]


@dataclass(frozen=True)
class WhatIfRequest(ScanRequest):
    """A scan request with ``what_ifs``, and those of the file ``grid``."""

    ENDING: ClassVar[str] = "whatif"

    PYTHON_ONLY: ClassVar[tuple[str, ...]] = (
        *(*MeasureOptions.PYTHON_ONLY, "batch_tokens", "per_token", "reference", "noise"),
        *("checkpoint_b", "experts", *OF_RUN_B),
    )

    checkpoint: str = argument(
        "Checkpoint, or results of an earlier whatif.", outside_plan="a path"
    )
    _: dataclasses.KW_ONLY
    grid: Path | None = option("A sweep: a TOML file with lists of values for each NAME.")
    arithmetics: tuple[str, ...] = option(
        "An arithmetic: how much weight it moves with each what-if.", ()
    )


@dataclass(frozen=True)
class Tried:
    """A choice on the tokens, of the router as stored or of a what-if: a row for each router.

    ``top_k`` is the number of experts of a token at each router, where all tokens have as many.
    ``figures`` are what fit and sample say, by router; ``refused`` says of the others why the
    what-if means nothing there. ``reasons`` say of metrics why they are missing.
    """

    name: str
    rows: Mapping[str, Row]
    top_k: Mapping[str, int | None]
    figures: Mapping[str, Mapping[str, float]]
    refused: Mapping[str, str]
    reasons: Mapping[str, str]
    notes: tuple[str, ...]
    is_causal: bool = True

    def mean(self, column: str) -> float | None:
        """Mean over routers; None where no router has a value."""
        return mean_of(self.rows.values(), column)

    def experts(self, router: str) -> float:
        """Mean number of experts of a token."""
        return self.rows[router].get("num_chosen_mean") or float(self.top_k[router] or 0)

    @property
    def experts_mean(self) -> float:
        """The same, mean over routers."""
        return sum(map(self.experts, self.rows)) / len(self.rows)


@dataclass(frozen=True)
class WhatIfReport:
    """The router as stored and every what-if, in the order in which they were asked for."""

    summary: Summary
    stored: Tried
    what_ifs: tuple[Tried, ...]
    results: Results

    @property
    def tried(self) -> list[Tried]:
        """The what-ifs that apply to at least one router."""
        return [one for one in self.what_ifs if one.rows]

    @property
    def whole(self) -> list[Tried]:
        """The what-ifs computed at every router with tokens, so that their means compare."""
        return [one for one in self.tried if one.rows.keys() >= self.stored.rows.keys()]

    @property
    def points(self) -> list[tuple[Tried, float, float]]:
        """Those that have both means, with them: routing weight moved, and MaxVio."""
        return [
            (one, moved, vio)
            for one in self.whole
            if (moved := one.mean("weight_moved_mean")) is not None
            and (vio := one.mean("max_vio_global")) is not None
        ]

    @property
    def front(self) -> list[Tried]:
        """Of those tried at every router the ones that no other one beats in both MaxVio and weight
        moved: the router as stored first, then by weight moved.
        """
        now, front, least = self.stored.mean("max_vio_global"), [], math.inf
        points = [(self.stored, 0.0, now), *self.points] if now is not None else self.points
        for one, _, vio in sorted(points, key=lambda point: point[1:]):
            if vio < least:
                front.append(one)
                least = vio
        return front


def what_if_report_of(results: Results) -> WhatIfReport:
    """What the results say of their what-ifs.

    Raises
    ------
    ResultsError
        When they hold none: a scan without ``--router``.
    """
    parts = results.run.get("parts", {})
    measured = {name for part in parts.values() for name in part.get("what_ifs", {})}
    specs = results.run.get("plan", {}).get("options", {}).get("what_ifs") or ()
    names = [one.name for one in parse_what_ifs(specs) if one.name in measured]
    if not names:
        raise ResultsError(
            f"{results.name}: holds no what-ifs; expected results of whatif.",
            "moegeom whatif CKPT --tokens REC --router SPEC measures them.",
        )
    rows = [row for row in results.rows("layers") if row["population"] == ALL]
    top_k = {router["name"]: router["top_k"] for router in results.run["routers"]}
    whole = {
        variant: {row["router"]: row for row in rows if row["variant"] == variant}
        for variant in (AS_STORED, *names)
    }
    stored = {name: row for name, row in whole[AS_STORED].items() if row.get("num_tokens")}
    return WhatIfReport(
        summary=summarise(results),
        stored=Tried("as stored", stored, top_k, {}, {}, {}, ()),
        what_ifs=tuple(_tried(name, whole[name], parts) for name in names),
        results=results,
    )


def _tried(name: str, rows: Mapping[str, Row], parts: Mapping[str, Any]) -> Tried:
    facts = {
        router: part["what_ifs"][name]
        for router, part in parts.items()
        if name in part.get("what_ifs", {})
    }
    made = {router: one for router, one in facts.items() if "refused" not in one}
    return Tried(
        name=name,
        rows={router: row for router, row in rows.items() if router in made},
        top_k={router: one["top_k"] for router, one in made.items()},
        figures={router: one["figures"] for router, one in made.items()},
        refused={router: one["refused"] for router, one in facts.items() if router not in made},
        reasons={metric: why for one in made.values() for metric, why in one["reasons"].items()},
        notes=tuple(dict.fromkeys(note for one in made.values() for note in one["notes"])),
        is_causal=all(one["is_causal"] for one in made.values()),
    )
