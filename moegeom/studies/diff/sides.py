"""The two sides of a difference: checkpoints with their routers, or results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moegeom.core.errors import about
from moegeom.core.router import RouterSet
from moegeom.core.text import number_of
from moegeom.document.header import left_out_text
from moegeom.document.rule_brief import rule_brief
from moegeom.document.rule_trust import assumed, rule_status, rule_trust
from moegeom.engine.run_facts import router_facts
from moegeom.engine.session import Session
from moegeom.pipeline import Terms, lint
from moegeom.results.reader import Results, ResultsView, results_at
from moegeom.router.rule import rule_origin
from moegeom.studies.diff.record import DifferenceRequest, Side


@dataclass(frozen=True, eq=False)
class OpenedSide:
    """One side: a checkpoint (``session``), or ``results``."""

    target: str
    terms: Terms
    session: Session | None = None
    results: ResultsView | None = None

    @cached_property
    def routers(self) -> RouterSet | None:
        """The routers with weights of the layers asked for; None for results."""
        if self.session is None:
            return None
        weighed = self.session.on(None)
        return dataclasses.replace(weighed.routers, routers=weighed.chosen)

    @cached_property
    def weights(self) -> ResultsView:
        """Results on the weights alone; measured here for a checkpoint."""
        if self.results is not None:
            return self.results
        return lint(self.target, self.terms, self.session)

    def names(self) -> list[str]:
        """Names of the routers of this side."""
        if self.routers is not None:
            return [router.name for router in self.routers.routers]
        return [router["name"] for router in self.weights.run["routers"]]


def open_side(target: str | Results, request: DifferenceRequest) -> OpenedSide:
    """Opens a checkpoint, reading its routers, or results."""
    if (results := results_at(target)) is not None:
        name = target if isinstance(target, str) else target.name
        return OpenedSide(name, request, results=results)
    assert isinstance(target, str)
    has_tokens = bool(request.tokens)
    with about("checkpoint", target):
        opened = Session.of(target, request, with_listed=has_tokens, is_whole=has_tokens)
    return OpenedSide(target, request, opened)


def describe(side: OpenedSide, tokens: str = "") -> Side:
    """What the header says of a side, and on which tokens it was measured."""
    if side.routers is not None and side.session is not None:
        model = side.routers
        origin = assumed(rule_origin(model.family))
        brief = rule_brief(model.family_text, [router_facts(router) for router in model.routers])
        return Side(
            name=side.target,
            kind="checkpoint",
            rule=f"{model.family}: {brief}; rule {origin}",
            num_routers=len(model.routers),
            bytes_read=side.session.store.bytes_read,
            bytes_total=model.bytes_total,
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
        tokens=tokens or tokens_line(run),
        rule_status=rule_status(run) or "",
    )


def tokens_line(run: Mapping[str, Any]) -> str:
    """On which tokens results were measured; empty where on none."""
    tokens = run.get("tokens")
    if tokens is None:
        return ""
    num_documents = tokens["num_documents"]
    documents = f" in {number_of(num_documents, 'document')}" if num_documents else ""
    stale = (run.get("trust") or {}).get("fingerprint") == "differs"
    of = ", RECORDED FROM ANOTHER CHECKPOINT (stale inputs allowed)" if stale else ""
    return f"{tokens['num_tokens']:,}{documents} ({tokens['name']}){of}{left_out_text(run)}"
