"""The two sides of a difference: checkpoints with their routers, or results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.store import TensorStore
from moegeom.core.router import RouterSet
from moegeom.pipeline import lint, recalled
from moegeom.report.differences import Side
from moegeom.results.known_rules import LEAST_SHARE
from moegeom.results.reader import ResultsView, is_results, open_results
from moegeom.router.asked_family import NOTHING_ASKED, AskedFamily
from moegeom.router.load import load_routers


@dataclass(frozen=True, eq=False)
class Opened:
    """One side: a checkpoint with its routers (``store`` and ``routers``), or ``results``."""

    target: str
    layers: str | None
    store: TensorStore | None = None
    routers: RouterSet | None = None
    results: ResultsView | None = None
    asked: AskedFamily = NOTHING_ASKED
    rules: Path | None = None

    @cached_property
    def weights(self) -> ResultsView:
        """What results tell of the weights; measured here for a checkpoint."""
        return (
            lint(self.target, self.layers, self.asked, self.rules)
            if self.results is None
            else self.results
        )


def open_side(
    target: str,
    layers: str | None,
    asked: AskedFamily = NOTHING_ASKED,
    rules: Path | None = None,
) -> Opened:
    """Opens a checkpoint, reading its routers, or results."""
    if is_results(target):
        return Opened(target, layers, results=open_results(target))
    store = open_checkpoint(target)
    routers = recalled(load_routers(store, layers, asked), rules)
    return Opened(target, layers, store, routers, asked=asked, rules=rules)


def describe(side: Opened, measured: ResultsView | None) -> Side:
    """What the header says of a side; ``measured`` holds its results on tokens."""
    tokens = "" if measured is None else _tokens(measured.run)
    if side.routers is not None and side.store is not None:
        found = side.routers
        return Side(
            name=side.target,
            kind="checkpoint",
            rule=f"{found.family}: {found.family_text}; rule {_trust(found.verified_by)}",
            num_routers=len(found.routers),
            bytes_read=side.store.bytes_read,
            bytes_total=found.bytes_total,
            tokens=tokens,
        )
    assert side.results is not None
    run = side.results.run
    checkpoint = run["checkpoint"]
    return Side(
        name=f"{side.target} of {checkpoint['name']}",
        kind="results",
        rule=f"{checkpoint['family']}: {checkpoint['rule']}; rule {_trust(_verified_by(run))}",
        num_routers=len(run["routers"]),
        tokens=tokens or _tokens(run),
    )


def _trust(verified_by: str) -> str:
    return verified_by or "assumed from config"


def _verified_by(run: Mapping[str, Any]) -> str:
    """What verified the rule: choices recorded with the tokens of these results, or before."""
    trust = run.get("trust") or {}
    share = trust.get("share_reproduced")
    if share is not None and share >= LEAST_SHARE and not trust.get("overridden"):
        return "verified by recorded choices"
    return run["checkpoint"].get("verified_by") or ""


def _tokens(run: Mapping[str, Any]) -> str:
    tokens = run.get("tokens")
    if tokens is None:
        return ""
    documents = f" in {tokens['num_documents']:,} documents" if tokens["num_documents"] else ""
    stale = (run.get("trust") or {}).get("fingerprint") == "differs"
    of = ", RECORDED FROM ANOTHER CHECKPOINT (stale inputs allowed)" if stale else ""
    return f"{tokens['num_tokens']:,}{documents} ({tokens['name']}){of}"
