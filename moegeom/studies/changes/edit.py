"""An edit: one thing that may have been done to a router between two checkpoints.

One record says how it is fitted and in how many bits, what it is called, what it means for choices,
how a sign-off ends by it, and whether the gate takes it for a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from moegeom.core.finding import Severity
from moegeom.core.registry import Rooms
from moegeom.core.router import Router, Rule
from moegeom.core.shapes import Bool, Float64, Int64
from moegeom.geometry.rows import size
from moegeom.studies.changes.record import Change
from moegeom.studies.changes.row_pair import BiasPair, RowPair, row_pair

# --------------------------------------------------------------------------------------- judgements
#: How one change ends a sign-off.
EndState = Literal["failed", "inconclusive", "passed"]


@dataclass(frozen=True)
class Judgement:
    """The state in which one change ends a sign-off, and the sentence that says ``why``."""

    state: EndState
    why: str


@dataclass(frozen=True, eq=False)
class Exported:
    """Both routers, for a judge of a change: row i of ``b`` was row ``place[i]`` of ``a``.

    ``experts_followed`` their rows, as samples of all of them tell; None where nothing tells it.
    """

    a: Router
    b: Router
    place: Int64[np.ndarray, "experts"]
    experts_followed: bool | None = None

    def own_rounding(self) -> float:
        """Largest relative change of A's rows from rounding them once more to A's own precision."""
        own = row_pair(self.a, self.a, np.arange(self.a.num_experts))
        # the pair bounds the rounding of both of its sides
        return 0.5 * size(own.half_step) / own.length if own.length > 0.0 else 0.0

    def moved(self) -> float:
        """The relative change of the effective rows, a common vector removed."""
        with np.errstate(invalid="ignore", over="ignore"):  # casts are told of infinities too
            return row_pair(self.a, self.b, self.place).change_size


Judge = Callable[[Change, Exported], Judgement]

#: What a change means for routers of a rule.
Meaning = Callable[[Rule], str]


def always(state: EndState) -> Judge:
    """A judge that ends in one state and says what the change means."""
    return lambda change, pair: Judgement(state, change.meaning)


#: The judge of what makes another function of a router, always.
FAILED = always("failed")


# --------------------------------------------------------------------------------------------- fits
@dataclass(frozen=True, eq=False)
class EditFit:
    """The rows of B, or its biases of one kind, that the edit predicts; the ``bits`` of parameters.

    The saving is measured on ``rows``, or on ``measured`` where another factor is still to be
    fitted; ``saved`` overrides the measured saving (bits), for exact edits. ``place`` are the
    places in A of the rows, where they changed; ``steps`` multiply the rounding. ``of_rows`` are
    the rows that it changes; ``allows_subset`` where it may change some rows or columns only.
    ``is_stored`` where the rows are still those that A stores.
    """

    rows: Float64[np.ndarray, "experts *dimension"]
    bits: float
    kind: str = ""
    detail: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    size: float | None = None
    measured: Float64[np.ndarray, "experts dimension"] | None = None
    saved: float | None = None
    place: Int64[np.ndarray, "experts"] | None = None
    steps: float | Float64[np.ndarray, "experts 1"] = 1.0
    of_rows: Bool[np.ndarray, "experts"] | None = None
    allows_subset: bool = False
    is_stored: bool = False


#: The row of A that each row of B is, where numbers of rows differ, and how that is told.
PlacedRows = tuple[Int64[np.ndarray, "experts"], EditFit]


@dataclass(frozen=True)
class Edit:
    """One thing that may have been done, which is its ``name``.

    ``phrase`` may hold ``{kind}`` (a qualifier) and ``{size}`` (a share, as a percentage);
    ``meaning`` is a sentence for routers of a rule: whether tokens choose other experts. ``fit``
    and ``fit_bias`` propose parameters, ``fit_places`` for routers with other numbers of rows;
    ``of_rest`` tells it of what all fits together leave.
    ``of_some`` is its meaning for some rows or columns alone, where that is another.
    ``judge`` is the state and sentence of a sign-off, ``gate`` what ``check`` makes of it beside a
    baseline, None where it is no fault by itself or a check of its own judges it.
    """

    name: str
    phrase: str
    meaning: Meaning | str
    judge: Judge = FAILED
    fit: Callable[[RowPair], Iterable[EditFit]] = lambda pair: ()
    fit_bias: Callable[[BiasPair], Iterable[EditFit]] = lambda pair: ()
    of_rest: Callable[[RowPair], Iterable[EditFit]] = lambda pair: ()
    fit_places: Callable[[Router, Router], Iterable[PlacedRows]] = lambda a, b: ()
    gate: Callable[[Change], Severity | None] = lambda change: None
    of_some: str = ""

    def change(
        self,
        rule: Rule,
        fit: EditFit | None = None,
        where: str = "",
        subject: str = "rows",
        kind: str = "",
        size: float | None = None,
        detail: str = "",
        **evidence: Any,
    ) -> Change:
        """The change in these words, or in those of a fit; ``where`` are some rows."""
        if fit is not None:
            kind, size, detail = fit.kind, fit.size, fit.detail
            evidence = {**fit.evidence, **evidence}
        phrase = self.phrase.replace("{kind}", kind).strip()
        phrase += f", {where}" if where else ""
        meaning = self.meaning if isinstance(self.meaning, str) else self.meaning(rule)
        meaning = self.of_some if where and self.of_some else meaning
        return Change(self.name, phrase, meaning, size, detail, evidence, subject)


EDITS: Rooms[Edit] = Rooms("edit", "moegeom.studies.changes.operators", Edit)


def error(change: Change) -> Severity | None:
    """An error in any case."""
    return "error"


def error_if_exact(change: Change) -> Severity | None:
    """An error where the edit leaves only rounding: training never matches to the last digit."""
    return "error" if change.evidence.get("is_exact") else None
