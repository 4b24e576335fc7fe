"""How far each row of a router has moved since the baseline, and what was done to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moegeom.checks.check import Unknown
from moegeom.checks.measured import Measured, Row
from moegeom.core.finding import Severity
from moegeom.core.shapes import Bool, Float, Float64, Int64


def spread_of(bias: Float[np.ndarray, "experts"]) -> float:
    """Standard deviation of biases; inf where their squares leave the range of numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        spread = float(bias.std())
    return spread if np.isfinite(spread) else np.inf


@dataclass(frozen=True)
class SinceBaseline:
    """One thing that happened since the baseline; ``subject`` is ``rows`` or a kind of bias.

    ``text`` says what, ``meaning`` what follows; ``severity`` is None where it is no fault by
    itself, or another check judges it.
    """

    word: str
    text: str
    meaning: str
    subject: str
    severity: Severity | None


@dataclass(frozen=True, eq=False)
class Drift:
    """One router beside its baseline.

    ``place[i]`` is the row of the baseline that row i is compared with: i, unless rows changed
    places. ``moved[i]`` is by how much, over its length, beside what ``changes`` say and what
    changes no choice; from 32 projections, which are right where the row was scaled, turned round
    or zeroed, else true to 12 % (one standard error). ``size`` is that of all rows together, as
    ``diff`` tells it.
    """

    place: Int64[np.ndarray, "experts"]
    moved: Float64[np.ndarray, "experts"]
    size: float
    changes: tuple[SinceBaseline, ...] = ()

    @property
    def renumbered(self) -> Bool[np.ndarray, "experts"]:
        """Rows that are found in another place of the baseline."""
        return self.place != np.arange(len(self.place))

    def faults(self, subject: str) -> tuple[SinceBaseline, ...]:
        """What was done to the rows, or to a bias, that is a fault by itself."""
        return tuple(c for c in self.changes if c.severity is not None and c.subject == subject)

    def is_trained(self) -> bool:
        """Whether the rows changed as training changes them: without a pattern."""
        return {c.word for c in self.changes if c.subject == "rows"} <= {"trained on"}


def drifts(measured: Measured) -> Iterator[tuple[Row, Drift] | Unknown]:
    """Every router that the baseline knows, with its drift, or why it cannot be compared."""
    for row in measured.layers:
        router = row["router"]
        before = measured.before(router)
        if before is None:
            continue
        drift = measured.drifts.get(router)
        if drift is not None:
            yield row, drift
        elif len(measured.experts[router]) == len(before.norms):  # else MGI124 says so
            yield Unknown(router, "its rows cannot be compared: infinite, or not measured")


def places_in_baseline(measured: Measured, router: str) -> Int64[np.ndarray, "experts"]:
    """The expert of the baseline that each expert is, if its row was renumbered."""
    drift = measured.drifts.get(router)
    if drift is None or len(set(drift.place.tolist())) < len(drift.place):
        return np.arange(len(measured.experts[router]))
    return drift.place
