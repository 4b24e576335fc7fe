"""The record of a difference: what a study found and its document tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moegeom.core.option import argument, option
from moegeom.engine.request import CHECKPOINT, OutTerms, RunTerms, Tokens
from moegeom.results.reader import Results
from moegeom.studies.changes.record import ExpertsChange, RouterChange


@dataclass(frozen=True)
class DifferenceRequest(OutTerms, RunTerms):
    """What was asked for. ``a`` and ``b`` are checkpoints, or results, in folders or in memory.

    ``tokens`` holds nothing, one recording for both checkpoints, or one for each. With ``experts``
    a sample of the expert weights is read. ``out`` keeps the results of the scans.
    """

    a: str | Results = argument(f"Before: results of a scan, or a checkpoint: {CHECKPOINT}.")
    b: str | Results = argument("After: the same kinds.")
    _: dataclasses.KW_ONLY
    experts: bool = option("Read a sample of expert weights: did experts move along?", False)
    tokens: Sequence[Tokens] = option("Recording; twice, for A and B, or once for both.", ())
    out: Path | None = option("Keep the results of the scans here: a.moegeom, b.moegeom.")


@dataclass(frozen=True)
class Side:
    """One of the two things that are compared.

    ``kind`` is "checkpoint" or "results". ``tokens`` says on which tokens it was measured; empty
    when on none. Bytes are 0 for results. ``rule_status`` is "verified" or "assumed".
    """

    name: str
    kind: str
    rule: str
    num_routers: int
    bytes_read: int = 0
    bytes_total: int = 0
    tokens: str = ""
    rule_status: str = ""


@dataclass(frozen=True)
class FigureChange:
    """One figure of one router in both results.

    ``error`` is the standard error of ``after - before`` and ``p_value`` that of "no difference",
    for this comparison alone; ``is_significant`` counts all comparisons of the run. ``detectable``
    is the difference that would have been found nine times in ten.
    """

    router: str
    column: str
    text: str
    before: float
    after: float
    error: float
    p_value: float
    is_significant: bool = False
    detectable: float = 0.0

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Figures:
    """All comparisons of figures, with what was not compared and why (reason -> columns)."""

    tests: Sequence[FigureChange]
    level: float
    num_tokens: tuple[int, int]
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def significant(self) -> list[FigureChange]:
        """Worst first."""

        def badness(test: FigureChange) -> tuple[float, float]:
            return test.p_value, -abs(test.change) / test.error if test.error else 0.0

        return sorted((test for test in self.tests if test.is_significant), key=badness)


@dataclass(frozen=True)
class Difference:
    """Two checkpoints or results, router by router and figure by figure.

    ``unlike`` says what makes them of different kinds: family, rule, shape. ``only_first`` and
    ``only_second`` name routers without a partner. ``figures`` is None when figures were not
    compared; ``notes`` says why, and what else a reader must know.
    ``skipped`` are tensors that look like routers and are none.
    """

    sides: tuple[Side, Side]
    routers: Sequence[RouterChange]
    unlike: Sequence[str] = ()
    only_first: Sequence[str] = ()
    only_second: Sequence[str] = ()
    figures: Figures | None = None
    notes: Sequence[str] = ()
    not_looked_at: Sequence[str] = ()
    skipped: Sequence[str] = ()

    @property
    def experts(self) -> dict[str, ExpertsChange]:
        """What samples of experts show, by router; without routers of which none was."""
        return {r.router: r.experts for r in self.routers if r.experts and r.experts.sampled}

    @property
    def routers_of_other_experts(self) -> list[str]:
        """Routers some of whose sampled experts have other weights."""
        return [name for name, one in self.experts.items() if one.changed]
