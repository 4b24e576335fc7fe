"""The two sides of a difference: checkpoints with their routers, or results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import about
from moegeom.core.router import RouterSet
from moegeom.core.text import number_of
from moegeom.document.rule_brief import rule_brief
from moegeom.document.rule_trust import assumed, rule_status, rule_trust
from moegeom.engine.run_facts import router_facts
from moegeom.pipeline import Terms, lint
from moegeom.results.reader import ResultsView, is_results, open_results
from moegeom.router.describe import rule_origin
from moegeom.router.load import load_routers
from moegeom.studies.diff.record import Side


@dataclass(frozen=True, eq=False)
class Opened:
    """One side: a checkpoint with its routers (``store`` and ``routers``), or ``results``."""

    target: str
    terms: Terms
    store: TensorStore | None = None
    routers: RouterSet | None = None
    results: ResultsView | None = None

    @cached_property
    def weights(self) -> ResultsView:
        """What results tell of the weights; measured here for a checkpoint."""
        return lint(self.target, self.terms) if self.results is None else self.results

    def names(self) -> list[str]:
        """Names of the routers of this side."""
        if self.routers is not None:
            return [router.name for router in self.routers.routers]
        return [router["name"] for router in self.weights.run["routers"]]


def open_side(target: str, terms: Terms) -> Opened:
    """Opens a checkpoint, reading its routers, or results."""
    if is_results(target):
        return Opened(target, terms, results=open_results(target))
    with about("checkpoint", target):
        store = open_checkpoint(target, terms.remote)
        routers = load_routers(store, terms.layers, terms.asked)
    return Opened(target, terms, store, routers)


def describe(side: Opened, measured: ResultsView | None) -> Side:
    """What the header says of a side; ``measured`` holds its results on tokens."""
    tokens = "" if measured is None else _tokens(measured.run)
    if side.routers is not None and side.store is not None:
        found = side.routers
        known = assumed(rule_origin(found.family))
        brief = rule_brief(found.family_text, [router_facts(router) for router in found.routers])
        return Side(
            name=side.target,
            kind="checkpoint",
            rule=f"{found.family}: {brief}; rule {known}",
            num_routers=len(found.routers),
            bytes_read=side.store.bytes_read,
            bytes_total=found.bytes_total,
            tokens=tokens,
            rule_status="assumed",
        )
    assert side.results is not None
    run = side.results.run
    checkpoint = run["checkpoint"]
    brief = rule_brief(checkpoint["rule"], run["routers"])
    return Side(
        name=f"{side.target} of {checkpoint['name']}",
        kind="results",
        rule=f"{checkpoint['family']}: {brief}; rule {rule_trust(run)}",
        num_routers=len(run["routers"]),
        tokens=tokens or _tokens(run),
        rule_status=rule_status(run) or "",
    )


def _tokens(run: Mapping[str, Any]) -> str:
    tokens = run.get("tokens")
    if tokens is None:
        return ""
    known = tokens["num_documents"]
    documents = f" in {number_of(known, 'document')}" if known else ""
    stale = (run.get("trust") or {}).get("fingerprint") == "differs"
    of = ", RECORDED FROM ANOTHER CHECKPOINT (stale inputs allowed)" if stale else ""
    return f"{tokens['num_tokens']:,}{documents} ({tokens['name']}){of}"
