"""What the gate reads beside figures: what the config says, and rows that look drawn."""

from __future__ import annotations

from typing import Any

from moegeom.checkpoint.open import open_checkpoint
from moegeom.results.memory import MemoryResults
from moegeom.results.reader import ResultsView
from moegeom.router.claims import config_claims
from moegeom.router.drawn_rows import drawn_row_facts
from moegeom.router.load import plan_routers
from moegeom.studies.check.record import GateRequest


def looked_closer(request: GateRequest, results: ResultsView) -> MemoryResults:
    """The same results with facts that checks of the config and of single rows need.

    Headers and config are read again; a router only where some of its rows have the length of
    drawn ones.
    """
    planned = plan_routers(
        open_checkpoint(request.target, request.remote), request.layers, request.asked
    )
    facts: dict[str, Any] = config_claims(planned)
    experts = results.rows("experts")
    if drawn := results.run.get("initialised"):
        lengths: dict[str, list[float | None]] = {}
        for row in experts:
            if (row["variant"], row["population"]) == ("as_stored", "all"):
                lengths.setdefault(row["router"], []).append(row.get("row_norm"))
        facts["drawn_rows"] = drawn_row_facts(planned, drawn["initializer_range"], lengths)
    tables = {"layers": results.rows("layers"), "experts": experts}
    return MemoryResults({**results.run, **facts}, tables)
